//! The GPU kernels of microscale, compiled to PTX by `cargo xtask build-ptx`.
//!
//! | file | what it holds |
//! |---|---|
//! | [`ptx`] | lane-local instructions: inline assembly |
//! | [`warp`] | convergent operations: LLVM intrinsics, never inline assembly |
//! | [`dtype`] | f32, f16 and bf16 as chunks of 16 bytes: magnitudes, encoding, decoding |
//! | [`format`] | the formats: scales, encoding, decoding |
//! | [`access`] | where a lane's chunks lie, and moving them |
//! | [`quantize`], [`dequantize`], [`amax`], [`layout`] | the operations |
//! | [`search`] | quantizing with searched block scales |
//! | [`errors`] | what was lost |
//! | [`gemv`] | matrices times vectors: both quantized, and weights times activations |
//! | [`by_block`] | a block by a whole warp: every option, slowly |
//! | [`ladder`] | the quantizer as one would write it first, and second: baselines for `bench --ladder` |
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
#![feature(link_llvm_intrinsics, repr_simd, simd_ffi, stdarch_nvptx)]
#![allow(internal_features, reason = "LLVM's intrinsics are the only way to convergent operations")]

mod access;
mod amax;
mod arithmetic;
mod by_block;
mod dequantize;
mod dtype;
mod errors;
mod format;
mod gemv;
mod ladder;
mod layout;
mod ptx;
mod quantize;
mod search;
mod warp;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // A loop here would hang the GPU. `check-ptx` sees to it that no path leads to a panic.
    ptx::trap()
}

/// Does nothing: what a launch costs.
#[unsafe(no_mangle)]
pub extern "ptx-kernel" fn empty() {}
