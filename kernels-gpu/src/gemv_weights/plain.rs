//! Up to eight tokens at once, by plain loads to registers: weights are scaled before they are multiplied.
//!
//! Scaling is exact in either dtype. In NVFP4, significands of two bits are multiplied with ones of four. In
//! MXFP4, scales are powers of two, which must leave the dtype's exponents some room. Rows with MXFP4 scales
//! that do not ([`Activations::USUAL`]), and those that are multiplied together with them, are computed by
//! the definition.
//!
//! Fewer than eight tokens leave tile columns free. These and the tile rows are then given parts of the same
//! token and of the same row, segments. The sum of a row's segment with another segment of a token is
//! ignored.
//!
//! The tensor cores sum the products of a k-iteration from zero. The sums of k-iterations are added in f32,
//! and the parts of a row in f64.

use microscale_formats::dot::CHUNK;
use microscale_formats::plan::power_of_two;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::gemm::QUAD;
use microscale_kernels_abi::gemm::gemv::{PLAIN_THREADS, PlainParams};

use super::defined::WARPS;
use crate::dtype::Dtype;
use crate::product::multiply::{is_usual, scaled_products};
use crate::product::operand::{Chunk, Problem, Row};
use crate::product::scheduler::parts;
use crate::product::tensor_cores::{Activations, SUMS, Weights};
use crate::{ptx, warp};

/// The chunks that a lane loads for a k-iteration: two of each tile.
type Fragments<const TILES: usize> = [[Chunk; 2]; TILES];

/// The rows of weights and the token that a lane loads from.
struct LaneRows<const TILES: usize> {
    /// The rows of each tile's tile rows `p` and `p + 8`.
    rows: [[Row; 2]; TILES],
    /// The activations of the lane's token.
    activations: *const u8,
    /// The number of a row's last chunk.
    last: u32,
}

impl<const TILES: usize> LaneRows<TILES> {
    /// Loads a chunk of each row. Chunks behind the last one repeat it.
    ///
    /// # Safety
    /// The contract of the kernels.
    #[inline(always)]
    unsafe fn load<F: Weights>(&self, chunk: u32) -> Fragments<TILES> {
        let mut k_iteration = [[Chunk::NONE; 2]; TILES];
        for (loaded, rows) in k_iteration.iter_mut().zip(&self.rows) {
            for (loaded, row) in loaded.iter_mut().zip(rows) {
                // SAFETY: the caller's promise.
                *loaded = unsafe { row.load_once::<F>(chunk.min(self.last)) };
            }
        }
        k_iteration
    }

    /// Loads a chunk of the token's activations, eight at a time. Chunks behind the last one are zeros.
    ///
    /// # Safety
    /// The contract of the kernels.
    #[inline(always)]
    unsafe fn activations<D: Activations>(&self, chunk: u32) -> [[u32; 4]; 4] {
        let existing = chunk.min(self.last);
        let activations = self.activations.wrapping_add((existing * CHUNK as u32 * D::Dtype::BYTES) as usize);
        let activations = if chunk == existing { activations } else { (&raw const NOTHING).cast() };
        // SAFETY: the chunk is in the row, and lies on a multiple of 16 bytes.
        let load = |i: usize| D::pairs(unsafe { ptx::load_16_here(activations.wrapping_add(16 * i)) });
        [load(0), load(1), load(2), load(3)]
    }

    /// Returns whether all chunks with unusual scales, from one on at a stride, are zeros under a number.
    ///
    /// # Safety
    /// The contract of the kernels.
    #[inline(always)]
    unsafe fn usual_but_zeros<F: Weights, D: Activations>(&self, mut chunk: u32, chunk_stride: u32) -> bool {
        let mut usual = true;
        while chunk <= self.last {
            // SAFETY: the chunk is in the rows.
            let fragments = unsafe { self.load::<F>(chunk) };
            for chunk in fragments.as_flattened() {
                usual &= is_usual::<F, D>(chunk);
            }
            chunk += chunk_stride;
        }
        usual
    }
}

/// Zeros for chunks of activations behind the last one.
static NOTHING: [u128; 4] = [0; 4];

