//! The layout of block scales in memory: [`ScaleLayout`].
//!
//! Sizes and offsets count scales of one byte. Multiply them by the size of a wider scale.

/// The order of scales in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScaleLayout {
    /// Row by row, without gaps: `[rows, blocks_per_row]`.
    #[default]
    Linear,
    /// Tiles of 128 rows by 4 blocks, 512 bytes each.
    ///
    /// cuBLASLt, CUTLASS and `torch._scaled_mm` read this layout.
    ///
    /// Rows are padded with zeros to a multiple of 128, and the blocks of a row to a multiple of 4.
    Swizzled,
}

/// Rows of a tile of the swizzled layout.
pub const TILE_ROWS: usize = 128;
/// Blocks per row of a tile of the swizzled layout.
pub const TILE_COLS: usize = 4;
/// Bytes of a tile.
pub const TILE_BYTES: usize = TILE_ROWS * TILE_COLS;
/// Rows of a tile that are interleaved: their scales occupy 16 consecutive bytes.
pub const TILE_ROWS_TOGETHER: usize = 4;
/// Distance in rows between two interleaved rows.
pub const TILE_ROWS_APART: usize = TILE_ROWS / TILE_ROWS_TOGETHER;

impl ScaleLayout {
    /// Returns the number of one-byte scales of a matrix, padding included, or `None` on overflow.
    pub const fn bytes(self, rows: usize, blocks_per_row: usize) -> Option<usize> {
        match self {
            Self::Linear => rows.checked_mul(blocks_per_row),
            Self::Swizzled => {
                match rows.div_ceil(TILE_ROWS).checked_mul(blocks_per_row.div_ceil(TILE_COLS)) {
                    Some(tiles) => tiles.checked_mul(TILE_BYTES),
                    None => None,
                }
            }
        }
    }

    /// Returns the offset of the scale of block `block` of row `row`.
    #[inline(always)]
    pub const fn offset(self, row: usize, block: usize, blocks_per_row: usize) -> usize {
        match self {
            Self::Linear => row * blocks_per_row + block,
            Self::Swizzled => {
                swizzled_offset(row as u64, block as u64, blocks_per_row.div_ceil(TILE_COLS) as u64) as usize
            }
        }
    }
}

/// The order of the block scales of activations in memory.
///
/// Both swizzled layouts pad rows to whole tiles and blocks to multiples of 4, with zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum ActivationLayout {
    /// Row by row, without gaps: [`ScaleLayout::Linear`].
    #[default]
    Linear = 1,
    /// Tiles of 128 rows by 4 blocks: [`ScaleLayout::Swizzled`].
    Swizzled128x4 = 128,
    /// Tiles of 8 rows by 4 blocks, 32 bytes each, rows in order. TensorRT-LLM's products of few
    /// tokens read it.
    Swizzled8x4 = 8,
}

impl ActivationLayout {
    /// Returns the rows of a tile, 1 without tiles.
    #[inline(always)]
    pub const fn tile_rows(self) -> usize {
        self as usize
    }

    /// Returns the number of rows with padding.
    #[inline(always)]
    pub const fn padded_rows(self, rows: usize) -> usize {
        rows.next_multiple_of(self.tile_rows())
    }

    /// Returns the number of blocks in a row with padding.
    #[inline(always)]
    pub const fn padded_blocks(self, blocks_per_row: usize) -> usize {
        match self {
            Self::Linear => blocks_per_row,
            Self::Swizzled128x4 | Self::Swizzled8x4 => blocks_per_row.next_multiple_of(TILE_COLS),
        }
    }

    /// Returns the number of one-byte scales of a matrix, padding included, or `None` on overflow.
    pub const fn bytes(self, rows: usize, blocks_per_row: usize) -> Option<usize> {
        match rows.checked_next_multiple_of(self.tile_rows()) {
            Some(rows) => rows.checked_mul(self.padded_blocks(blocks_per_row)),
            None => None,
        }
    }

    /// Returns the offset of the scale of block `block` of row `row`, padding included.
    #[inline(always)]
    pub const fn offset(self, row: usize, block: usize, blocks_per_row: usize) -> usize {
        let tiles_per_row = blocks_per_row.div_ceil(TILE_COLS);
        match self {
            Self::Linear => row * blocks_per_row + block,
            Self::Swizzled128x4 => swizzled_offset(row as u64, block as u64, tiles_per_row as u64) as usize,
            Self::Swizzled8x4 => swizzled_8x4_offset(row as u64, block as u64, tiles_per_row as u64) as usize,
        }
    }
}

