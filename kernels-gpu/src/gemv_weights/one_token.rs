//! One token: scales are multiplied with sums.
//!
//! A lane has eight weights of a row for an instruction of tensor cores, and its three neighbours have those
//! of other groups, which have other scales. So each neighbour's group has a tile column of its own, in which
//! the other groups' activations are zeros. The sums that come out in a lane are then those of its own rows
//! and its own groups. That takes four tile columns of eight: the other four are for a second segment of each
//! row.

use core::marker::PhantomData;

use microscale_formats::dot::CHUNK;
use microscale_formats::plan::power_of_two;
use microscale_kernels_abi::Epilogue;
use microscale_kernels_abi::GemmConfig;
use microscale_kernels_abi::gemm::gemv::GemvParams as PipelinedGrid;
use microscale_kernels_abi::gemm::{QUAD, TILE_ROWS};
use microscale_kernels_abi::launch::WARP;

use crate::product::copies::{ACTIVATION_BYTES, LaneCopies, opaque_constant, pin_in_register};
use crate::product::epilogue::{both, shared_out};
use crate::product::multiply::{gemv_config, Product, group_products};
use crate::product::operand::Problem;
use crate::product::pipeline::Mainloop;
use crate::product::scheduler::{WorkTiles, parts, warp_number};
use crate::product::tensor_cores::{Activations, SUMS, Weights};
use crate::{ptx, shared, warp};

/// Segments of a row.
const SEGMENTS: u32 = 1 << gemv_config(TILE_ROWS, 1).gemv_segment_bits(0);
/// Chunks of a row in a k-iteration.
const CHUNKS: u32 = QUAD * SEGMENTS;
/// Rows that half a tile stands for.
const HALF_ROWS: u32 = TILE_ROWS / 2 / SEGMENTS;
/// Pieces of 16 bytes in a chunk of activations.
const PIECES: u32 = ACTIVATION_BYTES / 16;
/// The offset of zeros in a stage's activations. They lie behind the first segment's, so that lanes read this
/// segment, the other one and zeros from different banks.
const ZEROS: u32 = QUAD * ACTIVATION_BYTES;

/// The multiplication with one token, and a warp's sums.
struct M1<D, const TILES: usize> {
    sums: [[f32; SUMS]; TILES],
    /// Bytes from the token's first activation to the 16 that the lane copies in the warp's first
    /// k-iteration, how many chunks there are from theirs on, and the address that they are copied to in the
    /// first stage.
    activations: u32,
    chunks: u32,
    to: u32,
    /// The address of the activations for the lane's tile column in the first stage: zeros, if it is another
    /// group's.
    found: u32,
    /// The warp's results: a sum of each row, work tile by work tile.
    results: *mut u8,
    /// [`Activations::TABLE`].
    table: u32,
    dtype: PhantomData<D>,
}

impl<D: Activations, const TILES: usize> M1<D, TILES> {
    const KERNEL: GemmConfig = gemv_config(TILES as u32 * TILE_ROWS, 1);
    /// Rows of a work tile.
    const ROWS: u32 = TILES as u32 * TILE_ROWS / SEGMENTS;

    /// Makes the multiplication of a warp with its slice of K, and writes the zeros in its shared memory.
    ///
    /// # Safety
    /// `warp_memory` is the warp's alone, and all its lanes take part.
    #[inline(always)]
    unsafe fn new<F: Weights>(problem: &Problem, slice: u32, warp_memory: *mut u8) -> Self {
        let activations_offset = const { <Self as Product<F, TILES>>::ACTIVATIONS };
        let lane = warp::lane();
        // A lane copies a piece of one of eight chunks of activations.
        let (eighth, piece) = (lane / PIECES, lane % PIECES);
        if eighth < const { Self::KERNEL.gemv_stages() } {
            let zeros =
                eighth * const { Self::KERNEL.gemv_stage_bytes() } + activations_offset + ZEROS + piece * 16;
            // SAFETY: the caller's promise.
            unsafe { *warp_memory.wrapping_add(zeros as usize).cast::<u128>() = 0 };
        }
        let address = shared::address(warp_memory) + activations_offset;
        let results = warp_memory.wrapping_add(const { Self::KERNEL.gemv_ring_bytes() } as usize);
        let (quad, quarter) = (lane / QUAD, lane % QUAD);
        let (row_in_half, segment) = (quad / SEGMENTS, quad % SEGMENTS);
        let own = segment * (ZEROS + ACTIVATION_BYTES) + quarter * ACTIVATION_BYTES;
        let chunk = slice * CHUNKS + eighth;
        Self {
            sums: [[0.0; SUMS]; TILES],
            activations: pin_in_register(chunk * ACTIVATION_BYTES + piece * 16),
            chunks: ((problem.shape.cols / CHUNK as u64) as u32).saturating_sub(chunk),
            to: pin_in_register(address + lane * 16 + eighth / QUAD * ACTIVATION_BYTES),
            found: pin_in_register(address + if row_in_half == quarter { own } else { ZEROS }),
            results,
            // SAFETY: the caller's promise.
            table: unsafe { opaque_constant(D::TABLE, results) },
            dtype: PhantomData,
        }
    }

