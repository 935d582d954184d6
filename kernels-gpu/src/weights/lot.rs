//! Up to eight tokens at once, copied ahead: weights are scaled before they are multiplied, as in [`super::many`].

use core::marker::PhantomData;

use microscale_formats::dot::CHUNK;
use microscale_formats::plan::power_of_two;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::{Ahead, QUAD, ROW_PLACES, TurnsGrid};

use crate::product::copies::{ACTIVATION_BYTES, Lane, kept, unknown};
use crate::product::multiply::{Product, is_usual, scaled_products};
use crate::product::operand::{Chunk, Job};
use crate::product::pipeline::Steps;
use crate::product::scheduler::{Turns, parts, warp_number};
use crate::product::tensor_cores::{Activations, SUMS, Weights};
use crate::{ptx, warp};

/// Pieces of 16 bytes that a place's activations of a step are, four for each of four chunks.
const PIECES: u32 = QUAD * ACTIVATION_BYTES / 16;
/// Pieces that a lane copies, and has of its chunk.
const COPIES: usize = 4;

/// Where a place's piece is among all of them: moved, so that eight lanes that read at once find theirs in different
/// banks.
#[inline(always)]
fn piece(place: u32, piece: u32) -> u32 {
    place * PIECES + (piece ^ piece / (PIECES / 2) ^ place % 2 * 2)
}

/// What a warp makes of its steps.
struct Lot<D, const TILES: usize> {
    sums: [[f32; SUMS]; TILES],
    /// The largest distance of a turn's scales so far.
    far: u32,
    /// Bytes from the lot's first activation to the pieces that the lane copies in the warp's first step, how many
    /// chunks there are from theirs on, and where the first goes: the others go so many pieces behind each other.
    activations: [u32; COPIES],
    copied_chunks: [u32; COPIES],
    to: u32,
    /// Where the lane's chunk is, piece by piece, and how many there are from its own on.
    found: [u32; COPIES],
    chunks: u32,
    /// Where the warp keeps what turns come to.
    of_turns: *mut u8,
    /// The exponent of segments.
    segment_bits: u32,
    /// [`Activations::TABLE`].
    table: u32,
    dtype: PhantomData<D>,
}

impl<D: Activations, const TILES: usize> Lot<D, TILES> {
    const KERNEL: Ahead = Ahead { one: false, tiles: TILES as u32 };
    /// Bytes that a warp keeps of a turn: sums, and behind them a flag.
    const TURN_BYTES: u32 = Self::KERNEL.turn_bytes();
    const FLAG: u32 = Self::KERNEL.sums_bytes();

