//! The arithmetic that is asked for: a format's [`Scheme`], the [`Convention`] that it is named for, and the
//! treatment of NaN.

use microscale_formats::{
    ComparisonFormat, Format, GlobalScale, NegativeZero, ScaleRule, Ties, Words, mx, nvfp4, words,
};

use crate::element::Element;

/// The treatment of NaN and infinities. Whatever the policy, they are counted in the report.
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

impl NonFinite {
    /// The replacement of a value of dtype `T`, before its block is quantized.
    pub(crate) fn replaced<T: Element>(self, value: f32) -> f32 {
        match self {
            Self::Saturate if value.is_nan() => 0.0,
            Self::Saturate => value.clamp(-T::MAX, T::MAX),
            Self::Error | Self::Propagate => value,
        }
    }
}

/// A named convention: the choices of one library, taken together.
///
/// The slips that some of these libraries make next to powers of two or at extreme exponents are not
/// reproduced; docs/compatibility.md in the repository says which.
///
/// Conventions are read and written by name:
///
/// ```
/// use microscale::Convention;
///
/// let convention: Convention = "compressed-tensors".parse()?;
/// assert_eq!((convention, convention.to_string().as_str()), (Convention::CompressedTensors, "compressed-tensors"));
/// let error = "llama".parse::<Convention>().unwrap_err();
/// assert!(error.to_string().starts_with("unknown convention; there are ocp, torchao, "));
/// # Ok::<(), microscale::UnknownWord>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
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
    /// bitsandbytes: NF4.
    Bitsandbytes,
}

impl Convention {
    /// The convention that is taken for a format if none is named: OCP's own for the MX formats, and for
    /// NVFP4 the one that loaders of checkpoints expect.
    pub const fn default_for(format: Format) -> Self {
        match format {
            Format::Mxfp4 | Format::Mxfp8E4m3 | Format::Mxfp8E5m2 => Self::Ocp,
            Format::Nvfp4 => Self::CompressedTensors,
            Format::Comparison(format) => Self::of_comparison(format),
        }
    }

    /// The convention that the one arithmetic of a comparison format is.
    const fn of_comparison(format: ComparisonFormat) -> Self {
        match format {
            ComparisonFormat::Mxfp4E3m0 => Self::Ocp,
            ComparisonFormat::Nf4 => Self::Bitsandbytes,
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
            Self::TransformerEngine | Self::Bitsandbytes => return None,
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
            Self::Ocp | Self::Ggml | Self::Bitsandbytes => None,
        }
    }

    /// The convention's scheme in a format; `None` if it has no such format. NVFP4's global scale is computed
    /// from amax.
    pub fn scheme(self, format: Format) -> Option<Scheme> {
        let is_ocp = matches!(self, Self::Ocp | Self::Torchao);
        match format {
            Format::Mxfp4 => self.mxfp4().map(Scheme::Mxfp4),
            Format::Nvfp4 => self.nvfp4().map(|arithmetic| Scheme::Nvfp4(arithmetic, Global::FromAmax)),
            Format::Mxfp8E4m3 => is_ocp.then_some(Scheme::Mxfp8E4m3(ScaleRule::Floor)),
            Format::Mxfp8E5m2 => is_ocp.then_some(Scheme::Mxfp8E5m2(ScaleRule::Floor)),
            Format::Comparison(format) => {
                (self == Self::of_comparison(format)).then_some(Scheme::Comparison(format))
            }
        }
    }
}

/// The source of NVFP4's global scale.
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
    /// A format to compare with, which has one arithmetic.
    Comparison(ComparisonFormat),
}

impl Scheme {
    /// The format.
    pub const fn format(&self) -> Format {
        match self {
            Self::Mxfp4(_) => Format::Mxfp4,
            Self::Nvfp4(..) => Format::Nvfp4,
            Self::Mxfp8E4m3(_) => Format::Mxfp8E4m3,
            Self::Mxfp8E5m2(_) => Format::Mxfp8E5m2,
            Self::Comparison(format) => Format::Comparison(*format),
        }
    }

    /// The scale rule, if the scheme has one to choose.
    pub const fn scale_rule_mut(&mut self) -> Option<&mut ScaleRule> {
        match self {
            Self::Mxfp4(arithmetic) => Some(&mut arithmetic.scale_rule),
            Self::Mxfp8E4m3(rule) | Self::Mxfp8E5m2(rule) => Some(rule),
            Self::Nvfp4(..) | Self::Comparison(_) => None,
        }
    }

    /// The arithmetic of MXFP4, the only scheme with rules for ties and for −0 to choose.
    pub const fn mxfp4_mut(&mut self) -> Option<&mut mx::Arithmetic> {
        match self {
            Self::Mxfp4(arithmetic) => Some(arithmetic),
            _ => None,
        }
    }

    /// The arithmetic by which a global scale is computed from amax; `None` where there is no global scale,
    /// or it is given.
    pub const fn global_from_amax(&self) -> Option<nvfp4::Arithmetic> {
        match self {
            Self::Nvfp4(arithmetic, Global::FromAmax) => Some(*arithmetic),
            _ => None,
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

words!(NonFinite, "treatment of NaN and infinities" { Self::Error = "error", Self::Propagate = "propagate", Self::Saturate = "saturate" });
words!(Convention, "convention" {
    Self::Ocp = "ocp",
    Self::Torchao = "torchao",
    Self::CompressedTensors = "compressed-tensors",
    Self::Modelopt = "modelopt",
    Self::TransformerEngine = "transformer-engine",
    Self::Ggml = "ggml",
    Self::Bitsandbytes = "bitsandbytes",
});
