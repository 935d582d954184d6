//! Tests products of experts' weights.
//!
//! Results must be within the error bound, or equal the CPU's bits where no tensor core is used.

use half::{bf16, f16};
use microscale::gpu::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use microscale::gpu::{
    DeviceEpilogue, DeviceExperts, DeviceRouting, ExpertRows, ExpertsPlan, GemmConfig, GemmWorkspace, Gpu,
    ProductOf,
};
use microscale::{Activation, Dtype, Error, Format, Gate, OperandFault, QuantizedTensor};
use microscale_kernels_abi::Mainloop;
use microscale_test_support::arithmetic::Scalars;
use microscale_test_support::operands::{Scales, tensor};
use microscale_test_support::oracle::Exact;
use microscale_test_support::weights::{Activations, Bound, ExactProducts, is_unusual, segments};

use super::gemv_weights::{Product, adds_one_token, assert_same};
use super::support::with_mma;

/// Maximum loss of a product in tensor cores, which may flush subnormal numbers.
const LEAST: f64 = f64::from_bits((1023 - 126) << 52);

/// Experts with their activations, and the expert of each pair (an index past the last one for
/// none).
struct Mixture<T> {
    experts: Vec<(Product<T>, ExactProducts)>,
    counts: Vec<usize>,
    chosen: Vec<u32>,
    /// Pairs by expert.
    sorted: Vec<usize>,
}

/// Returns the bound for f32 activations: each of three bf16 parts has an error of its own.
///
/// Each part is smaller than the one before.
fn bound_of_parts(weights: &QuantizedTensor) -> Bound {
    let cols = weights.cols();
    let bound = Bound::of_gemm::<bf16>(cols, LEAST).or(Bound::of_tensor_cores::<bf16>(cols, [8, 16], LEAST));
    bound.or(Bound::of_one_token::<bf16>(weights, 1, LEAST))
}

/// The configurations for experts' weights: without clusters, which the experts' schedule does not have, and with
/// eight slices of K, as they are chosen.
fn configs(gpu: &Gpu, experts: &DeviceExperts) -> Vec<GemmConfig> {
    let mut configs = gpu.gemm_configs(experts.shape());
    configs.retain(|config| config.cluster == 1 && (config.slices == 8 || config.slicings().count() == 1));
    configs
}

/// The product of experts' weights by a configuration.
fn plan<'a, T: Activation, O: ProductOf<T>>(
    gpu: &'a Gpu,
    config: GemmConfig,
    experts: &'a DeviceExperts,
    epilogue: DeviceEpilogue<'a, T, O>,
    pairs: usize,
) -> ExpertsPlan<'a, T, O> {
    let linear = gpu.linear_experts(experts).epilogue(epilogue).by(config);
    linear.plan(pairs).unwrap_or_else(|error| panic!("{config}, {pairs} pairs: {error}"))
}

impl<T: Exact + Activation> Mixture<T> {
    /// Draws a mixture. `counts` are the pairs of each expert, followed by the pairs without one.
    fn new(format: Format, [rows, cols]: [usize; 2], counts: &[usize], scales: Scales, seed: u64) -> Self {
        let mut chosen: Vec<_> =
            (0..).zip(counts).flat_map(|(expert, count)| std::iter::repeat_n(expert, *count)).collect();
        fastrand::Rng::with_seed(seed).shuffle(&mut chosen);
        let counts = &counts[..counts.len() - 1];
        let of = |(expert, count): (u64, &usize)| {
            // All global scales have the same kind.
            let weights = tensor(format, rows, cols, scales, seed + 3 * expert);
            let product = Product::new(weights, (*count).max(1), Activations::Common);
            let exact = ExactProducts::of(&product.weights, &product.x, product.tokens);
            (product, exact)
        };
        let experts = (0..).zip(counts).map(of).collect();
        let of_expert = |expert| (0..chosen.len()).filter(|pair| chosen[*pair] == expert).collect::<Vec<_>>();
        let sorted = (0..counts.len() as u32).flat_map(of_expert).collect();
        Self { experts, counts: counts.to_vec(), chosen, sorted }
    }

