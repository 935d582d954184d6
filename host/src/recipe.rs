//! What is asked for: the format, and everything that decides the bytes.

use std::fmt;
use std::str::FromStr;

use microscale_formats::nvfp4::{BlockScale, Direction, GlobalScale, Quotient};
use microscale_formats::{E2m1, E4m3, E5m2, NegativeZero, ScaleLayout, ScaleRule, Search, Ties, mx, nvfp4};

use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::tensor::Shape;

/// A microscaling format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Format {
    /// Blocks of 32 E2M1 elements with an E8M0 scale (OCP MX v1.0).
    #[default]
    Mxfp4,
    /// Blocks of 16 E2M1 elements with an E4M3 scale, under a global scale (NVIDIA).
    Nvfp4,
    /// Blocks of 32 E4M3 elements with an E8M0 scale (OCP MX v1.0).
    Mxfp8E4m3,
    /// Blocks of 32 E5M2 elements with an E8M0 scale (OCP MX v1.0).
    Mxfp8E5m2,
}

impl Format {
    /// Elements that share a scale.
    pub const fn block(self) -> usize {
        match self {
            Self::Nvfp4 => nvfp4::BLOCK,
            Self::Mxfp4 | Self::Mxfp8E4m3 | Self::Mxfp8E5m2 => mx::BLOCK,
        }
    }

    /// Bits of an element's code.
    pub const fn bits(self) -> usize {
        match self {
            Self::Mxfp4 | Self::Nvfp4 => <E2m1 as mx::Element>::BITS,
            Self::Mxfp8E4m3 => <E4m3 as mx::Element>::BITS,
            Self::Mxfp8E5m2 => <E5m2 as mx::Element>::BITS,
        }
    }

    /// Bytes of packed codes in a block.
    pub const fn block_bytes(self) -> usize {
        self.block() * self.bits() / 8
    }

    /// Whether a scale byte is a NaN, and its block with it.
    pub fn is_nan_scale(self, scale: u8) -> bool {
        match self {
            Self::Nvfp4 => E4m3::from_bits(scale).is_nan(),
            Self::Mxfp4 | Self::Mxfp8E4m3 | Self::Mxfp8E5m2 => scale == mx::NAN_SCALE.to_bits(),
        }
    }

    /// Whether a block scale can have this byte. The sign bit of an NVFP4 scale is not a sign: such tensors mean something
    /// else (IF4 uses the bit as a flag) and are refused.
    pub const fn is_scale(self, scale: u8) -> bool {
        !matches!(self, Self::Nvfp4) || !E4m3::from_bits(scale).is_sign_negative()
    }
}

/// What is done about NaN and infinities. Whatever the policy, they are counted in the report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NonFinite {
    /// Refuse, naming the first one's row and column.
    #[default]
    Error,
    /// The block becomes NaN: codes 0 and the scale byte that is NaN, 255 or NVFP4's 0x7F.
    Propagate,
    /// ±Inf becomes the largest finite value of the input's dtype, NaN becomes 0.
    Saturate,
}

/// A named convention: the choices of one library, taken together.
///
/// The slips that some of these libraries make next to powers of two or at extreme exponents are not reproduced; the
/// README's compatibility table says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Convention {
    /// OCP MX v1.0, which is torchao's default for the MX formats: floor, ties to even, −0 kept.
    Ocp,
    /// torchao: OCP's MX formats, and NVFP4 with a multiplier.
    Torchao,
    /// compressed-tensors (vLLM's llm-compressor).
    CompressedTensors,
    /// NVIDIA ModelOpt.
    Modelopt,
    /// NVIDIA Transformer Engine, and FlashInfer with exact math: NVFP4 with a divisor.
    TransformerEngine,
    /// ggml (llama.cpp): floor, ties toward zero, no −0.
    Ggml,
}

impl Convention {
    /// The convention that is taken for a format if none is named: OCP's own for the MX formats, and for NVFP4 the one that
    /// loaders of checkpoints expect.
    pub const fn default_for(format: Format) -> Self {
        match format {
            Format::Mxfp4 | Format::Mxfp8E4m3 | Format::Mxfp8E5m2 => Self::Ocp,
            Format::Nvfp4 => Self::CompressedTensors,
        }
    }

    /// The MXFP4 arithmetic of the convention, if it has one: the table of MXFP4's conventions. NVFP4's is
    /// [`nvfp4::Arithmetic`]'s constants.
    pub const fn mxfp4(self) -> Option<mx::Arithmetic> {
        let (scale_rule, ties, negative_zero) = match self {
            Self::Ocp | Self::Torchao => (ScaleRule::Floor, Ties::Even, NegativeZero::Keep),
            Self::CompressedTensors => (ScaleRule::Even, Ties::Even, NegativeZero::DropInput),
            Self::Modelopt => (ScaleRule::Rceil, Ties::Zero, NegativeZero::Force),
            Self::Ggml => (ScaleRule::Floor, Ties::Zero, NegativeZero::Drop),
            Self::TransformerEngine => return None,
        };
        Some(mx::Arithmetic { scale_rule, ties, negative_zero })
    }

