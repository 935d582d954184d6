//! Arrays of other libraries: where their elements lie. Nothing is copied.

use microscale::{Dtype, Element, MatrixShape, Shape, Strided};
use pyo3::prelude::*;

use crate::errors::{error, no_memory, of_tensors, type_error};
pub(crate) use crate::kind::Kind;
pub(crate) use crate::memory::{Owner, Place};

/// An array, alive as long as this is.
pub(crate) struct Array {
    what: &'static str,
    place: Place,
    data: *mut u8,
    kind: Kind,
    /// The name of the dtype, for errors.
    name: &'static str,
    dims: Vec<usize>,
    /// In elements, one for each dimension; 1 where a dimension has but one element.
    strides: Vec<isize>,
    writable: bool,
    /// The stream of the GPU that its owner works on, if it says which.
    #[cfg(feature = "cuda")]
    stream: Option<usize>,
    owner: Owner,
}

// SAFETY: objects of Python, tensors of DLPack and copies can go to other threads and be dropped
// there. Functions that read or write the memory prove for themselves that no other thread writes
// it.
unsafe impl Send for Array {}
// SAFETY: as above; `&Array` gives only shared slices.
unsafe impl Sync for Array {}

impl Array {
    /// An array of its parts. Strides are in elements; without them there are no gaps.
    #[expect(clippy::too_many_arguments, reason = "they are the parts of one structure")]
    pub(crate) fn new(
        what: &'static str,
        place: Place,
        data: *mut u8,
        kind: Kind,
        dims: Vec<usize>,
        strides: Option<Vec<isize>>,
        writable: bool,
        owner: Owner,
    ) -> PyResult<Self> {
        let mut strides = strides.unwrap_or_else(|| dense(&dims));
        let counted = dims.iter().zip(&mut strides).filter(|(count, _)| **count <= 1);
        counted.for_each(|(_, stride)| *stride = 1);
        let empty = dims.contains(&0);
        if !empty && data.is_null() {
            return Err(no_memory(what));
        }
        if !empty && !data.addr().is_multiple_of(kind.bytes()) {
            let (name, bytes) = (kind.name(), kind.bytes());
            return Err(type_error(format!(
                "{what} does not begin at a multiple of {bytes} bytes, as {name} must; pass a copy of it"
            )));
        }
        let array = Self {
            what,
            place,
            data,
            kind,
            name: kind.name(),
            dims,
            strides,
            writable,
            #[cfg(feature = "cuda")]
            stream: None,
            owner,
        };
        if !empty && data.addr().checked_add(array.span_bytes()).is_none_or(|end| end > isize::MAX as usize) {
            return Err(type_error(format!(
                "{what} has a shape and strides beyond the memory of this machine; pass an array that is there"
            )));
        }
        Ok(array)
    }

