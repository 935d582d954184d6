//! Choosing the configuration of a product: the one with the least estimated time, or nearly the
//! least for experts.

use microscale_formats::dot::CHUNK;
use microscale_formats::{Dtype, Format};
use microscale_kernels_abi::gemm::{COLUMN_LIMIT, TILE_COLUMNS};
use microscale_kernels_abi::{GemmConfig, Mainloop};

use crate::gpu::plan::estimate::Estimator;
use crate::gpu::plan::request::{GpuFacts, Request};
use crate::shape::QuantizedShape;

/// The largest number of tokens that never packs activations, and so never needs a workspace.
pub(in crate::gpu) const GEMV_TOKENS: usize = TILE_COLUMNS as usize;
/// The largest number of pairs that are multiplied one by one. Measured on an H200 for experts
/// of 2880 and 5760 rows: by the GEMV that copies ahead, and by the one that does not.
const EXPERT_PAIRS_OF_GEMV: [usize; 2] = [16, 4];
/// Of the experts' kernels that pack activations and whose estimates exceed the least one by at
/// most this share, the one with the smallest token tile is chosen: it does less work for tokens
/// that an expert does not have.
const EQUAL_TIMES: f64 = 0.03;

/// Returns whether all rows of 16-bit activations for some weights start on 16 bytes, if the first
/// one is `aligned` so or not.
pub(in crate::gpu) fn rows_are_aligned(weights: QuantizedShape, aligned: bool) -> bool {
    aligned && weights.cols.is_multiple_of(16 / size_of::<u16>())
}

/// Returns whether kernels of the GEMM take weights of a shape: they copy 16 bytes of codes, and
/// words of scales of whole rows.
pub(in crate::gpu) fn is_packable(weights: QuantizedShape) -> bool {
    let words = weights.format != Format::Nvfp4 || weights.blocks_per_row().is_multiple_of(4);
    words && weights.cols > 0 && (weights.cols as u64) < COLUMN_LIMIT
}

/// Returns whether a configuration multiplies weights of a shape by activations that start on 16
/// bytes or not.
pub(in crate::gpu) fn takes(config: GemmConfig, weights: QuantizedShape, aligned: bool) -> bool {
    let whole_chunks = aligned && weights.cols > 0 && weights.cols.is_multiple_of(CHUNK);
    match config.mainloop {
        mainloop if !mainloop.is_gemv() => {
            is_packable(weights) && (rows_are_aligned(weights, aligned) || !config.packs_activations())
        }
        Mainloop::Gemv => {
            // Scales are copied by words: the scales of a row or, for MXFP4 and one token, of all
            // rows.
            let rows = if config.tile_n == 1 && weights.format == Format::Mxfp4 { weights.rows } else { 1 };
            let words = (rows * weights.blocks_per_row()).is_multiple_of(4);
            whole_chunks && words && (weights.cols as u64) < COLUMN_LIMIT
        }
        Mainloop::GemvPlain => whole_chunks,
        _ => true,
    }
}

/// The configuration that should take the least time. Weights and activations that no measured
/// configuration takes get the GEMV that does not copy ahead, or the one for ragged rows.
pub(in crate::gpu) fn choose(times: &Estimator, gpu: GpuFacts, request: Request) -> GemmConfig {
    let Request { weights, activations, aligned, .. } = request;
    let fastest = fastest(times, gpu, request);
    let config = fastest.map_or_else(|| otherwise(weights, aligned), |(config, _)| config);
    GemmConfig { weights: weights.format, activations, ..config }
}

/// The configuration for activations of 16 bits that should take the least time, and this time in
/// microseconds; `None` if no measured configuration takes them.
pub(in crate::gpu) fn fastest(
    times: &Estimator,
    gpu: GpuFacts,
    request: Request,
) -> Option<(GemmConfig, f64)> {
    let Request { weights, tokens, aligned, gemv_only, .. } = request;
    let gemv_only = gemv_only || tokens <= GEMV_TOKENS;
    let usable = |config: &GemmConfig| {
        config.mainloop.traits().targets.contain(gpu.target)
            && (config.mainloop.is_gemv() || !gemv_only)
            && takes(*config, weights, aligned)
    };
    let estimated = times.estimates(gpu.multiprocessors(), request, false, usable);
    least(estimated)
}

