//! Products of pairs of bf16 by AVX-512 BF16.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_castsi512_ps, _mm512_dpbf16_ps, _mm512_loadu_si512,
    _mm512_permutex2var_epi32, _mm512_permutexvar_epi16, _mm512_setr_epi32,
};
use std::mem::transmute;

use super::{FRACTIONS, STEP};
use crate::cpu::simd::tokens::Avx512Bf16;

/// The bf16 of each code, twice.
///
/// The permutation takes five bits of an index, and the fifth belongs to another code.
const WEIGHTS: [u16; 32] = {
    let mut weights = [0; 32];
    let mut code = 0;
    while code < 32 {
        weights[code] = ((FRACTIONS[code % 16] * 128.0).to_bits() >> 16) as u16;
        code += 1;
    }
    weights
};

/// Operations on pairs of bf16. The element with the lower index is in the lower bits.
impl Avx512Bf16 {
    /// The first four bytes of sixteen groups of eight, and the last four.
    #[inline(always)]
    pub(in crate::cpu) fn halves_of_groups(self, codes: &[u8; STEP]) -> [__m512i; 2] {
        // SAFETY: `self` proves that the CPU has these instructions. `codes` has the 128 bytes that
        // are read; they need not be aligned.
        unsafe {
            let first = _mm512_loadu_si512(codes.as_ptr().cast());
            let second = _mm512_loadu_si512(codes.as_ptr().add(64).cast());
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
            [_mm512_permutex2var_epi32(first, even, second), _mm512_permutex2var_epi32(first, odd, second)]
        }
    }

    /// Looks up the weights of the lowest code in each 16 bits.
    #[inline(always)]
    pub(in crate::cpu) fn weights(self, codes: __m512i) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions. `WEIGHTS` has the 64 bytes
        // that are read; they need not be aligned.
        unsafe {
            let table = _mm512_loadu_si512(WEIGHTS.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_permutexvar_epi16(codes, table))
        }
    }

    /// Adds the products of two pairs in each lane.
    ///
    /// Rounds either each addition, or the sum of both products and then its addition. Subnormal
    /// numbers may count as zeros.
    #[inline(always)]
    pub(in crate::cpu) fn add_pairs(self, sums: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions. Both vector types have 64
        // bytes, and every bit pattern is valid in either.
        unsafe {
            let (a, b) = (transmute::<__m512, __m512bh>(a), transmute::<__m512, __m512bh>(b));
            _mm512_dpbf16_ps(sums, a, b)
        }
    }
}
