//! A lane's elements one by one, for rare cases: short loops, without arrays in memory.

use crate::access::MOST_STEPS;
use crate::dtype::{Chunk, Dtype};
use crate::hardware::ptx;

/// Calls `each` with a lane's elements, for rare cases.
#[inline(always)]
pub(super) fn for_each<D: Dtype>(chunks: &[Chunk; MOST_STEPS], mut each: impl FnMut(f32)) {
    rolled(D::STEPS, |j| {
        let chunk = chunk_of_step(chunks, j);
        rolled(D::CHUNK, |i| each(element::<D>(&chunk, i)));
    });
}

/// Calls `each` with numbers below `count`, in a loop that is not unrolled, for rare cases.
#[inline(always)]
pub(super) fn rolled(count: u32, mut each: impl FnMut(u32)) {
    let mut i = 0;
    while i < count {
        each(i);
        // Opaque, so that the compiler cannot count the iterations.
        i = ptx::opaque(i + 1);
    }
}

/// Value `i` of a chunk of 16-bit values, without indexing memory.
#[inline(always)]
pub(super) fn element<D: Dtype>(chunk: &Chunk, i: u32) -> f32 {
    let word = select(chunk, i / 2);
    D::widen(&[if i % 2 == 0 { word & 0xFFFF } else { word >> 16 }, 0, 0, 0], 0)
}

/// The chunk of step `j`, without indexing memory.
#[inline(always)]
pub(super) fn chunk_of_step(chunks: &[Chunk; MOST_STEPS], j: u32) -> Chunk {
    let [a, b, c, d, ..] = *chunks;
    let word = |word: usize| select(&[a[word], b[word], c[word], d[word]], j);
    [word(0), word(1), word(2), word(3)]
}

/// A word of four, without indexing memory.
#[inline(always)]
pub(super) fn select([a, b, c, d]: &[u32; 4], i: u32) -> u32 {
    // Opaque, lest the compiler index an array in memory instead.
    let [a, b, c, d] = [ptx::opaque(*a), ptx::opaque(*b), ptx::opaque(*c), ptx::opaque(*d)];
    let (low, high) = if i & 1 == 0 { (a, c) } else { (b, d) };
    if i & 2 == 0 { low } else { high }
}
