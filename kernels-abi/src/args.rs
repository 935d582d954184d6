//! The structures that travel as kernel arguments or lie in device memory.

/// How a matrix falls into blocks of 32 along its rows.
///
/// Blocks are numbered row by row; codes and scales are stored in that order without gaps, so block `i` owns code bytes
/// `16 i .. 16 i + 16` and scale byte `i`. A row whose length is not a multiple of 32 ends in a block padded with zeros.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BlockGrid {
    /// Elements in a row.
    pub cols: u64,
    /// Elements from one row's start to the next's, in the unquantized matrix.
    pub row_stride: u64,
    /// Blocks in all.
    pub blocks: u64,
    /// Blocks in a row, at least 1.
    pub blocks_per_row: u64,
    /// Elements from the unquantized matrix' first to its last, gaps between rows included.
    pub span: u64,
    /// ⌊(2⁶⁴ − 1) / `blocks_per_row`⌋, so that the kernel divides by multiplying.
    reciprocal: u64,
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
        Some(Self { cols, row_stride, blocks, blocks_per_row, span, reciprocal: u64::MAX / blocks_per_row })
    }

    /// The row of a block and the block's number within the row.
    ///
    /// With d = `blocks_per_row` and r = `reciprocal` > (2⁶⁴ − 1) / d − 1, the estimate ⌊i·r / 2⁶⁴⌋ is at most one below
    /// ⌊i / d⌋ for every i < 2⁶³: i·r / 2⁶⁴ > i/d − i·(1 + 1/d) / 2⁶⁴ > i/d − 1. One correction makes it exact.
    #[inline(always)]
    pub fn locate(&self, block: u64) -> (u64, u64) {
        let estimate = ((block as u128 * self.reciprocal as u128) >> 64) as u64;
        let rest = block - estimate * self.blocks_per_row;
        if rest >= self.blocks_per_row {
            (estimate + 1, rest - self.blocks_per_row)
        } else {
            (estimate, rest)
        }
    }
}

/// Quantization options that a kernel reads at run time.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct QuantizeOptions {
    /// `ScaleRule::mantissa_addend`.
    pub mantissa_addend: u32,
    /// `NegativeZero` as a number.
    pub negative_zero: u32,
    /// 1 to replace ±Inf by the largest finite value and NaN by 0; 0 to give such blocks the NaN scale.
    pub saturate_non_finite: u32,
}

/// Report slots in device memory; warps spread their counts over them so that they do not queue for one address.
pub const REPORT_SLOTS: usize = 64;

/// [`ReportSlot::first_non_finite`] when nothing non-finite was met.
pub const NO_POSITION: u64 = 0;

/// Counts that a kernel adds to. Zeroed memory is the empty report; the sum over all slots is what happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct ReportSlot {
    /// NaN elements.
    pub nan: u64,
    /// Infinite elements.
    pub infinite: u64,
    /// Blocks with an element clipped by more than rounding.
    pub clipped: u64,
    /// Blocks that are not zero and were written as zeros.
    pub flushed: u64,
    /// Blocks whose scale left the range of E8M0.
    pub scale_saturated: u64,
    /// The complement of the smallest 32 · block + index of a non-finite element, kept by an atomic maximum; or
    /// [`NO_POSITION`].
    pub first_non_finite: u64,
    reserved: [u64; 2],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locate_divides_exactly() {
        for cols in [1u64, 31, 32, 33, 96, 4097, 1 << 20, (1 << 40) + 1] {
            let grid = BlockGrid::new(3, cols, cols, 32).unwrap();
            let d = grid.blocks_per_row;
            for block in
                [0, 1, d - 1, d, d + 1, 2 * d - 1, 2 * d, 12_345_678_901, (1 << 58) - 1, (1 << 63) - 1]
            {
                assert_eq!(grid.locate(block), (block / d, block % d), "block {block} of rows of {d}");
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
