//! Instructions of a warp for tensor memory (ISA 9.7.16, `tcgen05.alloc`, `.ld`, `.st` and
//! `.wait`).
//!
//! A warp reaches the lanes 32·(w mod 4) to 32·(w mod 4) + 31. Loads and stores happen at their
//! instruction. Until the warp has waited, the destinations of loads are inaccessible, and every
//! other access to the words races. Accesses of other threads also need
//! `tcgen05.fence::before_thread_sync` before the synchronization, and
//! `tcgen05.fence::after_thread_sync` after it.

use super::grid::Grid;
use super::under_way::{Moves, Tensors};
use super::warp::Warp;
use crate::clock::{Clocks, Known, Member};
use crate::fault::{Fault, FaultKind, Step, Trap, trap};
use crate::lanes::LANES;
use crate::launch::Schedule;
use crate::program::{Address, Manner, Program, Slot, Space, TensorAction, TensorAddress};
use crate::race::{Id, Record};
use crate::semantics::Fragment;
use crate::tensor::{COLUMNS, LANES as TENSOR_LANES, TensorMemory, UNIT};

/// An access to tensor memory, for the race detector.
pub(super) struct By {
    pub(super) id: Id,
    /// The times that count after `tcgen05.fence::after_thread_sync`.
    pub(super) seen: Known,
    /// Whether another thread's access needs fences.
    pub(super) fenced: bool,
}

impl Moves {
    /// Returns the member that acts for them.
    fn member(&mut self, clocks: &mut Clocks) -> Member {
        *self.member.get_or_insert_with(|| {
            let member = clocks.add_member();
            clocks.add_member();
            member
        })
    }

    /// Makes instructions that the warp has waited for known to lanes: to these lanes themselves,
    /// or by their fence also to threads that they synchronize with.
    fn tell(&self, clocks: &mut Clocks, warp: u32, lanes: u32, fence: bool) {
        if let Some(member) = self.member {
            let mut said = Known::default();
            said.learn(member + usize::from(fence), self.waited);
            clocks.acquire(warp, lanes, &said);
        }
    }
}

impl Tensors {
    /// `tcgen05.fence::before_thread_sync` of these lanes.
    pub(super) fn fence(&self, clocks: &mut Clocks, warp: u32, lanes: u32) {
        self.loads.tell(clocks, warp, lanes, true);
        self.stores.tell(clocks, warp, lanes, true);
    }
}

impl Grid<'_> {
    /// Checks and records an access to lanes of a column of a block's tensor memory.
    pub(super) fn touch(
        &mut self,
        lane: u32,
        rank: u32,
        (column, lanes): (u32, std::ops::Range<u32>),
        writes: bool,
        by: Option<&By>,
    ) -> Step {
        let memory = &mut self.tensors[rank as usize];
        if column >= COLUMNS || lanes.end > TENSOR_LANES || !memory.has(column) {
            return trap(lane, FaultKind::OutOfBounds(TensorMemory::access(column, lanes.start)));
        }
        let (Some(races), Some(by)) = (&self.races, by) else { return Ok(()) };
        memory.fit();
        let range = TensorMemory::range(column, lanes.clone());
        let (own, _) = races.record(by.id);
        let unfenced = |earlier: Id| {
            let (record, _) = races.record(earlier);
            let Some(member) = record.agent.filter(|_| record.agent != own.agent) else { return false };
            // A warp's own loads and stores need only a wait.
            let same = record.warp == own.warp && !record.asynchronous;
            !same && by.seen.time(member as Member + 1) <= record.time
        };
        let missing = if by.fenced { memory.cells.find(range.clone(), writes, unfenced) } else { None };
        let touched = if writes {
            memory.cells.write(range, races, by.id)
        } else {
            memory.cells.read(range, races, by.id, races.partial)
        };
        let access = |at: usize| TensorMemory::access(column, lanes.start + at as u32);
        if let Err((at, earlier)) = touched {
            let ((block, thread), (line, instruction)) = self.earlier(earlier);
            return trap(lane, FaultKind::Race { access: access(at), block, thread, line, instruction });
        }
        if let Some((at, earlier)) = missing {
            let ((_, thread), (line, instruction)) = self.earlier(earlier);
            return trap(lane, FaultKind::UnfencedTensor { access: access(at), thread, line, instruction });
        }
        Ok(())
    }

    /// Checks at the end of a block that nothing is left in tensor memory.
    pub(super) fn leave_tensors(&mut self) -> Result<(), Fault> {
        if let Some(races) = &self.races {
            let awaited = |member: Member, number: u32| races.clocks.knows(member, number);
            let forgotten = self.pipes.iter().find_map(|pipe| {
                let (number, pc) = pipe.last?;
                (!awaited(pipe.member, number)).then_some((pipe.warp, pipe.lane, pc))
            });
            if let Some((warp, lane, pc)) = forgotten {
                self.pc = pc;
                return Err(self.fault(warp, Trap { lane, kind: FaultKind::ProductNeverAwaited.into() }));
            }
        }
        if self.half.is_some() || self.tensors.iter().any(|memory| !memory.allocations.is_empty()) {
            let problem = "columns are still allocated when the block ends";
            return Err(self.fault(0, Trap { lane: 0, kind: FaultKind::TensorMemory(problem).into() }));
        }
        Ok(())
    }
}

