//! Block Hadamard transforms of layers' inputs, as compressed-tensors' transforms.
//!
//! The stored weight of such a layer is W·H, and engines multiply its inputs by H: see
//! [`microscale::formats::hadamard`]. The config declares a group per width:
//!
//! ```json
//! "hadamard_32": {
//!     "type": "hadamard", "head_dim": 32, "randomize": false, "requires_grad": false,
//!     "apply": [
//!         {"location": "input", "targets": […], "ignore": [], "inverse": false},
//!         {"location": "weight_input", "targets": […], "ignore": [], "inverse": true}
//!     ]
//! }
//! ```
//!
//! Each layer has the matrix as `MODULE.hadamard_32_input.weight`: its entries are 1 and -1, and
//! engines divide by √width. What runs it (compressed-tensors 0.20, vLLM's `HadamardTransform`,
//! `CompressedTensorsLinearTransformMethod` and `QutlassNvFP4LinearMethod`):
//!
//! - vLLM transforms inputs of linear layers on one GPU, by hadacore, or for NVFP4 inputs by QuTLASS
//!   with the layer's matrix. It asserts that such layers have no bias, and leaves experts and heads
//!   as they are. MLA multiplies the weights of `kv_b_proj` without a transform.
//! - transformers 5.24 ignores transforms.
//! - `random-hadamard` works in vLLM too, by a dense product. It is read by neither QuTLASS nor
//!   this module, and not written.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use microscale::formats::words;
use microscale::{HadamardWidth, Words};
use serde_json::{Map, Value, json};

use crate::checkpoint_formats::patterns::{Expression, count_patterns};
use crate::dtype::FileDtype;
use crate::names::layers::layer_part;
use crate::names::naming::Naming;
use crate::names::weight::{WEIGHT, is_expert, module};
use crate::read::checkpoint::Checkpoint;
use crate::read::tensor::Tensor;
use crate::write::outline::Outline;

/// The type of the transform.
const HADAMARD: &str = "hadamard";

/// Endings of modules whose weights vLLM multiplies outside of a linear layer.
const ABSORBED: [&str; 1] = ["kv_b_proj"];

/// Why a layer's inputs are not transformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum NotTransformed {
    Bias,
    Expert,
    Head,
    Absorbed,
    Columns,
    NoLinearLayer,
}

words!(NotTransformed, "reason" {
    Self::Bias = "vLLM runs no transform of layers with a bias",
    Self::Expert = "engines run no transform of experts",
    Self::Head = "engines run no transform of output heads",
    Self::Absorbed = "vLLM multiplies these weights without a transform",
    Self::Columns = "their columns are no multiple of the width",
    Self::NoLinearLayer = "they are no linear layers",
});

impl NotTransformed {
    /// Returns why engines would not run the transform of a weight's layer, if they would not.
    pub(crate) fn of(checkpoint: &Checkpoint, tensor: &Tensor<'_>, width: HadamardWidth) -> Option<Self> {
        let layer = module(tensor.name);
        if is_expert(tensor.name) || tensor.shape.len() > 2 {
            return Some(Self::Expert);
        }
        if !tensor.name.ends_with(WEIGHT)
            || checkpoint.naming.is_linear(tensor.name, tensor.shape) == Some(false)
        {
            return Some(Self::NoLinearLayer);
        }
        if checkpoint.naming.is_head(tensor.name) {
            return Some(Self::Head);
        }
        if ABSORBED.iter().any(|end| layer.rsplit('.').next() == Some(end)) {
            return Some(Self::Absorbed);
        }
        if checkpoint.tensor(&format!("{layer}.bias")).is_some() {
            return Some(Self::Bias);
        }
        let columns = tensor.shape.last().copied().unwrap_or(0);
        (!columns.is_multiple_of(width.columns())).then_some(Self::Columns)
    }
}

/// Returns the name of the group of a width.
fn group(width: HadamardWidth) -> String {
    format!("{HADAMARD}_{width}")
}

/// Returns the outline of the matrix of a layer's transform.
pub(crate) fn outline(weight: &str, width: HadamardWidth) -> Outline {
    let name = format!("{}.{}_input{WEIGHT}", module(weight), group(width));
    Outline { name, dtype: FileDtype::BF16, shape: vec![width.columns(); 2] }
}

/// Returns the bytes of the matrix, row by row in BF16.
pub(crate) fn matrix(width: HadamardWidth) -> Vec<u8> {
    let size = width.columns();
    let negative = (0..size).flat_map(|row| (0..size).map(move |col| HadamardWidth::is_negative(row, col)));
    negative
        .flat_map(|negative| half::bf16::from_f32(if negative { -1.0 } else { 1.0 }).to_le_bytes())
        .collect()
}

