//! Block scales in the swizzled layout: tiles of 128×4, as tensor cores read them.

use std::borrow::Cow;
use std::ops::Range;

use microscale::ScaleLayout;

/// Returns rows and blocks per row, padded to whole tiles.
pub(crate) fn tiled(rows: usize, blocks: usize) -> [usize; 2] {
    [rows.next_multiple_of(128), blocks.next_multiple_of(4)]
}

/// All scales of a matrix in tiles, appended in linear order and padded with zeros.
pub(crate) struct Tiles {
    bytes: Vec<u8>,
    blocks_per_row: usize,
    next: usize,
}

impl Tiles {
    pub(crate) fn new(rows: usize, blocks_per_row: usize) -> Self {
        let [height, width] = tiled(rows, blocks_per_row);
        Self { bytes: vec![0; height * width], blocks_per_row, next: 0 }
    }

    /// Stores the scales of the next blocks.
    pub(crate) fn extend(&mut self, scales: &[u8]) {
        for (place, scale) in places(self.next..self.next + scales.len(), self.blocks_per_row).zip(scales) {
            self.bytes[place] = *scale;
        }
        self.next += scales.len();
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// Returns the scales of a range of blocks in linear order. The result is empty if `tiles` is too
/// short.
pub(crate) fn gathered(tiles: &[u8], blocks: Range<usize>, blocks_per_row: usize) -> Cow<'static, [u8]> {
    let scales: Option<Vec<u8>> =
        places(blocks, blocks_per_row).map(|place| tiles.get(place).copied()).collect();
    scales.unwrap_or_default().into()
}

/// Returns the offsets of a range of blocks. Blocks are numbered row by row.
fn places(blocks: Range<usize>, blocks_per_row: usize) -> impl Iterator<Item = usize> {
    let each = blocks_per_row.max(1);
    blocks.map(move |block| ScaleLayout::Swizzled.offset(block / each, block % each, each))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_scales_are_gathered_again() {
        let mut random = fastrand::Rng::with_seed(9);
        for (rows, blocks) in [(1, 1), (128, 4), (130, 3), (200, 17)] {
            let scales: Vec<u8> = (0..rows * blocks).map(|_| random.u8(1..)).collect();
            let mut tiles = Tiles::new(rows, blocks);
            let (first, rest) = scales.split_at(random.usize(..=scales.len()));
            tiles.extend(first);
            tiles.extend(rest);
            let bytes = tiles.into_bytes();
            assert_eq!(bytes.len(), tiled(rows, blocks).iter().product::<usize>());
            assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), scales.len());
            let range = random.usize(..scales.len())..scales.len();
            assert_eq!(*gathered(&bytes, range.clone(), blocks), scales[range]);
            assert!(gathered(&bytes, 0..bytes.len() + 1, 1).is_empty());
        }
    }
}
