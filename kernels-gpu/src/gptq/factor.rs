//! The factor in device memory, in tiles of columns.

use microscale_kernels_abi::gptq::{FACTOR_TILE, factor_tile};

use crate::hardware::ptx;

/// Columns per load.
pub(super) const QUAD: usize = 4;

/// The address of an entry of the factor.
#[inline(always)]
pub(super) fn entry(feedback: *const f32, row: u32, col: u32) -> *const f32 {
    let tile = factor_tile(u64::from(col / FACTOR_TILE));
    feedback.wrapping_add((tile + u64::from(row * FACTOR_TILE + col % FACTOR_TILE)) as usize)
}

/// The rows of one block of columns.
pub(super) struct BlockFactor<const N: usize> {
    /// The first row of the block in each of its tiles of columns. Unused ones are null.
    tiles: [*const f32; 4],
    /// Rₖₖ of the block.
    pivots: *const f32,
}

impl<const N: usize> BlockFactor<N> {
    pub(super) fn of(feedback: *const f32, pivots: *const f32, position: u32) -> Self {
        let tile = |i: u32| {
            let used = i * FACTOR_TILE < N as u32;
            if used { entry(feedback, position, position + i * FACTOR_TILE) } else { core::ptr::null() }
        };
        Self { tiles: [tile(0), tile(1), tile(2), tile(3)], pivots: pivots.wrapping_add(position as usize) }
    }

    /// Entries of four columns `quad * 4 ..` in row `k` of the block.
    ///
    /// # Safety
    /// The block exists, `k` and `quad * 4` are below `N`, and nothing writes the factor during the
    /// kernel.
    #[inline(always)]
    pub(super) unsafe fn quad(&self, k: usize, quad: usize) -> [f32; QUAD] {
        let row = self.tiles[quad / 2].wrapping_add(k * FACTOR_TILE as usize + quad % 2 * QUAD);
        // SAFETY: 16 bytes of the block, on 16 bytes. Not hoisted, lest all need registers.
        unsafe { ptx::load_16_here(row.cast()) }.map(f32::from_bits)
    }

    /// The pivots of four columns.
    ///
    /// # Safety
    /// As for [`Self::quad`].
    #[inline(always)]
    pub(super) unsafe fn pivots(&self, quad: usize) -> [f32; QUAD] {
        // SAFETY: 16 bytes of the block, on 16 bytes.
        unsafe { ptx::load_16_here(self.pivots.wrapping_add(quad * QUAD).cast()) }.map(f32::from_bits)
    }
}
