//! W8 sources: FP8 and INT8 weights under scales, which are input of all commands and never
//! written.
//!
//! Each source is a row of [`W8_SOURCES`]. MXFP8 and MXFP4 are formats that are written too, so
//! [`packed`](crate::checkpoint_formats::packed) finds them.
//!
//! Scales are F32, F16, BF16 or powers of two (F8_E8M0, or U8 with the same bytes). Every source
//! multiplies codes by their scales, whatever it calls them. FP8 is E4M3 or E5M2.

use serde_json::Value;

use crate::checkpoint_formats::part_name::{INPUTS, PartName};
use crate::checkpoint_formats::table::{rescaled, stored};
use crate::dtype::FileDtype;
use crate::error::Result;
use crate::read::checkpoint::{Checkpoint, ScaleSizes};
use crate::read::description::quantization;
use crate::read::scale_grid::{CodeKind, ScaleGrid, are_scales, grid};
use crate::read::tensor::{Tensor, elements};

/// A source of FP8 or INT8 weights.
struct W8Source {
    /// Prefix of the method in configs with these scales.
    method: Option<&'static str>,
    /// Dtypes of the codes.
    codes: &'static [FileDtype],
    scales: PartName,
    /// Grids of scales, in order of preference.
    grids: &'static [Grid],
}

/// A shape of scales over a matrix of shape [N, K], with blocks of R rows and C columns.
///
/// Leading dimensions are the same in codes and scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grid {
    /// A single scale for all matrices, in any number of dimensions.
    Tensor,
    /// A scale per row: `[N]`, of a single matrix.
    RowList,
    /// A scale per row: `[N, 1]`.
    Row,
    /// A scale per matrix: `[1, 1]`.
    Matrix,
    /// A scale per block: [⌈N/R⌉, ⌈K/C⌉].
    Block,
    /// A scale per block: [⌈N/R⌉, 1, ⌈K/C⌉, 1].
    BlockApart,
    /// A scale per group of G columns in a row: [N, K/G]. It counts only if no other grid fits.
    Group,
}

const FP8: &[FileDtype] = &[FileDtype::F8_E4M3, FileDtype::F8_E5M2];
const FP8_OR_INT8: &[FileDtype] = &[FileDtype::F8_E4M3, FileDtype::F8_E5M2, FileDtype::I8];

/// Grids of compressed-tensors. Files of the method `fp8` have also been seen with each of them.
const ANY_GRID: &[Grid] = &[Grid::Tensor, Grid::RowList, Grid::Row, Grid::Matrix, Grid::Block, Grid::Group];

/// All sources. Several rows may name the same scales.
const W8_SOURCES: &[W8Source] = &[
    // DeepSeek-V3 and Qwen3-FP8.
    W8Source {
        method: Some("fp8"),
        codes: FP8_OR_INT8,
        scales: PartName::After("_scale_inv"),
        grids: ANY_GRID,
    },
    // `float-quantized` and `int-quantized`.
    W8Source {
        method: Some("compressed-tensors"),
        codes: FP8_OR_INT8,
        scales: PartName::After("_scale"),
        grids: ANY_GRID,
    },
    // ModelOpt's FP8.
    W8Source {
        method: Some("modelopt"),
        codes: FP8,
        scales: PartName::After("_scale"),
        grids: &[Grid::Tensor, Grid::RowList],
    },
    // ModelOpt's FP8_PB_WO.
    W8Source {
        method: Some("modelopt"),
        codes: FP8,
        scales: PartName::After("_scale"),
        grids: &[Grid::Tensor, Grid::BlockApart],
    },
    // DeepSeek-V4's layers, and its experts if they are FP8.
    W8Source { method: None, codes: FP8, scales: PartName::InPlace(".scale"), grids: ANY_GRID },
    // ComfyUI's files with the tensor `scaled_fp8`.
    W8Source {
        method: None,
        codes: FP8,
        scales: SCALE_WEIGHT,
        grids: &[Grid::Tensor, Grid::RowList, Grid::Row],
    },
];

const SCALE_WEIGHT: PartName = PartName::InPlace(".scale_weight");

/// The name of an empty tensor which says that FP8 layers have scales, in ComfyUI's files from
/// before each layer named its format.
pub(crate) const SCALED_FP8: &str = "scaled_fp8";

/// Zero points of codes. They must all be 0.
const ZERO_POINT: PartName = PartName::After("_zero_point");

/// Scales of scales, which are not understood, and who has them.
const GLOBALS: [(PartName, &str); 2] = [
    (
        PartName::After("_global_scale"),
        "compressed-tensors' tensor_group, which that library itself leaves out of codes of eight bits",
    ),
    (PartName::After("_scale_2"), "Quark's second stage"),
];

/// Order of the columns, where groups are not consecutive. It is not understood.
const ORDER: PartName = PartName::After("_g_idx");

