//! Transposes of the matrices in a tensor's last two dimensions.

use std::ops::Range;

use bytemuck::Pod;
use microscale::{Dtype, Element};

use crate::read::columns::{columns, transposed};
use crate::read::tensor::Tensor;
use crate::read::values::{Values, typed};

impl Tensor<'_> {
    /// Rows of the transposed matrices in the last two dimensions, counted over all of them.
    ///
    /// `None` for a dtype that cannot be quantized.
    pub(crate) fn transposed_rows(&self, rows: Range<usize>) -> Option<Values<'static>> {
        Some(match self.values_dtype()? {
            Dtype::F32 => Values::F32(transposed_rows(self, rows).into()),
            Dtype::F16 => Values::F16(transposed_rows(self, rows).into()),
            Dtype::Bf16 => Values::Bf16(transposed_rows(self, rows).into()),
        })
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

/// The columns `wanted` of the tensor's matrix number `place`, with `bytes` bytes per value.
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
