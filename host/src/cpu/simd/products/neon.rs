//! Products of codes by NEON.

use std::arch::aarch64::{
    float32x4_t, float64x2_t, int16x8_t, uint8x16x2_t, uint32x4_t, vaddq_f64, vaddq_s32, vandq_u8, vandq_u32,
    vcvt_f64_f32, vcvt_high_f64_f32, vcvtq_f32_s32, vcvtq_f64_s64, vdupq_n_f64, vdupq_n_u8, vdupq_n_u32,
    vfmaq_f64, vget_high_s8, vget_low_f32, vget_low_s8, vget_low_s16, vget_low_s32, vld1q_f64, vld1q_s8,
    vld1q_s32, vld1q_u8, vld2q_u8, vmlal_s8, vmovl_high_s16, vmovl_high_s32, vmovl_s16, vmovl_s32, vmull_s8,
    vorrq_u8, vpaddq_s16, vqtbl1q_s8, vqtbl1q_u8, vqtbl2q_u8, vreinterpretq_f32_u32, vreinterpretq_s32_u32,
    vreinterpretq_u8_u32, vreinterpretq_u32_s32, vreinterpretq_u32_u8, vreinterpretq_u32_u64,
    vreinterpretq_u64_u32, vshlq_n_u32, vshrq_n_u8, vst1q_f64, vsubq_s32, vtrn1q_u8, vtrn1q_u32, vtrn1q_u64,
    vtrn2q_u8, vtrn2q_u32, vtrn2q_u64,
};

use super::{CHUNK, DoubledCodes, LANES, Products, RAISED, STEP, TILE, Table, bytes_of_fractions};
use crate::cpu::simd::tokens::{Neon, parts, quarters};

impl Products for Neon {
    type Sums = [float64x2_t; 4];
    type Column = [uint32x4_t; 4];

    #[inline(always)]
    fn no_sums(self) -> [float64x2_t; 4] {
        // SAFETY: NEON is part of AArch64.
        unsafe { [vdupq_n_f64(0.0); 4] }
    }

    #[inline(always)]
    fn store_sums(self, sums: [float64x2_t; 4]) -> [f64; 8] {
        let mut stored = [0.0; 8];
        for (stored, sums) in stored.as_chunks_mut::<2>().0.iter_mut().zip(sums) {
            // SAFETY: NEON is part of AArch64. `stored` is a chunk of the 16 bytes that are
            // written.
            unsafe { vst1q_f64(stored.as_mut_ptr(), sums) };
        }
        stored
    }

    #[inline(always)]
    fn bytes(self, bytes: &[u8; LANES], order: &[u8; LANES]) -> [uint32x4_t; 4] {
        // SAFETY: NEON is part of AArch64. All three arrays have the 16 bytes that are read. An
        // index that is too large, such as 255, gives 0.
        unsafe {
            let bytes = vqtbl1q_u8(vld1q_u8(bytes.as_ptr()), vld1q_u8(order.as_ptr()));
            quarters!(i => {
                let first = 4 * i as u8;
                let spread = [0, 1, 2, 3].map(|lane| [first + lane, 255, 255, 255]);
                vreinterpretq_u32_u8(vqtbl1q_u8(bytes, vld1q_u8(spread.as_flattened().as_ptr())))
            })
        }
    }

