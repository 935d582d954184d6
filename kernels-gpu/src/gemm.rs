//! Weights in four bits times activations in 16, by tensor cores, for any number of tokens.
//!
//! | file | what it holds |
//! |---|---|
//! | [`arrange`] | the kernel in front: activations as tensor cores read them |
//! | [`scheduler`] | which work tiles, and which k-iterations of them, a thread block has |
//! | [`copies`] | copying codes and scales to a stage, and a lane's part of them |
//! | [`mma`] | the mainloop for every GPU: warps copy ahead, decode and multiply |
//! | `wgmma` | the mainloop for compute capability 9.0: some warps copy, warp groups decode and multiply |
//! | `pairs` | sums that two thread blocks give each other, for compute capability 9.0 |
//! | [`tasks`] | what a thread block does next, which those who copy tell those who multiply |
//! | [`epilogue`] | sums of several thread blocks |
//! | [`store`] | the global scale, bias, gate, residual, rounding, storing |
//! | [`parts`] | activations in f32: their parts in bf16, and the sums of these |
//!
//! Weights are decoded in registers, scaled, and are the first operand of the tensor cores. A lane has chunks of 32 weights,
//! as in [`crate::weights`], and takes their elements in the order in which they are decoded; the kernel in front brings the
//! activations into the same order once, so that nobody does so in the mainloop.

mod arrange;
mod copies;
mod epilogue;
#[cfg(not(microscale_wgmma))]
mod mma;
#[cfg(microscale_wgmma)]
mod pairs;
mod parts;
mod scheduler;
mod store;
mod tasks;
#[cfg(microscale_wgmma)]
mod wgmma;

use core::ptr::null;

use microscale_kernels_abi::epilogue::{MergeGrid, SplitGrid};
use microscale_kernels_abi::experts::Plan;
use microscale_kernels_abi::gemm::params::{GemmParams, PackParams};
use microscale_kernels_abi::{ApplyGlobal, Epilogue, GlobalSlot};

use self::epilogue::Output;
use self::scheduler::Work;
use crate::product::format::{Mxfp4, Nvfp4};
use crate::product::operand::{Operand, Problem, Routed};
use crate::product::results::Results;
use crate::product::tensor_cores::{WithBf16, WithF16};

/// Declares the entry points that arrange.
macro_rules! arrange_entries {
    ($($name:ident = $dtype:ident,)+) => {$(
        /// Arranges activations.
        ///
        /// # Safety
        /// `activations` holds `grid`'s tokens, without gaps, aligned to their dtype, each on 16 bytes if the grid says so; `out`
        /// has room for [`PackParams::bytes`] and starts on 16 bytes. With a `plan`, which has the grid's token tiles, `from` lists
        /// the rows of activations of its sorted rows, or is null. All are global memory, `out` overlaps nothing, and nobody
        /// else uses it or writes the others meanwhile. The launch is the one that `microscale_kernels_abi` gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            activations: *const u8,
            out: *mut u8,
            plan: *const Plan,
            from: *const u32,
            grid: PackParams,
        ) {
            let routed = Routed { plan, from, to: null() };
            // SAFETY: the same contract.
            unsafe { arrange::arrange::<$dtype>(activations, out, routed, grid) }
        }
    )+};
}

/// Declares the entry points that multiply.
macro_rules! entries {
    ($name:ident = $body:expr) => {
        /// Multiplies weights with activations.
        ///
        /// # Safety
        /// `codes` and `scales` hold the rows of `grid`'s matrix, linear. Codes, and each row's, start on 16 bytes, and so do scales; of NVFP4, each row's
        /// do on 4. `activations` holds the tokens, without gaps, aligned to their dtype, and `arranged` what
        /// the kernel in front has made of them for this token tile and edition. `out` has room for the results of each token
        /// that `epilogue` says, aligned to their dtype, and where it has such steps, `bias` and `residual` hold what it says. `counters` are as many as `microscale_kernels_abi` says, all zeros, and `left` has
        /// [`left_bytes`](microscale_kernels_abi::gemm::params::partial_sum_bytes) on 16 bytes. `global` is a slot. With a `plan`, which has the grid's
        /// token tiles and their schedule, weights and slots are those of its experts, one after the other; of its sorted rows `from` and
        /// `to` list the rows of activations and of results, or are null. All in global memory; nothing overlaps, and nobody else uses
        /// `out`, `counters` and `left` or writes the others meanwhile. The launch is the one that `microscale_kernels_abi` gives, with as much
        /// shared memory as the grid says. Kernels whose names end in `paired` have a schedule in pairs, and clusters of two thread blocks.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            codes: *const u8,
            scales: *const u8,
            global: *const GlobalSlot,
            activations: *const u8,
            arranged: *const u8,
            out: *mut u8,
            counters: *mut u32,
            left: *mut u8,
            plan: *const Plan,
            from: *const u32,
            to: *const u32,
            bias: *const u8,
            residual: *const u8,
            grid: GemmParams,
            apply: ApplyGlobal,
            epilogue: Epilogue,
        ) {
            let weights = Operand { codes, scales, global, apply };
            let routed = Routed { plan, from, to };
            let results = Results { out, bias, residual, epilogue };
            let problem = Problem { weights, activations, results, shape: grid.shape, routed };
            // SAFETY: the same contract.
            unsafe { $body(&Output { problem: &problem, work: Work::new(&grid), counters, left }, arranged) }
        }
    };
}

