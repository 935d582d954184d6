//! Matrices with arbitrary strides in a slice, to quantize a tensor along any axis without a copy.

use crate::error::{Error, Result};
use crate::shape::{MatrixShape, Shape, Strided};

impl Strided {
    /// Describes a dense row-major tensor along one of its axes.
    ///
    /// A copy with that axis moved to the end would have the same rows.
    ///
    /// # Errors
    /// [`Error::Axis`] if the axis does not exist, [`Error::StridedTooLarge`] if there are more
    /// elements than can be addressed.
    pub fn along(dims: &[usize], axis: usize) -> Result<Self> {
        let Some(cols) = dims.get(axis).copied() else {
            return Err(Error::Axis { axis, rank: dims.len() });
        };
        let count = |dims: &[usize]| dims.iter().fold(1usize, |all, n| all.saturating_mul(*n));
        let (outer, rows) = (count(&dims[..axis]), count(&dims[axis + 1..]));
        let outer_stride = rows.saturating_mul(cols);
        let strided = Self { outer, outer_stride, rows, row_stride: 1, cols, col_stride: rows };
        strided.span()?;
        Ok(strided)
    }

    /// Describes a tensor with given strides, in elements, along one of its axes.
    ///
    /// # Errors
    /// The errors of [`Strided::along`]. [`Error::Strides`] if the numbers of dimensions and
    /// strides differ, or if the other dimensions cannot be merged to at most two with one stride
    /// each. [`Error::ZeroStride`].
    pub fn from_strides(dims: &[usize], strides: &[usize], axis: usize) -> Result<Self> {
        if axis >= dims.len() {
            return Err(Error::Axis { axis, rank: dims.len() });
        }
        let wrong = || Error::Strides { dims: dims.to_vec(), strides: strides.to_vec(), axis };
        if strides.len() != dims.len() {
            return Err(wrong());
        }
        // Merges dimensions that share one stride, from the last to the first.
        let mut groups: Vec<(usize, usize)> = Vec::new();
        let others = (0..dims.len()).rev().filter(|i| *i != axis && dims[*i] != 1);
        for (count, stride) in others.map(|i| (dims[i], strides[i])) {
            match groups.last_mut() {
                Some(inner) if inner.0.checked_mul(inner.1) == Some(stride) => {
                    inner.0 = inner.0.saturating_mul(count);
                }
                _ => groups.push((count, stride)),
            }
        }
        groups.resize(groups.len().max(2), (1, 1));
        let [(rows, row_stride), (outer, outer_stride)] = groups[..] else { return Err(wrong()) };
        let (cols, col_stride) = (dims[axis], strides[axis]);
        let strided = Self { outer, outer_stride, rows, row_stride, cols, col_stride };
        strided.span()?;
        Ok(strided)
    }

    /// Returns the elements from the first to the last, gaps included.
    ///
    /// A slice must hold this number of elements.
    ///
    /// # Errors
    /// [`Error::ZeroStride`], and [`Error::StridedTooLarge`] if the count overflows.
    pub fn span(&self) -> Result<usize> {
        if self.is_empty() {
            return Ok(0);
        }
        let mut span = Some(1usize);
        for (what, count, stride) in self.dimensions() {
            if count > 1 && stride == 0 {
                return Err(Error::ZeroStride { what });
            }
            let more = (count - 1).checked_mul(stride);
            span = span.zip(more).and_then(|(span, more)| span.checked_add(more));
        }
        let rows = self.outer.checked_mul(self.rows);
        span.filter(|span| {
            span.checked_mul(8).is_some()
                && rows.is_some_and(|rows| Shape::new(rows, self.cols).span().is_ok())
        })
        .ok_or(Error::StridedTooLarge { strided: *self })
    }

    /// Checks that a slice of `found` elements holds the matrix.
    ///
    /// # Errors
    /// [`Error::StridedLength`], and the errors of [`Strided::span`].
    pub fn check(&self, found: usize) -> Result<()> {
        let expected = self.span()?;
        if found < expected {
            return Err(Error::StridedLength { strided: *self, expected, found });
        }
        Ok(())
    }

