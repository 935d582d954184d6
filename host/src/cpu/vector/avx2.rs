//! Vectors of AVX2 with FMA, in pairs of eight lanes.

use std::arch::x86_64::{
    __m256, _CMP_LE_OQ, _mm256_add_ps, _mm256_and_si256, _mm256_blendv_ps, _mm256_castsi256_ps,
    _mm256_cmp_ps, _mm256_cmpeq_epi32, _mm256_div_ps, _mm256_fmadd_ps, _mm256_fnmadd_ps, _mm256_loadu_ps,
    _mm256_max_ps, _mm256_min_ps, _mm256_movemask_ps, _mm256_mul_ps, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_setr_epi32, _mm256_storeu_ps, _mm256_sub_ps,
};

use microscale_formats::search::Machine;

use super::{LANES, Lanes, Vector};

pub(in crate::cpu) struct Avx2;

/// The first eight lanes and the others.
type Pair = [__m256; 2];

impl Machine for Avx2 {
    type Number = Pair;

    #[inline(always)]
    fn splat(x: f32) -> Pair {
        // SAFETY: as all of this type, it is only called where AVX2 and FMA were detected.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn mul(a: Pair, b: Pair) -> Pair {
        // SAFETY: as above.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn add(a: Pair, b: Pair) -> Pair {
        // SAFETY: as above.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn sub(a: Pair, b: Pair) -> Pair {
        // SAFETY: as above.
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn fma(a: Pair, b: Pair, c: Pair) -> Pair {
        // SAFETY: as above.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn fnma(a: Pair, b: Pair, c: Pair) -> Pair {
        // SAFETY: as above.
        unsafe { [_mm256_fnmadd_ps(a[0], b[0], c[0]), _mm256_fnmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn min(a: Pair, b: Pair) -> Pair {
        // SAFETY: as above.
        unsafe { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn max(a: Pair, b: Pair) -> Pair {
        // SAFETY: as above.
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }
}

impl Vector for Avx2 {
    #[inline(always)]
    fn load(lanes: &Lanes<f32>) -> Pair {
        // SAFETY: sixteen f32 are the 64 bytes that are read, without a demand on alignment; for the rest as above.
        unsafe { [_mm256_loadu_ps(lanes.as_ptr()), _mm256_loadu_ps(lanes.as_ptr().add(8))] }
    }

    #[inline(always)]
    fn store(vector: Pair) -> Lanes<f32> {
        let mut lanes = [0.0; LANES];
        // SAFETY: sixteen f32 are the 64 bytes that are written, without a demand on alignment; for the rest as above.
        unsafe {
            _mm256_storeu_ps(lanes.as_mut_ptr(), vector[0]);
            _mm256_storeu_ps(lanes.as_mut_ptr().add(8), vector[1]);
        }
        lanes
    }

    #[inline(always)]
    fn div(a: Pair, b: Pair) -> Pair {
        // SAFETY: as above.
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn at_most(a: Pair, b: Pair) -> u16 {
        // SAFETY: as above.
        let half = |i: usize| unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LE_OQ>(a[i], b[i])) };
        (half(0) | half(1) << 8) as u16
    }

    #[inline(always)]
    fn select(mask: u16, set: Pair, unset: Pair) -> Pair {
        // SAFETY: as above.
        let half = |i: usize| unsafe {
            let bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let mask = _mm256_and_si256(_mm256_set1_epi32(i32::from(mask >> (8 * i))), bits);
            let lanes = _mm256_castsi256_ps(_mm256_cmpeq_epi32(mask, bits));
            _mm256_blendv_ps(unset[i], set[i], lanes)
        };
        [half(0), half(1)]
    }
}
