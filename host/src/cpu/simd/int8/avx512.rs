//! Products of bytes by AVX-512 BW, and by AVX-512 VNNI.

use std::arch::x86_64::{
    __m512i, _mm_loadu_si128, _mm512_add_epi16, _mm512_add_epi32, _mm512_and_si512, _mm512_broadcast_i32x4,
    _mm512_dpbusd_epi32, _mm512_loadu_si512, _mm512_madd_epi16, _mm512_maddubs_epi16,
    _mm512_permutex2var_epi32, _mm512_set1_epi8, _mm512_set1_epi16, _mm512_setr_epi32, _mm512_shuffle_epi8,
    _mm512_srli_epi16, _mm512_storeu_si512,
};

use super::{Int8Products, LANES, Lanes, Quarter, STEP};
use crate::cpu::simd::products::RAISED;
use crate::cpu::simd::tokens::{Avx512, Avx512Vnni, halves, parts};

impl Int8Products<Avx512> for Avx512 {
    type Bytes = __m512i;

    #[inline(always)]
    fn raised(self, codes: &[u8; STEP]) -> [__m512i; 4] {
        // SAFETY: `self` proves that the CPU has these instructions. `RAISED` has the 16 bytes and
        // `codes` the 128 bytes that are read; they need not be aligned.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(RAISED.as_ptr().cast()));
            let [a, b] = halves!(i => _mm512_loadu_si512(codes.as_ptr().add(64 * i).cast()));
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
            let codes = [_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b)];
            parts!(0 1 2 3; quarter => {
                let codes = codes[quarter / 2];
                let codes = if quarter.is_multiple_of(2) { codes } else { _mm512_srli_epi16::<4>(codes) };
                _mm512_shuffle_epi8(table, _mm512_and_si512(codes, _mm512_set1_epi8(15)))
            })
        }
    }

    #[inline(always)]
    fn load(self, quarter: &Quarter) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions. `quarter` has the 64 bytes
        // that are read; they need not be aligned.
        unsafe { _mm512_loadu_si512(quarter.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store(self, bytes: __m512i) -> Quarter {
        let mut quarter = [[0; 4]; LANES];
        // SAFETY: `self` proves that the CPU has these instructions. `quarter` has the 64 bytes
        // that are written; they need not be aligned.
        unsafe { _mm512_storeu_si512(quarter.as_mut_ptr().cast(), bytes) };
        quarter
    }

    #[inline(always)]
    fn add_groups(self, sums: &Lanes<i32>, weights: [__m512i; 4], x: [__m512i; 4]) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions. `sums` has the 64 bytes that
        // are read; they need not be aligned.
        unsafe {
            // Each of 16 bits gets eight products of at most 24 · 127, so it stays below 2^15.
            let [a, b, c, d] = parts!(0 1 2 3; i => _mm512_maddubs_epi16(weights[i], x[i]));
            let pairs = _mm512_add_epi16(_mm512_add_epi16(a, b), _mm512_add_epi16(c, d));
            let sums = _mm512_loadu_si512(sums.as_ptr().cast());
            _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }
}

impl Int8Products<Avx512> for Avx512Vnni {
    type Bytes = __m512i;

    #[inline(always)]
    fn raised(self, codes: &[u8; STEP]) -> [__m512i; 4] {
        self.avx512().raised(codes)
    }

    #[inline(always)]
    fn load(self, quarter: &Quarter) -> __m512i {
        Int8Products::load(self.avx512(), quarter)
    }

    #[inline(always)]
    fn store(self, bytes: __m512i) -> Quarter {
        Int8Products::store(self.avx512(), bytes)
    }

    #[inline(always)]
    fn add_groups(self, sums: &Lanes<i32>, weights: [__m512i; 4], x: [__m512i; 4]) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions. `sums` has the 64 bytes that
        // are read; they need not be aligned.
        unsafe {
            let sums = _mm512_loadu_si512(sums.as_ptr().cast());
            let sums = _mm512_dpbusd_epi32(sums, weights[0], x[0]);
            let sums = _mm512_dpbusd_epi32(sums, weights[1], x[1]);
            let sums = _mm512_dpbusd_epi32(sums, weights[2], x[2]);
            _mm512_dpbusd_epi32(sums, weights[3], x[3])
        }
    }
}
