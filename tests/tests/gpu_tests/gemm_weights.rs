//! Tests products of weights and activations of many tokens.
//!
//! Results must be within the error bound, or equal the CPU's bits where no tensor core is used.

use half::{bf16, f16};
use microscale::gpu::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use microscale::gpu::{
    DeviceEpilogue, DeviceTensor, GemmConfig, GemmWorkspace, GemmWorkspaceMut, Gpu, ProductOf,
};
use microscale::{
    Activation, Device, DeviceChoice, Dtype, Error, Format, Gate, OperandFault, QuantizedTensor, Shape,
};
use microscale_test_support::epilogue::Steps;
use microscale_test_support::operands::{Scales, tensor};
use microscale_test_support::oracle::Exact;
use microscale_test_support::weights::{Activations, Bound, ExactProducts, is_unusual};

use super::gemv_weights::{Product, assert_same};
use super::raw::Raw;
use super::support::with_mma;

/// Maximum loss of a product in tensor cores, which may flush subnormal numbers.
const LEAST: f64 = f64::from_bits((1023 - 126) << 52);

/// The configurations of the GEMM for some weights.
fn gemm_configs(gpu: &Gpu, weights: &QuantizedTensor) -> Vec<GemmConfig> {
    let mut configs = gpu.gemm_configs(weights.shape());
    configs.retain(|config| !config.mainloop.is_gemv());
    configs
}

/// Returns whether a cluster's thread blocks have work for a product: if not, the configuration is refused.
fn fits<T: Activation>(gpu: &Gpu, weights: &DeviceTensor, tokens: usize, config: GemmConfig) -> bool {
    match gpu.linear::<T, T>(weights).by(config).plan(tokens) {
        Ok(_) => true,
        Err(error) => {
            assert!(config.cluster > 1, "{config}: {error}");
            false
        }
    }
}

/// Checks results of every configuration of the GEMM: rows with unusual scales have the CPU's bits.
fn check<T: Exact + Activation>(gpu: &Gpu, product: &Product<T>, skipped: usize) {
    let exact = ExactProducts::of(&product.weights, &product.x, product.tokens);
    let bound = Bound::of_gemm::<T>(product.weights.cols(), LEAST);
    let there = DeviceTensor::from_host(gpu.stream(), &product.weights).unwrap();
    for gpu in [Some(gpu), with_mma(gpu).as_ref()].into_iter().flatten() {
        let mut configs = gemm_configs(gpu, &product.weights);
        configs.retain(|config| fits::<T>(gpu, &there, product.tokens, *config));
        configs.retain(|config| skipped.is_multiple_of(8) || !config.packs_activations());
        product.on_gpu(gpu, configs, skipped, |found, _, what| {
            let defined = |row: usize| is_unusual::<T>(&product.weights, row);
            for (i, (found, right)) in found.iter().zip(&product.results).enumerate() {
                let row = i % product.weights.rows();
                let same = found.bits() == right.bits() || !defined(row);
                assert!(same, "{found:?} is not {right:?}: row {row}, {what}");
            }
            let near = exact.check_some(found, &bound, |row| !defined(row));
            near.unwrap_or_else(|wrong| panic!("{wrong}, {what}"));
        });
    }
}

pub(crate) fn is_near_the_exact_sum_for_every_kernel(gpu: &Gpu) {
    // NVFP4's rows have whole words of scales.
    let shapes = [
        (1, 64, &[1, 9, 16, 33, 64, 100, 130, 257][..]),
        (35, 128, &[1, 17, 64, 129, 170, 300]),
        (300, 380, &[5, 16, 70, 257]),
        (17, 1152, &[8, 33, 128, 520]),
        (520, 2048, &[16, 40]),
        (256, 1020, &[64, 100, 150]),
        (700, 2880, &[9, 32]),
        (9, 4096, &[3, 260]),
    ];
    let kinds = [
        (Scales::Common, Activations::Common),
        (Scales::Numbers, Activations::Numbers),
        (Scales::Common, Activations::Tiny),
        (Scales::Any, Activations::Any),
    ];
    let mut seed = 0;
    for format in Format::MULTIPLIED {
        for (rows, cols, tokens) in shapes {
            for &tokens in tokens {
                let (scales, kind) = kinds[seed as usize % 4];
                let weights = tensor(format, rows, cols, scales, seed);
                let skipped = if seed % 5 == 0 { 3 } else { 0 };
                seed += 1;
                check(gpu, &Product::<f16>::new(weights.clone(), tokens, kind), skipped);
                check(gpu, &Product::<bf16>::new(weights, tokens, kind), skipped);
            }
            seed += 1;
        }
    }
}

/// Tests work tiles that are whole, or split between two or many thread blocks.
pub(crate) fn is_near_the_cpus_on_layers_of_models(gpu: &Gpu) {
    for (format, rows, cols, tokens) in [
        (Format::Nvfp4, 4096, 4096, 16),
        (Format::Mxfp4, 4096, 1024, 100),
        (Format::Nvfp4, 28672, 128, 64),
        (Format::Mxfp4, 5760, 2880, 20),
    ] {
        let weights = tensor(format, rows, cols, Scales::Common, 2);
        check(gpu, &Product::<bf16>::new(weights, tokens, Activations::Common), 0);
    }
}

