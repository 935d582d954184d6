//! Iterates over a matrix and its dequantized form in parts, for metrics of the loss.

use std::borrow::Cow;

use microscale_formats::errors::ERROR_PART;
use rayon::prelude::*;

use crate::cpu::{Decoder, Isa};
use crate::element::Element;
use crate::elements::{Elements, ElementsMut};
use crate::error::Result;
use crate::shape::{QuantizedShape, Shape};
use crate::view::QuantizedView;
use microscale_formats::Format;

/// Elements dequantized at a time: a multiple of every block, and few enough for the first-level
/// cache.
pub(super) const PART: usize = ERROR_PART as usize;

/// A matrix and its quantized form.
pub(super) struct RoundTrip<'a> {
    values: Elements<'a>,
    shape: Shape,
    tensor: QuantizedView<'a>,
    /// The scales in linear order.
    scales: Cow<'a, [u8]>,
    decoder: Decoder,
}

/// A row of both.
pub(super) struct Row<'a> {
    values: Elements<'a>,
    codes: &'a [u8],
    scales: &'a [u8],
    format: Format,
    decoder: &'a Decoder,
}

impl<'a> RoundTrip<'a> {
    /// Checks that the matrix and its quantized form match.
    ///
    /// # Errors
    /// The errors of [`crate::quantize`] about shapes.
    pub(super) fn new<T: Element>(values: &'a [T], shape: Shape, tensor: QuantizedView<'a>) -> Result<Self> {
        shape.check("the input", values.len())?;
        tensor.shape().require(QuantizedShape { rows: shape.rows, cols: shape.cols, ..tensor.shape() })?;
        let scales = if shape.is_empty() { Cow::default() } else { tensor.linear_scales() };
        let values = Elements::of(values);
        Ok(Self { values, shape, tensor, scales, decoder: Decoder::of::<f32>(tensor) })
    }

    /// Returns all rows, in order. An empty matrix has none.
    pub(super) fn rows(&self) -> impl IndexedParallelIterator<Item = Row<'_>> {
        let format = self.tensor.format();
        // Without rows, there may be more columns than can be addressed.
        let (rows, row_blocks) =
            if self.shape.is_empty() { (0, 0) } else { (self.shape.rows, self.tensor.blocks_per_row()) };
        let (row_bytes, row_scales) = (row_blocks * format.block_bytes(), row_blocks * format.scale_bytes());
        (0..rows).into_par_iter().map(move |row| Row {
            values: self.values.part(row * self.shape.row_stride, self.shape.cols),
            codes: &self.tensor.codes()[row * row_bytes..][..row_bytes],
            scales: &self.scales[row * row_scales..][..row_scales],
            format,
            decoder: &self.decoder,
        })
    }

    pub(super) fn format(&self) -> Format {
        self.tensor.format()
    }

    /// Returns the dequantization factor of a block, or `None` for a NaN scale.
    pub(super) fn factor(&self, scale: u16) -> Option<f32> {
        self.decoder.factor(scale)
    }
}

impl Row<'_> {
    /// Calls `part` for consecutive parts of the row with values, dequantized values and stored
    /// scales.
    ///
    /// Parts consist of whole blocks, except for the last one.
    pub(super) fn for_each_part(&self, mut part: impl FnMut(Elements<'_>, &[f32], &[u8])) {
        let blocks = PART / self.format.block();
        let codes = self.codes.chunks(blocks * self.format.block_bytes());
        let coded = codes.zip(self.scales.chunks(blocks * self.format.scale_bytes()));
        let mut buffer = [0.0; PART];
        for (i, (codes, scales)) in coded.enumerate() {
            let (start, isa) = (i * PART, Isa::best());
            let values = self.values.part(start, PART.min(self.values.len() - start));
            let back = &mut buffer[..values.len()];
            isa.dequantize(self.decoder, codes, scales, ElementsMut::of(back));
            part(values, back, scales);
        }
    }
}
