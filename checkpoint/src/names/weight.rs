//! The parts of a weight's name.

/// The end of the name of a layer's weights.
pub(crate) const WEIGHT: &str = ".weight";

/// The part of a name that stands before the number of an expert.
pub(crate) const EXPERTS: &str = ".experts.";

/// A layer's name, by that of its weight.
pub(crate) fn module(weight: &str) -> &str {
    weight.strip_suffix(WEIGHT).unwrap_or(weight)
}
