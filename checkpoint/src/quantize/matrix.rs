//! A tensor as the matrix that is quantized: blocks run along its rows.

use std::ops::Range;

use microscale::{Element, HadamardWidth, Position, Shape, hadamard_rows};

use crate::checkpoint_formats::storage::Storage;
use crate::error::{Error, Result};
use crate::read::input::Input;
use crate::read::tensor::Tensor;
use crate::read::values::{Values, with_values};

/// Rows of the matrix that a checkpoint format stores of a tensor.
pub(crate) struct Matrix<'a> {
    pub(crate) values: Values<'a>,
    pub(crate) shape: Shape,
}

impl<'a> Matrix<'a> {
    /// Makes rows of the matrix of a tensor that was selected to be quantized; only tensors of
    /// these dtypes are. They are a view of the mapped file unless the file stores the parameter's
    /// transpose.
    pub(crate) fn of(tensor: &Tensor<'a>, storage: &Storage, rows: Range<usize>) -> Result<Self> {
        let (_, cols) = size(tensor, storage);
        let shape = Shape::new(rows.len(), cols);
        let values = if storage.transposed {
            tensor.transposed_rows(rows)
        } else {
            tensor.values_in(rows.start * cols..rows.end * cols)
        };
        let values =
            values.ok_or_else(|| tensor.unreadable(format!("{} cannot be quantized", tensor.dtype)))?;
        Ok(Self { values, shape })
    }

    /// Returns the matrix under the transform of its layer's inputs, in f32.
    pub(crate) fn transformed(self, hadamard: Option<HadamardWidth>) -> Self {
        let Some(width) = hadamard else { return self };
        let mut values: Vec<f32> =
            with_values!(&self.values, slice => slice.iter().map(|value| Element::to_f32(*value)).collect());
        hadamard_rows(&mut values, width);
        Self { values: Values::F32(values.into()), ..self }
    }

    /// Calls `work` with rows of the matrix, which are read into this thread's buffer if possible.
    ///
    /// # Errors
    /// The errors of [`Self::of`] and [`Input::with_values`].
    pub(crate) fn with_rows<R>(
        input: &Input<'_>,
        storage: &Storage,
        rows: Range<usize>,
        work: impl FnOnce(Matrix<'_>) -> R,
    ) -> Result<R> {
        if storage.transposed {
            return Ok(work(Matrix::of(&input.tensor, storage, rows)?));
        }
        let (_, cols) = size(&input.tensor, storage);
        let shape = Shape::new(rows.len(), cols);
        input.with_values(rows.start * cols..rows.end * cols, |values| work(Matrix { values, shape }))
    }
}

/// Rows and columns of the matrix that a checkpoint format stores of a tensor.
pub(crate) fn size(tensor: &Tensor<'_>, storage: &Storage) -> (usize, usize) {
    Tensor { shape: &storage.stored_shape(tensor.shape), ..*tensor }.matrix()
}

/// Gives an error of a matrix its tensor's name, and the tensor's rows and columns.
pub(crate) fn error(tensor: &Tensor<'_>, storage: &Storage, source: microscale::Error) -> Error {
    let source = source.map_position(|at| position(tensor, storage, at));
    Error::tensor(tensor.file, tensor.name, source)
}

/// The position in a tensor of a position in its matrix.
pub(crate) fn position(tensor: &Tensor<'_>, storage: &Storage, at: Position) -> Position {
    match *tensor.shape {
        [.., cols, rows] if storage.transposed => {
            Position { row: at.row / rows * cols + at.col, col: at.row % rows }
        }
        _ => at,
    }
}

/// The position in a matrix of a position in the rows that start at `row`.
pub(crate) fn below(at: Position, row: usize) -> Position {
    Position { row: at.row + row, ..at }
}