/// [`fastest`] for FP8 activations, of configurations that `takes` allows.
pub(in crate::gpu) fn fastest_fp8(
    times: &Estimator,
    gpu: GpuFacts,
    request: Request,
    takes: impl Fn(&GemmConfig) -> bool,
) -> Option<(GemmConfig, f64)> {
    let usable = |config: &GemmConfig| config.mainloop.traits().targets.contain(gpu.target) && takes(config);
    let estimated = times.estimates(gpu.multiprocessors(), request, true, usable);
    least(estimated)
}

/// The configuration for FP8 activations that should take the least time, if `takes` allows it;
/// `None` if the GPU has none.
pub(in crate::gpu) fn choose_fp8(
    times: &Estimator,
    gpu: GpuFacts,
    request: Request,
    takes: impl Fn(&GemmConfig) -> bool,
) -> Option<GemmConfig> {
    let Request { weights, tokens, activations, .. } = request;
    let usable = |config: &GemmConfig| config.mainloop.traits().targets.contain(gpu.target) && takes(config);
    let fastest = fastest_fp8(times, gpu, request, usable);
    let with = |config: GemmConfig| GemmConfig { weights: weights.format, activations, ..config };
    let configs = GemmConfig::for_fp8(weights.format, activations).filter(usable);
    let by_tokens =
        configs.min_by_key(|config| (by_tile(config, tokens), !config.mainloop.accumulates_fast()));
    fastest.map(|(config, _)| with(config)).or(by_tokens)
}

/// The order of configurations without measured times: the smallest tile that has all tokens comes
/// first, or else the largest, in a cluster. With `tcgen05`, a cluster always comes before the same
/// token tile without one, as it copies half of the tokens to each shared memory.
fn by_tile(config: &GemmConfig, tokens: usize) -> (bool, u32, u32) {
    let GemmConfig { mainloop, tile_n, cluster, .. } = *config;
    match tile_n as usize >= tokens {
        true if mainloop == Mainloop::Tcgen05 => (false, tile_n, !cluster),
        true => (false, tile_n, cluster),
        false => (true, !tile_n, !cluster),
    }
}

/// The configuration among `configs`, of quantized activations, for `rows` tokens, or pairs of a
/// token and one of `experts` experts; `None` if the GPU has none. The first one [`by_tile`] for
/// the mean number of rows of an expert. No times were measured.
pub(in crate::gpu) fn choose_for_mean_rows(
    gpu: GpuFacts,
    configs: impl Iterator<Item = GemmConfig>,
    experts: Option<usize>,
    rows: usize,
) -> Option<GemmConfig> {
    let mean = rows.div_ceil(experts.unwrap_or(1).min(rows).max(1));
    let usable = |config: &GemmConfig| {
        let takes = experts.is_none() || config.takes_experts();
        config.mainloop.traits().targets.contain(gpu.target) && takes
    };
    configs.filter(usable).min_by_key(|config| by_tile(config, mean))
}

/// The configuration for weights and activations that the others do not take.
pub(in crate::gpu) fn otherwise(weights: QuantizedShape, aligned: bool) -> GemmConfig {
    let plain = GemmConfig {
        mainloop: Mainloop::GemvPlain,
        tile_m: 16,
        tile_n: 8,
        cluster: 1,
        slices: 8,
        weights: weights.format,
        activations: Dtype::Bf16,
    };
    if takes(plain, weights, aligned) {
        return plain;
    }
    GemmConfig { mainloop: Mainloop::GemvRagged, tile_m: 1, tile_n: 1, slices: 1, ..plain }
}

