//! Estimates of the time of a configuration for a product: a model that is fitted to the measured
//! times, corrected by the errors of the model for the nearest measured products.

use std::sync::OnceLock;

use microscale_formats::{Format, ScaleLayout};
use microscale_kernels_abi::GemmConfig;

use crate::gpu::plan::cost::{Costs, Counts, counts};
use crate::gpu::plan::request::{Multiprocessors, Request};
use crate::gpu::plan::times::{MeasuredProduct, TABLES, Times, table};
use crate::shape::QuantizedShape;

/// Measured products that correct an estimate.
const NEAREST: usize = 3;
/// The weight of the model without a correction. A measured product at distance 1, such as e times
/// the rows, has the same weight.
const MODEL_WEIGHT: f64 = 1.0;
/// Added to distances, so that a measured product has its own time.
const NO_DISTANCE: f64 = 1e-9;
/// The GPUs that the tables were measured on, H100 and H200, have the same multiprocessors.
const MEASURED_ON: Multiprocessors = Multiprocessors { count: 132, most_shared: 227 << 10 };

/// Estimates times from a table.
#[derive(Debug)]
pub(in crate::gpu) struct Estimator {
    measured: Vec<Measured>,
    /// The costs of each configuration in the table, in the table's formats.
    costs: Vec<(GemmConfig, Costs)>,
}

/// A measured time of a configuration.
#[derive(Clone, Copy, Debug)]
struct Measured {
    config: GemmConfig,
    rows: usize,
    cols: usize,
    tokens: usize,
    time: f64,
    counts: Counts,
}

impl Measured {
    /// The measured times of a product that configurations can be launched for.
    fn of_product(product: &MeasuredProduct) -> impl Iterator<Item = Self> {
        let MeasuredProduct { weights: format, rows, cols, tokens, ref configs } = *product;
        let shape = QuantizedShape { format, rows, cols, scale_layout: ScaleLayout::Linear };
        configs.iter().filter_map(move |&(config, time)| {
            let counts = counts(config, MEASURED_ON, shape, tokens)?;
            Some(Self { config, rows, cols, tokens, time: f64::from(time), counts })
        })
    }

    /// The squared distance to a product, by the logarithms of rows, columns and tokens.
    fn distance(&self, request: &Request) -> f64 {
        let Request { weights: QuantizedShape { rows, cols, .. }, tokens, .. } = *request;
        let ratios = [(self.rows, rows), (self.cols, cols), (self.tokens, tokens)];
        ratios.map(|(a, b)| (a as f64 / b.max(1) as f64).ln().powi(2)).iter().sum()
    }
}

impl Estimator {
    /// The estimator of a GPU, by its name ([`Times::of_gpu`]). Fits the model on first use.
    pub(in crate::gpu) fn of_gpu(name: &str) -> &'static Self {
        static FITTED: [OnceLock<Estimator>; TABLES.len()] = [const { OnceLock::new() }; TABLES.len()];
        FITTED[table(name)].get_or_init(|| Self::new(Times::of_gpu(name)))
    }

    /// The estimator of a table.
    pub(in crate::gpu) fn new(times: &Times) -> Self {
        let measured: Vec<_> = times.products().iter().flat_map(Measured::of_product).collect();
        let mut configs: Vec<GemmConfig> = Vec::new();
        for Measured { config, .. } in &measured {
            if !configs.contains(config) {
                configs.push(*config);
            }
        }
        let costs = |config: GemmConfig| {
            let of_config = measured.iter().filter(|of| of.config == config);
            let samples: Vec<_> = of_config.map(|of| (of.counts, of.time)).collect();
            (config, Costs::fit(&samples))
        };
        let costs = configs.into_iter().map(costs).collect();
        Self { measured, costs }
    }

    /// The usable configurations with their estimated times in microseconds, of those for FP8
    /// activations or of the others. Only configurations that were measured with the next larger
    /// measured number of tokens are estimated.
    pub(in crate::gpu) fn estimates(
        &self,
        gpu: Multiprocessors,
        request: Request,
        fp8: bool,
        usable: impl Fn(&GemmConfig) -> bool,
    ) -> Vec<(GemmConfig, f64)> {
        let of_format = |format: Format| {
            let same =
                move |of: &&Measured| of.config.weights == format && of.config.mainloop.takes_fp8() == fp8;
            self.measured.iter().filter(same)
        };
        let next = |format: Format| {
            of_format(format).map(|of| of.tokens).filter(|tokens| *tokens >= request.tokens).min()
        };
        // NVFP4's times stand in for MXFP4's where only NVFP4 was measured, and with FP8 the other
        // way around.
        let formats = [request.weights.format, if fp8 { Format::Mxfp4 } else { Format::Nvfp4 }];
        let format = formats.into_iter().find(|format| next(*format).is_some()).unwrap_or(formats[1]);
        let most = || of_format(format).map(|of| of.tokens).max();
        let Some(tokens) = next(format).or_else(most) else { return Vec::new() };
        let is_candidate = |config: &GemmConfig| {
            usable(config) && of_format(format).any(|of| of.tokens == tokens && of.config == *config)
        };
        let candidates = self.costs.iter().filter(|(config, _)| is_candidate(config));
        let estimate = |&(config, costs): &(GemmConfig, Costs)| {
            let model = costs.time(&counts(config, gpu, request.weights, request.tokens)?);
            let mut nearest: Vec<_> = of_format(format)
                .filter(|of| of.config == config)
                .map(|of| (of.distance(&request), of.time / costs.time(&of.counts)))
                .collect();
            nearest.sort_by(|(a, _), (b, _)| a.total_cmp(b));
            let (mut sum, mut weights) = (0.0, MODEL_WEIGHT);
            for (distance, ratio) in nearest.into_iter().take(NEAREST) {
                let weight = 1.0 / (distance + NO_DISTANCE);
                sum += weight * ratio.ln();
                weights += weight;
            }
            Some((config, model * (sum / weights).exp()))
        };
        candidates.filter_map(estimate).collect()
    }

    /// The usable configurations with their estimated times in microseconds for experts' rows.
    /// `token_tiles` gives the number of token tiles for a number of tokens per tile. Each token
    /// tile reads the weights of an expert. Kernels that pack activations read only the `rows` that
    /// there are.
    pub(in crate::gpu) fn estimates_for_experts(
        &self,
        gpu: Multiprocessors,
        weights: QuantizedShape,
        rows: usize,
        token_tiles: impl Fn(u32) -> usize,
        usable: impl Fn(&GemmConfig) -> bool,
    ) -> Vec<(GemmConfig, f64)> {
        // Only NVFP4 was measured with many tokens.
        let costs = self.costs.iter().filter(|(config, _)| config.weights == Format::Nvfp4 && usable(config));
        let estimate = |&(config, costs): &(GemmConfig, Costs)| {
            let tiles = token_tiles(config.tile_n);
            let tokens = tiles.saturating_mul(config.tile_n as usize);
            let counts = counts(config, gpu, weights, tokens)?.with_weights_read(tiles);
            let read = if config.packs_activations() { rows } else { tokens };
            Some((config, costs.time(&counts.with_activations(read, weights.cols))))
        };
        costs.filter_map(estimate).collect()
    }
}
