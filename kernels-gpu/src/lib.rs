//! The GPU kernels of microscale, compiled to PTX by `cargo xtask build-ptx`.
//!
//! | file | what it holds |
//! |---|---|
//! | [`ptx`] | lane-local instructions: inline assembly |
//! | [`warp`] | convergent operations: LLVM intrinsics, never inline assembly |
//! | `warp_group`, `mbarrier` | what compute capability 9.0 has alone: products by four warps, barriers on which copies arrive |
//! | [`arithmetic`] | the GPU's instructions for `microscale_formats`' arithmetic |
//! | [`dtype`] | f32, f16 and bf16 as chunks of 16 bytes: magnitudes, encoding, decoding |
//! | [`mod@format`] | the formats: scales, encoding, decoding |
//! | [`access`] | where a lane's chunks lie, and moving them; where a quantized tensor goes |
//! | [`by_block`] | a block by a whole warp: every option, slowly |
//! | [`product`] | the parts of products: scheduler, pipeline, multiply, epilogue |
//!
//! Upon these stand the kernel families. The file of this name has a family's entry points:
//!
//! | family | what it does |
//! |---|---|
//! | [`quantize`], [`dequantize`], [`amax`], [`layout`] | the operations on tensors |
//! | [`search`] | quantizes with searched block scales |
//! | [`errors`] | says what was lost |
//! | [`gemv`] | multiplies matrices with vectors, both quantized |
//! | [`weights`] | multiplies quantized weights with activations of a few tokens, by tensor cores |
//! | [`gemm`] | multiplies quantized weights with activations of any number of tokens, by tensor cores |
//! | [`experts`] | sorts tokens by expert, and plans their products, which the two families above compute |
//!
//! Moving a function may change the PTX: LLVM inlines functions in the order of their mangled names, in which the depth,
//! length and spelling of module names count. (With a module `products`, which comes behind `weights`, some branches of
//! the weights' kernels were turned around.) `cargo xtask build-ptx --check` tells.
//!
//! Names, launch shapes and argument structures are `microscale_kernels_abi`'s; the arithmetic's definition is
//! `microscale_formats`', against which every kernel is tested bit for bit.
#![no_std]
#![feature(
    abi_ptx,
    asm_experimental_arch,
    core_intrinsics,
    f16,
    gpu_intrinsics,
    gpu_launch_sized_workgroup_mem
)]
#![feature(link_llvm_intrinsics, macro_metavar_expr_concat, repr_simd, simd_ffi, stdarch_nvptx)]
#![allow(internal_features, reason = "LLVM's intrinsics are the only way to convergent operations")]

mod access;
mod amax;
mod arithmetic;
mod by_block;
#[cfg(microscale_wgmma)]
mod cluster;
mod dequantize;
mod dtype;
mod errors;
mod experts;
mod format;
mod gemm;
mod gemv;
mod layout;
#[cfg(microscale_wgmma)]
mod mbarrier;
mod product;
mod ptx;
mod quantize;
mod search;
mod shared;
mod warp;
#[cfg(microscale_wgmma)]
mod warp_group;
mod weights;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // A loop here would hang the GPU. `check-ptx` sees to it that no path leads to a panic.
    ptx::trap()
}
