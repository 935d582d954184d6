//! The tensor memory of a block: 128 lanes of 512 columns of 32-bit words.

use std::ops::Range;

use crate::fault::{Access, Space};
use crate::race::Cells;

/// Columns of tensor memory.
pub(crate) const COLUMNS: u32 = 512;
/// Lanes of tensor memory.
pub(crate) const LANES: u32 = 128;
/// The unit of allocation, in columns.
pub(crate) const UNIT: u32 = 32;

const WORDS: usize = (COLUMNS * LANES) as usize;

/// Words of tensor memory, column by column, with allocations and written words.
#[derive(Debug, Default)]
pub(crate) struct TensorMemory {
    words: Vec<u32>,
    written: Vec<bool>,
    pub(crate) cells: Cells,
    /// The first column and the number of columns of each allocation.
    pub(crate) allocations: Vec<(u32, u32)>,
    /// The warps that allocate and free.
    pub(crate) allocates: Option<u32>,
    pub(crate) frees: Option<u32>,
    /// The block has promised to allocate no more.
    pub(crate) relinquished: bool,
}

impl TensorMemory {
    /// Returns the range of words of some lanes of a column.
    pub(crate) fn range(column: u32, lanes: Range<u32>) -> Range<usize> {
        let first = (column * LANES) as usize;
        first + lanes.start as usize..first + lanes.end as usize
    }

    /// Returns the first columns of all places where `columns` columns are free.
    pub(crate) fn places(&self, columns: u32) -> Vec<u32> {
        let free = |first: u32| {
            let apart = |&(other, count): &(u32, u32)| first + columns <= other || other + count <= first;
            self.allocations.iter().all(apart)
        };
        let last = COLUMNS.checked_sub(columns);
        last.map_or(Vec::new(), |last| {
            (0..=last).step_by(UNIT as usize).filter(|&first| free(first)).collect()
        })
    }

    /// Allocates columns that are free. Their words are unwritten.
    pub(crate) fn allocate(&mut self, first: u32, columns: u32) {
        self.words.resize(WORDS, 0);
        self.written.resize(WORDS, false);
        let range = (first * LANES) as usize..((first + columns) * LANES) as usize;
        self.written[range].fill(false);
        self.allocations.push((first, columns));
    }

    /// Returns whether a column is allocated.
    pub(crate) fn has(&self, column: u32) -> bool {
        self.allocations.iter().any(|&(first, count)| (first..first + count).contains(&column))
    }

    /// Allocates the history of accesses on first use.
    pub(crate) fn fit(&mut self) {
        self.cells.fit(WORDS);
    }

    /// Returns a word that was written.
    pub(crate) fn word(&self, column: u32, lane: u32) -> Option<u32> {
        let at = (column * LANES + lane) as usize;
        self.written[at].then(|| self.words[at])
    }

    /// Writes a word.
    pub(crate) fn set(&mut self, column: u32, lane: u32, word: u32) {
        let at = (column * LANES + lane) as usize;
        (self.words[at], self.written[at]) = (word, true);
    }

    /// Describes an access to a word.
    #[cold]
    pub(crate) fn access(column: u32, lane: u32) -> Access {
        Access {
            space: Space::Tensor,
            address: u64::from(lane << 16 | column),
            bytes: 4,
            buffer: Some("tensor memory".into()),
            offset: i64::from(column * LANES + lane) * 4,
            len: WORDS * 4,
        }
    }
}
