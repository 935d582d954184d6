//! Matrices in a tensor's last two dimensions, transposed.

use std::ops::Range;

use bytemuck::Pod;
use microscale::{Dtype, Element};
use rayon::prelude::*;

use crate::read::tensor::Tensor;
use crate::read::values::{Values, float_dtype, typed};

impl Tensor<'_> {
    /// Rows of the transposes of the matrices in the last two dimensions, counted through all of them; `None`
    /// for a dtype that cannot be quantized.
    pub(crate) fn transposed_rows(&self, rows: Range<usize>) -> Option<Values<'static>> {
        Some(match self.values_dtype()? {
            Dtype::F32 => Values::F32(transposed_rows(self, rows).into()),
            Dtype::F16 => Values::F16(transposed_rows(self, rows).into()),
            Dtype::Bf16 => Values::Bf16(transposed_rows(self, rows).into()),
        })
    }
}

/// The columns of a matrix, row by row in a tensor's bytes, of which the tensor is the transpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TransposedColumns {
    /// Columns of the matrix.
    pub(crate) width: usize,
    /// The first one of the tensor's.
    pub(crate) first: usize,
}

impl TransposedColumns {
    /// The values of some elements of the tensor, whose rows the columns are; `None` for a dtype that cannot be quantized.
    pub(crate) fn values(self, tensor: &Tensor<'_>, elements: Range<usize>) -> Option<Values<'static>> {
        Some(match float_dtype(tensor.dtype)? {
            Dtype::F32 => Values::F32(self.elements(tensor, elements).into()),
            Dtype::F16 => Values::F16(self.elements(tensor, elements).into()),
            Dtype::Bf16 => Values::Bf16(self.elements(tensor, elements).into()),
        })
    }

    fn elements<T: Element + Pod>(self, tensor: &Tensor<'_>, elements: Range<usize>) -> Vec<T> {
        let (_, height) = tensor.matrix();
        if elements.is_empty() || height == 0 {
            return Vec::new();
        }
        let rows = elements.start / height..elements.end.div_ceil(height);
        let wanted = [rows.start, rows.end].map(|row| (self.first + row) * size_of::<T>());
        let columns = columns(tensor.data, self.width * size_of::<T>(), wanted[0]..wanted[1]);
        let mut values = transposed(&typed::<T>(&columns), &[height, rows.len()]);
        values.truncate(elements.end - rows.start * height);
        values.drain(..elements.start - rows.start * height);
        values
    }
}

fn transposed_rows<T: Element + Pod>(tensor: &Tensor<'_>, rows: Range<usize>) -> Vec<T> {
    let [.., height, width] = *tensor.shape else { return typed(tensor.data).into_owned() };
    let mut transposed_rows = Vec::with_capacity(rows.len() * height);
    if tensor.data.is_empty() {
        return transposed_rows;
    }
    for place in rows.start / width..rows.end.div_ceil(width) {
        let before = place * width;
        let (start, end) = (rows.start.max(before) - before, rows.end.min(before + width) - before);
        let tile = tile(tensor, place, start..end, size_of::<T>());
        transposed_rows.extend(transposed(&typed::<T>(&tile), &[height, end - start]));
    }
    transposed_rows
}

/// Some columns of the matrix at a place of a tensor, as values of so many bytes.
fn tile(tensor: &Tensor<'_>, place: usize, wanted: Range<usize>, bytes: usize) -> Vec<u8> {
    let (rows, width) = tensor.matrix();
    let height = tensor.shape.iter().rev().nth(1).copied().unwrap_or(rows);
    let rows = place * height..(place + 1) * height;
    if tensor.scaling.is_some() {
        let row = |row: usize| tensor.values_in(row * width + wanted.start..row * width + wanted.end);
        let values = rows.filter_map(row).filter_map(|values| match values {
            Values::F32(values) => Some(values),
            _ => None,
        });
        return values.flat_map(|values| bytemuck::cast_slice(&values).to_vec()).collect();
    }
    let row = width * bytes;
    let matrix = tensor.data.get(rows.start * row..rows.end * row).unwrap_or_default();
    columns(matrix, row, wanted.start * bytes..wanted.end * bytes)
}

/// Columns of a matrix of bytes.
pub(crate) fn columns(matrix: &[u8], row: usize, columns: Range<usize>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(columns.len() * (matrix.len() / row.max(1)));
    for row in matrix.chunks_exact(row.max(1)) {
        bytes.extend_from_slice(row.get(columns.clone()).unwrap_or_default());
    }
    bytes
}

/// A tensor's matrices in its last two dimensions, transposed.
pub(crate) fn transposed<T: Element>(values: &[T], shape: &[usize]) -> Vec<T> {
    /// Sides of what is moved at a time: its rows and columns lie in the first-level cache.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::values::file_dtype;

    #[test]
    fn every_matrix_is_transposed() {
        let shape = [3, 70, 131];
        let values: Vec<f32> = (0..shape.iter().product()).map(|i| i as f32).collect();
        let transposed = transposed(&values, &shape);
        for (i, value) in transposed.iter().enumerate() {
            let (matrix, col, row) = (i / (70 * 131), i / 70 % 131, i % 70);
            assert_eq!(*value, (matrix * 70 * 131 + row * 131 + col) as f32);
        }
        let data: &[u8] = bytemuck::cast_slice(&values);
        let file = std::path::Path::new("x");
        let tensor = Tensor {
            name: "a",
            dtype: file_dtype(Dtype::F32),
            shape: &shape,
            data,
            file,
            scaling: None,
            columns: None,
        };
        for rows in [0..393, 0..1, 100..131, 100..300, 392..393, 131..131] {
            let Some(Values::F32(found)) = tensor.transposed_rows(rows.clone()) else { panic!("floats") };
            assert_eq!(found[..], transposed[rows.start * 70..rows.end * 70]);
        }
        assert!(super::transposed::<f32>(&[], &[0, 5, 7]).is_empty());
        assert!(super::transposed::<f32>(&[], &[5, 0, 7]).is_empty());
    }
}
