//! Checks how tensors are stored: dtypes and shapes that microscale understands but loaders
//! misread.

use safetensors::Dtype;

use super::finding::{Defect, Finding};
use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::packed::Packed;
use crate::dtype::FileDtype;
use crate::names::naming::Naming;
use crate::names::weight::WEIGHT;
use crate::read::tensor::Tensor;

/// Checks that norms, embeddings and other unquantized weights are floats.
pub(super) fn check_dtype(naming: Naming, tensor: &Tensor<'_>, findings: &mut Vec<Finding>) {
    let FileDtype::Plain(dtype) = tensor.dtype else { return };
    let is_integer = matches!(
        dtype,
        Dtype::BOOL
            | Dtype::U8
            | Dtype::I8
            | Dtype::U16
            | Dtype::I16
            | Dtype::U32
            | Dtype::I32
            | Dtype::U64
            | Dtype::I64
    );
    let is_float = tensor.name.ends_with(WEIGHT)
        && naming.unquantized_role(tensor.name, tensor.shape).is_some()
        || tensor.name.ends_with(".bias") && tensor.shape.len() == 1;
    if is_integer && is_float && tensor.scaling.is_none() {
        let what = format!("it is {}, and loaders expect floats", tensor.dtype);
        findings.push(Finding::of(Defect::Unreadable, tensor, what));
    }
}

/// Checks the scales of a quantized tensor.
pub(super) fn check_stored(packed: &Packed<'_>, findings: &mut Vec<Finding>) {
    let mut found = |what| findings.push(Finding::in_packed(Defect::Misread, packed, what));
    if let Some(scales) = packed.scales.filter(|scales| scales.dtype == FileDtype::F8_E8M0) {
        let (name, checkpoint_format) = (scales.name, packed.checkpoint_format());
        // transformers 5.23 converts such scales to integers by value instead of reinterpreting
        // their bits.
        if checkpoint_format == CheckpointFormat::CompressedTensors {
            found(format!("{name} is F8_E8M0, and compressed-tensors expects the same bytes as U8"));
        }
    }
    let stored = packed.storage.global_scale.as_ref().zip(packed.global_scale);
    let Some((global, (tensor, _))) = stored else { return };
    let expected = global.shape_for(&packed.shape);
    if expected != tensor.shape {
        // compressed-tensors divides by a scale without dimensions in bf16, because it has a lower
        // rank in PyTorch's type promotion.
        let (name, shape) = (tensor.name, tensor.shape);
        found(format!("{name} has shape {shape:?}, and its checkpoint format {expected:?}"));
    }
}
