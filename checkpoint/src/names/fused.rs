//! Layers that serving engines fuse into one when they load a model.
//!
//! A fused layer is one matrix with one global scale, so its parts must be quantized with the same
//! one. An engine that finds different ones uses one of them and computes wrong values for the
//! other parts. Both vLLM and SGLang fuse the layers listed here (`packed_modules_mapping` and
//! `stacked_params_mapping` in their models); diffusers fuses attention layers
//! (`fuse_qkv_projections`).

use std::collections::BTreeMap;

use crate::names::weight::WEIGHT;

/// The parts of each fused layer, by the last component of their names: **the table of fusions**.
///
/// The parts of a row are fused if they have the same parent (an attention module, an MLP or an
/// expert) and the same number of columns. A row has all names that one naming scheme uses, of
/// which a layer may have a subset.
const FUSED: &[&[&str]] = &[
    // Queries, keys and values, of Llama and most others; Mistral's files; BERT; DeBERTa;
    // DistilBERT; T5 and Wan; Conformer.
    &["q_proj", "k_proj", "v_proj"],
    &["wq", "wk", "wv"],
    &["query", "key", "value"],
    &["query_proj", "key_proj", "value_proj"],
    &["q_lin", "k_lin", "v_lin"],
    &["q", "k", "v"],
    &["linear_q", "linear_k", "linear_v"],
    // The same in diffusers, for the image and for the text.
    &["to_q", "to_k", "to_v"],
    &["add_q_proj", "add_k_proj", "add_v_proj"],
    // Indexers of sparse attention (MiniMax).
    &["index_q_proj", "index_k_proj"],
    // Latent attention: the low-rank projections of DeepSeek-V3, then those in Mistral's files and
    // DeepSeek-V4's, whose compressors have `wkv` and `wgate`.
    &["q_a_proj", "kv_a_proj_with_mqa"],
    &["wq_a", "wkv_a_with_mqa", "wkv", "wgate"],
    // Gated MLPs, and experts that are stored one by one: Llama; Mixtral, where `w2` is the down
    // projection; T5; EXAONE.
    &["gate_proj", "up_proj"],
    &["w1", "w3"],
    &["wi_0", "wi_1"],
    &["c_fc_0", "c_fc_1"],
    // Linear attention (Qwen3.5).
    &["in_proj_qkv", "in_proj_z"],
    &["in_proj_b", "in_proj_a"],
];

/// Last components of layers that are never fused with their siblings: the projections back to the
/// hidden size, and the layers of an MLP without a gate.
const SINGLE: &[&str] = &[
    "o_proj",
    "out_proj",
    "down_proj",
    "c_proj",
    "proj",
    "dense",
    "wo",
    "w2",
    "to_out",
    "o",
    "out_lin",
    "linear_out",
    "fc1",
    "fc2",
    "c_fc",
    "lin1",
    "lin2",
    "fc_in",
    "fc_out",
    "dense_h_to_4h",
    "dense_4h_to_h",
];

/// A fused layer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Fused {
    /// The common prefix of its parts' names, up to the last dot.
    parent: String,
    /// The row of the table.
    row: usize,
    /// The columns (K) of every part.
    cols: usize,
}

impl Fused {
    /// A pattern that matches the weights of all parts.
    pub(crate) fn pattern(&self) -> String {
        pattern(&self.parent, FUSED[self.row])
    }
}

/// The fused layer that a weight is part of, from the weight's name and shape.
///
/// Weights with the same result share their global scale.
pub(crate) fn fused(weight: &str, shape: &[usize]) -> Option<Fused> {
    let (parent, part) = split(weight)?;
    let row = FUSED.iter().position(|parts| parts.contains(&part))?;
    Some(Fused { parent: parent.into(), row, cols: *shape.last()? })
}

/// Returns patterns of the siblings with equal columns that no row of the table has.
///
/// For architectures that microscale does not know, these may be parts of fused layers. `weights`
/// are names and shapes.
pub(crate) fn probably_fused<'n>(weights: impl Iterator<Item = (&'n str, &'n [usize])>) -> Vec<String> {
    let mut siblings: BTreeMap<_, Vec<&str>> = BTreeMap::new();
    for (weight, shape) in weights {
        let Some(((parent, part), cols)) = split(weight).zip(shape.last()) else { continue };
        // The layers of a `Sequential` have numbers and follow each other.
        let follows = part.parse::<u64>().is_ok() || SINGLE.contains(&part);
        if !follows && FUSED.iter().all(|parts| !parts.contains(&part)) {
            siblings.entry((parent, *cols)).or_default().push(part);
        }
    }
    let together = siblings.into_iter().filter(|(_, parts)| parts.len() > 1);
    together.map(|((parent, _), parts)| pattern(parent, &parts)).collect()
}

