//! How linear layers are held: stored, as candle's `Linear`, or quantized in memory.

use std::str::FromStr;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Module, Result, Tensor, bail};
use microscale::{ActivationPrecision, Format, Numerics, Recipe, Search};
use microscale_candle::{Linear, QLinear, Weights};

use super::llama::Source;

/// How linear layers are held. Heads and embeddings keep the checkpoint's form.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Held {
    /// As stored in the checkpoint. Quantized layers take activations in a precision.
    Stored(ActivationPrecision),
    /// As candle's `Linear`.
    Plain,
    /// Quantized by candle to a GGUF type.
    Ggml(GgmlDType),
    /// Quantized by microscale, for activations in a precision.
    Quantized(Format, Search, ActivationPrecision),
}

impl FromStr for Held {
    type Err = String;

    fn from_str(word: &str) -> std::result::Result<Self, String> {
        let (word, precision) = match word.strip_suffix("-int8") {
            Some(word) => (word, ActivationPrecision::Int8),
            None => (word, ActivationPrecision::Exact),
        };
        Ok(match word {
            "stored" => Self::Stored(precision),
            "plain" if precision == ActivationPrecision::Exact => Self::Plain,
            "q4_0" if precision == ActivationPrecision::Exact => Self::Ggml(GgmlDType::Q4_0),
            "q4_k" if precision == ActivationPrecision::Exact => Self::Ggml(GgmlDType::Q4K),
            "q8_0" if precision == ActivationPrecision::Exact => Self::Ggml(GgmlDType::Q8_0),
            "mxfp4" => Self::Quantized(Format::Mxfp4, Search::None, precision),
            "nvfp4" => Self::Quantized(Format::Nvfp4, Search::None, precision),
            "mxfp4-full" => Self::Quantized(Format::Mxfp4, Search::Full, precision),
            "nvfp4-full" => Self::Quantized(Format::Nvfp4, Search::Full, precision),
            _ => {
                return Err(format!(
                    "{word:?}: layers are stored, plain, q4_0, q4_k, q8_0, mxfp4, nvfp4, mxfp4-full or nvfp4-full; all but plain \
                     and candle's types may end with -int8"
                ));
            }
        })
    }
}

impl Held {
    /// The layer with these weights.
    pub(crate) fn layer(self, weight: Tensor, bias: Option<Tensor>) -> Result<Box<dyn Module>> {
        Ok(match self {
            Self::Stored(_) | Self::Plain => Box::new(candle_nn::Linear::new(weight, bias)),
            Self::Ggml(dtype) => {
                if bias.is_some() {
                    bail!("candle's QMatMul has no bias");
                }
                Box::new(QMatMul::from_qtensor(QTensor::quantize(&weight.to_dtype(DType::F32)?, dtype)?)?)
            }
            Self::Quantized(format, search, precision) => {
                let numerics =
                    if format == Format::Mxfp4 { Numerics::Ocp } else { Numerics::CompressedTensors };
                let recipe = Recipe::of(format, numerics).map_err(candle_core::Error::wrap)?;
                let layer = QLinear::quantize(&weight, bias, &Recipe { search, ..recipe })?;
                Box::new(layer.with_precision(precision)?)
            }
        })
    }
}

/// Tensors of a checkpoint.
pub(crate) struct Stored(pub(crate) Weights, pub(crate) Held);

impl Source for Stored {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.0.get(shape, name)
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains_tensor(name)
    }

    fn linear(&self, name: &str, inputs: usize, outputs: usize) -> Result<Box<dyn Module>> {
        let weights = self.0.pp(name);
        let bias = weights.contains_tensor("bias");
        if let Held::Stored(precision) = self.1 {
            return Ok(match weights.linear(inputs, outputs, bias)? {
                Linear::Quantized(layer) => Box::new(layer.with_precision(precision)?),
                plain @ Linear::Plain(_) => Box::new(plain),
            });
        }
        let bias = bias.then(|| weights.get(outputs, "bias")).transpose()?;
        let held = if name == "lm_head" { Held::Plain } else { self.1 };
        held.layer(weights.get((outputs, inputs), "weight")?, bias)
    }
}

/// Random tensors for measurements, the same in every run.
pub(crate) struct Random(pub(crate) Held, pub(crate) DType, pub(crate) Device);

impl Source for Random {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        if shape.len() == 1 {
            return Tensor::ones(shape, self.1, &self.2);
        }
        let seed = name.bytes().fold(1u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        let mut rng = fastrand::Rng::with_seed(seed);
        let size = 1.0 / (shape[1] as f32).sqrt();
        let values =
            (0..shape.iter().product()).map(|_| (rng.f32() + rng.f32() - 1.0) * 2.0 * size).collect();
        Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(self.1)?.to_device(&self.2)
    }

    fn has(&self, _: &str) -> bool {
        false
    }

    fn linear(&self, name: &str, inputs: usize, outputs: usize) -> Result<Box<dyn Module>> {
        let held = if name == "lm_head" { Held::Plain } else { self.0 };
        held.layer(self.tensor(name, &[outputs, inputs])?, None)
    }
}
