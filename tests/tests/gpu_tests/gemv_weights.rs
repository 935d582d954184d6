//! Tests products of weights and activations.
//!
//! Results must be within the error bound, or equal the CPU's bits where no tensor core is used.

use half::{bf16, f16};
use microscale::gpu::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use microscale::gpu::{DeviceTensor, GemmConfig, GemmWorkspace, GemmWorkspaceMut, Gpu};
use microscale::{
    Activation, Error, Format, QuantizedShape, QuantizedTensor, ScaleLayout, Words, gemv_weights,
};
use microscale_kernels_abi::Mainloop;
use microscale_test_support::operands::{Scales, tensor};
use microscale_test_support::oracle::Exact;
use microscale_test_support::weights::{
    Activations, Bound, ExactProducts, activations, is_unusual, near, segments, usual_scales,
};

const FORMATS: [Format; 2] = Format::MULTIPLIED;

/// A product's operands, and its results on the CPU.
pub(super) struct Product<T> {
    pub(super) weights: QuantizedTensor,
    pub(super) x: Vec<T>,
    pub(super) tokens: usize,
    pub(super) results: Vec<T>,
}

impl<T: Exact + Activation> Product<T> {
    pub(super) fn new(weights: QuantizedTensor, tokens: usize, kind: Activations) -> Self {
        let mut random = fastrand::Rng::with_seed((weights.cols() * 31 + tokens) as u64);
        let x: Vec<T> = activations(weights.cols() * tokens, kind, &mut random);
        let mut results = vec![T::default(); weights.rows() * tokens];
        gemv_weights(&weights, &x, tokens, &mut results).expect("operands that fit");
        Self { weights, x, tokens, results }
    }
}

impl<T: Exact + Activation> Product<T> {
    pub(super) fn what(&self) -> String {
        format!("{} {:?}, {} tokens", T::DTYPE.word(), self.weights.shape(), self.tokens)
    }

    /// The bound of a GEMV's results, however many warps share rows. Products below f32's normal numbers may
    /// be lost.
    fn bound(&self, config: GemmConfig) -> Bound {
        let least = 2f64.powi(-126);
        if adds_one_token(config) {
            Bound::of_one_token::<T>(&self.weights, 1, least)
        } else {
            let segments = if config.tile_n > 8 { 1 } else { segments(self.tokens) };
            Bound::of_tensor_cores::<T>(self.weights.cols(), [segments, 1], least)
        }
    }

    /// The configuration that is chosen without a workspace.
    fn chosen(&self, gpu: &Gpu) -> GemmConfig {
        let weights = DeviceTensor::from_host(gpu.stream(), &self.weights).unwrap();
        let plan = gpu.linear::<T, T>(&weights).without_workspace().plan(self.tokens).unwrap();
        plan.config().expect("something to multiply")
    }

    /// Multiplies by some configurations, each twice with the same workspace. Activations start `skipped`
    /// elements after 256 bytes.
    pub(super) fn on_gpu(
        &self,
        gpu: &Gpu,
        configs: impl IntoIterator<Item = GemmConfig>,
        skipped: usize,
        check: impl Fn(&[T], GemmConfig, &str),
    ) {
        let stream = gpu.stream();
        let weights = DeviceTensor::from_host(stream, &self.weights).unwrap();
        let x = stream.clone_htod(&[vec![T::default(); skipped], self.x.clone()].concat()).unwrap();
        let x = x.slice(skipped..);
        for config in configs {
            let what = format!("{config}, {}", self.what());
            let plan = gpu.linear::<T, T>(&weights).by(config).plan(self.tokens);
            let plan = plan.unwrap_or_else(|error| panic!("{what}: {error}"));
            let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
            let mut multiplied = || {
                let mut out = stream.clone_htod(&vec![T::from_f32(7.0); self.results.len() + 1]).unwrap();
                let done = plan.run(stream, &x, &mut workspace, &mut out);
                done.unwrap_or_else(|error| panic!("{what}: {error}"));
                let mut found = stream.clone_dtoh(&out).unwrap();
                assert_eq!(found.pop().unwrap().to_f32(), 7.0, "{what}: wrote too much");
                found
            };
            let found = multiplied();
            assert_same(&multiplied(), &found, &format!("{what}, a second time"));
            check(&found, config, &what);
        }
    }

    /// Returns whether a configuration of the GEMV computes a row by the definition.
    fn is_defined(&self, config: GemmConfig, row: usize) -> bool {
        config.mainloop == Mainloop::GemvRagged
            || !adds_one_token(config) && is_unusual::<T>(&self.weights, row)
    }

