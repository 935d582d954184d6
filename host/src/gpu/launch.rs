//! Kernel launches: one file per kernel family, one function per kind of kernel.
//!
//! No other code launches kernels. Each function computes the arguments from checked shapes, so
//! that the kernel's contract (in `kernels-gpu`) holds. `arguments` holds the shared code.

mod activations;
mod amax;
pub(in crate::gpu) mod arguments;
mod dequantize;
mod enqueue;
mod errors;
mod experts;
mod fp4;
mod fp8;
mod gemm;
mod gemv;
mod gptq;
mod kv;
mod layout;
mod parts;
mod quantize;
mod tensor_map;

pub(in crate::gpu) use activations::{
    kernel_of as activation_quantizer, least_tensor_scale, quantize_activations, quantize_rows_fp8,
};
pub(in crate::gpu) use amax::{amax, plan};
pub(in crate::gpu) use dequantize::{dequantize, dequantizer};
pub(in crate::gpu) use errors::{error_parts, errors};
pub(in crate::gpu) use experts::{PAIR_LIMIT, plan_experts, route};
pub(in crate::gpu) use fp4::product_fp4;
pub(in crate::gpu) use fp8::{Fp8Operand, Fp8Source, product_fp8};
pub(in crate::gpu) use gemm::product;
pub(in crate::gpu) use gemv::gemv;
pub(in crate::gpu) use gptq::{GptqLauncher, GptqTarget, PassRows};
pub(in crate::gpu) use kv::{append_kv, gather_kv};
pub(in crate::gpu) use layout::convert_scales;
pub(in crate::gpu) use parts::{TokenGlobals, merge, split};
pub(in crate::gpu) use quantize::{quantize, quantizer};
#[cfg(feature = "internals")]
pub(in crate::gpu) use tensor_map::tensor_map;
