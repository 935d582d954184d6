//! Vectors of NEON: four registers of four lanes.

use std::arch::aarch64::{
    float32x4_t, uint32x4_t, vaddq_f32, vaddq_u32, vaddvq_u32, vandq_u32, vbicq_u32, vbslq_f32, vcgtq_f32,
    vcgtq_u32, vcleq_f32, vcltq_f32, vcvtq_s32_f32, vdivq_f32, vdupq_n_f32, vdupq_n_s32, vdupq_n_u32,
    vfmaq_f32, vfmsq_f32, vld1q_f32, vld1q_u32, vmaxq_u32, vmulq_f32, vorrq_u32, vpmaxq_u32,
    vreinterpretq_f32_u32, vreinterpretq_u8_u16, vreinterpretq_u16_u32, vreinterpretq_u32_f32,
    vreinterpretq_u32_s32, vshlq_u32, vst1q_f32, vst1q_u8, vsubq_f32, vtstq_u32, vuzp1q_f32, vuzp1q_u8,
    vuzp1q_u16, vuzp2q_f32,
};

use super::Vector;
use crate::cpu::simd::tokens::{LANES, Lanes, Neon, Portable, quarters};

/// Sixteen f32.
type Four = [float32x4_t; 4];
/// Sixteen u32.
type FourOfBits = [uint32x4_t; 4];

impl Vector for Neon {
    type Number = Four;

    #[inline(always)]
    unsafe fn assume_detected() -> Self {
        Self
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { [vdupq_n_f32(x); 4] }
    }