impl Warp {
    /// An instruction of all lanes.
    pub(super) fn tensor(&mut self, grid: &mut Grid, active: u32, action: &TensorAction) -> Step {
        if active != u32::MAX {
            return trap(active.trailing_zeros(), FaultKind::IncompleteWarp { missing: !active });
        }
        let program = &*grid.kernel.program;
        match *action {
            TensorAction::Allocate { to, columns, pair } => self.allocate(grid, to, columns, pair),
            TensorAction::Relinquish => {
                grid.tensors[self.rank as usize].relinquished = true;
                Ok(())
            }
            TensorAction::Free { at, columns, pair } => {
                let [at, columns] = [self.in_tensor(program, at)?, self.count(program, columns)?];
                self.free(grid, at, columns, pair)
            }
            TensorAction::Load { shape, ref to, from } => self.load_tensor(grid, shape, to, from),
            TensorAction::Store { shape, to, ref from } => self.store_tensor(grid, shape, to, from),
            TensorAction::AwaitLoads => {
                self.tensors.pending.clear();
                self.tensors.loads.waited = self.tensors.loads.issued;
                if let Some(races) = &mut grid.races {
                    self.tensors.loads.tell(&mut races.clocks, self.index, active, false);
                }
                Ok(())
            }
            TensorAction::AwaitStores => {
                self.tensors.stores.waited = self.tensors.stores.issued;
                if let Some(races) = &mut grid.races {
                    self.tensors.stores.tell(&mut races.clocks, self.index, active, false);
                }
                Ok(())
            }
        }
    }

    /// Returns an operand that all lanes agree on.
    fn count(&self, program: &Program, slot: Slot) -> Step<u32> {
        let words = self.registers.word(program, slot, u32::MAX)?;
        match words.iter().position(|word| *word != words[0]) {
            Some(lane) => trap(lane as u32, FaultKind::NotUniform("an operand for tensor memory")),
            None => Ok(words[0]),
        }
    }

    /// Returns an address that all lanes agree on.
    fn in_tensor(&self, program: &Program, address: TensorAddress) -> Step<u32> {
        Ok(self.count(program, address.base)?.wrapping_add(address.offset))
    }

    /// `tcgen05.alloc`. The schedule chooses the columns.
    ///
    /// The warps of both blocks of a pair get the same columns. The assembler's code for it writes
    /// to the other block's shared memory, so a barrier of the cluster must come first.
    fn allocate(&mut self, grid: &mut Grid, to: Address, columns: Slot, pair: bool) -> Step {
        let misused = |problem| trap(0, FaultKind::TensorMemory(problem));
        let columns = self.count(&grid.kernel.program, columns)?;
        if pair && grid.cluster.phase == 0 {
            return misused("the other block of the pair may not have started");
        }
        if !columns.is_power_of_two() || !(UNIT..=COLUMNS).contains(&columns) {
            return misused("the number of columns is not a power of two from 32 to 512");
        }
        let own = &mut grid.tensors[self.rank as usize];
        if own.relinquished {
            return misused("the block has relinquished its permit to allocate");
        }
        if *own.allocates.get_or_insert(self.index) != self.index {
            return misused("several warps of the block allocate columns");
        }
        let first = match grid.half.take_if(|&mut (rank, ..)| pair && rank == self.rank ^ 1) {
            Some((_, first, count)) if count == columns => first,
            Some(_) => return misused("the blocks of a pair allocate different numbers of columns"),
            None => {
                let mut places = own.places(columns);
                if pair {
                    if grid.half.is_some() {
                        return misused("a block of a pair allocates twice before the other one");
                    }
                    let Some(other) = grid.tensors.get(self.rank as usize ^ 1) else {
                        return misused("the block is not in a pair");
                    };
                    let others = other.places(columns);
                    places.retain(|first| others.contains(first));
                }
                let first = match grid.launch.schedule {
                    _ if places.is_empty() => return misused("not enough columns are free"),
                    Schedule::LowestFirst => places[0],
                    Schedule::HighestFirst => places[places.len() - 1],
                    Schedule::Random(_) => places[grid.random.below(places.len() as u32) as usize],
                };
                if pair {
                    grid.half = Some((self.rank, first, columns));
                }
                first
            }
        };
        grid.tensors[self.rank as usize].allocate(first, columns);
        self.check_address(grid, u32::MAX, to)?;
        let access = self.begin_access(grid, u32::MAX, Manner::Weak)?;
        let address = self.address(to, 0);
        let races = grid.races.as_ref().zip(access);
        let (memory, at) = grid.shared.locate(address, 4).or_else(|kind| trap(0, kind))?;
        match memory.store(at..at + 4, races) {
            Ok(bytes) => bytes.copy_from_slice(&first.to_le_bytes()),
            Err(wrong) => return super::grid::wrongly(grid, 0, Space::Shared, address, 4, wrong),
        }
        Ok(())
    }