    /// Returns activation rows, by pair or sorted.
    fn activations(&self, rows: ExpertRows) -> Vec<T> {
        let cols = self.experts[0].0.weights.cols();
        let mut x = vec![T::default(); self.chosen.len() * cols];
        let of_experts = self.experts.iter().zip(&self.counts);
        let of_sorted = of_experts.flat_map(|((expert, _), count)| expert.x.chunks(cols).take(*count));
        for (sorted, row) in of_sorted.enumerate() {
            let place = if rows == ExpertRows::Gathered { self.sorted[sorted] } else { sorted };
            x[place * cols..][..cols].copy_from_slice(row);
        }
        x
    }

    fn on_device(&self, gpu: &Gpu) -> (DeviceExperts, DeviceRouting) {
        let stream = gpu.stream();
        let experts =
            DeviceExperts::from_host(stream, self.experts.iter().map(|(expert, _)| &expert.weights));
        let chosen = stream.clone_htod(&self.chosen).unwrap();
        let mut routing = DeviceRouting::zeros(stream, self.experts.len(), self.chosen.len() + 5).unwrap();
        gpu.route_on(stream, &chosen, 1, &mut routing).unwrap();
        (experts.unwrap(), routing)
    }

    /// Checks results of a configuration, with activations that start `skipped` elements after 256 bytes.
    fn check(&self, gpu: &Gpu, config: GemmConfig, rows: ExpertRows, skipped: usize) {
        let (stream, first) = (gpu.stream(), &self.experts[0].0.weights);
        let what = format!("{config}, {rows:?}, {:?}, {:?}", first.shape(), self.counts);
        let (experts, routing) = self.on_device(gpu);
        let x = [vec![T::default(); skipped], self.activations(rows)].concat();
        let x = stream.clone_htod(&x).unwrap();
        let x = x.slice(skipped..);
        let plan = plan::<T, T>(gpu, config, &experts, DeviceEpilogue::default(), self.chosen.len());
        let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
        let untouched = T::from_f32(7.0);
        let results = self.chosen.len() * first.rows();
        let mut multiplied = || {
            let mut out = stream.clone_htod(&vec![untouched; results + 1]).unwrap();
            let done = plan.run(stream, &x, &routing, rows, &mut workspace, &mut out);
            done.unwrap_or_else(|error| panic!("{what}: {error}"));
            stream.clone_dtoh(&out).unwrap()
        };
        let found = multiplied();
        assert_same(&multiplied(), &found, &format!("{what}, a second time"));
        let mut left: Vec<_> = (0..=self.chosen.len()).collect();
        let mut sorted = 0;
        for (expert, count) in self.experts.iter().zip(&self.counts).filter(|(_, count)| **count > 0) {
            let places = (sorted..sorted + count)
                .map(|sorted| if rows == ExpertRows::Scattered { self.sorted[sorted] } else { sorted });
            sorted += count;
            left.retain(|place| !places.clone().any(|other| other == *place));
            let of_expert: Vec<T> =
                places.flat_map(|place| &found[place * first.rows()..][..first.rows()]).copied().collect();
            self.check_expert(expert, &of_expert, config, skipped, &what);
        }
        for place in left {
            let row = found[place * first.rows()..].iter().take(first.rows());
            assert!(row.clone().all(|x| x.bits() == untouched.bits()), "{what}: wrote a row of nobody");
        }
    }

    fn check_expert(
        &self,
        (expert, exact): &(Product<T>, ExactProducts),
        found: &[T],
        config: GemmConfig,
        skipped: usize,
        what: &str,
    ) {
        let Product { weights, results, .. } = expert;
        if T::DTYPE == Dtype::F32 {
            let near = exact.check(found, &bound_of_parts(weights));
            near.unwrap_or_else(|wrong| panic!("{wrong}, {what}"));
            return;
        }
        let many = !config.mainloop.is_gemv();
        let ragged = config.mainloop == Mainloop::GemvRagged || !skipped.is_multiple_of(8);
        let (bound, by_row) = match config.mainloop {
            _ if many => (Bound::of_gemm::<T>(weights.cols(), LEAST), true),
            Mainloop::Gemv if adds_one_token(config) => (Bound::of_one_token::<T>(weights, 1, LEAST), false),
            _ => {
                // Token tiles hold the average number of an expert's rows, up to eight.
                let active = self.counts.len().min(self.chosen.len());
                let rows = self.chosen.len().div_ceil(active);
                let segments = if config.tile_n > 8 { 1 } else { segments(rows) };
                (Bound::of_tensor_cores::<T>(weights.cols(), [segments, 1], LEAST), true)
            }
        };
        let defined = |row: usize| by_row && is_unusual::<T>(weights, row) || ragged && !many;
        for (i, (found, right)) in found.iter().zip(results).enumerate() {
            let row = i % weights.rows();
            assert!(
                found.bits() == right.bits() || !defined(row),
                "{what}: {found:?}, not {right:?}, row {row}"
            );
        }
        let near = exact.check_some(found, &bound, |row| !defined(row));
        near.unwrap_or_else(|wrong| panic!("{wrong}, {what}"));
    }
}

