//! How linear layers are held: stored, as candle's `Linear`, or quantized in memory.

use std::str::FromStr;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Tensor, bail};
use microscale::{Format, Numerics, Recipe, Search};
use microscale_candle::{Linear, QLinear, RoundedInputs, Weights};
use microscale_models::{Layer, LayerName, Result, Source};

/// How linear layers are held. Heads and embeddings keep the checkpoint's form.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Held {
    /// As stored in the checkpoint. Quantized layers round activations, if they are to.
    Stored(Option<RoundedInputs>),
    /// As candle's `Linear`.
    Plain,
    /// Quantized by candle to a GGUF type.
    Ggml(GgmlDType),
    /// Quantized by microscale, for activations that may be rounded.
    Quantized(Format, Search, Option<RoundedInputs>),
}

impl FromStr for Held {
    type Err = String;

    fn from_str(word: &str) -> std::result::Result<Self, String> {
        let (word, rounded) = match word.strip_suffix("-int8") {
            Some(word) => (word, Some(RoundedInputs::Int8)),
            None => (word, None),
        };
        Ok(match word {
            "stored" => Self::Stored(rounded),
            "plain" if rounded.is_none() => Self::Plain,
            "q4_0" if rounded.is_none() => Self::Ggml(GgmlDType::Q4_0),
            "q4_k" if rounded.is_none() => Self::Ggml(GgmlDType::Q4K),
            "q8_0" if rounded.is_none() => Self::Ggml(GgmlDType::Q8_0),
            "mxfp4" => Self::Quantized(Format::Mxfp4, Search::None, rounded),
            "nvfp4" => Self::Quantized(Format::Nvfp4, Search::None, rounded),
            "mxfp4-full" => Self::Quantized(Format::Mxfp4, Search::Full, rounded),
            "nvfp4-full" => Self::Quantized(Format::Nvfp4, Search::Full, rounded),
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
    pub(crate) fn layer(self, weight: Tensor, bias: Option<Tensor>) -> candle_core::Result<Layer> {
        Ok(match self {
            Self::Stored(_) | Self::Plain => Box::new(candle_nn::Linear::new(weight, bias)),
            Self::Ggml(dtype) => {
                if bias.is_some() {
                    bail!("candle's QMatMul has no bias");
                }
                Box::new(QMatMul::from_qtensor(QTensor::quantize(&weight.to_dtype(DType::F32)?, dtype)?)?)
            }
            Self::Quantized(format, search, rounded) => {
                let numerics =
                    if format == Format::Mxfp4 { Numerics::Ocp } else { Numerics::CompressedTensors };
                let recipe = Recipe::of(format, numerics).map_err(candle_core::Error::wrap)?;
                let layer = QLinear::quantize(&weight, bias, &Recipe { search, ..recipe })?;
                Box::new(layer.with_activations(rounded)?)
            }
        })
    }
}

/// Tensors of a checkpoint. Weights are in the dtype of activations.
pub(crate) struct Stored(pub(crate) Weights, pub(crate) Held);

impl Source for Stored {
    fn device(&self) -> &Device {
        self.0.device()
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        Ok(self.0.stored(shape, name)?.to_dtype(DType::F32)?)
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains_tensor(name)
    }

    fn layers(&self, name: &LayerName) -> Result<Vec<Layer>> {
        if name.stack.is_some() {
            return Err(candle_core::Error::msg("this example runs no stacks of experts").into());
        }
        let weights = self.0.pp(&name.module);
        let bias = weights.contains_tensor("bias");
        if let Held::Stored(rounded) = self.1 {
            return Ok(vec![match weights.linear(name.inputs, name.outputs, bias)? {
                Linear::Quantized(layer) => Box::new(layer.with_activations(rounded)?),
                plain @ Linear::Plain(_) => Box::new(plain),
            }]);
        }
        let bias = bias.then(|| weights.get(name.outputs, "bias")).transpose()?;
        let held = if name.module == "lm_head" { Held::Plain } else { self.1 };
        Ok(vec![held.layer(weights.get((name.outputs, name.inputs), "weight")?, bias)?])
    }
}