    /// Checks every configuration of the GEMV against the exact sums, or against the CPU's results where they are computed as
    /// there.
    fn check_all(&self, gpu: &Gpu) {
        let exact = ExactProducts::of(&self.weights, &self.x, self.tokens);
        self.on_gpu(gpu, gemv_configs(gpu, &self.weights), 0, |found, config, what| {
            for (i, (found, right)) in found.iter().zip(&self.results).enumerate() {
                let row = i % self.weights.rows();
                let same = found.bits() == right.bits();
                assert!(
                    same || !self.is_defined(config, row),
                    "{found:?} is not {right:?}: row {row}, {what}"
                );
            }
            let checked = exact.check_some(found, &self.bound(config), |row| !self.is_defined(config, row));
            checked.unwrap_or_else(|wrong| panic!("{wrong}, {what}"));
        });
    }
}

/// Returns whether a configuration adds as kernels for one token do.
pub(super) fn adds_one_token(config: GemmConfig) -> bool {
    config.mainloop == Mainloop::Gemv && config.tile_n == 1
}

/// The configurations of the GEMV for some weights.
fn gemv_configs(gpu: &Gpu, weights: &QuantizedTensor) -> impl Iterator<Item = GemmConfig> {
    gpu.gemm_configs(weights.shape()).into_iter().filter(|config| config.mainloop.is_gemv())
}

pub(super) fn assert_same<T: Exact>(found: &[T], expected: &[T], what: &str) {
    let differs = found.iter().zip(expected).position(|(found, expected)| found.bits() != expected.bits());
    assert_eq!((found.len(), differs), (expected.len(), None), "{what}");
}

pub(crate) fn is_near_the_exact_sum_for_every_kernel(gpu: &Gpu) {
    let shapes =
        [(1, 32), (35, 96), (130, 160), (17, 1056), (40, 4128), (300, 2048), (33, 1152), (9, 48), (5, 1000)];
    let kinds = [
        (Scales::Common, Activations::Common),
        (Scales::Numbers, Activations::Numbers),
        (Scales::Common, Activations::Tiny),
        (Scales::Any, Activations::Any),
    ];
    let mut seed = 0;
    for format in FORMATS {
        for (rows, cols) in shapes {
            for tokens in [1, 2, 3, 4, 5, 6, 7, 8, 9, 17] {
                // Combines all kinds with every number of tokens and every shape.
                let (scales, kind) = kinds[seed as usize % 4];
                let weights = tensor(format, rows, cols, scales, seed);
                seed += 1;
                Product::<f16>::new(weights.clone(), tokens, kind).check_all(gpu);
                Product::<bf16>::new(weights, tokens, kind).check_all(gpu);
            }
            seed += 1;
        }
    }
}

/// Tests rows that are computed by the definition next to other rows, and blocks of zeros under
/// scales that would otherwise require the definition.
pub(crate) fn of_out_of_range_scales_equals_the_cpu(gpu: &Gpu) {
    fn check<T: Exact + Activation>(gpu: &Gpu) {
        let [first, last] = usual_scales::<T>();
        for (tokens, cols) in [(1, 1056), (3, 96), (8, 160), (17, 2048)] {
            let (shape, blocks) = (QuantizedShape::new(Format::Mxfp4, 300, cols), cols / 32);
            let drawn = tensor(Format::Mxfp4, 300, cols, Scales::Common, tokens as u64);
            let (mut codes, mut scales) = drawn.into_parts();
            let mut random = fastrand::Rng::with_seed(cols as u64);
            for scale in &mut scales {
                *scale = [first, last, random.u8(first..=last)][random.usize(..3)];
            }
            for (row, scale) in [(0, first - 1), (77, last + 1), (170, 0), (299, 254)] {
                scales[row * blocks + row % blocks] = scale;
            }
            for (row, scale) in [(20, 0), (21, 254), (22, 255)] {
                scales[row * blocks + blocks - 1] = scale;
                codes[(row * blocks + blocks - 1) * 16..][..16].fill(0x80);
            }
            let weights = QuantizedTensor::from_parts(shape, codes, scales).unwrap();
            let unusual = [0, 77, 170, 299, 20, 21].map(|row| is_unusual::<T>(&weights, row));
            assert_eq!(unusual, [true, true, true, true, false, false]);
            Product::<T>::new(weights, tokens, Activations::Common).check_all(gpu);
        }
    }
    check::<f16>(gpu);
    check::<bf16>(gpu);
}

