//! Quantized tensors: codes, scales and the shape that gives them meaning.

use std::borrow::Cow;
use std::fmt;

use microscale_formats::{Format, GlobalScale, ScaleLayout};

#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::report::Report;
use crate::shape::QuantizedShape;
use crate::view::QuantizedView;

/// A quantized matrix.
///
/// Codes are `[rows, blocks_per_row, block_bytes]` without gaps. 4-bit codes are packed two per
/// byte, with the lower index in the low nibble. Scales are one byte each, in the order of the
/// [`ScaleLayout`]. A row whose length is not a multiple of the block ends with a block that is
/// padded with zeros.
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
    /// Makes a tensor whose codes and scales are all byte 0, without a global scale.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn zeros(shape: QuantizedShape) -> Result<Self> {
        let (codes, scales) = shape.bytes()?;
        Ok(Self { shape, codes: vec![0; codes], scales: vec![0; scales], global_scale: None })
    }

    /// Makes a tensor from parts made elsewhere, for example from a file.
    ///
    /// Add a global scale with [`Self::with_global_scale`].
    ///
    /// # Errors
    /// [`Error::QuantizedLength`] if codes or scales do not have exactly the bytes that the shape
    /// needs. [`Error::SignedScale`] if a scale has its sign bit set in a format whose scales have
    /// no sign, such as NVFP4.
    pub fn from_parts(shape: QuantizedShape, codes: Vec<u8>, scales: Vec<u8>) -> Result<Self> {
        QuantizedView::from_parts(shape, &codes, &scales)?;
        Ok(Self { shape, codes, scales, global_scale: None })
    }

    /// Makes a tensor from the parts of a view, without checks.
    pub(crate) const fn of_parts(
        shape: QuantizedShape,
        codes: Vec<u8>,
        scales: Vec<u8>,
        global_scale: Option<GlobalScale>,
    ) -> Self {
        Self { shape, codes, scales, global_scale }
    }

    /// Returns a view of the tensor.
    pub fn view(&self) -> QuantizedView<'_> {
        QuantizedView::of_tensor(self.shape, &self.codes, &self.scales, self.global_scale)
    }

    /// Applies a global scale to the same blocks.
    ///
    /// # Errors
    /// [`Error::GlobalScale`] if the number is out of range, [`Error::NoGlobalScale`] if the format
    /// has none.
    pub fn with_global_scale(self, given: GlobalScale) -> Result<Self> {
        let global_scale = self.view().with_global_scale(given)?.global_scale();
        Ok(Self { global_scale, ..self })
    }

    /// Returns the format.
    pub fn format(&self) -> Format {
        self.shape.format
    }

    /// Returns format, rows, columns and scale layout.
    pub fn shape(&self) -> QuantizedShape {
        self.shape
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Returns the elements in a row, without padding.
    pub fn cols(&self) -> usize {
        self.shape.cols
    }

    /// Returns the blocks in a row.
    pub fn blocks_per_row(&self) -> usize {
        self.shape.blocks_per_row()
    }

    /// Returns the packed codes.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Returns the block scales, in the order of the scale layout.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// Returns the block scales in linear order, copied if they have another layout.
    pub fn linear_scales(&self) -> Cow<'_, [u8]> {
        self.view().linear_scales()
    }

    /// Returns NVFP4's global scale, if there is one. An empty matrix is quantized without one.
    pub fn global_scale(&self) -> Option<GlobalScale> {
        self.global_scale
    }

    /// Returns the total bytes of codes, scales and global scale.
    pub fn bytes(&self) -> usize {
        self.view().bytes()
    }

    /// Returns codes and scales.
    pub fn into_parts(self) -> (Vec<u8>, Vec<u8>) {
        (self.codes, self.scales)
    }

    /// Returns the same matrix with its scales in another layout. Padding is removed, or added as
    /// zeros.
    pub fn convert_layout(&self, scale_layout: ScaleLayout) -> Self {
        self.view().convert_layout(scale_layout)
    }

    pub(crate) fn parts_mut(&mut self) -> (&mut [u8], &mut [u8]) {
        (&mut self.codes, &mut self.scales)
    }

    pub(crate) fn set_global_scale(&mut self, global_scale: Option<GlobalScale>) {
        self.global_scale = global_scale;
    }
}

impl<'a> From<&'a QuantizedTensor> for QuantizedView<'a> {
    fn from(tensor: &'a QuantizedTensor) -> Self {
        tensor.view()
    }
}

impl QuantizedView<'_> {
    /// Copies the view to a tensor.
    pub fn to_tensor(&self) -> QuantizedTensor {
        self.convert_layout(self.shape().scale_layout)
    }

    /// Copies the view with its scales in a layout. Padding is removed, or added as zeros.
    pub fn convert_layout(&self, scale_layout: ScaleLayout) -> QuantizedTensor {
        let shape = self.shape().with_scale_layout(scale_layout);
        let scales = self.scales_in(scale_layout).into_owned();
        QuantizedTensor::of_parts(shape, self.codes().to_vec(), scales, self.global_scale())
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

/// A quantized matrix and the report of its quantization.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// Codes and scales.
    pub tensor: QuantizedTensor,
    /// Counts of lossy events.
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
