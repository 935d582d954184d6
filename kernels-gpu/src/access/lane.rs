//! The blocks of a warp, and each lane's share of them.

use microscale_formats::layout::{
    TILE_ROWS, TILE_ROWS_APART, TILE_ROWS_TOGETHER, swizzled_distance, swizzled_offset,
};
use microscale_kernels_abi::launch::{THREADS, WARP, WARP_ELEMENTS};
use microscale_kernels_abi::{BlockGrid, ScaleGrid};

use crate::dtype::Dtype;
use crate::format::Blocks;
use crate::hardware::warp;

/// Lanes that share a block, a chunk each.
#[inline(always)]
pub(crate) const fn lanes<D: Dtype, F: Blocks>() -> u32 {
    F::BLOCK / D::CHUNK
}

/// Blocks whose scales a lane owns.
#[inline(always)]
pub(crate) const fn owned<F: Blocks>() -> u32 {
    WARP_ELEMENTS / WARP / F::BLOCK
}

/// The most that a lane owns.
pub(crate) const MOST_OWNED: usize = 2;

/// Blocks that a warp handles.
#[inline(always)]
pub(crate) const fn warp_blocks<F: Blocks>() -> u64 {
    (WARP_ELEMENTS / F::BLOCK) as u64
}

/// Quarters of a warp's elements: from four rows with swizzled scales of whole tiles, otherwise
/// consecutive.
pub(super) const QUARTERS: u32 = TILE_ROWS_TOGETHER as u32;

/// A lane's share of a warp's blocks.
pub(crate) struct Lane {
    /// The warp's first block.
    pub(crate) first_block: u64,
    /// The lane's number within the lanes that share a block.
    pub(crate) part: u32,
    /// The number of its block within a step.
    pub(super) group: u32,
    /// Blocks per step of the warp.
    pub(super) step: u32,
    /// Blocks from one quarter to the next with swizzled scales of whole tiles; otherwise 0.
    quarter_stride: u32,
}

impl Lane {
    /// This lane's share of blocks that `split` warps share, each taking some of the steps.
    #[inline(always)]
    pub(crate) fn of<D: Dtype, F: Blocks>(split: u32) -> Self {
        let warp =
            u64::from(warp::thread_block()) * u64::from(THREADS / WARP) + u64::from(warp::thread() / WARP);
        Self::of_piece::<D, F>(warp / u64::from(split))
    }

    /// This lane's share of the matrix' piece of 1024 elements of this number.
    #[inline(always)]
    pub(crate) fn of_piece<D: Dtype, F: Blocks>(piece: u64) -> Self {
        let lanes = const { lanes::<D, F>() };
        Self {
            first_block: piece * warp_blocks::<F>(),
            part: warp::lane() % lanes,
            group: warp::lane() / lanes,
            step: WARP / lanes,
            quarter_stride: 0,
        }
    }

    /// This lane's share of a matrix that goes by tiles (`ScaleGrid::by_tiles`), and where it lies.
    ///
    /// Warps go along the rows whose scales lie together, then to the next such rows of the tiles,
    /// then to the next tiles.
    #[inline(always)]
    pub(crate) fn of_tile<D: Dtype, F: Blocks>(grid: &BlockGrid, scales: &ScaleGrid) -> (Self, WarpPlace) {
        let mut lane = Self::of::<D, F>(1);
        let blocks_per_row = scales.row_blocks.divisor as u32;
        let (rows, block_in_row) = scales.row_blocks.divide_32(lane.first_block as u32 / QUARTERS);
        let apart = TILE_ROWS_APART as u32;
        let row = rows / apart * TILE_ROWS as u32 + rows % apart;
        lane.first_block = u64::from(row) * u64::from(blocks_per_row) + u64::from(block_in_row);
        lane.quarter_stride = apart * blocks_per_row;
        let index = u64::from(row) * grid.row_stride + u64::from(block_in_row) * u64::from(F::BLOCK);
        let (row, block_in_row) = (u64::from(row), u64::from(block_in_row));
        (lane, WarpPlace { whole: true, contiguous: true, index, row, block_in_row })
    }

