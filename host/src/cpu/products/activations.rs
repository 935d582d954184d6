//! Packs the activations of many tokens: one token per lane.

use std::cell::Cell;

use microscale_formats::dot::CHUNK;
use microscale_formats::weights::SEGMENT;
use rayon::prelude::*;

use crate::cpu::simd::{LANES, Lanes, Vector};
use crate::element::{Dtype, Element};

/// Tokens per tile.
pub(in crate::cpu) const TOKENS: usize = LANES;

/// The most words that a thread keeps for its next activations: 16 MiB.
const MAX_KEPT: usize = 4 << 20;

thread_local! {
    /// The words of the thread's last activations.
    static WORDS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// One f32 per lane, aligned so that a vector never crosses a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(in crate::cpu) struct Aligned(pub(in crate::cpu) Lanes<f32>);

/// The elements in a word of 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) enum Word {
    /// One f32.
    F32,
    /// Two bf16. The one with the even index is in the lower bits.
    Bf16Pair,
}

impl Word {
    /// Elements per word.
    pub(in crate::cpu) const fn elements(self) -> usize {
        match self {
            Self::F32 => 1,
            Self::Bf16Pair => 2,
        }
    }
}

/// How activations are packed and multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) enum Packing {
    /// As f32.
    F32,
    /// As pairs of bf16. The activations are bf16.
    Bf16Pairs,
    /// As pairs of bf16 whose sums are the activations.
    Bf16Tiles,
}

impl Packing {
    pub(in crate::cpu) const fn word(self) -> Word {
        match self {
            Self::F32 => Word::F32,
            Self::Bf16Pairs | Self::Bf16Tiles => Word::Bf16Pair,
        }
    }

    /// Words per element: the number of bf16 that hold its significant bits, eight bits each.
    const fn parts(self, dtype: Dtype) -> usize {
        match (self, dtype) {
            (Self::Bf16Tiles, Dtype::F32) => 3,
            (Self::Bf16Tiles, Dtype::F16) => 2,
            _ => 1,
        }
    }
}

/// Packed activations, by segment, tile of tokens, chunk, part and word.
///
/// A line has one word of each of the tile's tokens. Pairs follow [packed
/// positions](crate::cpu::simd::products::packed_index), single elements their index. Rows are
/// padded with zeros to whole chunks, the last tile to sixteen tokens.
pub(in crate::cpu) struct PackedActivations {
    packing: Packing,
    parts: usize,
    cols: usize,
    token_tiles: usize,
    /// The lines. They start at index `first`, which is aligned to a cache line.
    words: Vec<f32>,
    first: usize,
}

impl PackedActivations {
    /// Calls `pack` with each segment's first column and its lines. `pack` writes all lines.
    ///
    /// Reuses the memory of the thread's last activations, if they were large enough. New pages
    /// would take up to a tenth of the product's time.
    pub(in crate::cpu) fn new(
        packing: Packing,
        dtype: Dtype,
        cols: usize,
        tokens: usize,
        pack: impl Fn(usize, &mut [Lanes<f32>]) + Sync,
    ) -> Self {
        let parts = packing.parts(dtype);
        let cols_of_words = cols.next_multiple_of(CHUNK);
        let token_tiles = tokens.div_ceil(TOKENS);
        let lines_of_element = |elements: usize| elements / packing.word().elements() * parts * token_tiles;
        let count = lines_of_element(cols_of_words) * LANES;
        let mut words = WORDS.take();
        if words.len() < count + LANES - 1 {
            words = vec![0f32; count + LANES - 1];
        }
        let first = words.as_ptr().align_offset(size_of::<Aligned>()).min(LANES - 1);
        let lines = words[first..first + count].as_chunks_mut().0;
        lines.par_chunks_mut(lines_of_element(SEGMENT).max(1)).enumerate().for_each(|(segment, lines)| {
            pack(segment * SEGMENT, lines);
        });
        Self { packing, parts, cols: cols_of_words, token_tiles, words, first }
    }

    /// How the activations are packed.
    pub(in crate::cpu) const fn packing(&self) -> Packing {
        self.packing
    }

    /// Words per element.
    pub(in crate::cpu) const fn parts(&self) -> usize {
        self.parts
    }

    /// The number of elements of each segment.
    pub(in crate::cpu) fn segments(&self) -> impl Iterator<Item = usize> + use<> {
        let cols = self.cols;
        (0..cols).step_by(SEGMENT).map(move |first| (cols - first).min(SEGMENT))
    }

