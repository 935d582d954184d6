//! What quantization costs a model: perplexity, divergence, agreement, and each layer's error.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use candle_core::{D, DType, Module, Tensor};
use rayon::prelude::*;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::estimate::Estimate;
use crate::model::Ends;
use crate::pass::Pass;
use crate::progress::{Meter, OnProgress};
use crate::source::{Layer, LayerName, Source, Wrapped, lock};
use crate::text::Window;

/// Tokens whose logits are in memory together.
const ROWS: usize = 128;

/// A model to evaluate.
#[derive(Clone, Copy)]
pub struct Evaluated<'a> {
    /// Its name in errors.
    pub name: &'a str,
    /// Its tensors and layers.
    pub source: &'a dyn Source,
    /// Its sizes.
    pub config: &'a Config,
}

/// Shows the name.
impl std::fmt::Debug for Evaluated<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Evaluated").field(&self.name).finish()
    }
}

/// Options of an evaluation.
#[derive(Clone, Copy, Debug)]
pub struct EvaluateOptions {
    /// The dtype of hidden states: f32, or bf16 as engines have it.
    pub dtype: DType,
    /// Whether to measure the output of each linear layer, which about doubles the time.
    pub layers: bool,
}

/// The results of an evaluation.
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// Windows of the text.
    pub windows: usize,
    /// Predicted tokens.
    pub tokens: usize,
    /// The reference's loss per token, in nats.
    pub loss: Estimate,
    /// The reference's perplexity.
    pub perplexity: Estimate,
    /// The other models' results.
    pub others: Vec<Difference>,
}

/// A model, compared with the reference token by token.
#[derive(Clone, Debug)]
pub struct Difference {
    /// Its loss per token, in nats.
    pub loss: Estimate,
    /// Its perplexity.
    pub perplexity: Estimate,
    /// Its perplexity, divided by the reference's, minus 1. The interval is of the difference,
    /// and much narrower than the intervals of both perplexities.
    pub increase: Estimate,
    /// The Kullback–Leibler divergence of the next token, of this model from the reference, in
    /// nats.
    pub divergence: Estimate,
    /// The share of tokens for which both models have the same most likely token.
    pub agreement: Estimate,
    /// Each linear layer's output for the reference's input, in order. Empty unless asked for.
    pub layers: Vec<LayerError>,
}

impl Difference {
    /// Returns the signal-to-noise ratio of all layers' outputs together, in decibels.
    pub fn sqnr_db(&self) -> f64 {
        let sum = |of: fn(&LayerError) -> f64| self.layers.iter().map(of).sum::<f64>();
        10.0 * (sum(|layer| layer.squares) / sum(|layer| layer.errors)).log10()
    }
}

/// The error of a linear layer's output. The layers of a stack count as one.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerError {
    /// The name of the weights.
    pub weight: String,
    /// The sum of the reference's squared outputs.
    pub squares: f64,
    /// The sum of squared differences.
    pub errors: f64,
}

impl LayerError {
    /// Returns the signal-to-noise ratio in decibels. Infinite without an error.
    pub fn sqnr_db(&self) -> f64 {
        10.0 * (self.squares / self.errors).log10()
    }
}

