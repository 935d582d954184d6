//! The GPU kernels of microscale, compiled to PTX by `cargo xtask build-ptx`.
//!
//! | file | contents |
//! |---|---|
//! | [`hardware`] | instructions as functions: lanes, warps, warp groups, barriers, clusters |
//! | [`arithmetic`] | the GPU's instructions for `microscale_formats`' arithmetic |
//! | [`dtype`] | f32, f16 and bf16 as chunks of 16 bytes: magnitudes, encoding, decoding |
//! | [`mod@format`] | the formats: scales, encoding, decoding |
//! | [`access`] | positions of a lane's chunks, loads and stores; positions in a quantized tensor |
//! | [`by_block`] | the slow path of quantizers: a block by a whole warp, with every option |
//! | [`product`] | shared code of products: operands, tensor cores, results, reference |
//!
//! The kernel families build on these. The file of a family's name has its entry points:
//!
//! | family | operation |
//! |---|---|
//! | [`quantize`], [`dequantize`], [`amax`], [`layout`] | the operations on tensors |
//! | [`search`] | quantizes with searched block scales |
//! | [`activations`] | quantizes activations after a row operation; KV caches |
//! | [`errors`] | sums of quantization errors |
//! | [`gptq`] | quantizes weights with error feedback |
//! | [`gemv`] | multiplies matrices by vectors, both quantized |
//! | [`gemv_weights`] | multiplies quantized weights by activations of up to 32 tokens per pass |
//! | [`gemm`] | multiplies quantized weights by activations of any number of tokens |
//! | [`experts`] | sorts tokens by expert, and plans their products |
//!
//! Moving or renaming a function may change the PTX: LLVM inlines functions in the order of their
//! mangled names. The order of instructions, the direction of branches and the numbers of registers
//! may then differ. Run `cargo xtask build-ptx --check`.
//!
//! Names, launch shapes and argument structures come from `microscale_kernels_abi` (the ABI), and
//! the arithmetic from `microscale_formats`. Every kernel is tested against the latter bit for bit,
//! or within its error bound.
#![no_std]
#![feature(
    abi_ptx,
    asm_experimental_arch,
    core_intrinsics,
    f16,
    gpu_intrinsics,
    gpu_launch_sized_workgroup_mem
)]
#![feature(
    link_llvm_intrinsics,
    macro_metavar_expr_concat,
    repr_simd,
    simd_ffi,
    stdarch_nvptx,
    stmt_expr_attributes
)]
#![allow(internal_features, reason = "LLVM's intrinsics are the only way to convergent operations")]

mod access;
mod activations;
mod amax;
mod arithmetic;
mod by_block;
mod dequantize;
mod dtype;
mod errors;
mod experts;
mod format;
mod gemm;
mod gemv;
mod gemv_weights;
mod gptq;
mod hardware;
mod layout;
mod product;
mod quantize;
mod search;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // A loop here would hang the GPU. `check-ptx` sees to it that no path leads to a panic.
    hardware::ptx::trap()
}
