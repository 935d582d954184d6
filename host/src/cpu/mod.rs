//! Quantizing, dequantizing, amax and scale layouts on the CPU.
//!
//! `reference` applies the block definition of `microscale_formats` element by element. `groups` is the same arithmetic over the
//! vectors of `vector`, sixteen blocks at a time, and `lanes` over whole blocks so that the compiler vectorises it: what groups are not
//! for. Both are stamped once for each instruction set in `isa`, and tested bit for bit against the reference. This file cuts matrices
//! into pieces and spreads them over rayon's threads.

mod amax;
mod by_definition;
mod gemv;
mod groups;
mod hessian;
mod isa;
mod lanes;
mod policy;
mod prefetch;
mod products;
mod reference;
mod rule;
mod search;
mod search_lanes;
mod stream;
mod strided;
#[cfg(test)]
mod tests;
mod thresholds;
mod values;
mod vector;
mod weights;
mod words;

use rayon::prelude::*;

pub use amax::{amax, amax_with};
pub use gemv::{gemv, gemv_with};
use hessian::HessianStore;
pub use hessian::{quantize_hessian, quantize_hessian_with};
pub use isa::Isa;
use microscale_formats::ScaleLayout;
use microscale_formats::layout::{TILE_BYTES, TILE_COLS, TILE_ROWS};
pub(crate) use rule::Decoder;
use rule::Rule;
pub use strided::{quantize_strided, quantize_strided_with};
pub(crate) use vector::Scalars;
pub use weights::{gemv_weights, gemv_weights_with};

use crate::element::Element;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::layout;
use crate::recipe::{Recipe, Scheme, check_importance};
use crate::report::{Position, Report};
use crate::shape::Strided;
use crate::tensor::{Quantized, QuantizedShape, QuantizedTensor, Shape};

/// Blocks that one task handles: about 128 KiB of 16-bit input, which a core's second-level cache holds.
const TASK_BLOCKS: usize = 2048;

/// Quantizes the matrix that `shape` describes in `values`, on the CPU.
///
/// # Errors
/// [`Error::Length`], [`Error::RowStride`] or [`Error::TooLarge`] if the shape does not fit, [`Error::NonFinite`] if the
/// recipe refuses what the input holds, and [`Error::GlobalScale`] or [`Error::GlobalScaleDirection`] if its global scale cannot
/// be one.
pub fn quantize<T: Element>(values: &[T], shape: Shape, recipe: &Recipe) -> Result<Quantized> {
    // Before the output is allocated: a shape that the slice does not hold may be one that memory does not hold either.
    shape.check("the input", values.len())?;
    let mut tensor = QuantizedTensor::zeros(QuantizedShape::of(recipe, shape))?;
    let report = quantize_into(values, shape, recipe, &mut tensor)?;
    Ok(Quantized { tensor, report })
}

/// [`quantize`] into a tensor that exists already.
///
/// # Errors
/// Those of [`quantize`], and [`Error::QuantizedShape`] if `out` is a tensor of another shape, format or scale layout.
pub fn quantize_into<T: Element>(
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    out: &mut QuantizedTensor,
) -> Result<Report> {
    quantize_with(Isa::best(), values, shape, recipe, out)
}

/// [`quantize_into`] on a chosen instruction set: for tests and comparisons.
///
/// # Errors
/// Those of [`quantize_into`].
pub fn quantize_with<T: Element>(
    isa: Isa,
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    out: &mut QuantizedTensor,
) -> Result<Report> {
    quantize_weighted_with(isa, values, shape, recipe, None, out)
}

/// [`quantize`], weighting errors by column in the search for scales (`recipe.search`): one weight for each, such as the mean square of
/// the activations that it meets.
///
/// # Errors
/// Those of [`quantize`], and [`Error::Importance`] if there are not as many weights as columns, or one is negative or not finite.
pub fn quantize_weighted<T: Element>(
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    importance: &[f32],
) -> Result<Quantized> {
    shape.check("the input", values.len())?;
    let mut tensor = QuantizedTensor::zeros(QuantizedShape::of(recipe, shape))?;
    let report = quantize_weighted_with(Isa::best(), values, shape, recipe, Some(importance), &mut tensor)?;
    Ok(Quantized { tensor, report })
}

