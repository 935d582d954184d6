//! Vectors of AVX2 and FMA: two registers of eight lanes.

use std::arch::x86_64::{
    __m256, __m256i, _CMP_LE_OQ, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_packus_epi16,
    _mm_storeu_si128, _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256, _mm256_andnot_si256,
    _mm256_blendv_ps, _mm256_castpd_ps, _mm256_castps_pd, _mm256_castps_si256, _mm256_castsi256_ps,
    _mm256_castsi256_si128, _mm256_cmp_ps, _mm256_cmpeq_epi32, _mm256_cmpgt_epi32, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_cvttps_epi32, _mm256_div_ps, _mm256_extracti128_si256,
    _mm256_fmadd_ps, _mm256_fnmadd_ps, _mm256_loadu_ps, _mm256_max_epu32, _mm256_max_ps, _mm256_min_ps,
    _mm256_movemask_ps, _mm256_mul_ps, _mm256_or_si256, _mm256_packus_epi32, _mm256_permute2x128_si256,
    _mm256_permute4x64_epi64, _mm256_permute4x64_pd, _mm256_permutevar8x32_epi32, _mm256_set1_epi32,
    _mm256_set1_ps, _mm256_setr_epi32, _mm256_shuffle_ps, _mm256_sllv_epi32, _mm256_srlv_epi32,
    _mm256_storeu_ps, _mm256_sub_ps, _mm256_unpackhi_epi64, _mm256_unpacklo_epi64,
};

use super::Vector;
use crate::cpu::simd::tokens::{Avx2, LANES, Lanes, Portable, halves};
use crate::element::{Dtype, Element};

/// Lanes 0 to 7, and lanes 8 to 15.
type Pair = [__m256; 2];

/// The same lanes as integers.
type PairOfBits = [__m256i; 2];

impl Vector for Avx2 {
    type Number = Pair;