    /// For a lot of so many tokens. What those come to that are not there is not stored.
    ///
    /// # Safety
    /// The shared memory is the warp's, all of whose lanes take part.
    #[inline(always)]
    unsafe fn new<F: Weights>(
        job: &Job,
        tokens: u32,
        segment_bits: u32,
        split: u32,
        of_warp: *mut u8,
    ) -> Self {
        let chunks = (job.shape.cols / CHUNK as u64) as u32;
        let chunk = |place: u32| ((split << segment_bits) + parts(place, segment_bits).1) * QUAD;
        let own = chunk(warp::lane() / QUAD) + warp::lane() % QUAD;
        // Lanes copy two places' pieces at once.
        let (place, number) = (warp::lane() / PIECES, warp::lane() % PIECES);
        let (mut activations, mut copied_chunks) = ([0; COPIES], [0; COPIES]);
        for ((activations, chunks_left), i) in activations.iter_mut().zip(&mut copied_chunks).zip(0..) {
            let place = place + i * (WARP / PIECES);
            let of_token = parts(place, segment_bits).0.min(tokens - 1) * (job.shape.cols * 2) as u32;
            *activations = kept(of_token + chunk(place) * ACTIVATION_BYTES + number * 16);
            *chunks_left = kept(chunks.saturating_sub(chunk(place) + number / 4));
        }
        let in_slot = const { <Self as Product<F, TILES>>::ACTIVATIONS };
        let address = ptx::shared_address(of_warp) + in_slot;
        let of_turns = of_warp.wrapping_add(const { Self::KERNEL.slots_bytes() } as usize);
        Self {
            sums: [[0.0; SUMS]; TILES],
            far: 0,
            activations,
            copied_chunks,
            to: kept(address + piece(place, number) * 16),
            found: [0, 1, 2, 3].map(|i| {
                let (place, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
                kept(address + piece(place, quarter * COPIES as u32 + i) * 16)
            }),
            chunks: chunks.saturating_sub(own),
            of_turns,
            segment_bits,
            // SAFETY: the caller's promise.
            table: unsafe { unknown(D::TABLE, of_turns) },
            dtype: PhantomData,
        }
    }

    /// Where a turn's flag is: whether the warp's scales are all to be used.
    #[inline(always)]
    fn flag(&self, turn: u32) -> *mut u32 {
        self.of_turns.wrapping_add((turn * Self::TURN_BYTES + Self::FLAG) as usize).cast()
    }

    /// Looks again at turns with scales that are not to be used: they may be those of zeros.
    ///
    /// # Safety
    /// As for the kernels; all lanes take part, and the warp has gone through its steps of these turns.
    #[inline(always)]
    unsafe fn pardon_zeros<F: Weights>(&self, job: &Job, turns: &Turns, apart: u32) {
        let mut turn = 0;
        while turn < turns.count {
            warp::sync();
            // SAFETY: the warp's.
            if unsafe { *self.flag(turn) } == 0 {
                let [first, _] = turns.starts(turn);
                // SAFETY: the caller's promise.
                let usual = unsafe { self.usual_but_zeros::<F>(job, first, apart) };
                let all_usual = warp::ballot(usual) == u32::MAX;
                // All lanes have read it: a vote does not order memory.
                warp::sync();
                if warp::lane() == 0 {
                    // SAFETY: the warp's.
                    unsafe { *self.flag(turn) = u32::from(all_usual) };
                }
            }
            turn += 1;
        }
    }

    /// Whether all of the lane's chunks of a turn whose scales are not to be used are zeros under a number.
    ///
    /// # Safety
    /// As for the kernels.
    #[inline(always)]
    unsafe fn usual_but_zeros<F: Weights>(&self, job: &Job, first: u64, apart: u32) -> bool {
        let place = warp::lane() / QUAD;
        let end = (job.shape.cols / CHUNK as u64) as u32;
        let mut usual = true;
        let mut i = 0;
        while i < 2 * TILES as u32 {
            let row = first + u64::from((i * (ROW_PLACES / 2) + place) >> self.segment_bits);
            let row = job.weights.row::<F>(row.min(job.shape.rows - 1), job.shape.blocks);
            let mut chunk = end - self.chunks;
            while chunk < end {
                // SAFETY: the chunk is in the row.
                usual &= unsafe { is_usual::<F, D>(&row.load_once::<F>(chunk)) };
                chunk += apart;
            }
            i += 1;
        }
        usual
    }
}

impl<F: Weights, D: Activations, const TILES: usize> Product<F, TILES> for Lot<D, TILES> {
    const KERNEL: Ahead = Self::KERNEL;

    #[inline(always)]
    unsafe fn copy(&self, activations: *const u8, chunk: u32, slot: u32) {
        for ((offset, chunks), i) in self.activations.iter().zip(&self.copied_chunks).zip(0..) {
            let there = if chunk < *chunks { 16 } else { 0 };
            let from = activations.wrapping_add(*offset as usize);
            // SAFETY: what is copied is in the token; its chunks lie on multiples of 16 bytes.
            unsafe { ptx::copy_16(self.to + slot + i * (WARP * 16), from, there) };
        }
    }

    #[inline(always)]
    unsafe fn add(&mut self, lane: &Lane<TILES>, slot: u32, chunk: u32) {
        // SAFETY: the caller's promise.
        let x = self.found.map(|from| D::pairs(unsafe { ptx::load_shared_16(from + slot) }));
        for (sums, tile) in self.sums.iter_mut().zip(0..) {
            // SAFETY: the caller's promise.
            let (codes, scales) = unsafe { (lane.codes(slot, tile), lane.scales::<F>(slot, tile)) };
            let rows = [0, 1].map(|row| Chunk { codes: codes[row], scales: scales[row] });
            let distance = F::distance::<D>(scales[0]).max(F::distance::<D>(scales[1]));
            if chunk < self.chunks {
                self.far = self.far.max(distance);
            }
            let of_step = scaled_products::<F, D>(&rows, &x, self.table);
            for i in 0..SUMS {
                sums[i] += of_step[i];
            }
        }
    }

