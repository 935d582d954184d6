//! One token: scales are multiplied with sums.
//!
//! A lane has eight weights of a row for an instruction of tensor cores, and its three neighbours have those of other
//! groups, whose scales are others. So each neighbour's group has a place of tokens of its own, in which the others'
//! activations are zeros, and what comes out in a lane's places are its own rows' and its own groups' sums. That
//! takes four places of eight: the other four are for a second segment of each row.
//!
//! All that a step needs is copied to shared memory two steps before. Loads to registers would wait for later ones,
//! too: the assembler has but a few numbers to wait for, and caches answer in order.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::{
    ONE_ACTIVATION_BYTES, ONE_SEGMENTS, ONE_SLOTS, ROW_PLACES, WARP, WEIGHTS_THREADS, one_slot_bytes,
    one_warp_bytes, power_of_two,
};

use super::activations::SUMS;
use super::{Activations, Job, QUAD, Weights, parts};
use crate::gemv::{CHUNK_BYTES, Codes};
use crate::{ptx, warp};

/// Chunks of a row that a step has.
const CHUNKS: u32 = QUAD * ONE_SEGMENTS;
/// Rows that half a tile stands for.
const HALF_ROWS: u32 = ROW_PLACES / 2 / ONE_SEGMENTS;
/// Bytes of a chunk of activations.
const ACTIVATION_BYTES: u32 = CHUNK as u32 * 2;
/// Bytes of codes that the lanes of a warp copy at once.
const CODES_BYTES: u32 = WARP * CHUNK_BYTES;
/// Where in a slot's activations zeros are: behind those of one segment, so that lanes read these, those of the other
/// segment and zeros from different banks.
const ZEROS: u32 = QUAD * ACTIVATION_BYTES;

/// Where in a slot the scales are, behind the codes, for so many tiles.
const fn scales_at(tiles: usize) -> u32 {
    2 * tiles as u32 * CODES_BYTES
}

/// Where the activations are, behind the scales.
const fn activations_at(tiles: usize) -> u32 {
    one_slot_bytes(tiles as u32) - ONE_ACTIVATION_BYTES
}

/// What a lane copies, and where it finds what it needs.
struct Lane<const TILES: usize> {
    /// Bytes from the thread block's first row to the lane's codes in the first step, for each tile's places `p` and
    /// `p + 8`, and how many chunks there are from theirs on.
    codes: [[u32; 2]; TILES],
    chunks: u32,
    /// The same, for the words of scales that the lane copies.
    scales: [u32; TILES],
    scale_chunks: u32,
    /// The same, for the 16 bytes of activations that it copies.
    activations: u32,
    activation_chunks: u32,
    /// Where codes, scales and activations go in the first slot, as addresses of shared memory.
    to: [u32; 3],
    /// Where the lane's scales are, and the activations for its place: zeros, if that is another group's.
    found: [u32; 2],
}

/// What all lanes of a thread block copy from, in a step.
#[derive(Clone, Copy)]
struct Source {
    codes: *const u8,
    scales: *const u8,
    activations: *const u8,
    /// How many chunks behind the first step.
    chunk: u32,
}

impl<const TILES: usize> Lane<TILES> {
    /// Starts to copy what the lane has of a step to a slot, so many bytes behind the first. Zeros stand for what is
    /// not there.
    ///
    /// # Safety
    /// As for the kernels; the slot is nobody's.
    #[inline(always)]
    unsafe fn copy<F: Weights>(&self, from: Source, slot: u32) {
        let [codes, scales, activations] = self.to.map(|to| to + slot);
        let there = if from.chunk < self.chunks { 16 } else { 0 };
        for (offset, i) in self.codes.as_flattened().iter().zip(0..) {
            // SAFETY: what is copied is in the row; chunks lie on multiples of 16 bytes.
            unsafe {
                let from = from.codes.wrapping_add(*offset as usize);
                ptx::copy_16_once(codes + i * CODES_BYTES, from, there);
            }
        }
        // A row's scales in a step are a word of MXFP4 for each segment, and two of NVFP4.
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
        let there = if from.chunk < self.activation_chunks { 16 } else { 0 };
        // SAFETY: what is copied is in the token; its chunks lie on multiples of 16 bytes.
        unsafe {
            let from = from.activations.wrapping_add(self.activations as usize);
            ptx::copy_16(activations, from, there);
        }
        ptx::commit_copies();
    }