/// [`quantize_weighted`] on a chosen instruction set, into a tensor that exists already; without weights all are 1.
///
/// # Errors
/// Those of [`quantize_weighted`] and [`quantize_into`].
pub fn quantize_weighted_with<T: Element>(
    isa: Isa,
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    importance: Option<&[f32]>,
    out: &mut QuantizedTensor,
) -> Result<Report> {
    check_importance(importance, shape)?;
    let weighting = importance.map_or(Weighting::None, Weighting::Columns);
    quantize_by(isa, values, shape, recipe, weighting, out)
}

/// What the errors of scales are weighted with.
#[derive(Clone, Copy)]
enum Weighting<'a> {
    None,
    /// A weight for each column.
    Columns(&'a [f32]),
    /// A Hessian for each block of columns.
    Hessians(&'a HessianStore),
}

/// The body of quantizing.
fn quantize_by<T: Element>(
    isa: Isa,
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    weighting: Weighting<'_>,
    out: &mut QuantizedTensor,
) -> Result<Report> {
    shape.check("the input", values.len())?;
    out.shape().require(QuantizedShape::of(recipe, shape))?;
    recipe.check()?;
    if let Scheme::Comparison(format) = recipe.scheme {
        return by_definition::quantize(values, &Strided::of_rows(shape), recipe, format, out);
    }
    let (rule, global_scale) = Rule::new::<T, _>(recipe, isa, |arithmetic| {
        amax_with(isa, values, shape).map(|amax| amax.global_scale::<T>(arithmetic, recipe.non_finite))
    })?;
    out.set_global_scale(if shape.is_empty() { None } else { global_scale });
    let job = Job { isa, values, shape, rule, weighting };
    let quantized = out.shape();
    let (codes, scales) = out.parts_mut();
    let report = match recipe.scale_layout {
        _ if shape.is_empty() => Report::default(),
        ScaleLayout::Linear => job.linear(quantized, codes, scales),
        ScaleLayout::Swizzled => job.swizzled(quantized, codes, scales),
    };
    recipe.accept(report)
}

/// A matrix to quantize, and how.
struct Job<'a, T> {
    isa: Isa,
    values: &'a [T],
    shape: Shape,
    rule: Rule,
    weighting: Weighting<'a>,
}

