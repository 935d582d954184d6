//! RMSNorm.

use candle_core::{Result, Tensor};
use candle_nn::ops::rms_norm;

use crate::config::Config;
use crate::source::{Source, compute_dtype};

/// x / √(mean(x²) + ε) · weight along the last axis, in f32 on CPUs.
pub(crate) struct Norm {
    weight: Tensor,
    eps: f32,
}

impl Norm {
    pub(crate) fn load(
        source: &dyn Source,
        name: &str,
        size: usize,
        config: &Config,
    ) -> crate::error::Result<Self> {
        let weight = source.tensor(name, &[size])?;
        let weight = if config.family.norm_adds_one { (weight + 1.0)? } else { weight };
        Ok(Self { weight, eps: config.eps })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let dtype = compute_dtype(x);
        let weight = self.weight.to_dtype(dtype)?;
        rms_norm(&x.to_dtype(dtype)?.contiguous()?, &weight, self.eps)?.to_dtype(x.dtype())
    }
}
