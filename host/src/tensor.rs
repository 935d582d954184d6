//! Quantized tensors: codes, scales and the shape that gives them meaning.

use std::borrow::Cow;
use std::fmt;

use microscale_formats::{Format, GlobalScale, ScaleLayout};

use crate::error::{Error, Result};
use crate::layout;
use crate::report::Report;
use crate::shape::QuantizedShape;

/// A quantized matrix.
///
/// Codes are `[rows, blocks_per_row, block_bytes]` without gaps: of 4 bits, two a byte with the lower index
/// in the low nibble, or of 8. Scales are one byte each, in the order of the [`ScaleLayout`]. A row whose
/// length is not a multiple of the block ends in a block padded with zeros.
#[derive(Clone, PartialEq)]
pub struct QuantizedTensor {
    shape: QuantizedShape,
    codes: Vec<u8>,
    scales: Vec<u8>,
    global_scale: Option<GlobalScale>,
}

/// Shows the shape and the global scale. Codes and scales may be gigabytes.
impl fmt::Debug for QuantizedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut tensor = f.debug_struct("QuantizedTensor");
        tensor.field("shape", &self.shape).field("global_scale", &self.global_scale).finish_non_exhaustive()
    }
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

    /// From parts made elsewhere, a file for instance. There is no global scale but by
    /// [`Self::with_global_scale`].
    ///
    /// # Errors
    /// [`Error::QuantizedLength`] if codes or scales do not have exactly the bytes that the shape needs, and
    /// [`Error::SignedScale`] if a scale has its sign bit set in a format whose scales have none, NVFP4 for
    /// one.
    pub fn from_parts(shape: QuantizedShape, codes: Vec<u8>, scales: Vec<u8>) -> Result<Self> {
        shape.check(codes.len(), scales.len())?;
        let scale_type = shape.format.facts().scale;
        let foreign = match scale_type.bytes() {
            1 => scales.iter().position(|byte| !scale_type.is_scale((*byte).into())),
            n => scales.chunks_exact(n).position(|bytes| !scale_type.is_scale(scale_type.read(bytes))),
        };
        if let Some(index) = foreign {
            let scale = scale_type.read(&scales[index * scale_type.bytes()..]);
            return Err(Error::SignedScale { format: shape.format, index, scale });
        }
        Ok(Self { shape, codes, scales, global_scale: None })
    }

    /// The same blocks under a global scale.
    ///
    /// # Errors
    /// [`Error::GlobalScale`] if the number cannot be one, [`Error::NoGlobalScale`] if the format has none.
    pub fn with_global_scale(self, given: GlobalScale) -> Result<Self> {
        if !self.shape.format.has_global_scale() {
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
            ScaleLayout::Swizzled => Cow::Owned(layout::unswizzle(&self.scales, self.shape)),
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
            (ScaleLayout::Linear, ScaleLayout::Swizzled) => layout::swizzle(&self.scales, shape),
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

/// Parts of a quantized tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The packed codes.
    Codes,
    /// The block scales, in the order of their layout.
    Scales,
}

/// A quantized matrix and what happened to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// Codes and scales.
    pub tensor: QuantizedTensor,
    /// Counts of what could not be kept.
    pub report: Report,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_shows_the_shape_and_no_codes() {
        let shown = |rows| {
            let shape = QuantizedShape::new(Format::Nvfp4, rows, 4096);
            format!("{:?}", QuantizedTensor::zeros(shape).expect("a tensor"))
        };
        assert!(shown(64).contains("rows: 64, cols: 4096"), "{}", shown(64));
        assert_eq!(shown(64).len(), shown(10).len());
    }
}
