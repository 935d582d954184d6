//! The compressed-tensors convention (0.20.0), which vLLM and transformers load: names, dtypes and config of MXFP4.
//!
//! `X.weight` [N, K] becomes `X.weight_packed` U8 [N, K/2] and `X.weight_scale` U8 [N, K/32]; K must be a multiple of 32.
//! Other names get the same suffixes. More than two dimensions keep the leading ones.

use safetensors::Dtype as FileDtype;
use serde_json::{Map, Value, json};

use super::error::{Error, Result};
use super::read::{Checkpoint, Tensor};
use super::selection::{Kept, Reason, kept};
use crate::{Format, QuantizedTensor};

const PACKED: &str = "_packed";
const SCALE: &str = "_scale";
const FORMAT: &str = "mxfp4-pack-quantized";
const VERSION: &str = "0.20.0";
const CONFIG: &str = "quantization_config";

/// The names of a quantized tensor's codes and scales.
pub fn names(tensor: &str) -> [String; 2] {
    [format!("{tensor}{PACKED}"), format!("{tensor}{SCALE}")]
}

/// The shapes of a quantized tensor's codes and scales.
pub fn shapes(shape: &[usize], format: Format) -> [Vec<usize>; 2] {
    let with_last = |f: fn(usize, Format) -> usize| {
        let mut shape = shape.to_vec();
        if let Some(last) = shape.last_mut() {
            *last = f(*last, format);
        }
        shape
    };
    [
        with_last(|cols, format| cols / format.block() * format.block_bytes()),
        with_last(|cols, format| cols / format.block()),
    ]
}

/// Why the convention cannot hold a tensor of this shape.
pub(super) fn cannot_hold(shape: &[usize]) -> Option<Reason> {
    let (cols, block) = (shape.last().copied().unwrap_or(1), Format::Mxfp4.block());
    (cols % block != 0).then_some(Reason::Columns { cols, block })
}

/// A tensor by the name that the model knows it by.
#[derive(Clone, Debug)]
pub enum Logical<'a> {
    /// Stored as it is.
    Plain(Tensor<'a>),
    /// Stored as codes and scales.
    Mxfp4(Packed<'a>),
}

/// A quantized tensor in a file.
#[derive(Clone, Debug)]
pub struct Packed<'a> {
    /// The name without suffix.
    pub name: &'a str,
    /// The sizes before packing.
    pub shape: Vec<usize>,
    /// The codes, two a byte.
    pub codes: Tensor<'a>,
    /// The block scales.
    pub scales: Tensor<'a>,
}

impl<'a> Logical<'a> {
    /// The name that the model knows.
    pub fn name(&self) -> &'a str {
        match self {
            Self::Plain(tensor) => tensor.name,
            Self::Mxfp4(packed) => packed.name,
        }
    }

    /// The sizes before packing.
    pub fn shape(&self) -> &[usize] {
        match self {
            Self::Plain(tensor) => tensor.shape,
            Self::Mxfp4(packed) => &packed.shape,
        }
    }

    /// The tensor whose file and place stand for it: itself, or the codes.
    pub fn stored(&self) -> &Tensor<'a> {
        match self {
            Self::Plain(tensor) => tensor,
            Self::Mxfp4(packed) => &packed.codes,
        }
    }
}

impl Packed<'_> {
    /// Reads codes and scales.
    ///
    /// # Errors
    /// [`Error::Tensor`] if their sizes are beyond what can be addressed.
    pub fn read(&self) -> Result<QuantizedTensor> {
        let (rows, cols) = Tensor { shape: &self.shape, ..self.codes }.matrix();
        let (codes, scales) = (self.codes.data.to_vec(), self.scales.data.to_vec());
        QuantizedTensor::from_parts(Format::Mxfp4, rows, cols, codes, scales)
            .map_err(|source| self.error(source))
    }

    /// Gives an error this tensor's name.
    pub fn error(&self, source: crate::Error) -> Error {
        Error::tensor(self.codes.file, self.name, source)
    }
}

/// Every tensor of a checkpoint by the name that the model knows, codes and scales taken together.
///
/// # Errors
/// [`Error::Packed`] for codes without scales, for shapes that do not fit, and for other formats than MXFP4.
pub fn logical(checkpoint: &Checkpoint) -> Result<Vec<Logical<'_>>> {
    checkpoint.tensors().filter_map(|tensor| resolve(checkpoint, tensor).transpose()).collect()
}

