//! Up to eight tokens at once: weights are scaled before they are multiplied.
//!
//! Two bits times four are exact in either dtype, and powers of two are where they leave the dtype's exponents some
//! room. Rows with MXFP4 scales outside of that ([`Activations::USUAL`]), and those that are multiplied together with
//! them, are computed by the definition.
//!
//! Fewer tokens leave places free, which are given parts of the same row and of the same token, segments. What a
//! segment of a row and another one of a token come to is ignored.
//!
//! The products of a step are summed by the tensor cores from zero, steps in f32, and the parts of a row in f64.

use microscale_formats::dot::CHUNK;
use microscale_formats::plan::power_of_two;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::{QUAD, WEIGHTS_THREADS, WeightsGrid};

use super::defined::WARPS;
use crate::dtype::Dtype;
use crate::product::multiply::{is_usual, scaled_products};
use crate::product::operand::{Chunk, Job, Row};
use crate::product::scheduler::parts;
use crate::product::tensor_cores::{Activations, SUMS, Weights};
use crate::{ptx, warp};

/// What a lane loads for a step.
type Step<const TILES: usize> = [[Chunk; 2]; TILES];

/// Where a lane's chunks lie.
struct Lane<const TILES: usize> {
    /// Of each tile's places `p` and `p + 8`.
    rows: [[Row; 2]; TILES],
    /// The activations of its token.
    activations: *const u8,
    /// The number of a row's last chunk.
    last: u32,
}

impl<const TILES: usize> Lane<TILES> {
    /// Loads a chunk of each row: the last one in the place of those behind it.
    ///
    /// # Safety
    /// As for the kernels.
    #[inline(always)]
    unsafe fn load<F: Weights>(&self, chunk: u32) -> Step<TILES> {
        let mut step = [[Chunk::NONE; 2]; TILES];
        for (loaded, rows) in step.iter_mut().zip(&self.rows) {
            for (loaded, row) in loaded.iter_mut().zip(rows) {
                // SAFETY: the caller's promise.
                *loaded = unsafe { row.load_once::<F>(chunk.min(self.last)) };
            }
        }
        step
    }

    /// Loads a chunk of the token's activations, eight at a time: zeros if it is not there.
    ///
    /// # Safety
    /// As for the kernels.
    #[inline(always)]
    unsafe fn activations<D: Activations>(&self, chunk: u32) -> [[u32; 4]; 4] {
        let place = chunk.min(self.last);
        let activations = self.activations.wrapping_add((place * CHUNK as u32 * D::Dtype::BYTES) as usize);
        let activations = if chunk == place { activations } else { (&raw const NOTHING).cast() };
        // SAFETY: the chunk is in the row, and lies on a multiple of 16 bytes.
        let load = |i: usize| D::pairs(unsafe { ptx::load_16_here(activations.wrapping_add(16 * i)) });
        [load(0), load(1), load(2), load(3)]
    }

    /// Whether all chunks from one on, so many apart, whose scales are not to be used are zeros under a number.
    ///
    /// # Safety
    /// As for the kernels.
    #[inline(always)]
    unsafe fn usual_but_zeros<F: Weights, D: Activations>(&self, mut chunk: u32, apart: u32) -> bool {
        let mut usual = true;
        while chunk <= self.last {
            // SAFETY: the chunk is in the rows.
            let step = unsafe { self.load::<F>(chunk) };
            for chunk in step.as_flattened() {
                usual &= is_usual::<F, D>(chunk);
            }
            chunk += apart;
        }
        usual
    }
}

/// A chunk of activations that are not there.
static NOTHING: [u128; 4] = [0; 4];

/// The sums of a step, added to those before it, and the largest distance of its scales.
#[inline(always)]
fn add<F: Weights, D: Activations, const TILES: usize>(
    sums: &mut [[f32; SUMS]; TILES],
    far: &mut u32,
    step: &Step<TILES>,
    x: &[[u32; 4]; 4],
) {
    for (sums, rows) in sums.iter_mut().zip(step) {
        for chunk in rows {
            *far = F::distance::<D>(chunk.scales).max(*far);
        }
        let of_step = scaled_products::<F, D>(rows, x, D::TABLE);
        for i in 0..SUMS {
            sums[i] += of_step[i];
        }
    }
}

