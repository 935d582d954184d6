//! The scheduler: rows that the warps of a thread block take, and take next.
//!
//! A thread block stays for as long as there is something to do. Its warps come in teams: the warps of a team multiply
//! the same rows, each with its part of the columns, and go through the rows of one turn after the other.

use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::TurnsGrid;

use crate::warp;

/// A number over 2^`bits`, and what is left.
#[inline(always)]
pub(crate) fn parts(number: u32, bits: u32) -> (u32, u32) {
    (number >> bits, number & ((1 << bits) - 1))
}

/// The number of the warp in its thread block, the same in all lanes, as the assembler would not know: what follows
/// from it takes uniform registers.
#[inline(always)]
pub(crate) fn warp_number() -> u32 {
    warp::shuffle(warp::thread() / WARP, 0)
}

/// The turns of a team: the rows that its warps multiply at once, and those so many further on.
#[derive(Clone, Copy)]
pub(crate) struct Turns {
    /// Rows of the matrix, and of a turn.
    pub(crate) rows: u64,
    pub(crate) each: u32,
    /// Turns from the matrix' first to the team's first, and from each of the team's to the next.
    first: u32,
    apart: u32,
    /// Turns of the team.
    pub(crate) count: u32,
}

impl Turns {
    /// Those of a team of a thread block, of so many rows each.
    #[inline(always)]
    pub(crate) fn new(grid: &TurnsGrid, each: u32, block: u32, team: u32) -> Self {
        let first = team * grid.row_blocks + block;
        Self {
            rows: grid.shape.rows,
            each,
            first,
            apart: grid.row_blocks * (grid.warps >> grid.split_bits),
            count: grid.turns[0] + u32::from(first < grid.turns[1]),
        }
    }

    /// The first row that is multiplied in a turn, and the first that is its own. If there are so many rows, each turn
    /// has as many: the matrix' last one begins with others'.
    #[inline(always)]
    pub(crate) fn starts(&self, turn: u32) -> [u64; 2] {
        let each = u64::from(self.each);
        let own = u64::from(self.first + turn * self.apart) * each;
        [own.min(self.rows - self.rows.min(each)), own]
    }

    /// A row of a turn, given its number there, if it is the turn's own.
    #[inline(always)]
    pub(crate) fn row(&self, turn: u32, in_turn: u32) -> Option<u64> {
        let [first, own] = self.starts(turn);
        let row = first + u64::from(in_turn);
        (turn < self.count && own <= row && row < self.rows).then_some(row)
    }
}