/// Evaluates models on the windows of a text, one decoder layer in memory at a time.
///
/// # Errors
/// [`Error::Different`] for models of other sizes, and [`Error::Interrupted`] if the callback
/// interrupts; errors of reading and of arithmetic.
pub fn evaluate(
    reference: Evaluated<'_>,
    others: &[Evaluated<'_>],
    windows: &[Window],
    options: EvaluateOptions,
    on_progress: &mut OnProgress<'_>,
) -> Result<Evaluation> {
    for other in others {
        check_sizes(reference, *other)?;
    }
    let config = reference.config;
    let mut pass = Pass::new(reference.source, config, windows, options.dtype)?;
    let mut other_passes = others
        .iter()
        .map(|other| Pass::new(other.source, other.config, windows, options.dtype))
        .collect::<Result<Vec<_>>>()?;
    let steps = pass.batches().len() * (others.len() + 1) * config.layers;
    let mut meter = Meter::new(steps, on_progress);
    let errors: Vec<_> = others.iter().map(|_| Errors::default()).collect();
    let compared = Wrapped {
        source: reference.source,
        layers: |name: &LayerName, layers: Vec<Layer>| {
            if options.layers { compare(name, layers, others, &errors) } else { Ok(layers) }
        },
        cache: |name: &str| reference.source.cache(name),
    };
    for layer in 0..config.layers {
        meter.report(layer)?;
        pass.advance(&compared, config, || meter.batch(layer))?;
        for (pass, other) in other_passes.iter_mut().zip(others) {
            pass.advance(other.source, other.config, || meter.batch(layer))?;
        }
    }

    let models = std::iter::once(&reference).chain(others);
    let ends = models.map(|model| Ends::load(model.source, model.config, options.dtype));
    let ends = ends.collect::<Result<Vec<_>>>()?;
    let passes: Vec<_> = [&pass].into_iter().chain(&other_passes).collect();
    let sums = window_sums(&ends, &passes, windows)?;
    Ok(results(&sums, &errors))
}

/// Checks that two models read the same tokens and have the same layers.
fn check_sizes(reference: Evaluated<'_>, other: Evaluated<'_>) -> Result<()> {
    let sizes = |config: &Config| {
        [
            ("tokens in its vocabulary", config.vocabulary),
            ("layers", config.layers),
            ("elements in a hidden state", config.hidden),
        ]
    };
    for ((what, expected), (_, found)) in sizes(reference.config).into_iter().zip(sizes(other.config)) {
        if expected != found {
            let (reference, other) = (reference.name.into(), other.name.into());
            return Err(Error::Different { reference, other, what, expected, found });
        }
    }
    Ok(())
}

/// The errors of layers, by the name of their weights.
#[derive(Default)]
struct Errors(Mutex<BTreeMap<String, Arc<Mutex<[f64; 2]>>>>);

impl Errors {
    /// Returns the sums of squared outputs and of squared differences of a layer.
    fn sums(&self, weight: &str) -> Arc<Mutex<[f64; 2]>> {
        lock(&self.0).entry(weight.into()).or_default().clone()
    }
}

/// A layer of the reference that also runs the other models' layers.
struct ComparedLayer {
    reference: Layer,
    others: Vec<(Layer, Arc<Mutex<[f64; 2]>>)>,
}

impl Module for ComparedLayer {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = self.reference.forward(x)?;
        let squares = squares(&y)?;
        for (other, sums) in &self.others {
            let errors = self::squares(&(other.forward(x)? - &y)?)?;
            let mut sums = lock(sums);
            sums[0] += squares;
            sums[1] += errors;
        }
        Ok(y)
    }
}

/// Returns the sum of squares of rows in f64. A GPU sums each row in f32.
fn squares(x: &Tensor) -> candle_core::Result<f64> {
    let x = x.to_dtype(DType::F32)?;
    if !x.device().is_cpu() {
        let rows = x.sqr()?.sum(D::Minus1)?.to_vec1::<f32>()?;
        return Ok(rows.into_iter().map(f64::from).sum());
    }
    let rows = x.flatten_all()?.to_vec1::<f32>()?;
    // A fixed number of elements per task, so that the sum does not depend on the threads.
    let parts: Vec<f64> = rows
        .par_chunks(1 << 14)
        .map(|part| part.iter().map(|x| f64::from(*x) * f64::from(*x)).sum())
        .collect();
    Ok(parts.iter().sum())
}

