//! Vectors of AVX-512 F.

use std::arch::x86_64::{
    __m512, _CMP_LE_OQ, _mm512_add_ps, _mm512_cmp_ps_mask, _mm512_div_ps, _mm512_fmadd_ps, _mm512_fnmadd_ps,
    _mm512_loadu_ps, _mm512_mask_blend_ps, _mm512_max_ps, _mm512_min_ps, _mm512_mul_ps, _mm512_set1_ps,
    _mm512_storeu_ps, _mm512_sub_ps,
};

use microscale_formats::search::Machine;

use super::{LANES, Lanes, Vector};

pub(in crate::cpu) struct Avx512;

impl Machine for Avx512 {
    type Number = __m512;

    #[inline(always)]
    fn splat(x: f32) -> __m512 {
        // SAFETY: as all of this type, it is only called where AVX-512 F was detected.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn fnma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn min(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_max_ps(a, b) }
    }
}

impl Vector for Avx512 {
    #[inline(always)]
    fn load(lanes: &Lanes<f32>) -> __m512 {
        // SAFETY: sixteen f32 are the 64 bytes that are read, without a demand on alignment; for the rest as above.
        unsafe { _mm512_loadu_ps(lanes.as_ptr()) }
    }

    #[inline(always)]
    fn store(vector: __m512) -> Lanes<f32> {
        let mut lanes = [0.0; LANES];
        // SAFETY: sixteen f32 are the 64 bytes that are written, without a demand on alignment; for the rest as above.
        unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), vector) };
        lanes
    }

    #[inline(always)]
    fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn at_most(a: __m512, b: __m512) -> u16 {
        // SAFETY: as above.
        unsafe { _mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b) }
    }

    #[inline(always)]
    fn select(mask: u16, set: __m512, unset: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_mask_blend_ps(mask, unset, set) }
    }
}
