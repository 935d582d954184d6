//! Detects races between threads.
//!
//! Two accesses to a byte are a race if at least one writes, not both are atomic, and nothing
//! orders them.
//!
//! [`Clocks`] tracks what orders accesses:
//!
//! - Barriers order their threads.
//! - `bar.warp.sync` orders the lanes of a warp if it joins all lanes that the warp was launched
//!   with.
//! - Mbarriers order arrivals before waits.
//! - Between blocks, fences with atomic operations order accesses, and so do acquiring and
//!   releasing operations.
//!
//! A `bar.warp.sync` of some lanes orders nothing here, and shuffles never do. Where the detector
//! errs, it reports too much. A thread that exits lets others pass a barrier but does not take part
//! in it, so its accesses are not ordered before later ones.
//!
//! Matrix products, bulk copies and copies to tensor memory access shared memory through the
//! asynchronous proxy. They may touch the writes of other instructions only after a
//! `fence.proxy.async` of the writing thread. `cp.async` writes through the generic proxy, too (ISA
//! 9.7.9). If an mbarrier counts such a copy, a thread that has observed the mbarrier's
//! phase executes the fence, because the copying thread does not know when the copy ends.
//!
//! Every byte remembers its last write and its last reads, as in FastTrack (Flanagan and Freund,
//! 2009). An access is a number that encodes the warp's execution of an instruction, and the lane.

use std::ops::Range;

use crate::clock::{Clocks, Member};

/// An access: 32 · index into [`Races`] + lane + 1. 0 means no access.
pub(crate) type Id = u32;

/// An instruction that a warp executed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) block: u32,
    /// The warp in its block.
    pub(crate) warp: u32,
    /// The member's time.
    pub(crate) time: u32,
    pub(crate) pc: u32,
    pub(crate) atomic: bool,
    /// The member that accesses memory for the lanes, if they do not do so themselves.
    pub(crate) agent: Option<u32>,
    /// The access goes through the asynchronous proxy.
    pub(crate) asynchronous: bool,
}

/// All accesses of a launch.
#[derive(Debug, Default)]
pub(crate) struct Races {
    records: Vec<Record>,
    pub(crate) clocks: Clocks,
    /// Some threads of a block may run ahead of others, so all readers of shared memory are kept.
    pub(crate) partial: bool,
}

impl Races {
    /// Makes an empty history. `partial` says whether threads may wait for only part of a block.
    pub(crate) fn new(partial: bool) -> Self {
        Self { partial, ..Self::default() }
    }

    /// Records an access and returns its ID for lane 0. Add the lane to it. `None` when there are
    /// too many.
    pub(crate) fn begin(&mut self, record: Record) -> Option<Id> {
        let id = u32::try_from(self.records.len()).ok()?.checked_mul(32)?.checked_add(1)?;
        id.checked_add(31)?;
        self.records.push(record);
        Some(id)
    }

    /// Returns the instruction of an access, and its lane.
    pub(crate) fn record(&self, id: Id) -> (&Record, u32) {
        (&self.records[(id as usize - 1) / 32], (id - 1) % 32)
    }

    fn member(record: &Record, lane: u32) -> Member {
        record.agent.unwrap_or(record.warp * 32 + lane) as Member
    }

    /// Returns whether an earlier access is ordered before one that happens now.
    ///
    /// Program order and synchronization both count.
    fn ordered(&self, earlier: Id, later: Id) -> bool {
        let ((a, lane_a), (b, lane_b)) = (self.record(earlier), self.record(later));
        let (before, after) = (Self::member(a, lane_a), Self::member(b, lane_b));
        if a.block != b.block {
            return self.clocks.known(after).time_elsewhere(a.block, before) > a.time;
        }
        let same = before == after && before < self.clocks.threads;
        same || earlier == later || self.clocks.known(after).time(before) > a.time
    }

    /// Returns whether an earlier access races with one that happens now.
    pub(crate) fn race(&self, earlier: Id, later: Id) -> bool {
        let atomic = |id: Id| self.record(id).0.atomic;
        earlier != 0 && !self.ordered(earlier, later) && !(atomic(earlier) && atomic(later))
    }

