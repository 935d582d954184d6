//! Rows of quantized matrices that are multiplied: over rayon's threads, and the rounding of their sums.

use microscale_formats::{GlobalScale, dot};
use rayon::prelude::*;

use crate::element::{Dtype, Element};
use crate::view::QuantizedView;

/// Codes that a task goes through, at least: as much as the input of one that quantizes is.
const TASK_BYTES: usize = 64 << 10;

/// Calls `few` for each few rows of a matrix, with the number of the first and their part of an output, which
/// has so many elements a row: on this thread if there is little to do.
pub(in crate::cpu) fn for_each_rows<T: Send>(
    matrix: QuantizedView<'_>,
    out: &mut [T],
    rows: usize,
    outputs: usize,
    few: impl Fn(usize, &mut [T]) + Sync,
) {
    let row_codes = matrix.blocks_per_row() * matrix.format().block_bytes();
    let rows_per_task = (TASK_BYTES / row_codes.max(1)).max(1).next_multiple_of(rows);
    let task = |(task, out): (usize, &mut [T])| {
        for (i, out) in out.chunks_mut(rows * outputs).enumerate() {
            few(task * rows_per_task + i * rows, out);
        }
    };
    if out.len() <= rows_per_task * outputs {
        return task((0, out));
    }
    out.par_chunks_mut(rows_per_task * outputs).enumerate().for_each(task);
}

/// A row of a tensor.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Row<'a> {
    pub(in crate::cpu) codes: &'a [u8],
    pub(in crate::cpu) scales: &'a [u8],
}

impl<'a> Row<'a> {
    pub(in crate::cpu) fn of(tensor: QuantizedView<'a>, row: usize) -> Self {
        let blocks = tensor.shape().blocks_per_row();
        let bytes = blocks * tensor.format().block_bytes();
        Self {
            codes: &tensor.codes()[row * bytes..][..bytes],
            scales: &tensor.scales()[row * blocks..][..blocks],
        }
    }

    /// The largest scale byte: in both formats NaN is above all numbers.
    pub(in crate::cpu) fn max_scale(self) -> u8 {
        self.scales.iter().fold(0, |max_scale, scale| max_scale.max(*scale))
    }
}

/// A sum under global scales, one after the other, rounded.
#[inline(always)]
pub(in crate::cpu) fn scale_and_round<T: Element>(sum: f64, globals: &[Option<GlobalScale>]) -> T {
    let sum = globals.iter().fold(sum, |sum, global| dot::scaled(sum, *global));
    T::from_f32(match T::DTYPE {
        _ if sum.is_nan() => f32::NAN,
        Dtype::F32 => sum as f32,
        Dtype::F16 | Dtype::Bf16 => dot::rounded_to_odd(sum),
    })
}
