//! Names of the scales of an FP8 cache of keys and values.

/// Name endings of scales of keys, and of values. compressed-tensors has them at the attention
/// module, ModelOpt and Quark at its projections.
pub(super) const KEYS: [&str; 4] = [".k_scale", ".k_proj.output_scale", ".kv_scale", ".kv_cache_scale"];
pub(super) const VALUES: [&str; 4] = [".v_scale", ".v_proj.output_scale", ".kv_scale", ".kv_cache_scale"];

/// Name endings of other scales of attention.
const OTHERS: [&str; 2] = [".q_scale", ".prob_scale"];

/// Returns whether a tensor is a scale of attention, by its name.
pub(super) fn is_cache_scale(name: &str) -> bool {
    [&KEYS[..], &VALUES, &OTHERS].iter().any(|known| ends(name, known))
}

/// Returns whether a name ends with one of `ends`.
pub(super) fn ends(name: &str, ends: &[&str]) -> bool {
    ends.iter().any(|end| name.ends_with(end))
}