/// Rows and columns of a block if no config has them.
const BLOCK: [usize; 2] = [128, 128];

/// Returns a tensor of codes with its scales, or `None` for other tensors.
///
/// # Errors
/// [`FormatError::Packed`](crate::FormatError::Packed) for scales that do not fit.
pub(crate) fn under_scales<'a>(checkpoint: &'a Checkpoint, codes: Tensor<'a>) -> Result<Option<Tensor<'a>>> {
    let sources = || W8_SOURCES.iter().filter(|source| source.codes.contains(&codes.dtype));
    let Some(kind) = CodeKind::of(codes.dtype).filter(|_| sources().next().is_some()) else {
        return Ok(None);
    };
    if codes.shape.len() < 2 || codes.data.is_empty() {
        return Ok(None);
    }
    let (mut found, mut grids): (Option<Tensor<'_>>, Vec<Grid>) = (None, Vec::new());
    for source in sources() {
        let scales = source.scales.of(codes.name).and_then(|name| checkpoint.tensor(&name));
        let Some(scales) = scales else { continue };
        if let Some(Tensor { name: first, .. }) = found.filter(|first| first.name != scales.name) {
            let second = scales.name;
            return Err(
                codes.unreadable(format!("it has two tensors of scales, {first} and {second}; remove one"))
            );
        }
        found = Some(scales);
        grids.extend(source.grids);
    }
    let Some(scales) = found else { return Ok(None) };
    if let Some(why) = rescaled(checkpoint, codes.name) {
        return Err(codes.unreadable(why));
    }
    let Tensor { name, dtype, shape, .. } = scales;
    if !are_scales(dtype) {
        return Err(codes.unreadable(format!("its scales, {name}, are {dtype}, which no scales are")));
    }
    if let Some(why) = not_understood(checkpoint, codes.name) {
        return Err(codes.unreadable(why));
    }
    let sizes = || ScaleSizes { blocks: blocks(checkpoint), groups: group_sizes(checkpoint) };
    let sizes = checkpoint.scale_sizes.get_or_init(sizes);
    let fitting = fitting(&grids, codes.shape, shape, sizes);
    let [(block, shared)] = fitting[..] else {
        let sizes: Vec<_> = sizes.blocks.iter().map(|[rows, cols]| format!("{rows}x{cols}")).collect();
        let (codes_shape, sizes) = (codes.shape, sizes.join(" or "));
        let are = match fitting.is_empty() {
            true => "are neither one scale for all, nor for each row, nor for equal groups of a row, nor",
            false => "may be one scale",
        };
        return Err(codes.unreadable(format!(
            "codes of shape {codes_shape:?} and scales of shape {shape:?} ({name}) {are} for each block of {sizes}"
        )));
    };
    let scaling = Some(ScaleGrid { shared, ..scales.scale_grid(block, kind) });
    Ok(Some(Tensor { scaling, ..codes }))
}

/// Returns why codes with these parts cannot be read.
fn not_understood(checkpoint: &Checkpoint, codes: &str) -> Option<String> {
    let part = |name: PartName| checkpoint.tensor(&name.of(codes)?);
    if let Some(zero_points) = part(ZERO_POINT)
        && zero_points.data.iter().any(|byte| *byte != 0)
    {
        let zero_points = zero_points.name;
        return Some(format!("its zero points, {zero_points}, are not 0, which is not understood"));
    }
    let global = GLOBALS.iter().find_map(|(name, whose)| Some((part(*name)?, whose)));
    if let Some((global, whose)) = global {
        return Some(format!(
            "its scales have one of their own, {} ({whose}); quantize the original again",
            global.name
        ));
    }
    let order = part(ORDER)?;
    Some(format!("its columns are in an order of their own, {}, which is not understood", order.name))
}

/// Returns the name of the scales of a weight, as a method of configs has it.
pub(crate) fn scales_name(method: &str, weight: &str) -> Option<String> {
    let is_source = |source: &&W8Source| source.method.is_some_and(|known| method.starts_with(known));
    W8_SOURCES.iter().find(is_source)?.scales.of(weight)
}

/// Returns the stored parts of a tensor of codes under scales.
pub(crate) fn parts<'a>(checkpoint: &'a Checkpoint, codes: &str) -> impl Iterator<Item = Tensor<'a>> {
    let scales = W8_SOURCES.iter().map(|source| source.scales);
    let markers = stored().filter_map(|storage| Some(storage.marker?.name));
    let names = scales.chain([ZERO_POINT]).chain(INPUTS).chain(markers);
    let names = names.filter_map(move |name| name.of(codes));
    names.chain(scaled_fp8(checkpoint, codes)).filter_map(move |name| checkpoint.tensor(&name))
}

