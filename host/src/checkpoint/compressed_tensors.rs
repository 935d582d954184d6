//! The compressed-tensors convention of files (0.20.0), which vLLM and transformers load: names, dtypes and config.
//!
//! A tensor X (`fc.weight`, say) of sizes [N, K] becomes, where K is a multiple of the block:
//!
//! | format | codes | block scales | global scale |
//! |---|---|---|---|
//! | mxfp4 | `X_packed` U8 [N, K/2] | `X_scale` U8 [N, K/32] | |
//! | nvfp4 | `X_packed` U8 [N, K/2] | `X_scale` F8_E4M3 [N, K/16] | `X_global_scale` F32 \[1\], a divisor |
//! | mxfp8-e4m3 | `X` F8_E4M3 [N, K] | `X_scale` U8 [N, K/32] | |
//!
//! More than two dimensions keep the leading ones. There is no mxfp8-e5m2, and scales are in linear order.
//!
//! This is about files and not about arithmetic: codes and scales of any [`Convention`](crate::Convention) are stored so, to
//! the byte. Only a global scale may change, by a rounding: [`stored_global_scale`].

use safetensors::Dtype as FileDtype;
use serde_json::{Map, Value, json};

use super::error::{Error, Result};
use super::read::{Checkpoint, Tensor};
use super::selection::{Kept, Reason, kept};
use super::write::Outline;
use crate::formats::ScaleLayout;
use crate::{Format, GlobalScale, Recipe};

pub(super) const PACKED: &str = "_packed";
pub(super) const SCALE: &str = "_scale";
pub(super) const GLOBAL_SCALE: &str = "_global_scale";
const VERSION: &str = "0.20.0";
const CONFIG: &str = "quantization_config";

/// How a format is stored.
#[derive(Debug)]
pub(super) struct Storage {
    format: Format,
    /// What the config calls it.
    name: &'static str,
    /// What follows the tensor's name.
    codes_suffix: &'static str,
    codes: FileDtype,
    scales: FileDtype,
    has_global_scale: bool,
    strategy: &'static str,
    scale_dtype: &'static str,
}

/// The formats that the convention has.
const STORED: &[Storage] = &[
    Storage {
        format: Format::Mxfp4,
        name: "mxfp4-pack-quantized",
        codes_suffix: PACKED,
        codes: FileDtype::U8,
        scales: FileDtype::U8,
        has_global_scale: false,
        strategy: "group",
        scale_dtype: "torch.uint8",
    },
    Storage {
        format: Format::Nvfp4,
        name: "nvfp4-pack-quantized",
        codes_suffix: PACKED,
        codes: FileDtype::U8,
        scales: FileDtype::F8_E4M3,
        has_global_scale: true,
        strategy: "tensor_group",
        scale_dtype: "torch.float8_e4m3fn",
    },
    Storage {
        format: Format::Mxfp8E4m3,
        name: "mxfp8-quantized",
        codes_suffix: "",
        codes: FileDtype::F8_E4M3,
        scales: FileDtype::U8,
        has_global_scale: false,
        strategy: "group",
        scale_dtype: "torch.uint8",
    },
];

/// Makes sure that files can hold what a recipe gives.
///
/// # Errors
/// [`Error::NotStored`] for a format that the convention lacks, [`Error::ScaleLayout`] for scales that are not linear.
pub fn check(recipe: &Recipe) -> Result<()> {
    Storage::of(recipe).map(|_| ())
}

/// What a file holds for a global scale: a divisor, always.
///
/// The inverse of a multiplier is rounded to f32, so the values that loaders make of the file may differ from those of the
/// multiplier in the last place. A tensor without a global scale gets 1, because loaders want one, and that changes nothing.
pub fn stored_global_scale(global_scale: Option<GlobalScale>) -> GlobalScale {
    GlobalScale::Divisor(match global_scale {
        None => 1.0,
        Some(GlobalScale::Divisor(divisor)) => divisor,
        Some(GlobalScale::Multiplier(multiplier)) => 1.0 / multiplier,
    })
}

