//! Layers that serving engines fuse into one when they load a model.
//!
//! A fused layer is one matrix with one global scale, so its parts must be quantized with the same
//! one. An engine that finds different ones uses one of them and computes wrong values for the
//! other parts. Both vLLM and SGLang fuse the layers listed here (`packed_modules_mapping` and
//! `stacked_params_mapping` in their models).

/// The parts of each fused layer, by the last component of their names: **the table of fusions**.
///
/// The parts of a row are fused if they have the same parent: an attention module, an MLP or an
/// expert.
const FUSED: &[&[&str]] = &[
    // Attention.
    &["q_proj", "k_proj", "v_proj"],
    // Latent attention (DeepSeek): the two low-rank projections.
    &["q_a_proj", "kv_a_proj_with_mqa"],
    // Gated MLPs, and experts that are stored one by one.
    &["gate_proj", "up_proj"],
    // The same with the names of Mixtral and InternLM2. There w2 is the down projection.
    &["w1", "w3"],
    // Linear attention (Qwen3.5).
    &["in_proj_qkv", "in_proj_z"],
    &["in_proj_b", "in_proj_a"],
];

/// A fused layer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Fused {
    /// The common prefix of its parts' names, up to the last dot.
    parent: String,
    /// The row of the table.
    row: usize,
}

impl Fused {
    /// A pattern that matches the weights of all parts.
    pub(crate) fn pattern(&self) -> String {
        let dot = if self.parent.is_empty() { "" } else { "." };
        format!("{}{dot}{{{}}}.weight", self.parent, FUSED[self.row].join(","))
    }
}

/// The fused layer that a weight is part of, from the weight's name.
///
/// Weights with the same result share their global scale.
pub(crate) fn fused(weight: &str) -> Option<Fused> {
    let layer = weight.strip_suffix(".weight")?;
    let (parent, part) = layer.rsplit_once('.').unwrap_or(("", layer));
    let row = FUSED.iter().position(|parts| parts.contains(&part))?;
    Some(Fused { parent: parent.into(), row })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_one_parent_are_fused_and_others_are_not() {
        let together = |names: &[&str]| {
            let fused: Vec<_> = names.iter().map(|name| fused(name)).collect();
            fused[0].is_some() && fused.iter().all(|other| *other == fused[0])
        };
        let attention = "model.layers.0.self_attn";
        let qkv = ["q_proj", "k_proj", "v_proj"].map(|part| format!("{attention}.{part}.weight"));
        assert!(together(&[&qkv[0], &qkv[1], &qkv[2]]));
        assert!(together(&["mlp.gate_proj.weight", "mlp.up_proj.weight"]));
        assert!(together(&["q_proj.weight", "k_proj.weight"]));
        assert!(together(&["moe.experts.3.w1.weight", "moe.experts.3.w3.weight"]));
        for (a, b) in [
            ("layers.0.attn.q_proj.weight", "layers.1.attn.q_proj.weight"),
            ("experts.3.w1.weight", "experts.4.w3.weight"),
            ("experts.3.w1.weight", "experts.3.w2.weight"),
            ("mlp.gate_proj.weight", "mlp.down_proj.weight"),
            ("mlp.gate_proj.weight", "shared.up_proj.weight"),
            ("attn.in_proj_qkv.weight", "attn.in_proj_a.weight"),
            ("attention.query.weight", "attention.key.weight"),
            ("q_proj.weight", "k_proj.bias"),
        ] {
            assert!(!together(&[a, b]), "{a} {b}");
        }
        assert_eq!((fused("o_proj.weight"), fused("q_proj"), fused("")), (None, None, None));
    }
}