/// What a stored tensor stands for; `None` for scales, which their codes stand for.
pub(super) fn resolve<'a>(checkpoint: &'a Checkpoint, tensor: Tensor<'a>) -> Result<Option<Logical<'a>>> {
    if let Some(name) = tensor.name.strip_suffix(PACKED) {
        let scales = checkpoint.tensor(&names(name)[1]);
        if scales.is_some() || tensor.dtype == FileDtype::U8 {
            return packed(name, tensor, scales).map(|packed| Some(Logical::Mxfp4(packed)));
        }
    }
    if let Some(name) = tensor.name.strip_suffix(SCALE)
        && let Some(codes) = checkpoint.tensor(&names(name)[0])
        && packed(name, codes, Some(tensor)).is_ok()
    {
        return Ok(None);
    }
    Ok(Some(Logical::Plain(tensor)))
}

/// Checks that codes and scales are MXFP4.
fn packed<'a>(name: &'a str, codes: Tensor<'a>, scales: Option<Tensor<'a>>) -> Result<Packed<'a>> {
    let error = |why| Error::Packed { file: codes.file.into(), tensor: codes.name.into(), why };
    let Some(scales) = scales else {
        return Err(error(format!("its scales, {name}{SCALE}, are missing; complete the checkpoint")));
    };
    if codes.dtype != FileDtype::U8 || !matches!(scales.dtype, FileDtype::U8 | FileDtype::F8_E8M0) {
        let (codes, scales) = (codes.dtype, scales.dtype);
        return Err(error(format!(
            "{codes} with scales of {scales} is not MXFP4, the only format that can be read yet"
        )));
    }
    let mut shape = codes.shape.to_vec();
    let cols = shape.last_mut().map(|last| {
        *last = last.saturating_mul(2);
        *last
    });
    let [_, expected] = shapes(&shape, Format::Mxfp4);
    if cols.is_none_or(|cols| cols % Format::Mxfp4.block() != 0) || expected != scales.shape {
        let (codes, scales) = (codes.shape, scales.shape);
        return Err(error(format!(
            "codes of shape {codes:?} and scales of shape {scales:?} are not MXFP4 blocks of 32"
        )));
    }
    Ok(Packed { name, shape, codes, scales })
}

/// The config.json of the quantized checkpoint. `ignore` names the linear layers that were not quantized.
pub(super) fn add_config(config: &mut Map<String, Value>, ignore: &[String]) {
    let weights = json!({
        "dynamic": false,
        "group_size": Format::Mxfp4.block(),
        "num_bits": 4,
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": true,
        "type": "float",
    });
    let group = json!({
        "format": FORMAT,
        "input_activations": null,
        "output_activations": null,
        "targets": ["Linear"],
        "weights": weights,
    });
    let quantization = json!({
        "config_groups": { "group_0": group },
        "format": FORMAT,
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

/// Undoes [`add_config`].
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

    #[test]
    fn names_and_shapes_of_the_convention() {
        assert_eq!(names("a.weight"), ["a.weight_packed", "a.weight_scale"]);
        assert_eq!(names("experts.down"), ["experts.down_packed", "experts.down_scale"]);
        assert_eq!(shapes(&[8, 96], Format::Mxfp4), [vec![8, 48], vec![8, 3]]);
        assert_eq!(shapes(&[2, 8, 32], Format::Mxfp4), [vec![2, 8, 16], vec![2, 8, 1]]);
        assert_eq!(cannot_hold(&[8, 96]), None);
        assert_eq!(cannot_hold(&[32, 8]), Some(Reason::Columns { cols: 8, block: 32 }));
    }

    #[test]
    fn the_config_is_added_and_removed_without_touching_the_rest() {
        let original = json!({ "a": 1, "z": { "b": [1.5e-6] } });
        let Value::Object(mut config) = original.clone() else { unreachable!("it is an object") };
        assert_eq!(configured_method(&config), None);
        add_config(&mut config, &["lm_head".into()]);
        assert_eq!(configured_method(&config).as_deref(), Some("compressed-tensors"));
        assert_eq!(config[CONFIG]["ignore"], json!(["lm_head"]));
        remove_config(&mut config);
        assert_eq!(Value::Object(config).to_string(), original.to_string());
    }
}