/// Adds the products of a k-iteration to the sums, and keeps the largest distance of its scales.
#[inline(always)]
fn add<F: Weights, D: Activations, const TILES: usize>(
    sums: &mut [[f32; SUMS]; TILES],
    far: &mut u32,
    k_iteration: &Fragments<TILES>,
    x: &[[u32; 4]; 4],
) {
    for (sums, rows) in sums.iter_mut().zip(k_iteration) {
        for chunk in rows {
            *far = F::distance::<D>(chunk.scales).max(*far);
        }
        let [products] = scaled_products::<F, D, 1>(rows, &[*x], D::TABLE);
        for i in 0..SUMS {
            sums[i] += products[i];
        }
    }
}

/// The thread block's number among those of its token tile, its expert's product and its tokens. A shuffle hides from the compiler that
/// this is the same each time, so that it takes no registers in between.
///
/// # Safety
/// The contract of the kernels; all lanes take part.
#[inline(always)]
unsafe fn work<F: Weights>(problem: &Problem, grid: &PlainParams) -> (u32, Problem, [u32; 2]) {
    let (block, token_tile) = grid.token_tiles.divide_32(warp::shuffle(warp::thread_block(), 0));
    // SAFETY: the caller's promise.
    let tile = unsafe { problem.routed.tile(token_tile, grid.token_tile_bits, grid.tokens as u32) };
    (block, problem.of_expert::<F>(tile.expert), [tile.first, tile.end])
}