/// A device copies weights once, and reads no gaps between rows.
pub(crate) fn of_devices_is_the_same(gpu: &Gpu) {
    let device = Device::choose(DeviceChoice::Cuda(gpu.info().ordinal)).unwrap();
    for format in Format::MULTIPLIED {
        for (rows, cols, tokens) in [(1, 32, 1), (70, 1056, 9), (9, 47, 3), (600, 512, 40)] {
            let weights = tensor(format, rows, cols, Scales::Common, 4);
            let product = Product::<bf16>::new(weights, tokens, Activations::Common);
            let mut expected = vec![bf16::ZERO; rows * tokens];
            gpu.gemm_weights(&product.weights, &product.x, tokens, &mut expected).unwrap();
            let shape = Shape::new(tokens, cols);
            assert_eq!(device.linear(&product.x, shape, &product.weights).unwrap(), expected);
            let loaded = device.load_weights(&product.weights).unwrap();
            let apart: Vec<bf16> =
                product.x.chunks(cols).take(tokens).flat_map(|x| [x, &[bf16::NAN; 3]].concat()).collect();
            let found = loaded.linear(&apart, shape.with_row_stride(cols + 3)).unwrap();
            assert_eq!(found, expected);
        }
    }
    let weights = tensor(Format::Mxfp4, 6, 64, Scales::Common, 2);
    for (rows, tokens) in [(0, 9), (6, 0)] {
        let weights = tensor(Format::Mxfp4, rows, 64, Scales::Common, 2);
        let found = device.linear(&vec![1f32; tokens * 64], Shape::new(tokens, 64), &weights);
        assert!(found.unwrap().is_empty());
    }
    let narrow = device.linear(&[1f32; 63], Shape::new(1, 63), &weights);
    let refused = matches!(narrow, Err(Error::Operands(OperandFault::Activations { .. })));
    assert!(refused, "{narrow:?}");
}

/// A workspace that is one byte short, or for another product, or none.
pub(crate) fn refuses_a_workspace_that_is_too_small(gpu: &Gpu) {
    let weights = tensor(Format::Mxfp4, 300, 2048, Scales::Common, 2);
    let (stream, tokens) = (gpu.stream(), 9000);
    let there = DeviceTensor::from_host(stream, &weights).unwrap();
    let x = stream.alloc_zeros::<f16>(tokens * weights.cols()).unwrap();
    let mut out = stream.alloc_zeros::<f16>(tokens * weights.rows()).unwrap();
    let other = tensor(Format::Mxfp4, 300, 64, Scales::Common, 2);
    let mut other = gpu.gemm_workspace(stream, other.shape(), 1, Dtype::F16).unwrap();
    let plan = gpu.linear::<f16, f16>(&there).plan(tokens).unwrap();
    let bytes = plan.workspace_bytes();
    let memory = Raw::zeros(stream, bytes);
    // SAFETY: the memory has `bytes` bytes, zeros at first, and only products write there.
    let of = |bytes| unsafe { GemmWorkspaceMut::from_raw_parts(memory.address(), bytes) }.unwrap();
    for short in [of(bytes - 1), (&mut other).into(), GemmWorkspaceMut::none()] {
        let refused = plan.run(stream, &x, short, &mut out).unwrap_err();
        assert!(matches!(refused, Error::Operands(OperandFault::Workspace { .. })), "{refused:?}");
    }
    plan.run(stream, &x, of(bytes), &mut out).unwrap();
    stream.synchronize().unwrap();
    memory.read();
}

/// Tests any number of tokens, from host memory and captured in a graph.
pub(crate) fn replays_in_a_graph(_: &Gpu) {
    // A handle of its own: captures do not allow cudarc's events.
    let gpu = Gpu::new(0).unwrap();
    // SAFETY: until tracking is enabled again, all work of this context uses one stream.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    for tokens in [1, 8, 9, 70, 120] {
        let weights = tensor(Format::Nvfp4, 600, 2048, Scales::Common, tokens as u64);
        let product = Product::<bf16>::new(weights, tokens, Activations::Common);
        let mut expected = vec![bf16::ZERO; product.results.len()];
        gpu.gemm_weights(&product.weights, &product.x, tokens, &mut expected).unwrap();
        let there = DeviceTensor::from_host(stream, &product.weights).unwrap();
        let x = stream.clone_htod(&product.x).unwrap();
        let mut out = stream.alloc_zeros::<bf16>(product.results.len()).unwrap();
        let mut workspace = gpu.gemm_workspace(stream, product.weights.shape(), 120, Dtype::Bf16).unwrap();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        let plan = gpu.linear::<bf16, bf16>(&there).plan(tokens).unwrap();
        plan.run(stream, &x, &mut workspace, &mut out).unwrap();
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
        for _ in 0..3 {
            stream.memset_zeros(&mut out).unwrap();
            graph.launch().unwrap();
            assert_same(&stream.clone_dtoh(&out).unwrap(), &expected, "a replay");
        }
    }
    // SAFETY: all work has completed, so no buffer of a later test lacks an event.
    unsafe { gpu.context().enable_event_tracking() };
}

