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

/// A lane's weights of a pack, decoded but for the signs, and how their products become f32 sums
/// of type `A`.
pub(super) trait Pack<F: Fp8Weights, T: Tile, A: Array>: Sized {
    /// The sums of products that tensor cores compute.
    type Products: Array;

    /// Loads pack `pack` of the stage at `stage`.
    ///
    /// # Safety
    /// As for [`FragmentLoader::load`]; implementations may ask for more. All lanes of the warp
    /// call it.
    unsafe fn load(fragments: &mut FragmentLoader<F, T>, stage: u32, pack: u32) -> Self;

    /// The weights. The products of earlier ones have been waited for.
    fn operands(&self) -> [[u32; 4]; 4];

    /// Returns whether some of the warp's weights are left out of the products.
    fn leaves_out(&self) -> bool;

    /// Starts to multiply.
    ///
    /// # Safety
    /// As for [`MultiplyPack::multiply_pack`].
    unsafe fn multiply(products: &mut Self::Products, weights: [[u32; 4]; 4], activations: u32);

    /// Waits for all products.
    ///
    /// # Safety
    /// All threads of the warp group call it.
    unsafe fn wait(products: &mut Self::Products);

    /// Adds the products to the sums.
    ///
    /// # Safety
    /// As for [`promote`]. All lanes of the warp call it.
    unsafe fn promote(&self, sums: &mut A, products: &Self::Products, scales: u32, pack_scales: bool);
}

/// Weights that are decoded with their scales. Tensor cores add the products of a pack.
struct Scaled {
    scales: Scales<2>,
    weights: Unsigned,
}

impl<F: Fp8Weights, T: Tile, A: Array + MultiplyPack> Pack<F, T, A> for Scaled {
    type Products = A;

    #[inline(always)]
    unsafe fn load(fragments: &mut FragmentLoader<F, T>, stage: u32, pack: u32) -> Self {
        // SAFETY: the same contract.
        let [fragment] = unsafe { fragments.load::<1>(stage, pack, 0) };
        let scales = Scales::new::<F>(fragment.scales, fragment.exists, const { T::N <= 32 });
        let weights = Unsigned::new(&scales, fragment.rows);
        Self { scales, weights }
    }

    #[inline(always)]
    fn operands(&self) -> [[u32; 4]; 4] {
        self.weights.operands()
    }

    #[inline(always)]
    fn leaves_out(&self) -> bool {
        self.scales.left_out
    }

    #[inline(always)]
    unsafe fn multiply(products: &mut A, weights: [[u32; 4]; 4], activations: u32) {
        // SAFETY: the same contract.
        unsafe { products.multiply_pack(weights, activations) };
    }

    #[inline(always)]
    unsafe fn wait(products: &mut A) {
        // SAFETY: the same contract.
        unsafe { products.wait() };
    }

    #[inline(always)]
    unsafe fn promote(&self, sums: &mut A, products: &A, scales: u32, pack_scales: bool) {
        // SAFETY: the same contract.
        unsafe { promote(sums, products, self.scales.factors, scales, pack_scales) };
    }
}

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
        let left_out =
            mainloop::<F, T, T::Accumulators, Scaled>(&mut sums, fragments, state, packs, pack_scales);
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
/// The kernel's contract, and the contract of `P::load`. Whole warp groups call it.
#[inline(always)]
pub(super) unsafe fn mainloop<F: Fp8Weights, T: Tile, A: Array, P: Pack<F, T, A>>(
    sums: &mut A,
    fragments: &mut FragmentLoader<F, T>,
    state: &mut PipelineState,
    packs: u32,
    pack_scales: bool,
) -> bool {
    let mut products = P::Products::ZEROS;
    let mut left = packs;
    let mut stage = state.consumer_wait();
    // SAFETY: the stage is full, and the whole warp group is here.
    let mut now = unsafe { P::load(fragments, stage, 0) };
    let mut left_out = now.leaves_out();
    let mut weights = now.operands();
    loop {
        // The shuffle tells the assembler that the value is uniform, so descriptors take uniform
        // registers.
        let at = warp::shuffle(stage, 0) + const { T::STAGE.codes_bytes() };
        let mut tokens = swizzled(at);
        let mut scales = stage + const { T::STAGE.codes_bytes() + T::PACKS * T::N * PACK_COLUMNS };
        for pack in 0..T::PACKS {
            // SAFETY: the stage is full and not yet released; the whole warp group is here.
            unsafe {
                P::multiply(&mut products, weights, tokens);
                // The next pack's weights are loaded and decoded while these are multiplied. After
                // the last pack, its own stage is loaded again.
                let next = if pack + 1 < T::PACKS {
                    P::load(fragments, stage, pack + 1)
                } else {
                    stage = state.next_if(left > 1).consumer_wait();
                    P::load(fragments, stage, 0)
                };
                P::wait(&mut products);
                now.promote(sums, &products, scales, pack_scales);
                (weights, now) = (next.operands(), next);
            }
            left -= 1;
            if left == 0 {
                break;
            }
            left_out |= now.leaves_out();
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
