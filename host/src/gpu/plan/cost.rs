//! A model of a configuration's time: counts of a product, each with a cost that is fitted to
//! measured times.
//!
//! Some counts grow with the product (K-iterations of a thread block, bytes), others with the way
//! it is split (work tiles, thread blocks that share one). A configuration's costs are not negative
//! and minimize the relative errors of its measured times. So a table of a few shapes says what
//! other shapes take: with half of the layers of `layers.txt` in the tables, the configurations
//! chosen for the other half take 1 % longer than the fastest ones on average.

use microscale_kernels_abi::gemm::PACK_COLUMNS;
use microscale_kernels_abi::gemm::gemv::{GemvParams, PlainParams, TokenTiles};
use microscale_kernels_abi::gemm::params::GemmParams;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::{GemmConfig, Mainloop};

use crate::gpu::plan::request::{Multiprocessors, weights_shape};
use crate::shape::QuantizedShape;

/// The number of counts.
const COUNTS: usize = 7;
/// Relative errors below this one weigh the same in a fit. Larger ones weigh less, as outliers.
const SMALL_ERROR: f64 = 0.03;
/// Rounds of a fit, each with the weights of the errors before.
const ROUNDS: usize = 6;
/// Passes over the costs in a round, at most.
const MOST_PASSES: usize = 2000;

/// Counts of a product, in this order: launches; columns, in units of a pack, that the thread block
/// with the most multiplies; its work tiles; other thread blocks that share a work tile; 1 if work
/// tiles are split unevenly (stream-K); megabytes of weights; megabytes of activations.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct Counts([f64; COUNTS]);

impl Counts {
    /// The place of the megabytes of weights.
    const WEIGHTS: usize = 5;
    /// The place of the megabytes of activations.
    const ACTIVATIONS: usize = 6;

    /// The counts with the weights read `times` times: by each token tile, which has an expert's.
    pub(in crate::gpu) fn with_weights_read(mut self, times: usize) -> Self {
        self.0[Self::WEIGHTS] *= times as f64;
        self
    }

    /// The counts with `rows` rows of activations of `cols` columns.
    pub(in crate::gpu) fn with_activations(mut self, rows: usize, cols: usize) -> Self {
        self.0[Self::ACTIVATIONS] = megabytes_of_activations(rows, cols);
        self
    }
}

/// The counts of a product by a configuration; `None` if it cannot be launched.
pub(in crate::gpu) fn counts(
    config: GemmConfig,
    gpu: Multiprocessors,
    weights: QuantizedShape,
    tokens: usize,
) -> Option<Counts> {
    let shape = weights_shape(weights);
    let sm_count = u64::from(gpu.count);
    let [path, work_tiles, others, uneven] = match config.mainloop {
        mainloop if !mainloop.is_gemv() => {
            let shared = config.shared_bytes(gpu.most_shared);
            let params = GemmParams::new(config, shape, tokens as u64, gpu.count, shared)?;
            let path = params.most_k_iterations() * u64::from(config.packs());
            let schedule = params.schedule;
            let uneven =
                schedule.shared > 0 && u64::from(schedule.group.divisor) != params.k_iterations.divisor;
            [path, params.most_work_tiles(), params.most_sharers() - 1, u64::from(uneven)]
        }
        Mainloop::Gemv => {
            let warps = config.id()?.kernel().within(gpu.most_shared).threads / WARP;
            let token_tiles = TokenTiles::of(tokens as u64, config.tile_n);
            let config = config.with_slices(config.slices.min(warps));
            let params = GemvParams::new(config, shape, tokens as u64, token_tiles, warps, gpu.count)?;
            let waves = params.thread_blocks().div_ceil(sm_count);
            let work_tiles = waves * u64::from(params.work_tiles[0] + u32::from(params.work_tiles[1] > 0));
            [work_tiles * u64::from(params.k_iterations.div_ceil(config.slices)), work_tiles, 0, 0]
        }
        Mainloop::GemvPlain => {
            let token_tiles = TokenTiles::of(tokens as u64, config.tile_n);
            let params = PlainParams::new(config, shape, tokens as u64, token_tiles)?;
            // A multiprocessor has registers for two thread blocks.
            let waves = params.thread_blocks().div_ceil(2 * sm_count);
            let columns = u64::from(PACK_COLUMNS << params.segment_bits) * u64::from(config.slices);
            [waves * shape.cols.div_ceil(columns), waves, 0, 0]
        }
        _ => return None,
    };
    let [path, work_tiles, others, uneven] = [path, work_tiles, others, uneven].map(|count| count as f64);
    let block_bytes = weights.format.block_bytes() as f64 + 1.0;
    let activations = megabytes_of_activations(tokens, weights.cols);
    let weights = (shape.rows * shape.blocks) as f64 * block_bytes * 1e-6;
    Some(Counts([1.0, path, work_tiles, others, uneven, weights, activations]))
}

