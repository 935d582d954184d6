//! The quantized tensor: where its codes and scale bytes lie, and moving codes.

use microscale_kernels_abi::{Divider, ScaleGrid};

use crate::dtype::Dtype;
use crate::format::Blocks;

/// Where a tensor goes to.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) codes: *mut u8,
    pub(crate) scales: *mut u8,
    pub(crate) scale_grid: ScaleGrid,
}

/// Where the scale bytes of a warp's blocks lie.
pub(crate) struct Scales {
    grid: ScaleGrid,
    first_block: u64,
    row: u64,
    block_in_row: u64,
}

impl Scales {
    /// From the warp's first block on.
    #[inline(always)]
    pub(crate) fn new(grid: ScaleGrid, first_block: u64) -> Self {
        let swizzled = grid.tiles_per_row != 0;
        let (row, block_in_row) = if swizzled { grid.row_blocks.divide(first_block) } else { (0, 0) };
        Self { grid, first_block, row, block_in_row }
    }

    /// The offset of a block's scale byte.
    #[inline(always)]
    pub(crate) fn offset(&self, block: u64) -> usize {
        if self.grid.tiles_per_row == 0 {
            return block as usize;
        }
        let Divider { divisor, .. } = self.grid.row_blocks;
        let (mut row, mut block_in_row) = (self.row, self.block_in_row + (block - self.first_block));
        if block_in_row >= divisor {
            (row, block_in_row) = self.grid.row_blocks.divide(block);
        }
        self.grid.swizzled_offset(row, block_in_row) as usize
    }
}

/// Loads the codes of a lane's chunk, the first in the lowest bits.
///
/// # Safety
/// `codes` points to the packed codes of more than `block` blocks in global memory, aligned to 8
/// bytes.
#[inline(always)]
pub(crate) unsafe fn load_codes<D: Dtype, F: Blocks>(codes: *const u8, block: u64, part: u32) -> u64 {
    let bytes = const { D::CHUNK * F::BITS / 8 };
    // SAFETY: F::BYTES a block; the part's codes are `bytes` of them, at a multiple of that.
    unsafe {
        let start = codes.add((block * u64::from(F::BYTES) + u64::from(part * bytes)) as usize);
        match bytes {
            8 => *start.cast::<u64>(),
            4 => u64::from(*start.cast::<u32>()),
            _ => u64::from(*start.cast::<u16>()),
        }
    }
}

/// Stores the codes of a lane's chunk.
///
/// # Safety
/// As for [`load_codes`], for writing; each byte is written by one thread.
#[inline(always)]
pub(crate) unsafe fn store_codes<D: Dtype, F: Blocks>(codes: *mut u8, block: u64, part: u32, packed: u64) {
    let bytes = const { D::CHUNK * F::BITS / 8 };
    // SAFETY: F::BYTES a block; the part's codes are `bytes` of them, at a multiple of that.
    unsafe {
        let start = codes.add((block * u64::from(F::BYTES) + u64::from(part * bytes)) as usize);
        match bytes {
            8 => *start.cast::<u64>() = packed,
            4 => *start.cast::<u32>() = packed as u32,
            _ => *start.cast::<u16>() = packed as u16,
        }
    }
}
