//! 16-bit values of AVX-512 BW: one register of 32 lanes.

use std::arch::x86_64::{
    __m512i, _mm_load_si128, _mm_loadu_si128, _mm_unpackhi_epi16, _mm_unpacklo_epi16, _mm256_castsi128_si256,
    _mm256_inserti128_si256, _mm256_loadu_si256, _mm256_set_m128i, _mm512_add_epi16, _mm512_and_si512,
    _mm512_broadcast_i32x4, _mm512_castsi256_si512, _mm512_castsi512_si128, _mm512_cmpgt_epu16_mask,
    _mm512_cvtepu8_epi16, _mm512_cvtepu16_epi32, _mm512_extracti32x4_epi32, _mm512_inserti64x4,
    _mm512_loadu_si512, _mm512_madd_epi16, _mm512_mask_add_epi16, _mm512_mask_blend_epi16, _mm512_max_epu16,
    _mm512_or_si512, _mm512_permutex2var_epi64, _mm512_permutexvar_epi16, _mm512_permutexvar_epi32,
    _mm512_set1_epi8, _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set4_epi32, _mm512_setr_epi32,
    _mm512_setr_epi64, _mm512_shuffle_epi8, _mm512_shuffle_i64x2, _mm512_slli_epi16, _mm512_slli_epi32,
    _mm512_srli_epi16, _mm512_storeu_si512, _mm512_ternarylogic_epi32, _mm512_unpackhi_epi8,
    _mm512_unpackhi_epi16, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi8,
    _mm512_unpacklo_epi16, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};
use std::hint::black_box;

use super::{HALFWORDS, HalfwordVector, Halfwords, Row, ValueRow};
use crate::cpu::simd::tokens::Avx512;

impl HalfwordVector for Avx512 {
    type Halfwords = __m512i;
    type Bits = __m512i;
    /// The first row in bits 0 to 127, the second in bits 128 to 255.
    type Rows = __m512i;
    /// The constants 2 and 1 in every lane.
    type Steps = [__m512i; 2];

    #[inline(always)]
    fn steps(self) -> [__m512i; 2] {
        // If the compiler knows the constants, it replaces each masked addition by three
        // instructions. SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm512_set1_epi16(black_box(2)), _mm512_set1_epi16(black_box(1))] }
    }

    #[inline(always)]
    fn load_halfwords(self, halfwords: &Halfwords) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions. `halfwords` has the 64 bytes
        // that are read; they need not be aligned.
        unsafe { _mm512_loadu_si512(halfwords.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store_halfwords(self, vector: __m512i) -> Halfwords {
        let mut halfwords = [0; HALFWORDS];
        // SAFETY: `self` proves that the CPU has these instructions. `halfwords` has the 64 bytes
        // that are written; they need not be aligned.
        unsafe { _mm512_storeu_si512(halfwords.as_mut_ptr().cast(), vector) };
        halfwords
    }

    #[inline(always)]
    fn splat_halfword(self, halfword: u16) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_set1_epi16(halfword as i16) }
    }

