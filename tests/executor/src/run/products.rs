//! Asynchronous matrix products of warp groups (ISA 9.7.15, `wgmma`).
//!
//! A product starts when all four warps have reached it, and ends when one of them has waited for
//! it. Matrices in shared memory are read at the start under [`Schedule::LowestFirst`], at the end
//! under [`Schedule::HighestFirst`], and at a random one of the two under [`Schedule::Random`]. For
//! the race detector, the warp group's member reads them until the end. Each warp adds to its own
//! rows of D when it waits.

use super::grid::{Grid, wrongly};
use super::under_way::Product;
use super::warp::Warp;
use crate::fault::{FaultKind, Step, trap};
use crate::lanes::LANES;
use crate::memory::Shared;
use crate::program::{FirstMatrix, GroupMatrices, Manner, Op, Program, Slot, Space, WarpGroupAction};
use crate::race::{Id, Record};
use crate::semantics::{DEPTH_BYTES, Descriptor, Factors, Multiplicand, PIECE};

/// Warps per warp group.
pub(super) const WARPS: u32 = 4;
/// Rows of A and D that a warp has.
const ROWS: usize = 16;
/// A mask of all warps of a warp group.
const ALL: u8 = (1 << WARPS) - 1;

impl Warp {
    /// Checks another instruction's accesses to registers that products and loads also use.
    #[cold]
    pub(super) fn share_words(&mut self, program: &Program, active: u32, slots: &[Slot]) -> Step {
        for &slot in slots {
            if self.products.pending.contains_key(&slot) || self.tensors.pending.contains(&slot) {
                let name = program.words.names[slot as usize].clone();
                return trap(active.trailing_zeros(), FaultKind::PendingRegister(name));
            }
            self.products.accessed.insert(slot);
        }
        Ok(())
    }

    /// `wgmma` of all lanes of a warp. Returns false if it must wait for other warps.
    pub(super) fn warp_group(
        &mut self,
        grid: &mut Grid,
        active: u32,
        action: &WarpGroupAction,
    ) -> Step<bool> {
        if active != u32::MAX {
            return trap(active.trailing_zeros(), FaultKind::IncompleteWarp { missing: !active });
        }
        if (self.in_block / WARPS + 1) * WARPS * LANES as u32 > grid.launch.threads {
            return trap(0, FaultKind::NotUniform("a warp group has four warps"));
        }
        match action {
            WarpGroupAction::Fence => {
                self.products.accessed.clear();
                self.products.fenced = true;
            }
            WarpGroupAction::Commit => self.products.groups.push_back(self.products.came),
            WarpGroupAction::Multiply(of) => self.begin_product(grid, of)?,
            &WarpGroupAction::Await(but) => return self.await_products(grid, but as usize),
        }
        Ok(true)
    }

    /// `wgmma.mma_async`
    fn begin_product(&mut self, grid: &mut Grid, of: &GroupMatrices) -> Step {
        let program = &grid.kernel.program;
        let adds = self.uniform(self.registers.predicate(program, of.adds, u32::MAX)?)?;
        let descriptor = |slot: Slot| -> Step<u64> {
            let descriptors = *self.registers.long(program, slot, u32::MAX)?;
            if descriptors != [descriptors[0]; LANES] {
                return trap(0, FaultKind::NotUniform("the descriptor of a matrix"));
            }
            Ok(descriptors[0])
        };
        let descriptors = match of.a {
            FirstMatrix::Registers(_) => [None, Some(descriptor(of.b)?)],
            FirstMatrix::Shared(a) => [Some(descriptor(a)?), Some(descriptor(of.b)?)],
        };
        let a = of.a.registers();
        // Registers that an earlier product will write count as written.
        for &slot in a.iter().chain(if adds { &of.d[..] } else { &[] }) {
            if !self.products.pending.contains_key(&slot) {
                self.registers.word(program, slot, u32::MAX)?;
            }
        }
        for &slot in of.d.iter().chain(a) {
            if !self.products.fenced || self.products.accessed.contains(&slot) {
                let name = program.words.names[slot as usize].clone();
                return trap(0, FaultKind::UnfencedRegister(name));
            }
        }
        self.check_pending(program, of)?;
        let number = self.products.came;
        for &slot in of.d.iter().chain(a) {
            self.products.pending.insert(slot, (number, grid.pc));
        }
        self.products.came += 1;
        let access = self.begin_reading(grid, number)?;
        let matrices = read(grid, descriptors, self.rank, of, access)?;
        let early = grid.early();
        let pc = grid.pc;
        let products = &mut grid.products[(self.index / WARPS) as usize];
        let at = (number - products.first) as usize;
        if at == products.all.len() {
            let (came, waited) = (0, 0);
            products.all.push_back(Product { pc, descriptors, adds, came, waited, matrices: None });
        }
        let product = &mut products.all[at];
        if (product.pc, product.descriptors, product.adds) != (pc, descriptors, adds) {
            return trap(0, FaultKind::NotUniform("the warps of a warp group multiply different matrices"));
        }
        product.came |= 1 << (self.index % WARPS);
        if product.came == ALL && early {
            product.matrices = Some(matrices);
        }
        grid.note_event();
        Ok(())
    }

