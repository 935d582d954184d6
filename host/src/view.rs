//! Quantized matrices in borrowed memory, such as a mapped file or another library's buffer.

use std::borrow::Cow;
use std::fmt;

use microscale_formats::{Format, GlobalScale, ScaleLayout};

use crate::error::{Error, Result};
use crate::layout;
use crate::shape::QuantizedShape;

/// A quantized matrix in borrowed memory, laid out like a
/// [`QuantizedTensor`](crate::QuantizedTensor).
///
/// Every function that reads a `&QuantizedTensor` also reads a view, without copies.
///
/// ```
/// use microscale::{Format, GlobalScale, QuantizedShape, QuantizedView, dequantize};
///
/// // A mapped file: the codes of 16 rows of one block, and their scales.
/// let file = [0x22u8; 16 * 8 + 16];
/// let (codes, scales) = file.split_at(16 * 8);
/// let view = QuantizedView::from_parts(QuantizedShape::new(Format::Nvfp4, 16, 16), codes, scales)?
///     .with_global_scale(GlobalScale::Multiplier(0.5))?;
/// let values: Vec<f32> = dequantize(view);
/// assert_eq!(values.len(), 256);
/// # Ok::<(), microscale::Error>(())
/// ```
///
/// A view does not outlive its memory:
///
/// ```compile_fail,E0597
/// use microscale::{Format, QuantizedShape, QuantizedView, dequantize};
///
/// let shape = QuantizedShape::new(Format::Mxfp4, 1, 32);
/// let view = {
///     let (codes, scales) = (vec![0; 16], vec![127]);
///     QuantizedView::from_parts(shape, &codes, &scales)?
/// };
/// let values: Vec<f32> = dequantize(view);
/// # Ok::<(), microscale::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq)]
pub struct QuantizedView<'a> {
    shape: QuantizedShape,
    codes: &'a [u8],
    scales: &'a [u8],
    global_scale: Option<GlobalScale>,
}

/// Shows the shape and the global scale. Codes and scales may be gigabytes.
impl fmt::Debug for QuantizedView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut view = f.debug_struct("QuantizedView");
        view.field("shape", &self.shape).field("global_scale", &self.global_scale).finish_non_exhaustive()
    }
}

impl<'a> QuantizedView<'a> {
    /// Makes a view of codes and block scales. Scales are checked once, codes are not.
    ///
    /// Add a global scale with [`Self::with_global_scale`].
    ///
    /// # Errors
    /// [`Error::QuantizedLength`] if codes or scales do not have exactly the bytes that the shape
    /// needs. [`Error::SignedScale`] if a scale has its sign bit set in a format whose scales have
    /// no sign, such as NVFP4.
    pub fn from_parts(shape: QuantizedShape, codes: &'a [u8], scales: &'a [u8]) -> Result<Self> {
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

    /// Makes a view of parts that are known to be valid.
    pub(crate) const fn of_tensor(
        shape: QuantizedShape,
        codes: &'a [u8],
        scales: &'a [u8],
        global_scale: Option<GlobalScale>,
    ) -> Self {
        Self { shape, codes, scales, global_scale }
    }

    /// Applies a global scale to the same blocks.
    ///
    /// # Errors
    /// [`Error::GlobalScale`] if the number is out of range, [`Error::NoGlobalScale`] if the format
    /// has none.
    pub fn with_global_scale(self, given: GlobalScale) -> Result<Self> {
        if !self.shape.format.has_global_scale() {
            return Err(Error::NoGlobalScale { format: self.shape.format });
        }
        if !given.in_range() {
            return Err(Error::GlobalScale { given });
        }
        Ok(Self { global_scale: Some(given), ..self })
    }

    /// Returns the format.
    pub const fn format(&self) -> Format {
        self.shape.format
    }

    /// Returns format, rows, columns and scale layout.
    pub const fn shape(&self) -> QuantizedShape {
        self.shape
    }

    /// Returns the number of rows.
    pub const fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Returns the elements in a row, without padding.
    pub const fn cols(&self) -> usize {
        self.shape.cols
    }

    /// Returns the blocks in a row.
    pub const fn blocks_per_row(&self) -> usize {
        self.shape.blocks_per_row()
    }

    /// Returns the packed codes.
    pub const fn codes(&self) -> &'a [u8] {
        self.codes
    }

    /// Returns the block scales, in the order of the scale layout.
    pub const fn scales(&self) -> &'a [u8] {
        self.scales
    }

    /// Returns the block scales in linear order, copied if they have another layout.
    pub fn linear_scales(&self) -> Cow<'a, [u8]> {
        self.scales_in(ScaleLayout::Linear)
    }

    /// Returns the block scales in a layout, copied if they have another one.
    ///
    /// Padding is removed, or added as zeros.
    pub fn scales_in(&self, scale_layout: ScaleLayout) -> Cow<'a, [u8]> {
        match (self.shape.scale_layout, scale_layout) {
            (ScaleLayout::Linear, ScaleLayout::Swizzled) => {
                Cow::Owned(layout::swizzle(self.scales, self.shape.with_scale_layout(scale_layout)))
            }
            (ScaleLayout::Swizzled, ScaleLayout::Linear) => {
                Cow::Owned(layout::unswizzle(self.scales, self.shape))
            }
            (ScaleLayout::Linear, ScaleLayout::Linear) | (ScaleLayout::Swizzled, ScaleLayout::Swizzled) => {
                Cow::Borrowed(self.scales)
            }
        }
    }

    /// Returns the same matrix with its [`Self::linear_scales`].
    pub(crate) const fn with_linear_scales<'b>(&self, scales: &'b [u8]) -> QuantizedView<'b>
    where
        'a: 'b,
    {
        let shape = self.shape.with_scale_layout(ScaleLayout::Linear);
        QuantizedView { shape, codes: self.codes, scales, global_scale: self.global_scale }
    }

    /// Returns NVFP4's global scale, if there is one.
    pub const fn global_scale(&self) -> Option<GlobalScale> {
        self.global_scale
    }

    /// Returns the total bytes of codes, scales and global scale.
    pub const fn bytes(&self) -> usize {
        self.codes.len() + self.scales.len() + if self.global_scale.is_some() { 4 } else { 0 }
    }
}