/// Megabytes of 16-bit activations.
fn megabytes_of_activations(rows: usize, cols: usize) -> f64 {
    rows as f64 * cols as f64 * 2e-6
}

/// The costs of a configuration: microseconds per count, none negative.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::gpu) struct Costs([f64; COUNTS]);

impl Costs {
    /// Fits costs to measured microseconds by weighted least squares of relative errors.
    pub(in crate::gpu) fn fit(measured: &[(Counts, f64)]) -> Self {
        let mut costs = Self([0.0; COUNTS]);
        for round in 0..ROUNDS {
            // The normal equations.
            let (mut products, mut targets) = ([[0.0; COUNTS]; COUNTS], [0.0; COUNTS]);
            for (counts, time) in measured {
                let error = (costs.time(counts) / time - 1.0).abs();
                let Counts(counts) = counts;
                let weight = if round == 0 { 1.0 } else { error.max(SMALL_ERROR).powi(-2) };
                for i in 0..COUNTS {
                    let scaled = weight * counts[i] / time;
                    targets[i] += scaled;
                    for j in 0..COUNTS {
                        products[i][j] += scaled * counts[j] / time;
                    }
                }
            }
            costs.descend(&products, &targets);
        }
        costs
    }

    /// Minimizes a quadratic form by one cost after the other (coordinate descent).
    fn descend(&mut self, products: &[[f64; COUNTS]; COUNTS], targets: &[f64; COUNTS]) {
        for _ in 0..MOST_PASSES {
            let mut moved = 0.0f64;
            for i in 0..COUNTS {
                if products[i][i] == 0.0 {
                    continue;
                }
                let gradient: f64 = (0..COUNTS).map(|j| products[i][j] * self.0[j]).sum::<f64>() - targets[i];
                let cost = (self.0[i] - gradient / products[i][i]).max(0.0);
                moved = moved.max((cost - self.0[i]).abs() * products[i][i].sqrt());
                self.0[i] = cost;
            }
            if moved < 1e-9 * targets[0].max(1.0).sqrt() {
                break;
            }
        }
    }

    /// The microseconds of a product.
    pub(in crate::gpu) fn time(&self, counts: &Counts) -> f64 {
        counts.0.iter().zip(self.0).map(|(count, cost)| count * cost).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_found_again() {
        let costs = Costs([2.0, 0.25, 1.5, 0.0, 3.0, 0.3, 0.0]);
        let mut random = fastrand::Rng::with_seed(1);
        let mut measured: Vec<(Counts, f64)> = (0..60)
            .map(|_| {
                let mut counts = Counts(std::array::from_fn(|_| f64::from(random.u32(0..50))));
                counts.0[0] = 1.0;
                (counts, costs.time(&counts))
            })
            .collect();
        let near = |found: Costs| found.0.iter().zip(costs.0).all(|(a, b)| (a - b).abs() < 1e-3 * (1.0 + b));
        assert!(near(Costs::fit(&measured)), "{:?}", Costs::fit(&measured));
        // A few outliers change little.
        measured.iter_mut().step_by(20).for_each(|(_, time)| *time *= 3.0);
        let found = Costs::fit(&measured);
        assert!(
            measured
                .iter()
                .skip(1)
                .take(18)
                .all(|(counts, time)| (found.time(counts) / time - 1.0).abs() < 0.02)
        );
    }

    #[test]
    fn costs_without_measured_times_are_zeros() {
        assert_eq!(Costs::fit(&[]), Costs([0.0; COUNTS]));
    }
}
