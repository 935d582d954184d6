//! The GEMM: 4-bit weights times activations of 16, 8 or 4 bits, by tensor cores, for any number of
//! tokens.
//!
//! | file | contents |
//! |---|---|
//! | [`tile`] | the tiles as types |
//! | [`params`] | the kernels' parameters, and the schedule in shared memory |
//! | [`tile_scheduler`] | which work tiles and K-iterations a thread block has |
//! | `work_queue` | the queue of work tiles between producer and consumer warps |
//! | `copies` | the ring of stages of warps that copy for themselves |
//! | `pipeline` | the ring of stages between producer and consumer warps |
//! | [`weight_loader`] | copies of codes and scales to a stage |
//! | `activation_loader` | copies of activations to a stage, and packing them there |
//! | [`fragment`] | a lane's weights of a stage, decoded and scaled |
//! | [`mainloop`] | the mainloops |
//! | `cluster_exchange` | the exchange of accumulators in a cluster |
//! | [`reduce`] | partial sums of split work tiles |
//! | [`epilogue`] | bias, gate, residual, rounding, storing |
//! | [`global_factor`] | the global scale as a factor of the sums |
//! | [`transpose`] | results between lanes, for stores of whole sectors |
//! | [`pack`] | the packing kernel: activations as tensor cores read them |
//! | `fp4` | activations in FP4, packed or decoded |
//! | `fp8_weights` | weights decoded to E4M3, and sums of their products |
//! | `pack_fp8` | the packing kernel for activations in FP8 |
//! | `pack_mxfp4` | the packing kernel for activations in MXFP4, decoded to FP8 |
//! | [`split_f32`] | activations in f32 as three bf16 terms; factors by token |
//!
//! Weights are the first operand of the tensor cores. Lanes decode chunks of 32 weights to
//! registers, as in `gemv_weights`, which changes the order of elements. The packing kernel brings
//! activations into the same order once. Kernels for few tokens do this themselves.

#[cfg(microscale_wgmma)]
mod activation_loader;
#[cfg(microscale_wgmma)]
mod cluster_exchange;
#[cfg(not(microscale_wgmma))]
mod copies;
mod epilogue;
mod fp4;
#[cfg(microscale_wgmma)]
mod fp8_weights;
mod fragment;
mod global_factor;
#[cfg(microscale_wgmma)]
mod group_results;
mod mainloop;
mod pack;
#[cfg(microscale_wgmma)]
mod pack_fp8;
#[cfg(microscale_wgmma)]
mod pack_mxfp4;
mod params;
#[cfg(any(microscale_tcgen05, microscale_wgmma))]
mod pipeline;
mod reduce;
mod split_f32;
mod tile;
mod tile_scheduler;
mod transpose;
mod weight_loader;
#[cfg(microscale_wgmma)]
mod work_queue;

use core::ptr::null;

use microscale_formats::E2m1;
#[cfg(microscale_wgmma)]
use microscale_kernels_abi::ActivationParams;
use microscale_kernels_abi::epilogue::{MergeGrid, SplitGrid};
use microscale_kernels_abi::experts::Plan;
#[cfg(microscale_wgmma)]
use microscale_kernels_abi::gemm::decoding::DecodingParams;
use microscale_kernels_abi::gemm::fp4::Fp4Params;
#[cfg(microscale_wgmma)]
use microscale_kernels_abi::gemm::fp8::DECODING_WARPS;
#[cfg(microscale_tcgen05)]
use microscale_kernels_abi::gemm::params::TensorMap;
use microscale_kernels_abi::gemm::params::{GemmParams, PackParams};
use microscale_kernels_abi::{ApplyGlobal, Epilogue, GlobalSlot, Mainloop};

