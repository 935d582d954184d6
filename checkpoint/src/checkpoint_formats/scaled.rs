//! Reading codes of eight bits under scales of their own: which stored tensors belong together.
//!
//! | codes X | scales | of |
//! |---|---|---|
//! | F8_E4M3 | `X_scale_inv`, for each block of rows and columns | DeepSeek-V3, Qwen3-FP8; transformers' method `fp8` |
//! | F8_E4M3 | `.scale` in the place of X's `.weight`, for each block | DeepSeek-V4's layers, and its experts where they are FP8 |
//! | F8_E4M3, I8 | `X_scale`, for the tensor, each row, each group of a row or each block | compressed-tensors' `float-quantized`, `int-quantized` |
//! | F8_E4M3 | `X_scale`, for the tensor or each row | ModelOpt's FP8 |
//!
//! MXFP8 and MXFP4 are formats that are written too, and so are known to [`packed`](crate::checkpoint_formats::packed).
//!
//! Scales are F32, F16, BF16 or powers of two (F8_E8M0, or U8 of the same bytes). A code is multiplied with its scale,
//! whatever that is called. How large blocks are is what the config says, or else [`BLOCK`].

use microscale::ScaleLayout;
use serde_json::Value;

use crate::checkpoint_formats::table::rescaled;
use crate::dtype::FileDtype;
use crate::error::{Error, Result};
use crate::names::weight::WEIGHT;
use crate::read::checkpoint::{Checkpoint, ScaleSizes};
use crate::read::description::{Description, quantization};
use crate::read::scaling::{Scaling, are_codes, are_scales, grid};
use crate::read::tensor::{Tensor, elements};

/// The ends of the names of scales, after those of their codes.
const SCALES: [&str; 2] = ["_scale_inv", "_scale"];

/// The end of the names of scales of FP8 in the place of [`WEIGHT`].
const BESIDE: &str = ".scale";

/// The end of the names of zero points, which must all be 0.
const ZERO_POINT: &str = "_zero_point";

/// The ends of the names of what goes with codes and is about a layer's inputs, or says to ComfyUI what they are, in the place of
/// [`WEIGHT`].
const INPUTS: [&str; 4] = [".input_scale", ".input_zero_point", ".activation_scale", ".comfy_quant"];

/// The end of the names of a scale of all other scales.
const GLOBAL: &str = "_global_scale";

/// The end of the names of the groups that columns are in, where these are not consecutive.
const ORDER: &str = "_g_idx";

/// The beginnings of the methods whose weights of such codes have scales, and the end of the names of these.
const METHODS: [(&str, &str); 3] =
    [("fp8", "_scale_inv"), ("compressed-tensors", "_scale"), ("modelopt", "_scale")];

/// Rows and columns of a block, where no config says it.
const BLOCK: [usize; 2] = [128, 128];

/// A tensor of codes with its scales; `None` if it is none.
///
/// # Errors
/// [`FormatError::Packed`](crate::FormatError::Packed) for scales that do not fit, and for those that are
/// not there although the config says that there are some.
pub(crate) fn scaled<'a>(checkpoint: &'a Checkpoint, codes: Tensor<'a>) -> Result<Option<Tensor<'a>>> {
    if !are_codes(codes.dtype) || codes.shape.len() < 2 || codes.data.is_empty() {
        return Ok(None);
    }
    let named = SCALES.iter().filter_map(|end| checkpoint.tensor(&format!("{}{end}", codes.name)));
    let beside = || checkpoint.tensor(&format!("{}{BESIDE}", codes.name.strip_suffix(WEIGHT)?));
    let mut found = named.chain(beside().filter(|_| codes.dtype == FileDtype::F8_E4M3));
    let Some(scales) = found.next() else {
        return without_scales(checkpoint, &codes).map_or(Ok(None), Err);
    };
    if let Some(second) = found.next() {
        let (first, second) = (scales.name, second.name);
        return Err(
            codes.unreadable(format!("it has two tensors of scales, {first} and {second}; remove one"))
        );
    }
    if let Some(why) = rescaled(checkpoint, codes.name) {
        return Err(codes.unreadable(why));
    }
    let Tensor { name, dtype, shape, data, file, .. } = scales;
    if !are_scales(dtype) {
        return Err(codes.unreadable(format!("its scales, {name}, are {dtype}, which no scales are")));
    }
    if let Some(zero_points) = checkpoint.tensor(&format!("{}{ZERO_POINT}", codes.name))
        && zero_points.data.iter().any(|byte| *byte != 0)
    {
        let zero_points = zero_points.name;
        return Err(
            codes.unreadable(format!("its zero points, {zero_points}, are not 0, which is not understood"))
        );
    }
    if let Some(global) = checkpoint.tensor(&format!("{}{GLOBAL}", codes.name)) {
        return Err(codes.unreadable(format!(
            "its scales have one of their own, {} (compressed-tensors' tensor_group), which that library itself leaves out of codes of \
             eight bits; quantize the original again",
            global.name
        )));
    }
    if let Some(order) = checkpoint.tensor(&format!("{}{ORDER}", codes.name)) {
        return Err(codes.unreadable(format!(
            "its columns are in an order of their own, {}, which is not understood",
            order.name
        )));
    }
    let sizes = || ScaleSizes { blocks: blocks(checkpoint), groups: group_sizes(checkpoint) };
    let ScaleSizes { blocks, groups: said } = checkpoint.scale_sizes.get_or_init(sizes);
    let mut fitting: Vec<_> = blocks.iter().filter_map(|block| fit(codes.shape, shape, *block)).collect();
    if fitting.is_empty() {
        fitting.extend(groups(codes.shape, shape, said).map(|block| (block, false)));
    }
    fitting.dedup();
    let [(block, shared)] = fitting[..] else {
        let sizes: Vec<_> = blocks.iter().map(|[rows, cols]| format!("{rows}x{cols}")).collect();
        let (codes_shape, sizes) = (codes.shape, sizes.join(" or "));
        let are = match fitting.is_empty() {
            true => "are neither one scale for all, nor for each row, nor for equal groups of a row, nor",
            false => "may be one scale",
        };
        return Err(codes.unreadable(format!(
            "codes of shape {codes_shape:?} and scales of shape {shape:?} ({name}) {are} for each block of {sizes}"
        )));
    };
    let layout = ScaleLayout::Linear;
    let scaling = Scaling { name, dtype, data, file, block, shared, bits: 8, layout };
    Ok(Some(Tensor { scaling: Some(scaling), ..codes }))
}

