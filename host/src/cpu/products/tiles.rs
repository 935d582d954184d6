//! Products of quantized weights and activations of many tokens by matrix tiles, which multiply bf16: a tile has the pairs of
//! sixteen rows of weights, or of sixteen tokens.

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

/// The panels of a task: one after the other meets the activations of a segment, which a core's second-level cache
/// keeps that long. Fewer, if some threads would have nothing to do.
pub(in crate::cpu) fn panels(of_all_rows: usize) -> usize {
    (of_all_rows / (4 * rayon::current_num_threads())).clamp(1, 4)
}

/// Pairs of sixteen tokens: the word of each in a line.
type Tile = [Lanes<f32>; LANES];

/// Instructions that multiply tiles, or their emulation.
pub(in crate::cpu) trait TileUnit {
    /// Sets the sums of a tile's tokens, by row, to those of its products with a segment of weights.
    ///
    /// There are `parts` tiles for each line of weights. The order is that of
    /// [`microscale_formats::weights`]: tile after tile from zero.
    fn multiply(&self, x: &[Tile], parts: usize, weights: &[Lines], sums: &mut Lines);
}

/// Products by these instructions of activations that are the sums of so many bf16.
pub(in crate::cpu) struct TileMicrokernel<'a, T> {
    pub(in crate::cpu) tiles: &'a T,
    pub(in crate::cpu) parts: usize,
}

impl<V: Products, T: TileUnit> Microkernel<V> for TileMicrokernel<'_, T> {
    const WORD: Word = Word::Bf16Pair;

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
