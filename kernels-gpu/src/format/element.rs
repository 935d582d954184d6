//! Elements of the MX formats: chunks of them encoded and decoded.

use microscale_formats::{E2m1, E4m3, E5m2, Ties, mx};

use crate::dtype::{self, Chunk, Dtype};
#[cfg(microscale_sm90)]
use crate::hardware::ptx;

/// An element of the MX formats, a chunk at a time.
pub(crate) trait Element: mx::Element {
    /// A chunk's codes for the scale byte b.
    fn encode_chunk<D: Dtype>(chunk: &Chunk, scale: u32, ties: Ties) -> u64;

    /// Up to eight codes as exact f32.
    fn decode_chunk(codes: u64) -> [f32; 8];

    /// Whether there are codes of infinity and NaN.
    const HAS_SPECIALS: bool;
}

impl Element for E2m1 {
    const HAS_SPECIALS: bool = false;

    #[inline(always)]
    fn encode_chunk<D: Dtype>(chunk: &Chunk, scale: u32, ties: Ties) -> u64 {
        u64::from(dtype::encode::<D>(chunk, scale, ties))
    }

    #[inline(always)]
    fn decode_chunk(codes: u64) -> [f32; 8] {
        dtype::decode(codes as u32)
    }
}

/// Both 8-bit elements by the same text: by the hardware's conversions where there are some, and by
/// the reference elsewhere.
macro_rules! element_of_8_bits {
    ($type:ident, $to:path, $from:path) => {
        impl Element for $type {
            const HAS_SPECIALS: bool = true;

            #[inline(always)]
            fn encode_chunk<D: Dtype>(chunk: &Chunk, scale: u32, _: Ties) -> u64 {
                let reciprocal = dtype::reciprocal(scale);
                let mut codes = 0;
                for i in 0..D::CHUNK / 2 {
                    let [low, high] = [2 * i, 2 * i + 1].map(|i| D::widen(chunk, i) * reciprocal);
                    #[cfg(microscale_sm90)]
                    let pair = $to(high, low);
                    #[cfg(not(microscale_sm90))]
                    let pair = u32::from(<$type>::from_f32(low).to_bits())
                        | u32::from(<$type>::from_f32(high).to_bits()) << 8;
                    codes |= u64::from(pair) << (16 * i);
                }
                codes
            }

            #[inline(always)]
            fn decode_chunk(codes: u64) -> [f32; 8] {
                let mut values = [0.0; 8];
                for i in 0..4 {
                    let pair = (codes >> (16 * i)) as u32;
                    #[cfg(microscale_sm90)]
                    {
                        let pair = $from(pair);
                        values[2 * i] = ptx::f16_low_to_f32(pair);
                        values[2 * i + 1] = ptx::f16_high_to_f32(pair);
                    }
                    #[cfg(not(microscale_sm90))]
                    {
                        values[2 * i] = <$type>::from_bits(pair as u8).to_f32();
                        values[2 * i + 1] = <$type>::from_bits((pair >> 8) as u8).to_f32();
                    }
                }
                values
            }
        }
    };
}
element_of_8_bits!(E4m3, ptx::e4m3x2, ptx::e4m3x2_to_f16x2);
element_of_8_bits!(E5m2, ptx::e5m2x2, ptx::e5m2x2_to_f16x2);
