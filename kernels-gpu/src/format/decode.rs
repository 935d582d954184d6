//! The questions of dequantizing to a format: a block's factor, and the values of its codes.

use microscale_formats::{E4m3, E8m0};
use microscale_kernels_abi::{ApplyGlobal, MxOptions};

use super::blocks::Blocks;
use super::element::Element;
use super::mx::{EVEN, Mx};
use super::nv::{Nv, from_e4m3};
use crate::dtype;

/// A format to dequantize from.
pub(crate) trait Decode: Blocks {
    /// The factor of a block's elements; NaN for the NaN scale.
    fn factor(&self, scale: u8) -> f32;

    /// Up to eight codes, the first in the lowest bits, as exact f32.
    fn decode(codes: u64) -> [f32; 8];

    /// Whether elements can be infinite or NaN.
    const HAS_SPECIALS: bool;
}

impl<E: Element> Decode for Mx<E, EVEN> {
    const HAS_SPECIALS: bool = E::HAS_SPECIALS;

    #[inline(always)]
    fn factor(&self, scale: u8) -> f32 {
        E8m0::from_bits(scale).to_f32()
    }

    #[inline(always)]
    fn decode(codes: u64) -> [f32; 8] {
        E::decode_chunk(codes)
    }
}

impl<E> Mx<E, EVEN> {
    /// To dequantize from.
    pub(crate) fn decoder() -> Self {
        Self::new(MxOptions { mantissa_addend: 0, ties: 0, negative_zero: 0, saturate_non_finite: 0 })
    }
}

/// NVFP4 to dequantize from, with its global scale.
pub(crate) struct NvDecoder {
    pub(crate) global: f32,
    pub(crate) apply: ApplyGlobal,
}

impl Blocks for NvDecoder {
    const BLOCK: u32 = Nv::BLOCK;
    const BITS: u32 = Nv::BITS;
}

impl Decode for NvDecoder {
    const HAS_SPECIALS: bool = false;

    #[inline(always)]
    fn factor(&self, scale: u8) -> f32 {
        let scale = from_e4m3(E4m3::from_bits(scale));
        match self.apply {
            ApplyGlobal::Divisor => scale / self.global,
            ApplyGlobal::Multiplier => scale * self.global,
            ApplyGlobal::Absent => scale,
        }
    }

    #[inline(always)]
    fn decode(codes: u64) -> [f32; 8] {
        dtype::decode(codes as u32)
    }
}