    #[inline(always)]
    unsafe fn assume_detected() -> Self {
        // SAFETY: the caller promises what `new` asks for.
        unsafe { Self::new() }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn mul(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn add(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn sub(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn fma(self, a: Pair, b: Pair, c: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn fnma(self, a: Pair, b: Pair, c: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_fnmadd_ps(a[0], b[0], c[0]), _mm256_fnmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn min(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn max(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn load(self, lanes: &Lanes<f32>) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions. `lanes` has the 64 bytes that
        // are read; they need not be aligned.
        unsafe { [_mm256_loadu_ps(lanes.as_ptr()), _mm256_loadu_ps(lanes.as_ptr().add(8))] }
    }

    #[inline(always)]
    fn store(self, vector: Pair) -> Lanes<f32> {
        let mut lanes = [0.0; LANES];
        // SAFETY: `self` proves that the CPU has these instructions. `lanes` has the 64 bytes that
        // are written; they need not be aligned.
        unsafe {
            _mm256_storeu_ps(lanes.as_mut_ptr(), vector[0]);
            _mm256_storeu_ps(lanes.as_mut_ptr().add(8), vector[1]);
        }
        lanes
    }

    #[inline(always)]
    fn deinterleave(self, a: Pair, b: Pair) -> (Pair, Pair) {
        ([self.even(a), self.even(b)], [self.odd(a), self.odd(b)])
    }

    #[inline(always)]
    fn halves(self, first: f32, second: f32) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_set1_ps(first), _mm256_set1_ps(second)] }
    }

    #[inline(always)]
    fn bits(self, numbers: Pair) -> PairOfBits {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_castps_si256(numbers[0]), _mm256_castps_si256(numbers[1])] }
    }

    #[inline(always)]
    fn number(self, bits: PairOfBits) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_castsi256_ps(bits[0]), _mm256_castsi256_ps(bits[1])] }
    }

    #[inline(always)]
    fn splat_bits(self, bits: u32) -> PairOfBits {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_set1_epi32(bits as i32); 2] }
    }

    #[inline(always)]
    fn and(self, a: PairOfBits, b: PairOfBits) -> PairOfBits {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])] }
    }

    #[inline(always)]
    fn or(self, a: PairOfBits, b: PairOfBits) -> PairOfBits {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
    }

    #[inline(always)]
    fn and_not(self, a: PairOfBits, b: PairOfBits) -> PairOfBits {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_andnot_si256(a[0], b[0]), _mm256_andnot_si256(a[1], b[1])] }
    }

    #[inline(always)]
    fn shift_left(self, bits: PairOfBits, by: u32) -> PairOfBits {
        let [by, _] = self.splat_bits(by);
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_sllv_epi32(bits[0], by), _mm256_sllv_epi32(bits[1], by)] }
    }

    #[inline(always)]
    fn shift_right(self, bits: PairOfBits, by: u32) -> PairOfBits {
        let [by, _] = self.splat_bits(by);
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_srlv_epi32(bits[0], by), _mm256_srlv_epi32(bits[1], by)] }
    }

    #[inline(always)]
    fn max_bits(self, a: PairOfBits, b: PairOfBits) -> PairOfBits {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_max_epu32(a[0], b[0]), _mm256_max_epu32(a[1], b[1])] }
    }

    #[inline(always)]
    fn fold_max(self, a: PairOfBits, b: PairOfBits) -> PairOfBits {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_max_epu32(a[0], a[1]), _mm256_max_epu32(b[0], b[1])] }
    }

    #[inline(always)]
    fn max_of_halves(self, vectors: &[PairOfBits; LANES / 2]) -> PairOfBits {
        let vectors = vectors.as_chunks::<{ LANES / 4 }>().0;
        halves!(i => {
            let [[a, b], [c, d], [e, f], [g, h]] = vectors[i];
            // SAFETY: `self` proves that the CPU has these instructions.
            unsafe {
                let (a, b, c, d) = (self.fold_128(a, b), self.fold_128(c, d), self.fold_128(e, f), self.fold_128(g, h));
                let (a, b) = (_mm256_castsi256_ps(self.fold_64(a, b)), _mm256_castsi256_ps(self.fold_64(c, d)));
                let even = _mm256_castps_si256(_mm256_shuffle_ps::<0x88>(a, b));
                let odd = _mm256_castps_si256(_mm256_shuffle_ps::<0xDD>(a, b));
                // Lane 4·q + i holds half 2·i + q.
                let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
                _mm256_permutevar8x32_epi32(_mm256_max_epu32(even, odd), order)
            }
        })
    }

    #[inline(always)]
    fn add_bits(self, a: PairOfBits, b: PairOfBits) -> PairOfBits {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
    }

    #[inline(always)]
    fn truncate(self, numbers: Pair) -> PairOfBits {
        // SAFETY: `self` proves that the CPU has these instructions.
        halves!(i => unsafe { _mm256_cvttps_epi32(numbers[i]) })
    }

    #[inline(always)]
    fn above(self, a: PairOfBits, b: PairOfBits) -> u16 {
        let [low, high] = halves!(i => {
            // SAFETY: `self` proves that the CPU has these instructions.
            unsafe { _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a[i], b[i]))) }
        });
        (low | high << 8) as u16
    }

    #[inline(always)]
    fn f32_to_f16(self, numbers: Pair) -> PairOfBits {
        // SAFETY: `self` proves that the CPU has these instructions.
        halves!(i => unsafe { _mm256_cvtepu16_epi32(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(numbers[i])) })
    }

    #[inline(always)]
    fn f16_to_f32(self, bits: PairOfBits) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions. Saturation changes no f16
        // below 2^15.
        unsafe {
            let halfwords = _mm256_permute4x64_epi64::<0xD8>(_mm256_packus_epi32(bits[0], bits[1]));
            let halves = [_mm256_castsi256_si128(halfwords), _mm256_extracti128_si256::<1>(halfwords)];
            halves!(i => _mm256_cvtph_ps(halves[i]))
        }
    }

    #[inline(always)]
    fn widen_block<T: Element, const N: usize>(self, block: &[T; N]) -> [f32; N] {
        if T::DTYPE != Dtype::F16 || !N.is_multiple_of(8) {
            return Portable.widen_block(block);
        }
        // The compiler does not find the f16 instruction by itself.
        let mut wide = [0.0; N];
        for (wide, values) in wide.as_chunks_mut::<8>().0.iter_mut().zip(block.as_chunks::<8>().0) {
            // SAFETY: `self` proves that the CPU has these instructions. `values` has the 16 bytes
            // that are read and `wide` the 32 bytes that are written; neither need be aligned.
            unsafe {
                let halves = _mm_loadu_si128(values.as_ptr().cast());
                _mm256_storeu_ps(wide.as_mut_ptr(), _mm256_cvtph_ps(halves));
            }
        }
        wide
    }

    #[inline(always)]
    fn low_bytes(self, bits: PairOfBits) -> Lanes<u8> {
        let [low, high] = self.and(bits, self.splat_bits(0xFF));
        let mut bytes = [0; LANES];
        // SAFETY: `self` proves that the CPU has these instructions. `bytes` has the 16 bytes that
        // are written; they need not be aligned.
        unsafe {
            let halfwords = _mm256_permute4x64_epi64::<0xD8>(_mm256_packus_epi32(low, high));
            let packed =
                _mm_packus_epi16(_mm256_castsi256_si128(halfwords), _mm256_extracti128_si256::<1>(halfwords));
            _mm_storeu_si128(bytes.as_mut_ptr().cast(), packed);
        }
        bytes
    }

    #[inline(always)]
    fn div(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn at_most(self, a: Pair, b: Pair) -> u16 {
        let [low, high] = halves!(i => {
            // SAFETY: `self` proves that the CPU has these instructions.
            unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LE_OQ>(a[i], b[i])) }
        });
        (low | high << 8) as u16
    }

    #[inline(always)]
    fn select(self, mask: u16, set: Pair, unset: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has these instructions.
        halves!(i => unsafe {
            let bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let mask = _mm256_and_si256(_mm256_set1_epi32(i32::from(mask >> (8 * i))), bits);
            let lanes = _mm256_castsi256_ps(_mm256_cmpeq_epi32(mask, bits));
            _mm256_blendv_ps(unset[i], set[i], lanes)
        })
    }
}