    /// A slot's codes of one of the lane's rows.
    ///
    /// # Safety
    /// The lane's copies are there.
    #[inline(always)]
    unsafe fn codes(&self, slot: u32, row: usize) -> Codes {
        // SAFETY: the caller's promise.
        unsafe { ptx::load_shared_16(self.to[0] + slot + row as u32 * CODES_BYTES) }
    }

    /// The bytes of a slot's scales of one of the lane's rows.
    ///
    /// # Safety
    /// All lanes' copies are there.
    #[inline(always)]
    unsafe fn scales<F: Weights>(&self, slot: u32, row: usize) -> u32 {
        let from = self.found[0] + slot + row as u32 * const { HALF_ROWS * CHUNKS * F::BLOCKS };
        // SAFETY: the caller's promise.
        unsafe { if F::BLOCKS == 1 { ptx::load_shared_u8(from) } else { ptx::load_shared_u16(from) } }
    }

    /// A slot's activations, eight at a time.
    ///
    /// # Safety
    /// All lanes' copies are there.
    #[inline(always)]
    unsafe fn activations<D: Activations>(&self, slot: u32) -> [[u32; 4]; 4] {
        // SAFETY: the caller's promise.
        let load =
            |i: u32| D::pairs(unsafe { ptx::load_shared_16(self.found[1] + slot + 16 * i) }).map(D::raised);
        [load(0), load(1), load(2), load(3)]
    }
}

/// The sums of the group whose codes begin at word `I`, of two rows.
#[inline(always)]
fn group<D: Activations, const I: usize>(rows: &[Codes; 2], x: &[[u32; 4]; 4]) -> [f32; SUMS] {
    let weights = |row: usize, i: usize| D::weights(rows[row][i]);
    let ([a, b, c, d], [e, f, g, h]) = (weights(0, I), weights(1, I));
    let sums = D::multiply([a, e, b, f], [x[I][0], x[I][1]], [0.0; SUMS]);
    let sums = D::multiply([c, g, d, h], [x[I][2], x[I][3]], sums);
    let ([a, b, c, d], [e, f, g, h]) = (weights(0, I + 1), weights(1, I + 1));
    let sums = D::multiply([a, e, b, f], [x[I + 1][0], x[I + 1][1]], sums);
    D::multiply([c, g, d, h], [x[I + 1][2], x[I + 1][3]], sums)
}

/// The sums of a tile's step, added to those before it. Of each row the scales of both groups.
#[inline(always)]
fn add<D: Activations>(sums: &mut [f32; SUMS], rows: &[Codes; 2], scales: &[[f32; 2]; 2], x: &[[u32; 4]; 4]) {
    // Written out: the compiler keeps a loop's indices in memory.
    let of_groups = [group::<D, 0>(rows, x), group::<D, 2>(rows, x)];
    for half in 0..2 {
        for i in 0..SUMS {
            sums[i] = ptx::fma_f32(of_groups[half][i], scales[i / 2][half], sums[i]);
        }
    }
}