use self::fp4::Fp4Operand;
#[cfg(microscale_block_scale)]
use self::mainloop::block_scale;
#[cfg(not(microscale_wgmma))]
use self::mainloop::mma;
#[cfg(microscale_tcgen05)]
use self::mainloop::tcgen05;
#[cfg(microscale_wgmma)]
use self::mainloop::{fp8, fp8_block, fp8_fast, fp8_shared, wgmma};
#[cfg(microscale_wgmma)]
use self::pack::begin;
#[cfg(microscale_wgmma)]
use self::pack_fp8::{Fp8Operand, RowBases};
#[cfg(microscale_wgmma)]
use self::pack_mxfp4::Mxfp4Operand;
use self::params::{Launch, Params};
use self::split_f32::TokenGlobals;
use self::tile::declare_tile;
#[cfg(microscale_wgmma)]
use crate::activations::quantize_packed;
use crate::dtype::{Bf16, F16};
#[cfg(any(microscale_block_scale, microscale_tcgen05))]
use crate::format::Nv;
use crate::format::{EVEN, Mx, NvDecoder};
#[cfg(microscale_wgmma)]
use crate::hardware::warp;
use crate::product::operand::Operand;
use crate::product::problem::{Problem, Routed};
use crate::product::product_format::{Mxfp4, Nvfp4};
use crate::product::results::Results;
use crate::product::tensor_cores::{WithBf16, WithF16};

/// Declares the entry points of the packing kernel.
macro_rules! pack_entries {
    ($($name:ident = $dtype:ident,)+) => {$(
        /// Packs activations.
        ///
        /// # Safety
        /// All pointers are to global memory. For the whole launch:
        /// - `activations` has the rows of `params`' tokens, contiguous, aligned to the dtype, and
        ///   each row on 16 bytes if `params.aligned`; read-only.
        /// - `out` has [`PackParams::bytes`] bytes on 16 bytes, overlaps nothing, and only this
        ///   kernel uses it.
        /// - `plan` is null, or the experts' plan with all token tiles of `params`. `from` is null,
        ///   or lists the row of activations of each of the plan's sorted rows. Both are read-only.
        ///
        /// The launch has the shape that `params` and the ABI give.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            activations: *const u8,
            out: *mut u8,
            plan: *const Plan,
            from: *const u32,
            params: PackParams,
        ) {
            let routed = Routed { plan, from, to: null() };
            // SAFETY: the same contract.
            unsafe { pack::pack::<$dtype>(activations, out, routed, params) }
        }
    )+};
}

/// The generic address of the tensor map among an entry point's parameters, or 0 without one.
///
/// Tensor copies read it there. A reference to it would be the address of a copy in local memory,
/// which they cannot read, so the assembly has the parameter's name, by LLVM `<entry>_param_16`.
#[cfg(microscale_tcgen05)]
macro_rules! map_address {
    ($name:ident) => {
        0
    };
    ($name:ident $map:ident) => {{
        let _ = $map;
        let address: u64;
        // SAFETY: takes the address of a parameter of this entry point: the only function that has
        // this text.
        unsafe {
            core::arch::asm!(
                concat!(
                    "{{ .reg .b64 map; mov.b64 map, ", stringify!($name), "_param_16; ",
                    "cvta.param.u64 {}, map; }}"
                ),
                out(reg64) address, options(pure, nomem, nostack, preserves_flags)
            );
        }
        address
    }};
}

/// Declares an entry point that multiplies: `name = body`, `with map` if it has a tensor map of the
/// weights' codes as its last parameter.
macro_rules! gemm_entry {
    ($name:ident = $body:expr $(, with $map:ident)?) => {
        /// Multiplies weights by packed activations.
        ///
        /// # Safety
        /// All pointers are to global memory. For the whole launch:
        /// - `codes` and `scales` have the rows of the weights of `gemm.shape`, linear; with a
        ///   plan, the weights of all its experts, one after the other. Codes, each row of codes,
        ///   and scales start on 16 bytes; with NVFP4, each row of scales starts on 4. `global` has
        ///   a slot per expert. Read-only.
        /// - `activations` has the tokens' rows, contiguous and aligned to the dtype, or for fast
        ///   accumulation with MXFP4 weights a word per row of them, its base. For kernels that
        ///   pack, each row starts on 16 bytes, and `packed` is not used. For others, `packed` has
        ///   the packed activations for this tile; the packing kernel may write them until it ends.
        ///   Read-only.
        /// - `out` has room for the results of every token, aligned to their dtype. `bias` has a
        ///   value per row of weights and expert, and `residual` one per result, where `epilogue`
        ///   has these steps.
        /// - `semaphores` has `SEMAPHORES` zeros, and `partial_sums` has
        ///   [`partial_sum_bytes`](microscale_kernels_abi::gemm::params::partial_sum_bytes) bytes
        ///   on 16 bytes. Only this kernel uses them and `out`, and they overlap nothing.
        /// - `plan` is null, or the experts' plan with all token tiles of `gemm` and their
        ///   schedule. `from` and `to` are null, or list the row of activations and of results of
        ///   each sorted row. Read-only.
        /// - The tensor map, if there is one, has the codes as `[experts, rows, bytes of a row]`.
        ///   Its boxes have a thread block's rows and 128 bytes, which is also its swizzle.
        ///
        /// The launch has the thread blocks, threads, cluster and shared memory that `gemm` and the
        /// ABI give.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            codes: *const u8,
            scales: *const u8,
            global: *const GlobalSlot,
            activations: *const u8,
            packed: *const u8,
            out: *mut u8,
            semaphores: *mut u32,
            partial_sums: *mut u8,
            plan: *const Plan,
            from: *const u32,
            to: *const u32,
            bias: *const u8,
            residual: *const u8,
            gemm: GemmParams,
            apply: ApplyGlobal,
            epilogue: Epilogue,
            $($map: TensorMap,)?
        ) {
            let weights = Operand { codes, scales, global, apply };
            let routed = Routed { plan, from, to };
            let results = Results { out, bias, residual, epilogue };
            let problem = &Problem { weights, activations, results, shape: gemm.shape, routed };
            let params = Params {
                problem,
                launch: Launch::new(&gemm),
                packed,
                semaphores,
                partial_sums,
                #[cfg(microscale_tcgen05)]
                weights_map: map_address!($name $($map)?),
            };
            // SAFETY: the same contract.
            unsafe { $body(&params) }
        }
    };
}

