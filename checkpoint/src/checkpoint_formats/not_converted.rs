//! Layers that the config of an FP8 or INT8 checkpoint exempts from quantization.
//!
//! Its author left them unquantized for a reason, and engines build them without a quantization
//! config: vision towers, routers, layers for multi-token prediction.

use std::collections::HashSet;

use serde_json::Value;

use crate::checkpoint_formats::patterns::Ignored;
use crate::names::naming::Naming;
use crate::names::weight::module;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::quantization;

/// Keys of lists of unquantized layers: transformers (FP8, gpt-oss), vLLM (FP8),
/// compressed-tensors, ModelOpt and Quark.
const LISTS: &[&str] = &["modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude"];

/// The layers that a config exempts from quantization.
#[derive(Default)]
pub(crate) struct NotConverted<'a> {
    /// Names of layers, of modules around them, or the last components of either.
    names: HashSet<&'a str>,
    patterns: Ignored<'a>,
}

impl<'a> NotConverted<'a> {
    /// Reads the lists of a checkpoint's configs. Lists with too many patterns count as empty.
    pub(crate) fn of(checkpoint: &'a Checkpoint) -> Self {
        let config = checkpoint.config.as_ref().and_then(|config| quantization(&config.object.json));
        let own = checkpoint.hf_quant_config.as_ref();
        let own = own.and_then(|config| config.object.json.get("quantization"));
        let lists = [config, own].into_iter().flatten().flat_map(|entry| {
            LISTS.iter().filter_map(|key| entry.get(*key).and_then(Value::as_array)).flatten()
        });
        let entries: Vec<&str> = lists.filter_map(Value::as_str).filter(|entry| !entry.is_empty()).collect();
        Self { patterns: Ignored::of(&entries).unwrap_or_default(), names: entries.into_iter().collect() }
    }

    /// Returns whether a weight's layer is exempt.
    ///
    /// Like transformers and vLLM, it takes the name of a layer or module, and the end of a name.
    pub(crate) fn exempts(&self, naming: Naming, weight: &str) -> bool {
        let spellings = naming.spellings(module(weight));
        spellings.iter().any(|layer| self.names_part_of(layer) || self.patterns.leaves_out(layer))
    }

    /// Returns whether an entry is a sequence of whole components of a name.
    fn names_part_of(&self, layer: &str) -> bool {
        let dots = layer.match_indices('.').map(|(dot, _)| dot);
        let starts = std::iter::once(0).chain(dots.clone().map(|dot| dot + 1));
        let ends: Vec<_> = dots.chain([layer.len()]).collect();
        starts.into_iter().any(|start| {
            let parts = ends.iter().filter(|end| **end > start).map(|end| &layer[start..*end]);
            parts.into_iter().any(|part| self.names.contains(part))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exempts(entry: &str, weight: &str) -> bool {
        let patterns = Ignored::of(&[entry]).unwrap();
        NotConverted { names: HashSet::from([entry]), patterns }.exempts(Naming::of("qwen2_5_vl"), weight)
    }

    #[test]
    fn layers_are_exempt_by_names_of_modules_and_ends_of_names() {
        for (entry, weight, expected) in [
            ("visual", "visual.blocks.0.attn.qkv.weight", true),
            ("model.visual", "visual.blocks.0.attn.qkv.weight", true),
            ("visual.blocks.0", "model.visual.blocks.0.attn.qkv.weight", true),
            ("visual.blocks.0", "model.visual.blocks.01.attn.qkv.weight", false),
            ("mlp.gate", "model.layers.0.mlp.gate.weight", true),
            ("mlp.gate", "model.layers.0.mlp.gate_proj.weight", false),
            ("fc1", "model.decoder.layers.23.fc1.weight", true),
            ("*.mtp.*", "model.mtp.layers.0.fc.weight", true),
            ("re:.*down_proj$", "model.layers.0.mlp.down_proj.weight", true),
            ("Linear", "model.layers.0.mlp.down_proj.weight", false),
        ] {
            assert_eq!(exempts(entry, weight), expected, "{entry} {weight}");
        }
    }
}