    /// The lines of a segment, for `tiles` tiles of tokens from `first_tile` on.
    pub(in crate::cpu) fn part(&self, segment: usize, first_tile: usize, tiles: usize) -> &[Lanes<f32>] {
        let elements = (self.cols - segment * SEGMENT).min(SEGMENT);
        let lines = |elements: usize| elements / self.packing.word().elements() * self.parts;
        let before = lines(segment * SEGMENT) * self.token_tiles + lines(elements) * first_tile;
        &self.words[self.first..].as_chunks().0[before..][..lines(elements) * tiles]
    }
}

impl Drop for PackedActivations {
    fn drop(&mut self) {
        if self.words.len() <= MAX_KEPT {
            WORDS.set(std::mem::take(&mut self.words));
        }
    }
}

/// Packs the activations of a segment that starts at column `first`.
#[inline(always)]
pub(in crate::cpu) fn pack_activations<T: Element, V: Vector>(
    simd: V,
    packing: Packing,
    activations: &[T],
    cols: usize,
    first: usize,
    lines: &mut [Lanes<f32>],
) {
    let tokens = activations.len() / cols;
    let lines_of_tile = lines.len() / tokens.div_ceil(TOKENS);
    let lines_of_chunk = CHUNK / packing.word().elements() * packing.parts(T::DTYPE);
    for (tile, lines) in lines.chunks_exact_mut(lines_of_tile).enumerate() {
        for (chunk, lines) in lines.chunks_exact_mut(lines_of_chunk).enumerate() {
            let first = first + chunk * CHUNK;
            // By part of pairs, or by half of the chunk, then by token.
            let mut words = [[simd.splat(0.0); TOKENS]; 3];
            for token in 0..TOKENS.min(tokens - tile * TOKENS) {
                let row = &activations[(tile * TOKENS + token) * cols..][..cols];
                let values = if let Some(values) = row[first..].first_chunk::<CHUNK>() {
                    simd.widen_block(values)
                } else {
                    let mut filled = [T::default(); CHUNK];
                    filled[..cols - first].copy_from_slice(&row[first..]);
                    simd.widen_block(&filled)
                };
                let (halves, _) = values.as_chunks::<LANES>();
                let halves = [simd.load(&halves[0]), simd.load(&halves[1])];
                match packing {
                    Packing::F32 => [words[0][token], words[1][token]] = halves,
                    Packing::Bf16Pairs | Packing::Bf16Tiles => {
                        let mut halves = halves;
                        // Two rounds bring elements to packed positions, the third separates pairs.
                        for _ in 0..3 {
                            halves = simd.deinterleave(halves[0], halves[1]).into();
                        }
                        let [mut even, mut odd] = halves;
                        for words in &mut words[..packing.parts(T::DTYPE)] {
                            words[token] = pairs(simd, even, odd);
                            (even, odd) = (rest(simd, even), rest(simd, odd));
                        }
                    }
                }
            }
            for (lines, words) in lines.as_chunks_mut::<LANES>().0.iter_mut().zip(words) {
                *lines = stored(simd, transposed(simd, words));
            }
        }
    }
}

/// Joins the upper halves of two f32 to a pair of bf16, truncated.
#[inline(always)]
fn pairs<V: Vector>(simd: V, even: V::Number, odd: V::Number) -> V::Number {
    let upper = simd.and(simd.bits(odd), simd.splat_bits(0xFFFF_0000));
    simd.number(simd.or(simd.shift_right(simd.bits(even), 16), upper))
}

/// What truncation to bf16 leaves, exactly. Infinities leave NaN, which ends as NaN anyway.
#[inline(always)]
fn rest<V: Vector>(simd: V, numbers: V::Number) -> V::Number {
    simd.sub(numbers, simd.number(simd.and(simd.bits(numbers), simd.splat_bits(0xFFFF_0000))))
}

/// Transposes sixteen vectors.
///
/// Each round moves the lowest bit of a number's column to the top of its row, and the lowest bit
/// of its row to the top of its column.
#[inline(always)]
pub(in crate::cpu) fn transposed<V: Vector>(simd: V, mut rows: [V::Number; LANES]) -> [V::Number; LANES] {
    for _ in 0..LANES.ilog2() {
        let mut next = rows;
        for i in 0..LANES / 2 {
            (next[i], next[i + LANES / 2]) = simd.deinterleave(rows[2 * i], rows[2 * i + 1]);
        }
        rows = next;
    }
    rows
}

#[inline(always)]
fn stored<V: Vector>(simd: V, rows: [V::Number; LANES]) -> [Lanes<f32>; LANES] {
    let mut lines = [[0.0; LANES]; LANES];
    for i in 0..LANES {
        lines[i] = simd.store(rows[i]);
    }
    lines
}

#[cfg(test)]
mod tests;