/// # Safety
/// The contract of the kernels whose names have `one`.
#[inline(always)]
pub(super) unsafe fn one<F: Weights, D: Activations, const TILES: usize>(job: Job) {
    let grid = &job.grid;
    let (block, token) = grid.lots.divide_32(warp::thread_block());
    let (number, lane) = (warp::thread() / WARP, warp::lane());
    let (group, split) = parts(number, grid.split_bits);
    let (place, quarter) = (lane / QUAD, lane % QUAD);
    let (row_place, segment) = (place / ONE_SEGMENTS, place % ONE_SEGMENTS);
    let first_row = u64::from(block) << (grid.group_bits() + grid.group_row_bits());
    let first = job.weights.row::<F>(first_row, grid.blocks);
    // Past the last row it is taken again.
    let last_row = (grid.rows - 1 - first_row).min(u64::from(u32::MAX)) as u32;
    let row_of = |in_group: u32| ((group << grid.group_row_bits()) + in_group).min(last_row);

    // The warp's slots.
    let slot_bytes = const { one_slot_bytes(TILES as u32) };
    let warp_bytes = const { one_warp_bytes(TILES as u32) };
    let shared = warp::shared::<u128>().cast::<u8>();
    let of_warp = shared.wrapping_add((number * warp_bytes) as usize);
    let address = ptx::shared_address(of_warp);
    let [scales_at, activations_at] = const { [scales_at(TILES), activations_at(TILES)] };
    // Of activations, a lane copies a piece of one of eight chunks.
    let (eighth, piece) = (lane / (ACTIVATION_BYTES / 16), lane % (ACTIVATION_BYTES / 16));
    if eighth < ONE_SLOTS {
        let zeros =
            of_warp.wrapping_add((eighth * slot_bytes + activations_at + ZEROS + piece * 16) as usize);
        // SAFETY: in the memory that the launch gives, of this warp.
        unsafe { *zeros.cast::<u128>() = 0 };
    }

    let chunks = (grid.cols / CHUNK as u64) as u32;
    let of_split = split * CHUNKS;
    let own = of_split + segment * QUAD + quarter;
    // Words of scales that a row has in a step, and chunks that a word has.
    let (words, word_chunks) = const { (CHUNKS * F::BLOCKS / 4, 4 / F::BLOCKS) };
    let word_chunk = of_split + lane % words * word_chunks;
    let found_activations = if place / ONE_SEGMENTS == quarter {
        segment * (ZEROS + ACTIVATION_BYTES) + quarter * ACTIVATION_BYTES
    } else {
        ZEROS
    };
    // The assembler computes again and again what it knows how to compute.
    let kept = |number: u32| warp::shuffle(number, lane);
    let mut of_lane = Lane {
        codes: [[0; 2]; TILES],
        chunks: chunks.saturating_sub(own),
        scales: [0; TILES],
        scale_chunks: chunks.saturating_sub(word_chunk),
        activations: kept((of_split + eighth) * ACTIVATION_BYTES + piece * 16),
        activation_chunks: chunks.saturating_sub(of_split + eighth),
        to: [
            kept(address + lane * 16),
            kept(address + scales_at + lane * 4),
            kept(address + activations_at + lane * 16 + eighth / QUAD * ACTIVATION_BYTES),
        ],
        found: [
            kept(address + scales_at + (row_place * CHUNKS + segment * QUAD + quarter) * F::BLOCKS),
            kept(address + activations_at + found_activations),
        ],
    };
    for (codes, i) in of_lane.codes.as_flattened_mut().iter_mut().zip(0..) {
        let row = row_of(i * HALF_ROWS + row_place);
        *codes = kept(row * (grid.blocks * F::BLOCK_BYTES) as u32 + own * CHUNK_BYTES);
    }
    for (scales, i) in of_lane.scales.iter_mut().zip(0..) {
        let row = row_of((i * WARP + lane) / words);
        *scales = kept(row * grid.blocks as u32 + word_chunk * F::BLOCKS);
    }
    let of_lane = of_lane;

    let apart = CHUNKS << grid.split_bits;
    // As many for each split, even if some have nothing in the last one.
    let steps = (chunks + apart - 1) >> (const { CHUNKS.ilog2() } + grid.split_bits);
    let mut from =
        Source { codes: first.codes, scales: first.scales, activations: job.token(token), chunk: 0 };
    let mut copy = |slot: u32| {
        // SAFETY: the operands are the kernel's, by the caller's contract; nobody uses the slot now.
        unsafe { of_lane.copy::<F>(from, slot * slot_bytes) };
        from.codes = from.codes.wrapping_add((apart * CHUNK_BYTES) as usize);
        from.scales = from.scales.wrapping_add((apart * F::BLOCKS) as usize);
        from.activations = from.activations.wrapping_add((apart * ACTIVATION_BYTES) as usize);
        from.chunk += apart;
    };
    for slot in 0..ONE_SLOTS - 1 {
        copy(slot);
    }
    let mut sums = [[0.0; SUMS]; TILES];
    let mut step = 0;
    let mut turn = |slot: u32| {
        step += 1;
        ptx::wait_for_copies::<{ ONE_SLOTS - 2 }>();
        // What the others copied is there, and nobody reads the slot any more that is filled next.
        warp::sync();
        copy((slot + ONE_SLOTS - 1) % ONE_SLOTS);
        let slot = slot * slot_bytes;
        // SAFETY: all of it is there.
        let x = unsafe { of_lane.activations::<D>(slot) };
        for tile in 0..TILES {
            let rows = [2 * tile, 2 * tile + 1];
            // SAFETY: as above.
            let (codes, scales) = unsafe {
                (rows.map(|row| of_lane.codes(slot, row)), rows.map(|row| of_lane.scales::<F>(slot, row)))
            };
            add::<D>(&mut sums[tile], &codes, &scales.map(F::halves), &x);
        }
        step < steps
    };
    const { assert!(ONE_SLOTS == 3) };
    while turn(0) && turn(1) && turn(2) {}
    ptx::wait_for_copies::<0>();
    warp::sync();

    // A tile's sums in a warp's slots, which are done with.
    let place_of = |number: u32, i: u32, lane: u32| {
        let of_warp = shared.wrapping_add((number * warp_bytes) as usize);
        of_warp.wrapping_add(((i * WARP + lane) * 4) as usize).cast::<f32>()
    };
    for (sum, i) in sums.as_flattened().iter().zip(0..) {
        // SAFETY: in the memory that the launch gives; each lane has its own places, in its warp's.
        unsafe { *place_of(number, i, lane) = *sum };
    }
    warp::barrier();
    let outputs = 1 << (grid.group_bits() + grid.group_row_bits());
    let mut before = warp::thread() - lane;
    while before < outputs {
        let output = before + lane;
        let (group, in_group) = parts(output, grid.group_row_bits());
        let mut undefined = false;
        if output < outputs && output <= last_row {
            let mut sum = 0.0;
            let (half, row_place) = (in_group / HALF_ROWS, in_group % HALF_ROWS);
            let mut part = 0;
            while part < apart {
                let (split, chunk) = (part / CHUNKS, part % CHUNKS);
                let number = (group << grid.split_bits) + split;
                // Where the tensor core has it: two places of tokens side by side, here segments, are in one lane.
                let (i, lane) = (half * 2 + chunk / QUAD, row_place * CHUNKS + chunk);
                // SAFETY: written by a lane of this block before the barrier.
                sum += f64::from(unsafe { *place_of(number, i, lane) });
                part += 1;
            }
            undefined = !sum.is_finite();
            if !undefined {
                let sum = sum * f64::from(power_of_two(const { D::BELOW - D::RAISED }));
                // SAFETY: the result exists, and is this thread's.
                unsafe { job.store::<D>(first_row + u64::from(output), token, sum) };
            }
        }
        // What is too large on the way, or not a number, is the definition's to say.
        let mut undefined = warp::ballot(undefined);
        while undefined != 0 {
            let row = first_row + u64::from(before + undefined.trailing_zeros());
            // SAFETY: the row and the token exist, and nobody stored this result.
            unsafe { job.define::<F, D>(row, [token, token + 1]) };
            undefined &= undefined - 1;
        }
        before += WEIGHTS_THREADS;
    }
}