/// Makes bf16 parts of activations in f32.
///
/// # Safety
/// `activations` holds `grid`'s rows, without gaps, on 4 bytes, or on 16 if the grid says so; `out` has room for all parts, on 16 bytes.
/// With a `plan` of these parts, rows are its sorted ones, of which there are no more than the grid's, and `from` lists their rows of
/// activations, or is null. All are global memory, do not overlap, and nobody else uses `out` or writes the others meanwhile. The launch
/// is the one that `microscale_kernels_abi` gives.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn split_f32(
    activations: *const f32,
    out: *mut u16,
    plan: *const Plan,
    from: *const u32,
    grid: SplitGrid,
) {
    let routed = Routed { plan, from, to: null() };
    // SAFETY: the same contract.
    unsafe { parts::split(activations, out, routed, &grid) }
}

/// Adds up the sums of parts.
///
/// # Safety
/// `sums` holds a row of them for each part of each row of activations; `out` has room for `grid`'s results in f32, and where `epilogue` has
/// them, `bias` has a value in f32 for each sum of a row, and `residual` one for each result. With a `plan` of these parts, rows are its
/// sorted ones, of which there are no more than the grid's, `to` lists their rows of results, or is null, and each of its experts has
/// biases. All are global memory, on 4 bytes; `out` overlaps nothing, and nobody else uses it or writes the others meanwhile. The launch
/// is the one that `microscale_kernels_abi` gives.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn merge_f32(
    sums: *const f32,
    out: *mut u8,
    bias: *const u8,
    residual: *const u8,
    plan: *const Plan,
    to: *const u32,
    grid: MergeGrid,
    epilogue: Epilogue,
) {
    let routed = Routed { plan, from: null(), to };
    // SAFETY: the same contract.
    unsafe { parts::merge(sums, Results { out, bias, residual, epilogue }, routed, &grid) }
}

arrange_entries! {
    pack_f16 = WithF16,
    pack_bf16 = WithBf16,
}

/// Declares the entry points of the tiles, of every format and dtype.
macro_rules! tiles {
    ($($name:ident: $mainloop:ident $m:tt $n:tt $cluster:tt;)+) => {
        $(operands! { $name $mainloop $n $cluster })+
    };
}

/// Declares the entry points of a tile.
macro_rules! operands {
    ($name:ident Mma $n:tt $cluster:tt) => {
        operands! { @all $name Mma $n $cluster }
    };
    ($name:ident Wgmma $n:tt $cluster:tt) => {
        operands! { @all $name Wgmma $n $cluster }
    };
    ($name:ident $mainloop:ident $n:tt $cluster:tt) => {};
    (@all $name:ident $mainloop:ident $n:tt $cluster:tt) => {
        entry! { ${concat(nvfp4_gemm_f16_, $name)} $mainloop $n $cluster Nvfp4, WithF16 }
        entry! { ${concat(nvfp4_gemm_bf16_, $name)} $mainloop $n $cluster Nvfp4, WithBf16 }
        entry! { ${concat(mxfp4_gemm_f16_, $name)} $mainloop $n $cluster Mxfp4, WithF16 }
        entry! { ${concat(mxfp4_gemm_bf16_, $name)} $mainloop $n $cluster Mxfp4, WithBf16 }
    };
}

/// Declares the entry point of a tile, a format and a dtype.
macro_rules! entry {
    ($name:ident Mma $n:tt $cluster:tt $f:ident, $d:ident) => {
        #[cfg(not(microscale_wgmma))]
        entries! { $name = mma::gemm::<$f, $d, $n, { $n / 2 }> }
    };
    ($name:ident Wgmma $n:tt $cluster:tt $f:ident, $d:ident) => {
        #[cfg(microscale_wgmma)]
        entries! {
            $name = wgmma::gemm::<
                $f, $d, $n, { $n / 2 }, { $n / 2 / $cluster }, { if $n > 64 { 1 } else { 2 } }
            >
        }
    };
}

microscale_kernels_abi::gemm_tiles!(tiles);
