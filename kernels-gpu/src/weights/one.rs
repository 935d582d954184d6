//! One token: scales are multiplied with sums.
//!
//! A lane has eight weights of a row for an instruction of tensor cores, and its three neighbours have those of other
//! groups, whose scales are others. So each neighbour's group has a place of tokens of its own, in which the others'
//! activations are zeros, and what comes out in a lane's places are its own rows' and its own groups' sums. That
//! takes four places of eight: the other four are for a second segment of each row.

use core::marker::PhantomData;

use microscale_formats::dot::CHUNK;
use microscale_formats::plan::power_of_two;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::{Ahead, QUAD, ROW_PLACES, TurnsGrid};

use crate::product::copies::{ACTIVATION_BYTES, Lane, kept, unknown};
use crate::product::epilogue::{both, shared_out};
use crate::product::multiply::{Product, group_products};
use crate::product::operand::Job;
use crate::product::pipeline::Steps;
use crate::product::scheduler::{Turns, parts, warp_number};
use crate::product::tensor_cores::{Activations, SUMS, Weights};
use crate::{ptx, warp};

/// Segments of a row.
const SEGMENTS: u32 = 1 << Ahead { one: true, tiles: 1 }.segment_bits(0);
/// Chunks of a row that a step has.
const CHUNKS: u32 = QUAD * SEGMENTS;
/// Rows that half a tile stands for.
const HALF_ROWS: u32 = ROW_PLACES / 2 / SEGMENTS;
/// Pieces that a chunk of activations is copied by.
const PIECES: u32 = ACTIVATION_BYTES / 16;
/// Where in a slot's activations zeros are: behind those of one segment, so that lanes read these, those of the other
/// segment and zeros from different banks.
const ZEROS: u32 = QUAD * ACTIVATION_BYTES;

/// What a warp makes of its steps.
struct One<D, const TILES: usize> {
    sums: [[f32; SUMS]; TILES],
    /// Bytes from the token's first activation to the 16 that the lane copies in the warp's first step, how many
    /// chunks there are from theirs on, and where they go.
    activations: u32,
    chunks: u32,
    to: u32,
    /// Where the activations for the lane's place are: zeros, if that is another group's.
    found: u32,
    /// Where the warp's sums are.
    of_turns: *mut u8,
    /// [`Activations::TABLE`].
    table: u32,
    dtype: PhantomData<D>,
}

impl<D: Activations, const TILES: usize> One<D, TILES> {
    const KERNEL: Ahead = Ahead { one: true, tiles: TILES as u32 };
    /// Rows of a turn.
    const ROWS: u32 = TILES as u32 * ROW_PLACES / SEGMENTS;

    /// Writes the zeros of the warp's shared memory.
    ///
    /// # Safety
    /// It is the warp's, all of whose lanes take part.
    #[inline(always)]
    unsafe fn new<F: Weights>(job: &Job, split: u32, of_warp: *mut u8) -> Self {
        let in_slot = const { <Self as Product<F, TILES>>::ACTIVATIONS };
        let lane = warp::lane();
        // Of activations, a lane copies a piece of one of eight chunks.
        let (eighth, piece) = (lane / PIECES, lane % PIECES);
        if eighth < const { Self::KERNEL.slots() } {
            let zeros = eighth * const { Self::KERNEL.slot_bytes() } + in_slot + ZEROS + piece * 16;
            // SAFETY: the caller's promise.
            unsafe { *of_warp.wrapping_add(zeros as usize).cast::<u128>() = 0 };
        }
        let address = ptx::shared_address(of_warp) + in_slot;
        let of_turns = of_warp.wrapping_add(const { Self::KERNEL.slots_bytes() } as usize);
        let (place, quarter) = (lane / QUAD, lane % QUAD);
        let (row_place, segment) = (place / SEGMENTS, place % SEGMENTS);
        let own = segment * (ZEROS + ACTIVATION_BYTES) + quarter * ACTIVATION_BYTES;
        let chunk = split * CHUNKS + eighth;
        Self {
            sums: [[0.0; SUMS]; TILES],
            activations: kept(chunk * ACTIVATION_BYTES + piece * 16),
            chunks: ((job.shape.cols / CHUNK as u64) as u32).saturating_sub(chunk),
            to: kept(address + lane * 16 + eighth / QUAD * ACTIVATION_BYTES),
            found: kept(address + if row_place == quarter { own } else { ZEROS }),
            of_turns,
            // SAFETY: the caller's promise.
            table: unsafe { unknown(D::TABLE, of_turns) },
            dtype: PhantomData,
        }
    }

    /// A row's sum: of what eight lanes have.
    #[inline(always)]
    fn of_row(&self) -> f32 {
        // Where the tensor core has them: two places of tokens side by side, here segments, are in one lane, and two
        // places of rows, eight apart. What a row's segment comes to with the token's other one is ignored.
        let second = warp::lane() & QUAD != 0;
        let halves = self.sums.map(|[a, b, c, d]| if second { [b, d] } else { [a, c] });
        let tiles = halves.map(|halves| shared_out(halves, 1));
        match tiles[..] {
            [a] => both(both(a, 2), 4),
            [a, b] => both(shared_out([a, b], 2), 4),
            [a, b, c, d] => shared_out([shared_out([a, b], 2), shared_out([c, d], 2)], 4),
            _ => f32::NAN,
        }
    }
}

