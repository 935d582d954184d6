//! Grids: the blocks of matrices and the positions of scale bytes, as arguments that families
//! share.

use crate::launch::WARP_ELEMENTS;
use microscale_formats::layout::{TILE_COLS, TILE_ROWS, swizzled_offset};

/// A divisor with its reciprocal, so that a kernel divides by multiplying.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Divider {
    /// The number to divide by; at least 1.
    pub divisor: u64,
    /// ⌊(2⁶⁴ − 1) / `divisor`⌋.
    reciprocal: u64,
}

impl Divider {
    /// For a divisor; 0 counts as 1.
    #[inline(always)]
    pub const fn new(divisor: u64) -> Self {
        let divisor = if divisor == 0 { 1 } else { divisor };
        Self { divisor, reciprocal: u64::MAX / divisor }
    }

    /// Quotient and rest.
    ///
    /// With the divisor d and r = `reciprocal` > (2⁶⁴ − 1) / d − 1, the estimate ⌊i·r / 2⁶⁴⌋ is at
    /// most one below ⌊i / d⌋ for every i < 2⁶³: i·r / 2⁶⁴ > i/d − i·(1 + 1/d) / 2⁶⁴ > i/d − 1. One
    /// correction makes it exact.
    #[inline(always)]
    pub fn divide(&self, i: u64) -> (u64, u64) {
        let estimate = ((i as u128 * self.reciprocal as u128) >> 64) as u64;
        let rest = i - estimate * self.divisor;
        if rest >= self.divisor { (estimate + 1, rest - self.divisor) } else { (estimate, rest) }
    }

    /// [`Self::divide`] of 32 bits by a divisor of 32.
    #[inline(always)]
    pub fn divide_32(&self, i: u32) -> (u32, u32) {
        let (divisor, reciprocal) = (self.divisor as u32, (self.reciprocal >> 32) as u32);
        Divider32 { divisor, reciprocal }.divide(i)
    }
}

/// A [`Divider`] of 32 bits by 32. Kernels compute it too.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Divider32 {
    /// The number to divide by; at least 1.
    pub divisor: u32,
    /// ⌊(2³² − 1) / `divisor`⌋: the upper half of [`Divider`]'s.
    reciprocal: u32,
}

impl Divider32 {
    /// For a divisor; 0 counts as 1.
    #[inline(always)]
    pub const fn new(divisor: u32) -> Self {
        let divisor = if divisor == 0 { 1 } else { divisor };
        Self { divisor, reciprocal: u32::MAX / divisor }
    }

    /// Quotient and rest. The estimate is at most one too low, as in [`Divider::divide`].
    #[inline(always)]
    pub fn divide(self, i: u32) -> (u32, u32) {
        let estimate = ((u64::from(i) * u64::from(self.reciprocal)) >> 32) as u32;
        let rest = i.wrapping_sub(estimate.wrapping_mul(self.divisor));
        if rest >= self.divisor { (estimate + 1, rest - self.divisor) } else { (estimate, rest) }
    }
}

/// The blocks of a matrix along its rows.
///
/// Blocks are numbered row by row; codes are stored in that order without gaps. A row whose length
/// is not a multiple of the block ends in a block padded with zeros.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BlockGrid {
    /// Elements in a row.
    pub cols: u64,
    /// Elements from one row's start to the next's, in the unquantized matrix.
    pub row_stride: u64,
    /// Blocks in all.
    pub blocks: u64,
    /// Elements from the unquantized matrix' first to its last, gaps between rows included.
    pub span: u64,
    /// Blocks in a row.
    pub row_blocks: Divider,
}

impl BlockGrid {
    /// The grid of a matrix; `None` if it is empty or its counts overflow.
    pub fn new(rows: u64, cols: u64, row_stride: u64, block: u64) -> Option<Self> {
        if rows == 0 || cols == 0 {
            return None;
        }
        let blocks_per_row = cols.div_ceil(block);
        let blocks = rows.checked_mul(blocks_per_row)?;
        blocks.checked_mul(block)?;
        let span = (rows - 1).checked_mul(row_stride)?.checked_add(cols)?;
        let row_blocks = Divider::new(blocks_per_row);
        Some(Self { cols, row_stride, blocks, span, row_blocks })
    }

