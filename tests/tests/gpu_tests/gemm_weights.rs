//! Tests products of weights and activations of many tokens.
//!
//! Results must be within the error bound, or equal the CPU's bits where no tensor core is used.

use half::{bf16, f16};
use microscale::gpu::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use microscale::gpu::{
    DeviceEpilogue, DeviceTensor, GemmWeightsKernel, Gpu, ProductOf, TensorCoreActivation,
};
use microscale::{Activation, Dtype, Error, Format, Gate, OperandFault, QuantizedTensor};
use microscale_test_support::epilogue::Steps;
use microscale_test_support::operands::{Scales, tensor};
use microscale_test_support::oracle::Exact;
use microscale_test_support::weights::{Activations, Bound, ExactProducts, is_unusual};

use super::gemv_weights::{Product, assert_same};

/// Maximum loss of a product in tensor cores, which may flush subnormal numbers.
const LEAST: f64 = f64::from_bits((1023 - 126) << 52);

/// Multiplies twice from device memory with one kernel and the same workspace.
///
/// Activations start `skipped` elements after a multiple of 256 bytes.
fn on_gpu<T: Exact + TensorCoreActivation>(
    gpu: &Gpu,
    product: &Product<T>,
    kernel: GemmWeightsKernel,
    skipped: usize,
) -> Vec<T> {
    let (stream, Product { weights, x, tokens, results }) = (gpu.stream(), product);
    let there = DeviceTensor::from_host(stream, weights).unwrap();
    let x = stream.clone_htod(&[vec![T::default(); skipped], x.clone()].concat()).unwrap();
    let x = x.slice(skipped..);
    let mut workspace = gpu.gemm_workspace(stream, weights.shape(), *tokens, T::DTYPE).unwrap();
    let mut multiplied = || {
        let mut out = stream.clone_htod(&vec![T::from_f32(7.0); results.len() + 1]).unwrap();
        let nothing = DeviceEpilogue::default();
        let (kernel, space) = (Some(kernel), &mut workspace);
        gpu.gemm_weights_with(kernel, stream, &there, &x, *tokens, nothing, space, &mut out).unwrap();
        let mut found = stream.clone_dtoh(&out).unwrap();
        assert_eq!(found.pop().unwrap().to_f32(), 7.0, "{kernel:?}, {}: wrote too much", product.what());
        found
    };
    let found = multiplied();
    assert_same(&multiplied(), &found, &format!("{kernel:?}, {}, a second time", product.what()));
    found
}

/// Checks results. Rows with out-of-range scales must have the CPU's bits.
fn check<T: Exact + TensorCoreActivation>(gpu: &Gpu, product: &Product<T>, skipped: usize) {
    let exact = ExactProducts::of(&product.weights, &product.x, product.tokens);
    let bound = Bound::of_gemm::<T>(product.weights.cols(), LEAST);
    for kernel in gpu.gemm_kernels() {
        let found = on_gpu(gpu, product, kernel, skipped);
        let defined = |row: usize| is_unusual::<T>(&product.weights, row);
        for (i, (found, right)) in found.iter().zip(&product.results).enumerate() {
            let row = i % product.weights.rows();
            let same = found.bits() == right.bits() || !defined(row);
            assert!(same, "{found:?} is not {right:?}: row {row}, {kernel:?}, {}", product.what());
        }
        let near = exact.check_some(&found, &bound, |row| !defined(row));
        near.unwrap_or_else(|wrong| panic!("{wrong}, {kernel:?}, {}", product.what()));
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
    for format in [Format::Nvfp4, Format::Mxfp4] {
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

pub(crate) fn refuses_a_workspace_that_is_too_small(gpu: &Gpu) {
    let weights = tensor(Format::Mxfp4, 300, 2048, Scales::Common, 2);
    let stream = gpu.stream();
    let there = DeviceTensor::from_host(stream, &weights).unwrap();
    let x = stream.alloc_zeros::<f16>(9000 * weights.cols()).unwrap();
    let mut out = stream.alloc_zeros::<f16>(9000 * weights.rows()).unwrap();
    let other = tensor(Format::Mxfp4, 300, 64, Scales::Common, 2);
    let mut workspace = gpu.gemm_workspace(stream, other.shape(), 1, Dtype::F16).unwrap();
    let refused = gpu.gemm_weights_on(stream, &there, &x, 9000, &mut workspace, &mut out).unwrap_err();
    assert!(matches!(refused, Error::Operands(OperandFault::Workspace { .. })), "{refused:?}");
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
        gpu.gemm_weights_on(stream, &there, &x, tokens, &mut workspace, &mut out).unwrap();
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
    let mut workspace = gpu.gemm_workspace(stream, weights.shape(), tokens, T::DTYPE).unwrap();
    let results = drawn.results(rows) * tokens;
    for kernel in gpu.gemm_kernels().map(Some).chain([None]) {
        let mut out = stream.clone_htod(&vec![O::from_f32(7.0); results + 1]).unwrap();
        gpu.gemm_weights_with(kernel, stream, &there, &x, tokens, epilogue, &mut workspace, &mut out)
            .unwrap();
        let mut found = stream.clone_dtoh(&out).unwrap();
        let what =
            format!("{kernel:?}, {rows}x{cols}, {tokens} tokens, {steps:?}, {:?}", (T::DTYPE, O::DTYPE));
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
    let (x, mut out) = (stream.alloc_zeros::<bf16>(64).unwrap(), stream.alloc_zeros::<bf16>(5).unwrap());
    let mut workspace = gpu.gemm_workspace(stream, weights.shape(), 1, Dtype::Bf16).unwrap();
    let refused = gpu.gemm_weights_fused_on(stream, &there, &x, 1, epilogue, &mut workspace, &mut out);
    assert!(matches!(refused, Err(Error::Operands(OperandFault::Gate { rows: 5 }))), "{refused:?}");
}
