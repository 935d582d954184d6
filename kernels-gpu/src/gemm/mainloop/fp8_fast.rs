//! The mainloop for FP8 activations on compute capability 9.0 with fast accumulation: tensor cores
//! add the products of all of K, with 13 fraction bits. Decoded weights are relative to one
//! exponent per row, so sums need no other factor before the end. Otherwise it works as
//! [`super::wgmma`].
//!
//! [`microscale_formats::fp8_dot::fast_row`] defines the results, to the bit.

use core::hint::cold_path;

use microscale_kernels_abi::gemm::{PACK_COLUMNS, QUAD, TILE_ROWS};

use super::warp_specialized::{Consumer, run_consumers};
use crate::gemm::fp8_weights::{Fp8Weights, LeftOut, Scales, scale_tokens};
use crate::gemm::fragment::FragmentLoader;
use crate::gemm::params::Params;
use crate::gemm::pipeline::PipelineState;
use crate::gemm::tile::{Array, Tile};
use crate::gemm::tile_scheduler::WorkTile;
use crate::gemm::weight_loader::last_row;
use crate::hardware::warp;
use crate::hardware::warp_group::{MultiplyTokens, WgmmaE4m3, swizzled};
use crate::product::tensor_cores::Activations;

/// Multiplies weights by packed activations.
///
/// # Safety
/// The contract of the entry points of this mainloop.
#[inline(always)]
pub(in crate::gemm) unsafe fn gemm<F: Fp8Weights, D: Activations, T: Tile>(params: &Params<'_>)
where
    WgmmaE4m3: MultiplyTokens<T::Accumulators>,
{
    let multiply = #[inline(always)]
    |consumer: &mut Consumer<F, T>, packs: u32, tile: u32| {
        // SAFETY: whole warp groups are here, by the same contract.
        unsafe { multiply::<F, D, T>(params, consumer, packs, tile) }
    };
    // SAFETY: the same contract.
    unsafe { run_consumers::<F, D, T>(params, multiply) }
}

/// Multiplies and finishes the work tile that the consumer reads, of `packs` packs. The warp has
/// tile `tile` of it.
///
/// # Safety
/// The kernel's contract. Whole warp groups call it.
#[inline(always)]
unsafe fn multiply<F: Fp8Weights, D: Activations, T: Tile>(
    params: &Params<'_>,
    consumer: &mut Consumer<F, T>,
    packs: u32,
    tile: u32,
) where
    WgmmaE4m3: MultiplyTokens<T::Accumulators>,
{
    let mut sums = T::Accumulators::ZEROS;
    // SAFETY: the whole warp group is here.
    unsafe {
        let bases = row_bases::<F, T>(params, &consumer.work_tile(), tile);
        let Consumer { fragments, state, .. } = consumer;
        let left_out = mainloop::<F, T, T::Accumulators>(&mut sums, fragments, state, packs, bases);
        let work_tile = consumer.work_tile();
        if left_out {
            cold_path();
            let bases = Some(bases);
            let left_out = LeftOut { params, work_tile: &work_tile, tile, packs, first_eight: 0, bases };
            left_out.add::<F, T, _>(&mut sums);
        }
        consumer.finish::<D>(params, &work_tile, tile, sums, true);
    }
}

/// The bases of the lane's two rows.
///
/// # Safety
/// The kernel's contract.
#[inline(always)]
unsafe fn row_bases<F: Fp8Weights, T: Tile>(
    params: &Params<'_>,
    work_tile: &WorkTile,
    tile: u32,
) -> [u32; 2] {
    let all = params.problem.activations.cast::<u32>();
    let of_eight = tile * TILE_ROWS + warp::lane() / QUAD;
    let last = last_row::<T>(params.problem, work_tile.row_tile);
    let bases = [0, TILE_ROWS / 2].map(|half| {
        let row = work_tile.row_tile * T::M + (of_eight + half).min(last);
        all.wrapping_add(row as usize)
    });
    // SAFETY: the packing kernel has written a base per row of MXFP4 weights.
    unsafe { F::row_bases(bases) }
}

/// Adds all products of a work tile's K-iterations, times the factors of rows and the scales of
/// tokens, except of weights that are left out, and releases all stages but the last one. Returns
/// whether any may be left out.
///
/// # Safety
/// The kernel's contract. Whole warp groups call it.
#[inline(always)]
unsafe fn mainloop<F: Fp8Weights, T: Tile, A: Array>(
    sums: &mut A,
    fragments: &mut FragmentLoader<F, T>,
    state: &mut PipelineState,
    packs: u32,
    bases: [u32; 2],
) -> bool
where
    WgmmaE4m3: MultiplyTokens<A>,
{
    let mut left_out = false;
    let mut left = packs;
    let mut first = true;
    let mut stage = state.consumer_wait();
    // SAFETY: the stage is full.
    let [mut next] = unsafe { fragments.load::<1>(stage, 0, 0) };
    loop {
        // The shuffle tells the assembler that the value is uniform, so descriptors take uniform
        // registers.
        let at = warp::shuffle(stage, 0) + const { T::STAGE.codes_bytes() };
        let mut tokens = swizzled(at);
        let mut token_scales = stage + const { T::STAGE.codes_bytes() + T::PACKS * T::N * PACK_COLUMNS };
        for pack in 0..T::PACKS {
            let now = next;
            let scales = Scales::relative_to::<F>(bases, now.scales, now.exists, T::N <= 128);
            left_out |= scales.left_out;
            let operand = |word: usize| {
                let [[a, b], [c, d]] = [0, 1].map(|row| scales.decode(row, word, now.rows[row][word]));
                [a, c, b, d]
            };
            // SAFETY: the stage is full and not yet released; the whole warp group is here.
            unsafe {
                // Halves of a pack are decoded in turns, as a product reads its weights until the
                // next one has started.
                WgmmaE4m3::multiply_tokens(sums, [0, 1].map(operand), tokens);
                if pack == 0 {
                    // `multiply_tokens` has waited for all products of the previous stage.
                    state.consumer_release_previous::<T>(!first);
                }
                // The next pack's weights are loaded while these are decoded. After the last pack,
                // its own stage is loaded again.
                if pack + 1 < T::PACKS {
                    [next] = fragments.load::<1>(stage, pack + 1, 0);
                } else {
                    stage = state.next_if(left > 1).consumer_wait();
                    [next] = fragments.load::<1>(stage, 0, 0);
                }
                WgmmaE4m3::multiply_tokens(sums, [2, 3].map(operand), tokens + 4);
            }
            left -= 1;
            if left == 0 {
                break;
            }
            tokens += const { T::N * PACK_COLUMNS / 16 };
            token_scales += const { T::N * 4 };
        }
        state.advance();
        if left == 0 {
            // SAFETY: the whole warp group is here, and `wait` waits for all products. The stage of
            // the last pack is not yet released.
            unsafe {
                WgmmaE4m3::wait(sums);
                let factors = bases.map(F::factor);
                for i in 0..A::LEN {
                    *sums.get_mut(i) *= factors[i / 2 % 2];
                }
                scale_tokens(sums, token_scales);
            }
            return left_out;
        }
        first = false;
    }
}
