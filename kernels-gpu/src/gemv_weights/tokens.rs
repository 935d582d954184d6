//! Up to 8, 16 or 32 tokens per pass, pipelined. Weights are scaled before they are multiplied, as
//! in [`super::plain`], once for all tokens.

use core::marker::PhantomData;

use microscale_formats::dot::CHUNK;
use microscale_formats::plan::power_of_two;
use microscale_kernels_abi::GemmConfig;
use microscale_kernels_abi::gemm::gemv::GemvParams;
use microscale_kernels_abi::gemm::{QUAD, TILE_COLUMNS, TILE_ROWS};
use microscale_kernels_abi::launch::WARP;

use super::lane_copies::{ACTIVATION_BYTES, LaneCopies, opaque_constant};
use super::multiply::{Product, gemv_config, scaled_products};
use super::warp_pipeline::WarpPipeline;
use super::work_tiles::WorkTiles;
use crate::arithmetic::divide_by_power;
use crate::hardware::warp::pin_in_register;
use crate::hardware::{shared, warp};
use crate::product::operand::CodeChunk;
use crate::product::problem::Problem;
use crate::product::tensor_cores::{Activations, SUMS, WeightFormat, is_in_range};

/// Pieces of 16 bytes of a tile column's activations per K-iteration: four for each of four chunks.
const PIECES: u32 = QUAD * ACTIVATION_BYTES / 16;
/// Pieces of eight tile columns that a lane copies per K-iteration; also the pieces of a chunk.
const COPIES: usize = 4;
/// Bytes of the activations of eight tile columns in a stage.
const EIGHT_BYTES: u32 = COPIES as u32 * WARP * 16;

/// The position of a tile column's piece among all pieces. Pieces are swizzled, so that eight lanes
/// that read together read from different banks.
#[inline(always)]
fn piece(column: u32, piece: u32) -> u32 {
    column * PIECES + (piece ^ piece / (PIECES / 2) ^ column % 2 * 2)
}

/// The products with a token tile, and a lane's accumulators.
struct Tokens<D, const EIGHTS: usize, const TILES: usize> {
    sums: [[[f32; SUMS]; EIGHTS]; TILES],
    /// The largest scale offset of the work tile so far.
    scale_offset: u32,
    /// Offsets, from the token tile's origin, of the pieces that the lane copies in the warp's
    /// first K-iteration.
    global_activations: [[u32; COPIES]; EIGHTS],
    /// Chunks of a row from the copied pieces to the end; the same for each eight.
    copied_chunks: [u32; COPIES],
    /// Shared address, in the first stage, of the lane's first copied piece. The next pieces follow
    /// 32 pieces apart.
    shared_to: u32,
    /// Shared addresses, in the first stage, of the pieces of the lane's own chunk for the first
    /// eight tokens.
    shared_activations: [u32; COPIES],
    /// Chunks of a row from the lane's own chunk to the end.
    chunks: u32,
    /// The warp's results in shared memory: accumulators and a flag per work tile.
    results: *mut u8,
    /// Base-2 logarithm of the segments.
    segment_bits: u32,
    /// [`Activations::TABLE`].
    table: u32,
    dtype: PhantomData<D>,
}

impl<D: Activations, const EIGHTS: usize, const TILES: usize> Tokens<D, EIGHTS, TILES> {
    const CONFIG: GemmConfig = {
        let config = gemv_config(TILES as u32 * TILE_ROWS, EIGHTS as u32 * TILE_COLUMNS);
        assert!(config.id().is_some());
        config
    };
    /// Bytes of a warp's results per work tile: accumulators, then a flag.
    const WORK_TILE_BYTES: u32 = Self::CONFIG.gemv_work_tile_bytes();
    /// Offset of the flag, which says that the warp's scales are in range.
    const FLAG: u32 = Self::CONFIG.gemv_accumulator_bytes();