    #[inline(always)]
    fn numbers(self, integers: [uint32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vcvtq_f32_s32(vreinterpretq_s32_u32(integers[i]))) }
    }

    #[inline(always)]
    fn quarters(self, codes: &[u8; STEP], by: &DoubledCodes) -> [uint32x4_t; 4] {
        // SAFETY: NEON is part of AArch64. `surplus` has four times the 16 bytes that are read.
        unsafe {
            let sums = parts!(0 1 2 3 4 5 6 7; i => groups(codes, by, i));
            let even = parts!(0 1 2 3; i => vpaddq_s16(sums[2 * i][0], sums[2 * i + 1][0]));
            let odd = parts!(0 1 2 3; i => vpaddq_s16(sums[2 * i][1], sums[2 * i + 1][1]));
            let even = vpaddq_s16(vpaddq_s16(even[0], even[1]), vpaddq_s16(even[2], even[3]));
            let odd = vpaddq_s16(vpaddq_s16(odd[0], odd[1]), vpaddq_s16(odd[2], odd[3]));
            let sums = [
                vmovl_s16(vget_low_s16(even)),
                vmovl_high_s16(even),
                vmovl_s16(vget_low_s16(odd)),
                vmovl_high_s16(odd),
            ];
            quarters!(i => {
                vreinterpretq_u32_s32(vsubq_s32(sums[i], vld1q_s32(by.surplus.as_ptr().add(4 * i))))
            })
        }
    }

    #[inline(always)]
    fn add_halves(self, sums: [float64x2_t; 4], terms: [float32x4_t; 4]) -> [float64x2_t; 4] {
        // SAFETY: NEON is part of AArch64.
        unsafe {
            let [first, second] = [[terms[0], terms[1]], [terms[2], terms[3]]];
            let first = wide(first);
            let second = wide(second);
            quarters!(i => vaddq_f64(vaddq_f64(sums[i], first[i]), second[i]))
        }
    }

    #[inline(always)]
    fn add_scaled(
        self,
        sums: [float64x2_t; 4],
        integers: [uint32x4_t; 4],
        bytes: &[u8; 8],
        powers: &[f64; 8],
    ) -> [float64x2_t; 4] {
        let mut scales = [0.0; 8];
        for (i, scale) in scales.iter_mut().enumerate() {
            *scale = f64::from_bits((u64::from(bytes[i]) + 1023 - 127) << 52) * powers[i];
        }
        // SAFETY: NEON is part of AArch64. `scales` has four times the 16 bytes that are read.
        unsafe {
            let [a, b, c, d] = quarters!(i => vreinterpretq_s32_u32(integers[i]));
            let (first, second) = (vaddq_s32(a, c), vaddq_s32(b, d));
            let integers = [
                vmovl_s32(vget_low_s32(first)),
                vmovl_high_s32(first),
                vmovl_s32(vget_low_s32(second)),
                vmovl_high_s32(second),
            ];
            quarters!(i => vfmaq_f64(sums[i], vcvtq_f64_s64(integers[i]), vld1q_f64(scales.as_ptr().add(2 * i))))
        }
    }

    #[inline(always)]
    fn columns(self, codes: &[u8; TILE]) -> [[uint32x4_t; 4]; 4] {
        // SAFETY: NEON is part of AArch64. `codes` has the 256 bytes that are read.
        unsafe {
            let quarters = quarters!(quarter => {
                let [a, b, c, d] =
                    quarters!(i => vreinterpretq_u32_u8(vld1q_u8(codes.as_ptr().add(64 * i + 16 * quarter))));
                let even = [vtrn1q_u32(a, b), vtrn1q_u32(c, d)];
                let odd = [vtrn2q_u32(a, b), vtrn2q_u32(c, d)];
                let even = halves(even);
                let odd = halves(odd);
                [even[0], odd[0], even[1], odd[1]]
            });
            quarters!(i => [quarters[0][i], quarters[1][i], quarters[2][i], quarters[3][i]])
        }
    }

    #[inline(always)]
    fn fractions(self, column: [uint32x4_t; 4]) -> [[float32x4_t; 4]; 8] {
        let quarters = quarters!(i => fractions(column[i]));
        parts!(0 1 2 3 4 5 6 7; i => [quarters[0][i], quarters[1][i], quarters[2][i], quarters[3][i]])
    }

    #[inline(always)]
    fn lookup(self, codes: &[u8; CHUNK / 2], tables: [&Table; 2]) -> [uint32x4_t; 4] {
        const OF_TABLE: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16];
        // SAFETY: NEON is part of AArch64. `codes` and `OF_TABLE` have the 16 bytes and each table
        // the 32 bytes that are read.
        unsafe {
            let [first, second] = parts!(0 1; i => vld2q_u8(tables[i].as_ptr().cast()));
            let (lower, upper) = (uint8x16x2_t(first.0, second.0), uint8x16x2_t(first.1, second.1));
            let (codes, of_table) = (vld1q_u8(codes.as_ptr()), vld1q_u8(OF_TABLE.as_ptr()));
            let even = vorrq_u8(vandq_u8(codes, vdupq_n_u8(15)), of_table);
            let odd = vorrq_u8(vshrq_n_u8::<4>(codes), of_table);
            let (even_lower, even_upper) = (vqtbl2q_u8(lower, even), vqtbl2q_u8(upper, even));
            let (odd_lower, odd_upper) = (vqtbl2q_u8(lower, odd), vqtbl2q_u8(upper, odd));
            [
                vreinterpretq_u32_u8(vtrn1q_u8(even_lower, even_upper)),
                vreinterpretq_u32_u8(vtrn1q_u8(odd_lower, odd_upper)),
                vreinterpretq_u32_u8(vtrn2q_u8(even_lower, even_upper)),
                vreinterpretq_u32_u8(vtrn2q_u8(odd_lower, odd_upper)),
            ]
        }
    }
}

