//! Whole models, and the parts that are no decoder layer.

use std::fmt;

use candle_core::{D, DType, Device, Tensor};
use candle_nn::kv_cache::KvCache;

use crate::config::Config;
use crate::decoder::DecoderLayer;
use crate::error::{Error, Result};
use crate::norm::Norm;
use crate::rows::{Rotations, Rows};
use crate::source::{Layer, LayerName, PlainLinear, Source, single};

/// Embeddings, the last norm and the head.
pub struct Ends {
    embeddings: Tensor,
    embedding_scale: f64,
    norm: Norm,
    head: Layer,
    logit_cap: Option<f64>,
    dtype: DType,
}

/// Returns what precedes the names of a language model's tensors, such as `model.`.
///
/// # Errors
/// If there are no embeddings under a known name.
pub fn prefix(source: &dyn Source) -> Result<&'static str> {
    let prefixes = ["model.", "model.language_model.", "language_model.model.", ""];
    let found = prefixes.into_iter().find(|prefix| source.has(&format!("{prefix}embed_tokens.weight")));
    found.ok_or_else(|| {
        Error::Tensor(candle_core::Error::msg("the checkpoint has no model.embed_tokens.weight"))
    })
}

/// Returns the hidden states of tokens before the first layer, `[tokens, hidden]`. Only the tokens'
/// embeddings are converted to f32, not the whole matrix.
///
/// # Errors
/// If there are no embeddings, or a token is not in the vocabulary.
pub(crate) fn embedded(source: &dyn Source, config: &Config, tokens: &[u32], dtype: DType) -> Result<Tensor> {
    let name = format!("{}embed_tokens.weight", prefix(source)?);
    let rows = source.rows(&name, [config.vocabulary, config.hidden], tokens)?;
    Ok((rows.to_dtype(dtype)? * embedding_scale(config, dtype)?)?)
}

/// The factor of embeddings.
fn embedding_scale(config: &Config, dtype: DType) -> candle_core::Result<f64> {
    if !config.family.scales_embeddings {
        return Ok(1.0);
    }
    // Gemma rounds √hidden to the dtype of the weights.
    let scale = Tensor::new((config.hidden as f64).sqrt(), &Device::Cpu)?;
    scale.to_dtype(dtype)?.to_dtype(DType::F64)?.to_scalar()
}

impl Ends {
    /// Loads them. Hidden states have dtype `dtype`, f32 or bf16, or on GPUs f16.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape.
    pub fn load(source: &dyn Source, config: &Config, dtype: DType) -> Result<Self> {
        let prefix = prefix(source)?;
        let shape = [config.vocabulary, config.hidden];
        let embeddings = source.tensor(&format!("{prefix}embed_tokens.weight"), &shape)?;
        let on_cpu = embeddings.device().is_cpu();
        let embeddings = embeddings.to_dtype(if on_cpu { DType::F32 } else { dtype })?;
        let head: Layer = if config.tied {
            Box::new(PlainLinear::new(embeddings.clone(), None))
        } else {
            let module = match prefix {
                "language_model.model." => "language_model.lm_head",
                _ => "lm_head",
            };
            let name = LayerName {
                module: module.into(),
                input: module.into(),
                inputs: config.hidden,
                outputs: config.vocabulary,
                stack: None,
            };
            single(source, &name)?
        };
        Ok(Self {
            norm: Norm::load(source, &format!("{prefix}norm.weight"), config.hidden, config)?,
            embeddings,
            embedding_scale: embedding_scale(config, dtype)?,
            head,
            logit_cap: config.logit_cap,
            dtype,
        })
    }

    /// Returns the hidden states before the first layer, `[tokens, hidden]`.
    ///
    /// # Errors
    /// If a token is not in the vocabulary.
    pub fn embed(&self, tokens: &[u32]) -> candle_core::Result<Tensor> {
        let rows = self.embeddings.index_select(&Tensor::new(tokens, self.embeddings.device())?, 0)?;
        rows.to_dtype(self.dtype)? * self.embedding_scale
    }

    /// Returns the logits, `[tokens, vocabulary]` in f32, of the hidden states after the last
    /// layer.
    ///
    /// # Errors
    /// If shapes do not fit, or memory is short.
    pub fn logits(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let logits = self.head.forward(&self.norm.forward(x)?)?.to_dtype(DType::F32)?;
        match self.logit_cap {
            Some(cap) => (logits / cap)?.tanh()? * cap,
            None => Ok(logits),
        }
    }
}

/// A model in memory, with the keys and values of previous tokens, for generating text.
pub struct Model {
    ends: Ends,
    layers: Vec<(DecoderLayer, KvCache)>,
    rotations: Rotations,
}

impl Model {
    /// Loads a model. Hidden states have dtype `dtype`, f32 or bf16, or on GPUs f16.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape.
    pub fn load(source: &dyn Source, config: &Config, dtype: DType) -> Result<Self> {
        let (prefix, ends) = (prefix(source)?, Ends::load(source, config, dtype)?);
        let layer =
            |layer| Ok((DecoderLayer::load(source, prefix, layer, config)?, KvCache::new(2, config.context)));
        Ok(Self {
            layers: (0..config.layers).map(layer).collect::<Result<_>>()?,
            rotations: Rotations::new(config, config.context, ends.embeddings.device())?,
            ends,
        })
    }

    /// Forgets previous tokens.
    pub fn reset(&mut self) {
        self.layers.iter_mut().for_each(|(_, cache)| cache.reset());
    }

    /// Returns the logits after each token, `[tokens, vocabulary]` in f32, or only after the last.
    ///
    /// # Errors
    /// If a token is not in the vocabulary, or the context is too long.
    pub fn forward(&mut self, tokens: &[u32], only_last: bool) -> candle_core::Result<Tensor> {
        let lengths = [tokens.len()];
        let rows = Rows::new(&lengths, &self.rotations);
        let mut x = self.ends.embed(tokens)?;
        for (layer, cache) in &mut self.layers {
            x = layer.forward(&x, &rows, Some(cache))?;
        }
        if only_last {
            x = x.narrow(0, tokens.len() - 1, 1)?;
        }
        self.ends.logits(&x)
    }

    /// Returns the token with the largest logit after `tokens`.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn next(&mut self, tokens: &[u32]) -> candle_core::Result<u32> {
        self.forward(tokens, true)?.argmax(D::Minus1)?.get(0)?.to_scalar()
    }
}

/// Shows nothing of the tensors.
impl fmt::Debug for Ends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ends").finish_non_exhaustive()
    }
}

/// Shows nothing of the tensors.
impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").finish_non_exhaustive()
    }
}
