//! A stored tensor: name, dtype, shape and mapped bytes.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use microscale::{Dtype, ScaleLayout};

use crate::dtype::FileDtype;
use crate::dtype::ggml::GgmlType;
use crate::error::Error;
use crate::error::format::FormatError;
use crate::gguf::q8_0;
use crate::read::columns::TransposedColumns;
use crate::read::scale_grid::{CodeKind, ScaleGrid};
use crate::read::values::{Values, float_dtype};

/// A stored tensor.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    /// The name.
    pub name: &'a str,
    /// The dtype in the file.
    pub dtype: FileDtype,
    /// The sizes, slowest first.
    pub shape: &'a [usize],
    /// The bytes in the mapped file.
    pub data: &'a [u8],
    /// The file.
    pub file: &'a Path,
    /// The scales of FP8 and INT8 weights, if they were looked up.
    pub scaling: Option<ScaleGrid<'a>>,
    /// Set if the tensor is the transpose of columns of the matrix in these bytes.
    pub(crate) columns: Option<TransposedColumns>,
}

/// ggml's block type that is read as values.
pub(crate) const Q8_0: FileDtype = FileDtype::Ggml(GgmlType::Q8_0);

/// The number of elements of a shape, saturating.
///
/// The sizes of a header were checked against its file, but if one size is 0 the others are not
/// bounded.
pub(crate) fn elements(shape: &[usize]) -> u64 {
    shape.iter().fold(1, |product: u64, size| product.saturating_mul(*size as u64))
}

/// Prints everything but the bytes, which may be gigabytes.
impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut tensor = f.debug_struct("Tensor");
        tensor.field("name", &self.name).field("dtype", &self.dtype).field("shape", &self.shape);
        tensor.field("scaling", &self.scaling).field("file", &self.file).finish_non_exhaustive()
    }
}

impl<'a> Tensor<'a> {
    /// The error for a tensor that is stored in an unknown way.
    pub(crate) fn unreadable(&self, why: String) -> Error {
        Error::Format(FormatError::Packed { file: self.file.into(), tensor: self.name.into(), why })
    }

    /// The error for a missing tensor that belongs to this one.
    pub(crate) fn without(&self, what: String) -> Error {
        self.unreadable(format!("{what}; complete the checkpoint"))
    }

    /// Returns these scales as a grid in linear order, one per matrix of codes.
    pub(crate) fn scale_grid(&self, block: [usize; 2], codes: CodeKind) -> ScaleGrid<'a> {
        let Self { name, dtype, data, file, .. } = *self;
        ScaleGrid { name, dtype, data, file, block, shared: false, codes, layout: ScaleLayout::Linear }
    }

    /// The number of elements.
    pub fn elements(&self) -> u64 {
        elements(self.shape)
    }

    /// The tensor's rows and columns as a matrix whose rows are the last dimension.
    pub fn matrix(&self) -> (usize, usize) {
        match self.shape {
            [] => (1, 1),
            [rows @ .., cols] => (elements(rows) as usize, *cols),
        }
    }

    /// The size of everything that is stored of it in bytes.
    pub fn bytes(&self) -> usize {
        let data = match self.columns {
            Some(_) => self.dtype.bytes_of(self.elements()) as usize,
            None => self.data.len(),
        };
        data + self.scaling.map_or(0, |scaling| scaling.data.len())
    }

    /// The dtype of its values; `None` if they cannot be quantized. W8 weights and Q8_0 have F32
    /// values.
    pub fn values_dtype(&self) -> Option<Dtype> {
        let are_made = self.scaling.is_some() || self.dtype == Q8_0;
        if are_made { Some(Dtype::F32) } else { float_dtype(self.dtype) }
    }

    /// The values; `None` if they cannot be quantized.
    pub fn values(&self) -> Option<Values<'a>> {
        self.values_in(0..self.elements() as usize)
    }

    /// The values of some elements; `None` if they cannot be quantized.
    pub(crate) fn values_in(&self, elements: Range<usize>) -> Option<Values<'a>> {
        if let Some(scaling) = &self.scaling {
            let values = scaling.values(self.shape, self.data, elements)?;
            return Some(Values::F32(values.into()));
        }
        if self.dtype == Q8_0 {
            return Some(Values::F32(q8_0::values(self.data, elements)?.into()));
        }
        if let Some(columns) = self.columns {
            return columns.values(self.dtype, self.data, self.matrix().1, elements);
        }
        let size = float_dtype(self.dtype)?.bytes();
        Values::new(self.dtype, self.data.get(elements.start * size..elements.end * size)?)
    }
}
