//! Lookup tables for decoding: the bf16 of all weights under all block scales.
//!
//! A weight times its scale has six significant bits, so it is exact in bf16.

use std::sync::LazyLock;

use microscale_formats::{E2m1x2, E4m3, E8m0, Format, weights};

use crate::cpu::simd::products::Table;

/// One table per scale, by the index of [`Self::at`].
#[repr(align(64))]
pub(in crate::cpu) struct WeightTables([Table; 256]);

impl WeightTables {
    pub(in crate::cpu) fn of(format: Format) -> &'static Self {
        const LARGEST: E8m0 = E8m0::from_bits(254);
        static NVFP4: LazyLock<WeightTables> = LazyLock::new(|| {
            WeightTables::new(|code, scale| weights::nvfp4_weight(code.low(), E4m3::from_bits(scale)))
        });
        static MXFP4: LazyLock<WeightTables> = LazyLock::new(|| {
            WeightTables::new(|code, below| {
                let scale = E8m0::from_bits(LARGEST.to_bits().saturating_sub(below));
                weights::mxfp4_weight(code.low(), scale, LARGEST)
            })
        });
        if format == Format::Nvfp4 { &NVFP4 } else { &MXFP4 }
    }

    fn new(weight: impl Fn(E2m1x2, u8) -> f32) -> Self {
        let mut tables = [[0; 16]; 256];
        for (place, table) in (0..=u8::MAX).zip(&mut tables) {
            for (code, entry) in (0..16).zip(table) {
                let bits = weight(E2m1x2::from_bits(code), place).to_bits();
                debug_assert_eq!(bits & 0xFFFF, 0, "a weight under its scale has at most six bits");
                *entry = (bits >> 16) as u16;
            }
        }
        Self(tables)
    }

    /// The table of a scale.
    ///
    /// The index is the scale byte in NVFP4, and its distance to the row's largest scale in MXFP4.
    #[inline(always)]
    pub(in crate::cpu) fn at<const NVFP4: bool>(&self, scale: u8, largest: u8) -> &Table {
        &self.0[usize::from(if NVFP4 { scale } else { largest.saturating_sub(scale) })]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_the_weights_of_the_definition() {
        let (nvfp4, mxfp4) = (WeightTables::of(Format::Nvfp4), WeightTables::of(Format::Mxfp4));
        let widened = |table: &Table, code: u8| f32::from_bits(u32::from(table[usize::from(code)]) << 16);
        for code in 0..16 {
            let weight = E2m1x2::from_bits(code).low();
            for scale in 0..=0x7E {
                let expected = weights::nvfp4_weight(weight, E4m3::from_bits(scale));
                assert_eq!(widened(nvfp4.at::<true>(scale, 0), code).to_bits(), expected.to_bits());
            }
            for largest in [0, 1, 100, 254] {
                for scale in 0..=largest {
                    let [largest, scale] = [largest, scale].map(E8m0::from_bits);
                    let expected = weights::mxfp4_weight(weight, scale, largest);
                    let found = widened(mxfp4.at::<false>(scale.to_bits(), largest.to_bits()), code);
                    assert_eq!(found.to_bits(), expected.to_bits());
                }
            }
        }
    }
}