/// Multiplies with an epilogue, with the chosen kernel and all others, and checks the error bound.
fn check_steps<T: Exact + Activation, O: Exact + ProductOf<T>>(
    gpu: &Gpu,
    weights: &QuantizedTensor,
    tokens: usize,
    steps: (bool, Option<Gate>, bool),
) {
    let (stream, rows, cols) = (gpu.stream(), weights.rows(), weights.cols());
    let mut random = fastrand::Rng::with_seed((rows + tokens) as u64);
    let x: Vec<T> = (0..tokens * cols).map(|_| T::from_f32(random.f32() - 0.5)).collect();
    let exact = ExactProducts::of(weights, &x, tokens);
    // For f32, each of three parts has an error of its own and is smaller than the one before.
    let bound = Bound::of_gemm::<bf16>(cols, LEAST).or(Bound::of_tensor_cores::<bf16>(cols, [8, 16], LEAST));
    let bound = bound.or(Bound::of_one_token::<bf16>(weights, 1, LEAST));
    let drawn = Steps::<T, O>::draw(rows, tokens, steps, 7);
    let there = DeviceTensor::from_host(stream, weights).unwrap();
    let x = stream.clone_htod(&x).unwrap();
    let (bias, residual) = (stream.clone_htod(&drawn.bias), stream.clone_htod(&drawn.residual));
    let (bias, residual) = (bias.ok(), residual.ok());
    let epilogue = DeviceEpilogue {
        bias: bias.as_ref().filter(|_| steps.0).map(Into::into),
        gate: steps.1,
        residual: residual.as_ref().filter(|_| steps.2).map(Into::into),
    };
    let results = drawn.results(rows) * tokens;
    let mma = with_mma(gpu);
    let of_gpu = |gpu| {
        let configs = gemm_configs(gpu, weights).into_iter().map(Some);
        configs.map(move |config| (gpu, config))
    };
    let others = mma.iter().flat_map(of_gpu);
    for (gpu, config) in of_gpu(gpu).chain([(gpu, None)]).chain(others) {
        let linear = gpu.linear::<T, O>(&there).epilogue(epilogue);
        let linear = config.map_or(linear, |config| linear.by(config));
        let plan = match linear.plan(tokens) {
            Err(_) if config.is_some_and(|config| config.cluster > 1) => continue,
            plan => plan.unwrap(),
        };
        let what = format!("{plan:?}, {rows}x{cols}, {steps:?}, {:?}", (T::DTYPE, O::DTYPE));
        let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
        let mut out = stream.clone_htod(&vec![O::from_f32(7.0); results + 1]).unwrap();
        plan.run(stream, &x, &mut workspace, &mut out).unwrap();
        let mut found = stream.clone_dtoh(&out).unwrap();
        assert_eq!(found.pop().unwrap().to_f32(), 7.0, "{what}: wrote too much");
        drawn.check(&exact, &bound, rows, &found).unwrap_or_else(|wrong| panic!("{wrong}, {what}"));
    }
}

/// Tests a bias, gates and a residual.
///
/// Results have the activations' dtype or f32, and f32 activations are tested too.
pub(crate) fn applies_an_epilogue(gpu: &Gpu) {
    let all = [
        (false, None, false),
        (true, None, true),
        (true, Some(Gate::GPT_OSS), false),
        (false, Some(Gate::SILU), true),
    ];
    for (format, rows, cols) in [(Format::Nvfp4, 320, 1024), (Format::Mxfp4, 70, 2880)] {
        let weights = tensor(format, rows, cols, Scales::Common, 5);
        for (i, tokens) in [1, 3, 8, 20, 90, 300].into_iter().enumerate() {
            for (j, steps) in all.into_iter().enumerate() {
                check_steps::<bf16, bf16>(gpu, &weights, tokens, steps);
                if (i + j) % 2 == 0 {
                    check_steps::<bf16, f32>(gpu, &weights, tokens, steps);
                    check_steps::<f16, f16>(gpu, &weights, tokens, steps);
                } else {
                    check_steps::<f32, f32>(gpu, &weights, tokens, steps);
                    check_steps::<f16, f32>(gpu, &weights, tokens, steps);
                }
            }
        }
    }
    let weights = tensor(Format::Nvfp4, 5, 64, Scales::Common, 5);
    let epilogue = DeviceEpilogue::<bf16, bf16> { gate: Some(Gate::SILU), ..DeviceEpilogue::default() };
    let stream = gpu.stream();
    let there = DeviceTensor::from_host(stream, &weights).unwrap();
    let refused = gpu.linear::<bf16, bf16>(&there).epilogue(epilogue).plan(1).map(drop);
    assert!(matches!(refused, Err(Error::Operands(OperandFault::Gate { rows: 5 }))), "{refused:?}");
}
