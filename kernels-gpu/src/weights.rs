//! Weights in four bits times activations in 16, by tensor cores: one reading of the weights for up to eight tokens.
//!
//! A tensor core multiplies a tile of 16 places of rows with eight places of tokens. In each step lane `4p + t` of a
//! warp has chunks of 32 weights for places `p` and `p + 8`, and a chunk of activations for place `p`: a product of
//! matrices asks for just these. Which of a chunk's elements come at which depth is free as long as weights and
//! activations agree: those whose codes can be brought to the halves of a word together do.
//!
//! [`one`] is for one token, [`lot`] for up to eight: both copy ahead what they need ([`crate::product::pipeline`]),
//! by words of scales. [`many`], by loads, takes any rows of whole chunks. All sum in a given order, so that results are
//! the same each time, but not the bits of `microscale_formats::weights`, which says how far they may be off.
//! [`defined`] has its bits.

mod defined;
mod lot;
mod many;
mod one;

use microscale_kernels_abi::weights::{TurnsGrid, WeightsGrid};
use microscale_kernels_abi::{ApplyGlobal, GlobalSlot};

use self::defined::cut;
use self::lot::lot;
use self::many::many;
use self::one::one;
use crate::product::format::{Mxfp4, Nvfp4};
use crate::product::operand::{Job, Operand};
use crate::product::tensor_cores::{WithBf16, WithF16};

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
