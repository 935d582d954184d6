//! Linear layers and experts with MXFP4 or NVFP4 weights, on [candle](candle_core)'s tensors.
//!
//! ```no_run
//! use std::path::Path;
//!
//! use candle_core::{DType, Device, Module, Tensor};
//! use microscale_candle::Weights;
//!
//! let weights = Weights::open(Path::new("OUT"), DType::F32, &Device::Cpu)?;
//! let layer = weights.pp("model.layers.0.mlp.down_proj").linear(768, 256, false)?;
//! let x = Tensor::zeros((1, 5, 768), DType::F32, &Device::Cpu)?;
//! assert_eq!(layer.forward(&x)?.dims(), [1, 5, 256]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! | to | use |
//! |---|---|
//! | find tensors of a checkpoint by name, as with candle's `VarBuilder` | [`Weights`] |
//! | load a layer that the checkpoint stores quantized or not | [`Weights::linear`], [`Linear`] |
//! | multiply with quantized weights | [`QLinear`] |
//! | quantize a layer in memory | [`QLinear::quantize`] |
//! | round activations to INT8, FP8 or FP4 | `with_activations` of [`QLinear`] and [`QExperts`] |
//! | multiply each token with the weights of its experts | [`Weights::experts`], [`QExperts`] |
//! | make layers of weights from elsewhere | [`QMatrix`] |
//! | transform activations as a checkpoint's weights | [`hadamard()`], [`QMatrix::with_hadamard`] |
//!
//! Weights stay in the mapped file, and products read them there. Loading a model copies only
//! unquantized tensors and GGUF blocks. Products are [`microscale::gemm_weights`] and
//! [`microscale::gemm_experts`], on CPUs, with activations in f32, f16 or bf16, on rayon's threads
//! like candle's own.
//!
//! With the feature `cuda`, linear layers and experts also run on candle's GPUs, with activations
//! in the same dtypes. Weights are copied to the GPU, and products are enqueued on the device's
//! stream, in memory of its pool. f16 and bf16 are fastest. An f32 is split into three bf16, which
//! keeps its value.

#[cfg(feature = "cuda")]
mod cuda;
mod experts;
mod hadamard;
mod linear;
mod matrix;
mod rounded;
mod weights;

pub use experts::QExperts;
pub use hadamard::hadamard;
pub use linear::{Linear, QLinear};
pub use matrix::QMatrix;
pub use rounded::RoundedInputs;
pub use weights::Weights;

// The README's examples are compiled like the others.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
