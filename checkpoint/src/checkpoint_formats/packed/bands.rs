//! A quantized tensor band by band, which bounds the memory for tensors of any size.

use std::borrow::Cow;
use std::ops::Range;

use microscale::{Device, Element, QuantizedShape, QuantizedView, ScaleLayout, hadamard_rows};

use super::{Logical, Packed};
use crate::checkpoint_formats::tiles::gathered;
use crate::error::Result;
use crate::read::bands::{BAND, bands, transposed_bands};
use crate::read::columns::{columns, transposed};
use crate::read::memory::afford;
use crate::read::nibble_order::{NibbleOrder, swap_nibbles};
use crate::read::tensor::elements;

/// Codes and linear block scales of consecutive blocks. A byte has two 4-bit codes, low nibble
/// first.
pub(crate) struct PackedBlocks<'a> {
    /// Index of the first block in the tensor.
    pub(crate) first: usize,
    pub(crate) codes: Cow<'a, [u8]>,
    pub(crate) scales: Cow<'a, [u8]>,
}

impl<'a> Logical<'a> {
    /// Returns whether it has values, which are floats, quantized or not.
    pub(crate) fn has_values(&self) -> bool {
        match self {
            Self::Plain(tensor) => tensor.values_dtype().is_some(),
            Self::Packed(_) => true,
        }
    }

    /// Returns bands of about `each` elements: whole blocks of this tensor and of another one with
    /// its shape.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub(crate) fn bands_beside(&self, other: &Self, each: usize) -> Result<Vec<Range<usize>>> {
        let packed = [self, other].into_iter().filter_map(|tensor| match tensor {
            Self::Plain(_) => None,
            Self::Packed(packed) => Some(packed),
        });
        // Bands of a transpose are whole rows, so they are whole blocks of the other tensor too.
        match packed.max_by_key(|packed| packed.storage.transposed) {
            Some(packed) => packed.bands(each),
            None => Ok(bands(elements(self.shape()) as usize, each).collect()),
        }
    }
}

