//! What the kernels that copy ahead have in common: turns, and a warp's steps in them.
//!
//! A thread block stays for as long as there is something to do: its warps go through their steps of the rows of one
//! turn after the other. All that a step needs is copied to shared memory one or two steps before, to places that are
//! used by turns: slots. Loads to registers would wait for later ones, too: the assembler has but a few numbers to wait
//! for, and caches answer in order.

use core::marker::PhantomData;

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::{Ahead, ROW_PLACES, TurnsGrid};

use super::{Job, QUAD, Weights};
use crate::gemv::{CHUNK_BYTES, Codes};
use crate::{ptx, warp};

/// Bytes of a chunk of activations.
pub(super) const ACTIVATION_BYTES: u32 = CHUNK as u32 * 2;
/// Bytes of codes that the lanes of a warp copy at once.
const CODES_BYTES: u32 = WARP * CHUNK_BYTES;
/// Places of rows that half a tile has.
const HALF_PLACES: u32 = ROW_PLACES / 2;
/// More chunks than a row has.
const NO_CHUNK: u32 = 1 << 30;

/// Keeps a number in a register: the assembler computes again and again what it knows how to compute.
#[inline(always)]
pub(super) fn kept(number: u32) -> u32 {
    warp::shuffle(number, warp::lane())
}

/// A number that the assembler does not know: it copies what it knows to be constant wherever it is used.
///
/// # Safety
/// There are 4 bytes of shared memory for each lane of the warp, all of which take part.
#[inline(always)]
pub(super) unsafe fn unknown(number: u32, place: *mut u8) -> u32 {
    let of_lane = place.wrapping_add((warp::lane() * 4) as usize);
    // SAFETY: the caller's promise.
    let zero = unsafe {
        *of_lane.cast::<u32>() = 0;
        warp::sync();
        ptx::load_shared_u16(ptx::shared_address(of_lane))
    };
    number + zero
}

/// The number of the warp in its thread block, the same in all lanes, as the assembler would not know: what follows
/// from it takes uniform registers.
#[inline(always)]
pub(super) fn warp_number() -> u32 {
    warp::shuffle(warp::thread() / WARP, 0)
}

/// The turns of a team: the rows that its warps multiply at once, and those so many further on.
#[derive(Clone, Copy)]
pub(super) struct Turns {
    /// Rows of the matrix, and of a turn.
    rows: u64,
    each: u32,
    /// Turns from the matrix' first to the team's first, and from each of the team's to the next.
    first: u32,
    apart: u32,
    /// Turns of the team.
    pub(super) count: u32,
}

impl Turns {
    /// Those of a team of a thread block, of so many rows each.
    #[inline(always)]
    pub(super) fn new(grid: &TurnsGrid, each: u32, block: u32, team: u32) -> Self {
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
    pub(super) fn starts(&self, turn: u32) -> [u64; 2] {
        let each = u64::from(self.each);
        let own = u64::from(self.first + turn * self.apart) * each;
        [own.min(self.rows - self.rows.min(each)), own]
    }

    /// A row of a turn, given its number there, if it is the turn's own.
    #[inline(always)]
    pub(super) fn row(&self, turn: u32, in_turn: u32) -> Option<u64> {
        let [first, own] = self.starts(turn);
        let row = first + u64::from(in_turn);
        (turn < self.count && own <= row && row < self.rows).then_some(row)
    }
}

/// What a lane copies, and where it finds what it needs.
pub(super) struct Lane<const TILES: usize> {
    /// Bytes from a turn's first row to the lane's codes in the warp's first step, for each tile's places `p` and
    /// `p + 8`, and how many chunks there are from theirs on.
    codes: [[u32; 2]; TILES],
    pub(super) chunks: u32,
    /// The same, for the words of scales that the lane copies.
    scales: [u32; TILES],
    scale_chunks: u32,
    /// Where codes and scales go in the first slot, as addresses of shared memory, and where the lane's scales are.
    to: [u32; 2],
    found: u32,
}

impl<const TILES: usize> Lane<TILES> {
    /// Where in a slot the scales are, behind the codes.
    const SCALES: u32 = 2 * TILES as u32 * CODES_BYTES;

