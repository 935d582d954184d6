//! Products of bytes by AVX2.

use std::arch::x86_64::{
    __m256i, _mm_loadu_si128, _mm256_add_epi16, _mm256_add_epi32, _mm256_and_si256,
    _mm256_broadcastsi128_si256, _mm256_castps_si256, _mm256_castsi256_ps, _mm256_loadu_si256,
    _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_permute4x64_epi64, _mm256_set1_epi8, _mm256_set1_epi16,
    _mm256_shuffle_epi8, _mm256_shuffle_ps, _mm256_srli_epi16, _mm256_storeu_si256,
};

use super::{Int8Products, LANES, Lanes, Quarter, STEP};
use crate::cpu::simd::products::RAISED;
use crate::cpu::simd::tokens::{Avx2, halves, parts};

impl Int8Products<Avx2> for Avx2 {
    type Bytes = [__m256i; 2];

    #[inline(always)]
    fn raised(self, codes: &[u8; STEP]) -> [[__m256i; 2]; 4] {
        // SAFETY: `self` proves that the CPU has these instructions. `RAISED` has the 16 bytes and
        // `codes` the 128 bytes that are read; they need not be aligned.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(RAISED.as_ptr().cast()));
            // By eight groups, the first halves, then the second halves.
            let codes = halves!(i => {
                let [a, b] = halves!(j => {
                    _mm256_castsi256_ps(_mm256_loadu_si256(codes.as_ptr().add(64 * i + 32 * j).cast()))
                });
                let (even, odd) = (_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xDD>(a, b));
                [
                    _mm256_permute4x64_epi64::<0xD8>(_mm256_castps_si256(even)),
                    _mm256_permute4x64_epi64::<0xD8>(_mm256_castps_si256(odd)),
                ]
            });
            parts!(0 1 2 3; quarter => halves!(i => {
                let codes = codes[i][quarter / 2];
                let codes = if quarter.is_multiple_of(2) { codes } else { _mm256_srli_epi16::<4>(codes) };
                _mm256_shuffle_epi8(table, _mm256_and_si256(codes, _mm256_set1_epi8(15)))
            }))
        }
    }

    #[inline(always)]
    fn load(self, quarter: &Quarter) -> [__m256i; 2] {
        // SAFETY: `self` proves that the CPU has these instructions. `quarter` has two times the 32
        // bytes that are read; they need not be aligned.
        unsafe { halves!(i => _mm256_loadu_si256(quarter.as_ptr().cast::<__m256i>().add(i))) }
    }

    #[inline(always)]
    fn store(self, bytes: [__m256i; 2]) -> Quarter {
        let mut quarter = [[0; 4]; LANES];
        // SAFETY: `self` proves that the CPU has these instructions. `quarter` has two times the 32
        // bytes that are written; they need not be aligned.
        unsafe {
            halves!(i => _mm256_storeu_si256(quarter.as_mut_ptr().cast::<__m256i>().add(i), bytes[i]));
        }
        quarter
    }

    #[inline(always)]
    fn add_groups(self, sums: &Lanes<i32>, weights: [[__m256i; 2]; 4], x: [[__m256i; 2]; 4]) -> [__m256i; 2] {
        // SAFETY: `self` proves that the CPU has these instructions. `sums` has two times the 32
        // bytes that are read; they need not be aligned.
        unsafe {
            halves!(i => {
                // Each of 16 bits gets eight products of at most 24 · 127, so it stays below 2^15.
                let [a, b, c, d] = parts!(0 1 2 3; j => _mm256_maddubs_epi16(weights[j][i], x[j][i]));
                let pairs = _mm256_add_epi16(_mm256_add_epi16(a, b), _mm256_add_epi16(c, d));
                let sums = _mm256_loadu_si256(sums.as_ptr().cast::<__m256i>().add(i));
                _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            })
        }
    }
}