/// Splits the name of a weight into its layer's parent and last component.
fn split(weight: &str) -> Option<(&str, &str)> {
    let layer = weight.strip_suffix(WEIGHT)?;
    Some(layer.rsplit_once('.').unwrap_or(("", layer)))
}

/// A pattern that matches the weights of `parts`.
fn pattern(parent: &str, parts: &[&str]) -> String {
    let dot = if parent.is_empty() { "" } else { "." };
    format!("{parent}{dot}{{{}}}{WEIGHT}", parts.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn together(names: &[&str]) -> bool {
        let layers: Vec<_> = names.iter().map(|name| fused(name, &[8, 64])).collect();
        layers[0].is_some() && layers.iter().all(|other| *other == layers[0])
    }

    #[test]
    fn parts_of_one_parent_are_fused_and_others_are_not() {
        for (parent, parts) in [
            ("model.layers.0.self_attn.", &["q_proj", "k_proj", "v_proj"][..]),
            ("mlp.", &["gate_proj", "up_proj"]),
            ("", &["q_proj", "k_proj"]),
            ("moe.experts.3.", &["w1", "w3"]),
            ("layers.0.attn.", &["wq_a", "wkv"]),
            ("layers.0.attn.compressor.", &["wkv", "wgate"]),
            ("layers.0.attention.", &["wq", "wk", "wv"]),
            ("layers.0.attention.", &["wq_a", "wkv_a_with_mqa"]),
            ("bert.encoder.layer.0.attention.self.", &["query", "key", "value"]),
            ("transformer_blocks.0.attn.", &["to_q", "to_k", "to_v"]),
            ("transformer_blocks.0.attn.", &["add_q_proj", "add_k_proj", "add_v_proj"]),
            ("model.layers.0.self_attn.", &["index_q_proj", "index_k_proj"]),
        ] {
            let names: Vec<_> = parts.iter().map(|part| format!("{parent}{part}.weight")).collect();
            assert!(together(&names.iter().map(String::as_str).collect::<Vec<_>>()), "{names:?}");
        }
        for (a, b) in [
            ("layers.0.attn.q_proj.weight", "layers.1.attn.q_proj.weight"),
            ("experts.3.w1.weight", "experts.4.w3.weight"),
            ("experts.3.w1.weight", "experts.3.w2.weight"),
            ("mlp.gate_proj.weight", "mlp.down_proj.weight"),
            ("mlp.gate_proj.weight", "shared.up_proj.weight"),
            ("attn.in_proj_qkv.weight", "attn.in_proj_a.weight"),
            ("attn.wkv.weight", "attn.compressor.wgate.weight"),
            ("attn.to_q.weight", "attn.add_q_proj.weight"),
            ("q_proj.weight", "k_proj.bias"),
        ] {
            assert!(!together(&[a, b]), "{a} {b}");
        }
        assert_eq!(
            (fused("o_proj.weight", &[8, 8]), fused("q_proj", &[8, 8]), fused("", &[])),
            (None, None, None)
        );
    }

    #[test]
    fn parts_of_different_widths_are_not_fused() {
        // In cross-attention, keys and values come from another model.
        let of = |part: &str, cols| fused(&format!("attn2.{part}.weight"), &[64, cols]);
        assert_eq!(of("to_k", 768), of("to_v", 768));
        assert_ne!(of("to_q", 64), of("to_k", 768));
    }

    #[test]
    fn unknown_siblings_of_one_width_look_fused() {
        let of = |names: &[&'static str], cols: &[usize]| {
            let shapes: Vec<_> = cols.iter().map(|cols| [8, *cols]).collect();
            let weights = names.iter().zip(&shapes).map(|(name, shape)| (*name, &shape[..]));
            probably_fused(weights)
        };
        assert_eq!(of(&["a.0.in_x.weight", "a.0.in_y.weight"], &[64, 64]), ["a.0.{in_x,in_y}.weight"]);
        assert_eq!(of(&["in_x.weight", "in_y.weight"], &[64, 64]), ["{in_x,in_y}.weight"]);
        for (names, cols) in [
            (["a.0.in_x.weight", "a.0.in_y.weight"], [64, 32]),
            (["a.0.in_x.weight", "a.1.in_x.weight"], [64, 64]),
            (["a.0.q_proj.weight", "a.0.o_proj.weight"], [64, 64]),
            (["a.fc1.weight", "a.fc2.weight"], [64, 64]),
            (["a.net.0.weight", "a.net.2.weight"], [64, 64]),
        ] {
            assert!(of(&names, &cols).is_empty(), "{names:?}");
        }
    }
}