    pub(crate) fn what(&self) -> &'static str {
        self.what
    }

    pub(crate) fn place(&self) -> Place {
        self.place
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// The sizes of the array.
    pub(crate) fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// The array as a matrix: the last dimension is a row's, the others count rows.
    pub(crate) fn matrix(&self, py: Python<'_>) -> PyResult<MatrixShape> {
        let strides = self.positive(py)?;
        let Some(axis) = self.dims.len().checked_sub(1) else {
            return Err(error(py, format!("{} has no dimensions; it must have one or more", self.what)));
        };
        if self.is_dense() {
            let cols = self.dims[axis];
            let rows = self.dims[..axis].iter().product();
            return Ok(Shape::new(rows, cols).into());
        }
        let strided =
            Strided::from_strides(&self.dims, &strides, axis).map_err(|error| of_tensors(py, error))?;
        Ok(strided.into())
    }

    /// The array as a matrix of rows whose elements follow each other.
    pub(crate) fn rows(&self, py: Python<'_>) -> PyResult<Shape> {
        let strides = self.positive(py)?;
        let apart = || {
            let what = self.what;
            error(
                py,
                format!(
                    "{what} has rows whose elements lie apart, or rows at uneven distances; pass a contiguous copy of it"
                ),
            )
        };
        let Some((&cols, leading)) = self.dims.split_last() else {
            return Err(error(py, format!("{} has no dimensions; it must have one or more", self.what)));
        };
        if self.is_dense() {
            return Ok(Shape::new(leading.iter().product(), cols));
        }
        if strides[leading.len()] != 1 {
            return Err(apart());
        }
        let (mut rows, mut row_stride) = (1, cols);
        for (&count, &stride) in leading.iter().zip(&strides).rev().filter(|(count, _)| **count > 1) {
            if rows == 1 {
                row_stride = stride;
            } else if stride != rows * row_stride {
                return Err(apart());
            }
            rows *= count;
        }
        Ok(Shape::new(rows, cols).with_row_stride(row_stride))
    }

    /// The strides. None is negative.
    fn positive(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        let strides: Option<Vec<usize>> =
            self.strides.iter().map(|stride| usize::try_from(*stride).ok()).collect();
        strides.ok_or_else(|| {
            error(
                py,
                format!(
                    "{} is a view that goes backwards (a negative stride); pass a contiguous copy of it",
                    self.what
                ),
            )
        })
    }

    /// Returns whether the elements follow each other without gaps, in the order of the dimensions.
    fn is_dense(&self) -> bool {
        let mut expected = 1isize;
        self.dims.contains(&0)
            || self.dims.iter().zip(&self.strides).rev().filter(|(count, _)| **count > 1).all(
                |(count, stride)| {
                    let fits = *stride == expected;
                    expected = expected.saturating_mul(*count as isize);
                    fits
                },
            )
    }

    /// The same array, whose dtype has another name than its kind.
    pub(crate) fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    /// The name of the dtype.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// A read-only copy. The interpreter's lock is held meanwhile, so that no other code of Python
    /// frees the memory.
    pub(crate) fn copied(mut self) -> PyResult<Self> {
        self.writable = false;
        // No function reads an array with a negative stride.
        if self.span() > 0 && self.strides.iter().all(|stride| *stride >= 0) {
            // SAFETY: the object that gave the address did so just now, with the interpreter's lock
            // held since, and promises elements there as far as the shape and strides go.
            (self.owner, self.data) = unsafe { Owner::copy(self.data, self.span_bytes()) }?;
        }
        Ok(self)
    }

    /// The same array, whose owner works on a stream.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_stream(self, stream: Option<usize>) -> Self {
        Self { stream, ..self }
    }

    /// The stream of the GPU that its owner works on, if it says which.
    #[cfg(feature = "cuda")]
    pub(crate) fn stream(&self) -> Option<usize> {
        self.stream
    }

    /// The object that owns the memory, if that is one of Python.
    #[cfg(feature = "cuda")]
    pub(crate) fn object(&self) -> Option<&Py<PyAny>> {
        self.owner.object()
    }

    /// The address of the first element.
    #[cfg(feature = "cuda")]
    pub(crate) fn address(&self) -> u64 {
        self.data.addr() as u64
    }

    /// Elements from the first to the last, gaps included.
    pub(crate) fn span(&self) -> usize {
        if self.dims.contains(&0) {
            return 0;
        }
        let steps = self.dims.iter().zip(&self.strides);
        steps.fold(1, |span: usize, (count, stride)| {
            span.saturating_add((count - 1).saturating_mul(stride.unsigned_abs()))
        })
    }

    /// Bytes from the first to the last, gaps included.
    pub(crate) fn span_bytes(&self) -> usize {
        self.span().saturating_mul(self.kind.bytes())
    }

    /// The addresses of the array's bytes.
    fn range(&self) -> std::ops::Range<usize> {
        let start = self.data.addr();
        start..start.saturating_add(self.span_bytes())
    }

    /// All elements from the first to the last, gaps included.
    fn slice<T>(&self, kind: Kind) -> &[T] {
        assert!(self.place == Place::Host, "arrays of GPUs are not looked at");
        assert!(self.kind == kind && size_of::<T>() == kind.bytes(), "the type is the kind's");
        assert!(self.strides.iter().all(|stride| *stride >= 0), "strides are looked at first");
        let span = self.span();
        if span == 0 {
            return &[];
        }
        // SAFETY: the producer of the array promises that its elements are where its shape and
        // strides say, and keeps them there as long as `owner` lives. The address is not null and
        // was found to be aligned for the kind, whose bits are all values, and `new` found that the
        // bytes are no more than `isize::MAX`. Gaps between rows are memory of the same allocation,
        // as strides are not negative. Callers must not write to an argument while a function works
        // on it: the package documents this, like every library that releases the interpreter's
        // lock.
        unsafe { std::slice::from_raw_parts(self.data.cast(), span) }
    }

    /// Values of the dtype that is the array's, gaps included. [`Self::matrix`] or [`Self::rows`]
    /// comes first.
    pub(crate) fn values<T: Element>(&self) -> &[T] {
        self.slice(match T::DTYPE {
            Dtype::F32 => Kind::F32,
            Dtype::F16 => Kind::F16,
            Dtype::Bf16 => Kind::Bf16,
        })
    }

    /// Bytes without gaps: codes or scales.
    pub(crate) fn bytes(&self, py: Python<'_>) -> PyResult<&[u8]> {
        self.require(py, Kind::Bytes)?;
        Ok(self.slice(Kind::Bytes))
    }

    /// Whole numbers without gaps. Those below 0 are large ones.
    pub(crate) fn indices(&self, py: Python<'_>) -> PyResult<&[u32]> {
        self.require(py, Kind::Indices)?;
        Ok(self.slice(Kind::Indices))
    }

    /// Whole numbers of 64 bits without gaps.
    pub(crate) fn longs(&self, py: Python<'_>) -> PyResult<&[i64]> {
        self.require(py, Kind::Longs)?;
        Ok(self.slice(Kind::Longs))
    }

    /// Bytes from the first to the last, gaps included. [`Self::entry_stride`] comes first.
    pub(crate) fn spanned_bytes(&self) -> &[u8] {
        self.slice(Kind::Bytes)
    }

    /// Elements from an entry of the first dimension to the next. Entries of the kind have no gaps
    /// inside.
    pub(crate) fn entry_stride(&self, py: Python<'_>, kind: Kind) -> PyResult<usize> {
        self.require_kind(kind)?;
        let strides = self.positive(py)?;
        let elements = self.entry_elements();
        let mut expected = 1;
        let inner = self.dims.iter().zip(&strides).skip(1).rev().filter(|(count, _)| **count > 1);
        let dense = self.dims.contains(&0)
            || inner.fold(true, |dense, (count, stride)| {
                let fits = *stride == expected;
                expected *= count;
                dense && fits
            });
        if !dense {
            let what = self.what;
            return Err(error(
                py,
                format!("{what} has gaps inside of its entries; pass a contiguous copy of it"),
            ));
        }
        Ok(match self.dims.first() {
            Some(2..) if elements > 0 => strides[0],
            _ => elements,
        })
    }

    /// Elements of an entry of the first dimension.
    fn entry_elements(&self) -> usize {
        self.dims.iter().skip(1).product()
    }

    /// Whether entries of the first dimension share no memory with another array's: the arrays lie
    /// apart, or their entries alternate. [`Self::entry_stride`] comes first.
    #[cfg(feature = "cuda")]
    pub(crate) fn entries_apart(&self, other: &Self) -> bool {
        let (own, others) = (self.range(), other.range());
        if own.end <= others.start || others.end <= own.start {
            return true;
        }
        let [(stride, entry), of_other] = [self, other].map(|array| {
            let stride = array.strides.first().map_or(0, |stride| stride.unsigned_abs());
            (stride * array.kind.bytes(), array.entry_elements() * array.kind.bytes())
        });
        let offset = others.start.abs_diff(own.start) % stride.max(1);
        (stride, entry) == of_other && offset >= entry && stride - offset >= entry
    }

    /// An output: elements of a type without gaps, which no input shares.
    pub(crate) fn output<T>(&mut self, py: Python<'_>, kind: Kind, inputs: &[&Self]) -> PyResult<&mut [T]> {
        self.require_output(py, kind, inputs)?;
        assert!(self.place == Place::Host, "arrays of GPUs are not looked at");
        assert_eq!(size_of::<T>(), kind.bytes(), "the type is the kind's");
        match self.span() {
            0 => Ok(&mut []),
            // SAFETY: as in `slice`; the array can be written to, is borrowed as mutable, and
            // shares no memory with the inputs.
            span => Ok(unsafe { std::slice::from_raw_parts_mut(self.data.cast(), span) }),
        }
    }

    /// Makes sure that the array can be written to, has elements of a kind without gaps, and shares
    /// no memory with others.
    pub(crate) fn require_output(&self, py: Python<'_>, kind: Kind, others: &[&Self]) -> PyResult<()> {
        self.require(py, kind)?;
        self.require_writable(py, others)
    }

    /// Makes sure that the array can be written to, and shares no memory with others.
    pub(crate) fn require_writable(&self, py: Python<'_>, others: &[&Self]) -> PyResult<()> {
        let what = self.what;
        if !self.writable {
            return Err(error(
                py,
                format!(
                    "{what} cannot be written to; pass an array of numpy or a tensor of PyTorch that can"
                ),
            ));
        }
        let range = self.range();
        let shared = others.iter().find(|input| {
            let other = input.range();
            other.start < range.end && range.start < other.end
        });
        if let Some(input) = shared {
            return Err(error(
                py,
                format!("{what} shares memory with {}; pass an array of its own", input.what),
            ));
        }
        Ok(())
    }

    /// Makes sure that the elements are of a kind and follow each other.
    pub(crate) fn require(&self, py: Python<'_>, kind: Kind) -> PyResult<()> {
        self.require_kind(kind)?;
        if !self.is_dense() {
            return Err(error(py, format!("{} must be contiguous; pass a contiguous copy of it", self.what)));
        }
        Ok(())
    }

    fn require_kind(&self, kind: Kind) -> PyResult<()> {
        if self.kind == kind {
            return Ok(());
        }
        Err(type_error(format!("{} is {} and must be {}", self.what, self.name, kind.name())))
    }

    /// The error for an array that holds no values.
    pub(crate) fn no_values(&self) -> PyErr {
        type_error(format!("{} is {}; pass float32, float16 or bfloat16", self.what, self.name))
    }
}

