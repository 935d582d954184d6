//! Executes one instruction for a group of lanes, and moves the lanes to their next instruction.

use super::grid::Grid;
use super::together::Shuffled;
use super::warp::{Group, Next, State, Warp};
use crate::fault::{FaultKind, Step, trap};
use crate::launch::SKIPPED;
use crate::program::{Fence, Instruction, NONE, Op, Program, Slot};

impl Warp {
    /// Executes an instruction for a group that has been removed from `groups`.
    #[inline(always)]
    pub(super) fn step(&mut self, grid: &mut Grid, group: Group) -> Step<Next> {
        let kernel = grid.kernel;
        let program = &*kernel.program;
        let Group { pc, lanes, .. } = group;
        grid.pc = pc;
        let Instruction { guard, op, shares } = &program.code[pc as usize];
        let active = match *guard {
            None => lanes,
            Some(guard) => lanes & self.registers.predicate(program, guard, lanes)?,
        };
        if !shares.is_empty() && active != 0 {
            self.share_words(program, active, shares)?;
        }
        if let Op::Shuffle { members, .. }
        | Op::Vote { members, .. }
        | Op::Reduce { members, .. }
        | Op::Multiply { members, .. }
        | Op::MultiplyScaled { members, .. }
        | Op::LoadMatrices { members, .. }
        | Op::StoreMatrices { members, .. }
        | Op::WarpGroup { members, .. }
        | Op::Tensor { members, .. }
        | Op::Elect { members, .. }
        | Op::ClusterBarrier { members, .. }
        | Op::WarpBarrier { members } = *op
        {
            return self.synchronize(grid, group, active, members);
        }
        if let Op::Barrier { number, count, aligned } = *op {
            return self.arrive(grid, group, active, (number, count, aligned));
        }
        grid.count(pc, lanes, active)?;
        if active == 0 {
            return Ok(Next::Fall);
        }
        match *op {
            Op::Compute { shape, to, from } => self.compute(program, active, shape, to, from)?,
            Op::Compare { shape, to, other, from, combined } => {
                self.compare(program, active, shape, [to, other], from, combined)?;
            }
            Op::SelectWord { to, from, by } => self.select_word(program, active, to, from, by)?,
            Op::SelectLong { to, from, by } => self.select_long(program, active, to, from, by)?,
            Op::Predicate { logic, to, from } => self.logic(program, active, logic, to, from)?,
            Op::Carry { subtract, takes, sets, to, from } => {
                self.carry(program, active, [subtract, takes, sets], to, from)?;
            }
            Op::Pack { to, ref from } => self.pack(program, active, to, from)?,
            Op::Unpack { ref to, from } => self.unpack(program, active, to, from)?,
            Op::Parameter { ref to, at, bytes, signed } => {
                self.load_parameter(grid, active, to, at, bytes, signed);
            }
            Op::Load { ref to, from, bytes, signed, manner } => {
                self.load(grid, active, to, from, (bytes, signed, manner))?;
            }
            Op::Store { to, ref from, bytes, manner } => {
                self.store(grid, active, to, from, (bytes, manner))?
            }
            Op::Atomic { update, bits, orders, to, at, from } => {
                self.atomic(grid, active, (update, bits, orders), to, at, from)?;
            }
            Op::Copy { to, from, bytes, read } => self.copy(grid, active, to, from, (bytes, read))?,
            Op::CloseGroup => self.copies.close_group(active),
            Op::AwaitCopies { but } => self.await_copies(grid, active, but)?,
            Op::ArriveAfterCopies { at, counted } => {
                self.arrive_after_copies(grid, active, at, counted)?;
            }
            Op::BulkCopy { to, ref from, at, blocks } => {
                self.bulk_copy(grid, active, [to, at], from, blocks)?;
            }
            Op::Mbarrier { action, at } => {
                if self.mbarrier(grid, active, action, at)? {
                    return Ok(Next::Spin);
                }
            }
            Op::Pipe { ref action, pair } => self.issue(grid, active, action, pair)?,
            Op::Fence(fence) => self.fence(grid, active, fence),
            Op::MapAddress { to, from, rank } => {
                self.map_address(program, active, grid.launch.cluster, [to, from, rank])?;
            }
            Op::Approximate { flush, to, from } => {
                self.approximate(program, active, &grid.launch.approximation, flush, [to, from])?;
            }
            Op::Branch { target } => return Ok(self.branch(group, active, target)),
            Op::Table { index, ref targets } => return self.table(program, group, active, index, targets),
            Op::Exit => {
                self.leave_copies(grid, active)?;
                self.leave_products(grid, active)?;
                let next = self.exit(group, active);
                self.leave_cluster(grid);
                return Ok(next);
            }
            Op::Trap => return trap(active.trailing_zeros(), FaultKind::Trap),
            Op::Nothing => {}
            Op::Shuffle { .. }
            | Op::Vote { .. }
            | Op::Reduce { .. }
            | Op::Multiply { .. }
            | Op::MultiplyScaled { .. }
            | Op::LoadMatrices { .. }
            | Op::StoreMatrices { .. }
            | Op::WarpGroup { .. }
            | Op::Tensor { .. }
            | Op::Elect { .. }
            | Op::WarpBarrier { .. }
            | Op::ClusterBarrier { .. }
            | Op::Barrier { .. } => {
                unreachable!("handled above")
            }
        }
        Ok(Next::Fall)
    }

