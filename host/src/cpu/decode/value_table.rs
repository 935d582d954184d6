//! The 16-bit values of E2M1 codes under each scale byte.

use std::sync::{Arc, OnceLock};

use microscale_formats::{Format, e2m1};

use crate::cpu::simd::halfwords::ValueRow;
use crate::element::{Dtype, Element, halfword_from_f32};

/// One row of values per scale byte.
pub(in crate::cpu) struct ValueTable(Box<[ValueRow; 256]>);

impl ValueTable {
    /// The values of an E2M1 format in a 16-bit dtype.
    ///
    /// `factor` returns the factor of elements under a scale byte, or `None` for NaN.
    pub(in crate::cpu) fn of<T: Element>(format: Format, factor: impl Fn(u8) -> Option<f32>) -> Arc<Self> {
        static MXFP4: [OnceLock<Arc<ValueTable>>; 2] = [const { OnceLock::new() }; 2];
        let new = || Arc::new(Self::new::<T>(factor));
        if format == Format::Mxfp4 {
            MXFP4[usize::from(T::DTYPE == Dtype::F16)].get_or_init(new).clone()
        } else {
            new()
        }
    }

    fn new<T: Element>(factor: impl Fn(u8) -> Option<f32>) -> Self {
        let mut rows = Box::new([ValueRow::default(); 256]);
        for (scale, row) in (0..=u8::MAX).zip(rows.iter_mut()) {
            let mut values = [halfword_from_f32::<T>(f32::NAN); 16];
            if let Some(factor) = factor(scale) {
                let (positive, negative) = values.split_at_mut(8);
                for (code, (positive, negative)) in positive.iter_mut().zip(negative).enumerate() {
                    *positive = halfword_from_f32::<T>(e2m1::magnitude_value(code as u32) * factor);
                    // Rounding is symmetric in the sign.
                    *negative = *positive ^ 0x8000;
                }
            }
            for (i, value) in values.into_iter().enumerate() {
                [row.low[i], row.high[i]] = value.to_le_bytes();
            }
        }
        Self(rows)
    }

    /// The values under a scale byte.
    #[inline(always)]
    pub(in crate::cpu) fn row(&self, scale: u8) -> &ValueRow {
        &self.0[usize::from(scale)]
    }
}
