//! Launching: a file a kernel family, a function a kind of kernel, and nothing else launches.
//!
//! Each computes the arguments from checked shapes, so that the kernel's contract (in `kernels-gpu`) holds.
//! Shared parts are here.

mod amax;
mod dequantize;
mod errors;
mod experts;
mod gemm;
mod gemv;
mod ladder;
mod layout;
mod parts;
mod quantize;
mod weights;

pub(super) use amax::{amax, plan};
pub(super) use dequantize::{dequantize, dequantizer};
pub(super) use errors::{error_parts, errors};
pub(super) use experts::{choose_experts, experts_workspace, gemm_experts, route};
pub(super) use gemm::{gemm_kernel, gemm_weights, gemm_workspace, may_need_workspace};
pub(super) use gemv::gemv;
pub(super) use ladder::{empty, quantize_baseline};
pub(super) use layout::convert_scales;
pub(super) use quantize::{quantize, quantizer};
pub(super) use weights::gemv_weights;
