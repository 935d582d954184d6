//! Squared errors weighted by the importance of columns.

use std::ops::Range;

use microscale::device::QuantizedOnDevice;
use microscale::{Element, dequantize};

use crate::checkpoint_formats::storage::Storage;
use crate::error::Result;
use crate::plan::importance::Columns;
use crate::quantize::matrix::{self, Matrix};
use crate::read::tensor::Tensor;
use crate::read::values::with_values;

/// Sums of squares over the values of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Squares {
    /// Of the errors.
    pub(crate) noise: f64,
    /// Of the values.
    pub(crate) signal: f64,
}

impl Squares {
    /// Returns the sums of both.
    pub(crate) fn with(self, other: Self) -> Self {
        Self { noise: self.noise + other.noise, signal: self.signal + other.signal }
    }

    /// Returns the sums over some rows, where each square counts as much as its column.
    ///
    /// If columns weigh as much as the mean squared input of the layer, these are the expected
    /// squared errors and squares of the layer's outputs, for inputs that are independent.
    ///
    /// # Errors
    /// The errors of [`Matrix::of`], and [`Error::Tensor`](crate::Error::Tensor) of a GPU.
    pub(crate) fn of_rows(
        tensor: &Tensor<'_>,
        storage: &Storage,
        columns: &Columns,
        rows: Range<usize>,
        quantized: QuantizedOnDevice,
    ) -> Result<Self> {
        let quantized = quantized.into_host().map_err(|error| matrix::error(tensor, storage, error))?;
        let back: Vec<f32> = dequantize(&quantized);
        let Matrix { values, shape } = Matrix::of(tensor, storage, rows.clone())?;
        Ok(with_values!(&values, slice => weighted(slice, &back, shape.cols, rows.start, columns)))
    }
}

/// Sums over rows of `cols` values each, from row `first` of the tensor on.
fn weighted<T: Element>(values: &[T], back: &[f32], cols: usize, first: usize, columns: &Columns) -> Squares {
    let mut sums = Squares::default();
    let rows = values.chunks_exact(cols.max(1)).zip(back.chunks_exact(cols.max(1)));
    for (row, (values, back)) in rows.enumerate() {
        let weights = columns.of(&(first + row..first + row + 1));
        for ((value, back), weight) in values.iter().zip(back).zip(weights) {
            let (value, back, weight) = (f64::from(value.to_f32()), f64::from(*back), f64::from(*weight));
            sums.noise += weight * (value - back) * (value - back);
            sums.signal += weight * value * value;
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_count_as_much_as_their_columns() {
        let (values, back) = ([1.0f32, 2.0, 3.0, 4.0], [1.0f32, 1.0, 5.0, 4.0]);
        let equal = weighted(&values, &back, 2, 0, &Columns::equal(1.0, 2));
        assert_eq!(equal, Squares { noise: 5.0, signal: 30.0 });
        let with = |numbers: &[f32]| {
            let mut columns = Columns::equal(1.0, 2);
            columns.numbers = numbers.to_vec();
            columns
        };
        assert_eq!(weighted(&values, &back, 2, 7, &with(&[2.0, 0.0])), Squares { noise: 8.0, signal: 20.0 });
        // Rows of the second expert have its columns.
        let experts = with(&[1.0, 1.0, 3.0, 0.0]);
        assert_eq!(weighted(&values, &back, 2, 0, &experts), Squares { noise: 13.0, signal: 32.0 });
    }
}
