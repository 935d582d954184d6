//! The words by which things are named on the command line, in JSON and in messages.

use microscale_formats::nvfp4::{BlockScale, Direction, Quotient};
use microscale_formats::{Format, NegativeZero, ScaleLayout, ScaleRule, Search, Ties};

use crate::element::Dtype;

/// Gives a type its words: `Display`, `FromStr`, and the list of them.
macro_rules! words {
    ($type:ty { $($variant:path = $word:literal),+ $(,)? }) => {
        impl Words for $type {
            const WORDS: &'static [(&'static str, Self)] = &[$(($word, $variant)),+];
        }
    };
}
pub(crate) use words;

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

/// The words of the formats are a fact of theirs.
impl Words for Format {
    const WORDS: &'static [(&'static str, Self)] = &{
        let mut words = [("", Self::ALL[0]); Self::ALL.len()];
        let mut i = 0;
        while i < words.len() {
            words[i] = (Self::ALL[i].facts().word, Self::ALL[i]);
            i += 1;
        }
        words
    };
}

words!(Dtype { Self::F32 = "f32", Self::F16 = "f16", Self::Bf16 = "bf16" });
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
