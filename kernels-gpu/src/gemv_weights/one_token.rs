//! One token, pipelined: sums are scaled, not weights.
//!
//! For an instruction of the tensor cores, a lane has eight weights of a row. Its three neighbours
//! have weights of other groups with other scales. So each lane's group gets its own tile column,
//! where the activations of the other groups are zeros. A lane's accumulators then belong to its
//! own rows and groups. This takes four of eight tile columns. The other four are for a second
//! segment of each row.

use core::marker::PhantomData;

use microscale_formats::dot::CHUNK;
use microscale_formats::plan::power_of_two;
use microscale_kernels_abi::Epilogue;
use microscale_kernels_abi::GemmConfig;
use microscale_kernels_abi::gemm::gemv::GemvParams;
use microscale_kernels_abi::gemm::{QUAD, TILE_ROWS};
use microscale_kernels_abi::launch::WARP;

use super::lane_copies::{ACTIVATION_BYTES, LaneCopies, opaque_constant};
use super::multiply::{Product, gemv_config, group_products};
use super::warp_pipeline::WarpPipeline;
use super::work_tiles::WorkTiles;
use crate::arithmetic::divide_by_power;
use crate::hardware::warp::pin_in_register;
use crate::hardware::{ptx, shared, warp};
use crate::product::lane_sums::{add_partner, split_with_partner};
use crate::product::problem::Problem;
use crate::product::tensor_cores::{Activations, SUMS, WeightFormat};

/// Segments of a row.
const SEGMENTS: u32 = 1 << gemv_config(TILE_ROWS, 1).gemv_segment_bits(0);
/// Chunks of a row per K-iteration.
const CHUNKS: u32 = QUAD * SEGMENTS;
/// Rows of the matrix in half a tile.
const HALF_ROWS: u32 = TILE_ROWS / 2 / SEGMENTS;
/// Pieces of 16 bytes in a chunk of activations.
const PIECES: u32 = ACTIVATION_BYTES / 16;
/// Offset of zeros in a stage's activations, between the two segments: lanes read both segments and
/// the zeros from different banks.
const ZEROS: u32 = QUAD * ACTIVATION_BYTES;

/// The products with one token, and a lane's accumulators.
struct OneToken<D, const TILES: usize> {
    sums: [[f32; SUMS]; TILES],
    /// Offset, from the token's first activation, of the 16 bytes that the lane copies in the
    /// warp's first K-iteration.
    global_activations: u32,
    /// Chunks of the row from the copied one to the end.
    chunks: u32,
    /// Shared address, in the first stage, of the lane's copy.
    shared_to: u32,
    /// Shared address, in the first stage, of the activations for the lane's tile column; of zeros
    /// for another group's column.
    shared_activations: u32,
    /// The warp's results in shared memory: a sum per row, work tile by work tile.
    results: *mut u8,
    /// [`Activations::TABLE`].
    table: u32,
    dtype: PhantomData<D>,
}

impl<D: Activations, const TILES: usize> OneToken<D, TILES> {
    const CONFIG: GemmConfig = {
        let config = gemv_config(TILES as u32 * TILE_ROWS, 1);
        assert!(config.id().is_some());
        config
    };
    /// Rows per work tile.
    const ROWS: u32 = TILES as u32 * TILE_ROWS / SEGMENTS;