/// Returns [`ActivationLayout::offset`] in tiles of 8 rows, whose rows are in order.
#[inline(always)]
pub const fn swizzled_8x4_offset(row: u64, block: u64, tiles_per_row: u64) -> u64 {
    const ROWS: u64 = ActivationLayout::Swizzled8x4 as u64;
    let tile = row / ROWS * tiles_per_row + block / TILE_COLS as u64;
    (tile * ROWS + row % ROWS) * TILE_COLS as u64 + block % TILE_COLS as u64
}

/// Returns [`ScaleLayout::offset`] in the swizzled layout.
///
/// `tiles_per_row` is the number of tiles side by side.
///
/// Within a tile the rows r, r + 32, r + 64 and r + 96 are interleaved: 16 bytes, four per row.
#[inline(always)]
pub const fn swizzled_offset(row: u64, block: u64, tiles_per_row: u64) -> u64 {
    let tile = row / TILE_ROWS as u64 * tiles_per_row + block / TILE_COLS as u64;
    tile * TILE_BYTES as u64
        + row % TILE_ROWS_APART as u64 * (TILE_ROWS_TOGETHER * TILE_COLS) as u64
        + row % TILE_ROWS as u64 / TILE_ROWS_APART as u64 * TILE_COLS as u64
        + block % TILE_COLS as u64
}

/// Returns the distance from a scale to one further on in the swizzled layout.
///
/// The target is in the `together`-th interleaved row, counted from the first, and `blocks` to the
/// right of a block that starts a tile.
#[inline(always)]
pub const fn swizzled_distance(together: u32, blocks: u32) -> u32 {
    let (tile, in_tile) = (blocks / TILE_COLS as u32, blocks % TILE_COLS as u32);
    tile * TILE_BYTES as u32 + together * TILE_COLS as u32 + in_tile
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scale_has_a_unique_offset() {
        for (rows, blocks) in [(1, 1), (128, 4), (129, 5), (200, 17)] {
            for layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
                let mut taken = [false; 256 * 20];
                let bytes = layout.bytes(rows, blocks).unwrap();
                for (row, block) in (0..rows).flat_map(|row| (0..blocks).map(move |block| (row, block))) {
                    let offset = layout.offset(row, block, blocks);
                    assert!(offset < bytes && !taken[offset], "{layout:?} {rows} {blocks}: {row} {block}");
                    taken[offset] = true;
                }
            }
        }
        assert_eq!(ScaleLayout::Swizzled.bytes(129, 5), Some(4 * 512));
        assert_eq!(ScaleLayout::Swizzled.bytes(usize::MAX, usize::MAX), None);
    }

    #[test]
    fn activations_have_an_offset_for_each_scale_and_each_padding() {
        use ActivationLayout::{Linear, Swizzled8x4, Swizzled128x4};
        for (rows, blocks) in [(1, 1), (8, 4), (9, 5), (129, 5), (200, 17)] {
            for layout in [Linear, Swizzled128x4, Swizzled8x4] {
                let mut taken = [false; 256 * 20];
                let bytes = layout.bytes(rows, blocks).unwrap();
                for row in 0..layout.padded_rows(rows) {
                    for block in 0..layout.padded_blocks(blocks) {
                        let offset = layout.offset(row, block, blocks);
                        assert!(offset < bytes && !taken[offset], "{layout:?} {rows}x{blocks}");
                        taken[offset] = true;
                    }
                }
            }
        }
        assert_eq!(Swizzled8x4.offset(9, 6, 8), 2 * 32 + 32 + 4 + 2);
        assert_eq!(Swizzled8x4.bytes(usize::MAX, 4), None);
    }

    #[test]
    fn distances_are_differences_of_offsets() {
        for (row, block, together, blocks) in
            [(0, 0, 1, 3), (31, 8, 3, 0), (128 + 5, 4, 2, 13), (300, 0, 0, 31)]
        {
            let start = swizzled_offset(row, block, 40);
            let end = swizzled_offset(row + 32 * u64::from(together), block + u64::from(blocks), 40);
            assert_eq!(start + u64::from(swizzled_distance(together, blocks)), end);
        }
    }
}
