//! What comes out: codes, scales and the shape that gives them meaning.

use std::borrow::Cow;

use microscale_formats::{GlobalScale, ScaleLayout};

use crate::cpu;
use crate::error::{Error, Result};
use crate::recipe::{Format, Recipe};
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

/// What a quantized matrix is, and so how many bytes it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantizedShape {
    /// The format.
    pub format: Format,
    /// Rows.
    pub rows: usize,
    /// Elements in a row (K), padding not counted.
    pub cols: usize,
    /// Where scale bytes lie.
    pub scale_layout: ScaleLayout,
}

impl QuantizedShape {
    /// With linear scales.
    pub const fn new(format: Format, rows: usize, cols: usize) -> Self {
        Self { format, rows, cols, scale_layout: ScaleLayout::Linear }
    }

    /// The same matrix with its scales in another layout.
    pub const fn with_scale_layout(self, scale_layout: ScaleLayout) -> Self {
        Self { scale_layout, ..self }
    }

    /// What a recipe makes of a matrix.
    pub const fn of(recipe: &Recipe, shape: Shape) -> Self {
        Self::new(recipe.format(), shape.rows, shape.cols).with_scale_layout(recipe.scale_layout)
    }

    /// Blocks in a row.
    pub const fn blocks_per_row(&self) -> usize {
        self.cols.div_ceil(self.format.block())
    }

    /// Bytes of packed codes and bytes of scales.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn bytes(&self) -> Result<(usize, usize)> {
        let Self { format, rows, cols, scale_layout } = *self;
        Shape::new(rows, cols).span()?;
        let too_large = || Error::TooLarge { rows, cols, row_stride: cols };
        let codes = rows * self.blocks_per_row() * format.block_bytes();
        let scales = scale_layout.bytes(rows, self.blocks_per_row()).ok_or_else(too_large)?;
        Ok((codes, scales))
    }

    /// Checks that codes and scales have the bytes that they must have.
    fn check(&self, codes: usize, scales: usize) -> Result<()> {
        let needed = self.bytes()?;
        for (what, expected, found) in [("codes", needed.0, codes), ("scales", needed.1, scales)] {
            if expected != found {
                return Err(Error::QuantizedLength { what, shape: *self, expected, found });
            }
        }
        Ok(())
    }

    /// Checks that a tensor is of another's shape.
    pub(crate) fn require(&self, expected: Self) -> Result<()> {
        if *self == expected { Ok(()) } else { Err(Error::QuantizedShape { expected, found: *self }) }
    }
}

/// A quantized matrix.
///
/// Codes are `[rows, blocks_per_row, block_bytes]` without gaps: of 4 bits, two a byte with the lower index in the low
/// nibble, or of 8. Scales are one byte each, in the order of the [`ScaleLayout`]. A row whose length is not a multiple
/// of the block ends in a block padded with zeros.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedTensor {
    shape: QuantizedShape,
    codes: Vec<u8>,
    scales: Vec<u8>,
    global_scale: Option<GlobalScale>,
}

impl QuantizedTensor {
    /// All zeros: scales and codes of byte 0, no global scale.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn zeros(shape: QuantizedShape) -> Result<Self> {
        let (codes, scales) = shape.bytes()?;
        Ok(Self { shape, codes: vec![0; codes], scales: vec![0; scales], global_scale: None })
    }

    /// From parts made elsewhere, a file for instance. There is no global scale but by [`Self::with_global_scale`].
    ///
    /// # Errors
    /// [`Error::QuantizedLength`] if codes or scales do not have exactly the bytes that the shape needs, and
    /// [`Error::SignedScale`] if a scale of NVFP4 has its sign bit set.
    pub fn from_parts(shape: QuantizedShape, codes: Vec<u8>, scales: Vec<u8>) -> Result<Self> {
        shape.check(codes.len(), scales.len())?;
        if let Some(index) = scales.iter().position(|scale| !shape.format.is_scale(*scale)) {
            return Err(Error::SignedScale { index, scale: scales[index] });
        }
        Ok(Self { shape, codes, scales, global_scale: None })
    }

    /// The same blocks under a global scale.
    ///
    /// # Errors
    /// [`Error::GlobalScale`] if the number cannot be one, [`Error::NoGlobalScale`] if the format has none.
    pub fn with_global_scale(self, given: GlobalScale) -> Result<Self> {
        if self.shape.format != Format::Nvfp4 {
            return Err(Error::NoGlobalScale { format: self.shape.format });
        }
        if !given.in_range() {
            return Err(Error::GlobalScale { given });
        }
        Ok(Self { global_scale: Some(given), ..self })
    }

    /// The format.
    pub fn format(&self) -> Format {
        self.shape.format
    }

    /// Format, rows, columns and scale layout.
    pub fn shape(&self) -> QuantizedShape {
        self.shape
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Elements in a row, padding not counted.
    pub fn cols(&self) -> usize {
        self.shape.cols
    }

    /// Blocks in a row.
    pub fn blocks_per_row(&self) -> usize {
        self.shape.blocks_per_row()
    }

    /// The packed codes.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// The block scales, in the order of the scale layout.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// The block scales in linear order: copied, if they are in another.
    pub fn linear_scales(&self) -> Cow<'_, [u8]> {
        match self.shape.scale_layout {
            ScaleLayout::Linear => Cow::Borrowed(&self.scales),
            ScaleLayout::Swizzled => Cow::Owned(cpu::unswizzle(&self.scales, self.shape)),
        }
    }

    /// NVFP4's global scale, unless it has none. What an empty matrix is quantized to has none.
    pub fn global_scale(&self) -> Option<GlobalScale> {
        self.global_scale
    }

    /// Bytes of codes, scales and global scale together.
    pub fn bytes(&self) -> usize {
        self.codes.len() + self.scales.len() + if self.global_scale.is_some() { 4 } else { 0 }
    }

    /// Codes and scales, taken apart.
    pub fn into_parts(self) -> (Vec<u8>, Vec<u8>) {
        (self.codes, self.scales)
    }

    /// The same matrix with its scales in another layout. Padding is left out or added, as zeros.
    pub fn convert_layout(&self, scale_layout: ScaleLayout) -> Self {
        let shape = self.shape.with_scale_layout(scale_layout);
        let scales = match (self.shape.scale_layout, scale_layout) {
            (ScaleLayout::Linear, ScaleLayout::Swizzled) => cpu::swizzle(&self.scales, shape),
            (_, ScaleLayout::Linear) => self.linear_scales().into_owned(),
            (ScaleLayout::Swizzled, ScaleLayout::Swizzled) => self.scales.clone(),
        };
        Self { shape, codes: self.codes.clone(), scales, global_scale: self.global_scale }
    }

    pub(crate) fn parts_mut(&mut self) -> (&mut [u8], &mut [u8]) {
        (&mut self.codes, &mut self.scales)
    }

    pub(crate) fn set_global_scale(&mut self, global_scale: Option<GlobalScale>) {
        self.global_scale = global_scale;
    }
}

/// A quantized matrix and what happened to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// Codes and scales.
    pub tensor: QuantizedTensor,
    /// Counts of what could not be kept.
    pub report: Report,
}
