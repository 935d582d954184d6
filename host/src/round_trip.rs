//! A matrix beside what it was quantized to, part by part: for figures about the loss.

use std::borrow::Cow;

use microscale_kernels_abi::ERROR_PART;
use rayon::prelude::*;

use crate::cpu;
use crate::element::Element;
use crate::error::Result;
use crate::recipe::Format;
use crate::tensor::{QuantizedShape, QuantizedTensor, Shape};

/// Elements that are dequantized at a time: a multiple of every block, and little enough for the first-level cache.
const PART: usize = ERROR_PART as usize;

/// A matrix and what it was quantized to.
pub(crate) struct RoundTrip<'a, T> {
    values: &'a [T],
    shape: Shape,
    tensor: &'a QuantizedTensor,
    /// In linear order.
    scales: Cow<'a, [u8]>,
    decoder: cpu::Decoder,
}

/// A row of both.
pub(crate) struct Row<'a, T> {
    values: &'a [T],
    codes: &'a [u8],
    scales: &'a [u8],
    format: Format,
    decoder: &'a cpu::Decoder,
}

impl<'a, T: Element> RoundTrip<'a, T> {
    /// # Errors
    /// Those of [`cpu::quantize`] about shapes.
    pub(crate) fn new(values: &'a [T], shape: Shape, tensor: &'a QuantizedTensor) -> Result<Self> {
        shape.check("the input", values.len())?;
        tensor.shape().require(QuantizedShape { rows: shape.rows, cols: shape.cols, ..tensor.shape() })?;
        let scales = if shape.is_empty() { Cow::default() } else { tensor.linear_scales() };
        Ok(Self { values, shape, tensor, scales, decoder: cpu::Decoder::of::<f32>(tensor) })
    }

    /// All rows, in order. There are none if there is no element.
    pub(crate) fn rows(&self) -> impl IndexedParallelIterator<Item = Row<'_, T>> {
        // An empty matrix has neither codes nor scales; the rest only keeps the lengths of its chunks from being 0.
        let (format, row_blocks) = (self.tensor.format(), self.tensor.blocks_per_row().max(1));
        let (row_bytes, row_scales) = (row_blocks * format.block_bytes(), row_blocks * format.scale_bytes());
        let values = self.values.par_chunks(self.shape.row_stride.max(1));
        let coded = self.tensor.codes().par_chunks(row_bytes).zip(self.scales.par_chunks(row_scales));
        values.zip(coded).map(move |(values, (codes, scales))| {
            let values = &values[..self.shape.cols];
            Row { values, codes, scales, format, decoder: &self.decoder }
        })
    }

    pub(crate) fn format(&self) -> Format {
        self.tensor.format()
    }

    /// What the elements of a block are multiplied with; `None` for a NaN scale.
    pub(crate) fn factor(&self, scale: u16) -> Option<f32> {
        self.decoder.factor(scale)
    }
}

impl<T: Element> Row<'_, T> {
    /// Goes along the row in parts of whole blocks (but for the last one): the values, what has become of them, and the
    /// blocks' scales as they are stored.
    pub(crate) fn for_each_part(&self, mut part: impl FnMut(&[T], &[f32], &[u8])) {
        let blocks = PART / self.format.block();
        let codes = self.codes.chunks(blocks * self.format.block_bytes());
        let coded = codes.zip(self.scales.chunks(blocks * self.format.scale_bytes()));
        let mut buffer = [0.0; PART];
        for (values, (codes, scales)) in self.values.chunks(PART).zip(coded) {
            let back = &mut buffer[..values.len()];
            cpu::Isa::best().dequantize(self.decoder, codes, scales, back);
            part(values, back, scales);
        }
    }
}
