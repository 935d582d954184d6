//! A decoder layer.

use std::fmt;

use candle_core::{Result, Tensor};
use candle_nn::kv_cache::KvCache;

use crate::attention::Attention;
use crate::config::Config;
use crate::error::Result as ModelResult;
use crate::mlp::Mlp;
use crate::norm::Norm;
use crate::rows::Rows;
use crate::source::Source;

/// Attention and a feed-forward layer, each with a residual.
pub struct DecoderLayer {
    attention: Attention,
    mlp: Mlp,
    /// Norms before attention and before the feed-forward layer.
    before: [Norm; 2],
    /// Norms after them.
    after: Option<[Norm; 2]>,
}

impl DecoderLayer {
    /// Loads layer `layer`. `prefix` ends with a dot, such as `model.`.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape.
    pub fn load(source: &dyn Source, prefix: &str, layer: usize, config: &Config) -> ModelResult<Self> {
        let prefix = format!("{prefix}layers.{layer}");
        let norm = |end: &str| {
            Norm::load(source, &format!("{prefix}.{end}_layernorm.weight"), config.hidden, config)
        };
        let (before, after) = if config.family.norms_after {
            (
                [norm("input")?, norm("pre_feedforward")?],
                Some([norm("post_attention")?, norm("post_feedforward")?]),
            )
        } else {
            ([norm("input")?, norm("post_attention")?], None)
        };
        Ok(Self {
            attention: Attention::load(source, &format!("{prefix}.self_attn"), layer, config)?,
            mlp: Mlp::load(source, &format!("{prefix}.mlp"), layer, config)?,
            before,
            after,
        })
    }

    /// Returns the hidden states after the layer, `[tokens, hidden]`.
    ///
    /// With a cache there is one sequence, which continues the cache's.
    ///
    /// # Errors
    /// If shapes do not fit, or memory is short.
    pub fn forward(&self, x: &Tensor, rows: &Rows<'_>, cache: Option<&mut KvCache>) -> Result<Tensor> {
        let after = |i: usize, y: Tensor| match &self.after {
            Some(norms) => norms[i].forward(&y),
            None => Ok(y),
        };
        let y = self.attention.forward(&self.before[0].forward(x)?, rows, cache)?;
        let x = (x + after(0, y)?)?;
        let y = self.mlp.forward(&self.before[1].forward(&x)?)?;
        &x + after(1, y)?
    }
}

/// Shows nothing of the tensors.
impl fmt::Debug for DecoderLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DecoderLayer").finish_non_exhaustive()
    }
}