    /// Checks a new product's registers against pending products.
    ///
    /// It may reuse exactly the D of a pending product, and both may share A.
    fn check_pending(&self, program: &Program, of: &GroupMatrices) -> Step {
        let clashes = |slot: &&Slot| {
            let Some((_, by)) = self.products.pending.get(*slot) else { return false };
            let by = multiplies(program, *by).expect("products begin at wgmma.mma_async");
            let is_d = |of: &GroupMatrices| of.d.contains(slot);
            (is_d(of) || is_d(by)) && of.d != by.d
        };
        match of.d.iter().chain(of.a.registers()).find(clashes) {
            None => Ok(()),
            Some(&slot) => trap(0, FaultKind::PendingRegister(program.words.names[slot as usize].clone())),
        }
    }

    /// Returns a predicate that must be the same in all lanes.
    fn uniform(&self, lanes: u32) -> Step<bool> {
        match lanes {
            0 => Ok(false),
            u32::MAX => Ok(true),
            _ => trap(0, FaultKind::NotUniform("whether a product adds to D")),
        }
    }

    /// Records the warp group's read of B. Its member gets the clock that all lanes of this warp
    /// share.
    fn begin_reading(&self, grid: &mut Grid, number: u64) -> Step<Option<Id>> {
        let Some(races) = &mut grid.races else { return Ok(None) };
        let member = races.clocks.of_group(self.index / WARPS);
        let known = races.clocks.common(self.index, u32::MAX);
        races.clocks.instruct(member, known);
        let record = Record {
            block: grid.number,
            warp: self.index,
            time: number as u32,
            pc: grid.pc,
            atomic: false,
            agent: Some(member as u32),
            asynchronous: true,
        };
        grid.begin_record(0, record)
    }

    /// `wgmma.wait_group`
    fn await_products(&mut self, grid: &mut Grid, but: usize) -> Step<bool> {
        let Some(over) = self.products.groups.len().checked_sub(but + 1) else { return Ok(true) };
        let end = self.products.groups[over];
        let group = (self.index / WARPS) as usize;
        let products = &grid.products[group];
        let range = self.products.waited..end;
        let came = |number: u64| products.all[(number - products.first) as usize].came == ALL;
        if !range.clone().all(came) {
            return Ok(false);
        }
        let pc = grid.pc;
        for number in range {
            self.finish_product(grid, number)?;
        }
        grid.pc = pc;
        self.products.groups.drain(..=over);
        self.products.waited = self.products.waited.max(end);
        self.products.pending.retain(|_, (number, _)| *number >= end);
        if let Some(races) = &mut grid.races {
            let mut said = crate::clock::Known::default();
            said.learn(races.clocks.of_group(group as u32), end as u32);
            races.clocks.acquire(self.index, u32::MAX, &said);
        }
        Ok(true)
    }

