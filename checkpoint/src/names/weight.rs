//! The parts of a weight's name.

/// The end of the name of a layer's weights.
pub(crate) const WEIGHT: &str = ".weight";

/// The part of a name that stands before the number of an expert.
pub(crate) const EXPERTS: &str = ".experts.";

/// Returns whether a weight is that of one expert among those that are stored one by one.
pub(crate) fn is_expert(weight: &str) -> bool {
    let expert = weight.split_once(EXPERTS).and_then(|(_, expert)| expert.split('.').next());
    expert.is_some_and(|number| number.parse::<u64>().is_ok())
}

/// A layer's name, by that of its weight.
pub(crate) fn module(weight: &str) -> &str {
    weight.strip_suffix(WEIGHT).unwrap_or(weight)
}