/// The shape of a tensor's codes in a file.
pub(super) fn codes_shape(shape: &[usize], format: Format) -> Vec<usize> {
    with_last(shape, |cols| cols / format.block() * (format.block() * format.bits() / 8))
}

/// The shape of a tensor's block scales in a file.
pub(super) fn scales_shape(shape: &[usize], format: Format) -> Vec<usize> {
    with_last(shape, |cols| cols / format.block())
}

fn with_last(shape: &[usize], f: impl Fn(usize) -> usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if let Some(last) = shape.last_mut() {
        *last = f(*last);
    }
    shape
}

/// Why the convention cannot hold a tensor of this shape.
pub(super) fn cannot_hold(shape: &[usize], format: Format) -> Option<Reason> {
    let (cols, block) = (shape.last().copied().unwrap_or(1), format.block());
    (cols % block != 0).then_some(Reason::Columns { cols, block })
}

impl Storage {
    /// How the result of a recipe is stored.
    ///
    /// # Errors
    /// Those of [`check`].
    pub(super) fn of(recipe: &Recipe) -> Result<&'static Self> {
        if recipe.scale_layout != ScaleLayout::Linear {
            return Err(Error::ScaleLayout { layout: recipe.scale_layout });
        }
        let format = recipe.format();
        STORED.iter().find(|stored| stored.format == format).ok_or(Error::NotStored { format })
    }

    /// The tensors that take one's place: codes, block scales and, if the format has one, the global scale.
    pub(super) fn outlines(&self, name: &str, shape: &[usize]) -> Vec<Outline> {
        let outline = |suffix, dtype, shape| Outline { name: format!("{name}{suffix}"), dtype, shape };
        let mut outlines = vec![
            outline(self.codes_suffix, self.codes, codes_shape(shape, self.format)),
            outline(SCALE, self.scales, scales_shape(shape, self.format)),
        ];
        if self.has_global_scale {
            outlines.push(outline(GLOBAL_SCALE, FileDtype::F32, vec![1]));
        }
        outlines
    }

    /// The config.json of the quantized checkpoint. `ignore` names the linear layers that were not quantized.
    pub(super) fn add_config(&self, config: &mut Map<String, Value>, ignore: &[String]) {
        let weights = json!({
            "dynamic": false,
            "group_size": self.format.block(),
            "num_bits": self.format.bits(),
            "scale_dtype": self.scale_dtype,
            "strategy": self.strategy,
            "symmetric": true,
            "type": "float",
        });
        let group = json!({
            "format": self.name,
            "input_activations": null,
            "output_activations": null,
            "targets": ["Linear"],
            "weights": weights,
        });
        let quantization = json!({
            "config_groups": { "group_0": group },
            "format": self.name,
            "global_compression_ratio": null,
            "ignore": ignore,
            "kv_cache_scheme": null,
            "moe_sparsity_config": null,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": VERSION,
        });
        config.insert(CONFIG.into(), quantization);
    }
}

/// Undoes [`Storage::add_config`].
pub(super) fn remove_config(config: &mut Map<String, Value>) {
    config.shift_remove(CONFIG);
}

/// The method of a config.json that says that its checkpoint is quantized.
pub(super) fn configured_method(config: &Map<String, Value>) -> Option<String> {
    let method = config.get(CONFIG)?.get("quant_method").and_then(Value::as_str);
    Some(method.unwrap_or("of an unknown method").into())
}

/// The module of a linear layer that is copied: what the config must tell loaders to ignore. Embeddings and norms are not
/// linear layers to them.
pub(super) fn ignored_module(tensor: &Tensor<'_>, reason: &Reason) -> Option<String> {
    let module = tensor.name.strip_suffix(".weight")?;
    let other =
        matches!(reason, Reason::Dtype(_)) || matches!(kept(tensor.name), Some(Kept::Norm | Kept::Embedding));
    (tensor.shape.len() == 2 && !other).then(|| module.into())
}

