//! The GEMV of 4-bit weights and 16-bit activations: up to 32 tokens per pass over the weights, by
//! tensor cores.
//!
//! | file | contents |
//! |---|---|
//! | [`one_token`] | one token: sums are scaled |
//! | [`tokens`] | up to 8, 16 or 32 tokens: weights are scaled |
//! | [`warp_pipeline`] | the mainloop of both: a ring of stages per warp |
//! | [`multiply`] | the products in that mainloop |
//! | [`lane_copies`] | a lane's copies to a stage |
//! | [`work_tiles`] | which rows the warps have |
//! | [`plain`] | up to eight tokens by loads to registers, for any rows of whole chunks |
//! | [`ragged`] | the reference on the GPU: ragged rows, and values out of range |
//!
//! A tensor core multiplies a tile of 16 rows of weights by eight columns, which are tokens. In
//! each K-iteration, lane `4p + t` of a warp has chunks of 32 weights for the tile rows `p` and
//! `p + 8`, and a chunk of activations for the tile column `p`, as `mma` distributes its operands.
//! The order of elements in a chunk does not matter as long as weights and activations have the
//! same. It follows from decoding codes in pairs.
//!
//! All kernels but [`ragged`] sum in an order of their own. Results are the same in each run, but
//! their bits differ from `microscale_formats::weights`, which gives the error bound. [`ragged`]
//! has the same bits.

mod lane_copies;
mod multiply;
mod one_token;
mod plain;
mod ragged;
mod tokens;
mod warp_pipeline;
mod work_tiles;

use microscale_kernels_abi::experts::Plan;
use microscale_kernels_abi::gemm::gemv::{GemvParams, PlainParams};
use microscale_kernels_abi::{ApplyGlobal, Epilogue, GlobalSlot};

use self::one_token::one_token;
use self::plain::plain;
use self::ragged::ragged;
use self::tokens::tokens;
#[cfg(microscale_sm90)]
use crate::hardware::ptx;
use crate::product::operand::Operand;
use crate::product::problem::{Problem, Routed};
use crate::product::product_format::{Mxfp4, Nvfp4};
use crate::product::results::Results;
use crate::product::tensor_cores::{WithBf16, WithF16};

/// Declares an entry point: `name(type of its parameters) = body`.
macro_rules! gemv_entry {
    ($name:ident($params:ty) = $body:expr) => {
        /// Multiplies weights by activations.
        ///
        /// # Safety
        /// All pointers are to global memory. For the whole launch:
        /// - `codes` and `scales` have the rows of the weights of `params.shape`, linear, on 8
        ///   bytes and on 1; with a plan, the weights of all its experts, one after the other.
        ///   `global` has a slot per expert. Read-only.
        /// - `activations` has the tokens' rows, contiguous and aligned to the dtype. Read-only.
        /// - Except for the mainloop `ragged`: rows are whole chunks; rows of codes and activations
        ///   start on 16 bytes, rows of scales on the bytes of a chunk's scales. For the mainloop
        ///   `gemv`, each row of scales also is a multiple of 4 bytes on 4 bytes; for one token and
        ///   MXFP4, all rows together are.
        /// - `out` has room for the results of every token, aligned to their dtype, overlaps
        ///   nothing, and only this kernel uses it. `bias` has a value per row of weights and
        ///   expert, and `residual` one per result, where `epilogue` has these steps.
        /// - `plan` is null, or the experts' plan with all token tiles of `params`. `from` and `to`
        ///   are null, or list the row of activations and of results of each sorted row. Read-only.
        ///
        /// The launch has the thread blocks, threads and shared memory that `params` and the ABI
        /// give.
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
            params: $params,
            apply: ApplyGlobal,
            epilogue: Epilogue,
        ) {
            #[cfg(microscale_sm90)]
            ptx::wait_for_previous_kernel();
            let weights = Operand { codes, scales, global, apply };
            let results = Results { out, bias, residual, epilogue };
            let routed = Routed { plan, from, to };
            // SAFETY: the same contract.
            unsafe { $body(Problem { weights, activations, results, shape: params.shape, routed }, params) }
        }
    };
}

/// Declares the entry points of the ABI's tiles.
macro_rules! tiles {
    ($($name:ident: $mainloop:ident $m:tt $n:tt $cluster:tt;)+) => {
        $(operands! { $name $mainloop $m $n })+
    };
}

/// Declares the entry points of a tile: for each format and dtype.
macro_rules! operands {
    ($name:ident Gemv $m:tt $n:tt) => {
        operands! { @all $name Gemv $m $n }
    };
    ($name:ident GemvPlain $m:tt $n:tt) => {
        operands! { @all $name GemvPlain $m $n }
    };
    ($name:ident GemvRagged $m:tt $n:tt) => {
        operands! { @all $name GemvRagged $m $n }
    };
    // The GEMM declares its own.
    ($name:ident $mainloop:ident $m:tt $n:tt) => {};
    (@all $name:ident $mainloop:ident $m:tt $n:tt) => {
        entry! { ${concat(nvfp4_gemm_f16_, $name)} $mainloop $m $n Nvfp4, WithF16 }
        entry! { ${concat(nvfp4_gemm_bf16_, $name)} $mainloop $m $n Nvfp4, WithBf16 }
        entry! { ${concat(mxfp4_gemm_f16_, $name)} $mainloop $m $n Mxfp4, WithF16 }
        entry! { ${concat(mxfp4_gemm_bf16_, $name)} $mainloop $m $n Mxfp4, WithBf16 }
    };
}

/// Declares the entry point of a tile, a format and a dtype.
macro_rules! entry {
    ($name:ident Gemv $m:tt 1 $f:ident, $d:ident) => {
        gemv_entry! { $name(GemvParams) = one_token::<$f, $d, { $m / 16 }> }
    };
    ($name:ident Gemv $m:tt $n:tt $f:ident, $d:ident) => {
        gemv_entry! { $name(GemvParams) = tokens::<$f, $d, { $n / 8 }, { $m / 16 }> }
    };
    ($name:ident GemvPlain $m:tt $n:tt $f:ident, $d:ident) => {
        gemv_entry! { $name(PlainParams) = plain::<$f, $d, { $m / 16 }> }
    };
    ($name:ident GemvRagged $m:tt $n:tt $f:ident, $d:ident) => {
        gemv_entry! { $name(PlainParams) = ragged::<$f, $d> }
    };
}

microscale_kernels_abi::gemm_tiles!(tiles);