/// Returns a transform_config for weights with these widths, or `None` if none is transformed.
///
/// `weights` are all weights of the checkpoint.
pub(crate) fn transform_config<'n>(
    weights: impl Iterator<Item = (&'n str, Option<HadamardWidth>)>,
    naming: Naming,
) -> Option<Value> {
    let mut layers: BTreeMap<Option<HadamardWidth>, Vec<&str>> = BTreeMap::new();
    for (weight, width) in weights {
        layers.entry(width).or_default().push(module(weight));
    }
    let groups = layers.iter().filter_map(|(width, own)| {
        let width = (*width)?;
        let others = layers.iter().filter(|(other, _)| **other != Some(width)).flat_map(|(_, others)| others);
        let targets = targets(own, others.copied(), naming);
        let apply = |location: &str, inverse: bool| {
            json!({ "ignore": [], "inverse": inverse, "location": location, "targets": targets })
        };
        let entry = json!({
            "apply": [apply("input", false), apply("weight_input", true)],
            "head_dim": width.columns(),
            "randomize": false,
            "requires_grad": false,
            "type": HADAMARD,
        });
        Some((group(width), entry))
    });
    let groups: Map<String, Value> = groups.collect();
    (!groups.is_empty()).then(|| json!({ "config_groups": groups }))
}

/// Returns targets of layers that match no other layer.
///
/// vLLM does not rename them as it renames the targets of quantization, so they leave out the
/// prefix before the layers if they can.
fn targets<'n>(layers: &[&str], others: impl Iterator<Item = &'n str>, naming: Naming) -> BTreeSet<String> {
    let others: HashSet<_> = others.flat_map(patterns).collect();
    let target = |layer: &&str| {
        let own = patterns(layer).into_iter().find(|pattern| !others.contains(pattern));
        own.map_or_else(|| naming.spellings(layer), |own| vec![own])
    };
    layers.iter().flat_map(target).collect()
}

/// Returns regular expressions for a layer of all decoder layers, and for its own one.
fn patterns(layer: &str) -> Vec<String> {
    let parts: Vec<&str> = layer.split('.').collect();
    let Some(number) = layer_part(&parts).filter(|number| *number > 0) else { return Vec::new() };
    let pattern = |any: bool| {
        let part = |at| if any && at == number { r"\d+".into() } else { regex::escape(parts[at]) };
        let parts: Vec<_> = (number - 1..parts.len()).map(part).collect();
        format!(r"re:(.*\.)?{}$", parts.join(r"\."))
    };
    vec![pattern(true), pattern(false)]
}

/// The transforms of a config, if all are block Hadamard transforms of layers' inputs.
pub(crate) struct Hadamards<'a>(Vec<Group<'a>>);

/// The layers of a width.
struct Group<'a> {
    width: HadamardWidth,
    targets: Targets<'a>,
    ignored: Targets<'a>,
}

/// Layers by class, name or expression.
struct Targets<'a> {
    all: bool,
    names: HashSet<&'a str>,
    expressions: Vec<Expression>,
}

impl<'a> Hadamards<'a> {
    /// Reads groups of a transform_config. Returns `None` if one of them is another transform.
    pub(crate) fn of(groups: impl Iterator<Item = &'a Value>) -> Option<Self> {
        groups.map(Group::of).collect::<Option<_>>().map(Self)
    }

    /// Returns the width of the transform of a weight's inputs, if they have one.
    pub(crate) fn width_of(&self, naming: Naming, weight: &str) -> Option<HadamardWidth> {
        let layers = naming.spellings(module(weight));
        let mut groups = self.0.iter();
        groups
            .find(|group| group.targets.matches(&layers) && !group.ignored.matches(&layers))
            .map(|group| group.width)
    }
}

impl<'a> Group<'a> {
    fn of(group: &'a Value) -> Option<Self> {
        let size = group.get("head_dim")?.as_u64()?;
        let width = HadamardWidth::values().find(|width| width.columns() as u64 == size)?;
        let is_random = group.get("randomize").is_some_and(|randomize| *randomize != Value::Bool(false));
        if group.get("type")?.as_str() != Some(HADAMARD) || is_random {
            return None;
        }
        // H is symmetric and its own inverse, so `inverse` says nothing.
        let [first, second] = &group.get("apply")?.as_array()?[..] else { return None };
        let mut locations = [first.get("location")?.as_str()?, second.get("location")?.as_str()?];
        locations.sort_unstable();
        let (targets, ignored) = (listed(first.get("targets"))?, listed(first.get("ignore"))?);
        let is_same = listed(second.get("targets"))? == targets && listed(second.get("ignore"))? == ignored;
        if locations != ["input", "weight_input"] || !is_same {
            return None;
        }
        Some(Self { width, targets: Targets::of(&targets)?, ignored: Targets::of(&ignored)? })
    }
}

