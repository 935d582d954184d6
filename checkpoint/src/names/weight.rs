//! The parts of a weight's name.

/// The suffix of a layer's weight.
pub(crate) const WEIGHT: &str = ".weight";

/// The part of a name before the number of an expert.
pub(crate) const EXPERTS: &str = ".experts.";

/// Returns whether a weight belongs to a single expert, where experts are stored one by one.
pub(crate) fn is_expert(weight: &str) -> bool {
    expert_layer(weight).is_some()
}

/// Returns the name of an expert's weight before and after the expert's number. They are equal for
/// all experts of a layer.
pub(crate) fn expert_layer(weight: &str) -> Option<(&str, &str)> {
    let (layer, expert) = weight.split_once(EXPERTS)?;
    let (number, part) = expert.split_once('.').unwrap_or((expert, ""));
    number.parse::<u64>().is_ok().then_some((layer, part))
}

/// A layer's name, from the name of its weight.
pub(crate) fn module(weight: &str) -> &str {
    weight.strip_suffix(WEIGHT).unwrap_or(weight)
}