    /// Of a warp with its part of the columns, in turns of so many rows, given the exponent of their segments and where
    /// the warp's shared memory is.
    #[inline(always)]
    fn new<F: Weights>(job: &Job, rows: u32, segment_bits: u32, split: u32, address: u32) -> Self {
        let (cols, blocks) = (job.shape.cols, job.shape.blocks);
        let (place, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
        let chunks = (cols / CHUNK as u64) as u32;
        // The first chunk of a place.
        let first = |place: u32| ((split << segment_bits) + (place & ((1 << segment_bits) - 1))) * QUAD;
        let own = first(place) + quarter;
        // A place's scales in a step are a word of MXFP4, and two of NVFP4.
        let (words, word_chunks) = const { (F::BLOCKS, QUAD / F::BLOCKS) };
        let word_chunk = first(warp::lane() / words) + warp::lane() % words * word_chunks;
        let mut made = Self {
            codes: [[0; 2]; TILES],
            chunks: chunks.saturating_sub(own),
            scales: [0; TILES],
            scale_chunks: chunks.saturating_sub(word_chunk),
            to: [kept(address + warp::lane() * 16), kept(address + Self::SCALES + warp::lane() * 4)],
            found: kept(address + Self::SCALES + (place * QUAD + quarter) * F::BLOCKS),
        };
        // Past the last row it is taken again.
        let row = |place: u32| (place >> segment_bits).min(rows - 1);
        for (codes, i) in made.codes.as_flattened_mut().iter_mut().zip(0..) {
            let row = row(i * HALF_PLACES + place);
            *codes = kept(row * (blocks * F::BLOCK_BYTES) as u32 + own * CHUNK_BYTES);
        }
        for (scales, i) in made.scales.iter_mut().zip(0..) {
            let row = row((i * WARP + warp::lane()) / words);
            *scales = kept(row * blocks as u32 + word_chunk * F::BLOCKS);
        }
        made
    }

    /// Starts to copy the codes and scales of a step to a slot. Zeros stand for what is not there.
    ///
    /// # Safety
    /// As for the kernels; the slot is nobody's.
    #[inline(always)]
    unsafe fn copy<F: Weights>(&self, from: Source, slot: u32) {
        let [codes, scales] = self.to.map(|to| to + slot);
        let there = if from.chunk < self.chunks { 16 } else { 0 };
        for (offset, i) in self.codes.as_flattened().iter().zip(0..) {
            // SAFETY: what is copied is in the row; chunks lie on multiples of 16 bytes.
            unsafe {
                let from = from.codes.wrapping_add(*offset as usize);
                ptx::copy_16_once(codes + i * CODES_BYTES, from, there);
            }
        }
        let there = if from.chunk < self.scale_chunks { 4 } else { 0 };
        for (offset, i) in self.scales.iter().zip(0..) {
            if i * WARP < TILES as u32 * ROW_PLACES * F::BLOCKS {
                // SAFETY: what is copied is in the row; rows are whole words of scales.
                unsafe {
                    let from = from.scales.wrapping_add(*offset as usize);
                    ptx::copy_4(scales + i * WARP * 4, from, there);
                }
            }
        }
    }

    /// A slot's codes of the lane's rows of a tile.
    ///
    /// # Safety
    /// The lane's copies are there.
    #[inline(always)]
    pub(super) unsafe fn codes(&self, slot: u32, tile: u32) -> [Codes; 2] {
        let from = self.to[0] + slot;
        // SAFETY: the caller's promise.
        [2 * tile, 2 * tile + 1].map(|row| unsafe { ptx::load_shared_16(from + row * CODES_BYTES) })
    }

    /// The bytes of a slot's scales of the lane's rows of a tile.
    ///
    /// # Safety
    /// All lanes' copies are there.
    #[inline(always)]
    pub(super) unsafe fn scales<F: Weights>(&self, slot: u32, tile: u32) -> [u32; 2] {
        [2 * tile, 2 * tile + 1].map(|row| {
            let from = self.found + slot + row * const { HALF_PLACES * QUAD * F::BLOCKS };
            // SAFETY: the caller's promise.
            unsafe { if F::BLOCKS == 1 { ptx::load_shared_u8(from) } else { ptx::load_shared_u16(from) } }
        })
    }
}

/// What all lanes of a warp copy from, in a step.
#[derive(Clone, Copy)]
struct Source {
    codes: *const u8,
    scales: *const u8,
    activations: *const u8,
    /// How many chunks behind the warp's first step of the row.
    chunk: u32,
}

/// What a warp makes of its steps.
pub(super) trait Product<F: Weights, const TILES: usize> {
    const KERNEL: Ahead;
    /// Where in a slot the activations are, behind the scales.
    const ACTIVATIONS: u32 = Self::KERNEL.slot_bytes() - Self::KERNEL.activation_bytes();

    /// Starts to copy what the lane has of a step's activations to a slot, from so many chunks behind the first. Zeros
    /// stand for what is not there.
    ///
    /// # Safety
    /// As for the kernels; the slot is nobody's.
    unsafe fn copy(&self, activations: *const u8, chunk: u32, slot: u32);

    /// Adds a slot's products, which are so many chunks behind the first.
    ///
    /// # Safety
    /// All lanes' copies are there, and all lanes take part.
    unsafe fn add(&mut self, lane: &Lane<TILES>, slot: u32, chunk: u32);

    /// Leaves what a turn came to in the warp's shared memory, and begins again.
    ///
    /// # Safety
    /// The memory is the warp's, all of whose lanes take part.
    unsafe fn end(&mut self, turn: u32);
}

/// A warp's steps, turn by turn.
pub(super) struct Steps<'a, F, P, const TILES: usize> {
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

impl<'a, F: Weights, P: Product<F, TILES>, const TILES: usize> Steps<'a, F, P, TILES> {
    const SLOTS: u32 = P::KERNEL.slots();
    const SLOT_BYTES: u32 = P::KERNEL.slot_bytes();

    /// Those of a warp with its part of the columns, and activations of one token or the first of a lot. The warp's
    /// shared memory is at an address.
    #[inline(always)]
    pub(super) fn new(
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
    pub(super) unsafe fn all(mut self) -> P {
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
