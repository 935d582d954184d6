//! Copying ahead: a warp's steps, turn by turn.
//!
//! All that a step needs is copied to shared memory one or two steps before, to places that are used by turns: slots.
//! Loads to registers would wait for later ones, too: the assembler has but a few numbers to wait for, and caches
//! answer in order.

use core::marker::PhantomData;

use microscale_kernels_abi::weights::{QUAD, TurnsGrid};

use super::copies::{ACTIVATION_BYTES, Lane, Source};
use super::format::Format;
use super::multiply::Product;
use super::operand::{CHUNK_BYTES, Job};
use super::scheduler::Turns;
use crate::{ptx, warp};

/// More chunks than a row has.
const NO_CHUNK: u32 = 1 << 30;

/// A warp's steps, turn by turn.
pub(crate) struct Steps<'a, F, P, const TILES: usize> {
    job: &'a Job,
    activations: *const u8,
    turns: Turns,
    lane: Lane<TILES>,
    product: P,
    /// Chunks from one of the warp's steps to the next.
    apart: u32,
    /// The warp's steps of each turn.
    each: u32,
    /// What is copied next: of which turn, and how many steps of it are left.
    from: Source,
    copied: u32,
    to_copy: u32,
    /// What is added next, and how many chunks behind the warp's first step of the row.
    added: u32,
    to_add: u32,
    chunk: u32,
    format: PhantomData<F>,
}

impl<'a, F: Format, P: Product<F, TILES>, const TILES: usize> Steps<'a, F, P, TILES> {
    const SLOTS: u32 = P::KERNEL.slots();
    const SLOT_BYTES: u32 = P::KERNEL.slot_bytes();

    /// Those of a warp with its part of the columns, and activations of one token or the first of a lot. The warp's
    /// shared memory is at an address.
    #[inline(always)]
    pub(crate) fn new(
        job: &'a Job,
        grid: &TurnsGrid,
        turns: Turns,
        [split, address]: [u32; 2],
        activations: *const u8,
        product: P,
    ) -> Self {
        let segment_bits = P::KERNEL.segment_bits(grid.lot_bits);
        let rows = turns.rows.min(u64::from(turns.each)) as u32;
        // Every so many-th is the warp's; one at least, even if there is nothing in it.
        let each = ((grid.steps + (1 << grid.split_bits) - 1 - split) >> grid.split_bits).max(1);
        Self {
            job,
            activations,
            turns,
            lane: Lane::new::<F>(job, rows, segment_bits, split, address),
            product,
            apart: QUAD << segment_bits << grid.split_bits,
            each,
            from: Self::source(job, activations, turns, 0),
            copied: 0,
            to_copy: each,
            added: 0,
            to_add: each,
            chunk: 0,
            format: PhantomData,
        }
    }

    /// What a turn's first step is copied from; nothing, if there are not so many turns.
    #[inline(always)]
    fn source(job: &Job, activations: *const u8, turns: Turns, turn: u32) -> Source {
        let [first, _] = turns.starts(turn);
        let row = job.weights.row::<F>(first, job.shape.blocks);
        let chunk = if turn < turns.count { 0 } else { NO_CHUNK };
        Source { codes: row.codes, scales: row.scales, activations, chunk }
    }

    /// Starts to copy the next step to a slot.
    ///
    /// # Safety
    /// As for the kernels; the slot is nobody's.
    #[inline(always)]
    unsafe fn copy(&mut self, slot: u32) {
        let (slot, from) = (slot * Self::SLOT_BYTES, &mut self.from);
        // SAFETY: the caller's promise.
        unsafe {
            self.lane.copy::<F>(*from, slot);
            self.product.copy(from.activations, from.chunk, slot);
        }
        ptx::commit_copies();
        from.codes = from.codes.wrapping_add((self.apart * CHUNK_BYTES) as usize);
        from.scales = from.scales.wrapping_add((self.apart * F::BLOCKS) as usize);
        from.activations = from.activations.wrapping_add((self.apart * ACTIVATION_BYTES) as usize);
        from.chunk += self.apart;
        self.to_copy -= 1;
        if self.to_copy == 0 {
            self.to_copy = self.each;
            self.copied += 1;
            self.from = Self::source(self.job, self.activations, self.turns, self.copied);
        }
    }

    /// Adds a slot's step, a later one being copied meanwhile. Whether there is another one.
    ///
    /// # Safety
    /// As for [`Self::all`]; it is the slot's turn.
    #[inline(always)]
    unsafe fn step(&mut self, slot: u32) -> bool {
        const { assert!(Self::SLOTS == 2 || Self::SLOTS == 3) };
        if Self::SLOTS == 2 {
            ptx::wait_for_copies::<0>()
        } else {
            ptx::wait_for_copies::<1>()
        }
        // What the others copied is there, and nobody reads the slot any more that is filled next.
        warp::sync();
        // SAFETY: the slot of the step before; all of this one is there.
        unsafe {
            self.copy((slot + Self::SLOTS - 1) % Self::SLOTS);
            self.product.add(&self.lane, slot * Self::SLOT_BYTES, self.chunk);
        }
        self.chunk += self.apart;
        self.to_add -= 1;
        if self.to_add == 0 {
            // SAFETY: the caller's promise.
            unsafe { self.product.end(self.added) };
            self.to_add = self.each;
            self.chunk = 0;
            self.added += 1;
        }
        self.added < self.turns.count
    }

    /// Goes through all of them: what is left is the product.
    ///
    /// # Safety
    /// As for the kernels; all lanes take part, there is a turn, and the shared memory is the warp's.
    #[inline(always)]
    pub(crate) unsafe fn all(mut self) -> P {
        for slot in 0..Self::SLOTS - 1 {
            // SAFETY: the slot is nobody's.
            unsafe { self.copy(slot) };
        }
        // SAFETY: slots take turns. The last one is not there if there are two.
        while unsafe { self.step(0) && self.step(1) && (Self::SLOTS == 2 || self.step(2)) } {}
        // What is copied in vain.
        ptx::wait_for_copies::<0>();
        self.product
    }
}
