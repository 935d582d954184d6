//! The MX formats: a power of two as the scale of a block of 32.

use core::marker::PhantomData;

use microscale_formats::{BlockEvents, E8m0, NegativeZero, Ties, block, mx};
use microscale_kernels_abi::MxOptions;

use super::blocks::Blocks;
use super::element::Element;
use super::encode::{Factor, Format, Scaled};
use crate::dtype::{Chunk, Dtype};

/// Which ties an [`Mx`] has: to even, whatever the options say.
pub(crate) const EVEN: u32 = 0;
/// Away from zero or toward it, as the options say.
pub(crate) const OTHER: u32 = 1;

/// As the options say.
pub(crate) const ANY: u32 = 2;

/// An MX format with [ties](EVEN).
pub(crate) struct Mx<E, const TIES: u32> {
    pub(super) options: MxOptions,
    element: PhantomData<E>,
}

impl<E, const TIES: u32> Mx<E, TIES> {
    #[inline(always)]
    pub(crate) fn ties(&self) -> Ties {
        const AWAY: u32 = Ties::Away as u32;
        const TO_EVEN: u32 = Ties::Even as u32;
        match self.options.ties {
            _ if TIES == EVEN => Ties::Even,
            TO_EVEN if TIES == ANY => Ties::Even,
            AWAY => Ties::Away,
            _ => Ties::Zero,
        }
    }

    pub(crate) fn new(options: MxOptions) -> Self {
        Self { options, element: PhantomData }
    }
}

impl<E: mx::Element, const TIES: u32> Blocks for Mx<E, TIES> {
    const BLOCK: u32 = mx::BLOCK as u32;
    const BITS: u32 = E::BITS as u32;
}

impl<E: Element, const TIES: u32> Format for Mx<E, TIES> {
    const NAN_SCALE: u8 = mx::NAN_SCALE.to_bits();
    type Scaling = E8m0;
    const LIMITS: bool = false;
    const USUALLY_EVENTFUL: bool = true;

    fn words<D: Dtype>() -> usize {
        1
    }

    #[inline(always)]
    fn usual_scale<D: Dtype>(&self, amax_bits: u32) -> Scaled {
        let (byte, _, events) = self.define::<D>(amax_bits);
        let in_range = !block::is_non_finite(amax_bits);
        Scaled { byte, factor: [u32::from(byte), 0, 0], events, in_range }
    }

    #[inline(always)]
    fn scale<D: Dtype>(&self, amax_bits: u32) -> Scaled {
        self.usual_scale::<D>(amax_bits)
    }

    #[inline(always)]
    fn limit<D: Dtype>(chunk: &Chunk, _: Factor) -> Chunk {
        *chunk
    }

    #[inline(always)]
    fn encode<D: Dtype>(&self, chunk: &Chunk, [scale, ..]: Factor) -> u64 {
        E::encode_chunk::<D>(chunk, scale, self.ties())
    }

    #[inline(always)]
    fn has_shortcut<D: Dtype>(&self) -> bool {
        false
    }

    #[inline(always)]
    fn shortcut_scale<D: Dtype>(&self, amax_bits: u32) -> Scaled {
        self.usual_scale::<D>(amax_bits)
    }

    #[inline(always)]
    fn shortcut_encode<D: Dtype>(&self, chunk: &Chunk, scale: u32) -> u64 {
        E::encode_chunk::<D>(chunk, scale, self.ties())
    }

    #[inline(always)]
    fn define<D: Dtype>(&self, amax_bits: u32) -> (u8, E8m0, BlockEvents) {
        let exponent = mx::rounded_exponent(amax_bits, self.options.mantissa_addend);
        let scale = mx::scale_from_exponent::<E>(exponent);
        (scale.to_bits(), scale, mx::events::<E>(amax_bits, exponent, self.ties()))
    }

    #[inline(always)]
    fn define_under<D: Dtype>(&self, amax_bits: u32, byte: u8) -> (E8m0, BlockEvents) {
        let scale = E8m0::from_bits(byte);
        let scaled = f32::from_bits(amax_bits) * scale.reciprocal();
        let flushed = amax_bits != 0 && E::encode(scaled, self.ties()) == 0;
        (scale, BlockEvents { clipped: mx::clips::<E>(amax_bits, scale), flushed, scale_saturated: false })
    }

    #[inline(always)]
    fn code(&self, value: f32, scale: E8m0) -> u8 {
        mx::encode::<E>(value, scale.reciprocal(), self.ties(), negative_zero(self.options.negative_zero))
    }

    #[inline(always)]
    fn negative_zero(&self) -> u32 {
        self.options.negative_zero
    }

    #[inline(always)]
    fn saturates_non_finite(&self) -> bool {
        self.options.saturate_non_finite != 0
    }
}

/// The kinds of −0 by their numbers.
#[inline(always)]
fn negative_zero(number: u32) -> NegativeZero {
    match number {
        0 => NegativeZero::Keep,
        1 => NegativeZero::DropInput,
        2 => NegativeZero::Drop,
        _ => NegativeZero::Force,
    }
}