    /// The NVFP4 arithmetic of the convention, if it has one.
    pub const fn nvfp4(self) -> Option<nvfp4::Arithmetic> {
        match self {
            Self::Torchao => Some(nvfp4::Arithmetic::TORCHAO),
            Self::CompressedTensors => Some(nvfp4::Arithmetic::COMPRESSED_TENSORS),
            Self::Modelopt => Some(nvfp4::Arithmetic::MODELOPT),
            Self::TransformerEngine => Some(nvfp4::Arithmetic::TRANSFORMER_ENGINE),
            Self::Ocp | Self::Ggml => None,
        }
    }

    /// What the convention does in a format; `None` if it has no such format. NVFP4's global scale is computed from amax.
    pub fn scheme(self, format: Format) -> Option<Scheme> {
        let is_ocp = matches!(self, Self::Ocp | Self::Torchao);
        match format {
            Format::Mxfp4 => self.mxfp4().map(Scheme::Mxfp4),
            Format::Nvfp4 => self.nvfp4().map(|arithmetic| Scheme::Nvfp4(arithmetic, Global::FromAmax)),
            Format::Mxfp8E4m3 => is_ocp.then_some(Scheme::Mxfp8E4m3(ScaleRule::Floor)),
            Format::Mxfp8E5m2 => is_ocp.then_some(Scheme::Mxfp8E5m2(ScaleRule::Floor)),
        }
    }
}

/// Where NVFP4's global scale comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Global {
    /// Computed from the tensor's amax, which is read first.
    #[default]
    FromAmax,
    /// Given. Its direction must be the arithmetic's.
    Given(GlobalScale),
    /// There is none: block scales stand alone, as under a global scale of 1.
    Absent,
}

/// A format with everything that decides the bytes of its blocks, given finite values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scheme {
    /// MXFP4.
    Mxfp4(mx::Arithmetic),
    /// NVFP4.
    Nvfp4(nvfp4::Arithmetic, Global),
    /// MXFP8 with E4M3 elements. Ties go to even and −0 is kept, as in every implementation.
    Mxfp8E4m3(ScaleRule),
    /// MXFP8 with E5M2 elements. Ties go to even and −0 is kept, as in every implementation.
    Mxfp8E5m2(ScaleRule),
}

impl Scheme {
    /// The format.
    pub const fn format(&self) -> Format {
        match self {
            Self::Mxfp4(_) => Format::Mxfp4,
            Self::Nvfp4(..) => Format::Nvfp4,
            Self::Mxfp8E4m3(_) => Format::Mxfp8E4m3,
            Self::Mxfp8E5m2(_) => Format::Mxfp8E5m2,
        }
    }

    /// The convention that this is, if it has a name.
    pub fn convention(&self) -> Option<Convention> {
        let without_global = match *self {
            Self::Nvfp4(arithmetic, _) => Self::Nvfp4(arithmetic, Global::FromAmax),
            scheme => scheme,
        };
        let mut conventions = Convention::WORDS.iter().map(|(_, convention)| *convention);
        conventions.find(|convention| convention.scheme(self.format()) == Some(without_global))
    }
}

impl Default for Scheme {
    fn default() -> Self {
        Self::Mxfp4(mx::Arithmetic::default())
    }
}

/// How to quantize. The default is OCP's MXFP4 with linear scales, refusing non-finite input.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Recipe {
    /// The format and its arithmetic.
    pub scheme: Scheme,
    /// How block scales are chosen.
    pub search: Search,
    /// Where scale bytes lie.
    pub scale_layout: ScaleLayout,
    /// What is done about NaN and infinities.
    pub non_finite: NonFinite,
}

impl Recipe {
    /// The recipe of a convention in a format.
    ///
    /// # Errors
    /// [`Error::NoConvention`] if the convention has no such format.
    pub fn of(format: Format, convention: Convention) -> Result<Self> {
        let scheme = convention.scheme(format).ok_or(Error::NoConvention { format, convention })?;
        Ok(Self { scheme, ..Self::default() })
    }

    /// The format.
    pub const fn format(&self) -> Format {
        self.scheme.format()
    }

    /// The same recipe with another global scale; nothing changes for formats that have none.
    pub const fn with_global(mut self, global: Global) -> Self {
        if let Scheme::Nvfp4(arithmetic, _) = self.scheme {
            self.scheme = Scheme::Nvfp4(arithmetic, global);
        }
        self
    }

