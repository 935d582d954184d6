//! Weights in four bits times activations in 16, by tensor cores: one reading of the weights for up to eight
//! tokens.
//!
//! A tensor core multiplies a tile of 16 rows of weights with eight columns of tokens. In each k-iteration
//! lane `4p + t` of a warp has chunks of 32 weights for the tile rows `p` and `p + 8`, and a chunk of
//! activations for the tile column `p`: a product of matrices asks for just these. A chunk's elements may
//! come at any depth as long as weights and activations agree, so those whose codes can be brought to the
//! halves of a word together do.
//!
//! [`m1`] is for one token and [`m8`] for up to eight. Both are pipelined ([`crate::product::pipeline`]), and
//! copy scales by words. [`unpipelined`] loads to registers, and takes any rows of whole chunks. All sum in a
//! given order, so that results are the same each time, but do not have the bits of
//! `microscale_formats::weights`, which says how far they may be off. [`defined`] has its bits.

mod defined;
mod m1;
mod several;
mod unpipelined;

use microscale_kernels_abi::experts::Plan;
use microscale_kernels_abi::gemm::gemv::{GemvParams, PlainParams};
use microscale_kernels_abi::{ApplyGlobal, Epilogue, GlobalSlot};

use self::defined::ragged;
use self::m1::m1;
use self::several::several;
use self::unpipelined::unpipelined;
use crate::product::format::{Mxfp4, Nvfp4};
use crate::product::operand::{Operand, Problem, Routed};
use crate::product::results::Results;
use crate::product::tensor_cores::{WithBf16, WithF16};

/// Declares the entry points.
macro_rules! entries {
    ($name:ident($grid:ty) = $body:expr) => {
        /// Multiplies weights with activations.
        ///
        /// # Safety
        /// `codes` and `scales` hold the rows of `grid`'s matrix, linear, on multiples of 8 bytes and of 1;
        /// `activations` holds its tokens, without gaps, aligned to their dtype. But for the kernels that end
        /// in `ragged`, rows are whole chunks and start on 16 bytes, their scales on one of their number in a
        /// chunk, and activations on 16 bytes; with `m1`, `m8`, `m16` or `m32` in their names, rows' scales are a multiple
        /// of 4 bytes and start on one, or, with `m1` and of MXFP4, all rows' together. `out` has room for the results of each token that
        /// `epilogue` says, aligned to their dtype, and where it has such steps, `bias` and `residual` hold what it says.
        /// `global` is a slot. With a `plan`, which has the grid's token tiles, weights and slots are those of
        /// its experts, one after the other; of its sorted rows `from` and `to` list the rows of activations
        /// and of results, or are null. All in global memory; `out` overlaps nothing, and nothing writes the others
        /// meanwhile. The launch shape and the size of shared memory are those that `microscale_kernels_abi`
        /// gives, with a [`GemvParams`] those that it says.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            codes: *const u8,
            scales: *const u8,
            global: *const GlobalSlot,
            activations: *const u8,
            out: *mut u8,
            plan: *const Plan,
            from: *const u32,
            to: *const u32,
            bias: *const u8,
            residual: *const u8,
            grid: $grid,
            apply: ApplyGlobal,
            epilogue: Epilogue,
        ) {
            let weights = Operand { codes, scales, global, apply };
            let results = Results { out, bias, residual, epilogue };
            let routed = Routed { plan, from, to };
            // SAFETY: the same contract.
            unsafe { $body(Problem { weights, activations, results, shape: grid.shape, routed }, grid) }
        }
    };
}

/// Declares the entry points of the GEMV's tiles: of every format and dtype.
macro_rules! tiles {
    ($($name:ident: $mainloop:ident $m:tt $n:tt $cluster:tt;)+) => {
        $(operands! { $name $mainloop $m $n })+
    };
}

/// Declares the entry points of a tile.
macro_rules! operands {
    ($name:ident Mma $m:tt $n:tt) => {};
    ($name:ident Wgmma $m:tt $n:tt) => {};
    ($name:ident $mainloop:ident $m:tt $n:tt) => {
        entry! { ${concat(nvfp4_gemm_f16_, $name)} $mainloop $m $n Nvfp4, WithF16 }
        entry! { ${concat(nvfp4_gemm_bf16_, $name)} $mainloop $m $n Nvfp4, WithBf16 }
        entry! { ${concat(mxfp4_gemm_f16_, $name)} $mainloop $m $n Mxfp4, WithF16 }
        entry! { ${concat(mxfp4_gemm_bf16_, $name)} $mainloop $m $n Mxfp4, WithBf16 }
    };
}

/// Declares the entry point of a tile, a format and a dtype.
macro_rules! entry {
    ($name:ident Gemv $m:tt 1 $f:ident, $d:ident) => {
        entries! { $name(GemvParams) = m1::<$f, $d, { $m / 16 }> }
    };
    ($name:ident Gemv $m:tt $n:tt $f:ident, $d:ident) => {
        entries! { $name(GemvParams) = several::<$f, $d, { $n / 8 }, { $m / 16 }> }
    };
    ($name:ident GemvPlain $m:tt $n:tt $f:ident, $d:ident) => {
        entries! { $name(PlainParams) = unpipelined::<$f, $d, { $m / 16 }> }
    };
    ($name:ident GemvRagged $m:tt $n:tt $f:ident, $d:ident) => {
        entries! { $name(PlainParams) = ragged::<$f, $d> }
    };
}

microscale_kernels_abi::gemm_tiles!(tiles);
