//! The mainloop for FP8 activations, MXFP4 weights and few tokens on compute capability 9.0. It
//! works as [`super::fp8`], but a multiplication has a block of each row, and the sum of each block
//! is multiplied by its scale in f32. So weights are decoded by shifts and masks, without lookups
//! and shuffles, and no scale is too small for its pack.
//!
//! [`microscale_formats::fp8_dot::block_row`] defines the results, to the bit.

use super::fp8::{self, Pack, mainloop};
use super::warp_specialized::{Consumer, run_consumers};
use crate::gemm::fp8_weights::{Fp8Weights, Unsigned, promote_blocks};
use crate::gemm::fragment::FragmentLoader;
use crate::gemm::params::Params;
use crate::gemm::tile::{Array, Tile};
use crate::hardware::warp_group::{MultiplyBlocks, MultiplyPack};
use crate::product::tensor_cores::Activations;

/// Weights that are decoded without their scales, and the scales of the blocks of two rows. `WORDS`
/// says that the scales are words in stages.
struct Blocks<const WORDS: bool> {
    scales: (u32, u32),
    weights: Unsigned,
}

impl<F, T, A, const WORDS: bool> Pack<F, T, A> for Blocks<WORDS>
where
    F: Fp8Weights,
    T: Tile,
    A: Array + MultiplyBlocks<Blocks: Array>,
{
    type Products = A::Blocks;

    /// # Safety
    /// As for [`FragmentLoader::load_blocks`].
    #[inline(always)]
    unsafe fn load(fragments: &mut FragmentLoader<F, T>, stage: u32, pack: u32) -> Self {
        // SAFETY: the same contract.
        let fragment = unsafe { fragments.load_blocks::<WORDS>(stage, pack) };
        Self { scales: fragment.scales, weights: Unsigned::without_scales(fragment.rows) }
    }

    #[inline(always)]
    fn operands(&self) -> [[u32; 4]; 4] {
        self.weights.operands()
    }

    #[inline(always)]
    fn leaves_out(&self) -> bool {
        false
    }

    #[inline(always)]
    unsafe fn multiply(products: &mut A::Blocks, weights: [[u32; 4]; 4], activations: u32) {
        // SAFETY: the same contract.
        unsafe { A::multiply_blocks(products, weights, activations) };
    }

    #[inline(always)]
    unsafe fn wait(products: &mut A::Blocks) {
        // SAFETY: the same contract.
        unsafe { A::wait_for_blocks(products) };
    }

    #[inline(always)]
    unsafe fn promote(&self, sums: &mut A, products: &A::Blocks, scales: u32, pack_scales: bool) {
        // SAFETY: the same contract.
        unsafe { promote_blocks(sums, products, self.scales, scales, pack_scales) };
    }
}

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
        // SAFETY: whole warp groups are here, by the same contract. The loader loads by block, and
        // scales are words in the loop of `Blocks<true>`.
        unsafe {
            // Each loop is compiled for its operands, without branches for others. No weights are
            // left out.
            if params.launch.gemm.pack_scales != 0 {
                mainloop::<F, T, _, Blocks<false>>(&mut sums, fragments, state, packs, true);
            } else if !fragments.scale_words {
                mainloop::<F, T, _, Blocks<false>>(&mut sums, fragments, state, packs, false);
            } else {
                mainloop::<F, T, _, Blocks<true>>(&mut sums, fragments, state, packs, false);
            }
            let work_tile = consumer.work_tile();
            consumer.finish::<D>(params, &work_tile, tile, sums, true);
        }
    };
    // SAFETY: the same contract.
    unsafe { run_consumers::<F, D, T>(params, multiply) }
}