/// Tests activations that do not start at a multiple of 16 bytes.
pub(crate) fn of_unaligned_activations_equals_the_cpu(gpu: &Gpu) {
    for format in FORMATS {
        for (rows, cols, tokens) in [(33, 1056, 3), (9, 64, 1), (100, 1000, 9)] {
            let weights = tensor(format, rows, cols, Scales::Numbers, cols as u64);
            let product = Product::<bf16>::new(weights, tokens, Activations::Numbers);
            for skipped in [1, 4, 7] {
                let is_ragged = |config: &GemmConfig| config.mainloop == Mainloop::GemvRagged;
                let ragged = gemv_configs(gpu, &product.weights).filter(is_ragged);
                product.on_gpu(gpu, ragged, skipped, |found, _, what| {
                    assert_same(found, &product.results, what);
                });
            }
        }
    }
}

/// Compares layers of models with the CPU. Both results may be off.
pub(crate) fn is_near_the_cpus_on_layers_of_models(gpu: &Gpu) {
    fn check<T: Exact + Activation>(gpu: &Gpu, format: Format, (rows, cols): (usize, usize), tokens: usize) {
        // Without a global scale: f16 holds all results.
        let weights = tensor(format, rows, cols, Scales::Common, 2);
        let product = Product::<T>::new(weights, tokens, Activations::Common);
        // Σ|w·x|, computed in bf16 by the CPU, with an error below one percent.
        let codes = product.weights.codes().iter().map(|codes| codes & 0x77).collect();
        let shape = product.weights.shape();
        let magnitudes =
            QuantizedTensor::from_parts(shape, codes, product.weights.scales().to_vec()).unwrap();
        let x: Vec<_> = product.x.iter().map(|x| bf16::from_f64(x.to_f64().abs())).collect();
        let mut sums = vec![bf16::ZERO; product.results.len()];
        gemv_weights(&magnitudes, &x, tokens, &mut sums).expect("operands that fit");
        let config = product.chosen(gpu);
        let bound = product.bound(config).twice();
        product.on_gpu(gpu, [config], 0, |found, _, what| {
            for (i, ((y, right), magnitudes)) in found.iter().zip(&product.results).zip(&sums).enumerate() {
                let right = right.to_f64();
                // Half a unit in the last place more, because the CPU's result is rounded too.
                let half = T::of_bits(y.bits() ^ 1).to_f64() - y.to_f64();
                let error = bound.error(1.01 * f64::from(*magnitudes), 1.0) + half.abs();
                near(*y, right, error).unwrap_or_else(|wrong| panic!("{wrong}: result {i}, {what}"));
            }
        });
    }
    for (i, shape) in [(4096, 4096), (14336, 4096), (4096, 14336)].into_iter().enumerate() {
        for tokens in [1, 8] {
            check::<f16>(gpu, FORMATS[i % 2], shape, tokens);
            check::<bf16>(gpu, FORMATS[(i + 1) % 2], shape, tokens);
        }
    }
}

/// For ordinary operands, 99.9 % of results are the rounded exact sum or its neighbour.
pub(crate) fn is_mostly_within_a_unit_in_the_last_place(gpu: &Gpu) {
    fn check<T: Exact + Activation>(gpu: &Gpu, format: Format, rows: usize, cols: usize) {
        let weights = tensor(format, rows, cols, Scales::Common, rows as u64);
        let product = Product::<T>::new(weights, 1, Activations::Common);
        let exact = ExactProducts::of(&product.weights, &product.x, 1);
        product.on_gpu(gpu, gemv_configs(gpu, &product.weights), 0, |found, config, what| {
            let far =
                exact.check(found, &product.bound(config)).unwrap_or_else(|wrong| panic!("{wrong}, {what}"));
            assert!(far * 1000 <= found.len(), "{far} of {}, {what}", found.len());
        });
    }
    for format in FORMATS {
        for (rows, cols) in [(4096, 4096), (2048, 8192)] {
            check::<f16>(gpu, format, rows, cols);
            check::<bf16>(gpu, format, rows, cols);
        }
    }
}