    /// Returns whether an asynchronous access touches a write of another proxy without a fence.
    ///
    /// `elsewhere` means global memory, for which no fence is supported. Mbarrier initializations
    /// have a fence of their own.
    pub(crate) fn unfenced(&self, write: Id, later: Id, elsewhere: bool, barrier: bool) -> bool {
        let ((a, lane_a), (b, lane_b)) = (self.record(write), self.record(later));
        if a.asynchronous {
            return false;
        }
        let member = Self::member(b, lane_b);
        let fenced = match a.agent {
            Some(agent) => self.clocks.observed_and_fenced((agent as Member, a.time), (b.warp, member)),
            None => self.clocks.fenced((a.warp, lane_a), a.time, member, barrier),
        };
        elsewhere || !fenced
    }
}

/// The threads that accessed the bytes of a buffer.
///
/// Two reads by different threads suffice. A write races with neither only if each is ordered
/// before it or is its own thread's. A read is dropped in two cases. Either a later read is ordered
/// after it, or the two kept reads belong to different warps. Then one of them races with every
/// write that the dropped read would race with. (The third of three lanes of one warp may be
/// dropped because a barrier orders all lanes of a warp or none.)
///
/// This holds for barriers of whole blocks. With other barriers, all reads of shared memory are
/// kept. Two writes are kept where atomic writes meet, because they do not race with each other.
///
/// Neighbouring bytes mostly have the same accesses, so their next state is computed once.
#[derive(Debug, Default)]
pub(crate) struct Cells {
    write: Vec<Id>,
    other_write: Vec<Id>,
    read: Vec<Id>,
    other_read: Vec<Id>,
    /// Further reads of a byte, if all reads are kept: an index into `sets`.
    more_reads: Vec<u32>,
    sets: ReadSets,
}

/// Sets of reads. The first one is empty. Each counts the bytes that have it, and the last byte to
/// leave frees it.
#[derive(Debug, Default)]
struct ReadSets {
    reads: Vec<Vec<Id>>,
    bytes: Vec<usize>,
    free: Vec<u32>,
}

impl ReadSets {
    fn get(&self, set: u32) -> &[Id] {
        self.reads.get(set as usize).map_or(&[], Vec::as_slice)
    }

    /// Adds a set that no byte has yet.
    fn add(&mut self, reads: Vec<Id>) -> u32 {
        if reads.is_empty() {
            return 0;
        }
        if self.reads.is_empty() {
            self.reads.push(Vec::new());
            self.bytes.push(0);
        }
        if let Some(set) = self.free.pop() {
            self.reads[set as usize] = reads;
            return set;
        }
        self.reads.push(reads);
        self.bytes.push(0);
        u32::try_from(self.reads.len() - 1).expect("fewer sets than bytes")
    }

    /// Notes that a byte's set changes.
    #[inline]
    fn replace(&mut self, before: u32, after: u32) {
        if before == after {
            return;
        }
        if after != 0 {
            self.bytes[after as usize] += 1;
        }
        if before != 0 {
            self.bytes[before as usize] -= 1;
            if self.bytes[before as usize] == 0 {
                self.reads[before as usize] = Vec::new();
                self.free.push(before);
            }
        }
    }
}

/// The accesses of a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cell {
    write: Id,
    other_write: Id,
    read: Id,
    other_read: Id,
    more_reads: u32,
}

/// The index of the byte in the access, and the earlier access.
pub(crate) type Conflict = (usize, Id);

impl Cells {
    /// Allocates the cells on first use.
    #[inline]
    pub(crate) fn fit(&mut self, len: usize) {
        if self.write.len() != len {
            // Fresh zeroed vectors: untouched pages cost nothing.
            *self = Self {
                write: vec![0; len],
                other_write: vec![0; len],
                read: vec![0; len],
                other_read: vec![0; len],
                more_reads: vec![0; len],
                sets: ReadSets::default(),
            };
        }
    }

    #[inline]
    fn cell(&self, byte: usize) -> Cell {
        Cell {
            write: self.write[byte],
            other_write: self.other_write[byte],
            read: self.read[byte],
            other_read: self.other_read[byte],
            more_reads: self.more_reads[byte],
        }
    }

    /// Replaces the accesses of each byte by those after an access, which `after` computes.
    #[inline]
    fn update(
        &mut self,
        range: Range<usize>,
        after: impl Fn(&mut ReadSets, Cell) -> Result<Cell, Id>,
    ) -> Result<(), Conflict> {
        let mut last = None;
        for byte in range.clone() {
            let before = self.cell(byte);
            let after = match last {
                Some((same, after)) if same == before => after,
                _ => after(&mut self.sets, before).map_err(|earlier| (byte - range.start, earlier))?,
            };
            last = Some((before, after));
            self.sets.replace(before.more_reads, after.more_reads);
            self.write[byte] = after.write;
            self.other_write[byte] = after.other_write;
            self.read[byte] = after.read;
            self.other_read[byte] = after.other_read;
            self.more_reads[byte] = after.more_reads;
        }
        Ok(())
    }

