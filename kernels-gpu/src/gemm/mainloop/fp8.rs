//! The mainloop for FP8 activations on compute capability 9.0. Weights are decoded to E4M3 with
//! their block scales, and multiplied by all tokens of the work tile. The sums of each pack are
//! added in f32 (promoted), because the tensor cores keep 13 fraction bits of them.
//!
//! [`microscale_formats::fp8_dot`] defines the results, to the bit.

use core::hint::cold_path;

use microscale_kernels_abi::gemm::PACK_COLUMNS;

use super::warp_specialized::{Consumer, run_consumers};
use crate::gemm::fp8_weights::{Fp8Weights, LeftOut, Scales, Unsigned, promote, scale_tokens};
use crate::gemm::fragment::FragmentLoader;
use crate::gemm::params::Params;
use crate::gemm::pipeline::PipelineState;
use crate::gemm::tile::{Array, Tile};
use crate::hardware::warp;
use crate::hardware::warp_group::{MultiplyPack, swizzled};
use crate::product::tensor_cores::Activations;

/// Multiplies weights by packed activations.
///
/// # Safety
/// The contract of the entry points of this mainloop.
#[inline(always)]
pub(in crate::gemm) unsafe fn gemm<F: Fp8Weights, D: Activations, T: Tile>(params: &Params<'_>)
where
    T::Accumulators: MultiplyPack,
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
    T::Accumulators: MultiplyPack,
{
    let mut sums = T::Accumulators::ZEROS;
    let pack_scales = params.launch.gemm.pack_scales != 0;
    let Consumer { fragments, state, .. } = consumer;
    // SAFETY: the whole warp group is here.
    unsafe {
        let left_out = mainloop::<F, T, T::Accumulators>(&mut sums, fragments, state, packs, pack_scales);
        let work_tile = consumer.work_tile();
        if left_out {
            cold_path();
            LeftOut { params, work_tile: &work_tile, tile, packs, first_eight: 0, bases: None }
                .add::<F, T, _>(&mut sums);
        }
        consumer.finish::<D>(params, &work_tile, tile, sums, true);
    }
}

/// Adds all products of a work tile's K-iterations to the sums, except of weights that are left
/// out, and releases all stages but the last one. Returns whether any may be left out.
///
/// # Safety
/// The kernel's contract. Whole warp groups call it.
#[inline(always)]
unsafe fn mainloop<F: Fp8Weights, T: Tile, A: Array>(
    sums: &mut A,
    fragments: &mut FragmentLoader<F, T>,
    state: &mut PipelineState,
    packs: u32,
    pack_scales: bool,
) -> bool
where
    A: MultiplyPack,
{
    let branch = const { T::N <= 32 };
    let mut products = A::ZEROS;
    let mut left = packs;
    let mut stage = state.consumer_wait();
    // SAFETY: the stage is full.
    let [fragment] = unsafe { fragments.load::<1>(stage, 0, 0) };
    let now = Scales::new::<F>(fragment.scales, fragment.exists, branch);
    let (mut factors, mut may_be_left_out) = (now.factors, now.left_out);
    let mut left_out = may_be_left_out;
    let mut weights = Unsigned::new(&now, fragment.rows).operands();
    loop {
        // The shuffle tells the assembler that the value is uniform, so descriptors take uniform
        // registers.
        let at = warp::shuffle(stage, 0) + const { T::STAGE.codes_bytes() };
        let mut tokens = swizzled(at);
        let mut scales = stage + const { T::STAGE.codes_bytes() + T::PACKS * T::N * PACK_COLUMNS };
        for pack in 0..T::PACKS {
            // SAFETY: the stage is full and not yet released; the whole warp group is here.
            unsafe {
                products.multiply_pack(weights, tokens);
                // The next pack's weights are loaded and decoded while these are multiplied. After
                // the last pack, its own stage is loaded again.
                let [fragment] = if pack + 1 < T::PACKS {
                    fragments.load::<1>(stage, pack + 1, 0)
                } else {
                    stage = state.next_if(left > 1).consumer_wait();
                    fragments.load::<1>(stage, 0, 0)
                };
                let next = Scales::new::<F>(fragment.scales, fragment.exists, branch);
                let unsigned = Unsigned::new(&next, fragment.rows);
                products.wait();
                promote(sums, &products, factors, scales, pack_scales);
                (factors, may_be_left_out, weights) = (next.factors, next.left_out, unsigned.operands());
            }
            left -= 1;
            if left == 0 {
                break;
            }
            left_out |= may_be_left_out;
            tokens += const { T::N * PACK_COLUMNS / 16 };
            scales += const { T::N * 4 };
        }
        if left == 0 && !pack_scales {
            // SAFETY: the stage of the last pack is not yet released.
            unsafe { scale_tokens(sums, scales) };
        }
        state.advance();
        // Released before the exit, as lanes diverge in this call: after the exit, the assembler
        // would keep descriptors in vector registers, and move them between the products.
        // SAFETY: the whole warp group is here, and all products of the stage have been waited for.
        unsafe { state.consumer_release_previous::<T>(left > 0) };
        if left == 0 {
            return left_out;
        }
    }
}
