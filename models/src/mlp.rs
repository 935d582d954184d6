//! Feed-forward layers: dense, and mixtures of experts.

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::ops::{sigmoid, silu, softmax_last_dim};
use microscale::formats::{Gate, Glu};

use crate::config::{Config, ExpertsConfig};
use crate::error::Result as ModelResult;
use crate::families::{ExpertsStorage, RouterOrder};
use crate::source::{Layer, LayerName, PlainLinear, Source, single};

/// A feed-forward layer.
pub(crate) enum Mlp {
    Dense(Dense),
    Experts(Box<Experts>),
}

impl Mlp {
    pub(crate) fn load(
        source: &dyn Source,
        prefix: &str,
        layer: usize,
        config: &Config,
    ) -> ModelResult<Self> {
        match (config.experts, config.family.experts) {
            (Some(experts), Some(_)) if config.sparse[layer] => {
                Ok(Self::Experts(Box::new(Experts::load(source, prefix, experts, config)?)))
            }
            _ => Ok(Self::Dense(Dense::load(source, prefix, config.intermediate, config)?)),
        }
    }

    /// Returns the output for `x`, `[tokens, hidden]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(dense) => dense.forward(x),
            Self::Experts(experts) => experts.forward(x),
        }
    }
}

/// `down(gate(x) ⊙ up(x))`.
pub(crate) struct Dense {
    gate_up: GateUp,
    down: Layer,
    glu: Glu,
}

/// The two first layers, or one whose rows alternate.
enum GateUp {
    Two(Layer, Layer),
    Interleaved(Layer),
}

impl Dense {
    fn load(source: &dyn Source, prefix: &str, intermediate: usize, config: &Config) -> ModelResult<Self> {
        let linear = |end: &str, input: &str, inputs, outputs| {
            single(source, &LayerName::new(prefix, end, input, inputs, outputs))
        };
        Ok(Self {
            gate_up: GateUp::Two(
                linear("gate_proj", "gate_up", config.hidden, intermediate)?,
                linear("up_proj", "gate_up", config.hidden, intermediate)?,
            ),
            down: linear("down_proj", "down", intermediate, config.hidden)?,
            glu: config.gate,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (gate, up) = match &self.gate_up {
            GateUp::Two(gate, up) => (gate.forward(x)?, up.forward(x)?),
            GateUp::Interleaved(layer) => {
                let both = layer.forward(x)?;
                let both = both.reshape((both.dim(0)?, both.dim(1)? / 2, 2))?;
                (both.narrow(2, 0, 1)?.squeeze(2)?, both.narrow(2, 1, 1)?.squeeze(2)?)
            }
        };
        self.down.forward(&gated(&self.glu, &gate, &up)?)
    }
}

/// Returns the gated values.
fn gated(glu: &Glu, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    match *glu {
        Glu::GeluTanh => gate.contiguous()?.gelu()? * up,
        Glu::Gelu => gate.contiguous()?.gelu_erf()? * up,
        Glu::Sigmoid(Gate::SILU) => silu(&gate.contiguous()?)? * up,
        Glu::Sigmoid(Gate { alpha, limit, offset }) => {
            let gate = gate.minimum(f64::from(limit))?;
            let up = up.clamp(-f64::from(limit), f64::from(limit))?;
            let glu = (&gate * sigmoid(&(&gate * f64::from(alpha))?)?)?;
            (up + f64::from(offset))? * glu
        }
    }
}

/// A mixture of experts.
pub(crate) struct Experts {
    router: PlainLinear,
    experts: Vec<Dense>,
    order: RouterOrder,
    config: ExpertsConfig,
}

impl Experts {
    fn load(source: &dyn Source, prefix: &str, experts: ExpertsConfig, config: &Config) -> ModelResult<Self> {
        let Some(family) = config.family.experts else {
            unreachable!("`Mlp::load` checks that the family has experts")
        };
        let ExpertsConfig { count, intermediate, .. } = experts;
        let router = format!("{prefix}.{}", family.router);
        let bias = format!("{router}.bias");
        let bias = source.has(&bias).then(|| source.tensor(&bias, &[count])).transpose()?;
        let router = source.tensor(&format!("{router}.weight"), &[count, config.hidden])?;
        let all = match family.storage {
            ExpertsStorage::Each => (0..count)
                .map(|expert| {
                    Dense::load(source, &format!("{prefix}.experts.{expert}"), intermediate, config)
                })
                .collect::<ModelResult<Vec<_>>>()?,
            ExpertsStorage::Stacked => {
                let stack = |end: &str, input: &str, inputs, outputs| {
                    let name = LayerName::new(&format!("{prefix}.experts"), end, input, inputs, outputs);
                    source.layers(&LayerName { stack: Some(count), ..name })
                };
                let gate_up = stack("gate_up_proj", "gate_up", config.hidden, 2 * intermediate)?;
                let down = stack("down_proj", "down", intermediate, config.hidden)?;
                let each = gate_up.into_iter().zip(down).map(|(gate_up, down)| Dense {
                    gate_up: GateUp::Interleaved(gate_up),
                    down,
                    glu: config.gate,
                });
                each.collect()
            }
        };
        Ok(Self {
            router: PlainLinear::new(router, bias),
            experts: all,
            order: family.order,
            config: experts,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let tokens = x.dim(0)?;
        let logits = self.router.forward(x)?.to_dtype(DType::F32)?;
        let scores = match self.order {
            RouterOrder::SoftmaxThenChoose => softmax_last_dim(&logits)?,
            RouterOrder::ChooseThenSoftmax => logits,
        };
        // The tokens of each expert, and their weights.
        let mut chosen = vec![(Vec::new(), Vec::new()); self.experts.len()];
        for (token, scores) in scores.to_vec2::<f32>()?.into_iter().enumerate() {
            for (expert, weight) in self.choose(&scores) {
                let (tokens, weights) = &mut chosen[expert];
                tokens.push(token as u32);
                weights.push(weight);
            }
        }
        let mut sum = Tensor::zeros((tokens, x.dim(1)?), DType::F32, x.device())?;
        for (expert, (tokens, weights)) in self.experts.iter().zip(chosen) {
            if tokens.is_empty() {
                continue;
            }
            let count = tokens.len();
            let tokens = Tensor::from_vec(tokens, count, x.device())?;
            let weights = Tensor::from_vec(weights, (count, 1), x.device())?;
            let out = expert.forward(&x.index_select(&tokens, 0)?)?.to_dtype(DType::F32)?;
            sum = sum.index_add(&tokens, &out.broadcast_mul(&weights)?, 0)?;
        }
        sum.to_dtype(x.dtype())
    }

    /// Returns the experts of a token with their weights. Of equal scores, the first counts.
    fn choose(&self, scores: &[f32]) -> Vec<(usize, f32)> {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        order.truncate(self.config.chosen);
        let weights: Vec<f32> = match self.order {
            RouterOrder::SoftmaxThenChoose => order.iter().map(|&expert| scores[expert]).collect(),
            RouterOrder::ChooseThenSoftmax => {
                let largest = order.first().map_or(0.0, |&expert| scores[expert]);
                order.iter().map(|&expert| (scores[expert] - largest).exp()).collect()
            }
        };
        let sum: f32 = if self.config.normalized { weights.iter().sum() } else { 1.0 };
        order.into_iter().zip(weights.into_iter().map(|weight| weight / sum)).collect()
    }
}
