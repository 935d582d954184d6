//! Products of codes by AVX-512 F, BW, DQ and VL.

use std::arch::x86_64::{
    __m512, __m512d, __m512i, _mm_loadl_epi64, _mm_loadu_si128, _mm_shuffle_epi8, _mm256_add_epi32,
    _mm256_loadu_si256, _mm512_add_epi16, _mm512_add_epi32, _mm512_add_epi64, _mm512_add_pd,
    _mm512_and_si512, _mm512_broadcast_i32x4, _mm512_castps512_ps256, _mm512_castsi256_si512,
    _mm512_castsi512_pd, _mm512_castsi512_si256, _mm512_cvtepi32_pd, _mm512_cvtepi32_ps,
    _mm512_cvtepu8_epi32, _mm512_cvtepu8_epi64, _mm512_cvtps_pd, _mm512_extractf32x8_ps,
    _mm512_extracti64x4_epi64, _mm512_fmadd_pd, _mm512_inserti64x4, _mm512_loadu_pd, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_madd_epi16, _mm512_maddubs_epi16, _mm512_mul_pd, _mm512_permutex2var_epi32,
    _mm512_permutexvar_epi16, _mm512_permutexvar_ps, _mm512_set1_epi8, _mm512_set1_epi16, _mm512_set1_epi64,
    _mm512_setr_epi32, _mm512_setr_epi64, _mm512_setzero_pd, _mm512_shuffle_epi8, _mm512_slli_epi64,
    _mm512_srli_epi16, _mm512_srli_epi32, _mm512_srlv_epi16, _mm512_storeu_pd, _mm512_sub_epi32,
    _mm512_ternarylogic_epi32, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32,
    _mm512_unpacklo_epi64,
};

use super::{CHUNK, DoubledCodes, FRACTIONS, LANES, Products, RAISED, STEP, TILE, Table};
use crate::cpu::simd::tokens::{Avx512, halves, parts};

impl Products for Avx512 {
    type Sums = __m512d;
    type Column = __m512i;

    const ROWS: usize = 4;
    const MANY_REGISTERS: bool = true;