    /// Returns the first byte whose write another proxy made and did not fence, and that write.
    pub(crate) fn unfenced(
        &self,
        range: Range<usize>,
        races: &Races,
        id: Id,
        elsewhere: bool,
    ) -> Option<Conflict> {
        let mut fine = 0;
        for byte in range.clone() {
            for write in [self.write[byte], self.other_write[byte]] {
                if write != 0 && write != fine {
                    if races.unfenced(write, id, elsewhere, false) {
                        return Some((byte - range.start, write));
                    }
                    fine = write;
                }
            }
        }
        None
    }

    /// Returns the first byte with an earlier access of a kind that `found` returns true for.
    ///
    /// A read looks at writes only.
    pub(crate) fn find(
        &self,
        range: Range<usize>,
        writes: bool,
        found: impl Fn(Id) -> bool,
    ) -> Option<Conflict> {
        let mut fine = 0;
        for byte in range.clone() {
            let reads = if writes { [self.read[byte], self.other_read[byte]] } else { [0; 2] };
            let more = if writes { self.sets.get(self.more_reads[byte]) } else { &[] };
            let known = [self.write[byte], self.other_write[byte]].into_iter().chain(reads);
            for earlier in known.chain(more.iter().copied()) {
                if earlier != 0 && earlier != fine {
                    if found(earlier) {
                        return Some((byte - range.start, earlier));
                    }
                    fine = earlier;
                }
            }
        }
        None
    }

    /// Records a read. Keeps all reads, or only the two that barriers of whole blocks need.
    #[inline]
    pub(crate) fn read(
        &mut self,
        range: Range<usize>,
        races: &Races,
        id: Id,
        all: bool,
    ) -> Result<(), Conflict> {
        let fresh = |ids: &[Id]| ids.iter().fold(0, |all, id| all | id) == 0;
        if fresh(&self.write[range.clone()]) && fresh(&self.read[range.clone()]) {
            self.read[range].fill(id);
            return Ok(());
        }
        self.update(range, |sets, cell| {
            let racing = [cell.write, cell.other_write].into_iter().find(|&write| races.race(write, id));
            if let Some(write) = racing {
                return Err(write);
            }
            Ok(if all && cell.other_read != 0 {
                add_read(sets, cell, races, id)
            } else {
                note_read(cell, races, id)
            })
        })
    }

    /// Records a write.
    #[inline]
    pub(crate) fn write(&mut self, range: Range<usize>, races: &Races, id: Id) -> Result<(), Conflict> {
        self.update(range, |sets, cell| {
            let Cell { write, other_write, read, other_read, more_reads } = cell;
            if [write, other_write, read, other_read] == [0; 4] {
                return Ok(Cell { write: id, ..cell });
            }
            let more = sets.get(more_reads);
            let mut all = [write, other_write, read, other_read].into_iter().chain(more.iter().copied());
            if let Some(earlier) = all.find(|&earlier| races.race(earlier, id)) {
                return Err(earlier);
            }
            let unordered =
                |earlier: Id| if earlier != 0 && !races.ordered(earlier, id) { earlier } else { 0 };
            let more = more.iter().copied().filter(|&earlier| !races.ordered(earlier, id)).collect();
            // An earlier write that is still unordered is atomic, as this write is.
            let before = unordered(write);
            let keeps = before == 0 && unordered(other_write) != 0;
            Ok(Cell {
                write: id,
                other_write: if keeps { other_write } else { before },
                read: unordered(read),
                other_read: unordered(other_read),
                more_reads: sets.add(more),
            })
        })
    }
}

/// Records a read of a byte with two others, and keeps all reads that are not ordered before it.
fn add_read(sets: &mut ReadSets, cell: Cell, races: &Races, id: Id) -> Cell {
    let member = |id: Id| Races::member(races.record(id).0, races.record(id).1);
    let before = |earlier: Id| races.ordered(earlier, id) || member(earlier) == member(id);
    let earlier = sets.get(cell.more_reads).iter().copied().chain([cell.read, cell.other_read]);
    let mut reads: Vec<Id> = earlier.filter(|&read| read != 0 && !before(read)).collect();
    reads.push(id);
    let read = reads.pop().unwrap_or(0);
    let other_read = reads.pop().unwrap_or(0);
    Cell { read, other_read, more_reads: sets.add(reads), ..cell }
}