    /// Returns names, counts and strides.
    fn dimensions(&self) -> [(&'static str, usize, usize); 3] {
        [
            ("outer_stride", self.outer, self.outer_stride),
            ("row_stride", self.rows, self.row_stride),
            ("col_stride", self.cols, self.col_stride),
        ]
    }

    /// Returns counts and strides, largest stride first.
    ///
    /// Dimensions that share one stride are merged, and counts of 1 come first.
    pub(crate) fn in_memory_order(&self) -> [(usize, usize); 3] {
        let mut dimensions =
            self.dimensions().map(|(_, count, stride)| (count, if count > 1 { stride } else { usize::MAX }));
        dimensions.sort_by_key(|(_, stride)| std::cmp::Reverse(*stride));
        // Merges the inner two twice: their result may merge with the third.
        for outer in [1, 1, 0] {
            let ((n, stride), (inner, inner_stride)) = (dimensions[outer], dimensions[outer + 1]);
            if n == 1 || inner.checked_mul(inner_stride) == Some(stride) {
                dimensions[outer + 1] = (n * inner, inner_stride);
                dimensions[outer] = (1, usize::MAX);
                dimensions.sort_by_key(|(_, stride)| std::cmp::Reverse(*stride));
            }
        }
        dimensions
    }

    /// Returns the same matrix as contiguous rows with one distance, if it has that form.
    pub(crate) fn as_rows(&self) -> Option<Shape> {
        let one_after_another = self.cols <= 1 || self.col_stride == 1;
        let row_stride = match (self.outer, self.rows) {
            (_, 1) => self.outer_stride,
            (1, _) => self.row_stride,
            _ if self.rows.checked_mul(self.row_stride) == Some(self.outer_stride) => self.row_stride,
            _ => return None,
        };
        let row_stride = if self.shape().rows <= 1 { self.cols } else { row_stride };
        (one_after_another && row_stride >= self.cols).then(|| self.shape().with_row_stride(row_stride))
    }

    /// Returns the index of a row's first element.
    pub(crate) fn start(&self, row: usize) -> usize {
        // The stride of a count of 1 may be anything, because it is multiplied by 0.
        (row / self.rows) * self.outer_stride + (row % self.rows) * self.row_stride
    }
}

impl MatrixShape {
    /// Checks that a slice of `found` elements holds the matrix.
    ///
    /// # Errors
    /// The errors of [`Shape::check`] and [`Strided::check`].
    pub(crate) fn check(&self, found: usize) -> Result<()> {
        match self {
            Self::Rows(shape) => shape.check("the input", found),
            Self::Strided(strided) => strided.check(found),
        }
    }

    /// Returns the same matrix, as contiguous rows if it has that form.
    pub(crate) fn simplified(self) -> Self {
        match self {
            Self::Strided(strided) => strided.as_rows().map_or(self, Self::Rows),
            Self::Rows(_) => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_of_a_tensor_without_gaps() {
        let dims = [2, 3, 4];
        let along = |axis| Strided::along(&dims, axis).expect("an axis");
        let first = Strided { outer: 1, outer_stride: 24, rows: 12, row_stride: 1, cols: 2, col_stride: 12 };
        let second = Strided { outer: 2, outer_stride: 12, rows: 4, row_stride: 1, cols: 3, col_stride: 4 };
        let third = Strided { outer: 6, outer_stride: 4, rows: 1, row_stride: 1, cols: 4, col_stride: 1 };
        assert_eq!([0, 1, 2].map(along), [first, second, third]);
        assert_eq!(third.as_rows(), Some(Shape::new(6, 4)));
        assert_eq!([first.as_rows(), second.as_rows()], [None; 2]);
        assert!(matches!(Strided::along(&dims, 3), Err(Error::Axis { axis: 3, rank: 3 })));
        for strided in [first, second, third] {
            assert_eq!(strided.span().ok(), Some(24));
            assert_eq!(strided.in_memory_order()[2], (24, 1), "{strided:?}");
        }
    }

    #[test]
    fn strides_are_merged_where_they_are_contiguous() {
        let strided = Strided::from_strides(&[2, 5, 3, 4], &[100, 7, 20, 5], 1).expect("two groups");
        let right = Strided { outer: 2, outer_stride: 100, rows: 12, row_stride: 5, cols: 5, col_stride: 7 };
        assert_eq!(strided, right);
        assert_eq!(strided.span().ok(), Some(100 + 11 * 5 + 4 * 7 + 1));
        let dims = [2, 5, 3, 4];
        let found = Strided::from_strides(&dims, &[100, 7, 21, 5], 1);
        assert!(matches!(found, Err(Error::Strides { axis: 1, .. })), "{found:?}");
        let found = Strided::from_strides(&dims, &[100, 7, 20], 1);
        assert!(matches!(found, Err(Error::Strides { .. })), "{found:?}");
        let found = Strided::from_strides(&dims, &[100, 0, 20, 5], 1);
        assert!(matches!(found, Err(Error::ZeroStride { what: "col_stride" })), "{found:?}");
        let found = Strided::from_strides(&dims, &[usize::MAX / 2, 7, 20, 5], 1);
        assert!(matches!(found, Err(Error::StridedTooLarge { .. })), "{found:?}");
        let huge = Strided::along(&[usize::MAX, 3, 2], 1);
        assert!(matches!(huge, Err(Error::StridedTooLarge { .. })), "{huge:?}");
    }

    #[test]
    fn slices_that_are_too_short_are_refused() {
        let strided = Strided::along(&[4, 5], 0).expect("an axis");
        assert!(strided.check(20).is_ok());
        let error = strided.check(19).expect_err("one too few");
        assert!(error.to_string().contains("19 elements"), "{error}");
        assert!(Strided { cols: 0, ..strided }.check(0).is_ok());
    }
}