    /// The products of a warp with slice `slice` of K and the tokens from `first` to `end`. Tile
    /// columns without a token repeat the last one; their sums are not stored.
    ///
    /// # Safety
    /// The kernel's contract. Only this warp uses `warp_memory`, which has
    /// [`GemmConfig::gemv_warp_bytes`] bytes of shared memory. All lanes call it.
    #[inline(always)]
    unsafe fn new<F: WeightFormat>(
        problem: &Problem,
        [first, end]: [u32; 2],
        segment_bits: u32,
        slice: u32,
        warp_memory: *mut u8,
    ) -> Self {
        let chunks = (problem.shape.cols / CHUNK as u64) as u32;
        let chunk = |column: u32| ((slice << segment_bits) + divide_by_power(column, segment_bits).1) * QUAD;
        let own = chunk(warp::lane() / QUAD) + warp::lane() % QUAD;
        // A warp copies the pieces of two tile columns per instruction.
        let (column, number) = (warp::lane() / PIECES, warp::lane() % PIECES);
        let (mut activations, mut copied_chunks) = ([[0; COPIES]; EIGHTS], [0; COPIES]);
        for (activations, i) in activations.as_flattened_mut().iter_mut().zip(0..) {
            let column = column + i * (WARP / PIECES);
            let token = end.min(first + divide_by_power(column, segment_bits).0 + 1) - 1;
            // SAFETY: `first <= token < end`.
            let of_token =
                unsafe { problem.rows_from_origin(first, token) } * (problem.shape.cols * 2) as u32;
            *activations = pin_in_register(of_token + chunk(column) * ACTIVATION_BYTES + number * 16);
        }
        for (chunks_left, i) in copied_chunks.iter_mut().zip(0..) {
            let column = column + i * (WARP / PIECES);
            *chunks_left = pin_in_register(chunks.saturating_sub(chunk(column) + number / 4));
        }
        let activations_offset = const { <Self as Product<F, TILES>>::ACTIVATIONS };
        let address = shared::address(warp_memory) + activations_offset;
        let results = warp_memory.wrapping_add(const { Self::CONFIG.gemv_results_offset() } as usize);
        Self {
            sums: [[[0.0; SUMS]; EIGHTS]; TILES],
            scale_offset: 0,
            global_activations: activations,
            copied_chunks,
            shared_to: pin_in_register(address + piece(column, number) * 16),
            shared_activations: [0, 1, 2, 3].map(|i| {
                let (quad, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
                pin_in_register(address + piece(quad, quarter * COPIES as u32 + i) * 16)
            }),
            chunks: chunks.saturating_sub(own),
            results,
            segment_bits,
            // SAFETY: the results have more than 128 bytes, which only this warp uses.
            table: unsafe { opaque_constant(D::TABLE, results) },
            dtype: PhantomData,
        }
    }

    /// The address of a work tile's flag: 1 if all scales of the warp's slice are in range.
    #[inline(always)]
    fn flag(&self, work_tile: u32) -> *mut u32 {
        self.results.wrapping_add((work_tile * Self::WORK_TILE_BYTES + Self::FLAG) as usize).cast()
    }

    /// Checks work tiles with scales out of range again: such scales do no harm if their codes are
    /// all zeros.
    ///
    /// # Safety
    /// The kernel's contract. All lanes call it after the warp's K-iterations of these work tiles.
    #[inline(always)]
    unsafe fn recheck_zero_blocks<F: WeightFormat>(
        &self,
        problem: &Problem,
        work_tiles: &WorkTiles,
        chunk_stride: u32,
    ) {
        let mut work_tile = 0;
        while work_tile < work_tiles.count {
            warp::sync();
            // SAFETY: only this warp uses its results.
            if unsafe { *self.flag(work_tile) } == 0 {
                let [first, _] = work_tiles.starts(work_tile);
                // SAFETY: `first` is a row of the work tile.
                let in_range = unsafe { self.out_of_range_is_zero::<F>(problem, first, chunk_stride) };
                let all_in_range = warp::ballot(in_range) == u32::MAX;
                // All lanes have read the flag before one writes it. A vote does not order memory.
                warp::sync();
                if warp::lane() == 0 {
                    // SAFETY: only this warp uses its results.
                    unsafe { *self.flag(work_tile) = u32::from(all_in_range) };
                }
            }
            work_tile += 1;
        }
    }

    /// Returns whether every chunk of the lane whose scale is out of range is all zeros, in a work
    /// tile that starts at row `first`.
    ///
    /// # Safety
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn out_of_range_is_zero<F: WeightFormat>(
        &self,
        problem: &Problem,
        first: u64,
        chunk_stride: u32,
    ) -> bool {
        let quad = warp::lane() / QUAD;
        let end = (problem.shape.cols / CHUNK as u64) as u32;
        let mut in_range = true;
        let mut i = 0;
        while i < 2 * TILES as u32 {
            let row = first + u64::from((i * (TILE_ROWS / 2) + quad) >> self.segment_bits);
            let row = problem.weights.row::<F>(row.min(problem.shape.rows - 1), problem.shape.blocks);
            let mut chunk = end - self.chunks;
            while chunk < end {
                // SAFETY: the row exists, and `chunk < end`.
                in_range &= unsafe { is_in_range::<F, D>(&row.load_once::<F>(chunk)) };
                chunk += chunk_stride;
            }
            i += 1;
        }
        in_range
    }
}

impl<F: WeightFormat, D: Activations, const EIGHTS: usize, const TILES: usize> Product<F, TILES>
    for Tokens<D, EIGHTS, TILES>
{
    const CONFIG: GemmConfig = Self::CONFIG;

    #[inline(always)]
    unsafe fn copy(&self, activations: *const u8, chunk: u32, stage: u32) {
        for (offset, i) in self.global_activations.as_flattened().iter().zip(0..) {
            // Only up to eight tokens have segments.
            let left = self.copied_chunks[if EIGHTS == 1 { i as usize } else { 0 }];
            let bytes = if chunk < left { 16 } else { 0 };
            let from = activations.wrapping_add(*offset as usize);
            // SAFETY: `bytes` is 0 past the row's last chunk. Chunks of activations start on 16
            // bytes.
            unsafe { shared::copy_16(self.shared_to + stage + i * (WARP * 16), from, bytes) };
        }
    }

    #[inline(always)]
    unsafe fn add(&mut self, lane: &LaneCopies<TILES>, stage: u32, chunk: u32) {
        // SAFETY: the copies of the stage have completed.
        let load = |from| D::pairs(unsafe { shared::load_16(from) });
        let mut x = [[[0; 4]; 4]; EIGHTS];
        for (x, eight) in x.iter_mut().zip(0..) {
            *x = self.shared_activations.map(|from| load(from + stage + eight * EIGHT_BYTES));
        }
        for (sums, tile) in self.sums.iter_mut().zip(0..) {
            // SAFETY: the copies of the stage have completed.
            let (codes, scales) = unsafe { (lane.codes(stage, tile), lane.scales::<F>(stage, tile)) };
            let rows = [0, 1].map(|row| CodeChunk { codes: codes[row], scales: scales[row] });
            let scale_offset = F::scale_offset::<D>(scales[0]).max(F::scale_offset::<D>(scales[1]));
            if chunk < self.chunks {
                self.scale_offset = self.scale_offset.max(scale_offset);
            }
            let products = scaled_products::<F, D, EIGHTS>(&rows, &x, self.table);
            for (sum, product) in sums.as_flattened_mut().iter_mut().zip(products.as_flattened()) {
                *sum += product;
            }
        }
    }

    #[inline(always)]
    unsafe fn end(&mut self, work_tile: u32) {
        if Self::CONFIG.gemv_results_offset() == 0 {
            // Results reuse the ring. The copies after the last K-iteration still write zeros to
            // it.
            shared::wait_for_copies::<0>();
            warp::sync();
        }
        let result = self.results.wrapping_add((work_tile * Self::WORK_TILE_BYTES) as usize);
        let mut to = result.wrapping_add((warp::lane() * 4) as usize).cast::<f32>();
        for sum in self.sums.as_flattened().as_flattened() {
            // SAFETY: only this warp uses its results, which have room for all its work tiles.
            unsafe { *to = *sum };
            to = to.wrapping_add(WARP as usize);
        }
        if F::last_in_range::<D>() > 0 {
            let all_in_range = warp::ballot(self.scale_offset <= F::last_in_range::<D>()) == u32::MAX;
            if warp::lane() == 0 {
                // SAFETY: only this warp uses its results.
                unsafe { *self.flag(work_tile) = u32::from(all_in_range) };
            }
        }
        self.sums = [[[0.0; SUMS]; EIGHTS]; TILES];
        self.scale_offset = 0;
    }
}

/// Multiplies weights by token tiles of at most `EIGHTS` times eight tokens.
///
/// # Safety
/// The contract of the entry points of the mainloop `gemv`.
#[inline(always)]
pub(super) unsafe fn tokens<F: WeightFormat, D: Activations, const EIGHTS: usize, const TILES: usize>(
    problem: Problem,
    params: GemvParams,
) {
    let (block, token_tile) = params.token_tiles.divide_32(warp::thread_block());
    // SAFETY: the launch has thread blocks for existing token tiles only.
    let tile = unsafe { problem.routed.tile(token_tile, 1 << params.token_tile_bits, params.tokens) };
    if tile.first == tile.end {
        return;
    }
    let (problem, tokens) = (problem.of_expert::<F>(tile.expert), [tile.first, tile.end]);
    let segment_bits = Tokens::<D, EIGHTS, TILES>::CONFIG.gemv_segment_bits(params.token_tile_bits);
    let half_row_bits = const { (TILE_ROWS / 2).ilog2() } - segment_bits;
    let row_bits = half_row_bits + const { 2 * TILES as u32 }.ilog2();
    let number = warp::number();
    let (group, slice) = divide_by_power(number, params.slice_bits);
    let work_tiles_of = |group: u32| WorkTiles::new(&params, 1 << row_bits, block, group);
    let warp_bytes = const { Tokens::<D, EIGHTS, TILES>::CONFIG.gemv_warp_bytes() };
    let shared = warp::shared::<u128>().cast::<u8>();
    let warp_memory = shared.wrapping_add((number * warp_bytes) as usize);
    let work_tiles = work_tiles_of(group);
    // With few rows, a group may have no work tile.
    if work_tiles.count > 0 {
        let at = [slice, shared::address(warp_memory)];
        // SAFETY: all lanes of the warp are here, and only it uses `warp_memory`.
        unsafe {
            let product =
                Tokens::<D, EIGHTS, TILES>::new::<F>(&problem, tokens, segment_bits, slice, warp_memory);
            let activations = problem.origin_of_tile(tokens[0]);
            let product =
                WarpPipeline::<F, _, TILES>::new(&problem, &params, work_tiles, at, activations, product)
                    .run();
            if F::last_in_range::<D>() > 0 {
                let work_tiles = work_tiles_of(divide_by_power(warp::number(), params.slice_bits).0);
                product.recheck_zero_blocks::<F>(
                    &problem,
                    &work_tiles,
                    QUAD << segment_bits << params.slice_bits,
                );
            }
        }
    }
    warp::barrier();

    let (slices, group_bits) = (1 << params.slice_bits, (params.warps >> params.slice_bits).trailing_zeros());
    // The address of byte `bytes` of a warp's results of a work tile.
    let result = |work_tile: u32, group: u32, slice: u32, bytes: u32| {
        let number = (group << params.slice_bits) + slice;
        let in_warp = const { Tokens::<D, EIGHTS, TILES>::CONFIG.gemv_results_offset() }
            + work_tile * Tokens::<D, EIGHTS, TILES>::WORK_TILE_BYTES
            + bytes;
        shared.wrapping_add((number * warp_bytes + in_warp) as usize)
    };
    let all_in_range = |work_tile: u32, group: u32| {
        let mut in_range = 1;
        let mut slice = 0;
        while F::last_in_range::<D>() > 0 && slice < slices {
            // SAFETY: a warp of this thread block wrote it before the barrier.
            in_range &=
                unsafe { *result(work_tile, group, slice, Tokens::<D, EIGHTS, TILES>::FLAG).cast::<u32>() };
            slice += 1;
        }
        in_range != 0
    };
    let mut output = warp::thread();
    while output < (params.work_tiles[0] + 1) << (group_bits + params.token_tile_bits + row_bits) {
        let (rest, row_in_tile) = divide_by_power(output, row_bits);
        let (rest, token_in_tile) = divide_by_power(rest, params.token_tile_bits);
        // The first work tiles of all groups come before the second ones.
        let (work_tile, group) = divide_by_power(rest, group_bits);
        output += params.warps * WARP;
        let Some(row) = work_tiles_of(group).row(work_tile, row_in_tile) else { continue };
        if tokens[0] + token_in_tile >= tokens[1] || !all_in_range(work_tile, group) {
            continue;
        }
        let sum_of = |row_in_tile: u32| {
            let mut sum = 0.0;
            let mut slice_and_segment = 0;
            while slice_and_segment < slices << segment_bits {
                let (slice, segment) = divide_by_power(slice_and_segment, segment_bits);
                // A lane has four accumulators: two tile rows, eight apart, times two adjacent tile
                // columns.
                let (half, row_in_half) = divide_by_power(row_in_tile, half_row_bits);
                let [quad, tile_column] =
                    [row_in_half, token_in_tile].map(|number| (number << segment_bits) + segment);
                let (tile, of_tile, eight) = (half / 2, half % 2, tile_column / TILE_COLUMNS);
                let i = (tile * EIGHTS as u32 + eight) * SUMS as u32 + of_tile * 2 + tile_column % 2;
                let from = (i * WARP + quad * QUAD + tile_column % TILE_COLUMNS / 2) * 4;
                // SAFETY: a warp of this thread block wrote it before the barrier.
                sum += f64::from(unsafe { *result(work_tile, group, slice, from).cast::<f32>() });
                slice_and_segment += 1;
            }
            sum * f64::from(power_of_two(const { D::LOWERED[F::INDEX] }))
        };
        // SAFETY: the result exists, and no other thread stores it. Both rows of a gate are in one
        // work tile.
        unsafe {
            let next = || sum_of(row_in_tile + 1);
            problem.store::<D>(row, tokens[0] + token_in_tile, sum_of(row_in_tile), next);
        }
    }
    // Rows with scales out of range are computed by the reference.
    if F::last_in_range::<D>() > 0 {
        // The work tiles are computed again: kept across divergent branches, they would not be in
        // uniform registers in the mainloop.
        let (group, slice) = divide_by_power(warp::number(), params.slice_bits);
        let work_tiles = work_tiles_of(group);
        let mut work_tile = 0;
        while work_tile < work_tiles.count {
            let mut row_in_tile = if all_in_range(work_tile, group) { 1 << row_bits } else { slice };
            while row_in_tile < 1 << row_bits {
                if let Some(row) = work_tiles.row(work_tile, row_in_tile) {
                    // SAFETY: each warp of the group has other rows, and the loop above has not
                    // stored them.
                    unsafe { problem.store_reference::<F, D>(row, tokens) };
                }
                row_in_tile += slices;
            }
            work_tile += 1;
        }
    }
}