    /// `tcgen05.dealloc`. All accesses to the columns must be ordered before it.
    fn free(&mut self, grid: &mut Grid, at: u32, columns: u32, pair: bool) -> Step {
        let rank = self.rank as usize;
        let memory = &mut grid.tensors[rank];
        if *memory.frees.get_or_insert(self.index) != self.index {
            return trap(0, FaultKind::TensorMemory("several warps of the block free columns"));
        }
        let Some(index) = memory.allocations.iter().position(|&of| of == (at, columns)) else {
            return trap(0, FaultKind::TensorMemory("these columns were not allocated together"));
        };
        if pair && grid.half.is_some() {
            return trap(0, FaultKind::TensorMemory("the other block of the pair has not allocated them"));
        }
        let by = self.begin_move(grid, true, false)?;
        for column in at..at + columns {
            grid.touch(0, self.rank, (column, 0..TENSOR_LANES), true, by.as_ref())?;
        }
        grid.tensors[rank].allocations.remove(index);
        Ok(())
    }

    /// Records a load or a store of all lanes.
    fn begin_move(&mut self, grid: &mut Grid, stores: bool, fenced: bool) -> Step<Option<By>> {
        let moves = if stores { &mut self.tensors.stores } else { &mut self.tensors.loads };
        let number = moves.issued;
        moves.issued += 1;
        let Some(races) = &mut grid.races else { return Ok(None) };
        let member = moves.member(&mut races.clocks);
        let known = races.clocks.common(self.index, u32::MAX);
        races.clocks.instruct(member, known);
        let seen = races.clocks.seen(self.index, u32::MAX);
        let record = Record {
            block: grid.number,
            warp: self.index,
            time: number,
            pc: grid.pc,
            atomic: false,
            agent: Some(member as u32),
            asynchronous: false,
        };
        let id = grid.begin_record(0, record)?.expect("races are recorded");
        Ok(Some(By { id, seen, fenced: fenced && grid.launch.tensor_fences }))
    }

    /// Checks the address of a warp's fragment, and returns its lane and its column.
    fn fragment(&self, program: &Program, shape: Fragment, at: TensorAddress) -> Step<(u32, u32)> {
        let at = self.in_tensor(program, at)?;
        let (lane, column) = (at >> 16, at & 0xffff);
        let first = self.in_block % 4 * LANES as u32;
        if lane < first || lane + shape.lanes() > first + LANES as u32 || !lane.is_multiple_of(16) {
            return trap(0, FaultKind::TensorMemory("the warp cannot reach these lanes"));
        }
        Ok((lane, column))
    }

    /// Checks and records an access to all words of a fragment.
    fn touch_fragment(
        &mut self,
        grid: &mut Grid,
        shape: Fragment,
        registers: usize,
        (lane, column): (u32, u32),
        stores: bool,
    ) -> Step {
        let by = self.begin_move(grid, stores, true)?;
        let (_, last) = shape.place(registers as u32 - 1, LANES as u32 - 1);
        for column in column..=column + last {
            grid.touch(0, self.rank, (column, lane..lane + shape.lanes()), stores, by.as_ref())?;
        }
        Ok(())
    }

    fn load_tensor(&mut self, grid: &mut Grid, shape: Fragment, to: &[Slot], from: TensorAddress) -> Step {
        let (lane, column) = self.fragment(&grid.kernel.program, shape, from)?;
        self.touch_fragment(grid, shape, to.len(), (lane, column), false)?;
        for (register, &slot) in to.iter().enumerate() {
            let mut words = [0; LANES];
            for (thread, word) in words.iter_mut().enumerate() {
                let (beside, behind) = shape.place(register as u32, thread as u32);
                let (lane, column) = (lane + beside, column + behind);
                let Some(found) = grid.tensors[self.rank as usize].word(column, lane) else {
                    let access = TensorMemory::access(column, lane);
                    return trap(thread as u32, FaultKind::Uninitialised(access));
                };
                *word = found;
            }
            self.registers.set_word(slot, u32::MAX, &words);
            self.tensors.pending.insert(slot);
        }
        Ok(())
    }

    fn store_tensor(&mut self, grid: &mut Grid, shape: Fragment, to: TensorAddress, from: &[Slot]) -> Step {
        let (lane, column) = self.fragment(&grid.kernel.program, shape, to)?;
        self.touch_fragment(grid, shape, from.len(), (lane, column), true)?;
        for (register, &slot) in from.iter().enumerate() {
            let words = self.registers.word(&grid.kernel.program, slot, u32::MAX)?;
            for (thread, &word) in words.iter().enumerate() {
                let (beside, behind) = shape.place(register as u32, thread as u32);
                grid.tensors[self.rank as usize].set(column + behind, lane + beside, word);
            }
        }
        Ok(())
    }
}
