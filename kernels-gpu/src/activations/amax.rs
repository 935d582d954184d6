//! The largest magnitudes of a lane's values.

use core::hint::cold_path;

use super::one_by_one;
use crate::access::MOST_STEPS;
use crate::dtype::{Chunk, Dtype};

/// The bits, as f32, of the largest finite magnitude of a lane's chunks.
#[inline(always)]
pub(super) fn finite_amax<D: Dtype>(chunks: &[Chunk; MOST_STEPS]) -> u32 {
    let most = most_of_piece::<D>(chunks);
    if most < D::INFINITY {
        return D::magnitude_to_f32_bits(most);
    }
    cold_path();
    one_by_one::finite_amax::<D>(chunks)
}

/// The largest magnitude of a lane's chunks, in the dtype's bits; not a finite one where there are
/// others.
#[inline(always)]
pub(super) fn most_of_piece<D: Dtype>(chunks: &[Chunk; MOST_STEPS]) -> u32 {
    let mut most = 0;
    for j in 0..D::STEPS as usize {
        let [a, b, c, d] = chunks[j];
        most = D::max_magnitudes(most, D::max_magnitudes(D::max_magnitudes(a, b), D::max_magnitudes(c, d)));
    }
    D::largest(most)
}

/// The same for a chunk.
#[inline(always)]
pub(super) fn most_of_chunk<D: Dtype>(&[a, b, c, d]: &Chunk) -> u32 {
    D::largest(D::max_magnitudes(D::max_magnitudes(a, b), D::max_magnitudes(c, d)))
}
