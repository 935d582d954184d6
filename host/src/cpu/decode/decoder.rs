//! The parameters of dequantizing: the format, the global scale, and the table of values.

use std::sync::Arc;

use microscale_formats::facts::ElementType;
use microscale_formats::{E2m1, E4m3, E5m2, E8m0, Format, GlobalScale, ScaleType, mx, nvfp4};

use super::value_table::ValueTable;
use crate::element::{Dtype, Element};
use crate::view::QuantizedView;

/// The parameters of dequantizing a tensor.
pub(crate) struct Decoder {
    pub(in crate::cpu) format: Format,
    scale_type: ScaleType,
    global_scale: Option<GlobalScale>,
    /// The values of E2M1 codes, for 16-bit output.
    pub(in crate::cpu) values: Option<Arc<ValueTable>>,
    /// True if the output bypasses the caches.
    pub(in crate::cpu) streams: bool,
}

impl Decoder {
    /// Makes the decoder of a tensor for output of dtype `T`.
    pub(crate) fn of<T: Element>(tensor: QuantizedView<'_>) -> Self {
        let (format, global_scale) = (tensor.format(), tensor.global_scale());
        let scale_type = format.facts().scale;
        let mut decoder = Self { format, scale_type, global_scale, values: None, streams: false };
        if T::DTYPE != Dtype::F32 && format.facts().element == ElementType::E2m1 {
            decoder.values = Some(ValueTable::of::<T>(format, |scale| decoder.factor(scale)));
        }
        decoder
    }

    /// Chooses whether the output bypasses the caches.
    pub(in crate::cpu) fn streaming(self, streams: bool) -> Self {
        Self { streams, ..self }
    }

    /// The factor of a block's elements, or `None` for a NaN scale.
    #[inline(always)]
    pub(crate) fn factor(&self, scale: impl Into<u16>) -> Option<f32> {
        let scale = scale.into();
        if self.scale_type.is_nan(scale) {
            return None;
        }
        Some(match (self.scale_type, self.global_scale) {
            (ScaleType::E4m3, Some(global)) => global.factor(E4m3::from_bits(scale as u8)),
            (scale_type, _) => scale_type.value(scale),
        })
    }

    /// Dequantizes a block of `N` elements by the reference.
    pub(in crate::cpu) fn block<const N: usize>(&self, scale: u8, codes: &[u8]) -> [f32; N] {
        let mut values = [0.0; N];
        let e8m0 = E8m0::from_bits(scale);
        match self.format {
            Format::Mxfp4 => values.copy_from_slice(&mx::dequantize_block::<E2m1>(e8m0, codes)),
            Format::Mxfp8E4m3 => values.copy_from_slice(&mx::dequantize_block::<E4m3>(e8m0, codes)),
            Format::Mxfp8E5m2 => values.copy_from_slice(&mx::dequantize_block::<E5m2>(e8m0, codes)),
            Format::Nvfp4 => {
                let scale = E4m3::from_bits(scale);
                values.copy_from_slice(&nvfp4::dequantize_block(scale, self.global_scale, codes));
            }
            Format::Comparison(format) => {
                (format.definition().dequantize_block)(scale.into(), codes, &mut values);
            }
        }
        values
    }
}
