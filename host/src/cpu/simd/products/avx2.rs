//! Products of codes by AVX2 and FMA.

use std::arch::x86_64::{
    __m256, __m256d, __m256i, _mm_loadl_epi64, _mm_loadu_si128, _mm_setr_epi8, _mm_shuffle_epi8,
    _mm_srli_si128, _mm256_add_epi16, _mm256_add_epi32, _mm256_add_epi64, _mm256_add_pd, _mm256_and_si256,
    _mm256_andnot_si256, _mm256_blend_epi32, _mm256_broadcastsi128_si256, _mm256_castps_si256,
    _mm256_castps256_ps128, _mm256_castsi256_pd, _mm256_castsi256_ps, _mm256_castsi256_si128,
    _mm256_cvtepi32_pd, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_cvtepu8_epi64, _mm256_cvtps_pd,
    _mm256_extractf128_ps, _mm256_extracti128_si256, _mm256_fmadd_pd, _mm256_hadd_epi32, _mm256_loadu_pd,
    _mm256_loadu_si256, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_mul_pd, _mm256_or_si256,
    _mm256_permute2x128_si256, _mm256_permute4x64_epi64, _mm256_permutevar8x32_epi32, _mm256_set1_epi8,
    _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_epi64x, _mm256_setr_epi32, _mm256_setzero_pd,
    _mm256_shuffle_epi8, _mm256_shuffle_ps, _mm256_slli_epi16, _mm256_slli_epi32, _mm256_slli_epi64,
    _mm256_srli_epi16, _mm256_storeu_pd, _mm256_sub_epi32, _mm256_unpackhi_epi8, _mm256_unpackhi_epi16,
    _mm256_unpackhi_epi32, _mm256_unpacklo_epi8, _mm256_unpacklo_epi16, _mm256_unpacklo_epi32,
};

use super::{CHUNK, DoubledCodes, LANES, Products, RAISED, STEP, TILE, Table, bytes_of_fractions};
use crate::cpu::simd::tokens::{Avx2, halves, parts};

impl Products for Avx2 {
    type Sums = [__m256d; 2];
    /// Per 128 bits, bytes 0 and 1 of four chunks, then bytes 2 and 3, ready to unpack to words.
    type Column = [__m256i; 2];

