//! Up to 8, 16 or 32 tokens at once, pipelined: weights are scaled before they are multiplied, as in
//! [`super::unpipelined`], once for all eights of tokens.

use core::marker::PhantomData;

use microscale_formats::dot::CHUNK;
use microscale_formats::plan::power_of_two;
use microscale_kernels_abi::GemmConfig;
use microscale_kernels_abi::gemm::gemv::GemvParams as PipelinedGrid;
use microscale_kernels_abi::gemm::{QUAD, TILE_COLUMNS, TILE_ROWS};
use microscale_kernels_abi::launch::WARP;

use crate::product::copies::{ACTIVATION_BYTES, LaneCopies, opaque_constant, pin_in_register};
use crate::product::multiply::{gemv_config, Product, is_usual, scaled_products};
use crate::product::operand::{Chunk, Problem};
use crate::product::pipeline::Mainloop;
use crate::product::scheduler::{WorkTiles, parts, warp_number};
use crate::product::tensor_cores::{Activations, SUMS, Weights};
use crate::{shared, warp};

/// Pieces of 16 bytes in a tile column's activations of a k-iteration, four for each of four chunks.
const PIECES: u32 = QUAD * ACTIVATION_BYTES / 16;
/// Pieces of eight tile columns that a lane copies in a k-iteration, and pieces of a lane's chunk.
const COPIES: usize = 4;
/// Bytes of the activations of eight tile columns in a stage.
const EIGHT_BYTES: u32 = COPIES as u32 * WARP * 16;

/// The position of a tile column's piece among all pieces. Pieces are permuted (swizzled) so that eight lanes
/// that read at once find theirs in different banks.
#[inline(always)]
fn piece(column: u32, piece: u32) -> u32 {
    column * PIECES + (piece ^ piece / (PIECES / 2) ^ column % 2 * 2)
}

/// The multiplication with a token tile, and a warp's sums.
struct Several<D, const EIGHTS: usize, const TILES: usize> {
    sums: [[[f32; SUMS]; EIGHTS]; TILES],
    /// The largest distance of a work tile's scales so far.
    far: u32,
    /// Bytes from the token tile's first activation, or, where experts' rows are listed, from all rows' first one,
    /// to the pieces that the lane copies in the warp's first k-iteration, and how many chunks there are from theirs on, the same
    /// of several eights; and the address that the first is copied to in the first stage. Each other piece goes 32 pieces behind the
    /// one before.
    activations: [[u32; COPIES]; EIGHTS],
    copied_chunks: [u32; COPIES],
    to: u32,
    /// The addresses of the pieces of the lane's chunk for the first eight tokens in the first stage, and how many chunks there are from
    /// its own on.
    found: [u32; COPIES],
    chunks: u32,
    /// The warp's results: sums and a flag of each work tile.
    results: *mut u8,
    /// The exponent of the segments.
    segment_bits: u32,
    /// [`Activations::TABLE`].
    table: u32,
    dtype: PhantomData<D>,
}

impl<D: Activations, const EIGHTS: usize, const TILES: usize> Several<D, EIGHTS, TILES> {
    const KERNEL: GemmConfig = gemv_config(TILES as u32 * TILE_ROWS, EIGHTS as u32 * TILE_COLUMNS);
    /// Bytes that a warp keeps of a work tile: sums, and behind them a flag, at this offset.
    const WORK_TILE_BYTES: u32 = Self::KERNEL.gemv_work_tile_bytes();
    const FLAG: u32 = Self::KERNEL.gemv_accumulator_bytes();

