//! Reading codes of eight bits under scales of their own: which stored tensors belong together.
//!
//! | codes X | scales | of |
//! |---|---|---|
//! | F8_E4M3 | `X_scale_inv`, for each block of rows and columns | DeepSeek-V3, Qwen3-FP8; transformers' method `fp8` |
//!
//! Scales are F32, F16, BF16 or powers of two (F8_E8M0, or U8 of the same bytes). A code is multiplied with its scale,
//! whatever that is called. How large blocks are is what the config says, or else [`BLOCK`].

use serde_json::Value;

use crate::conventions::table::CONVENTIONS;
use crate::error::{Error, Result};
use crate::names::weight::WEIGHT;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::{Description, quantization};
use crate::read::scaling::{Scaling, are_codes, are_scales, grid};
use crate::read::tensor::Tensor;

/// The ends of the names of scales, after those of their codes.
const SCALES: [&str; 1] = ["_scale_inv"];

/// The ends of the names of what goes with codes and is about a layer's inputs, in the place of [`WEIGHT`].
const INPUTS: [&str; 2] = [".input_scale", ".activation_scale"];

/// The methods whose configs say that there are such codes, and the end of the names of their scales.
const METHODS: [(&str, &str); 1] = [("fp8", "_scale_inv")];

/// Rows and columns of a block, where no config says it.
const BLOCK: [usize; 2] = [128, 128];

/// A tensor of codes with its scales; `None` if it is none.
///
/// # Errors
/// [`ConventionError::Packed`](crate::ConventionError::Packed) for scales that do not fit, and for those that are
/// not there although the config says that there are some.
pub(crate) fn scaled<'a>(checkpoint: &'a Checkpoint, codes: Tensor<'a>) -> Result<Option<Tensor<'a>>> {
    let [.., rows, cols] = *codes.shape else { return Ok(None) };
    if !are_codes(codes.dtype) || codes.data.is_empty() {
        return Ok(None);
    }
    let found = SCALES.iter().find_map(|end| checkpoint.tensor(&format!("{}{end}", codes.name)));
    let Some(scales) = found else { return without_scales(checkpoint, &codes).map_or(Ok(None), Err) };
    if let Some(why) = CONVENTIONS.iter().find_map(|convention| (convention.rescaled)(checkpoint, codes.name))
    {
        return Err(codes.unreadable(why));
    }
    let Tensor { name, dtype, shape, data, file, .. } = scales;
    if !are_scales(dtype) {
        return Err(codes.unreadable(format!("its scales, {name}, are {dtype}, which no scales are")));
    }
    let block = block(checkpoint);
    let of_matrix = grid([rows, cols], block);
    let matrices = &codes.shape[..codes.shape.len() - 2];
    if shape.split_last_chunk() != Some((matrices, &of_matrix)) {
        let (codes_shape, [height, width]) = (codes.shape, block);
        return Err(codes.unreadable(format!(
            "codes of shape {codes_shape:?} and scales of shape {shape:?} ({name}) are not one scale for each block of \
             {height}x{width}"
        )));
    }
    let scaling = Scaling { name, dtype, data, file, block, shared: false };
    Ok(Some(Tensor { scaling: Some(scaling), ..codes }))
}

/// The error of a weight that has no scales, if the config says that it should.
fn without_scales(checkpoint: &Checkpoint, codes: &Tensor<'_>) -> Option<Error> {
    let (method, _) = Description::method(checkpoint)?;
    let (_, end) = METHODS.iter().find(|(known, _)| method == *known)?;
    let is_weight = codes.name.ends_with(WEIGHT);
    is_weight.then(|| codes.without(format!("its scales, {}{end}, are missing", codes.name)))
}

/// Rows and columns of a block, by the config.
fn block(checkpoint: &Checkpoint) -> [usize; 2] {
    let config = checkpoint.config.as_ref().and_then(|config| quantization(&config.object.json));
    let stated = config.and_then(|config| sizes(config.get("weight_block_size")?));
    stated.unwrap_or(BLOCK)
}

/// Two sizes, none of them 0.
fn sizes(json: &Value) -> Option<[usize; 2]> {
    let sizes =
        json.as_array()?.iter().map(|size| usize::try_from(size.as_u64()?).ok().filter(|size| *size > 0));
    sizes.collect::<Option<Vec<_>>>()?.try_into().ok()
}

/// The names of the codes that a tensor of this name may belong to.
pub(crate) fn owners_of(name: &str) -> impl Iterator<Item = String> {
    let scales = SCALES.iter().filter_map(|end| name.strip_suffix(end)).map(String::from);
    let inputs = INPUTS.iter().filter_map(|end| name.strip_suffix(end));
    scales.chain(inputs.map(|layer| format!("{layer}{WEIGHT}")))
}
