//! Options of a search, and the importance of errors.

use microscale_formats::search::Search;
use microscale_kernels_abi::BlockGrid;

use crate::format::Blocks;

/// How to search.
#[derive(Clone, Copy)]
pub(super) struct SearchOptions {
    /// Importance by column, or null.
    pub(super) importance: *const f32,
    /// [`Search`] as a number.
    pub(super) search: u32,
}

impl SearchOptions {
    /// The search; a kernel is not launched without one.
    #[inline(always)]
    pub(super) fn search(&self) -> Search {
        const FOUR_SIX: u32 = Search::FourSix as u32;
        const WINDOW: u32 = Search::Window as u32;
        match self.search {
            FOUR_SIX => Search::FourSix,
            WINDOW => Search::Window,
            _ => Search::Full,
        }
    }
}

/// The address of the importance of a block's elements from `element` on, and the number of
/// elements. `importance` points to the importance of all columns.
#[inline(always)]
pub(super) fn importance<F: Blocks>(
    importance: *const f32,
    grid: &BlockGrid,
    block: u64,
    element: u32,
) -> (*const f32, u32) {
    let (_, block_in_row) = grid.row_blocks.divide(block);
    let col = block_in_row * u64::from(F::BLOCK) + u64::from(element);
    let rest = grid.cols.saturating_sub(col).min(u64::from(F::BLOCK)) as u32;
    (importance.wrapping_add(col as usize), rest)
}