    /// The sum of a row, which eight lanes have parts of.
    #[inline(always)]
    fn of_row(&self) -> f32 {
        // The tensor core leaves four sums in a lane: those of two tile columns side by side, here segments,
        // and of two tile rows, eight apart. The sum of a row's segment with the token's other segment is
        // ignored.
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

impl<F: Weights, D: Activations, const TILES: usize> Product<F, TILES> for M1<D, TILES> {
    const KERNEL: GemmConfig = Self::KERNEL;

    #[inline(always)]
    unsafe fn copy(&self, activations: *const u8, chunk: u32, stage: u32) {
        let there = if chunk < self.chunks { 16 } else { 0 };
        let from = activations.wrapping_add(self.activations as usize);
        // SAFETY: the chunk is in the token; its chunks lie on multiples of 16 bytes.
        unsafe { shared::copy_16(self.to + stage, from, there) };
    }

    #[inline(always)]
    unsafe fn add(&mut self, lane: &LaneCopies<TILES>, stage: u32, _: u32) {
        let load = |i: u32| {
            // SAFETY: the caller's promise.
            D::pairs(unsafe { shared::load_16(self.found + stage + 16 * i) }).map(D::raised)
        };
        let x = [load(0), load(1), load(2), load(3)];
        for tile in 0..TILES {
            // SAFETY: the caller's promise.
            let (rows, scales) =
                unsafe { (lane.codes(stage, tile as u32), lane.scales::<F>(stage, tile as u32)) };
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
    unsafe fn end(&mut self, work_tile: u32) {
        let sum = self.of_row();
        // The first of a row's lanes that has its sum stores it.
        let (of_rows, half) = (warp::lane() / CHUNKS, warp::lane() % CHUNKS);
        if half < 2 * TILES as u32 {
            let offset = (work_tile * Self::ROWS + half * HALF_ROWS + of_rows) * 4;
            // SAFETY: the memory is the warp's, with room for the sums of its work tiles.
            unsafe { *self.results.wrapping_add(offset as usize).cast::<f32>() = sum };
        }
        self.sums = [[0.0; SUMS]; TILES];
    }
}

/// Multiplies weights with one token.
///
/// # Safety
/// The contract of the kernels whose names have `m1`.
#[inline(always)]
pub(super) unsafe fn m1<F: Weights, D: Activations, const TILES: usize>(
    problem: Problem,
    grid: PipelinedGrid,
) {
    let (block, token_tile) = grid.token_tiles.divide_32(warp::thread_block());
    // SAFETY: the caller's contract.
    let tile = unsafe { problem.routed.tile(token_tile, 0, grid.tokens) };
    if tile.first == tile.end {
        return;
    }
    let (problem, token) = (problem.of_expert::<F>(tile.expert), tile.first);
    let (number, lane) = (warp_number(), warp::lane());
    let (group, slice) = parts(number, grid.slice_bits);
    let rows = M1::<D, TILES>::ROWS;
    let work_tiles_of = |group: u32| WorkTiles::new(&grid, rows, block, group);
    let warp_bytes = const { M1::<D, TILES>::KERNEL.gemv_warp_bytes() };
    let shared = warp::shared::<u128>().cast::<u8>();
    let warp_memory = shared.wrapping_add((number * warp_bytes) as usize);
    let work_tiles = work_tiles_of(group);
    // A warp group may have no work tile, if there are few rows.
    if work_tiles.count > 0 {
        let at = [slice, shared::address(warp_memory)];
        // SAFETY: the caller's contract; the memory is this warp's.
        unsafe {
            let product = M1::<D, TILES>::new::<F>(&problem, slice, warp_memory);
            Mainloop::<F, _, TILES>::new(&problem, &grid, work_tiles, at, problem.token(token), product)
                .run();
        }
    }
    warp::barrier();

    let (slices, groups) = (1 << grid.slice_bits, grid.warps >> grid.slice_bits);
    let outputs = (grid.work_tiles[0] + 1) * groups * rows;
    let mut before = warp::thread() - lane;
    while before < outputs {
        // All groups' first work tiles come before their second ones.
        let of_output = |output: u32| {
            let (work_tile, group) = parts(output / rows, groups.trailing_zeros());
            (work_tile, group, work_tiles_of(group).row(work_tile, output % rows))
        };
        let output = before + lane;
        let (work_tile, group, row) = of_output(output);
        let sum_of = |row_in_tile: u32| {
            let mut sum = 0.0;
            let mut slice = 0;
            while slice < slices {
                let number = (group << grid.slice_bits) + slice;
                let in_warp =
                    const { M1::<D, TILES>::KERNEL.gemv_ring_bytes() } + (work_tile * rows + row_in_tile) * 4;
                let from = shared.wrapping_add((number * warp_bytes + in_warp) as usize);
                // SAFETY: written by a warp of this block before the barrier.
                sum += f64::from(unsafe { *from.cast::<f32>() });
                slice += 1;
            }
            sum
        };
        let mut undefined = false;
        if let Some(row) = row {
            let sum = sum_of(output % rows);
            undefined = !sum.is_finite();
            // A gate's rows are an even one and the one behind, which are in one work tile, and are computed together.
            if problem.results.epilogue.has(Epilogue::GATED) {
                undefined = row % 2 == 0 && (undefined || !sum_of(output % rows + 1).is_finite());
            }
            if !undefined {
                let factor = f64::from(power_of_two(const { D::BELOW - D::RAISED }));
                // SAFETY: the result exists, and no other thread stores it.
                unsafe {
                    problem.store::<D>(row, token, sum * factor, || sum_of(output % rows + 1) * factor)
                };
            }
        }
        // Rows whose sums became infinite or NaN on the way are computed by the definition.
        let mut undefined = warp::ballot(undefined);
        while undefined != 0 {
            let (_, _, row) = of_output(before + undefined.trailing_zeros());
            if let Some(row) = row {
                // SAFETY: the row and the token exist, and nobody stored this result.
                unsafe { problem.define::<F, D>(row, [token, token + 1]) };
            }
            undefined &= undefined - 1;
        }
        before += grid.warps * WARP;
    }
}
