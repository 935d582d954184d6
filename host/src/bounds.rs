//! Bounds of shapes: required memory, and checks of slices.

use crate::error::{Error, Result};
use crate::shape::{QuantizedShape, Shape};

impl Shape {
    /// Returns the elements from the first to the last, gaps between rows included.
    ///
    /// A slice must hold this number of elements.
    ///
    /// # Errors
    /// [`Error::RowStride`] if rows would overlap, [`Error::TooLarge`] if the count overflows.
    pub fn span(&self) -> Result<usize> {
        let Self { rows, cols, row_stride } = *self;
        if self.is_empty() {
            return Ok(0);
        }
        if row_stride < cols {
            return Err(Error::RowStride { cols, row_stride });
        }
        let span = (rows - 1).checked_mul(row_stride).and_then(|start| start.checked_add(cols));
        // The last row's padding to whole blocks must not overflow either, in bytes of the widest
        // dtype.
        span.filter(|span| {
            span.checked_mul(8).is_some() && rows.checked_mul(cols.saturating_add(64)).is_some()
        })
        .ok_or(Error::TooLarge { rows, cols, row_stride })
    }

    /// Checks that a slice of `found` elements holds the shape.
    ///
    /// # Errors
    /// [`Error::Length`], and the errors of [`Shape::span`].
    pub fn check(&self, what: &'static str, found: usize) -> Result<()> {
        let expected = self.span()?;
        let Self { rows, cols, row_stride } = *self;
        if found < expected {
            return Err(Error::Length { what, rows, cols, row_stride, expected, found });
        }
        Ok(())
    }
}

impl QuantizedShape {
    /// Returns the bytes of packed codes and the bytes of scales.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn bytes(&self) -> Result<(usize, usize)> {
        let Self { format, rows, cols, scale_layout } = *self;
        Shape::new(rows, cols).span()?;
        let too_large = || Error::TooLarge { rows, cols, row_stride: cols };
        let codes = rows * self.blocks_per_row() * format.block_bytes();
        let places = scale_layout.bytes(rows, self.blocks_per_row());
        let scales = places.and_then(|n| n.checked_mul(format.scale_bytes())).ok_or_else(too_large)?;
        Ok((codes, scales))
    }

    /// Checks the lengths of codes and scales in bytes.
    pub(crate) fn check(&self, codes: usize, scales: usize) -> Result<()> {
        let needed = self.bytes()?;
        for (what, expected, found) in [("codes", needed.0, codes), ("scales", needed.1, scales)] {
            if expected != found {
                return Err(Error::QuantizedLength { what, shape: *self, expected, found });
            }
        }
        Ok(())
    }

    /// Checks that the shape equals another one.
    pub(crate) fn require(&self, expected: Self) -> Result<()> {
        if *self == expected { Ok(()) } else { Err(Error::QuantizedShape { expected, found: *self }) }
    }
}