fn note_read(cell: Cell, races: &Races, id: Id) -> Cell {
    let [mut first, mut second] = [cell.read, cell.other_read];
    if second != 0 && races.ordered(second, id) {
        second = 0;
    }
    if first == 0 || races.ordered(first, id) {
        first = id;
    } else if second == 0 {
        second = id;
    } else {
        let warp = |id: Id| races.record(id).0;
        let same = |a: &Record, b: &Record| (a.block, a.warp) == (b.block, b.warp);
        // Two reads by different warps, or better by different blocks, race with every unordered
        // write.
        let (a, b, new) = (warp(first), warp(second), warp(id));
        if same(a, b) && !same(a, new) || a.block == b.block && a.block != new.block {
            second = id;
        }
    }
    Cell { read: first, other_read: second, ..cell }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Trial {
        races: Races,
        cells: Cells,
    }

    impl Trial {
        /// Makes a block of two warps.
        fn new() -> Self {
            let mut races = Races::default();
            races.clocks.start_block(0, 64);
            let mut cells = Cells::default();
            cells.fit(1);
            Self { races, cells }
        }

        /// Records an access of a block, warp and lane.
        fn access(&mut self, (block, warp, lane): (u32, u32, u32), write: bool, atomic: bool) -> bool {
            let time = self.races.clocks.time(warp);
            let record = Record { block, warp, time, pc: 0, atomic, agent: None, asynchronous: false };
            let id = self.races.begin(record).unwrap() + lane;
            let result = if write {
                self.cells.write(0..1, &self.races, id)
            } else {
                self.cells.read(0..1, &self.races, id, self.races.partial)
            };
            result.is_ok()
        }
    }

    #[test]
    fn every_pair_of_threads_is_checked() {
        let threads = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)];
        let barriers: [&[(u32, u32)]; 3] = [&[], &[(0, u32::MAX)], &[(0, u32::MAX), (1, u32::MAX)]];
        for first in threads {
            for second in threads {
                for (first_writes, second_writes) in
                    [(true, false), (false, true), (true, true), (false, false)]
                {
                    for barrier in barriers {
                        let mut trial = Trial::new();
                        trial.races.clocks.block = first.0;
                        assert!(trial.access(first, first_writes, false));
                        if first.0 == 0 {
                            trial.races.clocks.join(barrier);
                        }
                        let ok = trial.access(second, second_writes, false);
                        let within = |warp: u32| barrier.iter().any(|&(joined, _)| joined == warp);
                        let joined = first.0 == 0 && within(first.1) && within(second.1);
                        let ordered = first.0 == second.0 && (first == second || joined);
                        assert_eq!(ok, ordered || !(first_writes || second_writes));
                    }
                }
            }
        }
    }

    #[test]
    fn an_earlier_reader_is_not_forgotten() {
        let mut trial = Trial::new();
        assert!(trial.access((0, 0, 0), false, false));
        assert!(trial.access((0, 0, 1), false, false));
        assert!(trial.access((1, 0, 0), false, false));
        // Ordered after block 0's reads but not after block 1's.
        trial.races.clocks.join(&[(0, u32::MAX), (1, u32::MAX)]);
        assert!(!trial.access((0, 0, 0), true, false));
    }

    #[test]
    fn after_partial_barriers_all_readers_are_tracked() {
        for late in 0..5 {
            let mut trial = Trial::new();
            trial.races.partial = true;
            for lane in 0..5 {
                assert!(trial.access((0, 0, lane), false, false));
            }
            let mut said = crate::clock::Known::default();
            trial.races.clocks.release(0, 31 & !(1 << late), &mut said);
            trial.races.clocks.acquire(1, 1, &said);
            assert!(!trial.access((0, 1, 0), true, false));
            trial.races.clocks.release(0, 1 << late, &mut said);
            trial.races.clocks.acquire(1, 1, &said);
            assert!(trial.access((0, 1, 0), true, false));
        }
    }

    #[test]
    fn atomics_do_not_race_with_atomics() {
        let mut trial = Trial::new();
        assert!(trial.access((0, 0, 0), true, true));
        assert!(trial.access((0, 0, 1), true, true));
        assert!(trial.access((1, 0, 1), false, true));
        assert!(trial.access((0, 0, 1), true, true));
        // The thread's own atomic came last, but another thread's is recorded too.
        assert!(!trial.access((0, 0, 1), false, false));
    }
}
