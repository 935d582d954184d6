//! Rows of quantized matrices: splitting them into tasks, and rounding their sums.

use microscale_formats::{GlobalScale, dot};
use rayon::prelude::*;

use crate::element::{Dtype, Element};
use crate::view::QuantizedView;

/// Bytes of codes per task, similar to the input of a quantizing task.
const TASK_BYTES: usize = 64 << 10;

/// Calls `multiply_rows` for every `rows` rows, with the first row's index and the rows' output.
///
/// `out` has `outputs` elements per row. Small matrices stay on this thread.
pub(in crate::cpu) fn for_each_rows<T: Send>(
    matrix: QuantizedView<'_>,
    out: &mut [T],
    rows: usize,
    outputs: usize,
    multiply_rows: impl Fn(usize, &mut [T]) + Sync,
) {
    let row_codes = matrix.blocks_per_row() * matrix.format().block_bytes();
    let rows_per_task = (TASK_BYTES / row_codes.max(1)).max(1).next_multiple_of(rows);
    let task = |(task, out): (usize, &mut [T])| {
        for (i, out) in out.chunks_mut(rows * outputs).enumerate() {
            multiply_rows(task * rows_per_task + i * rows, out);
        }
    };
    if out.len() <= rows_per_task * outputs {
        return task((0, out));
    }
    out.par_chunks_mut(rows_per_task * outputs).enumerate().for_each(task);
}

/// A row of a quantized tensor.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Row<'a> {
    pub(in crate::cpu) codes: &'a [u8],
    pub(in crate::cpu) scales: &'a [u8],
}

/// The rows of a quantized tensor. The lengths of a row are computed once.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Rows<'a> {
    all: Row<'a>,
    code_bytes: usize,
    blocks: usize,
}

impl<'a> Rows<'a> {
    pub(in crate::cpu) fn of(tensor: QuantizedView<'a>) -> Self {
        let blocks = tensor.shape().blocks_per_row();
        let all = Row { codes: tensor.codes(), scales: tensor.scales() };
        Self { all, code_bytes: blocks * tensor.format().block_bytes(), blocks }
    }

    /// The rows from one on.
    pub(in crate::cpu) fn skip(&self, rows: usize) -> Self {
        let codes = &self.all.codes[rows * self.code_bytes..];
        Self { all: Row { codes, scales: &self.all.scales[rows * self.blocks..] }, ..*self }
    }

    /// Inlined: returned through memory, the four words would stall each caller that copies them.
    #[inline(always)]
    pub(in crate::cpu) fn at(&self, row: usize) -> Row<'a> {
        Row {
            codes: &self.all.codes[row * self.code_bytes..][..self.code_bytes],
            scales: &self.all.scales[row * self.blocks..][..self.blocks],
        }
    }
}

impl<'a> Row<'a> {
    pub(in crate::cpu) fn of(tensor: QuantizedView<'a>, row: usize) -> Self {
        Rows::of(tensor).at(row)
    }

    /// The largest scale byte. In both formats, NaN is above all numbers.
    #[inline(always)]
    pub(in crate::cpu) fn max_scale(self) -> u8 {
        // Short rows have no more than one of these chunks.
        let (chunks, rest) = self.scales.as_chunks::<16>();
        let mut most = [0; 16];
        for chunk in chunks {
            for (most, scale) in most.iter_mut().zip(chunk) {
                *most = (*most).max(*scale);
            }
        }
        most.iter().chain(rest).fold(0, |max_scale, scale| max_scale.max(*scale))
    }
}

/// Multiplies a sum by global scales, one after the other, and rounds it to `T`.
#[inline(always)]
pub(in crate::cpu) fn scale_and_round<T: Element>(sum: f64, globals: &[Option<GlobalScale>]) -> T {
    let sum = globals.iter().fold(sum, |sum, global| dot::scaled(sum, *global));
    T::from_f32(match T::DTYPE {
        _ if sum.is_nan() => f32::NAN,
        Dtype::F32 => sum as f32,
        Dtype::F16 | Dtype::Bf16 => dot::rounded_to_odd(sum),
    })
}