/// Splits activations in f32 into bf16 terms.
///
/// # Safety
/// All pointers are to global memory. For the whole launch:
/// - `activations` has `grid`'s rows, contiguous, on 4 bytes, or each on 16 if `grid.aligned`;
///   read-only.
/// - `out` has room for the terms of every row, on 16 bytes, overlaps nothing, and only this kernel
///   uses it.
/// - `plan` is null, or the experts' plan of the terms, with at most `grid`'s rows. `from` is null,
///   or lists the row of activations of each sorted row. Both are read-only.
///
/// The launch has the shape that `grid` and the ABI give.
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
    unsafe { split_f32::split(activations, out, routed, &grid) }
}

/// Merges the products of the terms, or multiplies sums by factors of their tokens.
///
/// # Safety
/// All pointers are to global memory, aligned to their elements. For the whole launch:
/// - `sums` has `grid.parts` rows for each row of activations. Where `epilogue` has these steps,
///   `bias` has a value per sum of a row and expert, and `residual` one per result, in the dtypes
///   that it says. Read-only.
/// - `token_scales` is null, or has a global scale per row of activations, and `weight_globals` a
///   slot per matrix. Read-only.
/// - `out` has room for `grid`'s results, overlaps nothing, and only this kernel uses it.
/// - `plan` is null, or the experts' plan of the rows of sums, with at most `grid`'s rows. `from`
///   and `to` are null, or list the row of activations and of results of each sorted row. All are
///   read-only.
///
/// The launch has the shape that `grid` and the ABI give.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn merge_f32(
    sums: *const f32,
    out: *mut u8,
    bias: *const u8,
    residual: *const u8,
    plan: *const Plan,
    from: *const u32,
    to: *const u32,
    token_scales: *const f32,
    weight_globals: *const GlobalSlot,
    grid: MergeGrid,
    epilogue: Epilogue,
) {
    let (routed, globals) = (Routed { plan, from, to }, TokenGlobals { token_scales, weight_globals });
    // SAFETY: the same contract.
    unsafe { split_f32::merge(sums, globals, Results { out, bias, residual, epilogue }, routed, &grid) }
}