/// The sums of an even group and the next one, in eight parts each.
///
/// A part is at most 24 · 12 · 2, so eight of them stay below 2^15.
#[inline(always)]
fn groups(codes: &[u8; STEP], by: &DoubledCodes, i: usize) -> [int16x8_t; 2] {
    let (codes, even, odd) = (&codes[16 * i..][..16], &by.even[16 * i..][..16], &by.odd[16 * i..][..16]);
    // SAFETY: NEON is part of AArch64. The three slices were just cut to the 16 bytes that are
    // read.
    unsafe {
        let table = vld1q_s8(RAISED.as_ptr());
        let codes = vld1q_u8(codes.as_ptr());
        let low = vqtbl1q_s8(table, vandq_u8(codes, vdupq_n_u8(15)));
        let high = vqtbl1q_s8(table, vshrq_n_u8::<4>(codes));
        let (even, odd) = (vld1q_s8(even.as_ptr()), vld1q_s8(odd.as_ptr()));
        let first = vmull_s8(vget_low_s8(low), vget_low_s8(even));
        let second = vmull_s8(vget_high_s8(low), vget_high_s8(even));
        [
            vmlal_s8(first, vget_low_s8(high), vget_low_s8(odd)),
            vmlal_s8(second, vget_high_s8(high), vget_high_s8(odd)),
        ]
    }
}

/// Widens eight f32 to f64.
#[inline(always)]
fn wide([a, b]: [float32x4_t; 2]) -> [float64x2_t; 4] {
    // SAFETY: NEON is part of AArch64.
    unsafe {
        [
            vcvt_f64_f32(vget_low_f32(a)),
            vcvt_high_f64_f32(a),
            vcvt_f64_f32(vget_low_f32(b)),
            vcvt_high_f64_f32(b),
        ]
    }
}

/// The lower 64 bits of both vectors, then the upper 64 bits.
#[inline(always)]
fn halves([a, b]: [uint32x4_t; 2]) -> [uint32x4_t; 2] {
    // SAFETY: NEON is part of AArch64.
    unsafe {
        let (a, b) = (vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b));
        [vreinterpretq_u32_u64(vtrn1q_u64(a, b)), vreinterpretq_u32_u64(vtrn2q_u64(a, b))]
    }
}

/// Decodes the low 32 bits per lane of four chunks to weights divided by 128.
///
/// Only the upper half of such an f32 is not 0, so each lane first gets two upper halves.
#[inline(always)]
fn fractions(codes: uint32x4_t) -> [float32x4_t; 8] {
    const LOWER: [u8; 16] = bytes_of_fractions(16);
    const UPPER: [u8; 16] = bytes_of_fractions(24);
    // SAFETY: NEON is part of AArch64. Each table has the 16 bytes that are read.
    unsafe {
        let (lower, upper) = (vld1q_u8(LOWER.as_ptr()), vld1q_u8(UPPER.as_ptr()));
        let codes = vreinterpretq_u8_u32(codes);
        let (even, odd) = (vandq_u8(codes, vdupq_n_u8(15)), vshrq_n_u8::<4>(codes));
        let (even_lower, even_upper) = (vqtbl1q_u8(lower, even), vqtbl1q_u8(upper, even));
        let (odd_lower, odd_upper) = (vqtbl1q_u8(lower, odd), vqtbl1q_u8(upper, odd));
        // Weights of bytes 0 and 2, then of bytes 1 and 3.
        let words = [
            vtrn1q_u8(even_lower, even_upper),
            vtrn1q_u8(odd_lower, odd_upper),
            vtrn2q_u8(even_lower, even_upper),
            vtrn2q_u8(odd_lower, odd_upper),
        ];
        let words = quarters!(i => vreinterpretq_u32_u8(words[i]));
        let [a, b, c, d] = quarters!(i => vreinterpretq_f32_u32(vshlq_n_u32::<16>(words[i])));
        let upper_word = vdupq_n_u32(0xFFFF_0000);
        let [e, f, g, h] = quarters!(i => vreinterpretq_f32_u32(vandq_u32(words[i], upper_word)));
        [a, b, c, d, e, f, g, h]
    }
}
