//! Races: accesses to the same byte by two threads, one at least a write, not both atomic, that nothing
//! orders.
//! Orders are `bar.sync` among the threads of a block, and `bar.warp.sync` among the lanes of a warp if it
//! joins all lanes that the warp was launched with. One that joins only some orders nothing here, and
//! shuffles never do: where this errs, it reports too much. A thread that exits lets others pass a barrier,
//! but takes no part in it: accesses of its warp since the last one are not ordered before later ones. The
//! memory model (ISA chapter 8) orders more, by fences and by acquiring and releasing, which are not
//! supported.
//!
//! Every byte remembers its last write and its last reads, as FastTrack does (Flanagan and Freund, 2009). An
//! access is a number: which execution of an instruction by a warp, and which lane.

use std::collections::HashSet;
use std::ops::Range;

/// An access: 32 · index into [`Races`] + lane + 1; 0 is none.
pub(crate) type Id = u32;

/// An instruction that a warp executed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) block: u32,
    /// The warp in its block.
    pub(crate) warp: u32,
    /// The number of barriers that the block had passed.
    pub(crate) block_time: u32,
    /// The number of barriers of its own that the warp had passed.
    pub(crate) warp_time: u32,
    pub(crate) pc: u32,
    pub(crate) atomic: bool,
}

/// All accesses of a launch.
#[derive(Debug, Default)]
pub(crate) struct Races {
    records: Vec<Record>,
    /// Block, warp and `block_time` where lanes exited instead of coming to a barrier that others passed.
    left: HashSet<(u32, u32, u32)>,
}

impl Races {
    /// The access of lane 0 of a warp; lanes are added to it. `None` when there are too many.
    pub(crate) fn begin(&mut self, record: Record) -> Option<Id> {
        let id = u32::try_from(self.records.len()).ok()?.checked_mul(32)?.checked_add(1)?;
        id.checked_add(31)?;
        self.records.push(record);
        Some(id)
    }

    /// Lanes of a warp exited instead of coming to the block's barrier of this number, which the others pass.
    pub(crate) fn leave(&mut self, block: u32, warp: u32, block_time: u32) {
        self.left.insert((block, warp, block_time));
    }

    /// The instruction of an access, and its lane.
    pub(crate) fn record(&self, id: Id) -> (&Record, u32) {
        (&self.records[(id as usize - 1) / 32], (id - 1) % 32)
    }

    /// Returns whether an access is before a later one, by the program or by a barrier.
    fn ordered(&self, earlier: Id, later: Id) -> bool {
        let ((a, lane_a), (b, lane_b)) = (self.record(earlier), self.record(later));
        let same_warp = a.warp == b.warp && (lane_a == lane_b || a.warp_time < b.warp_time);
        let barrier = || a.block_time < b.block_time && !self.left.contains(&(a.block, a.warp, a.block_time));
        a.block == b.block && (same_warp || barrier())
    }

    fn race(&self, earlier: Id, later: Id) -> bool {
        let atomic = |id: Id| self.record(id).0.atomic;
        earlier != 0 && !self.ordered(earlier, later) && !(atomic(earlier) && atomic(later))
    }
}

/// The threads that accessed the bytes of a buffer.
///
/// Two reads by different threads are enough: a write is in no race with either only if both are before it or
/// its own, and reads are dropped only when a later one is after them, or when the two that stay are of
/// different warps, one of which is in a race with every write that the dropped one would be. (Of three lanes
/// of one warp the third may be dropped, because a barrier orders all lanes of a warp or none.) Two writes
/// are needed where atomic ones meet, which do not race with each other.
#[derive(Debug, Default)]
pub(crate) struct Cells {
    write: Vec<Id>,
    other_write: Vec<Id>,
    read: Vec<Id>,
    other_read: Vec<Id>,
}

/// The byte in the access, and the earlier access.
type Conflict = (usize, Id);

impl Cells {
    /// Makes room when there is none yet.
    #[inline]
    pub(crate) fn fit(&mut self, len: usize) {
        if self.write.len() != len {
            // Fresh zeroed vectors: pages that nobody touches cost nothing.
            *self = Self {
                write: vec![0; len],
                other_write: vec![0; len],
                read: vec![0; len],
                other_read: vec![0; len],
            };
        }
    }

    /// Notes a read.
    #[inline]
    pub(crate) fn read(&mut self, range: Range<usize>, races: &Races, id: Id) -> Result<(), Conflict> {
        let fresh = |ids: &[Id]| ids.iter().fold(0, |all, id| all | id) == 0;
        if !fresh(&self.write[range.clone()]) {
            for byte in range.clone() {
                for earlier in [self.write[byte], self.other_write[byte]] {
                    if races.race(earlier, id) {
                        return Err((byte - range.start, earlier));
                    }
                }
            }
        }
        if fresh(&self.read[range.clone()]) {
            self.read[range].fill(id);
            return Ok(());
        }
        for byte in range {
            self.note_read(byte, races, id);
        }
        Ok(())
    }