impl<'a> Packed<'a> {
    /// Returns all blocks in their stored order, band by band.
    pub(crate) fn each_blocks(&self) -> impl Iterator<Item = PackedBlocks<'a>> {
        bands(elements(&self.shape) as usize, BAND).map(|band| self.blocks_in(band))
    }

    /// Returns the blocks of a range of elements in their stored order.
    ///
    /// The range must consist of whole blocks, of the container too.
    pub(crate) fn blocks_in(&self, elements: Range<usize>) -> PackedBlocks<'a> {
        let block = self.format.block();
        let (first, last) = (elements.start / block, elements.end / block);
        let of = |bytes: &'a [u8], each| bytes.get(first * each..last * each).unwrap_or_default();
        let (codes, scales) = match (self.scales, self.storage.blocks) {
            (None, Some(blocks)) => {
                let range = blocks.bytes_of(elements.start)..blocks.bytes_of(elements.end);
                let (codes, scales) = blocks.unpack(self.codes.data.get(range).unwrap_or_default());
                (codes.into(), scales.into())
            }
            (scales, _) => {
                let mut codes = Cow::from(of(self.codes.data, self.format.block_bytes()));
                if self.storage.nibble_order == NibbleOrder::HighFirst {
                    swap_nibbles(codes.to_mut());
                }
                let scales = scales.map_or(&[][..], |scales| scales.data);
                let scales = match self.storage.scale_layout {
                    ScaleLayout::Linear if self.storage.blocks_per_scale > 1 => {
                        let scale = |block| scales.get(block / self.storage.blocks_per_scale).copied();
                        (first..last).map_while(scale).collect()
                    }
                    ScaleLayout::Linear => of(scales, self.format.scale_bytes()).into(),
                    ScaleLayout::Swizzled => {
                        let blocks_per_row = self.shape.last().copied().unwrap_or(1) / block;
                        gathered(scales, first..last, blocks_per_row)
                    }
                };
                (codes, scales)
            }
        };
        PackedBlocks { first, codes, scales }
    }

    /// Returns bands of about `each` elements of the model's parameter, row by row and of whole
    /// blocks.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub(crate) fn bands(&self, each: usize) -> Result<Vec<Range<usize>>> {
        let bands = if self.storage.transposed {
            transposed_bands(&self.shape, self.format.block())
        } else {
            bands(elements(&self.shape) as usize, each).collect()
        };
        let largest = bands.iter().map(Range::len).max();
        afford(&self.codes, self.name, largest.unwrap_or(0))?;
        Ok(bands)
    }

    /// Returns the values of a band of the model's parameter, without the transform of inputs.
    ///
    /// # Errors
    /// The errors of [`Self::read`], and [`Error::Tensor`](crate::Error::Tensor) if the device
    /// fails.
    pub(crate) fn values_in<T: Element>(&self, band: Range<usize>, device: &Device) -> Result<Vec<T>> {
        let Some(width) = self.hadamard else { return self.stored_values_in(band, device) };
        let mut values = self.stored_values_in::<f32>(band, device)?;
        hadamard_rows(&mut values, width);
        Ok(values.into_iter().map(T::from_f32).collect())
    }

    /// Returns the values of a band as codes and scales have them.
    ///
    /// # Errors
    /// The errors of [`Self::values_in`].
    pub(crate) fn stored_values_in<T: Element>(&self, band: Range<usize>, device: &Device) -> Result<Vec<T>> {
        if band.is_empty() {
            return Ok(Vec::new());
        }
        match self.shape[..] {
            [.., rows, cols] if self.storage.transposed => {
                let first = band.start % (rows * cols) / cols;
                let inputs = first..first + band.len() / cols;
                let matrix = self.blocks_in(band.start - first * cols..band.start + (rows - first) * cols);
                let height = inputs.len();
                let blocks = self.inputs_of(&matrix, rows, inputs);
                Ok(transposed(&self.dequantized(&blocks, [cols, height], device)?, &[cols, height]))
            }
            _ => {
                let size = [1, band.len()];
                self.dequantized(&self.blocks_in(band), size, device)
            }
        }
    }

    /// Returns the blocks of some inputs of a layer, which are columns of the stored matrix.
    fn inputs_of(&self, matrix: &PackedBlocks<'_>, inputs: usize, wanted: Range<usize>) -> PackedBlocks<'a> {
        let blocks = |each: usize| {
            let bytes = |inputs: usize| inputs / self.format.block() * each;
            (bytes(inputs), bytes(wanted.start)..bytes(wanted.end))
        };
        let of = |data: &[u8], (row, range)| Cow::Owned(columns(data, row, range));
        PackedBlocks {
            first: matrix.first + wanted.start / self.format.block(),
            codes: of(&matrix.codes, blocks(self.format.block_bytes())),
            scales: of(&matrix.scales, blocks(self.format.scale_bytes())),
        }
    }

    /// Returns codes and linear scales as a matrix under the tensor's global scale.
    ///
    /// `first` is the index of the first block in the tensor, for errors.
    ///
    /// # Errors
    /// The errors of [`Self::read`].
    pub(crate) fn matrix<'b>(
        &self,
        [codes, scales]: [&'b [u8]; 2],
        first: usize,
        [rows, cols]: [usize; 2],
    ) -> Result<QuantizedView<'b>> {
        let view = QuantizedView::from_parts(QuantizedShape::new(self.format, rows, cols), codes, scales);
        let with_global_scale = view.and_then(|view| match self.global_scale {
            None => Ok(view),
            Some((_, global_scale)) => view.with_global_scale(global_scale),
        });
        with_global_scale.map_err(|source| match source {
            microscale::Error::SignedScale { format, index, scale } => {
                self.error(microscale::Error::SignedScale { format, index: first + index, scale })
            }
            source => self.error(source),
        })
    }

    /// Returns blocks as a matrix of a single row.
    ///
    /// # Errors
    /// The errors of [`Self::read`].
    pub(crate) fn row<'b>(&self, blocks: &'b PackedBlocks<'_>) -> Result<QuantizedView<'b>> {
        let cols = blocks.codes.len() / self.format.block_bytes() * self.format.block();
        self.matrix([&blocks.codes, &blocks.scales], blocks.first, [1, cols])
    }

    /// Returns the values of blocks, as a matrix of `size` rows and columns.
    fn dequantized<T: Element>(
        &self,
        blocks: &PackedBlocks<'_>,
        size: [usize; 2],
        device: &Device,
    ) -> Result<Vec<T>> {
        let matrix = self.matrix([&blocks.codes, &blocks.scales], blocks.first, size)?;
        device.dequantize(matrix).map_err(|source| self.error(source))
    }
}