pub(crate) fn refuses_what_the_cpu_refuses(gpu: &Gpu) {
    let weights = tensor(Format::Nvfp4, 6, 64, Scales::Common, 2);
    let refused = |weights: &QuantizedTensor, count, tokens, room| {
        let (x, mut out) = (vec![f16::ONE; count], vec![f16::ZERO; room]);
        let on_cpu = gemv_weights(weights, &x, tokens, &mut out).unwrap_err();
        let on_gpu = gpu.gemm_weights(weights, &x, tokens, &mut out).unwrap_err();
        assert_eq!(on_gpu.to_string(), on_cpu.to_string());
        assert!(matches!(on_gpu, Error::Operands(_) | Error::Length { .. }), "{on_gpu:?}");
        let stream = gpu.stream();
        let there = DeviceTensor::from_host(stream, weights).unwrap();
        let [x, mut out] = [x, out].map(|values| stream.clone_htod(&values).unwrap());
        let plan = gpu.linear::<f16, f16>(&there).without_workspace().plan(tokens);
        let done = plan.and_then(|plan| plan.run(stream, &x, GemmWorkspaceMut::none(), &mut out));
        let on_gpu = done.unwrap_err();
        assert_eq!(on_gpu.to_string(), on_cpu.to_string());
    };
    refused(&weights, 128, 3, 18);
    refused(&weights, 128, 2, 11);
    refused(&weights.convert_layout(ScaleLayout::Swizzled), 64, 1, 6);
    let wide = QuantizedTensor::zeros(QuantizedShape::new(Format::Mxfp8E4m3, 6, 64)).unwrap();
    refused(&wide, 64, 1, 6);
}

pub(crate) fn of_empty_operands_is_empty(gpu: &Gpu) {
    for format in FORMATS {
        for (rows, cols, tokens) in [(0, 64, 2), (3, 0, 2), (3, 64, 0), (0, 0, 1)] {
            let weights = tensor(format, rows, cols, Scales::Common, 2);
            let mut out = vec![f16::ONE; rows * tokens];
            gpu.gemm_weights(&weights, &vec![f16::ONE; tokens * cols], tokens, &mut out).unwrap();
            assert_eq!(out, vec![f16::ZERO; rows * tokens]);
        }
    }
}

/// Results from host memory equal those from device memory, with spare room in operands.
pub(crate) fn from_host_memory_is_the_same(gpu: &Gpu) {
    for format in FORMATS {
        for (rows, cols, tokens) in [(70, 1056, 3), (9, 48, 1), (600, 512, 11)] {
            let weights = tensor(format, rows, cols, Scales::Common, 4);
            let product = Product::<f16>::new(weights, tokens, Activations::Common);
            let mut found = vec![f16::from_f32(7.0); rows * tokens + 2];
            let x = [product.x.clone(), vec![f16::NAN; 5]].concat();
            gpu.gemm_weights(&product.weights, &x, tokens, &mut found).unwrap();
            assert_eq!(found.split_off(rows * tokens), [f16::from_f32(7.0); 2]);
            let there = DeviceTensor::from_host(gpu.stream(), &product.weights).unwrap();
            let config = gpu.linear::<f16, f16>(&there).plan(tokens).unwrap().config();
            product.on_gpu(gpu, config, 0, |there, _, what| assert_same(&found, there, what));
        }
    }
}

pub(crate) fn replays_in_a_graph(_: &Gpu) {
    // A handle of its own: captures do not allow cudarc's events.
    let gpu = Gpu::new(0).unwrap();
    // SAFETY: until tracking is enabled again, all work of this context uses one stream.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    let products = [3, 4].map(|seed| {
        let weights = tensor(Format::Nvfp4, 600, 2048, Scales::Common, seed);
        Product::<bf16>::new(weights, seed as usize, Activations::Common)
    });
    let operands = products.each_ref().map(|product| {
        let x = stream.clone_htod(&product.x).unwrap();
        (DeviceTensor::from_host(stream, &product.weights).unwrap(), x)
    });
    let mut out =
        products.each_ref().map(|product| stream.alloc_zeros::<bf16>(product.results.len()).unwrap());
    let multiply = |out: &mut [_; 2]| {
        for (((weights, x), product), out) in operands.iter().zip(&products).zip(out) {
            let plan = gpu.linear(weights).without_workspace().plan(product.tokens).unwrap();
            plan.run(stream, x, GemmWorkspaceMut::none(), out).unwrap();
        }
    };
    multiply(&mut out);
    let expected = out.each_ref().map(|out| stream.clone_dtoh(out).unwrap());
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    multiply(&mut out);
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
    for _ in 0..3 {
        out.iter_mut().for_each(|out| stream.memset_zeros(out).unwrap());
        graph.launch().unwrap();
        for (out, expected) in out.iter().zip(&expected) {
            assert_same(&stream.clone_dtoh(out).unwrap(), expected, "a replay");
        }
    }
    // SAFETY: all work has completed, so no buffer of a later test lacks an event.
    unsafe { gpu.context().enable_event_tracking() };
}