/// Pairs the reference's layers with the other models' layers.
fn compare(
    name: &LayerName,
    layers: Vec<Layer>,
    others: &[Evaluated<'_>],
    errors: &[Errors],
) -> Result<Vec<Layer>> {
    let weight = name.weight();
    let mut all: Vec<_> =
        layers.into_iter().map(|reference| ComparedLayer { reference, others: Vec::new() }).collect();
    for (other, errors) in others.iter().zip(errors) {
        let sums = errors.sums(&weight);
        for (compared, layer) in all.iter_mut().zip(other.source.layers(name)?) {
            compared.others.push((layer, sums.clone()));
        }
    }
    Ok(all.into_iter().map(|layer| Box::new(layer) as Layer).collect())
}

/// Sums over a window's tokens.
#[derive(Clone, Default)]
struct WindowSums {
    tokens: usize,
    /// The loss, by model.
    losses: Vec<f64>,
    /// The divergence, by model except the reference.
    divergences: Vec<f64>,
    /// Tokens of agreement, by model except the reference.
    agreements: Vec<usize>,
}

impl WindowSums {
    fn of(models: usize, tokens: usize) -> Self {
        let others = models - 1;
        Self {
            tokens,
            losses: vec![0.0; models],
            divergences: vec![0.0; others],
            agreements: vec![0; others],
        }
    }

    fn add(&mut self, row: &Self) {
        let add = |sums: &mut [f64], row: &[f64]| sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        add(&mut self.losses, &row.losses);
        add(&mut self.divergences, &row.divergences);
        self.agreements.iter_mut().zip(&row.agreements).for_each(|(sum, x)| *sum += x);
    }
}

/// Computes logits and sums, some rows at a time.
fn window_sums(ends: &[Ends], passes: &[&Pass], windows: &[Window]) -> Result<Vec<WindowSums>> {
    let mut all = Vec::with_capacity(windows.len());
    let mut next = windows.iter();
    for batch in 0..passes[0].batches().len() {
        let mut start = 0;
        for &length in &passes[0].batches()[batch].lengths {
            let Some(window) = next.next() else { break };
            let mut sums = WindowSums::of(ends.len(), length);
            for row in (0..length).step_by(ROWS) {
                let count = ROWS.min(length - row);
                let logits = ends.iter().zip(passes).map(|(ends, pass)| {
                    let hidden = pass.batches()[batch].hidden.narrow(0, start + row, count)?;
                    ends.logits(&hidden)?.to_vec2::<f32>()
                });
                let logits = logits.collect::<candle_core::Result<Vec<_>>>()?;
                let targets = &window.targets[row..row + count];
                let rows: Vec<_> = (0..count)
                    .into_par_iter()
                    .map(|i| {
                        let rows: Vec<_> = logits.iter().map(|logits| &*logits[i]).collect();
                        row_sums(&rows, targets[i])
                    })
                    .collect();
                rows.iter().for_each(|row| sums.add(row));
            }
            start += length;
            all.push(sums);
        }
    }
    Ok(all)
}

/// Returns a token's loss, divergence and agreement, for each model's logits.
fn row_sums(logits: &[&[f32]], target: u32) -> WindowSums {
    let mut sums = WindowSums::of(logits.len(), 1);
    let normalizers: Vec<f64> = logits.iter().map(|logits| log_sum_exp(logits)).collect();
    let target = target as usize;
    for ((loss, logits), normalizer) in sums.losses.iter_mut().zip(logits).zip(&normalizers) {
        *loss = normalizer - logits.get(target).map_or(f64::NAN, |logit| f64::from(*logit));
    }
    let reference = logits[0];
    for (i, other) in logits[1..].iter().enumerate() {
        sums.divergences[i] = reference
            .iter()
            .zip(*other)
            .map(|(p, q)| {
                let (log_p, log_q) = (f64::from(*p) - normalizers[0], f64::from(*q) - normalizers[i + 1]);
                log_p.exp() * (log_p - log_q)
            })
            .sum();
        sums.agreements[i] = usize::from(largest(reference) == largest(other));
    }
    sums
}

/// Returns log Σ exp.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - f64::from(most)).exp()).sum();
    f64::from(most) + sum.ln()
}

/// Returns the index of the largest logit, the first of equal ones.
fn largest(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).reduce(|best, i| if logits[i] > logits[best] { i } else { best })
}

/// Turns sums over windows into means with intervals.
fn results(windows: &[WindowSums], errors: &[Errors]) -> Evaluation {
    let estimate = |of: &dyn Fn(&WindowSums) -> f64| {
        Estimate::of(&windows.iter().map(|window| (of(window), window.tokens)).collect::<Vec<_>>())
    };
    let perplexity = |loss: Estimate| loss.map(loss.mean.exp(), loss.mean.exp());
    let loss = estimate(&|window| window.losses[0]);
    let others = errors.iter().enumerate().map(|(i, errors)| {
        let loss = estimate(&|window| window.losses[i + 1]);
        let increase = estimate(&|window| window.losses[i + 1] - window.losses[0]);
        let mut layers: Vec<_> = lock(&errors.0)
            .iter()
            .map(|(weight, sums)| {
                let [squares, errors] = *lock(sums);
                LayerError { weight: weight.clone(), squares, errors }
            })
            .collect();
        // Layer 2 before layer 10.
        let parts = |name: &str| -> Vec<_> {
            name.split('.').map(|part| (part.parse::<u64>().ok(), part.to_string())).collect()
        };
        layers.sort_by_cached_key(|layer| parts(&layer.weight));
        Difference {
            loss,
            perplexity: perplexity(loss),
            increase: increase.map(increase.mean.exp_m1(), increase.mean.exp()),
            divergence: estimate(&|window| window.divergences[i]),
            agreement: estimate(&|window| window.agreements[i] as f64),
            layers,
        }
    });
    Evaluation {
        windows: windows.len(),
        tokens: windows.iter().map(|window| window.tokens).sum(),
        loss,
        perplexity: perplexity(loss),
        others: others.collect(),
    }
}