impl<T: Element> Job<'_, T> {
    /// Quantizes with linear scales, in tasks of [`TASK_BLOCKS`].
    fn linear(&self, quantized: QuantizedShape, codes: &mut [u8], scales: &mut [u8]) -> Report {
        let pieces = match self.weighting {
            Weighting::None => Pieces::of(self.shape, quantized.format.block()),
            Weighting::Columns(_) | Weighting::Hessians(_) => {
                Pieces::by_row(self.shape, quantized.format.block())
            }
        };
        let block_bytes = quantized.format.block_bytes();
        let one = |(task, (codes, scales)): (usize, (&mut [u8], &mut [u8]))| {
            self.blocks(&pieces, task * TASK_BLOCKS, codes, scales)
        };
        if scales.len() <= TASK_BLOCKS {
            return one((0, (codes, scales)));
        }
        let tasks = codes.par_chunks_mut(TASK_BLOCKS * block_bytes).zip(scales.par_chunks_mut(TASK_BLOCKS));
        tasks.enumerate().map(one).reduce(Report::default, Report::plus)
    }

    /// Quantizes with swizzled scales, in tasks of the 128 rows whose scales lie together. Each row's scales are put into their
    /// places while they are in the cache. Padding is written too.
    fn swizzled(&self, quantized: QuantizedShape, codes: &mut [u8], scales: &mut [u8]) -> Report {
        let row_blocks = quantized.blocks_per_row();
        let row_bytes = row_blocks * quantized.format.block_bytes();
        let pieces = Pieces::by_row(self.shape, quantized.format.block());
        let one = |(task, (tiles, codes)): (usize, (&mut [u8], &mut [u8]))| {
            tiles.fill(0);
            let mut report = Report::default();
            let mut linear = vec![0; row_blocks];
            for (row, codes) in codes.chunks_mut(row_bytes).enumerate() {
                let first = (task * TILE_ROWS + row) * row_blocks;
                report += self.blocks(&pieces, first, codes, &mut linear);
                layout::scatter_row(&linear, row, tiles);
            }
            report
        };
        if scales.len() <= TASK_BLOCKS && codes.len() <= TILE_ROWS * row_bytes {
            return one((0, (scales, codes)));
        }
        let tasks = scales.par_chunks_mut(row_blocks.div_ceil(TILE_COLS) * TILE_BYTES);
        let tasks = tasks.zip(codes.par_chunks_mut(TILE_ROWS * row_bytes)).enumerate();
        tasks.map(one).reduce(Report::default, Report::plus)
    }

    /// Quantizes the blocks that `scales` has room for, from block `first` on.
    fn blocks(&self, pieces: &Pieces, first: usize, codes: &mut [u8], scales: &mut [u8]) -> Report {
        let block_bytes = codes.len() / scales.len();
        let mut report = Report::default();
        let mut done = 0;
        for piece in pieces.in_blocks(first, scales.len()) {
            let codes = &mut codes[done * block_bytes..][..piece.blocks * block_bytes];
            let scales = &mut scales[done..][..piece.blocks];
            let values = &self.values[piece.start..][..piece.len];
            let col = piece.start % self.shape.row_stride;
            let (isa, rule) = (self.isa, &self.rule);
            let tally = match self.weighting {
                Weighting::None => isa.quantize(values, None, rule, codes, scales),
                Weighting::Columns(weights) => {
                    isa.quantize(values, Some(&weights[col..][..piece.len]), rule, codes, scales)
                }
                Weighting::Hessians(store) => {
                    let hessians = store.blocks(col / pieces.block, piece.blocks);
                    isa.quantize_hessian(values, hessians, rule, codes, scales)
                }
            };
            report += tally.placed(|offset| self.shape.position(piece.start + offset));
            done += piece.blocks;
        }
        report
    }
}

/// The values of a quantized tensor, row by row without gaps: each element times its scale, rounded once to `T`.
///
/// A block with a NaN scale gives canonical NaN; what is too large for `T` gives infinity, as IEEE rounding does.
pub fn dequantize<T: Element>(tensor: &QuantizedTensor) -> Vec<T> {
    let mut values = vec![T::default(); tensor.rows() * tensor.cols()];
    write_rows(Isa::best(), tensor, &mut values, tensor.cols());
    values
}

/// [`dequantize`] into rows that lie `row_stride` elements apart. What lies between rows is left alone.
///
/// # Errors
/// [`Error::Length`], [`Error::RowStride`] or [`Error::TooLarge`] if `out` does not hold such rows.
pub fn dequantize_into<T: Element>(tensor: &QuantizedTensor, out: &mut [T], row_stride: usize) -> Result<()> {
    dequantize_with(Isa::best(), tensor, out, row_stride)
}

/// [`dequantize_into`] on a chosen instruction set: for tests and comparisons.
///
/// # Errors
/// Those of [`dequantize_into`].
pub fn dequantize_with<T: Element>(
    isa: Isa,
    tensor: &QuantizedTensor,
    out: &mut [T],
    row_stride: usize,
) -> Result<()> {
    let shape = Shape::new(tensor.rows(), tensor.cols()).with_row_stride(row_stride);
    shape.check("the output", out.len())?;
    write_rows(isa, tensor, out, row_stride);
    Ok(())
}