    #[inline(always)]
    unsafe fn end(&mut self, turn: u32) {
        let of_turn = self.of_turns.wrapping_add((turn * Self::TURN_BYTES) as usize);
        let mut place = of_turn.wrapping_add((warp::lane() * 4) as usize).cast::<f32>();
        for sum in self.sums.as_flattened() {
            // SAFETY: the warp's, with room for its turns.
            unsafe { *place = *sum };
            place = place.wrapping_add(WARP as usize);
        }
        if F::farthest::<D>() > 0 {
            let all_usual = warp::ballot(self.far <= F::farthest::<D>()) == u32::MAX;
            if warp::lane() == 0 {
                // SAFETY: as above.
                unsafe { *self.flag(turn) = u32::from(all_usual) };
            }
        }
        self.sums = [[0.0; SUMS]; TILES];
        self.far = 0;
    }
}

/// # Safety
/// The contract of the kernels whose names have `lot`.
#[inline(always)]
pub(super) unsafe fn lot<F: Weights, D: Activations, const TILES: usize>(job: Job, grid: TurnsGrid) {
    let (block, number_of_lot) = grid.lots.divide_32(warp::thread_block());
    let tokens = [number_of_lot << grid.lot_bits, grid.tokens.min((number_of_lot + 1) << grid.lot_bits)];
    let segment_bits = Lot::<D, TILES>::KERNEL.segment_bits(grid.lot_bits);
    let half_row_bits = const { (ROW_PLACES / 2).ilog2() } - segment_bits;
    let row_bits = half_row_bits + const { 2 * TILES as u32 }.ilog2();
    let number = warp_number();
    let (team, split) = parts(number, grid.split_bits);
    let turns_of = |team: u32| Turns::new(&grid, 1 << row_bits, block, team);
    let warp_bytes = const { Lot::<D, TILES>::KERNEL.warp_bytes() };
    let shared = warp::shared::<u128>().cast::<u8>();
    let of_warp = shared.wrapping_add((number * warp_bytes) as usize);
    let turns = turns_of(team);
    // A team may have none, if there are few rows.
    if turns.count > 0 {
        let place = [split, ptx::shared_address(of_warp)];
        // SAFETY: the caller's contract; the memory is this warp's.
        unsafe {
            let product =
                Lot::<D, TILES>::new::<F>(&job, tokens[1] - tokens[0], segment_bits, split, of_warp);
            let activations = job.token(tokens[0]);
            let product = Steps::<F, _, TILES>::new(&job, &grid, turns, place, activations, product).all();
            if F::farthest::<D>() > 0 {
                let turns = turns_of(parts(warp_number(), grid.split_bits).0);
                product.pardon_zeros::<F>(&job, &turns, QUAD << segment_bits << grid.split_bits);
            }
        }
    }
    warp::barrier();

    let (splits, team_bits) = (1 << grid.split_bits, (grid.warps >> grid.split_bits).trailing_zeros());
    // What a warp of a team has of a turn.
    let of_turn = |turn: u32, team: u32, split: u32, bytes: u32| {
        let number = (team << grid.split_bits) + split;
        let in_warp =
            const { Lot::<D, TILES>::KERNEL.slots_bytes() } + turn * Lot::<D, TILES>::TURN_BYTES + bytes;
        shared.wrapping_add((number * warp_bytes + in_warp) as usize)
    };
    let all_usual = |turn: u32, team: u32| {
        let mut usual = 1;
        let mut split = 0;
        while F::farthest::<D>() > 0 && split < splits {
            // SAFETY: written by a warp of this block before the barrier.
            usual &= unsafe { *of_turn(turn, team, split, Lot::<D, TILES>::FLAG).cast::<u32>() };
            split += 1;
        }
        usual != 0
    };
    let mut output = warp::thread();
    while output < (grid.turns[0] + 1) << (team_bits + grid.lot_bits + row_bits) {
        let (rest, in_turn) = parts(output, row_bits);
        let (rest, of_lot) = parts(rest, grid.lot_bits);
        // Teams' first turns come before their second ones.
        let (turn, team) = parts(rest, team_bits);
        output += grid.warps * WARP;
        let Some(row) = turns_of(team).row(turn, in_turn) else { continue };
        if tokens[0] + of_lot >= tokens[1] || !all_usual(turn, team) {
            continue;
        }
        let mut sum = 0.0;
        let mut part = 0;
        while part < splits << segment_bits {
            let (split, segment) = parts(part, segment_bits);
            // Where the tensor core has it: places 8 rows apart, and two side by side of tokens, are in one lane.
            let (half, place) = parts(in_turn, half_row_bits);
            let [place, token_place] = [place, of_lot].map(|place| (place << segment_bits) + segment);
            let i = half * 2 + token_place % 2;
            let from = (i * WARP + place * QUAD + token_place / 2) * 4;
            // SAFETY: as above.
            sum += f64::from(unsafe { *of_turn(turn, team, split, from).cast::<f32>() });
            part += 1;
        }
        let sum = sum * f64::from(power_of_two(const { D::LOWERED[F::PLACE] }));
        // SAFETY: the result exists, and is this thread's.
        unsafe { job.store::<D>(row, tokens[0] + of_lot, sum) };
    }
    // The others are the definition's.
    if F::farthest::<D>() > 0 {
        // Found again: where branches diverge, what the steps use would not stay in uniform registers.
        let (team, split) = parts(warp_number(), grid.split_bits);
        let turns = turns_of(team);
        let mut turn = 0;
        while turn < turns.count {
            let mut in_turn = if all_usual(turn, team) { 1 << row_bits } else { split };
            while in_turn < 1 << row_bits {
                if let Some(row) = turns.row(turn, in_turn) {
                    // SAFETY: the warps of a team share its rows, and nobody stored them above.
                    unsafe { job.define::<F, D>(row, tokens) };
                }
                in_turn += splits;
            }
            turn += 1;
        }
    }
}