    #[inline(always)]
    fn no_sums(self) -> __m512d {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_setzero_pd() }
    }

    #[inline(always)]
    fn store_sums(self, sums: __m512d) -> [f64; 8] {
        let mut stored = [0.0; 8];
        // SAFETY: `self` proves that the CPU has these instructions. `stored` has the 64 bytes that
        // are written; they need not be aligned.
        unsafe { _mm512_storeu_pd(stored.as_mut_ptr(), sums) };
        stored
    }

    #[inline(always)]
    fn bytes(self, bytes: &[u8; LANES], order: &[u8; LANES]) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions. `bytes` and `order` have the
        // 16 bytes that are read; they need not be aligned.
        unsafe {
            let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
            _mm512_cvtepu8_epi32(_mm_shuffle_epi8(bytes, _mm_loadu_si128(order.as_ptr().cast())))
        }
    }

    #[inline(always)]
    fn numbers(self, integers: __m512i) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_cvtepi32_ps(integers) }
    }

    #[inline(always)]
    fn quarters(self, codes: &[u8; STEP], by: &DoubledCodes) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions. `RAISED` has the 16 bytes that
        // are read. `codes`, `even` and `odd` have two times 64 bytes, `surplus` has 64. None need
        // be aligned.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(RAISED.as_ptr().cast()));
            let sums = halves!(i => {
                let codes = _mm512_loadu_si512(codes.as_ptr().add(64 * i).cast());
                let low = _mm512_and_si512(codes, _mm512_set1_epi8(15));
                let high = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), _mm512_set1_epi8(15));
                let even = _mm512_loadu_si512(by.even.as_ptr().add(64 * i).cast());
                let odd = _mm512_loadu_si512(by.odd.as_ptr().add(64 * i).cast());
                // Each sum has two products of at most 24 · 12.
                let even = _mm512_maddubs_epi16(_mm512_shuffle_epi8(table, low), even);
                let odd = _mm512_maddubs_epi16(_mm512_shuffle_epi8(table, high), odd);
                _mm512_madd_epi16(_mm512_add_epi16(even, odd), _mm512_set1_epi16(1))
            });
            // A group has two lanes.
            let first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 2, 6, 10, 14, 18, 22, 26, 30);
            let second = _mm512_setr_epi32(1, 5, 9, 13, 17, 21, 25, 29, 3, 7, 11, 15, 19, 23, 27, 31);
            let first = _mm512_permutex2var_epi32(sums[0], first, sums[1]);
            let second = _mm512_permutex2var_epi32(sums[0], second, sums[1]);
            let surplus = _mm512_loadu_si512(by.surplus.as_ptr().cast());
            _mm512_sub_epi32(_mm512_add_epi32(first, second), surplus)
        }
    }

    #[inline(always)]
    fn add_halves(self, sums: __m512d, terms: __m512) -> __m512d {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe {
            let first = _mm512_cvtps_pd(_mm512_castps512_ps256(terms));
            let second = _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(terms));
            _mm512_add_pd(_mm512_add_pd(sums, first), second)
        }
    }

    #[inline(always)]
    fn add_scaled(self, sums: __m512d, integers: __m512i, bytes: &[u8; 8], powers: &[f64; 8]) -> __m512d {
        // SAFETY: `self` proves that the CPU has these instructions. `bytes` has the 8 bytes and
        // `powers` the 64 bytes that are read; they need not be aligned.
        unsafe {
            let (first, second) =
                (_mm512_castsi512_si256(integers), _mm512_extracti64x4_epi64::<1>(integers));
            let integers = _mm512_cvtepi32_pd(_mm256_add_epi32(first, second));
            let exponents = _mm512_cvtepu8_epi64(_mm_loadl_epi64(bytes.as_ptr().cast()));
            let biased = _mm512_add_epi64(exponents, _mm512_set1_epi64(1023 - 127));
            let scales = _mm512_castsi512_pd(_mm512_slli_epi64::<52>(biased));
            _mm512_fmadd_pd(integers, _mm512_mul_pd(scales, _mm512_loadu_pd(powers.as_ptr())), sums)
        }
    }

    #[inline(always)]
    fn columns(self, codes: &[u8; TILE]) -> [__m512i; 4] {
        // SAFETY: `self` proves that the CPU has these instructions. `codes` has the 256 bytes that
        // are read; they need not be aligned.
        unsafe {
            let [a, b, c, d] = parts!(0 1 2 3; i => _mm512_loadu_si512(codes.as_ptr().add(64 * i).cast()));
            let (low, high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let (lower, higher) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            [
                _mm512_unpacklo_epi64(low, lower),
                _mm512_unpackhi_epi64(low, lower),
                _mm512_unpacklo_epi64(high, higher),
                _mm512_unpackhi_epi64(high, higher),
            ]
        }
    }

    #[inline(always)]
    fn fractions(self, column: __m512i) -> [__m512; 8] {
        // SAFETY: `self` proves that the CPU has these instructions. `FRACTIONS` has the 64 bytes
        // that are read. The permutation ignores all but four bits of an index.
        unsafe {
            let table = _mm512_loadu_ps(FRACTIONS.as_ptr());
            [
                _mm512_permutexvar_ps(column, table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(column), table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<8>(column), table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<12>(column), table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<16>(column), table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<20>(column), table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<24>(column), table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<28>(column), table),
            ]
        }
    }

    #[inline(always)]
    fn lookup(self, codes: &[u8; CHUNK / 2], tables: [&Table; 2]) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions. `codes` has the 16 bytes and
        // each table the 32 bytes that are read; they need not be aligned. The permutation ignores
        // all but five bits of an index; the fifth selects the table.
        unsafe {
            let [first, second] = halves!(i => _mm256_loadu_si256(tables[i].as_ptr().cast()));
            let table = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second);
            let codes = _mm512_broadcast_i32x4(_mm_loadu_si128(codes.as_ptr().cast()));
            let (four, eight, twelve) = (0x0004_0004_0004_0004, 0x0008_0008_0008_0008, 0x000C_000C_000C_000C);
            let codes =
                _mm512_srlv_epi16(codes, _mm512_setr_epi64(0, 0, four, four, eight, eight, twelve, twelve));
            let second = 0x0010_0010_0010_0010;
            let of_table = _mm512_setr_epi64(0, second, 0, second, 0, second, 0, second);
            // a & b | c
            let index = _mm512_ternarylogic_epi32::<0xEA>(codes, _mm512_set1_epi16(15), of_table);
            _mm512_permutexvar_epi16(index, table)
        }
    }
}
