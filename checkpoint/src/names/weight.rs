//! The parts of a weight's name.

/// The suffix of a layer's weight.
pub(crate) const WEIGHT: &str = ".weight";

/// The part of a name before the number of an expert.
pub(crate) const EXPERTS: &str = ".experts.";

/// Returns whether a weight belongs to a single expert, where experts are stored one by one.
pub(crate) fn is_expert(weight: &str) -> bool {
    let expert = weight.split_once(EXPERTS).and_then(|(_, expert)| expert.split('.').next());
    expert.is_some_and(|number| number.parse::<u64>().is_ok())
}

/// A layer's name, from the name of its weight.
pub(crate) fn module(weight: &str) -> &str {
    weight.strip_suffix(WEIGHT).unwrap_or(weight)
}
