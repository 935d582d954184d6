//! Rotary position embeddings.

use std::f64::consts::TAU;

use candle_core::{Device, Tensor};
use serde_json::Value;

/// The rotary embedding of a layer's heads.
#[derive(Clone, Debug)]
pub(crate) struct Rope {
    /// Elements of a head.
    pub(crate) dim: usize,
    pub(crate) theta: f64,
    pub(crate) scaling: Scaling,
}

/// How frequencies are scaled for longer contexts, as in transformers' `modeling_rope_utils`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Scaling {
    /// Not at all.
    None,
    /// Divided by a factor.
    Linear(f64),
    /// Llama 3: low frequencies are divided by a factor, those in between in part.
    Llama3 { factor: f64, low: f64, high: f64, original: f64 },
    /// YaRN: a ramp between frequencies, and a factor of cosines and sines.
    Yarn { factor: f64, fast: f64, slow: f64, original: f64, truncate: bool, magnitude: f64 },
}

impl Scaling {
    /// Reads an object of config.json. The error is the problem in words.
    pub(crate) fn parse(object: &Value, context: usize) -> Result<Self, String> {
        let kind = object["rope_type"].as_str().or(object["type"].as_str()).unwrap_or("default");
        let number = |name: &str| object[name].as_f64();
        let factor = || number("factor").ok_or_else(|| format!("rope_type {kind} has no factor"));
        let original = number("original_max_position_embeddings").unwrap_or(context as f64);
        Ok(match kind {
            "default" => Self::None,
            "linear" => Self::Linear(factor()?),
            "llama3" => Self::Llama3 {
                factor: factor()?,
                low: number("low_freq_factor").unwrap_or(1.0),
                high: number("high_freq_factor").unwrap_or(4.0),
                original,
            },
            "yarn" => {
                let factor = number("factor").unwrap_or(context as f64 / original);
                let scale = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
                let magnitude = match (number("attention_factor"), number("mscale"), number("mscale_all_dim"))
                {
                    (Some(given), _, _) => given,
                    (None, Some(part), Some(all)) if part != 0.0 && all != 0.0 => scale(part) / scale(all),
                    _ => scale(1.0),
                };
                Self::Yarn {
                    factor,
                    fast: number("beta_fast").unwrap_or(32.0),
                    slow: number("beta_slow").unwrap_or(1.0),
                    original,
                    truncate: object["truncate"].as_bool().unwrap_or(true),
                    magnitude,
                }
            }
            other => {
                return Err(format!(
                    "rope_type {other:?} is not supported; supported are default, linear, llama3 and yarn"
                ));
            }
        })
    }
}

impl Rope {
    /// Returns the angle per position of each pair of elements.
    pub(crate) fn rates(&self) -> Vec<f32> {
        let half = self.dim / 2;
        let plain = |i: usize| self.theta.powf(-2.0 * i as f64 / self.dim as f64);
        let rate = |i: usize| match self.scaling {
            Scaling::None => plain(i),
            Scaling::Linear(factor) => plain(i) / factor,
            Scaling::Llama3 { factor, low, high, original } => {
                let wavelength = TAU / plain(i);
                if wavelength > original / low {
                    plain(i) / factor
                } else if wavelength < original / high {
                    plain(i)
                } else {
                    let part = (original / wavelength - low) / (high - low);
                    (1.0 - part) * plain(i) / factor + part * plain(i)
                }
            }
            Scaling::Yarn { factor, fast, slow, original, truncate, .. } => {
                // The index of the frequency that turns this many times in the original context.
                let index =
                    |turns: f64| self.dim as f64 * (original / (turns * TAU)).ln() / (2.0 * self.theta.ln());
                let (low, high) = (index(fast), index(slow));
                let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(self.dim as f64 - 1.0));
                let width = if high == low { 0.001 } else { high - low };
                let scaled = ((i as f64 - low) / width).clamp(0.0, 1.0);
                plain(i) / factor * scaled + plain(i) * (1.0 - scaled)
            }
        };
        (0..half).map(|i| rate(i) as f32).collect()
    }

    /// Returns cosines and sines, `[positions, dim / 2]` in f32 each.
    pub(crate) fn tables(&self, positions: usize, device: &Device) -> candle_core::Result<[Tensor; 2]> {
        let rates = self.rates();
        let magnitude = match self.scaling {
            Scaling::Yarn { magnitude, .. } => magnitude,
            _ => 1.0,
        };
        let angles = (0..positions).flat_map(|at| rates.iter().map(move |rate| at as f32 * rate));
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for angle in angles {
            let (s, c) = f64::from(angle).sin_cos();
            cos.push((c * magnitude) as f32);
            sin.push((s * magnitude) as f32);
        }
        let shape = (positions, rates.len());
        Ok([Tensor::from_vec(cos, shape, device)?, Tensor::from_vec(sin, shape, device)?])
    }
}