    /// The products of a warp with slice `slice` of K. Writes the zeros to its shared memory.
    ///
    /// # Safety
    /// Only this warp uses `warp_memory`, which has [`GemmConfig::gemv_warp_bytes`] bytes of shared
    /// memory. All lanes call it.
    #[inline(always)]
    unsafe fn new<F: WeightFormat>(problem: &Problem, slice: u32, warp_memory: *mut u8) -> Self {
        let activations_offset = const { <Self as Product<F, TILES>>::ACTIVATIONS };
        let lane = warp::lane();
        // A lane copies a piece of one of eight chunks of activations.
        let (eighth, piece) = (lane / PIECES, lane % PIECES);
        if eighth < const { Self::CONFIG.gemv_stages() } {
            let zeros =
                eighth * const { Self::CONFIG.gemv_stage_bytes() } + activations_offset + ZEROS + piece * 16;
            // SAFETY: the offset is in the ring of the warp, on 16 bytes.
            unsafe { *warp_memory.wrapping_add(zeros as usize).cast::<u128>() = 0 };
        }
        let address = shared::address(warp_memory) + activations_offset;
        let results = warp_memory.wrapping_add(const { Self::CONFIG.gemv_ring_bytes() } as usize);
        let (quad, quarter) = (lane / QUAD, lane % QUAD);
        let (row_in_half, segment) = (quad / SEGMENTS, quad % SEGMENTS);
        let own = segment * (ZEROS + ACTIVATION_BYTES) + quarter * ACTIVATION_BYTES;
        let chunk = slice * CHUNKS + eighth;
        Self {
            sums: [[0.0; SUMS]; TILES],
            global_activations: pin_in_register(chunk * ACTIVATION_BYTES + piece * 16),
            chunks: ((problem.shape.cols / CHUNK as u64) as u32).saturating_sub(chunk),
            shared_to: pin_in_register(address + lane * 16 + eighth / QUAD * ACTIVATION_BYTES),
            shared_activations: pin_in_register(address + if row_in_half == quarter { own } else { ZEROS }),
            results,
            // SAFETY: 128 bytes from the results on belong to this warp.
            table: unsafe { opaque_constant(D::TABLE, results) },
            dtype: PhantomData,
        }
    }

    /// The sum of a row over the eight lanes that share it.
    #[inline(always)]
    fn of_row(&self) -> f32 {
        // A lane has four accumulators: two tile rows, eight apart, times two adjacent tile
        // columns, which are segments here. The product of a row's segment and the token's other
        // segment is ignored.
        let second = warp::lane() & QUAD != 0;
        let halves = self.sums.map(|[a, b, c, d]| if second { [b, d] } else { [a, c] });
        let tiles = halves.map(|halves| split_with_partner(halves, 1));
        match tiles[..] {
            [a] => add_partner(add_partner(a, 2), 4),
            [a, b] => add_partner(split_with_partner([a, b], 2), 4),
            [a, b, c, d] => {
                split_with_partner([split_with_partner([a, b], 2), split_with_partner([c, d], 2)], 4)
            }
            _ => f32::NAN,
        }
    }
}

impl<F: WeightFormat, D: Activations, const TILES: usize> Product<F, TILES> for OneToken<D, TILES> {
    const CONFIG: GemmConfig = Self::CONFIG;

    #[inline(always)]
    unsafe fn copy(&self, activations: *const u8, chunk: u32, stage: u32) {
        let bytes = if chunk < self.chunks { 16 } else { 0 };
        let from = activations.wrapping_add(self.global_activations as usize);
        // SAFETY: `bytes` is 0 past the row's last chunk. Chunks of activations start on 16 bytes.
        unsafe { shared::copy_16(self.shared_to + stage, from, bytes) };
    }