    fn ready(&mut self, pc: u32, lanes: u32) {
        if lanes != 0 {
            self.groups.push(Group { pc, lanes, state: State::Ready });
        }
    }

    fn branch(&mut self, group: Group, taken: u32, target: u32) -> Next {
        if taken == group.lanes {
            return Next::Jump(target);
        }
        self.ready(target, taken);
        self.ready(group.pc + 1, group.lanes & !taken);
        Next::Dissolved
    }

    /// `brx.idx` (ISA 9.7.12). An index beyond the list is undefined, and a fault here.
    fn table(
        &mut self,
        program: &Program,
        group: Group,
        active: u32,
        index: Slot,
        targets: &[u32],
    ) -> Step<Next> {
        let indices = *self.registers.word(program, index, active)?;
        for lane in (0..32).filter(|lane| active >> lane & 1 == 1) {
            let index = indices[lane as usize];
            let Some(&target) = targets.get(index as usize) else {
                return trap(lane, FaultKind::JumpTable { index, entries: targets.len() });
            };
            match self.groups.iter_mut().find(|other| other.pc == target && other.state == State::Ready) {
                Some(other) => other.lanes |= 1 << lane,
                None => self.ready(target, 1 << lane),
            }
        }
        self.ready(group.pc + 1, group.lanes & !active);
        Ok(Next::Dissolved)
    }

    /// Exits lanes. Waiting lanes do not wait for exited lanes of their masks.
    fn exit(&mut self, group: Group, active: u32) -> Next {
        self.alive &= !active;
        self.ready(group.pc + 1, group.lanes & !active);
        for group in &mut self.groups {
            if group.state == State::Waiting {
                group.state = State::Ready;
            }
        }
        Next::Dissolved
    }

    /// Executes a `.sync` instruction for the lanes whose member mask is complete. Other lanes
    /// wait.
    fn synchronize(&mut self, grid: &mut Grid, group: Group, active: u32, members: Slot) -> Step<Next> {
        let program = &*grid.kernel.program;
        let Group { pc, lanes, .. } = group;
        let masks = *self.registers.word(program, members, active)?;
        let mut left = active;
        let (mut waiting, mut elsewhere) = (0, 0);
        while left != 0 {
            let lane = left.trailing_zeros();
            let mask = masks[lane as usize];
            let same = (0..32).filter(|&lane| left >> lane & 1 == 1 && masks[lane as usize] == mask);
            let same = same.fold(0, |same, lane| same | 1u32 << lane);
            left &= !same;
            if same & !mask != 0 {
                return trap((same & !mask).trailing_zeros(), FaultKind::NotAMember { mask });
            }
            if mask & self.alive != same {
                waiting |= same;
                continue;
            }
            grid.count(pc, same, same)?;
            if !self.together(grid, same, &program.code[pc as usize].op)? {
                let state = State::Spinning(grid.events);
                self.groups.push(Group { pc, lanes: same, state });
                elsewhere |= same;
            }
        }
        if active != lanes {
            grid.seen[pc as usize] |= SKIPPED;
        }
        if waiting | elsewhere == 0 {
            return Ok(Next::Fall);
        }
        if waiting != 0 {
            self.groups.push(Group { pc, lanes: waiting, state: State::Waiting });
        }
        self.ready(pc + 1, lanes & !waiting & !elsewhere);
        Ok(Next::Dissolved)
    }