/// The error of a weight that has no scales, if the config says that it should.
fn without_scales(checkpoint: &Checkpoint, codes: &Tensor<'_>) -> Option<Error> {
    let (method, _) = Description::method(checkpoint)?;
    let (_, end) = METHODS.iter().find(|(known, _)| method.starts_with(known))?;
    let is_weight = codes.name.ends_with(WEIGHT);
    is_weight.then(|| codes.without(format!("its scales, {}{end}, are missing", codes.name)))
}

/// Rows and columns of the block that each scale is for, and whether all matrices share theirs; `None` if the
/// scales are not as many as that needs. Of scales for blocks, these are of the size that is given.
fn fit(codes: &[usize], scales: &[usize], block: [usize; 2]) -> Option<([usize; 2], bool)> {
    let (matrices, &[rows, cols]) = codes.split_last_chunk()?;
    if elements(scales) == 1 {
        return Some(([rows, cols], true));
    }
    let whole = [[1, cols], [rows, cols], block];
    let of_matrices =
        |block: &[usize; 2]| scales.split_last_chunk() == Some((matrices, &grid([rows, cols], *block)));
    let of_rows = matrices.is_empty() && scales == [rows];
    let block = if of_rows { Some([1, cols]) } else { whole.into_iter().find(of_matrices) };
    block.map(|block| (block, false))
}

/// Rows and columns of the group of a row that each scale is for, if the scales are as many as equal groups need, and these of a
/// size that is `said`, if any is.
fn groups(codes: &[usize], scales: &[usize], said: &[usize]) -> Option<[usize; 2]> {
    let (of_codes, of_scales) = (codes.split_last()?, scales.split_last()?);
    let (cols, groups) = (*of_codes.0, *of_scales.0);
    let fits = of_codes.1 == of_scales.1 && groups > 0 && cols.is_multiple_of(groups);
    let size = cols.checked_div(groups).filter(|size| fits && (said.is_empty() || said.contains(size)))?;
    Some([1, size])
}

/// The sizes of groups, by the config.
fn group_sizes(checkpoint: &Checkpoint) -> Vec<usize> {
    let config = checkpoint.config.as_ref().and_then(|config| quantization(&config.object.json));
    let groups = config.and_then(|config| config.get("config_groups")?.as_object());
    let of_groups = groups.into_iter().flat_map(|groups| groups.values());
    let sizes = of_groups.filter_map(|group| group.get("weights")?.get("group_size")?.as_u64());
    let mut sizes: Vec<_> = sizes.filter_map(|size| usize::try_from(size).ok()).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Rows and columns of blocks, by the config: of compressed-tensors', each group may have others.
fn blocks(checkpoint: &Checkpoint) -> Vec<[usize; 2]> {
    let config = checkpoint.config.as_ref().and_then(|config| quantization(&config.object.json));
    let groups = config.and_then(|config| config.get("config_groups")?.as_object());
    let groups = groups.into_iter().flat_map(|groups| groups.values());
    let of_groups = groups.filter_map(|group| sizes(group.get("weights")?.get("block_structure")?));
    let of_all = config.and_then(|config| sizes(config.get("weight_block_size")?));
    let mut blocks: Vec<_> = of_all.into_iter().chain(of_groups).collect();
    blocks.sort();
    blocks.dedup();
    if blocks.is_empty() { vec![BLOCK] } else { blocks }
}

/// Two sizes, none of them 0.
fn sizes(json: &Value) -> Option<[usize; 2]> {
    let sizes =
        json.as_array()?.iter().map(|size| usize::try_from(size.as_u64()?).ok().filter(|size| *size > 0));
    sizes.collect::<Option<Vec<_>>>()?.try_into().ok()
}

/// The names of the codes that a tensor of this name may belong to.
pub(crate) fn owners_of(name: &str) -> impl Iterator<Item = String> {
    let ends = SCALES.iter().chain([&ZERO_POINT]);
    let scales = ends.filter_map(|end| name.strip_suffix(end)).map(String::from);
    let beside = INPUTS.iter().chain([&BESIDE]).filter_map(|end| name.strip_suffix(end));
    scales.chain(beside.map(|layer| format!("{layer}{WEIGHT}")))
}
