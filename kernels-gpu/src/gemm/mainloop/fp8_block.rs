//! The mainloop for FP8 activations, MXFP4 weights and few tokens on compute capability 9.0. It
//! works as [`super::fp8`], but a multiplication has a block of each row, and the sum of each block
//! is multiplied by its scale in f32. So weights are decoded by shifts and masks, without lookups
//! and shuffles, and no scale is too small for its pack.
//!
//! [`microscale_formats::fp8_dot::block_row`] defines the results, to the bit.

use microscale_kernels_abi::gemm::PACK_COLUMNS;

use super::fp8;
use super::warp_specialized::{Consumer, run_consumers};
use crate::gemm::fp8_weights::{Fp8Weights, Unsigned, promote_blocks, scale_tokens};
use crate::gemm::fragment::FragmentLoader;
use crate::gemm::params::Params;
use crate::gemm::pipeline::PipelineState;
use crate::gemm::tile::{Array, Tile};
use crate::hardware::warp;
use crate::hardware::warp_group::{MultiplyBlocks, MultiplyPack, swizzled};
use crate::product::tensor_cores::Activations;

/// Multiplies weights by packed activations. NVFP4 weights are multiplied as by [`fp8::gemm`].
///
/// # Safety
/// The contract of the entry points of this mainloop.
#[inline(always)]
pub(in crate::gemm) unsafe fn gemm<F: Fp8Weights, D: Activations, T: Tile>(params: &Params<'_>)
where
    T::Accumulators: MultiplyPack + MultiplyBlocks<Blocks: Array>,
{
    if !FragmentLoader::<F, T>::BY_BLOCK {
        // SAFETY: the same contract.
        return unsafe { fp8::gemm::<F, D, T>(params) };
    }
    let multiply = #[inline(always)]
    |consumer: &mut Consumer<F, T>, packs: u32, tile: u32| {
        let mut sums = T::Accumulators::ZEROS;
        let Consumer { fragments, state, .. } = consumer;
        // SAFETY: whole warp groups are here, by the same contract.
        unsafe {
            // Loops for common operands have no branches for others.
            let pack_scales = params.launch.gemm.pack_scales != 0;
            if pack_scales {
                mainloop::<F, T, T::Accumulators, false, true>(&mut sums, fragments, state, packs);
            } else if !fragments.scale_words {
                mainloop::<F, T, T::Accumulators, false, false>(&mut sums, fragments, state, packs);
            } else {
                mainloop::<F, T, T::Accumulators, true, false>(&mut sums, fragments, state, packs);
            }
            let work_tile = consumer.work_tile();
            consumer.finish::<D>(params, &work_tile, tile, sums, true);
        }
    };
    // SAFETY: the same contract.
    unsafe { run_consumers::<F, D, T>(params, multiply) }
}

/// Adds all products of a work tile's K-iterations to the sums, and releases all stages but the
/// last one. `WORDS` says that the weights' scales are words in stages, `PACK_SCALES` that tokens
/// have a scale per pack.
///
/// # Safety
/// The kernel's contract. [`FragmentLoader::BY_BLOCK`] is true. `WORDS` is false unless
/// `fragments.scale_words` is true. Whole warp groups call it.
#[inline(always)]
unsafe fn mainloop<F: Fp8Weights, T: Tile, A: Array, const WORDS: bool, const PACK_SCALES: bool>(
    sums: &mut A,
    fragments: &mut FragmentLoader<F, T>,
    state: &mut PipelineState,
    packs: u32,
) where
    A: MultiplyBlocks<Blocks: Array>,
{
    let mut products = A::Blocks::ZEROS;
    let mut left = packs;
    let mut stage = state.consumer_wait();
    // SAFETY: the stage is full, and the whole warp group is here.
    let fragment = unsafe { fragments.load_blocks::<WORDS>(stage, 0) };
    let mut block_scales = fragment.scales;
    let mut weights = Unsigned::without_scales(fragment.rows).operands();
    loop {
        // The shuffle tells the assembler that the value is uniform, so descriptors take uniform
        // registers.
        let at = warp::shuffle(stage, 0) + const { T::STAGE.codes_bytes() };
        let mut tokens = swizzled(at);
        let mut scales = stage + const { T::STAGE.codes_bytes() + T::PACKS * T::N * PACK_COLUMNS };
        for pack in 0..T::PACKS {
            // SAFETY: the stage is full and not yet released; the whole warp group is here.
            unsafe {
                A::multiply_blocks(&mut products, weights, tokens);
                // The next pack's weights are loaded and decoded while these are multiplied. After
                // the last pack, its own stage is loaded again.
                let next = if pack + 1 < T::PACKS {
                    fragments.load_blocks::<WORDS>(stage, pack + 1)
                } else {
                    stage = state.next_if(left > 1).consumer_wait();
                    fragments.load_blocks::<WORDS>(stage, 0)
                };
                let unsigned = Unsigned::without_scales(next.rows);
                A::wait_for_blocks(&mut products);
                promote_blocks::<A, A::Blocks, PACK_SCALES>(sums, &products, block_scales, scales);
                (block_scales, weights) = (next.scales, unsigned.operands());
            }
            left -= 1;
            if left == 0 {
                break;
            }
            tokens += const { T::N * PACK_COLUMNS / 16 };
            scales += const { T::N * 4 };
        }
        if left == 0 && !PACK_SCALES {
            // SAFETY: the stage of the last pack is not yet released.
            unsafe { scale_tokens(sums, scales) };
        }
        state.advance();
        // Released before the exit, as in `fp8`.
        // SAFETY: the whole warp group is here, and all products of the stage have been waited for.
        unsafe { state.consumer_release_previous::<T>(left > 0) };
        if left == 0 {
            return;
        }
    }
}