    /// Everything that decides the bytes, name by name, for people and for JSON.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let mut facts = vec![("format", self.format().to_string())];
        if let Some(convention) = self.scheme.convention() {
            facts.push(("convention", convention.word().into()));
        }
        let mut add = |name, value: &str| facts.push((name, value.into()));
        match self.scheme {
            Scheme::Mxfp4(arithmetic) => {
                add("scale_rule", arithmetic.scale_rule.word());
                add("ties", arithmetic.ties.word());
                add("negative_zero", arithmetic.negative_zero.word());
            }
            Scheme::Mxfp8E4m3(rule) | Scheme::Mxfp8E5m2(rule) => add("scale_rule", rule.word()),
            Scheme::Nvfp4(arithmetic, global) => {
                add("block_scale", arithmetic.block_scale.word());
                add("quotient", arithmetic.quotient.word());
                add("negative_zero", arithmetic.negative_zero.word());
                match global {
                    Global::FromAmax => add("global_scale", "from amax"),
                    Global::Given(given) => add("global_scale", &given.value().to_string()),
                    Global::Absent => add("global_scale", "none"),
                }
                add("global_scale_direction", arithmetic.direction.word());
            }
        }
        add("search", self.search.word());
        add("scale_layout", self.scale_layout.word());
        add("non_finite", self.non_finite.word());
        facts
    }

    /// Checks a global scale that is given, and that the format's scales can be searched if they are to be. All operations
    /// do; this is for those who want to know before they begin.
    ///
    /// # Errors
    /// [`Error::NoSearch`], [`Error::GlobalScaleDirection`], [`Error::GlobalScale`].
    pub fn check(&self) -> Result<()> {
        if self.search != Search::None && self.format().bits() != <E2m1 as mx::Element>::BITS {
            return Err(Error::NoSearch { format: self.format() });
        }
        match self.scheme {
            Scheme::Nvfp4(arithmetic, Global::Given(given)) => {
                if given.direction() != arithmetic.direction {
                    return Err(Error::GlobalScaleDirection { given, expected: arithmetic.direction });
                }
                if !given.in_range() {
                    return Err(Error::GlobalScale { given });
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Checks weights by column.
pub(crate) fn check_importance(importance: Option<&[f32]>, shape: Shape) -> Result<()> {
    let Some(weights) = importance else { return Ok(()) };
    let wrong = weights.iter().position(|weight| !(*weight >= 0.0 && weight.is_finite()));
    if weights.len() != shape.cols || wrong.is_some() {
        return Err(Error::Importance { weights: weights.len(), columns: shape.cols, wrong });
    }
    Ok(())
}

/// Gives a type its words: `Display`, `FromStr`, and the list of them.
macro_rules! words {
    ($type:ty { $($variant:path = $word:literal),+ $(,)? }) => {
        impl Words for $type {
            const WORDS: &'static [(&'static str, Self)] = &[$(($word, $variant)),+];
        }
    };
}

/// Types that are named by one word on the command line, in JSON and in messages.
pub trait Words: Sized + Copy + PartialEq + 'static {
    /// Every word with its value.
    const WORDS: &'static [(&'static str, Self)];

    /// The word for this value.
    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(_, value)| *value == self).map_or("?", |(word, _)| word)
    }

    /// The value for a word.
    fn from_word(word: &str) -> Option<Self> {
        Self::WORDS.iter().find(|(known, _)| *known == word).map(|(_, value)| *value)
    }
}

words!(Format {
    Self::Mxfp4 = "mxfp4",
    Self::Nvfp4 = "nvfp4",
    Self::Mxfp8E4m3 = "mxfp8-e4m3",
    Self::Mxfp8E5m2 = "mxfp8-e5m2",
});
words!(Dtype { Self::F32 = "f32", Self::F16 = "f16", Self::Bf16 = "bf16" });
words!(NonFinite { Self::Error = "error", Self::Propagate = "propagate", Self::Saturate = "saturate" });
words!(ScaleRule { Self::Floor = "floor", Self::Ceil = "ceil", Self::Even = "even", Self::Rceil = "rceil" });
words!(Ties { Self::Even = "even", Self::Away = "away", Self::Zero = "zero" });
words!(NegativeZero {
    Self::Keep = "keep",
    Self::DropInput = "drop-input",
    Self::Drop = "drop",
    Self::Force = "force",
});
words!(Search {
    Self::None = "none",
    Self::FourSix = "four-six",
    Self::Window = "window",
    Self::Full = "full",
});
words!(ScaleLayout { Self::Linear = "linear", Self::Swizzled = "swizzled" });
words!(Direction { Self::Divisor = "divisor", Self::Multiplier = "multiplier" });
words!(BlockScale {
    Self::SixthOverGlobal = "(amax / 6) / s",
    Self::GlobalTimesNarrowSixth = "G * (amax / 6)",
    Self::OverSixGlobals = "amax / (6 * s)",
    Self::TimesSixthOfGlobal = "amax * (G * (1 / 6))",
});
words!(Quotient {
    Self::TimesInverseOverScale = "x * ((1 / s) / b)",
    Self::OverScaleOverGlobal = "x / (b / G)",
    Self::OverScaleTimesGlobal = "x / (b * s)",
    Self::TimesInverseOfProduct = "x * (1 / (b * (1 / G)))",
});
words!(Convention {
    Self::Ocp = "ocp",
    Self::Torchao = "torchao",
    Self::CompressedTensors = "compressed-tensors",
    Self::Modelopt = "modelopt",
    Self::TransformerEngine = "transformer-engine",
    Self::Ggml = "ggml",
});

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl FromStr for Convention {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        Self::from_word(word).ok_or_else(|| {
            let known: Vec<_> = Self::WORDS.iter().map(|(word, _)| *word).collect();
            format!("no convention is called {word}; there are {}", known.join(", "))
        })
    }
}
