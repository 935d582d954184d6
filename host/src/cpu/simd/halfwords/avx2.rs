//! 16-bit values of AVX2: two registers of sixteen lanes.

use std::arch::x86_64::{
    __m256i, _mm_load_si128, _mm_loadu_si128, _mm_max_epu16, _mm256_add_epi16, _mm256_and_si256,
    _mm256_broadcastsi128_si256, _mm256_castsi128_si256, _mm256_castsi256_si128, _mm256_cmpgt_epi16,
    _mm256_cvtepu8_epi16, _mm256_cvtepu16_epi32, _mm256_extracti128_si256, _mm256_inserti128_si256,
    _mm256_loadu_si256, _mm256_madd_epi16, _mm256_max_epu16, _mm256_or_si256, _mm256_packus_epi16,
    _mm256_packus_epi32, _mm256_permute2x128_si256, _mm256_permutevar8x32_epi32, _mm256_set1_epi8,
    _mm256_set1_epi16, _mm256_set1_epi32, _mm256_setr_epi32, _mm256_shuffle_epi8, _mm256_slli_epi16,
    _mm256_srli_epi16, _mm256_storeu_si256, _mm256_unpackhi_epi8, _mm256_unpackhi_epi16,
    _mm256_unpackhi_epi32, _mm256_unpackhi_epi64, _mm256_unpacklo_epi8, _mm256_unpacklo_epi16,
    _mm256_unpacklo_epi32, _mm256_unpacklo_epi64, _mm256_xor_si256,
};

use super::{HALFWORDS, HalfwordVector, Halfwords, Row, ValueRow};
use crate::cpu::simd::tokens::{Avx2, halves};

/// Lanes 0 to 15, and lanes 16 to 31.
type Pair = [__m256i; 2];

impl HalfwordVector for Avx2 {
    type Halfwords = Pair;
    type Bits = Pair;
    type Rows = Pair;
    type Steps = ();

    #[inline(always)]
    fn steps(self) {}

    #[inline(always)]
    fn load_halfwords(self, halfwords: &Halfwords) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions. `halfwords` has the 64 bytes
        // that are read; they need not be aligned.
        unsafe {
            let halves = halfwords.as_ptr().cast::<__m256i>();
            [_mm256_loadu_si256(halves), _mm256_loadu_si256(halves.add(1))]
        }
    }

    #[inline(always)]
    fn store_halfwords(self, [first, second]: Pair) -> Halfwords {
        let mut halfwords = [0; HALFWORDS];
        // SAFETY: `self` proves that the CPU has these instructions. `halfwords` has the 64 bytes
        // that are written; they need not be aligned.
        unsafe {
            let halves = halfwords.as_mut_ptr().cast::<__m256i>();
            _mm256_storeu_si256(halves, first);
            _mm256_storeu_si256(halves.add(1), second);
        }
        halfwords
    }

    #[inline(always)]
    fn splat_halfword(self, halfword: u16) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_set1_epi16(halfword as i16); 2] }
    }

    #[inline(always)]
    fn max_halfwords(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_max_epu16(a[0], b[0]), _mm256_max_epu16(a[1], b[1])] }
    }

    #[inline(always)]
    fn max_halfword(self, magnitudes: Pair) -> u16 {
        self.store_halfwords(magnitudes).into_iter().fold(0, u16::max)
    }

    #[inline(always)]
    fn fold_halfwords(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_max_epu16(a[0], a[1]), _mm256_max_epu16(b[0], b[1])] }
    }

    #[inline(always)]
    fn max_halfwords_of_halves(self, magnitudes: &[Pair; 8]) -> Pair {
        let vectors = magnitudes.as_flattened().as_chunks::<8>().0;
        halves!(i => {
            let [a, b, c, d, e, f, g, h] = vectors[i];
            let (a, b, c, d) = (self.max_interleaved_16(a, b), self.max_interleaved_16(c, d), self.max_interleaved_16(e, f), self.max_interleaved_16(g, h));
            // Half `h` holds the maxima of half `h` of all eight vectors.
            let halves = self.max_interleaved_64(self.max_interleaved_32(a, b), self.max_interleaved_32(c, d));
            // SAFETY: `self` proves that the CPU has these instructions.
            unsafe {
                let (low, high) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
                _mm256_cvtepu16_epi32(_mm_max_epu16(low, high))
            }
        })
    }

    #[inline(always)]
    fn one_row(self, row: &Row) -> Pair {
        [self.broadcast(row); 2]
    }

    #[inline(always)]
    fn two_rows(self, first: &Row, second: &Row) -> Pair {
        [self.broadcast(first), self.broadcast(second)]
    }

    #[inline(always)]
    fn codes(self, magnitudes: Pair, rows: Pair, (): ()) -> Pair {
        halves!(i => self.row_codes(magnitudes[i], rows[i]))
    }

    #[inline(always)]
    fn above_zero(self, magnitudes: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        halves!(i => unsafe { _mm256_add_epi16(magnitudes[i], _mm256_set1_epi16(0x7FFF)) })
    }

    #[inline(always)]
    fn and_halfwords(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])] }
    }

    #[inline(always)]
    fn or_not_halfwords(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        halves!(i => unsafe { _mm256_or_si256(a[i], _mm256_xor_si256(b[i], _mm256_set1_epi16(-1))) })
    }

    #[inline(always)]
    fn signed(self, codes: Pair, signs: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        halves!(i => unsafe {
                let sign = _mm256_and_si256(_mm256_srli_epi16::<12>(signs[i]), _mm256_set1_epi16(8));
                _mm256_or_si256(codes[i], sign)
        })
    }

    #[inline(always)]
    fn pack(self, nibbles: &[Pair; 4]) -> [u8; 2 * HALFWORDS] {
        let mut bytes = [0; 2 * HALFWORDS];
        let halves = bytes.as_chunks_mut::<HALFWORDS>().0.iter_mut();
        for (bytes, halfwords) in halves.zip(nibbles.as_flattened().as_chunks::<4>().0) {
            // SAFETY: `self` proves that the CPU has these instructions. `bytes` has the 32 bytes
            // that are written; they need not be aligned.
            unsafe {
                // Each sum is the first halfword plus 16 times the second.
                let [a, b] = halves!(i => _mm256_madd_epi16(halfwords[i], _mm256_set1_epi32(1 | 16 << 16)));
                let [c, d] =
                    halves!(i => _mm256_madd_epi16(halfwords[2 + i], _mm256_set1_epi32(1 | 16 << 16)));
                let mixed = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
                let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
                let packed = _mm256_permutevar8x32_epi32(mixed, order);
                _mm256_storeu_si256(bytes.as_mut_ptr().cast(), packed);
            }
        }
        bytes
    }

    #[inline(always)]
    fn decode(self, codes: &[u8; HALFWORDS], [a, b, c, d]: [&ValueRow; 4]) -> [Pair; 2] {
        let (first, second) = codes.split_at(HALFWORDS / 2);
        [self.decoded(first, a, b), self.decoded(second, c, d)]
    }
}

