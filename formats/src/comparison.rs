//! Formats for comparison only: how much would a tensor lose in them?
//!
//! Such a format quantizes, dequantizes and measures tensors on CPUs, block by block, with the
//! reference implementation. No kernel computes it and no checkpoint format stores it. Each is a
//! variant of [`ComparisonFormat`], has its [`Facts`] and [`Definition`] here, and a file for its
//! element or arithmetic.

use crate::bf16::Bf16;
use crate::block::{BlockEvents, NegativeZero};
use crate::e2m1::Ties;
use crate::e3m0::E3m0;
use crate::e8m0::E8m0;
use crate::facts::{BlockShape, ElementType, Facts, GlobalScaleUse};
use crate::mx::{self, Arithmetic, Element, ScaleRule};
use crate::nf4;
use crate::scale::ScaleType;

/// A format that has neither kernels nor a checkpoint format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ComparisonFormat {
    /// MXFP4 with E3M0 elements: blocks of 32 with an E8M0 scale by OCP's `floor` rule.
    Mxfp4E3m0,
    /// NF4 in blocks of 64 with a bf16 scale, quantized as bitsandbytes does. See [`nf4`].
    Nf4,
}

/// The arithmetic of a format's blocks.
///
/// The last block of a row may be shorter than a block. It is padded with zeros.
#[derive(Clone, Copy, Debug)]
pub struct Definition {
    /// Quantizes a block. Returns the bits of its scale and the events.
    ///
    /// The second slice receives the packed codes of all elements. A block that holds a NaN or an
    /// infinity gets the NaN scale and codes 0. Callers with another policy replace those values
    /// first.
    pub quantize_block: fn(&[f32], &mut [u8]) -> (u16, BlockEvents),
    /// Dequantizes a block from the bits of its scale and its packed codes.
    ///
    /// Fills the slice, which may be shorter than a block. A NaN scale gives the canonical NaN.
    pub dequantize_block: fn(u16, &[u8], &mut [f32]),
}

impl ComparisonFormat {
    /// All comparison formats.
    pub const ALL: [Self; 2] = [Self::Mxfp4E3m0, Self::Nf4];

    /// Returns the format's facts.
    #[inline]
    pub const fn facts(self) -> Facts {
        match self {
            Self::Mxfp4E3m0 => Facts {
                word: "mxfp4-e3m0",
                block: BlockShape::row_of(mx::BLOCK),
                element: ElementType::E3m0,
                scale: ScaleType::E8m0,
                global_scale: GlobalScaleUse::None,
            },
            Self::Nf4 => Facts {
                word: "nf4",
                block: BlockShape::row_of(nf4::BLOCK),
                element: ElementType::Nf4,
                scale: ScaleType::Bf16,
                global_scale: GlobalScaleUse::None,
            },
        }
    }

    /// Returns the arithmetic of the format's blocks.
    pub const fn definition(self) -> Definition {
        match self {
            Self::Mxfp4E3m0 => of_mx::<E3m0>(),
            Self::Nf4 => Definition {
                quantize_block: |values, codes| {
                    let mut block = [0.0; nf4::BLOCK];
                    block[..values.len()].copy_from_slice(values);
                    let (scale, events) = nf4::quantize_block(&block, codes);
                    (scale.to_bits(), events)
                },
                dequantize_block: |scale, codes, values| {
                    let block = nf4::dequantize_block(Bf16::from_bits(scale), codes);
                    values.copy_from_slice(&block[..values.len()]);
                },
            },
        }
    }
}

/// Returns the arithmetic of an MX format, by OCP's numerics.
const fn of_mx<E: Element>() -> Definition {
    Definition {
        quantize_block: |values, codes| {
            let mut block = [0.0; mx::BLOCK];
            block[..values.len()].copy_from_slice(values);
            let (scale, events) = mx::quantize_block::<E>(&block, &OCP, codes);
            (scale.to_bits().into(), events)
        },
        dequantize_block: |scale, codes, values| {
            let block = mx::dequantize_block::<E>(E8m0::from_bits(scale as u8), codes);
            values.copy_from_slice(&block[..values.len()]);
        },
    }
}

