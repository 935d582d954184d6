//! Products of bytes by NEON.

use std::arch::aarch64::{
    int8x16_t, int16x8_t, uint32x4_t, vaddq_s32, vandq_u8, vdupq_n_u8, vget_high_s8, vget_low_s8, vld1q_s8,
    vld1q_s32, vld1q_u8, vmlal_s8, vmull_s8, vpaddlq_s16, vpaddq_s32, vqtbl1q_s8, vreinterpretq_u8_u32,
    vreinterpretq_u32_s32, vreinterpretq_u32_u8, vshrq_n_u8, vst1q_s8, vuzp1q_u32, vuzp2q_u32,
};

use super::{Int8Products, LANES, Lanes, Quarter, STEP};
use crate::cpu::simd::products::RAISED;
use crate::cpu::simd::tokens::{Neon, parts, quarters};

impl Int8Products<Neon> for Neon {
    type Bytes = [int8x16_t; 4];

    #[inline(always)]
    fn raised(self, codes: &[u8; STEP]) -> [[int8x16_t; 4]; 4] {
        // SAFETY: NEON is part of AArch64. `RAISED` has the 16 bytes and `codes` eight times the 16
        // bytes that are read.
        unsafe {
            let table = vld1q_s8(RAISED.as_ptr());
            // By four groups, the first halves and the second halves.
            let codes = quarters!(i => {
                let from = codes.as_ptr().add(32 * i);
                let [a, b] = parts!(0 1; j => vreinterpretq_u32_u8(vld1q_u8(from.add(16 * j))));
                [vreinterpretq_u8_u32(vuzp1q_u32(a, b)), vreinterpretq_u8_u32(vuzp2q_u32(a, b))]
            });
            parts!(0 1 2 3; quarter => quarters!(i => {
                let codes = codes[i][quarter / 2];
                let [low, high] = [vandq_u8(codes, vdupq_n_u8(15)), vshrq_n_u8::<4>(codes)];
                let codes = if quarter.is_multiple_of(2) { low } else { high };
                vqtbl1q_s8(table, codes)
            }))
        }
    }

    #[inline(always)]
    fn load(self, quarter: &Quarter) -> [int8x16_t; 4] {
        // SAFETY: NEON is part of AArch64. `quarter` has four times the 16 bytes that are read.
        unsafe { quarters!(i => vld1q_s8(quarter.as_ptr().cast::<i8>().add(16 * i))) }
    }

    #[inline(always)]
    fn store(self, bytes: [int8x16_t; 4]) -> Quarter {
        let mut quarter = [[0; 4]; LANES];
        // SAFETY: NEON is part of AArch64. `quarter` has four times the 16 bytes that are written.
        unsafe { quarters!(i => vst1q_s8(quarter.as_mut_ptr().cast::<i8>().add(16 * i), bytes[i])) };
        quarter
    }

    #[inline(always)]
    fn add_groups(
        self,
        sums: &Lanes<i32>,
        weights: [[int8x16_t; 4]; 4],
        x: [[int8x16_t; 4]; 4],
    ) -> [uint32x4_t; 4] {
        // SAFETY: NEON is part of AArch64. `sums` has four times the 16 bytes that are read.
        unsafe {
            quarters!(i => {
                let [low, high] = pairs(
                    parts!(0 1 2 3; j => weights[j][i]),
                    parts!(0 1 2 3; j => x[j][i]),
                );
                let of_groups = vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
                vreinterpretq_u32_s32(vaddq_s32(vld1q_s32(sums.as_ptr().add(4 * i)), of_groups))
            })
        }
    }
}

/// The products of four groups, added over the quarters: of two groups each.
///
/// Each of 16 bits gets four products of at most 24 · 127, so it stays below 2^15.
#[inline(always)]
fn pairs(weights: [int8x16_t; 4], x: [int8x16_t; 4]) -> [int16x8_t; 2] {
    // SAFETY: NEON is part of AArch64.
    unsafe {
        let mut low = vmull_s8(vget_low_s8(weights[0]), vget_low_s8(x[0]));
        let mut high = vmull_s8(vget_high_s8(weights[0]), vget_high_s8(x[0]));
        for j in 1..4 {
            low = vmlal_s8(low, vget_low_s8(weights[j]), vget_low_s8(x[j]));
            high = vmlal_s8(high, vget_high_s8(weights[j]), vget_high_s8(x[j]));
        }
        [low, high]
    }
}
