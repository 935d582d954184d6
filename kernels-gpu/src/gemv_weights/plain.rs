//! Up to eight tokens per pass, by plain loads to registers. Weights are scaled before they are
//! multiplied.
//!
//! Scaling is exact in either dtype. NVFP4 multiplies significands of two and of four bits. MXFP4
//! scales are powers of two, which must be in the range of the dtype ([`Activations::IN_RANGE`]).
//! Rows with other MXFP4 scales, and the rows of the same warps, are computed by the reference.
//!
//! With fewer than eight tokens, tile rows and columns next to each other hold segments: parts of
//! the same row and of the same token. The product of a row's segment and another segment of a
//! token is ignored.
//!
//! The tensor cores sum the products of a K-iteration from zero. The sums of K-iterations are added
//! in f32, and the slices and segments of a row in f64.

use microscale_formats::dot::CHUNK;
use microscale_formats::plan::power_of_two;
use microscale_kernels_abi::gemm::PLAIN_THREADS;
use microscale_kernels_abi::gemm::QUAD;
use microscale_kernels_abi::gemm::gemv::PlainParams;
use microscale_kernels_abi::launch::WARP;

use super::multiply::scaled_products;
use super::ragged::WARPS;
use crate::arithmetic::divide_by_power;
use crate::dtype::Dtype;
use crate::hardware::{ptx, warp};
use crate::product::operand::{CodeChunk, Row};
use crate::product::problem::Problem;
use crate::product::tensor_cores::{Activations, SUMS, WeightFormat, is_in_range};

/// The chunks that a lane loads per K-iteration: two of each tile.
type TileChunks<const TILES: usize> = [[CodeChunk; 2]; TILES];

/// A lane's rows of weights and its token, in global memory.
struct PlainRows<const TILES: usize> {
    /// The rows of each tile's tile rows `p` and `p + 8`.
    rows: [[Row; 2]; TILES],
    /// The activations of the lane's token.
    activations: *const u8,
    /// The number of a row's last chunk.
    last: u32,
}

impl<const TILES: usize> PlainRows<TILES> {
    /// Loads a chunk of each row. Chunks past the last one repeat it.
    ///
    /// # Safety
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn load<F: WeightFormat>(&self, chunk: u32) -> TileChunks<TILES> {
        let mut k_iteration = [[CodeChunk::NONE; 2]; TILES];
        for (loaded, rows) in k_iteration.iter_mut().zip(&self.rows) {
            for (loaded, row) in loaded.iter_mut().zip(rows) {
                // SAFETY: the row exists, and the chunk is at most its last one.
                *loaded = unsafe { row.load_once::<F>(chunk.min(self.last)) };
            }
        }
        k_iteration
    }

    /// Loads a chunk of the token's activations, eight at a time. Chunks past the last one are
    /// zeros.
    ///
    /// # Safety
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn activations<D: Activations>(&self, chunk: u32) -> [[u32; 4]; 4] {
        let existing = chunk.min(self.last);
        let activations = self.activations.wrapping_add((existing * CHUNK as u32 * D::Dtype::BYTES) as usize);
        let activations = if chunk == existing { activations } else { (&raw const ZEROS).cast() };
        // SAFETY: the chunk is in the row or the zeros, and starts on 16 bytes.
        let load = |i: usize| D::pairs(unsafe { ptx::load_16_here(activations.wrapping_add(16 * i)) });
        [load(0), load(1), load(2), load(3)]
    }

    /// Returns whether every chunk whose scale is out of range is all zeros, from `chunk` on with
    /// stride `chunk_stride`.
    ///
    /// # Safety
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn out_of_range_is_zero<F: WeightFormat, D: Activations>(
        &self,
        mut chunk: u32,
        chunk_stride: u32,
    ) -> bool {
        let mut in_range = true;
        while chunk <= self.last {
            // SAFETY: the rows exist.
            let fragments = unsafe { self.load::<F>(chunk) };
            for chunk in fragments.as_flattened() {
                in_range &= is_in_range::<F, D>(chunk);
            }
            chunk += chunk_stride;
        }
        in_range
    }
}

/// The activations of chunks past the last one.
static ZEROS: [u128; 4] = [0; 4];