fn every_kernel<T: Exact + Activation>(gpu: &Gpu) {
    // The last count is of pairs without an expert.
    let cases: [(usize, usize, &[usize]); 6] = [
        (40, 256, &[2, 0, 9, 1, 2]),
        (300, 128, &[0, 1, 0, 17, 0, 0]),
        (16, 2880, &[5, 34, 1]),
        (260, 512, &[70, 3, 140, 0]),
        (24, 1020, &[1, 2, 3, 4, 5, 0]),
        (64, 768, &[1; 130]),
    ];
    for (seed, (rows, cols, counts)) in (0..).zip(cases) {
        for format in Format::MULTIPLIED {
            let scales = [Scales::Common, Scales::Numbers, Scales::Common, Scales::Any][seed as usize % 4];
            // Partial sums are added. With scales beyond f32's range, infinities of two signs would
            // meet.
            let scales = if T::DTYPE == Dtype::F32 { Scales::Common } else { scales };
            let mixture = Mixture::<T>::new(format, [rows, cols], counts, scales, seed);
            let (experts, _) = mixture.on_device(gpu);
            let skipped = if seed == 2 { 3 } else { 0 };
            let mma = with_mma(gpu);
            for gpu in [Some(gpu), mma.as_ref()].into_iter().flatten() {
                for config in configs(gpu, &experts) {
                    for rows in [ExpertRows::Gathered, ExpertRows::Sorted, ExpertRows::Scattered] {
                        mixture.check(gpu, config, rows, skipped);
                    }
                }
            }
        }
    }
}

pub(crate) fn is_near_the_exact_sum_for_every_kernel(gpu: &Gpu) {
    every_kernel::<f16>(gpu);
    every_kernel::<bf16>(gpu);
    every_kernel::<f32>(gpu);
}

/// gpt-oss-20b's first product with the chosen kernel.
///
/// Routing, planning and multiplication are captured in one graph, and each replay chooses other
/// experts.
pub(crate) fn replays_in_a_graph_for_other_tokens(_: &Gpu) {
    replays::<bf16>(|weights| Bound::of_gemm::<bf16>(weights.cols(), LEAST));
    replays::<f32>(bound_of_parts);
}

fn replays<T: Exact + Activation>(bound_of: fn(&QuantizedTensor) -> Bound) {
    // A handle of its own: captures do not allow cudarc's events.
    let gpu = Gpu::new(0).unwrap();
    // SAFETY: until tracking is enabled again, all work of this context uses one stream.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    for tokens in [1, 16, 200] {
        let (experts, top_k, rows, cols) = (8, 4, 640, 2880);
        let weights: Vec<_> =
            (0..experts).map(|i| tensor(Format::Mxfp4, rows, cols, Scales::Common, 2 + 3 * i)).collect();
        let there = DeviceExperts::from_host(stream, &weights).unwrap();
        let mut rng = fastrand::Rng::with_seed(tokens as u64);
        let x: Vec<T> = (0..tokens * cols).map(|_| T::from_f32(rng.f32() - 0.5)).collect();
        let x_there = stream.clone_htod(&x).unwrap();
        let pairs = tokens * top_k;
        let mut chosen = stream.alloc_zeros::<u32>(pairs).unwrap();
        let mut routing = DeviceRouting::zeros(stream, experts as usize, pairs).unwrap();
        let mut workspace = gpu.experts_workspace(stream, &there, pairs, T::DTYPE).unwrap();
        let mut out = stream.alloc_zeros::<T>(pairs * rows).unwrap();
        // Runs once beforehand, so that kernels are compiled.
        let mut enqueue = || {
            gpu.route_on(stream, &chosen, top_k, &mut routing).unwrap();
            let plan = gpu.linear_experts::<T, T>(&there).plan(pairs).unwrap();
            plan.run(stream, &x_there, &routing, ExpertRows::Gathered, &mut workspace, &mut out).unwrap();
        };
        enqueue();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        enqueue();
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
        for _ in 0..3 {
            let of_token = || rng.choose_multiple(0..experts as u32, top_k);
            let now: Vec<u32> = std::iter::repeat_with(of_token).take(tokens).flatten().collect();
            stream.memcpy_htod(&now, &mut chosen).unwrap();
            graph.launch().unwrap();
            let found = stream.clone_dtoh(&out).unwrap();
            let mut sorted: Vec<_> = (0..pairs).collect();
            sorted.sort_by_key(|pair| now[*pair]);
            for (place, pair) in sorted.into_iter().enumerate().step_by(7) {
                let weights = &weights[now[pair] as usize];
                let exact = ExactProducts::of(weights, &x[pair / top_k * cols..][..cols], 1);
                let near = exact.check(&found[place * rows..][..rows], &bound_of(weights));
                near.unwrap_or_else(|wrong| panic!("{wrong}, {tokens} tokens, pair {pair}"));
            }
        }
    }
    // SAFETY: all work has completed, so no buffer of a later test lacks an event.
    unsafe { gpu.context().enable_event_tracking() };
}

