//! 16-bit values of NEON: four registers of eight lanes.

use std::arch::aarch64::{
    uint8x16_t, uint16x8_t, uint32x4_t, vaddq_u16, vandq_u8, vandq_u16, vbslq_u16, vcgtq_u16, vdupq_n_u8,
    vdupq_n_u16, vget_low_u16, vld1q_u8, vld1q_u16, vmaxq_u16, vmaxvq_u16, vmovl_high_u16, vmovl_u16,
    vornq_u16, vorrq_u16, vorrq_u32, vpmaxq_u16, vqtbl1q_u8, vreinterpretq_u8_u16, vreinterpretq_u16_u8,
    vreinterpretq_u16_u32, vreinterpretq_u32_u16, vshrq_n_u8, vshrq_n_u16, vshrq_n_u32, vst1q_u8, vst1q_u16,
    vuzp1q_u8, vuzp1q_u16, vzip1q_u8, vzip2q_u8,
};

use super::{HALFWORDS, HalfwordVector, Halfwords, Row, ValueRow};
use crate::cpu::simd::tokens::{Neon, quarters};

type Four = [uint16x8_t; 4];

impl HalfwordVector for Neon {
    type Halfwords = Four;
    type Bits = [uint32x4_t; 4];
    type Rows = [uint8x16_t; 2];
    type Steps = ();

    #[inline(always)]
    fn steps(self) {}

    #[inline(always)]
    fn load_halfwords(self, halfwords: &Halfwords) -> Four {
        // SAFETY: NEON is part of AArch64. Each quarter has the 16 bytes that are read; they need
        // not be aligned.
        unsafe {
            let quarters = halfwords.as_chunks::<8>().0;
            quarters!(i => vld1q_u16(quarters[i].as_ptr()))
        }
    }

    #[inline(always)]
    fn store_halfwords(self, vector: Four) -> Halfwords {
        // SAFETY: NEON is part of AArch64. Each quarter has the 16 bytes that are written; they
        // need not be aligned.
        unsafe {
            let mut halfwords = [0; HALFWORDS];
            for (quarter, vector) in halfwords.as_chunks_mut::<8>().0.iter_mut().zip(vector) {
                vst1q_u16(quarter.as_mut_ptr(), vector);
            }
            halfwords
        }
    }

    #[inline(always)]
    fn splat_halfword(self, halfword: u16) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { [vdupq_n_u16(halfword); 4] }
    }

    #[inline(always)]
    fn max_halfwords(self, a: Four, b: Four) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vmaxq_u16(a[i], b[i])) }
    }

    #[inline(always)]
    fn max_halfword(self, [a, b, c, d]: Four) -> u16 {
        // SAFETY: NEON is part of AArch64.
        unsafe { vmaxvq_u16(vmaxq_u16(vmaxq_u16(a, b), vmaxq_u16(c, d))) }
    }

    #[inline(always)]
    fn fold_halfwords(self, a: Four, b: Four) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe {
            [vmaxq_u16(a[0], a[2]), vmaxq_u16(a[1], a[3]), vmaxq_u16(b[0], b[2]), vmaxq_u16(b[1], b[3])]
        }
    }

    #[inline(always)]
    fn max_halfwords_of_halves(self, magnitudes: &[Four; 8]) -> [uint32x4_t; 4] {
        // SAFETY: NEON is part of AArch64.
        unsafe {
            let (first, second) = (max_of_halves(&magnitudes[..4]), max_of_halves(&magnitudes[4..]));
            [
                vmovl_u16(vget_low_u16(first)),
                vmovl_high_u16(first),
                vmovl_u16(vget_low_u16(second)),
                vmovl_high_u16(second),
            ]
        }
    }

    #[inline(always)]
    fn one_row(self, row: &Row) -> [uint8x16_t; 2] {
        [bytes_of(row); 2]
    }

    #[inline(always)]
    fn two_rows(self, first: &Row, second: &Row) -> [uint8x16_t; 2] {
        [bytes_of(first), bytes_of(second)]
    }

    #[inline(always)]
    fn codes(self, magnitudes: Four, rows: [uint8x16_t; 2], (): ()) -> Four {
        quarters!(i => row_codes(magnitudes[i], rows[i / 2]))
    }

    #[inline(always)]
    fn above_zero(self, magnitudes: Four) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vaddq_u16(magnitudes[i], vdupq_n_u16(0x7FFF))) }
    }

    #[inline(always)]
    fn and_halfwords(self, a: Four, b: Four) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vandq_u16(a[i], b[i])) }
    }

    #[inline(always)]
    fn or_not_halfwords(self, a: Four, b: Four) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vornq_u16(a[i], b[i])) }
    }

    #[inline(always)]
    fn signed(self, codes: Four, signs: Four) -> Four {
        // SAFETY: NEON is part of AArch64.
        unsafe { quarters!(i => vbslq_u16(vdupq_n_u16(8), vshrq_n_u16::<12>(signs[i]), codes[i])) }
    }

    #[inline(always)]
    fn pack(self, nibbles: &[Four; 4]) -> [u8; 2 * HALFWORDS] {
        // SAFETY: NEON is part of AArch64. Each chunk of `bytes` has the 16 bytes that are written;
        // they need not be aligned.
        unsafe {
            let mut bytes = [0; 2 * HALFWORDS];
            for (bytes, halfwords) in bytes.as_chunks_mut::<16>().0.iter_mut().zip(nibbles) {
                // The low byte of each pair of halfwords gets both codes.
                let [a, b, c, d] = quarters!(i => {
                    let pair = vreinterpretq_u32_u16(halfwords[i]);
                    vreinterpretq_u16_u32(vorrq_u32(pair, vshrq_n_u32::<12>(pair)))
                });
                let (ab, cd) =
                    (vreinterpretq_u8_u16(vuzp1q_u16(a, b)), vreinterpretq_u8_u16(vuzp1q_u16(c, d)));
                vst1q_u8(bytes.as_mut_ptr(), vuzp1q_u8(ab, cd));
            }
            bytes
        }
    }

    #[inline(always)]
    fn decode(self, codes: &[u8; HALFWORDS], [a, b, c, d]: [&ValueRow; 4]) -> [Four; 2] {
        let halves = codes.as_chunks::<16>().0;
        [decoded(&halves[0], a, b), decoded(&halves[1], c, d)]
    }
}

