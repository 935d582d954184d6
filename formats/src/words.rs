//! Names of values on command lines, in JSON and in messages: [`Words`] and its parse error.

use core::fmt;

use crate::nvfp4::{BlockScale, Direction, Quotient};
use crate::{Format, NegativeZero, ScaleLayout, ScaleRule, Search, Ties};

/// Types whose values have one-word names on the command line, in JSON and in messages.
///
/// `Display` writes the name, and `FromStr` reads it.
///
/// ```
/// use microscale_formats::{Format, Words};
///
/// assert_eq!((Format::Nvfp4.word(), Format::from_word("mxfp4")), ("nvfp4", Some(Format::Mxfp4)));
/// assert_eq!(Format::from_word("MXFP4"), None);
/// ```
pub trait Words: Sized + Copy + PartialEq + 'static {
    /// The kind of thing that the type names, for messages: `scale rule`.
    const WHAT: &'static str;

    /// Every word with its value. [`words!`](crate::words!) lists every variant of an enum, or does
    /// not compile.
    const WORDS: &'static [(&'static str, Self)];

    /// Returns every value, in the order of the words.
    ///
    /// Walk this list instead of your own, so that new values are included:
    ///
    /// ```
    /// use microscale_formats::{ScaleRule, Words};
    ///
    /// assert_eq!(ScaleRule::values().count(), ScaleRule::WORDS.len());
    /// ```
    fn values() -> impl Iterator<Item = Self> {
        Self::WORDS.iter().map(|(_, value)| *value)
    }

    /// Returns the word for this value.
    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(_, value)| *value == self).map_or("?", |(word, _)| word)
    }

    /// Returns the value for a word.
    fn from_word(word: &str) -> Option<Self> {
        Self::WORDS.iter().find(|(known, _)| *known == word).map(|(_, value)| *value)
    }
}

/// The error of `FromStr` for types with [`Words`]: the text is none of the type's words.
///
/// It holds the accepted words but not the text, because this crate does not allocate.
///
/// ```
/// use microscale_formats::ScaleRule;
///
/// let error = "round".parse::<ScaleRule>().unwrap_err();
/// assert_eq!(error.what(), "scale rule");
/// assert!(error.words().any(|word| word == "rceil"));
/// assert_eq!(error.to_string(), "unknown scale rule; there are floor, ceil, even, rceil");
/// ```
#[derive(Clone, Copy)]
pub struct UnknownWord {
    what: &'static str,
    /// Returns the word at an index of the table. A function pointer erases the type.
    word: fn(usize) -> Option<&'static str>,
}

impl UnknownWord {
    /// Makes the error of a text that is not a word of `T`.
    pub fn of<T: Words>() -> Self {
        Self { what: T::WHAT, word: |index| T::WORDS.get(index).map(|(word, _)| *word) }
    }

    /// Returns the kind of thing that the text should have named, such as `scale rule`.
    pub const fn what(&self) -> &'static str {
        self.what
    }

    /// Returns the accepted words.
    pub fn words(&self) -> impl Iterator<Item = &'static str> + use<> {
        (0..).map_while(self.word)
    }
}

impl PartialEq for UnknownWord {
    fn eq(&self, other: &Self) -> bool {
        self.what == other.what && self.words().eq(other.words())
    }
}

impl Eq for UnknownWord {}

crate::debug_is_message!(UnknownWord);

impl fmt::Display for UnknownWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown {}; there are ", self.what)?;
        for (place, word) in self.words().enumerate() {
            write!(f, "{}{word}", if place == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl core::error::Error for UnknownWord {}

/// Implements `Display` and `FromStr` for a type from its words.
///
/// Also implements [`Words`] itself if the words are listed.
#[doc(hidden)]
#[macro_export]
macro_rules! words {
    ($type:ty, $what:literal { $($variant:path = $word:literal),+ $(,)? }) => {
        impl $crate::Words for $type {
            const WHAT: &'static str = $what;
            const WORDS: &'static [(&'static str, Self)] = &[$(($word, $variant)),+];

            // The match makes a missing word a compile error.
            fn word(self) -> &'static str {
                match self {
                    $($variant => $word),+
                }
            }
        }

        $crate::words!($type);
    };
    ($type:ty) => {
        impl ::core::fmt::Display for $type {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                f.pad($crate::Words::word(*self))
            }
        }

        impl ::core::str::FromStr for $type {
            type Err = $crate::UnknownWord;

            fn from_str(word: &str) -> ::core::result::Result<Self, $crate::UnknownWord> {
                <Self as $crate::Words>::from_word(word).ok_or_else($crate::UnknownWord::of::<Self>)
            }
        }
    };
}

/// Formats take their words from their descriptors.
impl Words for Format {
    const WHAT: &'static str = "format";

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

words!(Format);
words!(ScaleRule, "scale rule" {
    Self::Floor = "floor",
    Self::Ceil = "ceil",
    Self::Even = "even",
    Self::Rceil = "rceil",
});
words!(Ties, "rule for ties" { Self::Even = "even", Self::Away = "away", Self::Zero = "zero" });
words!(NegativeZero, "treatment of -0" {
    Self::Keep = "keep",
    Self::DropInput = "drop-input",
    Self::Drop = "drop",
    Self::Force = "force",
});
words!(Search, "search" {
    Self::None = "none",
    Self::FourSix = "four-six",
    Self::Window = "window",
    Self::Full = "full",
});
words!(ScaleLayout, "scale layout" { Self::Linear = "linear", Self::Swizzled = "swizzled" });
words!(Direction, "direction" { Self::Divisor = "divisor", Self::Multiplier = "multiplier" });
words!(BlockScale, "block scale" {
    Self::SixthOverGlobal = "(amax / 6) / s",
    Self::GlobalTimesNarrowSixth = "G * (amax / 6)",
    Self::OverSixGlobals = "amax / (6 * s)",
    Self::TimesSixthOfGlobal = "amax * (G * (1 / 6))",
});
words!(Quotient, "quotient" {
    Self::TimesInverseOverScale = "x * ((1 / s) / b)",
    Self::OverScaleOverGlobal = "x / (b / G)",
    Self::OverScaleTimesGlobal = "x / (b * s)",
    Self::TimesInverseOfProduct = "x * (1 / (b * (1 / G)))",
});

#[cfg(test)]
mod tests {
    extern crate std;

    use core::fmt::{Debug, Display};
    use core::str::FromStr;
    use std::string::ToString;

    use super::*;

    fn come_back<T: Words + Debug + Display + FromStr<Err = UnknownWord>>() {
        for (word, value) in T::WORDS {
            assert_eq!((value.to_string().as_str(), word.parse()), (*word, Ok(*value)));
        }
        for wrong in ["", "?", "no such word", " "] {
            let error = wrong.parse::<T>().expect_err(wrong);
            assert!(error.words().eq(T::WORDS.iter().map(|(word, _)| *word)), "{error}");
            assert_eq!((error.what(), error), (T::WHAT, UnknownWord::of::<T>()));
        }
    }

    #[test]
    fn every_word_round_trips() {
        come_back::<Format>();
        come_back::<ScaleRule>();
        come_back::<Ties>();
        come_back::<NegativeZero>();
        come_back::<Search>();
        come_back::<ScaleLayout>();
        come_back::<Direction>();
        come_back::<BlockScale>();
        come_back::<Quotient>();
    }
}