/// Multiplies weights with up to eight tokens at a time.
///
/// # Safety
/// The contract of the kernels whose names have `unpipelined`.
#[inline(always)]
pub(super) unsafe fn unpipelined<F: Weights, D: Activations, const TILES: usize>(
    whole: Problem,
    grid: PlainParams,
) {
    // SAFETY: the caller's contract.
    let (block, problem, tokens) = unsafe { work::<F>(&whole, &grid) };
    if tokens[0] == tokens[1] {
        return;
    }
    let (number, lane) = (warp::thread() / WARP, warp::lane());
    let (group, slice) = parts(number, grid.slice_bits);
    let (quad, segment) = parts(lane / QUAD, grid.segment_bits);
    let first_row = |block: u32, group: u32| {
        ((u64::from(block) << grid.group_bits()) + u64::from(group)) << grid.group_row_bits()
    };
    let before = first_row(block, group);
    let (slices, group_rows) = (1 << grid.slice_bits, 1 << grid.group_row_bits());

    let mut rows_of_lane = LaneRows {
        rows: [[problem.weights.row::<F>(0, 0); 2]; TILES],
        // Tile columns without a token repeat the last one, and their sums are not stored.
        // SAFETY: the token exists.
        activations: unsafe { problem.token((tokens[0] + quad).min(tokens[1] - 1)) },
        last: (problem.shape.cols / CHUNK as u64) as u32 - 1,
    };
    for (row, i) in rows_of_lane.rows.as_flattened_mut().iter_mut().zip(0..) {
        // Rows past the last one repeat it.
        let number = before + u64::from((i << grid.half_row_bits()) + quad);
        *row = problem.weights.row::<F>(number.min(problem.shape.rows - 1), problem.shape.blocks);
    }

    let mut sums = [[0.0; SUMS]; TILES];
    let mut far = 0;
    let each_bits = const { QUAD.ilog2() } + grid.segment_bits;
    let k_iterations = (rows_of_lane.last >> each_bits) + 1;
    let chunk_stride = 1 << (each_bits + grid.slice_bits);
    let start = (slice << each_bits) + segment * QUAD + lane % QUAD;
    let (mut k_iteration, mut chunk) = (slice, start);
    // The weights of a k-iteration are on their way while another one is computed. The two alternate between
    // two sets of registers, so that nothing is moved. Loads behind branches stay where they are; the
    // assembler moves others to where they are needed.
    // SAFETY, of these loads and those below: the rows are the operands', by the caller's contract.
    let mut a = unsafe { rows_of_lane.load::<F>(chunk) };
    let mut b = a;
    while k_iteration < k_iterations {
        // SAFETY: as above.
        let activations = unsafe {
            if k_iteration + slices < k_iterations {
                b = rows_of_lane.load::<F>(chunk + chunk_stride);
            }
            rows_of_lane.activations::<D>(chunk)
        };
        add::<F, D, TILES>(&mut sums, &mut far, &a, &activations);
        if k_iteration + slices >= k_iterations {
            break;
        }
        // SAFETY: as above.
        let activations = unsafe {
            if k_iteration + 2 * slices < k_iterations {
                a = rows_of_lane.load::<F>(chunk + 2 * chunk_stride);
            }
            rows_of_lane.activations::<D>(chunk + chunk_stride)
        };
        add::<F, D, TILES>(&mut sums, &mut far, &b, &activations);
        (k_iteration, chunk) = (k_iteration + 2 * slices, chunk + 2 * chunk_stride);
    }

    // SAFETY: as above.
    let usual =
        far <= F::farthest::<D>() || unsafe { rows_of_lane.usual_but_zeros::<F, D>(start, chunk_stride) };
    let all_usual = warp::ballot(usual) == u32::MAX;
    let shared = warp::shared::<f32>();
    let per_warp = const { (TILES * SUMS) as u32 * WARP };
    let flags = shared.wrapping_add((WARPS * per_warp) as usize).cast::<u32>();
    // SAFETY: each lane has words of its own in the memory that the launch gives, and each warp a flag.
    unsafe {
        let mut to = shared.wrapping_add((number * per_warp + lane) as usize);
        for sum in sums.as_flattened() {
            *to = *sum;
            to = to.wrapping_add(WARP as usize);
        }
        if lane == 0 {
            *flags.wrapping_add(number as usize) = u32::from(all_usual);
        }
    }
    warp::barrier();
    // SAFETY: the caller's contract.
    let (block, problem, tokens) = unsafe { work::<F>(&whole, &grid) };
    let before = first_row(block, group);
    let mut output = warp::thread();
    while output < 1 << (grid.group_bits() + grid.group_row_bits() + grid.token_tile_bits) {
        let (rest, row_in_group) = parts(output, grid.group_row_bits());
        let (group, token_in_tile) = parts(rest, grid.token_tile_bits);
        let (row, token) = (first_row(block, group) + u64::from(row_in_group), tokens[0] + token_in_tile);
        let sum_of = |row_in_group: u32| {
            let (mut sum, mut all_usual) = (0.0, 1);
            let mut part = 0;
            while part < slices << grid.segment_bits {
                let (slice, segment) = parts(part, grid.segment_bits);
                let number = (group << grid.slice_bits) + slice;
                // The tensor core leaves four sums in a lane: those of tile rows eight apart, and of two tile
                // columns side by side.
                let (half, row_in_half) = parts(row_in_group, grid.half_row_bits());
                let [quad, tile_column] =
                    [row_in_half, token_in_tile].map(|number| (number << grid.segment_bits) + segment);
                let i = half * 2 + tile_column % 2;
                let from = (number * SUMS as u32 * TILES as u32 + i) * WARP + quad * QUAD + tile_column / 2;
                // SAFETY: written by a lane of this block before the barrier.
                unsafe {
                    sum += f64::from(*shared.wrapping_add(from as usize));
                    all_usual &= *flags.wrapping_add(number as usize);
                }
                part += 1;
            }
            (sum * f64::from(power_of_two(const { D::LOWERED[F::INDEX] })), all_usual != 0)
        };
        let (sum, all_usual) = sum_of(row_in_group);
        if row < problem.shape.rows && token < tokens[1] && all_usual {
            // SAFETY: the result exists, and no other thread stores it. A gate's rows are of one group.
            unsafe { problem.store::<D>(row, token, sum, || sum_of(row_in_group + 1).0) };
        }
        output += PLAIN_THREADS;
    }
    if F::farthest::<D>() > 0 {
        let mut all_usual = 1;
        let mut i = 0;
        while i < slices {
            // SAFETY: as above.
            all_usual &= unsafe { *flags.wrapping_add(((group << grid.slice_bits) + i) as usize) };
            i += 1;
        }
        let mut row_in_group = slice;
        while all_usual == 0
            && row_in_group < group_rows
            && before + u64::from(row_in_group) < problem.shape.rows
        {
            // SAFETY: the warps of a group share its rows, each has its own, and nobody stored them above.
            unsafe { problem.define::<F, D>(before + u64::from(row_in_group), tokens) };
            row_in_group += slices;
        }
    }
}