impl<F: Weights, D: Activations, const TILES: usize> Product<F, TILES> for One<D, TILES> {
    const KERNEL: Ahead = Self::KERNEL;

    #[inline(always)]
    unsafe fn copy(&self, activations: *const u8, chunk: u32, slot: u32) {
        let there = if chunk < self.chunks { 16 } else { 0 };
        let from = activations.wrapping_add(self.activations as usize);
        // SAFETY: what is copied is in the token; its chunks lie on multiples of 16 bytes.
        unsafe { ptx::copy_16(self.to + slot, from, there) };
    }

    #[inline(always)]
    unsafe fn add(&mut self, lane: &Lane<TILES>, slot: u32, _: u32) {
        let load = |i: u32| {
            // SAFETY: the caller's promise.
            D::pairs(unsafe { ptx::load_shared_16(self.found + slot + 16 * i) }).map(D::raised)
        };
        let x = [load(0), load(1), load(2), load(3)];
        for tile in 0..TILES {
            // SAFETY: the caller's promise.
            let (rows, scales) =
                unsafe { (lane.codes(slot, tile as u32), lane.scales::<F>(slot, tile as u32)) };
            let scales = scales.map(F::halves);
            // Written out: the compiler keeps a loop's indices in memory.
            let of_groups = [
                group_products::<D, 0>(&rows, &x, self.table),
                group_products::<D, 2>(&rows, &x, self.table),
            ];
            for half in 0..2 {
                for i in 0..SUMS {
                    let sum = &mut self.sums[tile][i];
                    *sum = ptx::fma_f32(of_groups[half][i], scales[i / 2][half], *sum);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn end(&mut self, turn: u32) {
        let sum = self.of_row();
        // Of a row's lanes, the first that has its sum.
        let (of_rows, half) = (warp::lane() / CHUNKS, warp::lane() % CHUNKS);
        if half < 2 * TILES as u32 {
            let place = (turn * Self::ROWS + half * HALF_ROWS + of_rows) * 4;
            // SAFETY: the warp's, with room for the sums of its turns.
            unsafe { *self.of_turns.wrapping_add(place as usize).cast::<f32>() = sum };
        }
        self.sums = [[0.0; SUMS]; TILES];
    }
}

/// # Safety
/// The contract of the kernels whose names have `one`.
#[inline(always)]
pub(super) unsafe fn one<F: Weights, D: Activations, const TILES: usize>(job: Job, grid: TurnsGrid) {
    let (block, token) = grid.lots.divide_32(warp::thread_block());
    let (number, lane) = (warp_number(), warp::lane());
    let (team, split) = parts(number, grid.split_bits);
    let rows = One::<D, TILES>::ROWS;
    let turns_of = |team: u32| Turns::new(&grid, rows, block, team);
    let warp_bytes = const { One::<D, TILES>::KERNEL.warp_bytes() };
    let shared = warp::shared::<u128>().cast::<u8>();
    let of_warp = shared.wrapping_add((number * warp_bytes) as usize);
    let turns = turns_of(team);
    // A team may have none, if there are few rows.
    if turns.count > 0 {
        let place = [split, ptx::shared_address(of_warp)];
        // SAFETY: the caller's contract; the memory is this warp's.
        unsafe {
            let product = One::<D, TILES>::new::<F>(&job, split, of_warp);
            Steps::<F, _, TILES>::new(&job, &grid, turns, place, job.token(token), product).all();
        }
    }
    warp::barrier();

    let (splits, teams) = (1 << grid.split_bits, grid.warps >> grid.split_bits);
    let outputs = (grid.turns[0] + 1) * teams * rows;
    let mut before = warp::thread() - lane;
    while before < outputs {
        // Teams' first turns come before their second ones.
        let of_output = |output: u32| {
            let (turn, team) = parts(output / rows, teams.trailing_zeros());
            (turn, team, turns_of(team).row(turn, output % rows))
        };
        let output = before + lane;
        let (turn, team, row) = of_output(output);
        let mut undefined = false;
        if let Some(row) = row {
            let mut sum = 0.0;
            let mut split = 0;
            while split < splits {
                let number = (team << grid.split_bits) + split;
                let in_warp =
                    const { One::<D, TILES>::KERNEL.slots_bytes() } + (turn * rows + output % rows) * 4;
                let from = shared.wrapping_add((number * warp_bytes + in_warp) as usize);
                // SAFETY: written by a warp of this block before the barrier.
                sum += f64::from(unsafe { *from.cast::<f32>() });
                split += 1;
            }
            undefined = !sum.is_finite();
            if !undefined {
                let sum = sum * f64::from(power_of_two(const { D::BELOW - D::RAISED }));
                // SAFETY: the result exists, and is this thread's.
                unsafe { job.store::<D>(row, token, sum) };
            }
        }
        // What is too large on the way, or not a number, is the definition's to say.
        let mut undefined = warp::ballot(undefined);
        while undefined != 0 {
            let (_, _, row) = of_output(before + undefined.trailing_zeros());
            if let Some(row) = row {
                // SAFETY: the row and the token exist, and nobody stored this result.
                unsafe { job.define::<F, D>(row, [token, token + 1]) };
            }
            undefined &= undefined - 1;
        }
        before += grid.warps * WARP;
    }
}
