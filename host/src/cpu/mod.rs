//! Quantizing, dequantizing, amax and matrix products on the CPU.
//!
//! The modules form floors. Each imports modules on its own floor or below, never above.
//!
//! | floor | modules | task |
//! |---|---|---|
//! | entry points | `quantize`, `dequantize`, `amax`, `gem*`, `gptq` | check operands, make tasks |
//! | dispatch | `isa`, `dispatch`, `reference` | choose an instruction set, once per call |
//! | loops over blocks | `rounding`, `search`, `decode`, `errors`, `exact_cast` | process a run |
//! | loops over rows | `products` | multiply a row or a panel of rows |
//! | blocks | `blocks` | quantize one block, cut matrices into runs of blocks, count events |
//! | vectors | `simd` | one trait per kind of vector, one file per instruction set |
//! | memory | `memory` | software prefetch, streaming stores |
//!
//! An entry point hands a run of blocks to [`Isa`]. `dispatch` calls the loop that is compiled for
//! the instruction set. The loop loads vectors and stores codes and scales.
//!
//! `reference` applies the block functions of `microscale_formats` to one block at a time.
//! `rounding::groups` computes the same bytes for sixteen blocks at a time. `blocks::vectorized` is
//! the fallback for arithmetic that groups do not support: one block at a time, in loops that the
//! compiler vectorizes. Tests compare every instance with the reference, bit by bit. `comparison`
//! has the formats that exist only for comparison, and imports none of these modules.

mod activations;
mod amax;
mod blocks;
mod comparison;
mod decode;
mod dequantize;
mod dispatch;
mod errors;
pub(crate) mod exact_cast;
mod gemm_experts;
mod gemm_experts_fp4;
mod gemm_fp4;
mod gemm_fp8;
mod gemm_int8;
mod gemm_weights;
mod gemv;
mod gemv_weights;
mod gptq;
mod isa;
mod kv;
mod memory;
mod products;
mod quantize;
mod reference;
mod rounding;
mod search;
mod simd;

pub use activations::quantize_activations;
#[doc(hidden)]
pub use activations::quantize_activations_with;
pub use amax::amax;
#[doc(hidden)]
pub use amax::amax_with;
pub(crate) use decode::decoder::Decoder;
#[doc(hidden)]
pub use dequantize::dequantize_with;
pub use dequantize::{dequantize, dequantize_into};
#[doc(hidden)]
pub use gemm_experts::gemm_experts_with;
pub use gemm_experts::{gemm_experts, gemm_experts_int8};
pub use gemm_experts_fp4::{gemm_experts_fp4, gemm_experts_fp4_gated};
#[doc(hidden)]
pub use gemm_experts_fp4::{gemm_experts_fp4_gated_with, gemm_experts_fp4_with};
pub use gemm_fp4::{gemm_fp4, gemm_fp4_gated};
#[doc(hidden)]
pub use gemm_fp4::{gemm_fp4_gated_with, gemm_fp4_with};
pub use gemm_fp8::{gemm_experts_fp8, gemm_weights_fp8};
#[doc(hidden)]
pub use gemm_fp8::{gemm_experts_fp8_with, gemm_weights_fp8_with};
pub use gemm_int8::gemm_weights_int8;
#[doc(hidden)]
pub use gemm_int8::gemm_weights_int8_with;
pub use gemm_weights::gemm_weights;
#[doc(hidden)]
pub use gemm_weights::gemm_weights_with;
pub use gemv::gemv;
#[doc(hidden)]
pub use gemv::gemv_with;
pub use gemv_weights::gemv_weights;
#[doc(hidden)]
pub use gemv_weights::gemv_weights_with;
#[doc(hidden)]
pub use gptq::{FactorOperands, ScaleFactors, quantize_gptq_with};
pub use gptq::{GptqFactor, quantize_gptq};
pub use isa::Isa;
pub use kv::{append_kv, gather_kv};
pub use quantize::{quantize, quantize_into, quantize_into_parts, quantize_with};
pub(crate) use simd::Scalars;
