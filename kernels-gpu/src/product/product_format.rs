//! The 4-bit formats as products read them: the blocks of a chunk, their scales, and the terms of a
//! chunk.

use microscale_formats::{E8m0, dot, mx, nvfp4};

#[cfg(microscale_sm90)]
use crate::hardware::ptx;

/// A format's scales and terms.
pub(crate) trait ProductFormat {
    /// Bytes of a block's codes.
    const BLOCK_BYTES: u64;
    /// Blocks in a chunk.
    const BLOCKS: u32;
    /// Scales of a chunk of the vector, ready to be multiplied with.
    type Scales: Copy;

    fn scales(bytes: u32) -> Self::Scales;

    /// Adds the terms of a chunk to its stream.
    fn add(sum: &mut f64, quarters: [f32; 2], matrix: u32, vector: Self::Scales);
}

pub(crate) struct Nvfp4;

impl Nvfp4 {
    /// Decodes two scales, or two other E4M3 numbers, with their signs: the values of
    /// `E4m3::to_f32`.
    #[inline(always)]
    pub(crate) fn pair(bytes: u32) -> [f32; 2] {
        #[cfg(microscale_sm90)]
        {
            let pair = ptx::e4m3x2_to_f16x2(bytes);
            [ptx::f16_low_to_f32(pair), ptx::f16_high_to_f32(pair)]
        }
        #[cfg(not(microscale_sm90))]
        {
            // Moved to the bits of an f32, the code is the scale times 2^-120, also if subnormal.
            // An arithmetic shift moves the code and keeps the sign.
            const CODE: u32 = 0x7F << 20;
            [bytes << 24, bytes << 16].map(|top| {
                let bits = (top as i32 >> 4) as u32 & (1 << 31 | CODE);
                let bits = if bits & CODE == CODE { 0x7FC0_0000 } else { bits };
                f32::from_bits(bits) * microscale_formats::plan::power_of_two(120)
            })
        }
    }
}

impl ProductFormat for Nvfp4 {
    const BLOCK_BYTES: u64 = nvfp4::BLOCK as u64 / 2;
    const BLOCKS: u32 = 2;
    type Scales = [f32; 2];

    /// A quarter of the scales, as [`ProductFormat::add`] gets four times the sums.
    #[inline(always)]
    fn scales(bytes: u32) -> [f32; 2] {
        Self::pair(bytes).map(|scale| 0.25 * scale)
    }

    #[inline(always)]
    fn add(sum: &mut f64, quarters: [f32; 2], matrix: u32, vector: [f32; 2]) {
        // Each product is exact (`dot::nvfp4_term`).
        let matrix = Self::pair(matrix);
        for i in 0..2 {
            *sum += f64::from(quarters[i] * (matrix[i] * vector[i]));
        }
    }
}

pub(crate) struct Mxfp4;

impl ProductFormat for Mxfp4 {
    const BLOCK_BYTES: u64 = mx::BLOCK as u64 / 2;
    const BLOCKS: u32 = 1;
    type Scales = u32;

    #[inline(always)]
    fn scales(bytes: u32) -> u32 {
        bytes
    }

    #[inline(always)]
    fn add(sum: &mut f64, quarters: [f32; 2], matrix: u32, vector: u32) {
        let scale = dot::mxfp4_scale(E8m0::from_bits(matrix as u8), E8m0::from_bits(vector as u8));
        *sum += f64::from(quarters[0] + quarters[1]) * scale;
    }
}

/// Eight E2M1 elements as pairs of f16.
#[cfg(microscale_fp4)]
#[inline(always)]
pub(crate) fn e2m1_to_f16_pairs(codes: u32) -> [u32; 4] {
    [codes, codes >> 8, codes >> 16, codes >> 24].map(ptx::e2m1x2_to_f16x2)
}
