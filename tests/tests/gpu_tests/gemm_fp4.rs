//! Tests products of two matrices of FP4.
//!
//! Results must be within the error bound of the exact sums, and have the CPU's bits where tensor
//! cores multiply FP4 and no work tile is split.

use half::{bf16, f16};
use microscale::formats::fp4_dot;
use microscale::gpu::{DeviceEpilogue, DeviceTensor, DeviceView, GemmWorkspace, Gpu};
use microscale::{
    Activation, Error, Format, Fp4Weights, Gate, OperandFault, QuantizedTensor, ScaleLayout, gemm_fp4,
};
use microscale_test_support::operands::{Scales, tensor};
use microscale_test_support::oracle::{Exact, dot};
use microscale_test_support::weights::{Bound, near};

/// Maximum loss of a product in tensor cores, which may flush subnormal numbers.
const LEAST: f64 = f64::from_bits((1023 - 126) << 52);

/// Multiplies on the GPU. `T` is the dtype of results.
fn multiplied<T: Exact + Activation>(
    gpu: &Gpu,
    x: &QuantizedTensor,
    weights: &QuantizedTensor,
    alpha: f32,
    bias: &[T],
) -> Vec<T> {
    let stream = gpu.stream();
    let [x, weights] = [x, weights].map(|tensor| DeviceTensor::from_host(stream, tensor).unwrap());
    let bias = stream.clone_htod(bias).unwrap();
    let epilogue = DeviceEpilogue { bias: Some(DeviceView::from(&bias)), ..DeviceEpilogue::default() };
    let linear = gpu.linear_fp4::<T, T>(&weights).alpha(alpha).epilogue(epilogue);
    let plan = linear.plan(x.shape().rows).unwrap();
    let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
    let mut out = stream.alloc_zeros::<T>(x.shape().rows * weights.shape().rows).unwrap();
    // Twice: the workspace must be left as it was found.
    for _ in 0..2 {
        plan.run(stream, &x, &mut workspace, &mut out).unwrap();
    }
    stream.clone_dtoh(&out).unwrap()
}

/// Compares with the exact sums. Sums that are not finite are not compared.
fn check<T: Exact + Activation>(gpu: &Gpu, x: &QuantizedTensor, weights: &QuantizedTensor, alpha: f32) {
    let bias: Vec<T> = (0..weights.rows()).map(|row| T::round_f64(row as f64 / 8.0)).collect();
    let found = multiplied::<T>(gpu, x, weights, alpha, &bias);
    let factor = f64::from(fp4_dot::factor(alpha, [x, weights].map(QuantizedTensor::global_scale)));
    let cols = weights.blocks_per_row() * weights.format().block();
    let bound = Bound::of_fp4::<T>(cols, LEAST);
    for (i, found) in found.iter().enumerate() {
        let (token, row) = (i / weights.rows(), i % weights.rows());
        let Some((sum, magnitudes)) = dot::quantized(x, token, weights, row) else { continue };
        let (sum, magnitudes) = (sum.to_f64() * factor, magnitudes.to_f64() * factor.abs());
        let bias = bias[row].to_f64();
        let error = bound.error(magnitudes, factor.abs()) + (sum.abs() + bias.abs()) * 2f64.powi(-22);
        near(*found, sum + bias, error).unwrap_or_else(|wrong| {
            panic!("{wrong}: token {token}, row {row}, {:?} times {:?}", x.shape(), weights.shape())
        });
    }
}

pub(crate) fn is_near_the_exact_sum(gpu: &Gpu) {
    let shapes = [
        (1, 64, 1),
        (35, 128, 5),
        (300, 380, 17),
        (17, 1152, 70),
        (40, 416, 130),
        (9, 4096, 260),
        (30, 48, 3),
    ];
    for format in Format::MULTIPLIED {
        for (seed, (rows, cols, tokens)) in (0..).zip(shapes) {
            let weights = tensor(format, rows, cols, Scales::Common, seed);
            let x = tensor(format, tokens, cols, Scales::Common, seed + 1);
            let layout = [ScaleLayout::Linear, ScaleLayout::Swizzled][seed as usize % 2];
            let x_there = x.convert_layout(layout);
            check::<bf16>(gpu, &x, &weights, 0.5);
            if format == Format::Nvfp4 {
                check::<f16>(gpu, &x, &weights, 2.0);
            }
            let bias = vec![bf16::ZERO; rows];
            let [linear, other] = [&x, &x_there].map(|x| multiplied(gpu, x, &weights, 1.0, &bias));
            assert_eq!(linear, other, "{layout:?}");
        }
    }
}

pub(crate) fn has_the_cpus_bits_with_block_scales(gpu: &Gpu) {
    for format in Format::MULTIPLIED {
        // Two work tiles of one K-iteration each, which cannot be split.
        let weights = tensor(format, 300, 128, Scales::Any, 2);
        let x = tensor(format, 9, 128, Scales::Any, 5);
        let mut expected = vec![0f32; 300 * 9];
        gemm_fp4(&x, Fp4Weights::from(&weights), &mut expected).unwrap();
        let stream = gpu.stream();
        let [x, weights] = [&x, &weights].map(|tensor| DeviceTensor::from_host(stream, tensor).unwrap());
        let plan = gpu.linear_fp4::<bf16, f32>(&weights).plan(9).unwrap();
        if !plan.config().is_some_and(|config| config.mainloop.takes_fp4()) {
            return;
        }
        let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
        let mut out = stream.alloc_zeros::<f32>(expected.len()).unwrap();
        plan.run(stream, &x, &mut workspace, &mut out).unwrap();
        let found = stream.clone_dtoh(&out).unwrap();
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found.to_bits(), expected.to_bits(), "{format}, {i}: {found:e} is not {expected:e}");
        }
    }
}

pub(crate) fn refuses_operands_that_do_not_match(gpu: &Gpu) {
    let stream = gpu.stream();
    let there = |tensor: QuantizedTensor| DeviceTensor::from_host(stream, &tensor).unwrap();
    let weights = there(tensor(Format::Mxfp4, 3, 64, Scales::Common, 1));
    let plan = gpu.linear_fp4::<bf16, bf16>(&weights).plan(2).unwrap();
    let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
    let mut out = stream.alloc_zeros::<bf16>(6).unwrap();
    for (format, cols, rows) in [(Format::Nvfp4, 64, 2), (Format::Mxfp4, 96, 2), (Format::Mxfp4, 64, 1)] {
        let x = there(tensor(format, rows, cols, Scales::Common, 2));
        let error = plan.run(stream, &x, &mut workspace, &mut out).unwrap_err();
        assert!(matches!(error, Error::Operands(_) | Error::Length { .. }), "{error}");
    }
    let gated = DeviceEpilogue { gate: Some(Gate::SILU), ..DeviceEpilogue::default() };
    let error = gpu.linear_fp4::<bf16, bf16>(&weights).epilogue(gated).plan(2).unwrap_err();
    assert!(matches!(error, Error::Operands(OperandFault::Gate { rows: 3 })), "{error}");
    if !plan.config().is_some_and(|config| config.mainloop.takes_fp4()) {
        let error = gpu.linear_fp4::<f16, f16>(&weights).plan(2).unwrap_err();
        assert!(matches!(error, Error::Operands(OperandFault::Fp4Dtype { .. })), "{error}");
    }
}
