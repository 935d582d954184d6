//! The parts of a weight's name.

/// What the name of a layer's weights ends with.
pub(crate) const WEIGHT: &str = ".weight";

/// What stands before the number of an expert.
pub(crate) const EXPERTS: &str = ".experts.";

/// A layer's name, by that of its weight.
pub(crate) fn module(weight: &str) -> &str {
    weight.strip_suffix(WEIGHT).unwrap_or(weight)
}