/// OCP MX v1.0: floor, ties to even, −0 preserved.
const OCP: Arithmetic =
    Arithmetic { scale_rule: ScaleRule::Floor, ties: Ties::Even, negative_zero: NegativeZero::Keep };

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: usize = 64;

    #[test]
    fn short_last_blocks_are_padded_with_zeros() {
        for format in ComparisonFormat::ALL {
            let (facts, definition) = (format.facts(), format.definition());
            let (length, bytes) = (facts.block.elements(), facts.block.elements() * facts.element.bits() / 8);
            let mut values = [0.0; MOST];
            for cut in 1..=length {
                let values = &mut values[..length];
                values[..cut].iter_mut().enumerate().for_each(|(i, value)| *value = (i as f32 - 9.5) * 0.37);
                let mut codes = [[0xAA; MOST / 2]; 2];
                let quantize = definition.quantize_block;
                let found = quantize(&values[..cut], &mut codes[0][..bytes]);
                assert_eq!(found, quantize(values, &mut codes[1][..bytes]), "{format:?} {cut}");
                assert_eq!(codes[0], codes[1], "{format:?} {cut}");
                let mut back = [[f32::NAN; MOST]; 2];
                (definition.dequantize_block)(found.0, &codes[0][..bytes], &mut back[0][..length]);
                (definition.dequantize_block)(found.0, &codes[0][..bytes], &mut back[1][..cut]);
                assert_eq!(back[0][..cut], back[1][..cut], "{format:?}");
                assert!(back[0][cut..length].iter().all(|value| *value == 0.0), "{format:?} {cut}");
            }
        }
    }

    #[test]
    fn non_finite_blocks_become_nan() {
        for format in ComparisonFormat::ALL {
            let (facts, definition) = (format.facts(), format.definition());
            let (length, bytes) = (facts.block.elements(), facts.block.elements() * facts.element.bits() / 8);
            for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let (mut values, mut codes, mut back) = ([1.0; MOST], [0xAA; MOST / 2], [0.0; MOST]);
                values[length - 1] = poison;
                let (scale, events) = (definition.quantize_block)(&values[..length], &mut codes[..bytes]);
                assert_eq!((scale, events), (facts.scale.nan(), BlockEvents::default()), "{format:?}");
                assert!(codes[..bytes].iter().all(|byte| *byte == 0), "{format:?}");
                (definition.dequantize_block)(scale, &codes[..bytes], &mut back[..length]);
                assert!(back[..length].iter().all(|value| value.to_bits() == 0x7FC0_0000), "{format:?}");
            }
        }
    }

    /// Codes quantized from exact multiples of a scale must decode to the same values.
    #[test]
    fn exact_multiples_of_a_scale_round_trip() {
        for format in ComparisonFormat::ALL {
            let (facts, definition) = (format.facts(), format.definition());
            let (length, bytes) = (facts.block.elements(), facts.block.elements() * facts.element.bits() / 8);
            for scale in [2f32.powi(-20), 1.0, 2f32.powi(30)] {
                let (mut values, mut codes, mut back) = ([0.0; MOST], [0; MOST / 2], [0.0; MOST]);
                for (i, value) in values.iter_mut().enumerate() {
                    *value = facts.element.decode(i as u8 & 15) * scale;
                }
                let (found, events) = (definition.quantize_block)(&values[..length], &mut codes[..bytes]);
                assert_eq!((facts.scale.value(found), events), (scale, BlockEvents::default()), "{format:?}");
                (definition.dequantize_block)(found, &codes[..bytes], &mut back[..length]);
                assert_eq!(back[..length], values[..length], "{format:?}");
            }
        }
    }
}
