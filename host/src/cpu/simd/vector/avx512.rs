//! Vectors of AVX-512 F and DQ.

use std::arch::x86_64::{
    __m512, __m512i, _CMP_LE_OQ, _MM_FROUND_TO_NEAREST_INT, _mm_storeu_si128, _mm512_add_epi32,
    _mm512_add_ps, _mm512_and_si512, _mm512_andnot_si512, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cmp_ps_mask, _mm512_cmpgt_epu32_mask, _mm512_cvtepi32_epi8, _mm512_cvtepi32_epi16,
    _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_div_ps, _mm512_fmadd_ps,
    _mm512_fnmadd_ps, _mm512_loadu_ps, _mm512_mask_blend_ps, _mm512_max_epu32, _mm512_max_ps, _mm512_min_ps,
    _mm512_mul_ps, _mm512_or_si512, _mm512_permutex2var_ps, _mm512_permutexvar_epi32, _mm512_range_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setr_epi32, _mm512_shuffle_i64x2, _mm512_shuffle_ps,
    _mm512_sllv_epi32, _mm512_srlv_epi32, _mm512_storeu_ps, _mm512_sub_ps, _mm512_unpackhi_epi64,
    _mm512_unpacklo_epi64,
};

use microscale_formats::arithmetic::Machine;

use super::Vector;
use crate::cpu::simd::tokens::{Avx512, LANES, Lanes};

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
        // SAFETY: sixteen f32 are the 64 bytes that are read, without a demand on alignment; for the rest as
        // above.
        unsafe { _mm512_loadu_ps(lanes.as_ptr()) }
    }

    #[inline(always)]
    fn store(vector: __m512) -> Lanes<f32> {
        let mut lanes = [0.0; LANES];
        // SAFETY: sixteen f32 are the 64 bytes that are written, without a demand on alignment; for the rest
        // as above.
        unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), vector) };
        lanes
    }

    #[inline(always)]
    fn deinterleave(a: __m512, b: __m512) -> (__m512, __m512) {
        // SAFETY: as above.
        unsafe {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
            (_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b))
        }
    }

    #[inline(always)]
    fn halves(first: f32, second: f32) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(first), _mm512_set1_ps(second)) }
    }

    #[inline(always)]
    fn bits(numbers: __m512) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_castps_si512(numbers) }
    }

    #[inline(always)]
    fn number(bits: __m512i) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_castsi512_ps(bits) }
    }

    #[inline(always)]
    fn splat_bits(bits: u32) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_set1_epi32(bits as i32) }
    }

    #[inline(always)]
    fn and(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_and_si512(a, b) }
    }

    #[inline(always)]
    fn or(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn and_not(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_andnot_si512(a, b) }
    }

    #[inline(always)]
    fn min_magnitude(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above; AVX-512 DQ was detected too. 0b1010: the smaller magnitude, without its sign.
        unsafe { _mm512_range_ps::<0b1010>(a, b) }
    }

    #[inline(always)]
    fn shift_left(bits: __m512i, by: u32) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_sllv_epi32(bits, Self::splat_bits(by)) }
    }

    #[inline(always)]
    fn shift_right(bits: __m512i, by: u32) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_srlv_epi32(bits, Self::splat_bits(by)) }
    }

    #[inline(always)]
    fn max_bits(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_max_epu32(a, b) }
    }

    #[inline(always)]
    fn fold_max(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_max_epu32(_mm512_shuffle_i64x2::<0x44>(a, b), _mm512_shuffle_i64x2::<0xEE>(a, b)) }
    }

    #[inline(always)]
    fn max_of_halves(vectors: &[__m512i; LANES / 2]) -> __m512i {
        let [a, b, c, d, e, f, g, h] = *vectors;
        // SAFETY: as above.
        unsafe {
            let (a, b, c, d) = (quarters(a, b), quarters(c, d), quarters(e, f), quarters(g, h));
            let (a, b) = (_mm512_castsi512_ps(pairs(a, b)), _mm512_castsi512_ps(pairs(c, d)));
            let even = _mm512_castps_si512(_mm512_shuffle_ps::<0x88>(a, b));
            let odd = _mm512_castps_si512(_mm512_shuffle_ps::<0xDD>(a, b));
            // Lane 4·q + i is half 4·i + q.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_permutexvar_epi32(order, _mm512_max_epu32(even, odd))
        }
    }

    #[inline(always)]
    fn add_bits(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    fn above(a: __m512i, b: __m512i) -> u16 {
        // SAFETY: as above.
        unsafe { _mm512_cmpgt_epu32_mask(a, b) }
    }

    #[inline(always)]
    fn f32_to_f16(numbers: __m512) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_cvtepu16_epi32(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(numbers)) }
    }

    #[inline(always)]
    fn f16_to_f32(bits: __m512i) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits)) }
    }

    #[inline(always)]
    fn low_bytes(bits: __m512i) -> Lanes<u8> {
        let mut bytes = [0; LANES];
        // SAFETY: sixteen bytes are written, without a demand on alignment; for the rest as above.
        unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(bits)) };
        bytes
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

/// The larger ones of the two quarters of 128 bits of each half, those of a first.
#[inline(always)]
fn quarters(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: as above.
    unsafe { _mm512_max_epu32(_mm512_shuffle_i64x2::<0x88>(a, b), _mm512_shuffle_i64x2::<0xDD>(a, b)) }
}

/// The larger ones of the two halves of each 128 bits, those of a first.
#[inline(always)]
fn pairs(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: as above.
    unsafe { _mm512_max_epu32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)) }
}