/// Adds the products of a K-iteration to the sums, and keeps the largest scale offset.
#[inline(always)]
fn add<F: WeightFormat, D: Activations, const TILES: usize>(
    sums: &mut [[f32; SUMS]; TILES],
    scale_offset: &mut u32,
    k_iteration: &TileChunks<TILES>,
    x: &[[u32; 4]; 4],
) {
    for (sums, rows) in sums.iter_mut().zip(k_iteration) {
        for chunk in rows {
            *scale_offset = F::scale_offset::<D>(chunk.scales).max(*scale_offset);
        }
        let [products] = scaled_products::<F, D, 1>(rows, &[*x], D::TABLE);
        for i in 0..SUMS {
            sums[i] += products[i];
        }
    }
}

/// The thread block's number within its token tile, the product with its expert's weights, and its
/// tokens. A shuffle hides from LLVM that each call returns the same, so that nothing is kept in
/// registers meanwhile.
///
/// # Safety
/// The kernel's contract. All lanes call it.
#[inline(always)]
unsafe fn work_of_block<F: WeightFormat>(
    problem: &Problem,
    params: &PlainParams,
) -> (u32, Problem, [u32; 2]) {
    let (block, token_tile) = params.token_tiles.divide_32(warp::shuffle(warp::thread_block(), 0));
    // SAFETY: the launch has thread blocks for existing token tiles only.
    let tile = unsafe { problem.routed.tile(token_tile, 1 << params.token_tile_bits, params.tokens as u32) };
    (block, problem.of_expert::<F>(tile.expert), [tile.first, tile.end])
}

