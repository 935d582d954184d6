//! A lane's elements one by one, for rare cases: short loops, without arrays in memory.

use crate::access::MOST_STEPS;
use crate::dtype::{Chunk, Dtype};
use crate::hardware::ptx;

/// Runs the body with numbers below `count`, in a loop that is not unrolled. Not a function with a
/// closure, which LLVM may call in place of inlining it.
macro_rules! rolled {
    ($i:ident below $count:expr => $body:block) => {
        let mut $i = 0;
        while $i < $count {
            $body
            // Opaque, so that the compiler cannot count the iterations.
            $i = $crate::hardware::ptx::opaque($i + 1);
        }
    };
}
pub(super) use rolled;

/// The bits of the largest finite magnitude of a lane's chunks.
#[inline(always)]
pub(super) fn finite_amax<D: Dtype>(chunks: &[Chunk; MOST_STEPS]) -> u32 {
    let mut finite = 0;
    rolled!(j below D::STEPS => {
        finite = finite.max(finite_amax_of_chunk::<D>(&chunk_of_step(chunks, j)));
    });
    finite
}

/// The bits of the largest finite magnitude of a chunk.
#[inline(always)]
pub(super) fn finite_amax_of_chunk<D: Dtype>(chunk: &Chunk) -> u32 {
    let mut finite = 0;
    rolled!(i below D::CHUNK => {
        let value = element::<D>(chunk, i);
        if value.is_finite() {
            finite = finite.max(value.to_bits() & 0x7FFF_FFFF);
        }
    });
    finite
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