/// A captured sort has not run yet, so the existing lists are for more tokens than the product has.
pub(crate) fn writes_no_results_until_pairs_are_sorted(_: &Gpu) {
    leaves_results_alone::<bf16>();
    leaves_results_alone::<f32>();
}

fn leaves_results_alone<T: Exact + Activation + PartialEq>() {
    // A handle of its own: captures do not allow cudarc's events.
    let gpu = Gpu::new(0).unwrap();
    // SAFETY: until tracking is enabled again, all work of this context uses one stream.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    let (experts, top_k, rows, cols, room) = (4, 2, 64, 256, 64);
    let weights: Vec<_> =
        (0..experts).map(|i| tensor(Format::Nvfp4, rows, cols, Scales::Common, 3 * i)).collect();
    let there = DeviceExperts::from_host(stream, &weights).unwrap();
    let chosen: Vec<u32> = (0..room as u32).map(|pair| pair % experts as u32).collect();
    let (all, few) = (stream.clone_htod(&chosen).unwrap(), stream.clone_htod(&chosen[..8]).unwrap());
    let mut routing = DeviceRouting::zeros(stream, experts as usize, room).unwrap();
    gpu.route_on(stream, &all, top_k, &mut routing).unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    gpu.route_on(stream, &few, top_k, &mut routing).unwrap();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
    assert_eq!(routing.pairs(), 8);
    let x = stream.clone_htod(&vec![T::from_f32(1.0); 4 * cols]).unwrap();
    let untouched = vec![T::from_f32(7.0); 8 * rows];
    let is_untouched = |config| {
        let mut out = stream.clone_htod(&untouched).unwrap();
        let plan = plan::<T, T>(&gpu, config, &there, DeviceEpilogue::default(), 8);
        let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
        plan.run(stream, &x, &routing, ExpertRows::Gathered, &mut workspace, &mut out).unwrap();
        stream.clone_dtoh(&out).unwrap() == untouched
    };
    for sorted in [false, true] {
        if sorted {
            graph.launch().unwrap();
        }
        for config in configs(&gpu, &there) {
            assert_eq!(is_untouched(config), !sorted, "{config}");
        }
    }
    // SAFETY: all work has completed, so no buffer of a later test lacks an event.
    unsafe { gpu.context().enable_event_tracking() };
}

