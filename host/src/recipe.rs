//! What is asked for: the format, and everything that decides the bytes.

use std::fmt;
use std::str::FromStr;

use microscale_formats::mxfp4::Arithmetic;
use microscale_formats::{NegativeZero, ScaleRule, Ties, mxfp4};

use crate::element::Dtype;

/// A microscaling format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Format {
    /// Blocks of 32 E2M1 elements with an E8M0 scale (OCP MX v1.0).
    #[default]
    Mxfp4,
}

impl Format {
    /// Elements that share a scale.
    pub const fn block(self) -> usize {
        match self {
            Self::Mxfp4 => mxfp4::BLOCK,
        }
    }

    /// Bytes of packed codes in a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::Mxfp4 => mxfp4::BLOCK_BYTES,
        }
    }
}

/// What is done about NaN and infinities. Whatever the policy, they are counted in the report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NonFinite {
    /// Refuse, naming the first one's row and column.
    #[default]
    Error,
    /// The block becomes NaN: scale byte 255, codes 0.
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
    /// OCP MX v1.0, which is torchao's default: floor, ties to even, −0 kept.
    Ocp,
    /// compressed-tensors (vLLM's llm-compressor): even, ties to even, input −0 becomes +0.
    CompressedTensors,
    /// NVIDIA ModelOpt: rceil, ties toward zero, zeros of either sign become −0.
    Modelopt,
    /// ggml (llama.cpp): floor, ties toward zero, no −0.
    Ggml,
}

impl Convention {
    const ALL: [Self; 4] = [Self::Ocp, Self::CompressedTensors, Self::Modelopt, Self::Ggml];

    /// The MXFP4 arithmetic of the convention: the table of conventions.
    pub const fn mxfp4(self) -> Arithmetic {
        let (scale_rule, ties, negative_zero) = match self {
            Self::Ocp => (ScaleRule::Floor, Ties::Even, NegativeZero::Keep),
            Self::CompressedTensors => (ScaleRule::Even, Ties::Even, NegativeZero::DropInput),
            Self::Modelopt => (ScaleRule::Rceil, Ties::Zero, NegativeZero::Force),
            Self::Ggml => (ScaleRule::Floor, Ties::Zero, NegativeZero::Drop),
        };
        Arithmetic { scale_rule, ties, negative_zero }
    }
}

/// How to quantize. The default is OCP's MXFP4, refusing non-finite input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Recipe {
    /// The format.
    pub format: Format,
    /// Scale rule, ties and treatment of −0.
    pub arithmetic: Arithmetic,
    /// What is done about NaN and infinities.
    pub non_finite: NonFinite,
}

impl Recipe {
    /// The recipe of a convention.
    pub const fn of(convention: Convention) -> Self {
        Self { format: Format::Mxfp4, arithmetic: convention.mxfp4(), non_finite: NonFinite::Error }
    }
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

words!(Format { Self::Mxfp4 = "mxfp4" });
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
words!(Convention {
    Self::Ocp = "ocp",
    Self::CompressedTensors = "compressed-tensors",
    Self::Modelopt = "modelopt",
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
            let known: Vec<_> = Self::ALL.iter().map(|c| c.word()).collect();
            format!("no convention is called {word}; there are {}", known.join(", "))
        })
    }
}