/// Building blocks of the methods above.
impl Avx2 {
    /// Looks up the values of sixteen bytes of codes; each row serves eight bytes.
    #[inline(always)]
    fn decoded(self, codes: &[u8], a: &ValueRow, b: &ValueRow) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions. Slicing checks that `codes`
        // has the 16 bytes that are read; they need not be aligned.
        unsafe {
            let wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(codes[..16].as_ptr().cast()));
            let both = _mm256_or_si256(wide, _mm256_slli_epi16::<4>(wide));
            let codes = _mm256_and_si256(both, _mm256_set1_epi8(15));
            let low = _mm256_shuffle_epi8(self.two(&a.low, &b.low), codes);
            let high = _mm256_shuffle_epi8(self.two(&a.high, &b.high), codes);
            let (first, second) = (_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high));
            [
                _mm256_permute2x128_si256::<0x20>(first, second),
                _mm256_permute2x128_si256::<0x31>(first, second),
            ]
        }
    }

    /// Joins two 16-byte tables.
    #[inline(always)]
    fn two(self, a: &[u8; 16], b: &[u8; 16]) -> __m256i {
        // SAFETY: `self` proves that the CPU has these instructions. `a` and `b` have the 16 bytes
        // that are read; they need not be aligned.
        unsafe {
            let first = _mm256_castsi128_si256(_mm_loadu_si128(a.as_ptr().cast()));
            _mm256_inserti128_si256::<1>(first, _mm_loadu_si128(b.as_ptr().cast()))
        }
    }

    /// Repeats a row in both 128-bit halves.
    #[inline(always)]
    fn broadcast(self, row: &Row) -> __m256i {
        // SAFETY: `self` proves that the CPU has these instructions. `Row` has 16 bytes and is
        // aligned to 16.
        unsafe { _mm256_broadcastsi128_si256(_mm_load_si128(row.0.as_ptr().cast())) }
    }

    /// Encodes magnitudes by one row of thresholds, without signs.
    #[inline(always)]
    fn row_codes(self, magnitudes: __m256i, row: __m256i) -> __m256i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe {
            // Binary search. The index of an entry is the pair of its bytes' indices.
            let three = _mm256_set1_epi16(FIRST + 3 * NEXT);
            let fours = _mm256_and_si256(self.is_above(magnitudes, row, three), _mm256_set1_epi16(4 * NEXT));
            let fifth_or_first = _mm256_or_si256(fours, _mm256_set1_epi16(FIRST + NEXT));
            let twos =
                _mm256_and_si256(self.is_above(magnitudes, row, fifth_or_first), _mm256_set1_epi16(2 * NEXT));
            let sixes = _mm256_or_si256(fours, twos);
            let even = _mm256_or_si256(sixes, _mm256_set1_epi16(FIRST));
            let ones = _mm256_and_si256(self.is_above(magnitudes, row, even), _mm256_set1_epi16(NEXT));
            _mm256_srli_epi16::<9>(_mm256_or_si256(sixes, ones))
        }
    }

    /// Sets all bits of the lanes whose magnitude is above the entry at `index`.
    #[inline(always)]
    fn is_above(self, magnitudes: __m256i, row: __m256i, index: __m256i) -> __m256i {
        // SAFETY: `self` proves that the CPU has these instructions. No sign bit is set, so signed
        // comparison orders magnitudes.
        unsafe { _mm256_cmpgt_epi16(magnitudes, _mm256_shuffle_epi8(row, index)) }
    }

    /// Within each 128 bits: the maxima of lanes `i` and `i + 4`, of `a` and `b` interleaved.
    #[inline(always)]
    fn max_interleaved_16(self, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm256_max_epu16(_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)) }
    }

    /// The same for 32-bit lanes `i` and `i + 2`, each a pair of 16-bit lanes.
    #[inline(always)]
    fn max_interleaved_32(self, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm256_max_epu16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)) }
    }

    /// The same for both 64-bit lanes, each four 16-bit lanes.
    #[inline(always)]
    fn max_interleaved_64(self, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm256_max_epu16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)) }
    }
}

/// The index of a row's first entry, and the distance to the next.
const FIRST: i16 = 0x0100;
const NEXT: i16 = 0x0202;
