//! Weights in four bits times activations in 16, by tensor cores: one reading of the weights for up to eight tokens.
//!
//! A tensor core multiplies a tile of 16 places of rows with eight places of tokens. In each step lane `4p + t` of a
//! warp has chunks of 32 weights for places `p` and `p + 8`, and a chunk of activations for place `p`: a product of
//! matrices asks for just these. Which of a chunk's elements come at which depth is free as long as weights and
//! activations agree: those whose codes can be brought to the halves of a word together do.
//!
//! [`one`] is for one token, [`lot`] for up to eight: both copy ahead what they need ([`steps`]), by words of scales.
//! [`many`], by loads, takes any rows of whole chunks. All sum in a given order, so that results are the same each time,
//! but not the bits of `microscale_formats::weights`, which says how far they may be off. [`defined`] has its bits.

mod activations;
mod defined;
mod lot;
mod many;
mod one;
mod steps;

use microscale_formats::weights;
use microscale_formats::{E4m3, E8m0};
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::{QUAD, TurnsGrid, WEIGHTS_THREADS, WeightsGrid, WeightsShape};
use microscale_kernels_abi::{ApplyGlobal, GlobalSlot};

use self::activations::{Activations, WithBf16, WithF16};
use self::defined::cut;
use self::lot::lot;
use self::many::many;
use self::one::one;
use super::products::{Format as Products4, Mxfp4, Nvfp4};
use super::{Operand, store};
use crate::arithmetic::Ptx;

/// Warps in a thread block.
const WARPS: u32 = WEIGHTS_THREADS / WARP;

/// A format's scales.
trait Weights: Products4 {
    /// Where in [`Activations::LOWERED`] it is.
    const PLACE: usize;

    /// How far a chunk's scale is from the first that is to be used, if there are others: above the last one's distance
    /// for those below, too.
    #[inline(always)]
    fn distance<D: Activations>(_: u32) -> u32 {
        0
    }

    /// The largest distance of a scale that is to be used.
    fn farthest<D: Activations>() -> u32 {
        0
    }

    /// The factors of a chunk's halves, given the bytes of its scales.
    fn factors<D: Activations>(scales: u32) -> [u32; 2];

    /// The scales of a chunk's halves, given their bytes.
    fn halves(scales: u32) -> [f32; 2];

    /// A stream's sum and a group by the definition.
    fn add_group(sum: f32, fraction: f32, scale: u8) -> f32;
}

impl Weights for Nvfp4 {
    const PLACE: usize = 0;

    #[inline(always)]
    fn factors<D: Activations>(scales: u32) -> [u32; 2] {
        D::factors(scales)
    }

    #[inline(always)]
    fn halves(scales: u32) -> [f32; 2] {
        Self::pair(scales)
    }

    #[inline(always)]
    fn add_group(sum: f32, fraction: f32, scale: u8) -> f32 {
        weights::add_nvfp4::<Ptx>(sum, fraction, E4m3::from_bits(scale))
    }
}

impl Weights for Mxfp4 {
    const PLACE: usize = 1;

    #[inline(always)]
    fn distance<D: Activations>(scales: u32) -> u32 {
        scales.wrapping_sub(D::USUAL[0])
    }

    #[inline(always)]
    fn farthest<D: Activations>() -> u32 {
        D::USUAL[1] - D::USUAL[0]
    }

    #[inline(always)]
    fn factors<D: Activations>(scales: u32) -> [u32; 2] {
        // Some number under which zeros stay zeros, if the scale is not to be used.
        let distance = Self::distance::<D>(scales).min(Self::farthest::<D>());
        let raised = const { D::USUAL[0] as i32 + D::BELOW - D::LOWERED[1] } as u32;
        [D::factor(f32::from_bits((distance + raised) << 23)); 2]
    }

    /// Infinite in the place of NaN.
    #[inline(always)]
    fn halves(scale: u32) -> [f32; 2] {
        const LEAST: u32 = 1 << 22;
        [f32::from_bits((scale << 23).max(LEAST)); 2]
    }

    #[inline(always)]
    fn add_group(sum: f32, fraction: f32, scale: u8) -> f32 {
        weights::add_mxfp4::<Ptx>(sum, fraction, E8m0::from_bits(scale))
    }
}

/// The operands of a kernel.
struct Job {
    weights: Operand,
    activations: *const u8,
    out: *mut u8,
    shape: WeightsShape,
}

impl Job {
    #[inline(always)]
    fn token(&self, token: u32) -> *const u8 {
        self.activations.wrapping_add((u64::from(token) * self.shape.cols * 2) as usize)
    }

    /// Stores a sum of a row and a token.
    ///
    /// # Safety
    /// As for the kernels; nobody else stores this one.
    #[inline(always)]
    unsafe fn store<D: Activations>(&self, row: u64, token: u32, sum: f64) {
        // SAFETY: the caller's promise.
        unsafe {
            store(self.out, u64::from(token) * self.shape.rows + row, self.weights.scaled(sum), D::OUTPUT)
        }
    }
}

/// A number over 2^`bits`, and what is left.
#[inline(always)]
fn parts(number: u32, bits: u32) -> (u32, u32) {
    (number >> bits, number & ((1 << bits) - 1))
}

