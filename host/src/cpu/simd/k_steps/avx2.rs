//! Sums of k-steps by AVX2. AVX-512 uses it too: four tokens fill these vectors.

use std::arch::x86_64::{
    __m256, __m256d, __m512, _CMP_LT_OQ, _CMP_NEQ_UQ, _CMP_NLT_UQ, _mm256_add_pd, _mm256_and_pd,
    _mm256_castps256_ps128, _mm256_castsi256_pd, _mm256_cmp_pd, _mm256_cvtps_pd, _mm256_extractf128_ps,
    _mm256_loadu_pd, _mm256_max_pd, _mm256_movemask_pd, _mm256_or_pd, _mm256_permute2f128_pd,
    _mm256_set1_epi64x, _mm256_setzero_pd, _mm256_storeu_pd, _mm256_unpackhi_pd, _mm256_unpacklo_pd,
    _mm512_castps512_ps256, _mm512_extractf32x8_ps,
};

use super::{Four, KEPT, KSteps, Range};
use crate::cpu::simd::tokens::{Avx2, Avx512};

impl KSteps for Avx2 {
    type Sums4 = __m256d;

    #[inline(always)]
    fn sums_of_groups(self, [first, second]: [__m256; 2]) -> __m256d {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe {
            let a = _mm256_cvtps_pd(_mm256_castps256_ps128(first));
            let b = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(first));
            let c = _mm256_cvtps_pd(_mm256_castps256_ps128(second));
            let d = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(second));
            _mm256_add_pd(_mm256_add_pd(a, b), _mm256_add_pd(c, d))
        }
    }

    #[inline(always)]
    fn add_k_steps(self, [a, b, c, d]: [__m256d; 4], accumulators: &mut Four, range: &Range) -> bool {
        // SAFETY: `self` proves that the CPU has these instructions. Each array has the 32 bytes
        // that are read or written; they need not be aligned.
        unsafe {
            // By k-step, then by token.
            let (ab_even, ab_odd) = (_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
            let (cd_even, cd_odd) = (_mm256_unpacklo_pd(c, d), _mm256_unpackhi_pd(c, d));
            let k_steps = [
                _mm256_permute2f128_pd::<0x20>(ab_even, cd_even),
                _mm256_permute2f128_pd::<0x20>(ab_odd, cd_odd),
                _mm256_permute2f128_pd::<0x31>(ab_even, cd_even),
                _mm256_permute2f128_pd::<0x31>(ab_odd, cd_odd),
            ];
            let kept = _mm256_castsi256_pd(_mm256_set1_epi64x(KEPT as i64));
            let no_sign = _mm256_castsi256_pd(_mm256_set1_epi64x(i64::MAX));
            let lowest = _mm256_loadu_pd(range.lowest.as_ptr());
            let mut accumulator = _mm256_loadu_pd(accumulators.as_ptr());
            let (mut largest, mut below) = (_mm256_setzero_pd(), _mm256_setzero_pd());
            for sums in k_steps {
                let magnitude = _mm256_and_pd(accumulator, no_sign);
                largest = _mm256_max_pd(largest, magnitude);
                // Magnitudes below the lowest. Zero is none.
                let is_below = _mm256_cmp_pd::<_CMP_LT_OQ>(magnitude, lowest);
                below = _mm256_or_pd(below, _mm256_and_pd(is_below, magnitude));
                accumulator = _mm256_and_pd(_mm256_add_pd(accumulator, sums), kept);
            }
            _mm256_storeu_pd(accumulators.as_mut_ptr(), accumulator);
            let limits = _mm256_loadu_pd(range.limits.as_ptr());
            let above = _mm256_cmp_pd::<_CMP_NLT_UQ>(largest, limits);
            let below = _mm256_cmp_pd::<_CMP_NEQ_UQ>(below, _mm256_setzero_pd());
            _mm256_movemask_pd(_mm256_or_pd(above, below)) == 0
        }
    }
}

impl KSteps for Avx512 {
    type Sums4 = __m256d;

    #[inline(always)]
    fn sums_of_groups(self, terms: __m512) -> __m256d {
        // SAFETY: `self` proves that the CPU has these instructions.
        let halves = unsafe { [_mm512_castps512_ps256(terms), _mm512_extractf32x8_ps::<1>(terms)] };
        self.avx2().sums_of_groups(halves)
    }

    #[inline(always)]
    fn add_k_steps(self, sums: [__m256d; 4], accumulators: &mut Four, range: &Range) -> bool {
        self.avx2().add_k_steps(sums, accumulators, range)
    }
}
