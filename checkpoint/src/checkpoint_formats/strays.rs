//! Stray parts: codes without scales, scales without codes, and codes that no storage describes.
//!
//! None of them is a tensor of the model, so no command may take one for values or copy it as one.
//! A plain FP8 tensor is the exception: diffusion models are published as casts to FP8 without
//! scales, and their values are the codes. FP8 and integers count as codes only if something says
//! that they are quantized:
//!
//! - the config, the words of layers, or ComfyUI's tensor `scaled_fp8`
//! - another part of the same weight
//! - scales of other weights of the same dtype, for linear layers
//!
//! Codes of other libraries are recognized by their names.

use safetensors::Dtype as Plain;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::part_name::PartName;
use crate::checkpoint_formats::w8_sources::{SCALED_FP8, scales_name};
use crate::dtype::FileDtype;
use crate::error::Error;
use crate::names::weight::{EXPERTS, WEIGHT};
use crate::read::checkpoint::Checkpoint;
use crate::read::description::{Description, MLX};
use crate::read::tensor::Tensor;

/// Block scales and scales of whole tensors, by the names of all libraries.
const SCALES: [PartName; 9] = [
    PartName::After("_scale"),
    PartName::After("_scale_inv"),
    PartName::After("_scales"),
    PartName::InPlace(".scale"),
    PartName::InPlace(".scale_weight"),
    PartName::InPlace(".scales"),
    PartName::InPlace(".weight_scales"),
    PartName::InPlace(".SCB"),
    PartName::After(".absmax"),
];

/// Further parts of a weight, which do not replace its scales.
const FURTHER: [PartName; 4] = [
    PartName::After("_scale_2"),
    PartName::After("_global_scale"),
    PartName::After("_zero_point"),
    PartName::After("_g_idx"),
];

/// Suffixes of codes that are not called like their weight.
const CODES: [&str; 2] = ["_packed", "_blocks"];

/// Suffixes of codes that only one library has, with descriptions.
const FOREIGN: [(&str, &str); 5] = [
    (".qweight", "integers of GPTQ or AWQ (qweight, qzeros and scales)"),
    (".W_q", "HQQ's integers"),
    (".q_weight", "ExLlamaV2's integers"),
    (".trellis", "ExLlamaV3's codes"),
    (".Qidxs", "QuIP#'s codes"),
];

/// Parts of a weight that tell whose codes it is.
const OWNERS: [(PartName, &str); 5] = [
    (PartName::After(".absmax"), "bitsandbytes' 4-bit codes"),
    (PartName::After(".quant_state.bitsandbytes__nf4"), "bitsandbytes' NF4"),
    (PartName::After(".quant_state.bitsandbytes__fp4"), "bitsandbytes' FP4"),
    (PartName::InPlace(".SCB"), "bitsandbytes' INT8"),
    (PartName::InPlace(".scales"), "codes of MLX or a similar library"),
];

/// Methods of integers. FP8 tensors next to them are values.
const INTEGER_METHODS: [&str; 6] = ["auto-round", "awq", "bitsandbytes", "gptq", "hqq", "intel/auto-round"];

/// How to get values where codes are not understood.
const INSTEAD: &str = "this is not understood, so take the checkpoint that was quantized, or dequantize this \
                       one with the library that wrote it";

/// The facts about a whole checkpoint that decide whether a tensor is a stray part.
pub(crate) struct Strays<'a> {
    checkpoint: &'a Checkpoint,
    /// The method in the config.
    method: Option<String>,
    /// True if the tensor `scaled_fp8` is there.
    scaled_fp8: bool,
    /// The dtypes of codes with scales.
    coded: Vec<FileDtype>,
}

impl<'a> Strays<'a> {
    /// Collects the facts. `coded` are the dtypes of codes that have scales.
    pub(crate) fn of(checkpoint: &'a Checkpoint, coded: Vec<FileDtype>) -> Self {
        let is_marker = |tensor: Tensor<'_>| tensor.name.rsplit('.').next() == Some(SCALED_FP8);
        Self {
            checkpoint,
            method: Description::method(checkpoint).map(|(method, _)| method),
            scaled_fp8: checkpoint.tensors().any(is_marker),
            coded,
        }
    }

    /// Returns the error of a stored tensor that is neither codes with scales nor a part of such,
    /// or `None` if it is a tensor of the model.
    pub(crate) fn error(&self, tensor: &Tensor<'_>) -> Option<Error> {
        if tensor.data.is_empty() || self.checkpoint.own_format() == CheckpointFormat::Gguf {
            return None;
        }
        match scaled_weight(tensor) {
            Some(weight) => self.error_of_scales(tensor, &weight),
            None => self.error_of_codes(tensor),
        }
    }