    #[inline(always)]
    fn no_sums(self) -> [__m256d; 2] {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_setzero_pd(); 2] }
    }

    #[inline(always)]
    fn store_sums(self, [first, second]: [__m256d; 2]) -> [f64; 8] {
        let mut stored = [0.0; 8];
        // SAFETY: `self` proves that the CPU has these instructions. `stored` has the 64 bytes that
        // are written; they need not be aligned.
        unsafe {
            _mm256_storeu_pd(stored.as_mut_ptr(), first);
            _mm256_storeu_pd(stored.as_mut_ptr().add(4), second);
        }
        stored
    }

    #[inline(always)]
    fn bytes(self, bytes: &[u8; LANES], order: &[u8; LANES]) -> [__m256i; 2] {
        // SAFETY: `self` proves that the CPU has these instructions. `bytes` and `order` have the
        // 16 bytes that are read; they need not be aligned.
        unsafe {
            let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
            let bytes = _mm_shuffle_epi8(bytes, _mm_loadu_si128(order.as_ptr().cast()));
            [_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes))]
        }
    }

    #[inline(always)]
    fn numbers(self, integers: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { halves!(i => _mm256_cvtepi32_ps(integers[i])) }
    }

    #[inline(always)]
    fn quarters(self, codes: &[u8; STEP], by: &DoubledCodes) -> [__m256i; 2] {
        // SAFETY: `self` proves that the CPU has these instructions. `RAISED` has the 16 bytes that
        // are read. `codes`, `even` and `odd` have four times 32 bytes, `surplus` has two times 32.
        // None need be aligned.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(RAISED.as_ptr().cast()));
            let sums = parts!(0 1 2 3; i => {
                let codes = _mm256_loadu_si256(codes.as_ptr().add(32 * i).cast());
                let low = _mm256_and_si256(codes, _mm256_set1_epi8(15));
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), _mm256_set1_epi8(15));
                let even = _mm256_loadu_si256(by.even.as_ptr().add(32 * i).cast());
                let odd = _mm256_loadu_si256(by.odd.as_ptr().add(32 * i).cast());
                // Each sum has two products of at most 24 · 12.
                let even = _mm256_maddubs_epi16(_mm256_shuffle_epi8(table, low), even);
                let odd = _mm256_maddubs_epi16(_mm256_shuffle_epi8(table, high), odd);
                _mm256_madd_epi16(_mm256_add_epi16(even, odd), _mm256_set1_epi16(1))
            });
            // The order is now groups 0 1 4 5 2 3 6 7, then the same plus 8.
            let pairs = halves!(i => _mm256_castsi256_ps(_mm256_hadd_epi32(sums[2 * i], sums[2 * i + 1])));
            let (even, odd) = (
                _mm256_shuffle_ps::<0x88>(pairs[0], pairs[1]),
                _mm256_shuffle_ps::<0xDD>(pairs[0], pairs[1]),
            );
            // The order is now chunks 0 2 4 6 1 3 5 7.
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let sums = [even, odd];
            halves!(i => {
                let surplus = _mm256_loadu_si256(by.surplus.as_ptr().add(8 * i).cast());
                let sums = _mm256_permutevar8x32_epi32(_mm256_castps_si256(sums[i]), order);
                _mm256_sub_epi32(sums, surplus)
            })
        }
    }

    #[inline(always)]
    fn add_halves(self, sums: [__m256d; 2], terms: [__m256; 2]) -> [__m256d; 2] {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe {
            let first = halves!(i => _mm256_cvtps_pd(_mm256_castps256_ps128(terms[i])));
            let second = halves!(i => _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(terms[i])));
            [
                _mm256_add_pd(_mm256_add_pd(sums[0], first[0]), first[1]),
                _mm256_add_pd(_mm256_add_pd(sums[1], second[0]), second[1]),
            ]
        }
    }

    #[inline(always)]
    fn add_scaled(
        self,
        sums: [__m256d; 2],
        integers: [__m256i; 2],
        bytes: &[u8; 8],
        powers: &[f64; 8],
    ) -> [__m256d; 2] {
        // SAFETY: `self` proves that the CPU has these instructions. `bytes` has the 8 bytes and
        // `powers` the 64 bytes that are read; they need not be aligned.
        unsafe {
            let integers = _mm256_add_epi32(integers[0], integers[1]);
            let integers = [_mm256_castsi256_si128(integers), _mm256_extracti128_si256::<1>(integers)];
            let bytes = _mm_loadl_epi64(bytes.as_ptr().cast());
            let bytes = [bytes, _mm_srli_si128::<4>(bytes)];
            halves!(i => {
                let biased = _mm256_add_epi64(_mm256_cvtepu8_epi64(bytes[i]), _mm256_set1_epi64x(1023 - 127));
                let scales = _mm256_castsi256_pd(_mm256_slli_epi64::<52>(biased));
                let powers = _mm256_loadu_pd(powers.as_ptr().add(4 * i));
                _mm256_fmadd_pd(_mm256_cvtepi32_pd(integers[i]), _mm256_mul_pd(scales, powers), sums[i])
            })
        }
    }

    #[inline(always)]
    fn columns(self, codes: &[u8; TILE]) -> [[__m256i; 2]; 4] {
        // SAFETY: `self` proves that the CPU has these instructions. `codes` has the 256 bytes that
        // are read; they need not be aligned.
        unsafe {
            let [first, second] = halves!(half => {
                let [a, b, c, d] =
                    parts!(0 1 2 3; i => _mm256_loadu_si256(codes.as_ptr().add(64 * i + 32 * half).cast()));
                let (low, high) = (_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b));
                let (lower, higher) = (_mm256_unpacklo_epi16(c, d), _mm256_unpackhi_epi16(c, d));
                [
                    _mm256_unpacklo_epi32(low, lower),
                    _mm256_unpackhi_epi32(low, lower),
                    _mm256_unpacklo_epi32(high, higher),
                    _mm256_unpackhi_epi32(high, higher),
                ]
            });
            parts!(0 1 2 3; i => [first[i], second[i]])
        }
    }

    #[inline(always)]
    fn fractions(self, column: [__m256i; 2]) -> [[__m256; 2]; 8] {
        let [a, b] = halves!(i => self.fractions_of_half(column[i]));
        parts!(0 1 2 3 4 5 6 7; i => [a[i], b[i]])
    }

    #[inline(always)]
    fn lookup(self, codes: &[u8; CHUNK / 2], tables: [&Table; 2]) -> [__m256i; 2] {
        // SAFETY: `self` proves that the CPU has these instructions. `codes` has the 16 bytes and
        // each table the 32 bytes that are read; they need not be aligned.
        unsafe {
            // Separates low and high bytes of the entries, then puts the bytes of both tables side
            // by side.
            let tables = halves!(i => {
                let apart = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
                let table = _mm256_loadu_si256(tables[i].as_ptr().cast());
                _mm256_permute4x64_epi64::<0xD8>(_mm256_shuffle_epi8(table, apart))
            });
            let lower = _mm256_permute2x128_si256::<0x20>(tables[0], tables[1]);
            let upper = _mm256_permute2x128_si256::<0x31>(tables[0], tables[1]);
            let codes = _mm256_broadcastsi128_si256(_mm_loadu_si128(codes.as_ptr().cast()));
            // Of each 16 bits, the low codes of the bytes have packed positions 0 and 16, the high
            // codes 8 and 24.
            let words = halves!(i => {
                let codes = if i == 0 { codes } else { _mm256_srli_epi16::<4>(codes) };
                let codes = _mm256_and_si256(codes, _mm256_set1_epi8(15));
                let (lower, upper) = (_mm256_shuffle_epi8(lower, codes), _mm256_shuffle_epi8(upper, codes));
                let low_byte = _mm256_set1_epi16(0xFF);
                [
                    _mm256_or_si256(_mm256_and_si256(lower, low_byte), _mm256_slli_epi16::<8>(upper)),
                    _mm256_or_si256(_mm256_srli_epi16::<8>(lower), _mm256_andnot_si256(low_byte, upper)),
                ]
            });
            // Takes the first half from the first table and the second half from the second.
            halves!(i => {
                let (first, second) = (words[0][i], words[1][i]);
                let (first, second) = (_mm256_permute4x64_epi64::<0xCC>(first), _mm256_permute4x64_epi64::<0xCC>(second));
                _mm256_blend_epi32::<0xF0>(first, second)
            })
        }
    }
}