/// The entry points.
macro_rules! entries {
    ($($name:ident($grid:ty) = $body:expr,)+) => {$(
        /// Multiplies weights with activations.
        ///
        /// # Safety
        /// `codes` and `scales` hold the rows of `grid`'s matrix, linear, on multiples of 8 bytes and of 1;
        /// `activations` holds its tokens, without gaps, aligned to their dtype. But for the kernels that end in
        /// `cut`, rows are whole chunks and start on 16 bytes, their scales on one of their number in a chunk, and
        /// activations on 16 bytes; with `one` or `lot` in their names, rows' scales are a multiple of 4 bytes and
        /// start on one. `out` has room for a result a token and row, aligned to its dtype.
        /// `global` is a slot. All in global memory; `out` overlaps nothing, and nothing writes the others meanwhile.
        /// The launch shape and the size of shared memory are those that `microscale_kernels_abi` gives, with a
        /// [`TurnsGrid`] those that it says.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            codes: *const u8,
            scales: *const u8,
            global: *const GlobalSlot,
            activations: *const u8,
            out: *mut u8,
            grid: $grid,
            apply: ApplyGlobal,
        ) {
            let weights = Operand { codes, scales, global, apply };
            // SAFETY: the same contract.
            unsafe { $body(Job { weights, activations, out, shape: grid.shape }, grid) }
        }
    )+};
}

entries! {
    nvfp4_gemv_weights_f16_one_tiles1(TurnsGrid) = one::<Nvfp4, WithF16, 1>,
    nvfp4_gemv_weights_f16_one_tiles2(TurnsGrid) = one::<Nvfp4, WithF16, 2>,
    nvfp4_gemv_weights_f16_one_tiles4(TurnsGrid) = one::<Nvfp4, WithF16, 4>,
    nvfp4_gemv_weights_f16_lot_tiles1(TurnsGrid) = lot::<Nvfp4, WithF16, 1>,
    nvfp4_gemv_weights_f16_lot_tiles2(TurnsGrid) = lot::<Nvfp4, WithF16, 2>,
    nvfp4_gemv_weights_bf16_one_tiles1(TurnsGrid) = one::<Nvfp4, WithBf16, 1>,
    nvfp4_gemv_weights_bf16_one_tiles2(TurnsGrid) = one::<Nvfp4, WithBf16, 2>,
    nvfp4_gemv_weights_bf16_one_tiles4(TurnsGrid) = one::<Nvfp4, WithBf16, 4>,
    nvfp4_gemv_weights_bf16_lot_tiles1(TurnsGrid) = lot::<Nvfp4, WithBf16, 1>,
    nvfp4_gemv_weights_bf16_lot_tiles2(TurnsGrid) = lot::<Nvfp4, WithBf16, 2>,
    mxfp4_gemv_weights_f16_one_tiles1(TurnsGrid) = one::<Mxfp4, WithF16, 1>,
    mxfp4_gemv_weights_f16_one_tiles2(TurnsGrid) = one::<Mxfp4, WithF16, 2>,
    mxfp4_gemv_weights_f16_one_tiles4(TurnsGrid) = one::<Mxfp4, WithF16, 4>,
    mxfp4_gemv_weights_f16_lot_tiles1(TurnsGrid) = lot::<Mxfp4, WithF16, 1>,
    mxfp4_gemv_weights_f16_lot_tiles2(TurnsGrid) = lot::<Mxfp4, WithF16, 2>,
    mxfp4_gemv_weights_bf16_one_tiles1(TurnsGrid) = one::<Mxfp4, WithBf16, 1>,
    mxfp4_gemv_weights_bf16_one_tiles2(TurnsGrid) = one::<Mxfp4, WithBf16, 2>,
    mxfp4_gemv_weights_bf16_one_tiles4(TurnsGrid) = one::<Mxfp4, WithBf16, 4>,
    mxfp4_gemv_weights_bf16_lot_tiles1(TurnsGrid) = lot::<Mxfp4, WithBf16, 1>,
    mxfp4_gemv_weights_bf16_lot_tiles2(TurnsGrid) = lot::<Mxfp4, WithBf16, 2>,
    nvfp4_gemv_weights_f16_tiles1(WeightsGrid) = many::<Nvfp4, WithF16, 1>,
    nvfp4_gemv_weights_f16_tiles2(WeightsGrid) = many::<Nvfp4, WithF16, 2>,
    nvfp4_gemv_weights_f16_cut(WeightsGrid) = cut::<Nvfp4, WithF16>,
    nvfp4_gemv_weights_bf16_tiles1(WeightsGrid) = many::<Nvfp4, WithBf16, 1>,
    nvfp4_gemv_weights_bf16_tiles2(WeightsGrid) = many::<Nvfp4, WithBf16, 2>,
    nvfp4_gemv_weights_bf16_cut(WeightsGrid) = cut::<Nvfp4, WithBf16>,
    mxfp4_gemv_weights_f16_tiles1(WeightsGrid) = many::<Mxfp4, WithF16, 1>,
    mxfp4_gemv_weights_f16_tiles2(WeightsGrid) = many::<Mxfp4, WithF16, 2>,
    mxfp4_gemv_weights_f16_cut(WeightsGrid) = cut::<Mxfp4, WithF16>,
    mxfp4_gemv_weights_bf16_tiles1(WeightsGrid) = many::<Mxfp4, WithBf16, 1>,
    mxfp4_gemv_weights_bf16_tiles2(WeightsGrid) = many::<Mxfp4, WithBf16, 2>,
    mxfp4_gemv_weights_bf16_cut(WeightsGrid) = cut::<Mxfp4, WithBf16>,
}
