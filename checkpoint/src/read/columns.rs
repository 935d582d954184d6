//! Columns of a row-major matrix, and transposes.

use std::ops::Range;

use bytemuck::Pod;
use microscale::{Dtype, Element};
use rayon::prelude::*;

use crate::dtype::FileDtype;
use crate::read::values::{Values, float_dtype, typed};

/// A tensor that is the transpose of some columns of a stored row-major matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TransposedColumns {
    /// The number of columns of the matrix.
    pub(crate) width: usize,
    /// The first column that belongs to the tensor.
    pub(crate) first: usize,
}

impl TransposedColumns {
    /// The values of a range of the tensor's elements; `None` for a dtype that cannot be quantized.
    ///
    /// `height` is the number of the matrix's rows, so the length of the tensor's rows.
    pub(crate) fn values(
        self,
        dtype: FileDtype,
        matrix: &[u8],
        height: usize,
        elements: Range<usize>,
    ) -> Option<Values<'static>> {
        Some(match float_dtype(dtype)? {
            Dtype::F32 => Values::F32(self.elements(matrix, height, elements).into()),
            Dtype::F16 => Values::F16(self.elements(matrix, height, elements).into()),
            Dtype::Bf16 => Values::Bf16(self.elements(matrix, height, elements).into()),
        })
    }

    fn elements<T: Element + Pod>(self, matrix: &[u8], height: usize, elements: Range<usize>) -> Vec<T> {
        if elements.is_empty() || height == 0 {
            return Vec::new();
        }
        let rows = elements.start / height..elements.end.div_ceil(height);
        let wanted = [rows.start, rows.end].map(|row| (self.first + row) * size_of::<T>());
        let columns = columns(matrix, self.width * size_of::<T>(), wanted[0]..wanted[1]);
        let mut values = transposed(&typed::<T>(&columns), &[height, rows.len()]);
        values.truncate(elements.end - rows.start * height);
        values.drain(..elements.start - rows.start * height);
        values
    }
}

/// Copies some columns of a row-major matrix. `row` and `columns` are in bytes.
pub(crate) fn columns(matrix: &[u8], row: usize, columns: Range<usize>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(columns.len() * (matrix.len() / row.max(1)));
    for row in matrix.chunks_exact(row.max(1)) {
        bytes.extend_from_slice(row.get(columns.clone()).unwrap_or_default());
    }
    bytes
}

/// Transposes the matrices in a tensor's last two dimensions.
pub(crate) fn transposed<T: Element>(values: &[T], shape: &[usize]) -> Vec<T> {
    /// Rows and columns of a tile. A tile's rows and columns fit in the L1 cache.
    const TILE: usize = 64;
    let [.., rows, cols] = *shape else { return values.to_vec() };
    let mut transposed = vec![T::default(); values.len()];
    let matrix = rows.saturating_mul(cols).max(1);
    let bands = transposed.par_chunks_mut(matrix).zip(values.par_chunks(matrix)).flat_map(|(to, from)| {
        to.par_chunks_mut(rows.saturating_mul(TILE).max(1))
            .enumerate()
            .map(move |(band, to)| (band * TILE, to, from))
    });
    bands.for_each(|(first, to, from)| {
        for row in (0..rows).step_by(TILE) {
            for (col, to) in (first..).zip(to.chunks_exact_mut(rows)) {
                let to = &mut to[row..rows.min(row + TILE)];
                for (to, row) in to.iter_mut().zip(row..) {
                    *to = from[row * cols + col];
                }
            }
        }
    });
    transposed
}
