//! Linear layers and experts whose weights are quantized to MXFP4 or NVFP4, over [candle](candle_core)'s tensors.
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
//! | find tensors of a checkpoint by name, as in candle's `VarBuilder` | [`Weights`] |
//! | have a layer, whether the checkpoint has it quantized or not | [`Weights::linear`], [`Linear`] |
//! | multiply with quantized weights | [`QLinear`] |
//! | multiply each token with the weights of its experts | [`Weights::experts`], [`QExperts`] |
//! | make layers of weights that are elsewhere | [`QMatrix`] |
//!
//! Weights stay where the file is mapped, and products read them there: nothing is copied when a model is loaded but what
//! is not quantized, and blocks of GGUF. Products are [`microscale::gemm_weights`] and [`microscale::gemm_experts`], on CPUs,
//! with activations in f32, f16 or bf16, over rayon's threads, as candle's own are.
//!
//! With the feature `cuda`, linear layers and experts are also on candle's GPUs, with activations in the same dtypes: weights
//! are copied there, and products are enqueued on the device's stream, in memory of its pool. f16 and bf16 are the fastest; an f32 is
//! multiplied as three bf16, which loses nothing of it.

#[cfg(feature = "cuda")]
mod cuda;
mod experts;
mod linear;
mod matrix;
mod weights;

pub use experts::QExperts;
pub use linear::{Linear, QLinear};
pub use matrix::QMatrix;
pub use weights::Weights;

// The README's examples are compiled like the others.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