    fn note_read(&mut self, byte: usize, races: &Races, id: Id) {
        let [first, second] = [&mut self.read[byte], &mut self.other_read[byte]];
        if *second != 0 && races.ordered(*second, id) {
            *second = 0;
        }
        if *first == 0 || races.ordered(*first, id) {
            *first = id;
        } else if *second == 0 {
            *second = id;
        } else {
            let warp = |id: Id| races.record(id).0;
            let same = |a: &Record, b: &Record| (a.block, a.warp) == (b.block, b.warp);
            // Reads of two warps, better of two blocks, are in a race with every unordered write.
            let (a, b, new) = (warp(*first), warp(*second), warp(id));
            if same(a, b) && !same(a, new) || a.block == b.block && a.block != new.block {
                *second = id;
            }
        }
    }

    /// Notes a write.
    #[inline]
    pub(crate) fn write(&mut self, range: Range<usize>, races: &Races, id: Id) -> Result<(), Conflict> {
        for byte in range.clone() {
            let earlier = [self.write[byte], self.other_write[byte], self.read[byte], self.other_read[byte]];
            if earlier == [0; 4] {
                self.write[byte] = id;
                continue;
            }
            for earlier in earlier {
                if races.race(earlier, id) {
                    return Err((byte - range.start, earlier));
                }
            }
            let [last, _, first, second] = earlier;
            let unordered =
                |earlier: Id| if earlier != 0 && !races.ordered(earlier, id) { earlier } else { 0 };
            // An earlier write that is still unordered is atomic, as this write is.
            let before = unordered(last);
            if before != 0 || unordered(self.other_write[byte]) == 0 {
                self.other_write[byte] = before;
            }
            self.read[byte] = unordered(first);
            self.other_read[byte] = unordered(second);
            self.write[byte] = id;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Trial {
        races: Races,
        cells: Cells,
    }

    impl Trial {
        fn new() -> Self {
            let mut cells = Cells::default();
            cells.fit(1);
            Self { races: Races::default(), cells }
        }

        /// (block, warp, lane), (barriers of the block, of the warp).
        fn access(&mut self, who: (u32, u32, u32), when: (u32, u32), write: bool, atomic: bool) -> bool {
            let record =
                Record { block: who.0, warp: who.1, block_time: when.0, warp_time: when.1, pc: 0, atomic };
            let id = self.races.begin(record).unwrap() + who.2;
            let result = if write {
                self.cells.write(0..1, &self.races, id)
            } else {
                self.cells.read(0..1, &self.races, id)
            };
            result.is_ok()
        }
    }

    #[test]
    fn every_pair_of_threads_is_judged() {
        let threads = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)];
        for first in threads {
            for second in threads {
                for (first_writes, second_writes) in
                    [(true, false), (false, true), (true, true), (false, false)]
                {
                    for (block_time, warp_time) in [(0, 0), (0, 1), (1, 1)] {
                        let mut trial = Trial::new();
                        assert!(trial.access(first, (0, 0), first_writes, false));
                        let ok = trial.access(second, (block_time, warp_time), second_writes, false);
                        let same_block = first.0 == second.0;
                        let ordered = first == second
                            || same_block && (block_time > 0 || first.1 == second.1 && warp_time > 0);
                        assert_eq!(ok, ordered || !(first_writes || second_writes));
                    }
                }
            }
        }
    }

    #[test]
    fn an_earlier_reader_is_not_forgotten() {
        let mut trial = Trial::new();
        assert!(trial.access((0, 0, 0), (0, 0), false, false));
        assert!(trial.access((0, 0, 1), (0, 0), false, false));
        assert!(trial.access((1, 0, 0), (0, 0), false, false));
        // Ordered after block 0's reads, not after block 1's.
        assert!(!trial.access((0, 0, 0), (1, 1), true, false));
    }

    #[test]
    fn atomics_race_with_others_only() {
        let mut trial = Trial::new();
        assert!(trial.access((0, 0, 0), (0, 0), true, true));
        assert!(trial.access((0, 0, 1), (0, 0), true, true));
        assert!(trial.access((1, 0, 1), (0, 0), false, true));
        assert!(trial.access((0, 0, 1), (0, 0), true, true));
        // The thread's own atomic came last, but another's is there too.
        assert!(!trial.access((0, 0, 1), (0, 0), false, false));
    }
}