/// Multiplies weights by up to eight tokens at a time.
///
/// # Safety
/// The contract of the entry points of the mainloop `plain`.
#[inline(always)]
pub(super) unsafe fn plain<F: WeightFormat, D: Activations, const TILES: usize>(
    whole: Problem,
    params: PlainParams,
) {
    // SAFETY: all lanes are here.
    let (block, problem, tokens) = unsafe { work_of_block::<F>(&whole, &params) };
    if tokens[0] == tokens[1] {
        return;
    }
    let (number, lane) = (warp::thread() / WARP, warp::lane());
    let (group, slice) = divide_by_power(number, params.slice_bits);
    let (quad, segment) = divide_by_power(lane / QUAD, params.segment_bits);
    let first_row = |block: u32, group: u32| {
        ((u64::from(block) << params.group_bits()) + u64::from(group)) << params.group_row_bits()
    };
    let before = first_row(block, group);
    let (slices, group_rows) = (1 << params.slice_bits, 1 << params.group_row_bits());

    let mut rows_of_lane = PlainRows {
        rows: [[problem.weights.row::<F>(0, 0); 2]; TILES],
        // Tile columns without a token repeat the last one; their sums are not stored.
        // SAFETY: the token is at most the last one of the tile.
        activations: unsafe { problem.token((tokens[0] + quad).min(tokens[1] - 1)) },
        last: (problem.shape.cols / CHUNK as u64) as u32 - 1,
    };
    for (row, i) in rows_of_lane.rows.as_flattened_mut().iter_mut().zip(0..) {
        // Rows past the last one repeat it.
        let number = before + u64::from((i << params.half_row_bits()) + quad);
        *row = problem.weights.row::<F>(number.min(problem.shape.rows - 1), problem.shape.blocks);
    }

    let mut sums = [[0.0; SUMS]; TILES];
    let mut scale_offset = 0;
    let each_bits = const { QUAD.ilog2() } + params.segment_bits;
    let k_iterations = (rows_of_lane.last >> each_bits) + 1;
    let chunk_stride = 1 << (each_bits + params.slice_bits);
    let start = (slice << each_bits) + segment * QUAD + lane % QUAD;
    let (mut k_iteration, mut chunk) = (slice, start);
    // The weights of one K-iteration are loaded while another one is multiplied. Two sets of
    // registers alternate, so that nothing is moved. Loads after branches stay where they are; the
    // assembler would move others to their first use. SAFETY: the rows and the token exist.
    let mut a = unsafe { rows_of_lane.load::<F>(chunk) };
    let mut b = a;
    while k_iteration < k_iterations {
        // SAFETY: the rows and the token exist.
        let activations = unsafe {
            if k_iteration + slices < k_iterations {
                b = rows_of_lane.load::<F>(chunk + chunk_stride);
            }
            rows_of_lane.activations::<D>(chunk)
        };
        add::<F, D, TILES>(&mut sums, &mut scale_offset, &a, &activations);
        if k_iteration + slices >= k_iterations {
            break;
        }
        // SAFETY: the rows and the token exist.
        let activations = unsafe {
            if k_iteration + 2 * slices < k_iterations {
                a = rows_of_lane.load::<F>(chunk + 2 * chunk_stride);
            }
            rows_of_lane.activations::<D>(chunk + chunk_stride)
        };
        add::<F, D, TILES>(&mut sums, &mut scale_offset, &b, &activations);
        (k_iteration, chunk) = (k_iteration + 2 * slices, chunk + 2 * chunk_stride);
    }

    #[cfg(microscale_sm90)]
    ptx::start_next_kernel();
    // SAFETY: the rows exist.
    let in_range = scale_offset <= F::last_in_range::<D>()
        || unsafe { rows_of_lane.out_of_range_is_zero::<F, D>(start, chunk_stride) };
    let all_in_range = warp::ballot(in_range) == u32::MAX;
    let shared = warp::shared::<f32>();
    let per_warp = const { (TILES * SUMS) as u32 * WARP };
    let flags = shared.wrapping_add((WARPS * per_warp) as usize).cast::<u32>();
    // SAFETY: the launch's shared memory has words of each lane and a flag of each warp.
    unsafe {
        let mut to = shared.wrapping_add((number * per_warp + lane) as usize);
        for sum in sums.as_flattened() {
            *to = *sum;
            to = to.wrapping_add(WARP as usize);
        }
        if lane == 0 {
            *flags.wrapping_add(number as usize) = u32::from(all_in_range);
        }
    }
    warp::barrier();
    // SAFETY: all lanes are here.
    let (block, problem, tokens) = unsafe { work_of_block::<F>(&whole, &params) };
    let before = first_row(block, group);
    let mut output = warp::thread();
    while output < 1 << (params.group_bits() + params.group_row_bits() + params.token_tile_bits) {
        let (rest, row_in_group) = divide_by_power(output, params.group_row_bits());
        let (group, token_in_tile) = divide_by_power(rest, params.token_tile_bits);
        let (row, token) = (first_row(block, group) + u64::from(row_in_group), tokens[0] + token_in_tile);
        let sum_of = |row_in_group: u32| {
            let (mut sum, mut all_in_range) = (0.0, 1);
            let mut slice_and_segment = 0;
            while slice_and_segment < slices << params.segment_bits {
                let (slice, segment) = divide_by_power(slice_and_segment, params.segment_bits);
                let number = (group << params.slice_bits) + slice;
                // A lane has four accumulators: two tile rows, eight apart, times two adjacent tile
                // columns.
                let (half, row_in_half) = divide_by_power(row_in_group, params.half_row_bits());
                let [quad, tile_column] =
                    [row_in_half, token_in_tile].map(|number| (number << params.segment_bits) + segment);
                let i = half * 2 + tile_column % 2;
                let from = (number * SUMS as u32 * TILES as u32 + i) * WARP + quad * QUAD + tile_column / 2;
                // SAFETY: a lane of this thread block wrote it before the barrier.
                unsafe {
                    sum += f64::from(*shared.wrapping_add(from as usize));
                    all_in_range &= *flags.wrapping_add(number as usize);
                }
                slice_and_segment += 1;
            }
            (sum * f64::from(power_of_two(const { D::LOWERED[F::INDEX] })), all_in_range != 0)
        };
        let (sum, all_in_range) = sum_of(row_in_group);
        if row < problem.shape.rows && token < tokens[1] && all_in_range {
            // SAFETY: the result exists, and no other thread stores it. Both rows of a gate are in
            // one group.
            unsafe { problem.store::<D>(row, token, sum, || sum_of(row_in_group + 1).0) };
        }
        output += PLAIN_THREADS;
    }
    if F::last_in_range::<D>() > 0 {
        let mut all_in_range = 1;
        let mut i = 0;
        while i < slices {
            // SAFETY: each warp of this thread block wrote its flag before the barrier.
            all_in_range &= unsafe { *flags.wrapping_add(((group << params.slice_bits) + i) as usize) };
            i += 1;
        }
        let mut row_in_group = slice;
        while all_in_range == 0
            && row_in_group < group_rows
            && before + u64::from(row_in_group) < problem.shape.rows
        {
            // SAFETY: each warp of the group has other rows, and the loop above has not stored
            // them.
            unsafe { problem.store_reference::<F, D>(before + u64::from(row_in_group), tokens) };
            row_in_group += slices;
        }
    }
}