    /// The block that the lane meets in step `j` of a warp whose blocks follow each other.
    #[inline(always)]
    pub(crate) fn block(&self, j: u32) -> u64 {
        self.first_block + u64::from(j * self.step + self.group)
    }

    /// The same, of a matrix that goes by tiles.
    #[inline(always)]
    pub(crate) fn block_in_tile<D: Dtype>(&self, j: u32) -> u64 {
        let (quarter, block) = self.quarter::<D>(j, self.group);
        self.first_block + u64::from(quarter) * u64::from(self.quarter_stride) + u64::from(block)
    }

    /// The warp's block of this number.
    #[inline(always)]
    pub(crate) fn warp_block<D: Dtype>(&self, number: u32, by_tiles: bool) -> u64 {
        if !by_tiles {
            return self.first_block + u64::from(number);
        }
        let (quarter, block) = self.quarter::<D>(number / self.step, number % self.step);
        self.first_block + u64::from(quarter) * u64::from(self.quarter_stride) + u64::from(block)
    }

    /// The quarter that a group's block of step `j` lies in, and its number there.
    #[inline(always)]
    fn quarter<D: Dtype>(&self, j: u32, group: u32) -> (u32, u32) {
        let steps = const { D::STEPS / QUARTERS };
        (j / steps, j % steps * self.step + group)
    }

    /// Where the scale byte of the block lies that the lane owns as its k-th, if the matrix goes by
    /// tiles.
    #[inline(always)]
    pub(crate) fn scale_in_tile<D: Dtype, F: Blocks>(
        &self,
        place: &WarpPlace,
        scales: &ScaleGrid,
        k: u32,
    ) -> usize {
        let (quarter, block) = self.quarter::<D>(k * lanes::<D, F>() + self.part, self.group);
        let tiles_per_row = u64::from(scales.tiles_per_row as u32);
        let first = swizzled_offset(place.row, place.block_in_row, tiles_per_row) as usize;
        first + swizzled_distance(quarter, block) as usize
    }

    /// Where the warp's blocks lie. The same for all its lanes.
    #[inline(always)]
    pub(crate) fn place<F: Blocks>(&self, grid: &BlockGrid) -> WarpPlace {
        let last = self.first_block + warp_blocks::<F>();
        let whole = last <= grid.blocks;
        let block = u64::from(F::BLOCK);
        // Matrices without gaps come as one row, and all but their last blocks are whole.
        if grid.row_blocks.divisor == grid.blocks {
            return WarpPlace {
                whole,
                contiguous: whole && last * block <= grid.cols,
                index: self.first_block * block,
                row: 0,
                block_in_row: self.first_block,
            };
        }
        let (row, block_in_row) = grid.row_blocks.divide(self.first_block);
        let last_col = (block_in_row + warp_blocks::<F>()) * block;
        WarpPlace {
            whole,
            contiguous: whole && last_col <= grid.cols,
            index: row * grid.row_stride + block_in_row * block,
            row,
            block_in_row,
        }
    }

    /// The block whose scale the lane owns as its k-th.
    #[inline(always)]
    pub(crate) fn own_block<D: Dtype, F: Blocks>(&self, k: u32) -> u64 {
        self.block(k * lanes::<D, F>() + self.part)
    }

    /// The lane that owns the scale of the block that this lane meets in step `j`, as its
    /// `j / lanes`-th.
    #[inline(always)]
    pub(crate) fn owner<D: Dtype, F: Blocks>(&self, j: u32) -> u32 {
        self.group * lanes::<D, F>() + j % lanes::<D, F>()
    }
}

/// The position of a warp's blocks in the unquantized matrix.
pub(crate) struct WarpPlace {
    /// All blocks exist.
    pub(crate) whole: bool,
    /// All blocks are whole and in one row, so that their elements are consecutive; or the warp
    /// takes quarters of four rows.
    pub(crate) contiguous: bool,
    /// The index of the first element in the matrix.
    pub(super) index: u64,
    pub(super) row: u64,
    pub(super) block_in_row: u64,
}