    /// Executes a `.sync` instruction for converged lanes. Returns false if they must wait for
    /// other warps.
    fn together(&mut self, grid: &mut Grid, active: u32, op: &Op) -> Step<bool> {
        let kernel = grid.kernel;
        let program = &*kernel.program;
        match *op {
            Op::Shuffle { mode, to, valid, value, by, clamp, .. } => {
                self.shuffle(program, active, mode, &Shuffled { to, valid, value, by, clamp })
            }
            Op::Vote { mode, to, from, .. } => self.vote(program, active, mode, to, from),
            Op::Elect { to, elected, members } => self.elect(grid, active, [to, elected, members]),
            Op::Tensor { ref action, .. } => self.tensor(grid, active, action),
            Op::Reduce { reduction, to, from, .. } => self.reduce(program, active, reduction, [to, from]),
            Op::Multiply { ref matrices, .. } => self.multiply(program, active, matrices),
            Op::MultiplyScaled { ref matrices, .. } => self.multiply_scaled(program, active, matrices),
            Op::LoadMatrices { ref to, from, transposed, .. } => {
                self.load_matrices(grid, active, to, from, transposed)
            }
            Op::StoreMatrices { to, ref from, transposed, .. } => {
                self.store_matrices(grid, active, to, from, transposed)
            }
            Op::WarpGroup { ref action, .. } => return self.warp_group(grid, active, action),
            Op::ClusterBarrier { waits: true, .. } => return self.wait_in_cluster(grid, active),
            Op::ClusterBarrier { waits: false, .. } => self.arrive_in_cluster(grid, active),
            _ => {
                // `bar.warp.sync`: the race detector tracks only barriers of all lanes.
                if let (Some(races), true) = (&mut grid.races, active == self.launched) {
                    races.clocks.join(&[(self.index, active)]);
                }
                Ok(())
            }
        }?;
        Ok(true)
    }

    fn fence(&self, grid: &mut Grid, active: u32, fence: Fence) {
        let Some(races) = &mut grid.races else { return };
        match fence {
            Fence::Proxy | Fence::MbarrierInit => {
                races.clocks.proxy_fence(self.index, active, fence == Fence::MbarrierInit);
            }
            Fence::Device => races.clocks.fence(self.index, active),
            Fence::TensorBefore => self.tensors.fence(&mut races.clocks, self.index, active),
            Fence::TensorAfter => races.clocks.tensor_fence(self.index, active),
        }
    }

    /// `bar.sync` and `barrier.sync` (ISA 9.7.13). Aligned barriers need all lanes of the warp
    /// together.
    fn arrive(
        &mut self,
        grid: &mut Grid,
        group: Group,
        active: u32,
        (number, count, aligned): (Slot, Slot, bool),
    ) -> Step<Next> {
        let Group { pc, lanes, .. } = group;
        let program = &grid.kernel.program;
        let numbers = *self.registers.word(program, number, active)?;
        let counts = if count == NONE { [0; 32] } else { *self.registers.word(program, count, active)? };
        let complete = !aligned || active == self.alive;
        if complete || active == 0 {
            grid.count(pc, lanes, active)?;
        }
        let mut left = active;
        while left != 0 {
            let lane = left.trailing_zeros() as usize;
            let (number, count) = (numbers[lane], counts[lane]);
            let same = |&other: &usize| (numbers[other], counts[other]) == (number, count);
            let same = (0..32).filter(|other| left >> other & 1 == 1).filter(same);
            let same = same.fold(0, |all, lane| all | 1u32 << lane);
            if complete && (aligned && same != active || number > 15 || !count.is_multiple_of(32)) {
                return trap(lane as u32, FaultKind::NotUniform("which barrier, and of how many threads"));
            }
            let state = if complete { State::Arrived(number, count) } else { State::Waiting };
            self.groups.push(Group { pc, lanes: same, state });
            left &= !same;
        }
        self.ready(pc + 1, lanes & !active);
        Ok(Next::Dissolved)
    }
}