    /// Returns whether every row starts on 16 bytes, for a matrix at `address` with `bytes` bytes
    /// per value.
    pub const fn rows_are_aligned(&self, address: u64, bytes: usize) -> bool {
        let one_row = self.row_blocks.divisor == self.blocks;
        let stride = if one_row { 0 } else { self.row_stride * bytes as u64 };
        (address | stride).is_multiple_of(16)
    }
}

/// The positions of scale bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ScaleGrid {
    /// Blocks in a row of the matrix as it is, not as [`BlockGrid`] may have put its rows together.
    pub row_blocks: Divider,
    /// Tiles of the swizzled layout side by side; 0 for linear scales, which lie in the order of
    /// the blocks.
    pub tiles_per_row: u64,
    /// 1 if warps of the quantizers take a quarter of their elements from each of four rows whose
    /// scales lie together. Scales are swizzled; the matrix, of whole tiles and with fewer blocks
    /// than 2³², is described row by row in its [`BlockGrid`]; and a quarter of a warp's elements,
    /// [`WARP_ELEMENTS`] / 4, divides its rows.
    pub by_tiles: u64,
}

impl ScaleGrid {
    /// For linear scales of a matrix with at least one block per row.
    pub const fn linear(blocks_per_row: u64) -> Self {
        Self { row_blocks: Divider::new(blocks_per_row), tiles_per_row: 0, by_tiles: 0 }
    }

    /// For swizzled scales of a matrix with at least one block per row.
    pub const fn swizzled(blocks_per_row: u64) -> Self {
        Self {
            row_blocks: Divider::new(blocks_per_row),
            tiles_per_row: blocks_per_row.div_ceil(TILE_COLS as u64),
            by_tiles: 0,
        }
    }

    /// Whether a matrix whose rows start on 16 bytes, with swizzled scales, can go by tiles.
    pub const fn can_go_by_tiles(rows: u64, cols: u64, blocks: u64) -> bool {
        rows.is_multiple_of(TILE_ROWS as u64)
            && cols.is_multiple_of((WARP_ELEMENTS / 4) as u64)
            && blocks <= u32::MAX as u64
    }

    /// Where the scale byte of a block of a row lies, if scales are swizzled.
    #[inline(always)]
    pub fn swizzled_offset(&self, row: u64, block: u64) -> u64 {
        swizzled_offset(row, block, self.tiles_per_row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn division_is_exact() {
        for cols in [1u64, 31, 32, 33, 96, 4097, 1 << 20, (1 << 40) + 1] {
            let grid = BlockGrid::new(3, cols, cols, 32).unwrap();
            let d = grid.row_blocks.divisor;
            for block in
                [0, 1, d - 1, d, d + 1, 2 * d - 1, 2 * d, 12_345_678_901, (1 << 58) - 1, (1 << 63) - 1]
            {
                assert_eq!(
                    grid.row_blocks.divide(block),
                    (block / d, block % d),
                    "block {block} of rows of {d}"
                );
            }
            let Ok(d) = u32::try_from(d) else { continue };
            for block in [0, 1, d - 1, d, d + 1, 2 * d - 1, 2 * d, 1 << 31, u32::MAX - 1, u32::MAX] {
                let quotient = (block / d, block % d);
                assert_eq!(grid.row_blocks.divide_32(block), quotient, "block {block} of rows of {d}");
                assert_eq!(Divider32::new(d).divide(block), quotient, "block {block} of rows of {d}");
            }
        }
    }

    #[test]
    fn empty_and_overflowing_grids_are_refused() {
        assert!(BlockGrid::new(0, 32, 32, 32).is_none());
        assert!(BlockGrid::new(1, 0, 0, 32).is_none());
        assert!(BlockGrid::new(u64::MAX, 64, 64, 32).is_none());
    }
}