    /// Returns the stored tensor with the name of a part.
    fn part(&self, part: PartName, weight: &str) -> Option<Tensor<'a>> {
        self.checkpoint.tensor(&part.of(weight)?)
    }

    /// Returns the error of codes without scales, or under scales that no storage describes.
    fn error_of_codes(&self, tensor: &Tensor<'_>) -> Option<Error> {
        let (name, dtype) = (tensor.name, tensor.dtype);
        if tensor.values_dtype().is_some() {
            return None;
        }
        if let Some((_, whose)) = FOREIGN.iter().find(|(suffix, _)| name.ends_with(suffix)) {
            return Some(tensor.unreadable(format!("it is {whose}; {INSTEAD}")));
        }
        let of_codes = CODES.iter().find_map(|suffix| name.strip_suffix(suffix));
        let weight = of_codes.unwrap_or(name);
        let scales = SCALES.iter().find_map(|part| self.part(*part, weight));
        // No weights are values of fewer than eight bits.
        let is_narrow = matches!(dtype, FileDtype::Plain(Plain::F4 | Plain::F6_E2M3 | Plain::F6_E3M2));
        let may_be_codes = is_parameter(weight) && tensor.shape.len() > 1;
        if !(may_be_codes || is_narrow && scales.is_some()) {
            return None;
        }
        if let Some((part, whose)) = OWNERS.iter().find(|(part, _)| self.part(*part, weight).is_some()) {
            let part = part.suffix();
            let instead = if Description::is_mlx(self.checkpoint) { MLX } else { INSTEAD };
            return Some(tensor.unreadable(format!("it is {whose} ({dtype}, with {part}); {instead}")));
        }
        let is_declared = || is_codes(dtype) && (scales.is_some() || self.is_declared(tensor));
        if !is_narrow && of_codes.is_none() && !is_declared() {
            return None;
        }
        let Some(Tensor { name: scales, dtype: of, shape, .. }) = scales else {
            return Some(self.without_scales(tensor, weight));
        };
        let why = format!("it is {dtype} under {scales}, scales of {of} and shape {shape:?}; {INSTEAD}");
        Some(tensor.unreadable(why))
    }

    /// Returns whether something says that a weight of integers or FP8 is quantized.
    fn is_declared(&self, tensor: &Tensor<'_>) -> bool {
        let is_fp8 = tensor.dtype.is_fp8();
        let may_be = |method: &String| !is_fp8 || !INTEGER_METHODS.contains(&method.as_str());
        if self.method.as_ref().is_some_and(may_be) || self.checkpoint.layer_word(tensor.name).is_some() {
            return true;
        }
        let of_others = match self.checkpoint.layer_words.is_empty() {
            true => self.coded.contains(&tensor.dtype) || self.scaled_fp8 && is_fp8,
            // Layers that have no word are not quantized.
            false => false,
        };
        let is_linear = || self.checkpoint.naming.is_linear(tensor.name, tensor.shape) != Some(false);
        FURTHER.iter().any(|part| self.part(*part, tensor.name).is_some()) || of_others && is_linear()
    }

    /// Returns the error of missing scales.
    fn without_scales(&self, tensor: &Tensor<'_>, weight: &str) -> Error {
        let scales = match &self.method {
            _ if self.scaled_fp8 && tensor.dtype.is_fp8() => PartName::InPlace(".scale_weight").of(weight),
            Some(method) => scales_name(method, weight),
            None => None,
        };
        let scales = scales.unwrap_or_else(|| format!("{weight}_scale"));
        tensor.without(format!("it is {}, and its scales, {scales}, are missing", tensor.dtype))
    }

    /// Returns the error of scales of a weight without codes.
    fn error_of_scales(&self, tensor: &Tensor<'_>, weight: &str) -> Option<Error> {
        // ModelOpt's experts have scales called `X_weight_scale`.
        let names = [Some(weight), weight.strip_suffix("_weight")].into_iter().flatten();
        let is_stored = |name: &str| self.checkpoint.tensor(name).is_some();
        let has_codes = |name: &str| CODES.iter().any(|suffix| is_stored(&format!("{name}{suffix}")));
        if names.into_iter().any(|name| is_stored(name) || has_codes(name)) {
            return None;
        }
        // Of several parts without codes, the scales have the error.
        let is_further = FURTHER.iter().any(|part| tensor.name.ends_with(part.suffix()));
        if is_further && SCALES.iter().any(|part| self.part(*part, weight).is_some()) {
            return None;
        }
        let codes = CODES.map(|suffix| format!("{weight}{suffix}")).join(" nor ");
        let dtype = tensor.dtype;
        Some(tensor.without(format!("it is scales ({dtype}), and neither {weight} nor {codes} is there")))
    }
}

/// Returns the name of the weight that a tensor has scales of, if its name or dtype says that it is
/// scales.
fn scaled_weight(tensor: &Tensor<'_>) -> Option<String> {
    let (name, is_power) = (tensor.name, tensor.dtype == FileDtype::F8_E8M0);
    let of_parameter = SCALES.iter().chain(&FURTHER).find_map(|part| match part {
        PartName::After(suffix) => name.strip_suffix(suffix).filter(|weight| is_parameter(weight)),
        PartName::InPlace(_) => None,
    });
    // Norms have values called `.scale`.
    let of_layer = || match is_power {
        true => name.strip_suffix(".scale"),
        false => name.strip_suffix(".scale_weight"),
    };
    let of_power = || name.strip_suffix("_scale").filter(|_| is_power).map(Into::into);
    let of_layer = || of_layer().map(|layer| format!("{layer}{WEIGHT}"));
    of_parameter.map(Into::into).or_else(of_layer).or_else(of_power)
}

/// Returns whether a weight has the name, or a parameter with all experts of a layer.
fn is_parameter(name: &str) -> bool {
    let of_experts = || name.rsplit_once(EXPERTS).is_some_and(|(_, part)| !part.contains('.'));
    name.ends_with(WEIGHT) || of_experts()
}

/// Returns whether codes may have a dtype.
fn is_codes(dtype: FileDtype) -> bool {
    let is_integer =
        |plain| matches!(plain, Plain::I8 | Plain::U8 | Plain::I16 | Plain::U16 | Plain::I32 | Plain::U32);
    dtype.is_fp8() || dtype.plain().is_some_and(is_integer)
}
