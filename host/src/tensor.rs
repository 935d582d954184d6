//! What comes out: codes, scales and the shape that gives them meaning.

use crate::error::{Error, Result};
use crate::recipe::Format;
use crate::report::Report;

/// The shape of an unquantized matrix in memory. Blocks run along rows; counts are in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows.
    pub rows: usize,
    /// Elements in a row (K). It need not be a multiple of the block: the last block is padded with zeros.
    pub cols: usize,
    /// Elements from one row's start to the next's, at least `cols`.
    pub row_stride: usize,
}

impl Shape {
    /// Rows that follow each other without gaps.
    pub const fn new(rows: usize, cols: usize) -> Self {
        Self { rows, cols, row_stride: cols }
    }

    /// The same rows, `row_stride` elements apart.
    pub const fn with_row_stride(self, row_stride: usize) -> Self {
        Self { row_stride, ..self }
    }

    /// Whether there is no element.
    pub const fn is_empty(&self) -> bool {
        self.rows == 0 || self.cols == 0
    }

    /// Elements, padding and gaps not counted; at most `usize::MAX`.
    pub const fn elements(&self) -> usize {
        self.rows.saturating_mul(self.cols)
    }

    /// Elements from the first to the last, gaps between rows included: what a slice must hold.
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
        // The last row's padding to whole blocks must be countable too, in bytes of the widest dtype.
        span.filter(|span| {
            span.checked_mul(8).is_some() && rows.checked_mul(cols.saturating_add(64)).is_some()
        })
        .ok_or(Error::TooLarge { rows, cols, row_stride })
    }

    /// Checks that a slice of `found` elements holds the shape.
    ///
    /// # Errors
    /// [`Error::Length`], and those of [`Shape::span`].
    pub fn check(&self, what: &'static str, found: usize) -> Result<()> {
        let expected = self.span()?;
        let Self { rows, cols, row_stride } = *self;
        if found < expected {
            return Err(Error::Length { what, rows, cols, row_stride, expected, found });
        }
        Ok(())
    }
}

/// A quantized matrix.
///
/// Codes are `[rows, blocks_per_row, block_bytes]`, two a byte, the lower index in the low nibble; scales are
/// `[rows, blocks_per_row]`, one byte each. Both without gaps. A row whose length is not a multiple of the block ends in
/// a block padded with zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizedTensor {
    format: Format,
    rows: usize,
    cols: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl QuantizedTensor {
    /// All zeros: scales and codes of byte 0.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn zeros(format: Format, rows: usize, cols: usize) -> Result<Self> {
        Shape::new(rows, cols).span()?;
        let blocks = rows * cols.div_ceil(format.block());
        Ok(Self {
            format,
            rows,
            cols,
            codes: vec![0; blocks * format.block_bytes()],
            scales: vec![0; blocks],
        })
    }

    /// From parts made elsewhere, a file for instance.
    ///
    /// # Errors
    /// [`Error::QuantizedLength`] if codes or scales do not have exactly the bytes that the shape needs.
    pub fn from_parts(
        format: Format,
        rows: usize,
        cols: usize,
        codes: Vec<u8>,
        scales: Vec<u8>,
    ) -> Result<Self> {
        Shape::new(rows, cols).span()?;
        let blocks = rows * cols.div_ceil(format.block());
        for (what, expected, found) in
            [("codes", blocks * format.block_bytes(), codes.len()), ("scales", blocks, scales.len())]
        {
            if expected != found {
                return Err(Error::QuantizedLength { what, format, rows, cols, expected, found });
            }
        }
        Ok(Self { format, rows, cols, codes, scales })
    }

    /// The format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements in a row, padding not counted.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Blocks in a row.
    pub fn blocks_per_row(&self) -> usize {
        self.cols.div_ceil(self.format.block())
    }

    /// The packed codes.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// The block scales.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// Checks that this is a tensor of a format and shape.
    pub(crate) fn check_shape(&self, format: Format, shape: Shape) -> Result<()> {
        Self::require_shape((self.format, self.rows, self.cols), self.codes.len(), format, shape)
    }

    /// The check for a tensor wherever it lies, given what it is and how many bytes of codes it has.
    pub(crate) fn require_shape(
        is: (Format, usize, usize),
        found: usize,
        format: Format,
        shape: Shape,
    ) -> Result<()> {
        let Shape { rows, cols, .. } = shape;
        if is == (format, rows, cols) {
            return Ok(());
        }
        let expected = rows * cols.div_ceil(format.block()) * format.block_bytes();
        Err(Error::QuantizedLength { what: "the tensor's codes", format, rows, cols, expected, found })
    }

    /// Bytes of codes and scales together.
    pub fn bytes(&self) -> usize {
        self.codes.len() + self.scales.len()
    }

    /// Codes and scales, taken apart.
    pub fn into_parts(self) -> (Vec<u8>, Vec<u8>) {
        (self.codes, self.scales)
    }

    pub(crate) fn parts_mut(&mut self) -> (&mut [u8], &mut [u8]) {
        (&mut self.codes, &mut self.scales)
    }
}

/// A quantized matrix and what happened to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantized {
    /// Codes and scales.
    pub tensor: QuantizedTensor,
    /// Counts of what could not be kept.
    pub report: Report,
}
