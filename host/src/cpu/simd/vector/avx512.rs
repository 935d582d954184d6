//! Vectors of AVX-512 F and DQ: one register of sixteen lanes.

use std::arch::x86_64::{
    __m512, __m512i, _CMP_LE_OQ, _MM_FROUND_TO_NEAREST_INT, _mm_storeu_si128, _mm512_add_epi32,
    _mm512_add_ps, _mm512_and_si512, _mm512_andnot_si512, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cmp_ps_mask, _mm512_cmpgt_epu32_mask, _mm512_cvtepi32_epi8, _mm512_cvtepi32_epi16,
    _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_cvttps_epi32, _mm512_div_ps,
    _mm512_fmadd_ps, _mm512_fnmadd_ps, _mm512_loadu_ps, _mm512_mask_blend_ps, _mm512_max_epu32,
    _mm512_max_ps, _mm512_min_ps, _mm512_mul_ps, _mm512_or_si512, _mm512_permutex2var_ps,
    _mm512_permutexvar_epi32, _mm512_range_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setr_epi32,
    _mm512_shuffle_i64x2, _mm512_shuffle_ps, _mm512_sllv_epi32, _mm512_srlv_epi32, _mm512_storeu_ps,
    _mm512_sub_ps, _mm512_unpackhi_epi64, _mm512_unpacklo_epi64,
};

use super::Vector;
use crate::cpu::simd::tokens::{Avx512, LANES, Lanes};
use crate::element::Element;

impl Vector for Avx512 {
    type Number = __m512;

    #[inline(always)]
    unsafe fn assume_detected() -> Self {
        // SAFETY: the caller promises what `new` asks for.
        unsafe { Self::new() }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn fnma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn load(self, lanes: &Lanes<f32>) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions. `lanes` has the 64 bytes that
        // are read; they need not be aligned.
        unsafe { _mm512_loadu_ps(lanes.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, vector: __m512) -> Lanes<f32> {
        let mut lanes = [0.0; LANES];
        // SAFETY: `self` proves that the CPU has these instructions. `lanes` has the 64 bytes that
        // are written; they need not be aligned.
        unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), vector) };
        lanes
    }

    #[inline(always)]
    fn deinterleave(self, a: __m512, b: __m512) -> (__m512, __m512) {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
            (_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b))
        }
    }

    #[inline(always)]
    fn halves(self, first: f32, second: f32) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(first), _mm512_set1_ps(second)) }
    }

    #[inline(always)]
    fn bits(self, numbers: __m512) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_castps_si512(numbers) }
    }

    #[inline(always)]
    fn number(self, bits: __m512i) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_castsi512_ps(bits) }
    }

    #[inline(always)]
    fn splat_bits(self, bits: u32) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_set1_epi32(bits as i32) }
    }

    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_and_si512(a, b) }
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn and_not(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_andnot_si512(a, b) }
    }

    #[inline(always)]
    fn min_magnitude(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions. 0b1010 selects the smaller
        // magnitude and clears its sign.
        unsafe { _mm512_range_ps::<0b1010>(a, b) }
    }

    #[inline(always)]
    fn shift_left(self, bits: __m512i, by: u32) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_sllv_epi32(bits, self.splat_bits(by)) }
    }

    #[inline(always)]
    fn shift_right(self, bits: __m512i, by: u32) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_srlv_epi32(bits, self.splat_bits(by)) }
    }

    #[inline(always)]
    fn max_bits(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_max_epu32(a, b) }
    }

    #[inline(always)]
    fn fold_max(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_max_epu32(_mm512_shuffle_i64x2::<0x44>(a, b), _mm512_shuffle_i64x2::<0xEE>(a, b)) }
    }

    #[inline(always)]
    fn max_of_halves(self, vectors: &[__m512i; LANES / 2]) -> __m512i {
        let [a, b, c, d, e, f, g, h] = *vectors;
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe {
            let (a, b, c, d) =
                (self.fold_128(a, b), self.fold_128(c, d), self.fold_128(e, f), self.fold_128(g, h));
            let (a, b) = (_mm512_castsi512_ps(self.fold_64(a, b)), _mm512_castsi512_ps(self.fold_64(c, d)));
            let even = _mm512_castps_si512(_mm512_shuffle_ps::<0x88>(a, b));
            let odd = _mm512_castps_si512(_mm512_shuffle_ps::<0xDD>(a, b));
            // Lane 4·q + i holds half 4·i + q.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_permutexvar_epi32(order, _mm512_max_epu32(even, odd))
        }
    }

    #[inline(always)]
    fn add_bits(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    fn truncate(self, numbers: __m512) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_cvttps_epi32(numbers) }
    }

    #[inline(always)]
    fn above(self, a: __m512i, b: __m512i) -> u16 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_cmpgt_epu32_mask(a, b) }
    }

    #[inline(always)]
    fn f32_to_f16(self, numbers: __m512) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_cvtepu16_epi32(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(numbers)) }
    }

    #[inline(always)]
    fn f16_to_f32(self, bits: __m512i) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits)) }
    }

    #[inline(always)]
    fn widen_block<T: Element, const N: usize>(self, block: &[T; N]) -> [f32; N] {
        self.avx2().widen_block(block)
    }

    #[inline(always)]
    fn low_bytes(self, bits: __m512i) -> Lanes<u8> {
        let mut bytes = [0; LANES];
        // SAFETY: `self` proves that the CPU has these instructions. `bytes` has the 16 bytes that
        // are written; they need not be aligned.
        unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(bits)) };
        bytes
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn at_most(self, a: __m512, b: __m512) -> u16 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b) }
    }

    #[inline(always)]
    fn select(self, mask: u16, set: __m512, unset: __m512) -> __m512 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_mask_blend_ps(mask, unset, set) }
    }
}

/// Building blocks of the methods above.
impl Avx512 {
    /// The maxima of the two 128-bit quarters of each half of `a`, then of `b`.
    #[inline(always)]
    fn fold_128(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_max_epu32(_mm512_shuffle_i64x2::<0x88>(a, b), _mm512_shuffle_i64x2::<0xDD>(a, b)) }
    }

    /// The maxima of the two halves of each 128 bits: of `a` and `b`, interleaved.
    #[inline(always)]
    fn fold_64(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm512_max_epu32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)) }
    }
}
