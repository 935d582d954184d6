//! A tensor as it is stored: name, dtype, sizes, and the mapped bytes.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use crate::dtype::FileDtype;
use crate::read::values::{Values, float_dtype};

/// A tensor as it is stored.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its dtype in the file.
    pub dtype: FileDtype,
    /// Its sizes, slowest first.
    pub shape: &'a [usize],
    /// Its bytes, in the mapped file.
    pub data: &'a [u8],
    /// The file that it is in.
    pub file: &'a Path,
}

/// Elements of a shape. A header has been checked for as many as its file holds, but a size of 0 lets all
/// others be any.
pub(crate) fn elements(shape: &[usize]) -> u64 {
    shape.iter().fold(1, |product: u64, size| product.saturating_mul(*size as u64))
}

/// Shows all but the bytes, which may be gigabytes.
impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut tensor = f.debug_struct("Tensor");
        tensor.field("name", &self.name).field("dtype", &self.dtype).field("shape", &self.shape);
        tensor.field("file", &self.file).finish_non_exhaustive()
    }
}

impl<'a> Tensor<'a> {
    /// Elements.
    pub fn elements(&self) -> u64 {
        elements(self.shape)
    }

    /// The tensor's rows and columns as a matrix whose rows run along the last dimension.
    pub fn matrix(&self) -> (usize, usize) {
        match self.shape {
            [] => (1, 1),
            [rows @ .., cols] => (elements(rows) as usize, *cols),
        }
    }

    /// The values, if the dtype is one that can be quantized.
    pub fn values(&self) -> Option<Values<'a>> {
        Values::new(self.dtype, self.data)
    }

    /// The values of some elements, if the dtype is one that can be quantized.
    pub(crate) fn values_in(&self, elements: Range<usize>) -> Option<Values<'a>> {
        let size = float_dtype(self.dtype)?.bytes();
        Values::new(self.dtype, self.data.get(elements.start * size..elements.end * size)?)
    }
}