    #[inline(always)]
    unsafe fn add(&mut self, lane: &LaneCopies<TILES>, stage: u32, _: u32) {
        let load = |i: u32| {
            // SAFETY: the copies of the stage have completed.
            D::pairs(unsafe { shared::load_16(self.shared_activations + stage + 16 * i) }).map(D::raised)
        };
        let x = [load(0), load(1), load(2), load(3)];
        for tile in 0..TILES {
            // SAFETY: the copies of the stage have completed.
            let (rows, scales) =
                unsafe { (lane.codes(stage, tile as u32), lane.scales::<F>(stage, tile as u32)) };
            let scales = scales.map(F::halves);
            // Written out: in a loop, LLVM would keep the arrays in local memory.
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
    unsafe fn end(&mut self, work_tile: u32) {
        let sum = self.of_row();
        // The first lane with a row's sum stores it.
        let (of_rows, half) = (warp::lane() / CHUNKS, warp::lane() % CHUNKS);
        if half < 2 * TILES as u32 {
            let offset = (work_tile * Self::ROWS + half * HALF_ROWS + of_rows) * 4;
            // SAFETY: only this warp uses its results, which have room for all its work tiles.
            unsafe { *self.results.wrapping_add(offset as usize).cast::<f32>() = sum };
        }
        self.sums = [[0.0; SUMS]; TILES];
    }
}

/// Multiplies weights by one token at a time.
///
/// # Safety
/// The contract of the entry points of the mainloop `gemv`.
#[inline(always)]
pub(super) unsafe fn one_token<F: WeightFormat, D: Activations, const TILES: usize>(
    problem: Problem,
    params: GemvParams,
) {
    let (block, token_tile) = params.token_tiles.divide_32(warp::thread_block());
    // SAFETY: the launch has thread blocks for existing token tiles only.
    let tile = unsafe { problem.routed.tile(token_tile, 1, params.tokens) };
    if tile.first == tile.end {
        return;
    }
    let (problem, token) = (problem.of_expert::<F>(tile.expert), tile.first);
    let (number, lane) = (warp::number(), warp::lane());
    let (group, slice) = divide_by_power(number, params.slice_bits);
    let rows = OneToken::<D, TILES>::ROWS;
    let work_tiles_of = |group: u32| WorkTiles::new(&params, rows, block, group);
    let warp_bytes = const { OneToken::<D, TILES>::CONFIG.gemv_warp_bytes() };
    let shared = warp::shared::<u128>().cast::<u8>();
    let warp_memory = shared.wrapping_add((number * warp_bytes) as usize);
    let work_tiles = work_tiles_of(group);
    // With few rows, a group may have no work tile.
    if work_tiles.count > 0 {
        let at = [slice, shared::address(warp_memory)];
        // SAFETY: all lanes of the warp are here, only it uses `warp_memory`, and the token exists.
        unsafe {
            let product = OneToken::<D, TILES>::new::<F>(&problem, slice, warp_memory);
            WarpPipeline::<F, _, TILES>::new(
                &problem,
                &params,
                work_tiles,
                at,
                problem.token(token),
                product,
            )
            .run();
        }
    }
    warp::barrier();

    let (slices, groups) = (1 << params.slice_bits, params.warps >> params.slice_bits);
    let outputs = (params.work_tiles[0] + 1) * groups * rows;
    let mut before = warp::thread() - lane;
    while before < outputs {
        // The first work tiles of all groups come before the second ones.
        let of_output = |output: u32| {
            let (work_tile, group) = divide_by_power(output / rows, groups.trailing_zeros());
            (work_tile, group, work_tiles_of(group).row(work_tile, output % rows))
        };
        let output = before + lane;
        let (work_tile, group, row) = of_output(output);
        let sum_of = |row_in_tile: u32| {
            let mut sum = 0.0;
            let mut slice = 0;
            while slice < slices {
                let number = (group << params.slice_bits) + slice;
                let in_warp = const { OneToken::<D, TILES>::CONFIG.gemv_ring_bytes() }
                    + (work_tile * rows + row_in_tile) * 4;
                let from = shared.wrapping_add((number * warp_bytes + in_warp) as usize);
                // SAFETY: a warp of this thread block wrote it before the barrier.
                sum += f64::from(unsafe { *from.cast::<f32>() });
                slice += 1;
            }
            sum
        };
        let mut overflowed = false;
        if let Some(row) = row {
            let sum = sum_of(output % rows);
            overflowed = !sum.is_finite();
            // The two rows of a gate, an even one and the next, are in one work tile and computed
            // together.
            if problem.results.epilogue.has(Epilogue::GATED) {
                overflowed = row % 2 == 0 && (overflowed || !sum_of(output % rows + 1).is_finite());
            }
            if !overflowed {
                let factor = f64::from(power_of_two(const { D::BELOW - D::RAISED }));
                // SAFETY: the result exists, and no other thread stores it.
                unsafe {
                    problem.store::<D>(row, token, sum * factor, || sum_of(output % rows + 1) * factor)
                };
            }
        }
        // Rows whose sums became infinite or NaN are computed by the reference, with any format:
        // partial sums may overflow where the result does not.
        let mut overflowed = warp::ballot(overflowed);
        while overflowed != 0 {
            let (_, _, row) = of_output(before + overflowed.trailing_zeros());
            if let Some(row) = row {
                // SAFETY: row and token exist; all lanes are here, and no thread has stored this
                // result.
                unsafe { problem.store_reference::<F, D>(row, [token, token + 1]) };
            }
            overflowed &= overflowed - 1;
        }
        before += params.warps * WARP;
    }
}
