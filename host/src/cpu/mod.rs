//! Quantizing and dequantizing on the CPU.
//!
//! `reference` applies the block definition of `microscale_formats` element by element. `lanes` is the same arithmetic
//! written over whole blocks so that the compiler vectorises it, stamped once for each instruction set in `isa`; it is
//! tested bit for bit against the reference. This file cuts matrices into pieces and spreads them over rayon's threads.

mod isa;
mod lanes;
mod policy;
mod reference;

use rayon::prelude::*;

pub use isa::Isa;

use crate::element::Element;
use crate::error::{Error, Result};
use crate::recipe::{NonFinite, Recipe};
use crate::report::{Position, Report};
use crate::tensor::{Quantized, QuantizedTensor, Shape};

/// Blocks that one task handles: about 128 KiB of 16-bit input, which a core's second-level cache holds.
const TASK_BLOCKS: usize = 2048;

/// Quantizes the matrix that `shape` describes in `values`, on the CPU.
///
/// # Errors
/// [`Error::Length`], [`Error::RowStride`] or [`Error::TooLarge`] if the shape does not fit, and [`Error::NonFinite`] if the
/// recipe refuses what the input holds.
pub fn quantize<T: Element>(values: &[T], shape: Shape, recipe: &Recipe) -> Result<Quantized> {
    // Before the output is allocated: a shape that the slice does not hold may be one that memory does not hold either.
    shape.check("the input", values.len())?;
    let mut tensor = QuantizedTensor::zeros(recipe.format, shape.rows, shape.cols)?;
    let report = quantize_into(values, shape, recipe, &mut tensor)?;
    Ok(Quantized { tensor, report })
}

/// [`quantize`] into a tensor that exists, of the same format and shape; allocates nothing.
///
/// # Errors
/// Those of [`quantize`], and [`Error::QuantizedLength`] if `out` is a tensor of another shape.
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
    shape.check("the input", values.len())?;
    out.check_shape(recipe.format, shape)?;
    let pieces = Pieces::of(shape, recipe.format.block());
    let block_bytes = recipe.format.block_bytes();
    let (codes, scales) = out.parts_mut();
    let one = |(task, (codes, scales)): (usize, (&mut [u8], &mut [u8]))| {
        let mut report = Report::default();
        let mut done = 0;
        for piece in pieces.in_blocks(task * TASK_BLOCKS, scales.len()) {
            let codes = &mut codes[done * block_bytes..][..piece.blocks * block_bytes];
            let scales = &mut scales[done..][..piece.blocks];
            let tally = isa.quantize(&values[piece.start..][..piece.len], recipe, codes, scales);
            report += tally.placed(|offset| shape.position(piece.start + offset));
            done += piece.blocks;
        }
        report
    };
    let report = if scales.len() <= TASK_BLOCKS {
        one((0, (codes, scales)))
    } else {
        let tasks = codes.par_chunks_mut(TASK_BLOCKS * block_bytes).zip(scales.par_chunks_mut(TASK_BLOCKS));
        tasks.enumerate().map(one).reduce(Report::default, |mut sum, part| {
            sum += part;
            sum
        })
    };
    match report.first_non_finite {
        Some(first) if recipe.non_finite == NonFinite::Error => Err(Error::NonFinite { first, report }),
        _ => Ok(report),
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
    // Without gaps and padding the matrix is one long row; otherwise tasks are whole rows.
    let flat = row_stride == tensor.cols() && tensor.cols().is_multiple_of(block);
    let (cols, row_stride) = if flat {
        let task = TASK_BLOCKS * block;
        (task, task)
    } else {
        (tensor.cols(), row_stride)
    };
    let row_blocks = cols.div_ceil(block);
    let rows_a_task = (TASK_BLOCKS / row_blocks).max(1);
    let tasks = out
        .par_chunks_mut(row_stride.saturating_mul(rows_a_task))
        .zip(tensor.codes().par_chunks(row_blocks * block_bytes * rows_a_task))
        .zip(tensor.scales().par_chunks(row_blocks * rows_a_task));
    tasks.for_each(|((out, codes), scales)| {
        let rows = out.chunks_mut(row_stride);
        for ((row, codes), scales) in
            rows.zip(codes.chunks(row_blocks * block_bytes)).zip(scales.chunks(row_blocks))
        {
            let len = row.len().min(cols);
            isa.dequantize(codes, scales, &mut row[..len]);
        }
    });
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
        let shape = if flat { Shape::new(1, shape.elements()) } else { shape };
        Self { shape, block, blocks_per_row: shape.cols.div_ceil(block) }
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