    #[inline(always)]
    fn mul(self, a: Four, b: Four) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vmulq_f32(a[i], b[i])) }
    }

    #[inline(always)]
    fn add(self, a: Four, b: Four) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vaddq_f32(a[i], b[i])) }
    }

    #[inline(always)]
    fn sub(self, a: Four, b: Four) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vsubq_f32(a[i], b[i])) }
    }

    #[inline(always)]
    fn fma(self, a: Four, b: Four, c: Four) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vfmaq_f32(c[i], a[i], b[i])) }
    }

    #[inline(always)]
    fn fnma(self, a: Four, b: Four, c: Four) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vfmsq_f32(c[i], a[i], b[i])) }
    }

    // The minimum and maximum instructions treat NaN and −0 differently.
    #[inline(always)]
    fn min(self, a: Four, b: Four) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vbslq_f32(vcltq_f32(a[i], b[i]), a[i], b[i])) }
    }

    #[inline(always)]
    fn max(self, a: Four, b: Four) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i])) }
    }

    #[inline(always)]
    fn load(self, lanes: &Lanes<f32>) -> Four {
        // SAFETY: NEON is part of AArch64. Each quarter has the 16 bytes that are read; they need
        // not be aligned.
        unsafe {
            let quarters = lanes.as_chunks::<4>().0;
            quarters!(i => vld1q_f32(quarters[i].as_ptr()))
        }
    }

    #[inline(always)]
    fn store(self, vector: Four) -> Lanes<f32> {
        // SAFETY: NEON is part of AArch64. Each quarter has the 16 bytes that are written; they
        // need not be aligned.
        unsafe {
            let mut lanes = [0.0; LANES];
            for (quarter, vector) in lanes.as_chunks_mut::<4>().0.iter_mut().zip(vector) {
                vst1q_f32(quarter.as_mut_ptr(), vector);
            }
            lanes
        }
    }

    #[inline(always)]
    fn deinterleave(self, a: Four, b: Four) -> (Four, Four) {
        // SAFETY: NEON is part of AArch64.
        unsafe {
            let even = [
                vuzp1q_f32(a[0], a[1]),
                vuzp1q_f32(a[2], a[3]),
                vuzp1q_f32(b[0], b[1]),
                vuzp1q_f32(b[2], b[3]),
            ];
            let odd = [
                vuzp2q_f32(a[0], a[1]),
                vuzp2q_f32(a[2], a[3]),
                vuzp2q_f32(b[0], b[1]),
                vuzp2q_f32(b[2], b[3]),
            ];
            (even, odd)
        }
    }

    #[inline(always)]
    fn halves(self, first: f32, second: f32) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe {
            let (first, second) = (vdupq_n_f32(first), vdupq_n_f32(second));
            [first, first, second, second]
        }
    }

    #[inline(always)]
    fn bits(self, numbers: Four) -> FourOfBits {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vreinterpretq_u32_f32(numbers[i])) }
    }

    #[inline(always)]
    fn number(self, bits: FourOfBits) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vreinterpretq_f32_u32(bits[i])) }
    }

    #[inline(always)]
    fn splat_bits(self, bits: u32) -> FourOfBits {
        // SAFETY: NEON is part of AArch64.
        unsafe { [vdupq_n_u32(bits); 4] }
    }

    #[inline(always)]
    fn and(self, a: FourOfBits, b: FourOfBits) -> FourOfBits {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vandq_u32(a[i], b[i])) }
    }

    #[inline(always)]
    fn or(self, a: FourOfBits, b: FourOfBits) -> FourOfBits {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vorrq_u32(a[i], b[i])) }
    }

    #[inline(always)]
    fn and_not(self, a: FourOfBits, b: FourOfBits) -> FourOfBits {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vbicq_u32(b[i], a[i])) }
    }

    #[inline(always)]
    fn shift_left(self, bits: FourOfBits, by: u32) -> FourOfBits {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vshlq_u32(bits[i], vdupq_n_s32(by as i32))) }
    }

    #[inline(always)]
    fn shift_right(self, bits: FourOfBits, by: u32) -> FourOfBits {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vshlq_u32(bits[i], vdupq_n_s32(-(by as i32)))) }
    }

    #[inline(always)]
    fn max_bits(self, a: FourOfBits, b: FourOfBits) -> FourOfBits {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vmaxq_u32(a[i], b[i])) }
    }

    #[inline(always)]
    fn fold_max(self, a: FourOfBits, b: FourOfBits) -> FourOfBits {
        // SAFETY: NEON is part of AArch64.
        unsafe {
            [vmaxq_u32(a[0], a[2]), vmaxq_u32(a[1], a[3]), vmaxq_u32(b[0], b[2]), vmaxq_u32(b[1], b[3])]
        }
    }

    #[inline(always)]
    fn max_of_halves(self, vectors: &[FourOfBits; LANES / 2]) -> FourOfBits {
        // SAFETY: NEON is part of AArch64.
        unsafe {
            let vectors = vectors.as_chunks::<2>().0;
            quarters!(i => {
                let [[a, b, c, d], [e, f, g, h]] = vectors[i];
                let (first, second) = (vpmaxq_u32(vmaxq_u32(a, b), vmaxq_u32(c, d)), vpmaxq_u32(vmaxq_u32(e, f), vmaxq_u32(g, h)));
                vpmaxq_u32(first, second)
            })
        }
    }

    #[inline(always)]
    fn add_bits(self, a: FourOfBits, b: FourOfBits) -> FourOfBits {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vaddq_u32(a[i], b[i])) }
    }

    #[inline(always)]
    fn truncate(self, numbers: Four) -> FourOfBits {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vreinterpretq_u32_s32(vcvtq_s32_f32(numbers[i]))) }
    }

    #[inline(always)]
    fn above(self, a: FourOfBits, b: FourOfBits) -> u16 {
        // SAFETY: NEON is part of AArch64.
        unsafe { mask(quarters!(i => vcgtq_u32(a[i], b[i]))) }
    }

    #[inline(always)]
    fn f32_to_f16(self, numbers: Four) -> FourOfBits {
        let bits = Portable.f32_to_f16(self.store(numbers));
        self.bits(self.load(&bits.map(f32::from_bits)))
    }

    #[inline(always)]
    fn f16_to_f32(self, bits: FourOfBits) -> Four {
        self.load(&Portable.f16_to_f32(self.store(self.number(bits)).map(f32::to_bits)))
    }

    #[inline(always)]
    fn low_bytes(self, bits: FourOfBits) -> Lanes<u8> {
        // SAFETY: NEON is part of AArch64. `bytes` has the 16 bytes that are written; they need not
        // be aligned.
        unsafe {
            let [a, b, c, d] = quarters!(i => vreinterpretq_u16_u32(bits[i]));
            let low = [vreinterpretq_u8_u16(vuzp1q_u16(a, b)), vreinterpretq_u8_u16(vuzp1q_u16(c, d))];
            let mut bytes = [0; LANES];
            vst1q_u8(bytes.as_mut_ptr(), vuzp1q_u8(low[0], low[1]));
            bytes
        }
    }

    #[inline(always)]
    fn div(self, a: Four, b: Four) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vdivq_f32(a[i], b[i])) }
    }

    #[inline(always)]
    fn at_most(self, a: Four, b: Four) -> u16 {
        // SAFETY: NEON is part of AArch64.
        unsafe { mask(quarters!(i => vcleq_f32(a[i], b[i]))) }
    }

    #[inline(always)]
    fn select(self, mask: u16, set: Four, unset: Four) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe {
            quarters!(i => {
                let lanes = vtstq_u32(vdupq_n_u32(u32::from(mask) >> (4 * i)), lane_bits());
                vbslq_f32(lanes, set[i], unset[i])
            })
        }
    }
}

/// 1, 2, 4, 8: the mask bit of each lane.
#[inline(always)]
fn lane_bits() -> uint32x4_t {
    // SAFETY: NEON is part of AArch64. The array has the 16 bytes that are read.
    unsafe { vld1q_u32([1, 2, 4, 8].as_ptr()) }
}

/// Gathers one bit per lane: 1 if the lane has ones.
#[inline(always)]
fn mask(lanes: FourOfBits) -> u16 {
    // SAFETY: NEON is part of AArch64.
    unsafe {
        let [a, b, c, d] = quarters!(i => vaddvq_u32(vandq_u32(lanes[i], lane_bits())));
        (a | b << 4 | c << 8 | d << 12) as u16
    }
}
