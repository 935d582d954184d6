//! The microkernel over matrix tiles of bf16.
//!
//! A tile has the pairs of sixteen rows of weights, or of sixteen tokens.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
mod emulated;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(in crate::cpu) use amx::Amx;
pub(in crate::cpu) use emulated::EmulatedAmx;

use super::activations::{Aligned, Word};
use super::panels::{Lines, Microkernel, ROWS};
use crate::cpu::simd::products::Products;
use crate::cpu::simd::{LANES, Lanes};

/// The pairs of sixteen tokens: one line per word.
type Tile = [Lanes<f32>; LANES];

/// Matrix tiles, or their emulation.
pub(in crate::cpu) trait TileUnit {
    /// Multiplies a tile of tokens by a segment of weights, and stores the sums by row.
    ///
    /// Each line of weights has `parts` tiles in `x`. The sums start at zero and add tile after
    /// tile, in the order of [`microscale_formats::weights`].
    fn multiply(&self, x: &[Tile], parts: usize, weights: &[Lines], sums: &mut Lines);

    /// Gives the unit work between calls of [`Self::multiply`], if it becomes slow when idle.
    #[inline(always)]
    fn keep_awake(&self) {}
}

/// The microkernel over tiles, for activations that are sums of `parts` bf16.
pub(in crate::cpu) struct TileMicrokernel<'a, T> {
    pub(in crate::cpu) tiles: &'a T,
    pub(in crate::cpu) parts: usize,
}

impl<V: Products, T: TileUnit> Microkernel<V> for TileMicrokernel<'_, T> {
    const WORD: Word = Word::Bf16Pair;

    #[inline(always)]
    fn keep_awake(&self) {
        self.tiles.keep_awake();
    }

    #[inline(always)]
    fn add(&self, simd: V, x: &[Lanes<f32>], weights: &[Lines], sums: &mut [Lines]) {
        let mut of_segment = [Aligned([0.0; LANES]); ROWS];
        for (x, sums) in x.as_chunks().0.chunks_exact(weights.len() * self.parts).zip(sums) {
            self.tiles.multiply(x, self.parts, weights, &mut of_segment);
            for (sums, of_segment) in sums.iter_mut().zip(&of_segment) {
                *sums = Aligned(simd.store(simd.add(simd.load(&sums.0), simd.load(&of_segment.0))));
            }
        }
    }
}

#[cfg(test)]
mod tests;