    /// Makes the multiplication of a warp with its slice of K, for a token tile from a token on up to another.
    /// Tile columns without a token repeat the last one, and their sums are not stored.
    ///
    /// # Safety
    /// The contract of the kernels; `warp_memory` is the warp's alone, and all its lanes take part.
    #[inline(always)]
    unsafe fn new<F: Weights>(
        problem: &Problem,
        [first, end]: [u32; 2],
        segment_bits: u32,
        slice: u32,
        warp_memory: *mut u8,
    ) -> Self {
        let chunks = (problem.shape.cols / CHUNK as u64) as u32;
        let chunk = |column: u32| ((slice << segment_bits) + parts(column, segment_bits).1) * QUAD;
        let own = chunk(warp::lane() / QUAD) + warp::lane() % QUAD;
        // All lanes together copy the pieces of two tile columns at once.
        let (column, number) = (warp::lane() / PIECES, warp::lane() % PIECES);
        let (mut activations, mut copied_chunks) = ([[0; COPIES]; EIGHTS], [0; COPIES]);
        for (activations, i) in activations.as_flattened_mut().iter_mut().zip(0..) {
            let column = column + i * (WARP / PIECES);
            let token = end.min(first + parts(column, segment_bits).0 + 1) - 1;
            // SAFETY: the token exists.
            let of_token = unsafe { problem.rows_behind(first, token) } * (problem.shape.cols * 2) as u32;
            *activations = pin_in_register(of_token + chunk(column) * ACTIVATION_BYTES + number * 16);
        }
        for (chunks_left, i) in copied_chunks.iter_mut().zip(0..) {
            let column = column + i * (WARP / PIECES);
            *chunks_left = pin_in_register(chunks.saturating_sub(chunk(column) + number / 4));
        }
        let activations_offset = const { <Self as Product<F, TILES>>::ACTIVATIONS };
        let address = shared::address(warp_memory) + activations_offset;
        let results = warp_memory.wrapping_add(const { Self::KERNEL.gemv_results_offset() } as usize);
        Self {
            sums: [[[0.0; SUMS]; EIGHTS]; TILES],
            far: 0,
            activations,
            copied_chunks,
            to: pin_in_register(address + piece(column, number) * 16),
            found: [0, 1, 2, 3].map(|i| {
                let (quad, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
                pin_in_register(address + piece(quad, quarter * COPIES as u32 + i) * 16)
            }),
            chunks: chunks.saturating_sub(own),
            results,
            segment_bits,
            // SAFETY: the caller's promise.
            table: unsafe { opaque_constant(D::TABLE, results) },
            dtype: PhantomData,
        }
    }

    /// The address of a work tile's flag, which says whether all the warp's scales in it are usual.
    #[inline(always)]
    fn flag(&self, work_tile: u32) -> *mut u32 {
        self.results.wrapping_add((work_tile * Self::WORK_TILE_BYTES + Self::FLAG) as usize).cast()
    }

    /// Checks work tiles with unusual scales again: such scales do no harm over zeros.
    ///
    /// # Safety
    /// The contract of the kernels; all lanes take part, and the warp has done its k-iterations of these work
    /// tiles.
    #[inline(always)]
    unsafe fn recheck_zero_blocks<F: Weights>(
        &self,
        problem: &Problem,
        work_tiles: &WorkTiles,
        chunk_stride: u32,
    ) {
        let mut work_tile = 0;
        while work_tile < work_tiles.count {
            warp::sync();
            // SAFETY: the memory is the warp's.
            if unsafe { *self.flag(work_tile) } == 0 {
                let [first, _] = work_tiles.starts(work_tile);
                // SAFETY: the caller's promise.
                let usual = unsafe { self.usual_but_zeros::<F>(problem, first, chunk_stride) };
                let all_usual = warp::ballot(usual) == u32::MAX;
                // All lanes must have read the flag before one writes it: a vote does not order memory.
                warp::sync();
                if warp::lane() == 0 {
                    // SAFETY: the memory is the warp's.
                    unsafe { *self.flag(work_tile) = u32::from(all_usual) };
                }
            }
            work_tile += 1;
        }
    }

    /// Returns whether all of the lane's chunks of a work tile that have unusual scales are zeros under a
    /// number.
    ///
    /// # Safety
    /// The contract of the kernels.
    #[inline(always)]
    unsafe fn usual_but_zeros<F: Weights>(&self, problem: &Problem, first: u64, chunk_stride: u32) -> bool {
        let quad = warp::lane() / QUAD;
        let end = (problem.shape.cols / CHUNK as u64) as u32;
        let mut usual = true;
        let mut i = 0;
        while i < 2 * TILES as u32 {
            let row = first + u64::from((i * (TILE_ROWS / 2) + quad) >> self.segment_bits);
            let row = problem.weights.row::<F>(row.min(problem.shape.rows - 1), problem.shape.blocks);
            let mut chunk = end - self.chunks;
            while chunk < end {
                // SAFETY: the chunk is in the row.
                usual &= unsafe { is_usual::<F, D>(&row.load_once::<F>(chunk)) };
                chunk += chunk_stride;
            }
            i += 1;
        }
        usual
    }
}

impl<F: Weights, D: Activations, const EIGHTS: usize, const TILES: usize> Product<F, TILES>
    for Several<D, EIGHTS, TILES>
{
    const KERNEL: GemmConfig = Self::KERNEL;

    #[inline(always)]
    unsafe fn copy(&self, activations: *const u8, chunk: u32, stage: u32) {
        for (offset, i) in self.activations.as_flattened().iter().zip(0..) {
            // Only up to eight tokens have segments.
            let left = self.copied_chunks[if EIGHTS == 1 { i as usize } else { 0 }];
            let there = if chunk < left { 16 } else { 0 };
            let from = activations.wrapping_add(*offset as usize);
            // SAFETY: the chunk is in the token; its chunks lie on multiples of 16 bytes.
            unsafe { shared::copy_16(self.to + stage + i * (WARP * 16), from, there) };
        }
    }

    #[inline(always)]
    unsafe fn add(&mut self, lane: &LaneCopies<TILES>, stage: u32, chunk: u32) {
        // SAFETY: the caller's promise.
        let load = |from| D::pairs(unsafe { shared::load_16(from) });
        let mut x = [[[0; 4]; 4]; EIGHTS];
        for (x, eight) in x.iter_mut().zip(0..) {
            *x = self.found.map(|from| load(from + stage + eight * EIGHT_BYTES));
        }
        for (sums, tile) in self.sums.iter_mut().zip(0..) {
            // SAFETY: the caller's promise.
            let (codes, scales) = unsafe { (lane.codes(stage, tile), lane.scales::<F>(stage, tile)) };
            let rows = [0, 1].map(|row| Chunk { codes: codes[row], scales: scales[row] });
            let distance = F::distance::<D>(scales[0]).max(F::distance::<D>(scales[1]));
            if chunk < self.chunks {
                self.far = self.far.max(distance);
            }
            let products = scaled_products::<F, D, EIGHTS>(&rows, &x, self.table);
            for (sum, product) in sums.as_flattened_mut().iter_mut().zip(products.as_flattened()) {
                *sum += product;
            }
        }
    }

    #[inline(always)]
    unsafe fn end(&mut self, work_tile: u32) {
        if Self::KERNEL.gemv_results_offset() == 0 {
            // Results take the place of the ring, where zeros are still copied to behind the last k-iteration.
            shared::wait_for_copies::<0>();
            warp::sync();
        }
        let result = self.results.wrapping_add((work_tile * Self::WORK_TILE_BYTES) as usize);
        let mut to = result.wrapping_add((warp::lane() * 4) as usize).cast::<f32>();
        for sum in self.sums.as_flattened().as_flattened() {
            // SAFETY: the memory is the warp's, with room for the results of its work tiles.
            unsafe { *to = *sum };
            to = to.wrapping_add(WARP as usize);
        }
        if F::farthest::<D>() > 0 {
            let all_usual = warp::ballot(self.far <= F::farthest::<D>()) == u32::MAX;
            if warp::lane() == 0 {
                // SAFETY: as above.
                unsafe { *self.flag(work_tile) = u32::from(all_usual) };
            }
        }
        self.sums = [[[0.0; SUMS]; EIGHTS]; TILES];
        self.far = 0;
    }
}

/// Multiplies weights with up to so many eights of tokens at a time.
///
/// # Safety
/// The contract of the kernels whose names have `m8`, `m16` or `m32`.
#[inline(always)]
pub(super) unsafe fn several<F: Weights, D: Activations, const EIGHTS: usize, const TILES: usize>(
    problem: Problem,
    grid: PipelinedGrid,
) {
    let (block, token_tile) = grid.token_tiles.divide_32(warp::thread_block());
    // SAFETY: the caller's contract.
    let tile = unsafe { problem.routed.tile(token_tile, grid.token_tile_bits, grid.tokens) };
    if tile.first == tile.end {
        return;
    }
    let (problem, tokens) = (problem.of_expert::<F>(tile.expert), [tile.first, tile.end]);
    let segment_bits = Several::<D, EIGHTS, TILES>::KERNEL.gemv_segment_bits(grid.token_tile_bits);
    let half_row_bits = const { (TILE_ROWS / 2).ilog2() } - segment_bits;
    let row_bits = half_row_bits + const { 2 * TILES as u32 }.ilog2();
    let number = warp_number();
    let (group, slice) = parts(number, grid.slice_bits);
    let work_tiles_of = |group: u32| WorkTiles::new(&grid, 1 << row_bits, block, group);
    let warp_bytes = const { Several::<D, EIGHTS, TILES>::KERNEL.gemv_warp_bytes() };
    let shared = warp::shared::<u128>().cast::<u8>();
    let warp_memory = shared.wrapping_add((number * warp_bytes) as usize);
    let work_tiles = work_tiles_of(group);
    // A warp group may have no work tile, if there are few rows.
    if work_tiles.count > 0 {
        let at = [slice, shared::address(warp_memory)];
        // SAFETY: the caller's contract; the memory is this warp's.
        unsafe {
            let product =
                Several::<D, EIGHTS, TILES>::new::<F>(&problem, tokens, segment_bits, slice, warp_memory);
            let activations = problem.activations_of_tile(tokens[0]);
            let product =
                Mainloop::<F, _, TILES>::new(&problem, &grid, work_tiles, at, activations, product).run();
            if F::farthest::<D>() > 0 {
                let work_tiles = work_tiles_of(parts(warp_number(), grid.slice_bits).0);
                product.recheck_zero_blocks::<F>(
                    &problem,
                    &work_tiles,
                    QUAD << segment_bits << grid.slice_bits,
                );
            }
        }
    }
    warp::barrier();

    let (slices, group_bits) = (1 << grid.slice_bits, (grid.warps >> grid.slice_bits).trailing_zeros());
    // The address of some bytes of a warp's results of a work tile.
    let result = |work_tile: u32, group: u32, slice: u32, bytes: u32| {
        let number = (group << grid.slice_bits) + slice;
        let in_warp = const { Several::<D, EIGHTS, TILES>::KERNEL.gemv_results_offset() }
            + work_tile * Several::<D, EIGHTS, TILES>::WORK_TILE_BYTES
            + bytes;
        shared.wrapping_add((number * warp_bytes + in_warp) as usize)
    };
    let all_usual = |work_tile: u32, group: u32| {
        let mut usual = 1;
        let mut slice = 0;
        while F::farthest::<D>() > 0 && slice < slices {
            // SAFETY: written by a warp of this block before the barrier.
            usual &=
                unsafe { *result(work_tile, group, slice, Several::<D, EIGHTS, TILES>::FLAG).cast::<u32>() };
            slice += 1;
        }
        usual != 0
    };
    let mut output = warp::thread();
    while output < (grid.work_tiles[0] + 1) << (group_bits + grid.token_tile_bits + row_bits) {
        let (rest, row_in_tile) = parts(output, row_bits);
        let (rest, token_in_tile) = parts(rest, grid.token_tile_bits);
        // All groups' first work tiles come before their second ones.
        let (work_tile, group) = parts(rest, group_bits);
        output += grid.warps * WARP;
        let Some(row) = work_tiles_of(group).row(work_tile, row_in_tile) else { continue };
        if tokens[0] + token_in_tile >= tokens[1] || !all_usual(work_tile, group) {
            continue;
        }
        let sum_of = |row_in_tile: u32| {
            let mut sum = 0.0;
            let mut part = 0;
            while part < slices << segment_bits {
                let (slice, segment) = parts(part, segment_bits);
                // The tensor core leaves four sums in a lane: those of tile rows eight apart, and of two tile
                // columns side by side.
                let (half, row_in_half) = parts(row_in_tile, half_row_bits);
                let [quad, tile_column] =
                    [row_in_half, token_in_tile].map(|number| (number << segment_bits) + segment);
                let (tile, of_tile, eight) = (half / 2, half % 2, tile_column / TILE_COLUMNS);
                let i = (tile * EIGHTS as u32 + eight) * SUMS as u32 + of_tile * 2 + tile_column % 2;
                let from = (i * WARP + quad * QUAD + tile_column % TILE_COLUMNS / 2) * 4;
                // SAFETY: as above.
                sum += f64::from(unsafe { *result(work_tile, group, slice, from).cast::<f32>() });
                part += 1;
            }
            sum * f64::from(power_of_two(const { D::LOWERED[F::INDEX] }))
        };
        // SAFETY: the result exists, and no other thread stores it. A gate's rows are in one work tile.
        unsafe {
            let next = || sum_of(row_in_tile + 1);
            problem.store::<D>(row, tokens[0] + token_in_tile, sum_of(row_in_tile), next);
        }
    }
    // The other rows, which have unusual scales, are computed by the definition.
    if F::farthest::<D>() > 0 {
        // The work tiles are found again: kept across diverging branches, they would not have uniform
        // registers in the mainloop.
        let (group, slice) = parts(warp_number(), grid.slice_bits);
        let work_tiles = work_tiles_of(group);
        let mut work_tile = 0;
        while work_tile < work_tiles.count {
            let mut row_in_tile = if all_usual(work_tile, group) { 1 << row_bits } else { slice };
            while row_in_tile < 1 << row_bits {
                if let Some(row) = work_tiles.row(work_tile, row_in_tile) {
                    // SAFETY: the warps of a group share its rows, each has its own, and nobody stored them
                    // above.
                    unsafe { problem.define::<F, D>(row, tokens) };
                }
                row_in_tile += slices;
            }
            work_tile += 1;
        }
    }
}