/// # Safety
/// The contract of the kernels whose names end in the tiles alone.
#[inline(always)]
pub(super) unsafe fn many<F: Weights, D: Activations, const TILES: usize>(job: Job, grid: WeightsGrid) {
    let (block, lot) = grid.lots.divide_32(warp::thread_block());
    let (number, lane) = (warp::thread() / WARP, warp::lane());
    let (group, split) = parts(number, grid.split_bits);
    let (place, segment) = parts(lane / QUAD, grid.segment_bits);
    let first_row =
        |group: u32| ((u64::from(block) << grid.group_bits()) + u64::from(group)) << grid.group_row_bits();
    let before = first_row(group);
    let tokens = [lot << grid.lot_bits, (grid.tokens as u32).min((lot + 1) << grid.lot_bits)];
    let (splits, group_rows) = (1 << grid.split_bits, 1 << grid.group_row_bits());

    let mut of_lane = Lane {
        rows: [[job.weights.row::<F>(0, 0); 2]; TILES],
        // What tokens that are not there come to is not stored.
        activations: job.token((tokens[0] + place).min(tokens[1] - 1)),
        last: (job.shape.cols / CHUNK as u64) as u32 - 1,
    };
    for (row, i) in of_lane.rows.as_flattened_mut().iter_mut().zip(0..) {
        // Past the last row it is taken again.
        let number = before + u64::from((i << grid.half_row_bits()) + place);
        *row = job.weights.row::<F>(number.min(job.shape.rows - 1), job.shape.blocks);
    }

    let mut sums = [[0.0; SUMS]; TILES];
    let mut far = 0;
    let each_bits = const { QUAD.ilog2() } + grid.segment_bits;
    let steps = (of_lane.last >> each_bits) + 1;
    let apart = 1 << (each_bits + grid.split_bits);
    let start = (split << each_bits) + segment * QUAD + lane % QUAD;
    let (mut step, mut chunk) = (split, start);
    // A step's weights are on their way while another one is computed. They take turns in two places, so that nothing
    // is moved. Loads behind branches stay where they are; the assembler moves others to where they are needed. SAFETY,
    // of these and those below: the rows are the operands', by the caller's contract.
    let mut a = unsafe { of_lane.load::<F>(chunk) };
    let mut b = a;
    while step < steps {
        // SAFETY: as above.
        let activations = unsafe {
            if step + splits < steps {
                b = of_lane.load::<F>(chunk + apart);
            }
            of_lane.activations::<D>(chunk)
        };
        add::<F, D, TILES>(&mut sums, &mut far, &a, &activations);
        if step + splits >= steps {
            break;
        }
        // SAFETY: as above.
        let activations = unsafe {
            if step + 2 * splits < steps {
                a = of_lane.load::<F>(chunk + 2 * apart);
            }
            of_lane.activations::<D>(chunk + apart)
        };
        add::<F, D, TILES>(&mut sums, &mut far, &b, &activations);
        (step, chunk) = (step + 2 * splits, chunk + 2 * apart);
    }

    // SAFETY: as above.
    let usual = far <= F::farthest::<D>() || unsafe { of_lane.usual_but_zeros::<F, D>(start, apart) };
    let all_usual = warp::ballot(usual) == u32::MAX;
    let shared = warp::shared::<f32>();
    let per_warp = const { (TILES * SUMS) as u32 * WARP };
    let flags = shared.wrapping_add((WARPS * per_warp) as usize).cast::<u32>();
    // SAFETY: each lane has its own places in the memory that the launch gives, and each warp a flag.
    unsafe {
        let mut place = shared.wrapping_add((number * per_warp + lane) as usize);
        for sum in sums.as_flattened() {
            *place = *sum;
            place = place.wrapping_add(WARP as usize);
        }
        if lane == 0 {
            *flags.wrapping_add(number as usize) = u32::from(all_usual);
        }
    }
    warp::barrier();
    let mut output = warp::thread();
    while output < 1 << (grid.group_bits() + grid.group_row_bits() + grid.lot_bits) {
        let (rest, in_group) = parts(output, grid.group_row_bits());
        let (group, of_lot) = parts(rest, grid.lot_bits);
        let (row, token) = (first_row(group) + u64::from(in_group), tokens[0] + of_lot);
        let (mut sum, mut all_usual) = (0.0, 1);
        let mut part = 0;
        while part < splits << grid.segment_bits {
            let (split, segment) = parts(part, grid.segment_bits);
            let number = (group << grid.split_bits) + split;
            // Where the tensor core has it: places 8 rows apart, and two side by side of tokens, are in one lane.
            let (half, place) = parts(in_group, grid.half_row_bits());
            let [place, token_place] = [place, of_lot].map(|place| (place << grid.segment_bits) + segment);
            let i = half * 2 + token_place % 2;
            let from = (number * SUMS as u32 * TILES as u32 + i) * WARP + place * QUAD + token_place / 2;
            // SAFETY: written by a lane of this block before the barrier.
            unsafe {
                sum += f64::from(*shared.wrapping_add(from as usize));
                all_usual &= *flags.wrapping_add(number as usize);
            }
            part += 1;
        }
        if row < job.shape.rows && token < tokens[1] && all_usual != 0 {
            // SAFETY: the result exists, and is this thread's.
            unsafe {
                job.store::<D>(row, token, sum * f64::from(power_of_two(const { D::LOWERED[F::PLACE] })))
            };
        }
        output += WEIGHTS_THREADS;
    }
    if F::farthest::<D>() > 0 {
        let mut all_usual = 1;
        let mut i = 0;
        while i < splits {
            // SAFETY: as above.
            all_usual &= unsafe { *flags.wrapping_add(((group << grid.split_bits) + i) as usize) };
            i += 1;
        }
        let mut in_group = split;
        while all_usual == 0 && in_group < group_rows && before + u64::from(in_group) < job.shape.rows {
            // SAFETY: the warps of a group share its rows, and nobody stored them above.
            unsafe { job.define::<F, D>(before + u64::from(in_group), tokens) };
            in_group += splits;
        }
    }
}