/// Returns a list of layers, which may be a single one or missing.
fn listed(layers: Option<&Value>) -> Option<Vec<&str>> {
    match layers {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::String(only)) => Some(vec![only]),
        Some(Value::Array(layers)) => layers.iter().map(Value::as_str).collect(),
        Some(_) => None,
    }
}

impl<'a> Targets<'a> {
    /// Returns `None` for expressions that are not supported, and for too many of them.
    fn of(texts: &[&'a str]) -> Option<Self> {
        let count = count_patterns(texts.iter().copied()).ok()?;
        let mut targets = Self { all: false, names: HashSet::new(), expressions: Vec::new() };
        for text in texts {
            match Expression::of(text, count) {
                Some(expression) => {
                    expression.is_match("")?;
                    targets.expressions.push(expression);
                }
                // Quantized weights are of linear layers.
                None if *text == "Linear" => targets.all = true,
                None => drop(targets.names.insert(text)),
            }
        }
        Some(targets)
    }

    fn matches(&self, layers: &[String]) -> bool {
        let matches = |layer: &String| {
            self.names.contains(layer.as_str())
                || self.expressions.iter().any(|expression| expression.is_match(layer) == Some(true))
        };
        self.all || layers.iter().any(matches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const W32: Option<HadamardWidth> = Some(HadamardWidth::W32);

    fn targets_of(weights: &[(&str, Option<HadamardWidth>)], width: &str) -> Value {
        let config = transform_config(weights.iter().copied(), Naming::default()).unwrap();
        config["config_groups"][format!("hadamard_{width}")]["apply"][0]["targets"].clone()
    }

    #[test]
    fn targets_match_the_transformed_layers_only() {
        let up = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"];
        let all = json!([r"re:(.*\.)?layers\.\d+\.mlp\.up_proj$"]);
        assert_eq!(targets_of(&[(up[0], W32), (up[1], W32), ("lm_head.weight", None)], "32"), all);
        let one = json!([r"re:(.*\.)?layers\.0\.mlp\.up_proj$"]);
        assert_eq!(targets_of(&[(up[0], W32), (up[1], None)], "32"), one);
        let w64 = Some(HadamardWidth::W64);
        let weights = [(up[0], W32), (up[1], w64)];
        assert_eq!(targets_of(&weights, "32"), one);
        assert_eq!(targets_of(&weights, "64"), json!([r"re:(.*\.)?layers\.1\.mlp\.up_proj$"]));
        // The same layer of another stack has the same pattern.
        let weights = [(up[0], W32), ("visual.layers.0.mlp.up_proj.weight", None)];
        assert_eq!(targets_of(&weights, "32"), json!(["model.layers.0.mlp.up_proj"]));
        assert_eq!(targets_of(&[("fc.weight", W32)], "32"), json!(["fc"]));
        assert!(transform_config([("fc.weight", None)].into_iter(), Naming::default()).is_none());
        for weights in [&weights[..], &[(up[0], W32), (up[1], w64)]] {
            let config = transform_config(weights.iter().copied(), Naming::default()).unwrap();
            let read = Hadamards::of(config["config_groups"].as_object().unwrap().values()).unwrap();
            for (weight, width) in weights {
                assert_eq!(read.width_of(Naming::default(), weight), *width, "{weight}");
            }
        }
    }

    #[test]
    fn other_transforms_are_not_understood() {
        let apply =
            |location: &str| json!({ "location": location, "targets": "Linear", "ignore": ["re:.*head"] });
        let whole =
            json!({ "type": "hadamard", "head_dim": 16, "apply": [apply("weight_input"), apply("input")] });
        let width = |group: &Value| {
            let read = Hadamards::of(std::iter::once(group))?;
            assert_eq!(read.width_of(Naming::default(), "lm_head.weight"), None);
            read.width_of(Naming::default(), "a.weight")
        };
        assert_eq!(width(&whole), Some(HadamardWidth::W16));
        for (key, value) in [
            ("type", json!("random-hadamard")),
            ("head_dim", json!(48)),
            ("head_dim", Value::Null),
            ("randomize", json!(true)),
            ("apply", json!([apply("input")])),
            ("apply", json!([apply("input"), apply("weight_output")])),
            ("apply", json!([apply("input"), { "location": "weight_input", "targets": "Linear" }])),
        ] {
            let mut other = whole.clone();
            other[key] = value;
            assert_eq!(width(&other), None, "{key}");
        }
    }

    #[test]
    fn the_matrix_has_the_entries_of_the_definition() {
        let bytes = matrix(HadamardWidth::W16);
        assert_eq!(bytes.len(), 16 * 16 * 2);
        let entry = |row: usize, col: usize| bytes[(row * 16 + col) * 2 + 1];
        assert_eq!([entry(0, 0), entry(1, 1), entry(3, 1), entry(3, 3)], [0x3F, 0xBF, 0xBF, 0x3F]);
    }
}
