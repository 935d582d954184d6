//! Names of the layers of each format, for configs with several formats.
//!
//! A target is the name of a layer, or a regular expression for the experts of a layer: vLLM looks
//! for experts under names that the file need not have, and transformers looks for a regular
//! expression with "experts" in it.

use std::collections::{BTreeSet, HashMap};

use crate::checkpoint_formats::group::Group;
use crate::names::layers::layer_part;
use crate::names::weight::EXPERTS;

/// Returns the targets of each group. They match no layer of another group.
pub(crate) fn targets(groups: &[Group]) -> Vec<Vec<String>> {
    // The groups with layers that match a pattern.
    let mut matched: HashMap<String, BTreeSet<usize>> = HashMap::new();
    for (i, group) in groups.iter().enumerate() {
        for pattern in group.layers.iter().flat_map(|layer| patterns(layer)) {
            matched.entry(pattern).or_default().insert(i);
        }
    }
    let target = |layer: &String| {
        let own = patterns(layer).into_iter().find(|pattern| matched[pattern].len() == 1);
        own.unwrap_or_else(|| layer.clone())
    };
    groups
        .iter()
        .map(|group| group.layers.iter().map(target).collect::<BTreeSet<_>>().into_iter().collect())
        .collect()
}

/// Returns regular expressions for an expert's layer: for the experts of all layers, and for the
/// experts of its own layer. They leave out the prefix before the layers, which engines may rename.
fn patterns(layer: &str) -> Vec<String> {
    let Some((parent, expert)) = layer.split_once(EXPERTS) else { return Vec::new() };
    if expert.split('.').next().is_none_or(|number| number.parse::<u64>().is_err()) {
        return Vec::new();
    }
    let parts: Vec<&str> = parent.split('.').collect();
    let number = layer_part(&parts);
    let start = number.map_or(0, |number| number.saturating_sub(1));
    let pattern = |any: bool| {
        let part =
            |at: usize| if any && Some(at) == number { r"\d+".into() } else { regex::escape(parts[at]) };
        let parts: Vec<_> = (start..parts.len()).map(part).collect();
        format!(r"re:(.*\.)?{}\.experts\.\d+\.", parts.join(r"\."))
    };
    vec![pattern(true), pattern(false)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint_format::CheckpointFormat;
    use crate::checkpoint_formats::storage::Storage;
    use microscale::Format;

    fn group(format: Format, layers: &[&str]) -> Group {
        let storage = Storage::of_format(CheckpointFormat::CompressedTensors, format).unwrap();
        Group { storage, layers: layers.iter().map(|layer| (*layer).into()).collect() }
    }

    #[test]
    fn layers_have_names_and_experts_have_patterns() {
        let dense = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.shared_experts.up_proj"];
        let experts = ["model.layers.1.mlp.experts.0.up_proj", "model.layers.2.mlp.experts.11.down_proj"];
        let of = |groups: &[Group]| targets(groups);
        let found = of(&[group(Format::Nvfp4, &experts), group(Format::Mxfp4, &dense)]);
        assert_eq!(found[0], [r"re:(.*\.)?layers\.\d+\.mlp\.experts\.\d+\."]);
        assert_eq!(found[1], dense);
        // Experts of both formats have patterns per layer, or names if a layer has both.
        let found = of(&[group(Format::Nvfp4, &experts[..1]), group(Format::Mxfp4, &experts[1..])]);
        assert_eq!(found[0], [r"re:(.*\.)?layers\.1\.mlp\.experts\.\d+\."]);
        assert_eq!(found[1], [r"re:(.*\.)?layers\.2\.mlp\.experts\.\d+\."]);
        let both = ["layers.1.mlp.experts.0.up_proj", "layers.1.mlp.experts.1.up_proj"];
        let found = of(&[group(Format::Nvfp4, &both[..1]), group(Format::Mxfp4, &both[1..])]);
        assert_eq!((&found[0][..], &found[1][..]), (&[both[0].to_string()][..], &[both[1].to_string()][..]));
        // A tensor with all experts has no number.
        let fused = ["model.layers.1.mlp.experts.gate_up_proj"];
        assert_eq!(of(&[group(Format::Nvfp4, &fused), group(Format::Mxfp4, &dense)])[0], fused);
    }
}