/// Looks up the values of sixteen bytes of codes; each row serves eight bytes.
#[inline(always)]
fn decoded(codes: &[u8; 16], first: &ValueRow, second: &ValueRow) -> Four {
    // SAFETY: NEON is part of AArch64. `codes` has the 16 bytes that are read; they need not be
    // aligned.
    unsafe {
        let codes = vld1q_u8(codes.as_ptr());
        let (low, high) = (vandq_u8(codes, vdupq_n_u8(15)), vshrq_n_u8::<4>(codes));
        let [a, b] = lookup(vzip1q_u8(low, high), first);
        let [c, d] = lookup(vzip2q_u8(low, high), second);
        [a, b, c, d]
    }
}

/// Looks up the values of sixteen codes.
#[inline(always)]
fn lookup(codes: uint8x16_t, row: &ValueRow) -> [uint16x8_t; 2] {
    // SAFETY: NEON is part of AArch64. Both halves of `row` have the 16 bytes that are read; they
    // need not be aligned.
    unsafe {
        let (low, high) = (vld1q_u8(row.low.as_ptr()), vld1q_u8(row.high.as_ptr()));
        let (low, high) = (vqtbl1q_u8(low, codes), vqtbl1q_u8(high, codes));
        [vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high))]
    }
}

/// Loads the bytes of a row.
#[inline(always)]
fn bytes_of(row: &Row) -> uint8x16_t {
    // SAFETY: NEON is part of AArch64. `row` has the 16 bytes that are read.
    unsafe { vreinterpretq_u8_u16(vld1q_u16(row.0.as_ptr())) }
}

/// The largest halfword of each half of four vectors.
#[inline(always)]
fn max_of_halves(vectors: &[Four]) -> uint16x8_t {
    // SAFETY: NEON is part of AArch64.
    unsafe {
        let [first, second] = [[0, 1], [2, 3]].map(|[i, j]| {
            let ([a, b, c, d], [e, f, g, h]) = (vectors[i], vectors[j]);
            let (first, second) =
                (vpmaxq_u16(vmaxq_u16(a, b), vmaxq_u16(c, d)), vpmaxq_u16(vmaxq_u16(e, f), vmaxq_u16(g, h)));
            vpmaxq_u16(first, second)
        });
        vpmaxq_u16(first, second)
    }
}

/// Encodes magnitudes by one row of thresholds, without signs.
#[inline(always)]
fn row_codes(magnitudes: uint16x8_t, row: uint8x16_t) -> uint16x8_t {
    // SAFETY: NEON is part of AArch64.
    unsafe {
        // Binary search. The index of an entry is the pair of its bytes' indices.
        let fours =
            vandq_u16(is_above(magnitudes, row, vdupq_n_u16(FIRST + 3 * NEXT)), vdupq_n_u16(4 * NEXT));
        let fifth_or_first = vorrq_u16(fours, vdupq_n_u16(FIRST + NEXT));
        let twos = vandq_u16(is_above(magnitudes, row, fifth_or_first), vdupq_n_u16(2 * NEXT));
        let sixes = vorrq_u16(fours, twos);
        let even = vorrq_u16(sixes, vdupq_n_u16(FIRST));
        let ones = vandq_u16(is_above(magnitudes, row, even), vdupq_n_u16(NEXT));
        vshrq_n_u16::<9>(vorrq_u16(sixes, ones))
    }
}

/// The index of a row's first entry, and the distance to the next.
const FIRST: u16 = 0x0100;
const NEXT: u16 = 0x0202;

/// Sets all bits of the lanes whose magnitude is above the entry at `index`.
#[inline(always)]
fn is_above(magnitudes: uint16x8_t, row: uint8x16_t, index: uint16x8_t) -> uint16x8_t {
    // SAFETY: NEON is part of AArch64.
    unsafe { vcgtq_u16(magnitudes, vreinterpretq_u16_u8(vqtbl1q_u8(row, vreinterpretq_u8_u16(index)))) }
}
