//! The choices for a tensor: unquantized, or a format.

use std::fmt;

use microscale::{Format, Words};

/// A choice for a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    /// The tensor stays unquantized.
    Unquantized,
    /// The tensor is quantized to a format.
    Format(Format),
}

impl Choice {
    /// The word for tensors that stay unquantized.
    pub const UNQUANTIZED: &'static str = "unquantized";

    /// Returns the word: the format's, or `unquantized`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Unquantized => Self::UNQUANTIZED,
            Self::Format(format) => format.word(),
        }
    }

    /// Returns the format, if the tensor is quantized.
    pub fn format(self) -> Option<Format> {
        match self {
            Self::Unquantized => None,
            Self::Format(format) => Some(format),
        }
    }
}

/// Shows the word.
impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

/// Sorts choices from the most bits per weight to the fewest, without repetitions.
pub(crate) fn sorted(mut choices: Vec<Choice>) -> Vec<Choice> {
    choices.sort_by_key(|choice| match choice {
        Choice::Unquantized => (0, "unquantized"),
        Choice::Format(format) => {
            let bytes = format.block_bytes() + format.scale_bytes();
            // Blocks have 16, 32 or 64 elements, so that this is a whole number.
            (1 + (1 << 16) - bytes * (1 << 10) / format.block(), format.word())
        }
    });
    choices.dedup();
    choices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_sorted_by_their_bits() {
        let [mxfp4, nvfp4, mxfp8] = [Format::Mxfp4, Format::Nvfp4, Format::Mxfp8E4m3].map(Choice::Format);
        let given = vec![mxfp4, nvfp4, Choice::Unquantized, mxfp8, nvfp4];
        assert_eq!(sorted(given), [Choice::Unquantized, mxfp8, nvfp4, mxfp4]);
    }
}