    #[inline(always)]
    fn max_halfwords(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_max_epu16(a, b) }
    }

    #[inline(always)]
    fn max_halfword(self, magnitudes: __m512i) -> u16 {
        self.store_halfwords(magnitudes).into_iter().fold(0, u16::max)
    }

    #[inline(always)]
    fn fold_halfwords(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_max_epu16(_mm512_shuffle_i64x2::<0x44>(a, b), _mm512_shuffle_i64x2::<0xEE>(a, b)) }
    }

    #[inline(always)]
    fn max_halfwords_of_halves(self, magnitudes: &[__m512i; 8]) -> __m512i {
        let [a, b, c, d, e, f, g, h] = *magnitudes;
        let (a, b, c, d) = (
            self.max_interleaved_16(a, b),
            self.max_interleaved_16(c, d),
            self.max_interleaved_16(e, f),
            self.max_interleaved_16(g, h),
        );
        // Quarter `q` holds the maxima of quarter `q` of all eight vectors.
        let quarters = self.max_interleaved_64(self.max_interleaved_32(a, b), self.max_interleaved_32(c, d));
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe {
            let halves =
                _mm512_max_epu16(quarters, _mm512_shuffle_i64x2::<0b10_11_00_01>(quarters, quarters));
            let (first, second) = (_mm512_castsi512_si128(halves), _mm512_extracti32x4_epi32::<2>(halves));
            let in_turn =
                _mm256_set_m128i(_mm_unpackhi_epi16(first, second), _mm_unpacklo_epi16(first, second));
            _mm512_cvtepu16_epi32(in_turn)
        }
    }

    #[inline(always)]
    fn one_row(self, row: &Row) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions. `Row` has 16 bytes and is
        // aligned to 16.
        unsafe { _mm512_broadcast_i32x4(_mm_load_si128(row.0.as_ptr().cast())) }
    }

    #[inline(always)]
    fn two_rows(self, first: &Row, second: &Row) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe {
            let first = _mm256_castsi128_si256(_mm_load_si128(first.0.as_ptr().cast()));
            let second = _mm_load_si128(second.0.as_ptr().cast());
            _mm512_castsi256_si512(_mm256_inserti128_si256::<1>(first, second))
        }
    }

    #[inline(always)]
    fn codes(self, magnitudes: __m512i, rows: __m512i, [two, one]: [__m512i; 2]) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe {
            // Binary search.
            let above = self.is_above(magnitudes, rows, self.index(3));
            let code = _mm512_mask_blend_epi16(above, self.index(0), self.index(4));
            let next = _mm512_mask_blend_epi16(above, self.index(1), self.index(5));
            let code = _mm512_mask_add_epi16(code, self.is_above(magnitudes, rows, next), code, two);
            _mm512_mask_add_epi16(code, self.is_above(magnitudes, rows, code), code, one)
        }
    }

    #[inline(always)]
    fn above_zero(self, magnitudes: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_add_epi16(magnitudes, _mm512_set1_epi16(0x7FFF)) }
    }

    #[inline(always)]
    fn and_halfwords(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_and_si512(a, b) }
    }

    #[inline(always)]
    fn or_not_halfwords(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions. 0xDD computes the second
        // operand or not the third.
        unsafe { _mm512_ternarylogic_epi32::<0xDD>(a, a, b) }
    }

    #[inline(always)]
    fn signed(self, codes: __m512i, signs: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions. 0xCA selects the second
        // operand where the first has ones, else the third.
        unsafe {
            let signs = _mm512_srli_epi16::<12>(signs);
            _mm512_ternarylogic_epi32::<0xCA>(_mm512_set1_epi16(8), signs, codes)
        }
    }

    #[inline(always)]
    fn pack(self, nibbles: &[__m512i; 4]) -> [u8; 2 * HALFWORDS] {
        let [a, b, c, d] = *nibbles;
        let mut bytes = [0; 2 * HALFWORDS];
        // SAFETY: `self` proves that the CPU has these instructions. `bytes` has the 64 bytes that
        // are written; they need not be aligned.
        unsafe {
            // Each sum is the first halfword plus 16 times the second, which makes a byte. The byte
            // of `b` goes above the byte of `a`, then come `c` and `d`.
            let lower = _mm512_set1_epi32(1 | 16 << 16);
            let upper = _mm512_set1_epi32(0x100 | 0x1000 << 16);
            let ab = _mm512_or_si512(_mm512_madd_epi16(a, lower), _mm512_madd_epi16(b, upper));
            let cd = _mm512_or_si512(_mm512_madd_epi16(c, lower), _mm512_madd_epi16(d, upper));
            let mixed = _mm512_or_si512(ab, _mm512_slli_epi32::<16>(cd));
            // Collects the bytes of each vector: four within each 128 bits, then sixteen.
            let fours = _mm512_set4_epi32(0x0F0B_0703, 0x0E0A_0602, 0x0D09_0501, 0x0C08_0400);
            let sixteens = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let packed = _mm512_permutexvar_epi32(sixteens, _mm512_shuffle_epi8(mixed, fours));
            _mm512_storeu_si512(bytes.as_mut_ptr().cast(), packed);
        }
        bytes
    }

    #[inline(always)]
    fn decode(self, codes: &[u8; HALFWORDS], [a, b, c, d]: [&ValueRow; 4]) -> [__m512i; 2] {
        // SAFETY: `self` proves that the CPU has these instructions. `codes` has the 32 bytes that
        // are read; they need not be aligned.
        unsafe {
            let wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(codes.as_ptr().cast()));
            // 0xA8 computes (first or second operand) and third.
            let low_nibbles = _mm512_set1_epi8(15);
            let codes = _mm512_ternarylogic_epi32::<0xA8>(wide, _mm512_slli_epi16::<4>(wide), low_nibbles);
            let low = _mm512_shuffle_epi8(self.four(&a.low, &b.low, &c.low, &d.low), codes);
            let high = _mm512_shuffle_epi8(self.four(&a.high, &b.high, &c.high, &d.high), codes);
            let (first, second) = (_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high));
            let (ab, cd) =
                (_mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15));
            [_mm512_permutex2var_epi64(first, ab, second), _mm512_permutex2var_epi64(first, cd, second)]
        }
    }
}

/// Building blocks of the methods above.
impl Avx512 {
    /// Joins four 16-byte tables.
    #[inline(always)]
    fn four(self, a: &[u8; 16], b: &[u8; 16], c: &[u8; 16], d: &[u8; 16]) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions. Each array has the 16 bytes
        // that are read; they need not be aligned.
        unsafe {
            let ab = _mm256_castsi128_si256(_mm_loadu_si128(a.as_ptr().cast()));
            let ab = _mm256_inserti128_si256::<1>(ab, _mm_loadu_si128(b.as_ptr().cast()));
            let cd = _mm256_castsi128_si256(_mm_loadu_si128(c.as_ptr().cast()));
            let cd = _mm256_inserti128_si256::<1>(cd, _mm_loadu_si128(d.as_ptr().cast()));
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(ab), cd)
        }
    }

    /// The indices of an entry: of the first row in the lower half, of the second in the upper
    /// half.
    #[inline(always)]
    fn index(self, entry: i32) -> __m512i {
        let (a, b) = (entry * 0x1_0001, (entry + 8) * 0x1_0001);
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_setr_epi32(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b) }
    }

    /// Compares magnitudes with the entries at `index`. Bit `i` is set if magnitude `i` is above.
    #[inline(always)]
    fn is_above(self, magnitudes: __m512i, rows: __m512i, index: __m512i) -> u32 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_cmpgt_epu16_mask(magnitudes, _mm512_permutexvar_epi16(index, rows)) }
    }

    /// Within each 128 bits: the maxima of lanes `i` and `i + 4`, of `a` and `b` interleaved.
    #[inline(always)]
    fn max_interleaved_16(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_max_epu16(_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)) }
    }

    /// The same for 32-bit lanes `i` and `i + 2`, each a pair of 16-bit lanes.
    #[inline(always)]
    fn max_interleaved_32(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_max_epu16(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)) }
    }

    /// The same for both 64-bit lanes, each four 16-bit lanes.
    #[inline(always)]
    fn max_interleaved_64(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_max_epu16(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)) }
    }
}