/// The configuration for experts' rows: `pairs` pairs of a token and one of `experts` experts,
/// `rows_per_pair` rows of activations each. Pairs are assumed to choose experts at random. Its
/// estimated time is the least, or nearly ([`EQUAL_TIMES`]).
pub(in crate::gpu) fn choose_for_experts(
    times: &Estimator,
    gpu: GpuFacts,
    request: Request,
    [experts, pairs, rows_per_pair]: [usize; 3],
    packable: bool,
) -> GemmConfig {
    let Request { weights, activations, aligned, .. } = request;
    let with = |config: GemmConfig| GemmConfig { weights: weights.format, activations, ..config };
    let most_active = experts.min(pairs).max(1);
    let per_expert = rows_per_pair * pairs.div_ceil(most_active);
    let gemv = GemmConfig {
        mainloop: Mainloop::Gemv,
        tile_m: 16,
        tile_n: if per_expert == 1 { 1 } else { 8 },
        cluster: 1,
        slices: 8,
        weights: weights.format,
        activations,
    };
    let one_token = GemmConfig { tile_n: 1, ..gemv };
    let copies_ahead = takes(one_token, weights, true);
    if !packable || pairs <= EXPERT_PAIRS_OF_GEMV[usize::from(!copies_ahead)] {
        return if takes(gemv, weights, true) { gemv } else { with(otherwise(weights, true)) };
    }
    let usable = |config: &GemmConfig| {
        let traits = config.mainloop.traits();
        let is_gemm = !config.mainloop.is_gemv() && config.mainloop.takes_16_bits();
        traits.targets.contain(gpu.target)
            && is_gemm
            && config.cluster == 1
            && takes(*config, weights, aligned)
    };
    let rows = rows_per_pair * pairs;
    let active = expected_active(experts, pairs);
    let mean = rows as f64 / active;
    let token_tiles = |tile_n: u32| (active * expected_tiles(mean, tile_n)).ceil() as usize;
    let estimated = times.estimates_for_experts(gpu.multiprocessors(), weights, rows, token_tiles, usable);
    let chosen = smallest_of_equal(&estimated).or_else(|| least(estimated));
    let first = || GemmConfig::for_operands(weights.format, activations).find(usable);
    with(chosen.map(|(config, _)| config).or_else(first).unwrap_or(gemv))
}

/// The configuration with the least estimated time.
fn least(estimated: impl IntoIterator<Item = (GemmConfig, f64)>) -> Option<(GemmConfig, f64)> {
    estimated.into_iter().min_by(|(_, a), (_, b)| a.total_cmp(b))
}

/// The configuration that [`EQUAL_TIMES`] chooses, if it chooses one.
fn smallest_of_equal(estimated: &[(GemmConfig, f64)]) -> Option<(GemmConfig, f64)> {
    let (_, shortest) = least(estimated.iter().copied())?;
    let equal = |(config, time): &&(GemmConfig, f64)| {
        config.packs_activations() && *time <= shortest * (1.0 + EQUAL_TIMES)
    };
    let smaller = |(a, time): &&(GemmConfig, f64), (b, other): &&(GemmConfig, f64)| {
        a.tile_n.cmp(&b.tile_n).then(time.total_cmp(other))
    };
    estimated.iter().filter(equal).min_by(smaller).copied()
}

/// The expected number of experts that `pairs` pairs choose at random.
fn expected_active(experts: usize, pairs: usize) -> f64 {
    let experts = experts.max(1) as f64;
    experts * (1.0 - (1.0 - 1.0 / experts).powf(pairs as f64))
}