/// The body of dequantization, for an output that was checked.
fn write_rows<T: Element>(isa: Isa, tensor: &QuantizedTensor, out: &mut [T], row_stride: usize) {
    let shape = Shape::new(tensor.rows(), tensor.cols()).with_row_stride(row_stride);
    if shape.is_empty() {
        return;
    }
    let (block, block_bytes) = (tensor.format().block(), tensor.format().block_bytes());
    let decoder = Decoder::of::<T>(tensor).streaming(size_of_val(out) >= stream::FROM);
    let scales = tensor.linear_scales();
    // Without gaps and padding the matrix is one long row; otherwise tasks are whole rows.
    let flat = row_stride == tensor.cols() && tensor.cols().is_multiple_of(block);
    let (cols, row_stride) = if flat {
        let task = TASK_BLOCKS * block;
        (task, task)
    } else {
        (tensor.cols(), row_stride)
    };
    let (row_blocks, scale_bytes) = (cols.div_ceil(block), tensor.format().scale_bytes());
    let rows_a_task = (TASK_BLOCKS / row_blocks).max(1);
    let one = |((out, codes), scales): ((&mut [T], &[u8]), &[u8])| {
        let rows = out.chunks_mut(row_stride);
        for ((row, codes), scales) in
            rows.zip(codes.chunks(row_blocks * block_bytes)).zip(scales.chunks(row_blocks * scale_bytes))
        {
            let len = row.len().min(cols);
            isa.dequantize(&decoder, codes, scales, &mut row[..len]);
        }
    };
    if scales.len() <= TASK_BLOCKS {
        return one(((out, tensor.codes()), &scales));
    }
    let tasks = out
        .par_chunks_mut(row_stride.saturating_mul(rows_a_task))
        .zip(tensor.codes().par_chunks(row_blocks * block_bytes * rows_a_task))
        .zip(scales.par_chunks(row_blocks * scale_bytes * rows_a_task));
    tasks.for_each(one);
}

/// A matrix as a sequence of blocks, handed out in pieces that are contiguous in memory.
struct Pieces {
    shape: Shape,
    block: usize,
    blocks_per_row: usize,
}

/// Part of a row, or of several rows without gaps and padding between them.
struct Piece {
    /// The first element's offset in the slice.
    start: usize,
    /// Elements.
    len: usize,
    /// Blocks, the last of which may be padded.
    blocks: usize,
}

impl Pieces {
    fn of(shape: Shape, block: usize) -> Self {
        let flat = shape.row_stride == shape.cols && shape.cols.is_multiple_of(block);
        Self::by_row(if flat { Shape::new(1, shape.elements()) } else { shape }, block)
    }

    /// The same, in pieces that never reach over a row's end.
    fn by_row(shape: Shape, block: usize) -> Self {
        Self { shape, block, blocks_per_row: shape.cols.div_ceil(block) }
    }

    /// All blocks.
    fn blocks(&self) -> usize {
        self.shape.rows * self.blocks_per_row
    }

    /// The pieces of blocks `first .. first + count`.
    fn in_blocks(&self, first: usize, count: usize) -> impl Iterator<Item = Piece> {
        let (mut next, end) = (first, first + count);
        std::iter::from_fn(move || {
            (next < end).then(|| {
                let (row, col) = (next / self.blocks_per_row, next % self.blocks_per_row * self.block);
                let blocks = (self.blocks_per_row - next % self.blocks_per_row).min(end - next);
                next += blocks;
                let len = (blocks * self.block).min(self.shape.cols - col);
                Piece { start: row * self.shape.row_stride + col, len, blocks }
            })
        })
    }
}

impl Shape {
    /// Where the element at an offset in the slice stands.
    fn position(&self, offset: usize) -> Position {
        Position { row: offset / self.row_stride, col: offset % self.row_stride }
    }
}