/// Building blocks of the methods above.
impl Avx2 {
    /// The lanes with an even index.
    #[inline(always)]
    fn even(self, [low, high]: Pair) -> __m256 {
        // SAFETY: `self` proves that the CPU has these instructions.
        self.in_order(unsafe { _mm256_shuffle_ps::<0x88>(low, high) })
    }

    /// The lanes with an odd index.
    #[inline(always)]
    fn odd(self, [low, high]: Pair) -> __m256 {
        // SAFETY: `self` proves that the CPU has these instructions.
        self.in_order(unsafe { _mm256_shuffle_ps::<0xDD>(low, high) })
    }

    /// Reorders the 64-bit parts to 0, 2, 1, 3.
    #[inline(always)]
    fn in_order(self, mixed: __m256) -> __m256 {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm256_castpd_ps(_mm256_permute4x64_pd::<0xD8>(_mm256_castps_pd(mixed))) }
    }

    /// The maxima of the two 128-bit halves of `a`, then of `b`.
    #[inline(always)]
    fn fold_128(self, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe {
            _mm256_max_epu32(_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b))
        }
    }

    /// The maxima of the two halves of each 128 bits: of `a` and `b`, interleaved.
    #[inline(always)]
    fn fold_64(self, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: `self` proves that the CPU has these instructions.
        unsafe { _mm256_max_epu32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)) }
    }
}