    /// Adds a product to this warp's rows of D, 16·w to 16·w + 15.
    ///
    /// The registers are laid out as in `mma`, with eight columns per four registers of D. E4M3 has
    /// the bytes of 16-bit factors.
    fn finish_product(&mut self, grid: &mut Grid, number: u64) -> Step {
        let group = (self.index / WARPS) as usize;
        let at = (number - grid.products[group].first) as usize;
        let product = &grid.products[group].all[at];
        let (pc, descriptors, adds) = (product.pc, product.descriptors, product.adds);
        grid.pc = pc;
        let kernel = grid.kernel;
        let program = &*kernel.program;
        let Some(of) = multiplies(program, pc) else { unreachable!("products begin at wgmma.mma_async") };
        if grid.products[group].all[at].matrices.is_none() {
            let matrices = read(grid, descriptors, self.rank, of, None)?;
            grid.products[group].all[at].matrices = Some(matrices);
        }
        let product = &mut grid.products[group].all[at];
        let [all_rows, columns] = product.matrices.as_ref().expect("they were just read");
        let mut rows = [[0; DEPTH_BYTES]; ROWS];
        for (i, &slot) in of.a.registers().iter().enumerate() {
            for (lane, &word) in self.registers.word(program, slot, u32::MAX)?.iter().enumerate() {
                let (row, place) = (&mut rows[lane / 4 + i % 2 * 8], lane % 4 * 4 + i / 2 * 16);
                row[place..place + 4].copy_from_slice(&word.to_le_bytes());
            }
        }
        let own = rows.map(|bytes| Factors::new(of.element, &bytes));
        let first = (self.index % WARPS) as usize * ROWS;
        let rows = if all_rows.is_empty() { &own[..] } else { &all_rows[first..first + ROWS] };
        for (i, &slot) in of.d.iter().enumerate() {
            let before = if adds { *self.registers.word(program, slot, u32::MAX)? } else { [0; LANES] };
            let sum = |lane: usize| {
                let (row, column) = (lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
                rows[row].dot(&columns[column], before[lane], &self.launch.approximation)
            };
            let sums = std::array::from_fn(sum);
            self.registers.set_word(slot, u32::MAX, &sums);
        }
        product.waited |= 1 << (self.index % WARPS);
        let products = &mut grid.products[group];
        while products.all.front().is_some_and(|product| product.waited == ALL) {
            products.all.pop_front();
            products.first += 1;
        }
        Ok(())
    }

    /// Checks that lanes about to exit have waited for all products.
    pub(super) fn leave_products(&self, grid: &mut Grid, active: u32) -> Step {
        if self.products.came == self.products.waited {
            return Ok(());
        }
        let products = &grid.products[(self.index / WARPS) as usize];
        grid.pc = products.all[(self.products.waited - products.first) as usize].pc;
        trap(active.trailing_zeros(), FaultKind::ProductNeverAwaited)
    }
}

/// Returns the operands of the product that an instruction starts.
fn multiplies(program: &Program, pc: u32) -> Option<&GroupMatrices> {
    match &program.code[pc as usize].op {
        Op::WarpGroup { action: WarpGroupAction::Multiply(of), .. } => Some(of),
        _ => None,
    }
}

/// Reads the rows of A, if they have a descriptor, and the columns of B from the shared memory of
/// the block with this rank.
fn read(
    grid: &mut Grid,
    [a, b]: [Option<u64>; 2],
    rank: u32,
    of: &GroupMatrices,
    access: Option<Id>,
) -> Step<[Vec<Factors>; 2]> {
    let mut read = |bits: Option<u64>, rows: usize| match bits {
        Some(bits) => read_matrix(grid, bits, rank, rows, of.element, access),
        None => Ok(Vec::new()),
    };
    Ok([read(a, WARPS as usize * ROWS)?, read(b, of.d.len() * 2)?])
}

/// Reads a matrix of `rows` rows of A or columns of B.
fn read_matrix(
    grid: &mut Grid,
    bits: u64,
    rank: u32,
    rows: usize,
    element: Multiplicand,
    access: Option<Id>,
) -> Step<Vec<Factors>> {
    let wrong = |problem| FaultKind::Descriptor(bits, problem);
    let descriptor = Descriptor::new(bits, rows).or_else(|problem| trap(0, wrong(problem)))?;
    let mut found = Vec::with_capacity(rows);
    for row in 0..rows {
        let mut of_row = [0; DEPTH_BYTES];
        for (second, piece) in of_row.chunks_exact_mut(PIECE).enumerate() {
            let address = Shared::address(rank.into(), descriptor.piece(row, second == 1));
            let races = grid.races.as_ref().zip(access);
            let (memory, at) = grid.shared.locate(address, PIECE).or_else(|kind| trap(0, kind))?;
            match memory.load(at..at + PIECE, Manner::Weak, races) {
                Ok(bytes) => piece.copy_from_slice(bytes),
                Err(wrong) => return wrongly(grid, 0, Space::Shared, address, PIECE, wrong),
            }
        }
        found.push(Factors::new(element, &of_row));
    }
    Ok(found)
}