/// The expected number of token tiles of an expert that has `mean` rows on average, and at least
/// one. The numbers of rows follow a Poisson distribution, approximated by a logistic one.
fn expected_tiles(mean: f64, tile_n: u32) -> f64 {
    /// The scale of a logistic distribution of the same variance: the square root of 3 over pi.
    const SCALE: f64 = 0.551_329;
    let deviation = SCALE * mean.max(1.0).sqrt();
    let more_than = |rows: f64| 1.0 / (1.0 + ((rows + 0.5 - mean) / deviation).exp());
    let last = (2.0 * mean / f64::from(tile_n)) as u32 + 1;
    (1..=last).map(|tiles| more_than(f64::from(tiles * tile_n))).sum::<f64>() + 1.0
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::gpu::plan::layers::{Layer, Layers};
    use crate::gpu::plan::times::{MeasuredProduct, Times};
    use microscale_formats::ScaleLayout;
    use microscale_kernels_abi::target_for;

    /// The GPUs with tables, and the compute capabilities whose kernels the tables have.
    const MEASURED: [(&str, &[(u32, u32)]); 2] =
        [("NVIDIA H100 80GB HBM3", &[(9, 0), (8, 0)]), ("NVIDIA H200", &[(9, 0)])];

    /// An H100 or H200, or a GPU of the same size without `wgmma`.
    fn gpu(compute_capability: (u32, u32)) -> GpuFacts {
        let target = target_for(compute_capability).unwrap();
        GpuFacts { target, sm_count: 132, most_shared: 227 << 10 }
    }

    fn request(weights: Format, rows: usize, cols: usize, tokens: usize) -> Request {
        let weights = QuantizedShape { format: weights, rows, cols, scale_layout: ScaleLayout::Linear };
        Request { weights, tokens, activations: Dtype::Bf16, aligned: true, gemv_only: false }
    }

    /// A measured product's shape, and the chosen configuration's time over the fastest, minus 1.
    struct Choice {
        shape: (usize, usize),
        excess: f64,
    }

    /// A choice for each of the `measured` products with 16-bit activations, or `fp8`, by the
    /// `known` times; with `others_only`, by times of other shapes only.
    fn choices(measured: &Times, known: &Times, gpu: GpuFacts, [others_only, fp8]: [bool; 2]) -> Vec<Choice> {
        let shapes: BTreeSet<_> = measured.products().iter().map(|of| (of.rows, of.cols)).collect();
        let all = Estimator::new(known);
        let of_shape = |shape: (usize, usize)| {
            let products = measured.products().iter().filter(move |of| (of.rows, of.cols) == shape);
            // Kernels that were not measured for the shape cannot be judged: multicast, for some.
            let is_multicast = |config: &GemmConfig| config.mainloop == Mainloop::Multicast;
            let judged = products.clone().any(|of| of.configs.iter().any(|(config, _)| is_multicast(config)));
            let others = others_only.then(|| {
                let mut others = Times::default();
                for of in known.products().iter().filter(|of| (of.rows, of.cols) != shape) {
                    let mut of = of.clone();
                    of.configs.retain(|(config, _)| judged || !is_multicast(config));
                    others.add(of);
                }
                Estimator::new(&others)
            });
            let choice = |product| choice(product, others.as_ref().unwrap_or(&all), gpu, fp8);
            products.filter_map(choice).collect::<Vec<_>>()
        };
        shapes.into_iter().flat_map(of_shape).collect()
    }

    /// The choice for a product, by an estimator; `None` if no kernel of the target was measured.
    fn choice(product: &MeasuredProduct, known: &Estimator, gpu: GpuFacts, fp8: bool) -> Option<Choice> {
        let MeasuredProduct { weights, rows, cols, tokens, .. } = *product;
        let request = request(weights, rows, cols, tokens);
        let takes =
            |config: &GemmConfig| config.mainloop.takes_fp8() == fp8 && !config.mainloop.accumulates_fast();
        let usable = |config: &GemmConfig| {
            let packs = fp8 || tokens > GEMV_TOKENS;
            let on_target = config.mainloop.traits().targets.contain(gpu.target);
            takes(config) && on_target && (config.mainloop.is_gemv() || packs)
        };
        let chosen = if fp8 { choose_fp8(known, gpu, request, takes)? } else { choose(known, gpu, request) };
        let there = || product.configs.iter().filter(|(config, _)| usable(config));
        let fastest = there().map(|(_, time)| f64::from(*time)).fold(f64::INFINITY, f64::min);
        let time = there().find(|(config, _)| *config == chosen).map(|(_, time)| f64::from(*time));
        let excess = time.unwrap_or(f64::from(Times::KEPT) * fastest) / fastest - 1.0;
        fastest.is_finite().then_some(Choice { shape: (rows, cols), excess })
    }

    /// The mean, the excess that nine of ten products do not exceed, and the largest.
    fn summary<'c>(choices: impl IntoIterator<Item = &'c Choice>) -> Option<[f64; 3]> {
        let mut excess: Vec<_> = choices.into_iter().map(|choice| choice.excess).collect();
        excess.sort_by(f64::total_cmp);
        let mean = excess.iter().sum::<f64>() / excess.len() as f64;
        Some([mean, *excess.get(excess.len() * 9 / 10)?, *excess.last()?])
    }

    #[test]
    fn measured_products_get_their_fastest_configuration() {
        for (name, capabilities) in MEASURED {
            for compute_capability in capabilities {
                let times = Times::of_gpu(name);
                for fp8 in [false, true] {
                    let choices = choices(times, times, gpu(*compute_capability), [false, fp8]);
                    let most = summary(&choices).map(|[_, _, most]| most);
                    // Not every table has times with FP8 activations.
                    let right = most.map_or(fp8, |most| most < 1e-6);
                    assert!(right, "{name}, {compute_capability:?}, FP8: {fp8}: {most:?}");
                }
            }
        }
    }

    /// Without times of its shape, the choice takes at most 4 % longer than the fastest on average,
    /// and at most 12 % longer for nine of ten products. Prints the halves of the layers
    /// separately: choices for held-out layers know the times of all shapes but these, other
    /// choices the times of the other shapes.
    #[test]
    fn products_of_unmeasured_shapes_get_nearly_the_fastest_configuration() {
        let layers = Layers::built_in();
        for (name, capabilities) in MEASURED {
            let measured = Times::with_held_out(name);
            let is_measured = |layer: &&Layer<'_>| {
                measured.products().iter().any(|of| (of.rows, of.cols) == (layer.rows, layer.cols))
            };
            for (compute_capability, fp8) in capabilities.iter().flat_map(|of| [(of, false), (of, true)]) {
                let what = format!("{name}, {compute_capability:?}, FP8: {fp8}");
                let choices = choices(&measured, Times::of_gpu(name), gpu(*compute_capability), [true, fp8]);
                if fp8 && choices.is_empty() {
                    continue;
                }
                let half_of = |choice: &Choice| {
                    let of = layers.dense().find(|layer| (layer.rows, layer.cols) == choice.shape);
                    of.map(|layer| layer.tuned)
                };
                for (half, part) in
                    [("tuned layers", Some(true)), ("held-out layers", Some(false)), ("other shapes", None)]
                {
                    let of_half = layers.dense().filter(|layer| Some(layer.tuned) == part);
                    let missing = of_half.filter(|layer| !is_measured(layer)).count();
                    let figures = summary(choices.iter().filter(|choice| half_of(choice) == part));
                    let figures = figures.map_or("no times".into(), |[mean, tenth, most]| {
                        format!("mean {mean:.3}, nine of ten {tenth:.3}, most {most:.3}")
                    });
                    println!("{what}, {half}: {figures}; {missing} layers without times");
                }
                let [mean, tenth, _] = summary(&choices).unwrap();
                assert!(mean <= 0.04 && tenth <= 0.12, "{what}: {mean}, {tenth}");
            }
        }
    }

    #[test]
    fn configurations_are_of_the_target_and_take_the_operands() {
        let times = Estimator::of_gpu("NVIDIA H100");
        let chosen = |capability, rows, cols, tokens| {
            choose(times, gpu(capability), request(Format::Nvfp4, rows, cols, tokens))
        };
        assert_eq!(chosen((9, 0), 8192, 28672, 64).mainloop, Mainloop::Wgmma);
        assert_eq!(chosen((8, 0), 8192, 28672, 64).mainloop, Mainloop::Mma);
        // Up to eight tokens need no workspace.
        assert!((1..=8).all(|tokens| chosen((9, 0), 8192, 28672, tokens).mainloop.is_gemv()));
        // Scales of a row that are no whole words, and rows that are no whole chunks.
        assert_eq!(chosen((9, 0), 512, 4096 + 32, 64).mainloop, Mainloop::GemvPlain);
        assert_eq!(chosen((9, 0), 512, 4096 + 16, 1).mainloop, Mainloop::GemvRagged);
        let of = request(Format::Mxfp4, 512, 4096, 1);
        let unaligned = choose(times, gpu((9, 0)), Request { aligned: false, ..of });
        assert_eq!((unaligned.mainloop, unaligned.weights), (Mainloop::GemvRagged, Format::Mxfp4));
        // Kernels that pack activations need rows that start on 16 bytes.
        let few = request(Format::Nvfp4, 8192, 8192, 24);
        let packs = |request| choose(times, gpu((9, 0)), request).packs_activations();
        assert!(packs(few) && !packs(Request { aligned: false, ..few }));
        assert!(!packs(request(Format::Nvfp4, 8192, 8192 - 4, 24)));
        let f16 = choose(times, gpu((9, 0)), Request { activations: Dtype::F16, ..of });
        assert_eq!((f16.activations, f16.id().is_some()), (Dtype::F16, true));
    }

    #[test]
    fn experts_with_few_pairs_get_the_gemv() {
        let times = Estimator::of_gpu("NVIDIA H100");
        let of = request(Format::Nvfp4, 2880, 2880, 0);
        let chosen = |experts, pairs, packable| {
            choose_for_experts(times, gpu((9, 0)), of, [experts, pairs, 1], packable)
        };
        assert_eq!(chosen(32, 4, true).mainloop, Mainloop::Gemv);
        assert_eq!(chosen(32, 64, true).mainloop, Mainloop::Wgmma);
        assert!(chosen(32, 64, false).mainloop.is_gemv());
        assert!(chosen(32, 4096, true).tile_n >= chosen(32, 64, true).tile_n);
        let unaligned = Request { aligned: false, ..of };
        let unaligned = choose_for_experts(times, gpu((9, 0)), unaligned, [32, 64, 1], true);
        assert!(chosen(32, 64, true).packs_activations() && !unaligned.packs_activations());
    }

    #[test]
    fn experts_with_fp8_activations_get_a_tile_for_their_rows_without_a_cluster() {
        let chosen = |capability, experts, pairs| {
            let configs = GemmConfig::for_fp8(Format::Mxfp4, Dtype::Bf16);
            choose_for_mean_rows(gpu(capability), configs, Some(experts), pairs)
        };
        for (pairs, tile_n) in [(1, 16), (32 * 17, 32), (32 * 64, 64), (32 * 65, 128), (1 << 20, 256)] {
            let chosen = chosen((9, 0), 32, pairs).unwrap();
            assert_eq!((chosen.tile_n, chosen.cluster), (tile_n, 1), "{pairs} pairs: {chosen}");
            assert!(chosen.mainloop.takes_fp8() && chosen.id().is_some(), "{chosen}");
        }
        assert!(chosen((8, 0), 32, 64).is_none());
    }

    #[test]
    fn experts_with_fp4_activations_get_a_tile_for_their_rows_on_rtx_blackwell() {
        let chosen = |capability, pairs| {
            let configs = GemmConfig::for_fp4(Format::Nvfp4, Dtype::Bf16);
            let configs = configs.filter(|config| config.mainloop == Mainloop::BlockScale);
            choose_for_mean_rows(gpu(capability), configs, Some(32), pairs).map(|config| config.tile_n)
        };
        for (pairs, tile_n) in [(1, 8), (32 * 9, 32), (32 * 64, 64), (32 * 65, 128), (1 << 20, 128)] {
            assert_eq!(chosen((12, 0), pairs), Some(tile_n), "{pairs} pairs");
        }
        assert_eq!(chosen((9, 0), 64), None);
    }

    #[test]
    fn more_than_64_tokens_get_pairs_of_thread_blocks_on_a_b200() {
        let chosen = |experts: Option<usize>, rows: usize| {
            let configs = GemmConfig::for_fp4(Format::Nvfp4, Dtype::Bf16);
            let config = choose_for_mean_rows(gpu((10, 0)), configs, experts, rows);
            config.map(|config| config.to_string())
        };
        for (tokens, word) in
            [(1, "128x64"), (64, "128x64"), (65, "256x128-c2"), (129, "256x256-c2"), (8192, "256x256-c2")]
        {
            assert_eq!(chosen(None, tokens), Some(format!("tcgen05-{word}")), "{tokens} tokens");
        }
        assert_eq!(chosen(Some(8), 8 * 64).as_deref(), Some("tcgen05-128x64"));
        assert_eq!(chosen(Some(8), 8 * 8192).as_deref(), Some("tcgen05-256x256-c2"));
    }

    /// Measured on an H100 for 128 experts of 1536×2048, 8 of them per token: with 24 tokens, tiles
    /// of 8 take 84 µs and tiles of 64 140; with 200, tiles of 16 take 110 and tiles of 8 160; with
    /// 2000, tiles of 144 take 249 and tiles of 96 345.
    #[test]
    fn token_tiles_of_experts_have_about_their_rows() {
        let times = Estimator::of_gpu("NVIDIA H100");
        let of = request(Format::Nvfp4, 1536, 2048, 0);
        for (tokens, tiles) in [(24, 8..=16), (200, 16..=24), (2000, 128..=192)] {
            let chosen = choose_for_experts(times, gpu((9, 0)), of, [128, 8 * tokens, 1], true);
            assert!(tiles.contains(&chosen.tile_n), "{tokens} tokens: {chosen}");
        }
        // Two pairs choose the same of 128 experts with probability 1/128.
        assert!((expected_active(128, 2) - (2.0 - 1.0 / 128.0)).abs() < 1e-9);
        let is_one = |(experts, pairs)| (expected_active(experts, pairs) - 1.0).abs() < 1e-9;
        assert!([(1, 1), (1, 100), (7, 1)].into_iter().all(is_one));
        assert!((99.0..100.0).contains(&expected_active(128, 192)));
        // Nearly all experts of 96 rows on average have more than 64 rows and at most 128.
        assert!((1.99..2.01).contains(&expected_tiles(96.0, 64)));
        assert!((1.0..1.01).contains(&expected_tiles(96.0, 192)));
        assert!((1.4..1.6).contains(&expected_tiles(96.5, 96)));
    }

    /// For experts of measured layers, the choice takes at most 1 % longer than the fastest
    /// measured tile on average, and 6 % longer for each.
    #[test]
    fn experts_get_nearly_the_fastest_tile() {
        let times = Estimator::of_gpu("NVIDIA H200");
        let lines = include_str!("times/h200-experts.txt").lines().filter(|line| !line.starts_with('#'));
        let choice = |line: &str| {
            let words: Vec<_> = line.split(' ').collect();
            let [rows, cols, experts, top_k, tokens] = [0, 1, 2, 3, 4].map(|i| words[i].parse().unwrap());
            let measured = words[5..].chunks(2).map(|of| (of[0], of[1].parse::<f64>().unwrap()));
            let fastest = measured.clone().map(|(_, time)| time).fold(f64::INFINITY, f64::min);
            let of = request(Format::Nvfp4, rows, cols, 0);
            let sizes = [experts, top_k * tokens, 1];
            let chosen = choose_for_experts(times, gpu((9, 0)), of, sizes, true).to_string();
            let time = measured.clone().find(|(tile, _)| *tile == chosen).map(|(_, time)| time);
            let excess = time.unwrap_or_else(|| panic!("{chosen} was not measured: {line}")) / fastest - 1.0;
            assert!(excess <= 0.06, "{chosen} takes {excess:.3} longer than the fastest: {line}");
            excess
        };
        let excesses: Vec<f64> = lines.map(choice).collect();
        let mean = excesses.iter().sum::<f64>() / excesses.len() as f64;
        println!("mean of {} products: {mean:.4}", excesses.len());
        assert!(excesses.len() > 20 && mean <= 0.01, "{mean}");
    }
}