/// Declares the entry points of the kernels that pack FP4 activations, of the kernels that decode
/// them, and of the kernels that do both.
macro_rules! fp4_entries {
    (
        pack { $($(#[$target:meta])* $pack:ident = $blocks:ty,)+ }
        decode { $($decode:ident, $decode_packed:ident = $format:expr => $dtype:ident, $operand:ident;)+ }
    ) => {
        $(
            /// Packs activations in FP4, and writes the factors of the sums.
            ///
            /// # Safety
            /// All pointers are to global memory. For the whole launch:
            /// - `codes` and `scales` have the activations' rows, as `fp4.scales` describes them;
            ///   `codes` and each row of them start on 16 bytes. `activation_globals` has
            ///   `fp4.activation_slots` slots, and `weight_globals` one per matrix; a launch of a
            ///   kernel before this one may write them. Read-only.
            /// - `out` has [`PackParams::bytes`] bytes on 16 bytes, and `factors` a slot per
            ///   matrix. They overlap nothing, and only this kernel uses them.
            /// - `plan` is null, or the experts' plan with all token tiles of `params`. `from` is
            ///   null, or lists the row of activations of each of the plan's sorted rows. Both are
            ///   read-only.
            ///
            /// The launch has the shape that `params` and the ABI give.
            $(#[$target])*
            #[unsafe(no_mangle)]
            pub unsafe extern "ptx-kernel" fn $pack(
                codes: *const u8,
                scales: *const u8,
                activation_globals: *const GlobalSlot,
                weight_globals: *const GlobalSlot,
                out: *mut u8,
                factors: *mut GlobalSlot,
                plan: *const Plan,
                from: *const u32,
                params: PackParams,
                fp4: Fp4Params,
            ) {
                let globals = [activation_globals, weight_globals];
                let operand = Fp4Operand { codes, scales, globals, factors, params: fp4 };
                // SAFETY: the same contract.
                unsafe { operand.pack::<$blocks>(out, Routed { plan, from, to: null() }, params) }
            }
        )+
        $(
            /// Decodes activations in FP4, and writes the factors of the sums.
            ///
            /// # Safety
            /// All pointers are to global memory. For the whole launch:
            /// - `codes` and `scales` have the activations' rows, as `fp4.scales` describes them;
            ///   `codes` start on 4 bytes. `activation_globals` has `fp4.activation_slots` slots,
            ///   and `weight_globals` one per matrix. Read-only.
            /// - `out` has 16 bytes per eight of activations, on 16 bytes, and `factors` a slot per
            ///   matrix. They overlap nothing, and only this kernel uses them.
            ///
            /// The launch has the shape that `fp4.eights` and the ABI give.
            #[unsafe(no_mangle)]
            pub unsafe extern "ptx-kernel" fn $decode(
                codes: *const u8,
                scales: *const u8,
                activation_globals: *const GlobalSlot,
                weight_globals: *const GlobalSlot,
                out: *mut u8,
                factors: *mut GlobalSlot,
                fp4: Fp4Params,
            ) {
                let globals = [activation_globals, weight_globals];
                let operand = Fp4Operand { codes, scales, globals, factors, params: fp4 };
                // SAFETY: the same contract.
                unsafe { operand.decode::<_, $dtype>(&$format, out) }
            }

            /// Decodes activations in FP4, packs them, and writes the factors of the sums.
            ///
            /// # Safety
            /// As for the kernels that pack, but `codes` and each row of them start on 4 bytes.
            #[unsafe(no_mangle)]
            pub unsafe extern "ptx-kernel" fn $decode_packed(
                codes: *const u8,
                scales: *const u8,
                activation_globals: *const GlobalSlot,
                weight_globals: *const GlobalSlot,
                out: *mut u8,
                factors: *mut GlobalSlot,
                plan: *const Plan,
                from: *const u32,
                params: PackParams,
                fp4: Fp4Params,
            ) {
                let globals = [activation_globals, weight_globals];
                let operand = Fp4Operand { codes, scales, globals, factors, params: fp4 };
                let routed = Routed { plan, from, to: null() };
                // SAFETY: the same contract.
                unsafe { operand.decode_packed::<_, $operand>(&$format, out, routed, params) }
            }
        )+
    };
}

/// NVFP4 without its global scale, which is a factor of the sums.
const NVFP4: NvDecoder = NvDecoder { global: 1.0, apply: ApplyGlobal::Absent };

fp4_entries! {
    pack {
        #[cfg(microscale_block_scale)]
        fp4_pack_nvfp4 = Nv,
        #[cfg(microscale_block_scale)]
        fp4_pack_mxfp4 = Mx<E2m1, EVEN>,
        #[cfg(microscale_tcgen05)]
        fp4_pack_nvfp4_tcgen05 = Nv,
        #[cfg(microscale_tcgen05)]
        fp4_pack_mxfp4_tcgen05 = Mx<E2m1, EVEN>,
    }
    decode {
        fp4_decode_nvfp4_f16, fp4_decode_pack_nvfp4_f16 = NVFP4 => F16, WithF16;
        fp4_decode_nvfp4_bf16, fp4_decode_pack_nvfp4_bf16 = NVFP4 => Bf16, WithBf16;
        fp4_decode_mxfp4_bf16, fp4_decode_pack_mxfp4_bf16 = Mx::<E2m1, EVEN>::decoder() => Bf16, WithBf16;
    }
}

pack_entries! {
    pack_f16 = WithF16,
    pack_bf16 = WithBf16,
}

/// Packs activations in FP8.
///
/// # Safety
/// All pointers are to global memory. For the whole launch:
/// - `codes` has the rows of `params`' tokens, contiguous, each on 8 bytes if `params.aligned`, and
///   `scales` has `token_scales` of each: one, or one per pack of columns. A launch of a kernel
///   before this one may write them. Read-only.
/// - `out` has [`PackParams::bytes`] bytes on 16 bytes, overlaps nothing, and only this kernel uses
///   it.
/// - `plan` is null, or the experts' plan with all token tiles of `params`. `from` is null, or
///   lists the row of activations of each of the plan's sorted rows. Both are read-only.
/// - If `params` has rows, `weight_scales` has their scales, on 4 bytes; read-only. `row_bases` has
///   room for one word per row, on 4 bytes, and only this kernel uses it.
///
/// The launch has the shape that `params` and the ABI give.
#[cfg(microscale_wgmma)]
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn fp8_pack(
    codes: *const u8,
    scales: *const f32,
    out: *mut u8,
    plan: *const Plan,
    from: *const u32,
    params: PackParams,
    token_scales: u32,
    weight_scales: *const u8,
    row_bases: *mut u32,
) {
    let operand = Fp8Operand { codes, scales, token_scales };
    let row_bases = RowBases { scales: weight_scales, out: row_bases };
    // SAFETY: the same contract.
    unsafe { operand.pack(out, Routed { plan, from, to: null() }, params, row_bases) }
}

/// Decodes activations in MXFP4 to FP8, and packs them.
///
/// # Safety
/// All pointers are to global memory. `pack`, `params` and the launch are of a
/// [`Decoding`](microscale_kernels_abi::gemm::decoding::Decoding). For the whole launch:
/// - `codes` and `scales` have the rows of `pack`'s tokens, of whole blocks, as `params.scales`
///   describes them; `codes` start on 4 bytes. A launch of a kernel before this one may write them.
///   Read-only.
/// - `out`, `weight_scales` and `row_bases` are as for `fp8_pack`.
#[cfg(microscale_wgmma)]
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn fp8_pack_mxfp4(
    codes: *const u8,
    scales: *const u8,
    out: *mut u8,
    pack: PackParams,
    params: DecodingParams,
    weight_scales: *const u8,
    row_bases: *mut u32,
) {
    begin();
    // SAFETY: the same contract.
    unsafe {
        if warp::thread_block() < pack.thread_blocks {
            Mxfp4Operand { codes, scales, params }.pack(out, &pack);
        } else {
            let row_bases = RowBases { scales: weight_scales, out: row_bases };
            row_bases.find_own(&pack, DECODING_WARPS);
        }
    }
}

/// Declares the entry points of the kernels that quantize activations to FP8.
#[cfg(microscale_wgmma)]
macro_rules! quantize_entries {
    ($($name:ident = $dtype:ident,)+) => {$(
        /// Quantizes activations to FP8, and packs them.
        ///
        /// # Safety
        /// All pointers are to global memory. `pack`, `params` and the launch are of a
        /// [`Quantizing`](microscale_kernels_abi::gemm::quantizing::Quantizing). For the whole
        /// launch:
        /// - `values` has the rows of `pack`'s tokens, contiguous, aligned to the dtype, and each
        ///   row on 16 bytes if `params.aligned` is 1; read-only.
        /// - `out`, `weight_scales` and `row_bases` are as for `fp8_pack`.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            values: *const u8,
            out: *mut u8,
            pack: PackParams,
            params: ActivationParams,
            weight_scales: *const u8,
            row_bases: *mut u32,
        ) {
            // SAFETY: the same contract.
            unsafe {
                if warp::thread_block() < pack.thread_blocks {
                    quantize_packed::<$dtype>(values, out, &pack, &params);
                } else {
                    let row_bases = RowBases { scales: weight_scales, out: row_bases };
                    row_bases.find_own(&pack, params.warps_of_block());
                }
            }
        }
    )+};
}

#[cfg(microscale_wgmma)]
quantize_entries! {
    fp8_quantize_f16 = F16,
    fp8_quantize_bf16 = Bf16,
}

/// Declares tile types and entry points: for the ABI's list, then for each tile, format and dtype.
macro_rules! tiles {
    ($($name:ident: $mainloop:ident $m:tt $n:tt $cluster:tt;)+) => {
        $(tiles! { @tile $mainloop $name $m $n $cluster })+
    };
    (@tile Mma $name:ident $m:tt $n:tt $cluster:tt) => {
        #[cfg(not(microscale_wgmma))]
        const _: () = {
            declare_tile! { $name Mma $m $n $cluster }
            tiles! { @operands $name mma }
        };
    };
    (@tile BlockScale $name:ident $m:tt $n:tt $cluster:tt) => {
        #[cfg(microscale_block_scale)]
        const _: () = {
            declare_tile! { $name BlockScale $m $n $cluster }
            tiles! { @operands $name block_scale }
        };
    };
    (@tile Tcgen05 $name:ident $m:tt $n:tt $cluster:tt) => {
        #[cfg(microscale_tcgen05)]
        const _: () = {
            declare_tile! { $name Tcgen05 $m $n $cluster }
            tiles! { @operands $name tcgen05, with map }
        };
    };
    (@tile Wgmma $name:ident $m:tt $n:tt $cluster:tt) => {
        tiles! { @wgmma Wgmma $name $m $n $cluster }
    };
    (@tile Multicast $name:ident $m:tt $n:tt $cluster:tt) => {
        tiles! { @wgmma Multicast $name $m $n $cluster }
    };
    (@tile Fp8 $name:ident $m:tt $n:tt $cluster:tt) => {
        #[cfg(microscale_wgmma)]
        const _: () = {
            declare_tile! { $name Fp8 $m $n $cluster }
            tiles! { @operands $name fp8 }
        };
    };
    (@tile Fp8Block $name:ident $m:tt $n:tt $cluster:tt) => {
        #[cfg(microscale_wgmma)]
        const _: () = {
            declare_tile! { $name Fp8Block $m $n $cluster }
            tiles! { @operands $name fp8_block }
        };
    };
    (@tile Fp8Shared $name:ident $m:tt $n:tt $cluster:tt) => {
        #[cfg(microscale_wgmma)]
        const _: () = {
            declare_tile! { $name Fp8Shared $m $n $cluster }
            tiles! { @operands $name fp8_shared }
        };
    };
    (@tile Fp8Fast $name:ident $m:tt $n:tt $cluster:tt) => {
        #[cfg(microscale_wgmma)]
        const _: () = {
            declare_tile! { $name Fp8Fast $m $n $cluster }
            tiles! { @operands $name fp8_fast }
        };
    };
    (@wgmma $mainloop:ident $name:ident $m:tt $n:tt $cluster:tt) => {
        #[cfg(microscale_wgmma)]
        const _: () = {
            declare_tile! { $name $mainloop $m $n $cluster }
            tiles! { @operands $name wgmma }
        };
    };
    // The GEMV declares its own.
    (@tile $mainloop:ident $name:ident $m:tt $n:tt $cluster:tt) => {};
    (@operands $tile:ident $mainloop:ident $(, with $map:ident)?) => {
        gemm_entry! {
            ${concat(nvfp4_gemm_f16_, $tile)} = $mainloop::gemm::<Nvfp4, WithF16, $tile> $(, with $map)?
        }
        gemm_entry! {
            ${concat(nvfp4_gemm_bf16_, $tile)} = $mainloop::gemm::<Nvfp4, WithBf16, $tile> $(, with $map)?
        }
        gemm_entry! {
            ${concat(mxfp4_gemm_f16_, $tile)} = $mainloop::gemm::<Mxfp4, WithF16, $tile> $(, with $map)?
        }
        gemm_entry! {
            ${concat(mxfp4_gemm_bf16_, $tile)} = $mainloop::gemm::<Mxfp4, WithBf16, $tile> $(, with $map)?
        }
    };
}

microscale_kernels_abi::gemm_tiles!(tiles);