/// Returns the names that the tensor `scaled_fp8` of a model with these codes may have. A file has
/// several models, with a prefix each.
fn scaled_fp8(checkpoint: &Checkpoint, codes: &str) -> Vec<String> {
    let scales = SCALE_WEIGHT.of(codes).and_then(|name| checkpoint.tensor(&name));
    let prefixes = scales.iter().flat_map(|_| codes.match_indices('.').map(|(dot, _)| &codes[..=dot]));
    let names = scales.iter().map(|_| SCALED_FP8.into());
    names.chain(prefixes.map(|prefix| format!("{prefix}{SCALED_FP8}"))).collect()
}

/// Returns rows and columns of the block of each scale, and whether all matrices share the scales.
///
/// The result is empty if no grid fits. It has several elements if the config has several sizes of
/// blocks and the scales fit more than one.
fn fitting(grids: &[Grid], codes: &[usize], scales: &[usize], sizes: &ScaleSizes) -> Vec<([usize; 2], bool)> {
    let by_size = |block: &[usize; 2]| {
        let fits = |grid: &Grid| Some((grid.fits(codes, scales, *block)?, *grid == Grid::Tensor));
        grids.iter().find_map(fits)
    };
    let mut fitting: Vec<_> = sizes.blocks.iter().filter_map(by_size).collect();
    if fitting.is_empty() && grids.contains(&Grid::Group) {
        fitting.extend(group(codes, scales, &sizes.groups).map(|block| (block, false)));
    }
    fitting.dedup();
    fitting
}

impl Grid {
    /// Returns rows and columns of the block of each scale, or `None` if the scales have another
    /// shape.
    fn fits(self, codes: &[usize], scales: &[usize], block: [usize; 2]) -> Option<[usize; 2]> {
        let (matrices, &[rows, cols]) = codes.split_last_chunk()?;
        let block = match self {
            Self::Tensor => {
                return (elements(scales) == 1).then_some([rows, cols]);
            }
            Self::RowList => {
                return (matrices.is_empty() && scales == [rows]).then_some([1, cols]);
            }
            Self::BlockApart => {
                let [down, across] = grid([rows, cols], block);
                let expected = [matrices, &[down, 1, across, 1]].concat();
                return (scales == expected).then_some(block);
            }
            Self::Group => return None,
            Self::Row => [1, cols],
            Self::Matrix => [rows, cols],
            Self::Block => block,
        };
        let expected = [matrices, &grid([rows, cols], block)].concat();
        (scales == expected).then_some(block)
    }
}

/// Returns rows and columns of equal groups of a row, if the scales have one per group. `sizes` are
/// the sizes in the config, if it has any.
fn group(codes: &[usize], scales: &[usize], sizes: &[usize]) -> Option<[usize; 2]> {
    let (of_codes, of_scales) = (codes.split_last()?, scales.split_last()?);
    let (cols, groups) = (*of_codes.0, *of_scales.0);
    let fits = of_codes.1 == of_scales.1 && groups > 0 && cols.is_multiple_of(groups);
    let is_expected = |size: &usize| fits && (sizes.is_empty() || sizes.contains(size));
    Some([1, cols.checked_div(groups).filter(is_expected)?])
}

/// Returns the group sizes in the config.
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

/// Returns rows and columns of blocks in the config. Each group of compressed-tensors has its own.
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

/// Reads two sizes, neither of them 0.
fn sizes(json: &Value) -> Option<[usize; 2]> {
    let sizes =
        json.as_array()?.iter().map(|size| usize::try_from(size.as_u64()?).ok().filter(|size| *size > 0));
    sizes.collect::<Option<Vec<_>>>()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_modelopt_have_dimensions_of_one_element_in_between() {
        let sizes = ScaleSizes { blocks: vec![BLOCK], groups: Vec::new() };
        let modelopt = W8_SOURCES.iter().filter(|source| source.method == Some("modelopt"));
        let grids: Vec<_> = modelopt.flat_map(|source| source.grids).copied().collect();
        let fits = |codes: &[usize], scales: &[usize]| fitting(&grids, codes, scales, &sizes);
        // The last blocks may be smaller, and experts come first.
        assert_eq!(fits(&[256, 384], &[2, 1, 3, 1]), [(BLOCK, false)]);
        assert_eq!(fits(&[200, 320], &[2, 1, 3, 1]), [(BLOCK, false)]);
        assert_eq!(fits(&[8, 200, 320], &[8, 2, 1, 3, 1]), [(BLOCK, false)]);
        // A single block is the whole matrix.
        assert_eq!(fits(&[100, 64], &[1, 1, 1, 1]), [([100, 64], true)]);
        for other in [&[2, 3][..], &[2, 1, 2, 1], &[3, 1, 2, 1], &[2, 1, 3], &[1, 2, 1, 3], &[2, 2, 3, 1]] {
            assert_eq!(fits(&[200, 320], other), [], "{other:?}");
        }
    }
}
