//! Widening blocks to f32, by what an instruction set has for it.

use std::marker::PhantomData;

use crate::cpu::simd::Vector;
#[cfg(target_arch = "x86_64")]
use crate::element::Dtype;
use crate::element::Element;

/// The widening of blocks to f32 by an instruction set.
pub(in crate::cpu) trait Widen {
    /// Its vectors.
    type Vector: Vector;

    /// The exact f32 of each element.
    fn widen<T: Element, const N: usize>(block: &[T; N]) -> [f32; N];
}

/// Element by element, which the compiler vectorises.
pub(in crate::cpu) struct ByElement<V>(PhantomData<V>);

impl<V: Vector> Widen for ByElement<V> {
    type Vector = V;

    #[inline(always)]
    fn widen<T: Element, const N: usize>(block: &[T; N]) -> [f32; N] {
        let mut wide = [0.0; N];
        for (wide, value) in wide.iter_mut().zip(block) {
            *wide = value.to_f32();
        }
        wide
    }
}

/// Widens f16 by the instruction for it; the compiler does not find it by itself. For the vectors of an
/// instance.
#[cfg(target_arch = "x86_64")]
pub(in crate::cpu) struct F16c<V>(PhantomData<V>);

#[cfg(target_arch = "x86_64")]
impl<V: Vector> Widen for F16c<V> {
    type Vector = V;

    #[inline(always)]
    fn widen<T: Element, const N: usize>(block: &[T; N]) -> [f32; N] {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm256_cvtph_ps, _mm256_storeu_ps};
        if T::DTYPE != Dtype::F16 || !N.is_multiple_of(8) {
            return ByElement::<V>::widen(block);
        }
        let mut wide = [0.0; N];
        for (wide, values) in wide.as_chunks_mut::<8>().0.iter_mut().zip(block.as_chunks::<8>().0) {
            // SAFETY: only the instances use this type, and they are entered after F16C was detected; eight
            // f16 are the 16 bytes that are read, and eight f32 the 32 bytes that are written, both without a
            // demand on alignment.
            unsafe {
                let halves = _mm_loadu_si128(values.as_ptr().cast::<__m128i>());
                _mm256_storeu_ps(wide.as_mut_ptr(), _mm256_cvtph_ps(halves));
            }
        }
        wide
    }
}
