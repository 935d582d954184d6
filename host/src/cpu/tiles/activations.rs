//! Activations of many tokens as tiles of bf16, of which f32 takes three and f16 two.

use microscale_formats::dot::CHUNK;
use microscale_formats::weights::SEGMENT;
use rayon::prelude::*;

use crate::cpu::widen::Widen;
use crate::element::{Dtype, Element};

/// Tokens of a tile.
pub(in crate::cpu) const TOKENS: usize = 16;

/// A chunk of each token's activations in bf16.
pub(in crate::cpu) type Tile = [[u16; CHUNK]; TOKENS];

/// Elements of a tile.
const TILE: usize = TOKENS * CHUNK;

/// Elements of a cache line.
const LINE: usize = 32;

/// Activations by segment, tile of tokens, chunk and part. Rows are filled up with zeros to whole chunks, and the last tile to
/// sixteen tokens.
pub(in crate::cpu) struct TiledActivations {
    parts: usize,
    cols: usize,
    token_tiles: usize,
    /// The tiles, from the first cache line on.
    elements: Vec<u16>,
    first: usize,
}

impl TiledActivations {
    /// Given what puts a segment's activations, from a column on, into tiles of zeros.
    pub(in crate::cpu) fn new(
        dtype: Dtype,
        cols: usize,
        tokens: usize,
        arrange: impl Fn(usize, &mut [Tile]) + Sync,
    ) -> Self {
        let parts = parts(dtype);
        let cols_of_tiles = cols.next_multiple_of(CHUNK);
        let token_tiles = tokens.div_ceil(TOKENS);
        // Zeros that come from the system as they are used.
        let mut elements = vec![0u16; cols_of_tiles * TOKENS * token_tiles * parts + LINE - 1];
        let first = elements.as_ptr().align_offset(LINE * size_of::<u16>()).min(LINE - 1);
        let tiles = elements[first..].as_chunks_mut::<CHUNK>().0.as_chunks_mut::<TOKENS>().0;
        let tiles_of_segment = (SEGMENT / CHUNK * token_tiles * parts).max(1);
        tiles.par_chunks_mut(tiles_of_segment).enumerate().for_each(|(segment, tiles)| {
            arrange(segment * SEGMENT, tiles);
        });
        Self { parts, cols: cols_of_tiles, token_tiles, elements, first }
    }

    /// Tiles of the same elements.
    pub(super) fn parts(&self) -> usize {
        self.parts
    }

    /// The elements of each segment of a row.
    pub(super) fn segments(&self) -> impl Iterator<Item = usize> + use<> {
        let cols = self.cols;
        (0..cols).step_by(SEGMENT).map(move |first| (cols - first).min(SEGMENT))
    }

    /// A segment's tiles of a tile's tokens.
    pub(super) fn part(&self, token_tile: usize, segment: usize) -> &[Tile] {
        let elements = (self.cols - segment * SEGMENT).min(SEGMENT);
        let tiles = elements / CHUNK * self.parts;
        let before = segment * (SEGMENT / CHUNK) * self.token_tiles * self.parts + token_tile * tiles;
        self.elements[self.first + before * TILE..][..tiles * TILE].as_chunks().0.as_chunks().0
    }
}

/// The bf16 that are an activation together: as many as it has times eight significant bits.
const fn parts(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => 3,
        Dtype::F16 => 2,
        Dtype::Bf16 => 1,
    }
}

/// Puts a segment's activations, from a column on, into tiles.
#[inline(always)]
pub(in crate::cpu) fn arrange<T: Element, W: Widen>(
    activations: &[T],
    cols: usize,
    first: usize,
    tokens: usize,
    tiles: &mut [Tile],
) {
    let parts = parts(T::DTYPE);
    let tiles_of_tokens = tiles.len() / tokens.div_ceil(TOKENS);
    for token in 0..tokens {
        let tiles = &mut tiles[token / TOKENS * tiles_of_tokens..][..tiles_of_tokens];
        let row = &activations[token * cols..][..cols];
        let row = &row[first..cols.min(first + SEGMENT)];
        for (values, tiles) in row.chunks(CHUNK).zip(tiles.chunks_exact_mut(parts)) {
            let mut rest = if let Some(values) = values.first_chunk::<CHUNK>() {
                W::widen(values)
            } else {
                let mut filled = [T::default(); CHUNK];
                filled[..values.len()].copy_from_slice(values);
                W::widen(&filled)
            };
            for tile in tiles {
                let part = &mut tile[token % TOKENS];
                for (rest, part) in rest.iter_mut().zip(part) {
                    *part = (rest.to_bits() >> 16) as u16;
                    // Exact: the lower bits. Of infinities NaN, which does no harm.
                    *rest -= f32::from_bits(u32::from(*part) << 16);
                }
            }
        }
    }
}