/// Building blocks of the methods above.
impl Avx2 {
    /// Decodes the low 32 bits per lane of eight chunks to weights divided by 128.
    ///
    /// Only the upper half of such an f32 is not 0, so each lane first gets two upper halves.
    #[inline(always)]
    fn fractions_of_half(self, codes: __m256i) -> [__m256; 8] {
        const LOWER: [u8; 16] = bytes_of_fractions(16);
        const UPPER: [u8; 16] = bytes_of_fractions(24);
        // SAFETY: `self` proves that the CPU has these instructions. Each table has the 16 bytes
        // that are read; they need not be aligned.
        unsafe {
            let lower = _mm256_broadcastsi128_si256(_mm_loadu_si128(LOWER.as_ptr().cast()));
            let upper = _mm256_broadcastsi128_si256(_mm_loadu_si128(UPPER.as_ptr().cast()));
            let even = _mm256_and_si256(codes, _mm256_set1_epi8(15));
            let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), _mm256_set1_epi8(15));
            let (even_lower, even_upper) =
                (_mm256_shuffle_epi8(lower, even), _mm256_shuffle_epi8(upper, even));
            let (odd_lower, odd_upper) = (_mm256_shuffle_epi8(lower, odd), _mm256_shuffle_epi8(upper, odd));
            let words = [
                _mm256_unpacklo_epi8(even_lower, even_upper),
                _mm256_unpacklo_epi8(odd_lower, odd_upper),
                _mm256_unpackhi_epi8(even_lower, even_upper),
                _mm256_unpackhi_epi8(odd_lower, odd_upper),
            ];
            let [a, b, e, f] = parts!(0 1 2 3; i => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words[i])));
            let upper_word = _mm256_set1_epi32(-1 << 16);
            let [c, d, g, h] =
                parts!(0 1 2 3; i => _mm256_castsi256_ps(_mm256_and_si256(words[i], upper_word)));
            [a, b, c, d, e, f, g, h]
        }
    }
}
