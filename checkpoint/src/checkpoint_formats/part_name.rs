//! Names of the stored parts of a tensor, derived from the tensor's name.

use crate::names::weight::WEIGHT;

/// Derives the name of a part from the name of its tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PartName {
    /// A suffix after the whole name: `fc.weight` has `fc.weight_scale`.
    After(&'static str),
    /// A suffix that replaces [`WEIGHT`]: `fc.weight` has `fc.input_scale`.
    InPlace(&'static str),
}

/// Parts about the inputs of a layer. They go with the codes when a layer is dequantized.
pub(crate) const INPUTS: [PartName; 6] = [
    PartName::InPlace(".input_scale"),
    PartName::InPlace(".input_zero_point"),
    PartName::InPlace(".activation_scale"),
    PartName::InPlace(".input_global_scale"),
    PartName::InPlace(".input_scale_2"),
    PartName::InPlace(".scale_input"),
];

impl PartName {
    /// Returns the suffix.
    pub(crate) const fn suffix(self) -> &'static str {
        match self {
            Self::After(suffix) | Self::InPlace(suffix) => suffix,
        }
    }

    /// Returns the name of the part, or `None` if the suffix replaces [`WEIGHT`] and `tensor` does
    /// not end with that.
    pub(crate) fn of(self, tensor: &str) -> Option<String> {
        let start = match self {
            Self::After(_) => tensor,
            Self::InPlace(_) => tensor.strip_suffix(WEIGHT)?,
        };
        Some(format!("{start}{}", self.suffix()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_follow_a_name_or_replace_its_end() {
        assert_eq!(PartName::After("_scale").of("fc.weight").unwrap(), "fc.weight_scale");
        assert_eq!(PartName::InPlace(".scale").of("fc.weight").unwrap(), "fc.scale");
        assert_eq!(PartName::InPlace(".scale").of("experts.down_proj"), None);
    }
}