/// The output head's module, for a model that generates text and stores no head because it is the embedding's transpose.
pub(super) fn tied_head(config: &Map<String, Value>, checkpoint: &Checkpoint) -> Option<String> {
    let generates = |name: &Value| {
        let name = name.as_str().unwrap_or_default();
        name.ends_with("ForCausalLM") || name.ends_with("ForConditionalGeneration")
    };
    let architectures = config.get("architectures").and_then(Value::as_array)?;
    let stored = checkpoint.tensors().any(|tensor| kept(tensor.name) == Some(Kept::OutputHead));
    (architectures.iter().any(generates) && !stored).then(|| "lm_head".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Convention;

    fn storage(format: Format) -> &'static Storage {
        Storage::of(&Recipe::of(format, Convention::default_for(format)).unwrap()).unwrap()
    }

    #[test]
    fn names_dtypes_and_shapes_of_the_convention() {
        let stored = |format, name, shape: &[usize]| -> Vec<_> {
            let outlines = storage(format).outlines(name, shape).into_iter();
            outlines.map(|outline| (outline.name, outline.dtype, outline.shape)).collect()
        };
        let (u8, e4m3) = (FileDtype::U8, FileDtype::F8_E4M3);
        assert_eq!(
            stored(Format::Mxfp4, "a.weight", &[8, 96]),
            [("a.weight_packed".into(), u8, vec![8, 48]), ("a.weight_scale".into(), u8, vec![8, 3])]
        );
        assert_eq!(
            stored(Format::Nvfp4, "experts.down", &[2, 8, 48]),
            [
                ("experts.down_packed".into(), u8, vec![2, 8, 24]),
                ("experts.down_scale".into(), e4m3, vec![2, 8, 3]),
                ("experts.down_global_scale".into(), FileDtype::F32, vec![1]),
            ]
        );
        assert_eq!(
            stored(Format::Mxfp8E4m3, "a.weight", &[8, 96]),
            [("a.weight".into(), e4m3, vec![8, 96]), ("a.weight_scale".into(), u8, vec![8, 3])]
        );
    }

    #[test]
    fn what_cannot_be_stored_is_said() {
        assert_eq!(cannot_hold(&[8, 96], Format::Mxfp4), None);
        assert_eq!(cannot_hold(&[8, 48], Format::Nvfp4), None);
        assert_eq!(cannot_hold(&[8, 48], Format::Mxfp4), Some(Reason::Columns { cols: 48, block: 32 }));
        let e5m2 = Recipe::of(Format::Mxfp8E5m2, Convention::Ocp).unwrap();
        assert!(matches!(check(&e5m2), Err(Error::NotStored { format: Format::Mxfp8E5m2 })));
        let swizzled = Recipe { scale_layout: ScaleLayout::Swizzled, ..Recipe::default() };
        assert!(matches!(check(&swizzled), Err(Error::ScaleLayout { .. })));
    }

    #[test]
    fn every_global_scale_can_be_stored() {
        assert_eq!(stored_global_scale(None), GlobalScale::Divisor(1.0));
        assert_eq!(stored_global_scale(Some(GlobalScale::Divisor(3.0))), GlobalScale::Divisor(3.0));
        assert_eq!(stored_global_scale(Some(GlobalScale::Multiplier(0.25))), GlobalScale::Divisor(4.0));
        for multiplier in [f32::MIN_POSITIVE, f32::MAX / 448.0] {
            let multiplier = GlobalScale::Multiplier(multiplier);
            assert!(
                multiplier.in_range() && stored_global_scale(Some(multiplier)).in_range(),
                "{multiplier:?}"
            );
        }
    }

    #[test]
    fn the_config_is_added_and_removed_without_touching_the_rest() {
        let original = json!({ "a": 1, "z": { "b": [1.5e-6] } });
        let Value::Object(mut config) = original.clone() else { unreachable!("it is an object") };
        assert_eq!(configured_method(&config), None);
        storage(Format::Nvfp4).add_config(&mut config, &["lm_head".into()]);
        assert_eq!(configured_method(&config).as_deref(), Some("compressed-tensors"));
        assert_eq!(config[CONFIG]["ignore"], json!(["lm_head"]));
        remove_config(&mut config);
        assert_eq!(Value::Object(config).to_string(), original.to_string());
    }
}