/// Evaluates an expression with the values of an array as a slice of their type.
macro_rules! with_values {
    ($array:expr, $values:ident => $expr:expr) => {{
        let array = &$array;
        match array.kind() {
            $crate::array::Kind::F32 => Ok({
                let $values = array.values::<f32>();
                $expr
            }),
            $crate::array::Kind::F16 => Ok({
                let $values = array.values::<half::f16>();
                $expr
            }),
            $crate::array::Kind::Bf16 => Ok({
                let $values = array.values::<half::bf16>();
                $expr
            }),
            $crate::array::Kind::Bytes | $crate::array::Kind::Indices | $crate::array::Kind::Longs => {
                Err(array.no_values())
            }
        }
    }};
}
pub(crate) use with_values;

/// Evaluates an expression with an output of values as a mutable slice of their type.
macro_rules! with_output {
    ($py:expr, $array:expr, $inputs:expr, $values:ident => $expr:expr) => {{
        let kind = $array.kind();
        match kind {
            $crate::array::Kind::F32 => $array.output::<f32>($py, kind, $inputs).map(|$values| $expr),
            $crate::array::Kind::F16 => $array.output::<half::f16>($py, kind, $inputs).map(|$values| $expr),
            $crate::array::Kind::Bf16 => $array.output::<half::bf16>($py, kind, $inputs).map(|$values| $expr),
            $crate::array::Kind::Bytes | $crate::array::Kind::Indices | $crate::array::Kind::Longs => {
                Err($array.no_values())
            }
        }
    }};
}
pub(crate) use with_output;

/// Evaluates an expression for the type of values of a kind.
macro_rules! with_type {
    ($array:expr, $T:ident => $expr:expr) => {
        match $array.kind() {
            $crate::array::Kind::F32 => {
                type $T = f32;
                $expr
            }
            $crate::array::Kind::F16 => {
                type $T = ::half::f16;
                $expr
            }
            $crate::array::Kind::Bf16 => {
                type $T = ::half::bf16;
                $expr
            }
            $crate::array::Kind::Bytes | $crate::array::Kind::Indices | $crate::array::Kind::Longs => {
                Err($array.no_values())
            }
        }
    };
}
pub(crate) use with_type;

/// Strides of arrays without gaps.
fn dense(dims: &[usize]) -> Vec<isize> {
    let mut strides = vec![1isize; dims.len()];
    for i in (1..dims.len()).rev() {
        strides[i - 1] = strides[i].saturating_mul(dims[i].max(1) as isize);
    }
    strides
}