pub(crate) fn refuses_mismatched_operands(gpu: &Gpu) {
    let stream = gpu.stream();
    let expert = |rows, seed| tensor(Format::Nvfp4, rows, 256, Scales::Common, seed);
    let refused = |weights: &[microscale::QuantizedTensor]| {
        matches!(
            DeviceExperts::from_host(stream, weights).unwrap_err(),
            Error::Operands(OperandFault::Experts { .. })
        )
    };
    // No experts, two shapes, and a divisor together with a multiplier.
    assert!(refused(&[]) && refused(&[expert(8, 0), expert(9, 3)]) && refused(&[expert(8, 0), expert(8, 1)]));
    let experts = DeviceExperts::from_host(stream, &[expert(8, 0), expert(8, 3)]).unwrap();
    let chosen = stream.clone_htod(&[0u32; 6]).unwrap();
    let mut few = DeviceRouting::zeros(stream, 2, 5).unwrap();
    let error = gpu.route_on(stream, &chosen, 2, &mut few).unwrap_err();
    assert!(matches!(error, Error::Operands(OperandFault::Routing { .. })), "{error:?}");
    let mut routing = DeviceRouting::zeros(stream, 3, 6).unwrap();
    gpu.route_on(stream, &chosen, 2, &mut routing).unwrap();
    let x = stream.alloc_zeros::<f16>(6 * 256).unwrap();
    let mut out = stream.alloc_zeros::<f16>(6 * 8).unwrap();
    let mut workspace = gpu.experts_workspace(stream, &experts, 6, Dtype::F16).unwrap();
    let plan = gpu.linear_experts::<f16, f16>(&experts).plan(6).unwrap();
    let mut multiply = |routing: &DeviceRouting, out: &mut _| {
        plan.run(stream, &x, routing, ExpertRows::Gathered, &mut workspace, out)
    };
    let error = multiply(&routing, &mut out).unwrap_err();
    assert!(matches!(error, Error::Operands(OperandFault::Routing { .. })), "{error:?}");
    let mut routing = DeviceRouting::zeros(stream, 2, 6).unwrap();
    gpu.route_on(stream, &chosen, 2, &mut routing).unwrap();
    let mut short = stream.alloc_zeros::<f16>(6 * 8 - 1).unwrap();
    assert!(multiply(&routing, &mut short).is_err());
    multiply(&routing, &mut out).unwrap();
}

/// An epilogue must equal its steps on f32 results.
///
/// The steps are a bias per expert, gates, and a residual by position.
pub(crate) fn applies_an_epilogue(gpu: &Gpu) {
    check_steps::<bf16>(gpu);
    check_steps::<f32>(gpu);
}

fn check_steps<T: Exact + Activation>(gpu: &Gpu)
where
    f32: ProductOf<T>,
{
    let counts = [3, 0, 20, 1, 140, 2];
    let mixture = Mixture::<T>::new(Format::Nvfp4, [320, 512], &counts, Scales::Common, 11);
    let (stream, order) = (gpu.stream(), ExpertRows::Scattered);
    let (experts, routing) = mixture.on_device(gpu);
    let (pairs, rows) = (mixture.chosen.len(), mixture.experts[0].0.weights.rows());
    let x = stream.clone_htod(&mixture.activations(order)).unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    let bias: Vec<T> = (0..counts.len() * rows).map(|_| T::from_f32(random.f32() - 0.5)).collect();
    let bias = &bias[..experts.count() * rows];
    let residual: Vec<f32> = (0..pairs * rows / 2).map(|_| random.f32() - 0.5).collect();
    let (bias_there, residual_there) =
        (stream.clone_htod(bias).unwrap(), stream.clone_htod(&residual).unwrap());
    for config in configs(gpu, &experts) {
        let mut sums = stream.alloc_zeros::<f32>(pairs * rows).unwrap();
        let mut out = stream.alloc_zeros::<f32>(pairs * rows / 2).unwrap();
        let without = plan::<T, f32>(gpu, config, &experts, DeviceEpilogue::default(), pairs);
        let steps = DeviceEpilogue {
            bias: Some((&bias_there).into()),
            gate: Some(Gate::SILU),
            residual: Some((&residual_there).into()),
        };
        let fused = plan::<T, f32>(gpu, config, &experts, steps, pairs);
        let mut workspace = GemmWorkspace::new(stream, fused.workspace_bytes()).unwrap();
        without.run(stream, &x, &routing, order, &mut workspace, &mut sums).unwrap();
        fused.run(stream, &x, &routing, order, &mut workspace, &mut out).unwrap();
        let (sums, found) = (stream.clone_dtoh(&sums).unwrap(), stream.clone_dtoh(&out).unwrap());
        for pair in 0..pairs {
            let expert = mixture.chosen[pair] as usize;
            for result in 0..if expert < experts.count() { rows / 2 } else { 0 } {
                let value = |row: usize| sums[pair * rows + row] + bias[expert * rows + row].to_f32();
                let gated = Gate::SILU.of::<Scalars>(value(2 * result), value(2 * result + 1));
                let (found, residual) = (found[pair * rows / 2 + result], residual[pair * rows / 2 + result]);
                let near = 1e-5 * (1.0 + gated.abs() + value(2 * result).abs() * value(2 * result + 1).abs());
                assert!(
                    (found - (gated + residual)).abs() <= near,
                    "{found} is not {gated} + {residual}: {config}, pair {pair}, result {result}"
                );
            }
        }
    }
}
