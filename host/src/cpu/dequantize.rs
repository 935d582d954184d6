//! Dequantizing on the CPU: checks arguments, and splits rows into tasks for rayon's threads.

use rayon::prelude::*;

use super::isa::Isa;
use crate::cpu::blocks::partition::TASK_BLOCKS;
use crate::cpu::decode::decoder::Decoder;
use crate::cpu::memory::streaming_stores;
use crate::element::Element;
use crate::elements::{ElementsMut, by_dtype};
use crate::error::Result;
use crate::shape::Shape;
use crate::view::QuantizedView;

/// Dequantizes a tensor to rows without gaps: each element times its scale, rounded once to `T`.
///
/// A block with a NaN scale becomes canonical NaN. Values too large for `T` become infinities, as
/// in IEEE rounding.
pub fn dequantize<'a, T: Element>(tensor: impl Into<QuantizedView<'a>>) -> Vec<T> {
    let tensor = tensor.into();
    let mut values = vec![T::default(); tensor.rows() * tensor.cols()];
    write(Isa::best(), tensor, ElementsMut::of(&mut values), tensor.cols());
    values
}

/// [`dequantize`] into rows that are `row_stride` elements apart.
///
/// Gaps between rows are left as they are.
///
/// # Errors
///
/// [`crate::Error::Length`], [`crate::Error::RowStride`] or [`crate::Error::TooLarge`] if `out`
/// does not hold the rows.
pub fn dequantize_into<'a, T: Element>(
    tensor: impl Into<QuantizedView<'a>>,
    out: &mut [T],
    row_stride: usize,
) -> Result<()> {
    dequantize_with(Isa::best(), tensor, out, row_stride)
}

/// [`dequantize_into`] with a given instruction set, for tests and comparisons.
///
/// # Errors
///
/// The errors of [`dequantize_into`].
pub fn dequantize_with<'a, T: Element>(
    isa: Isa,
    tensor: impl Into<QuantizedView<'a>>,
    out: &mut [T],
    row_stride: usize,
) -> Result<()> {
    let tensor = tensor.into();
    let shape = Shape::new(tensor.rows(), tensor.cols()).with_row_stride(row_stride);
    shape.check("the output", out.len())?;
    write(isa, tensor, ElementsMut::of(out), row_stride);
    Ok(())
}

/// Dequantizes to a checked output.
fn write(isa: Isa, tensor: QuantizedView<'_>, out: ElementsMut<'_>, row_stride: usize) {
    by_dtype!(ElementsMut, out => write_rows(isa, tensor, out, row_stride));
}

/// [`write`] for one dtype.
fn write_rows<T: Element>(isa: Isa, tensor: QuantizedView<'_>, out: &mut [T], row_stride: usize) {
    let shape = Shape::new(tensor.rows(), tensor.cols()).with_row_stride(row_stride);
    if shape.is_empty() {
        return;
    }
    let (block, block_bytes) = (tensor.format().block(), tensor.format().block_bytes());
    let decoder = Decoder::of::<T>(tensor).streaming(size_of_val(out) >= streaming_stores::FROM);
    let scales = tensor.linear_scales();
    // Without gaps and padding, the matrix is one long row. Otherwise tasks are whole rows.
    let flat = row_stride == tensor.cols() && tensor.cols().is_multiple_of(block);
    let (cols, row_stride) = if flat {
        let task = TASK_BLOCKS * block;
        (task, task)
    } else {
        (tensor.cols(), row_stride)
    };
    let (row_blocks, scale_bytes) = (cols.div_ceil(block), tensor.format().scale_bytes());
    let rows_per_task = (TASK_BLOCKS / row_blocks).max(1);
    let one = |((out, codes), scales): ((&mut [T], &[u8]), &[u8])| {
        let rows = out.chunks_mut(row_stride);
        for ((row, codes), scales) in
            rows.zip(codes.chunks(row_blocks * block_bytes)).zip(scales.chunks(row_blocks * scale_bytes))
        {
            let len = row.len().min(cols);
            isa.dequantize(&decoder, codes, scales, ElementsMut::of(&mut row[..len]));
        }
    };
    if scales.len() <= TASK_BLOCKS {
        return one(((out, tensor.codes()), &scales));
    }
    let tasks = out
        .par_chunks_mut(row_stride.saturating_mul(rows_per_task))
        .zip(tensor.codes().par_chunks(row_blocks * block_bytes * rows_per_task))
        .zip(scales.par_chunks(row_blocks * scale_bytes * rows_per_task));
    tasks.for_each(one);
}
