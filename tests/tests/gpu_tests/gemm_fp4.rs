//! Tests products of two matrices of FP4.
//!
//! Results must be within the error bound of the exact sums, and have the bits of `fp4_dot` where
//! tensor cores multiply FP4 and no work tile is split.

use half::{bf16, f16};
use microscale::formats::fp4_dot;
use microscale::formats::nvfp4::Direction;
use microscale::gpu::{
    DeviceEpilogue, DeviceExperts, DeviceExpertsView, DeviceRouting, DeviceTensor, DeviceView, ExpertRows,
    Fp4Activations, GemmWorkspace, Gpu,
};
use microscale::{
    Activation, Error, Format, Fp4Rows, Fp4Weights, Gate, GlobalScale, OperandFault, QuantizedTensor,
    ScaleLayout, deinterleave_rows, gemm_experts_fp4, gemm_experts_fp4_gated, gemm_fp4, gemm_fp4_gated,
};
use microscale_test_support::operands::{Scales, row_of, tensor};
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
    let most = gpu.fp4_workspace_bytes(weights.shape(), x.shape().rows, false).unwrap();
    assert!(plan.workspace_bytes() <= most);
    let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
    let mut out = stream.alloc_zeros::<T>(x.shape().rows * weights.shape().rows).unwrap();
    // Twice: the workspace must be left as it was found.
    let [first, second] = [(); 2].map(|()| {
        plan.run(stream, &x, &mut workspace, &mut out).unwrap();
        stream.clone_dtoh(&out).unwrap()
    });
    assert!(first.iter().zip(&second).all(|(a, b)| a.bits() == b.bits()));
    second
}

/// Products with other factors of their sums use one workspace in turn. A product that read its
/// factor before the kernel before it has written it would get another product's.
pub(crate) fn products_in_turn_have_their_own_factors(gpu: &Gpu) {
    const TURNS: usize = 60;
    let stream = gpu.stream();
    for (seed, format) in (0..).zip(Format::MULTIPLIED) {
        for (rows, cols, tokens) in [(256, 1024, 64), (2048, 256, 128), (130, 4096, 40), (256, 512, 12)] {
            let x = tensor(format, tokens, cols, Scales::Common, seed);
            let weights = tensor(format, rows, cols, Scales::Common, seed + 1);
            let [x, weights] = [&x, &weights].map(|tensor| DeviceTensor::from_host(stream, tensor).unwrap());
            let linear = gpu.linear_fp4::<bf16, f32>(&weights);
            let plans = [1.0, -0.25].map(|alpha| linear.alpha(alpha).plan(tokens).unwrap());
            let mut workspace = GemmWorkspace::new(stream, plans[0].workspace_bytes()).unwrap();
            let mut outs: Vec<_> =
                (0..TURNS).map(|_| stream.alloc_zeros::<f32>(tokens * rows).unwrap()).collect();
            for (i, out) in outs.iter_mut().enumerate() {
                plans[i % 2].run(stream, &x, &mut workspace, out).unwrap();
            }
            let found: Vec<_> = outs.iter().map(|out| stream.clone_dtoh(out).unwrap()).collect();
            assert!(found[0].iter().any(|y| *y != 0.0));
            for (i, found_then) in found.iter().enumerate() {
                let factor = [1.0, -0.25][i % 2];
                let right = found[0].iter().map(|y| y * factor);
                assert!(
                    found_then.iter().zip(right).all(|(found, right)| *found == right),
                    "{format}, {rows}x{cols}, {tokens} tokens, run {i}"
                );
            }
        }
    }
}

/// Compares with the exact sums. Sums that are not finite are not compared.
fn check<T: Exact + Activation>(gpu: &Gpu, x: &QuantizedTensor, weights: &QuantizedTensor, alpha: f32) {
    let bias: Vec<T> = (0..weights.rows()).map(|row| T::round_f64(row as f64 / 8.0)).collect();
    let found = multiplied::<T>(gpu, x, weights, alpha, &bias);
    let factor = f64::from(fp4_dot::factor(alpha, [x, weights].map(QuantizedTensor::global_scale)));
    let cols = weights.blocks_per_row() * weights.format().block();
    // GPUs without block scales multiply MXFP4 in bf16.
    let bound = match weights.format() {
        Format::Mxfp4 => Bound::of_fp4::<bf16>(cols, LEAST),
        _ => Bound::of_fp4::<T>(cols, LEAST),
    };
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
            check::<f16>(gpu, &x, &weights, 2.0);
            check::<f32>(gpu, &x, &weights, -1.0);
            let bias = vec![bf16::ZERO; rows];
            let [linear, other] = [&x, &x_there].map(|x| multiplied(gpu, x, &weights, 1.0, &bias));
            assert_eq!(linear, other, "{layout:?}");
        }
    }
}

pub(crate) fn has_the_definitions_bits_with_block_scales(gpu: &Gpu) {
    for format in Format::MULTIPLIED {
        // Two work tiles of one K-iteration each, which cannot be split.
        let weights = tensor(format, 300, 128, Scales::Any, 2);
        let x = tensor(format, 9, 128, Scales::Any, 5);
        let factor = fp4_dot::factor(1.0, [&x, &weights].map(QuantizedTensor::global_scale));
        let result = |token: usize, row: usize| {
            let sum = fp4_dot::row(format, row_of(&x, token), row_of(&weights, row));
            f32::round_f64(f64::from(sum) * f64::from(factor))
        };
        let expected: Vec<f32> = (0..9)
            .flat_map(|token| (0..300).map(move |row| (token, row)))
            .map(|(token, row)| result(token, row))
            .collect();
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
}

/// Multiplies by experts in an order, and compares with the CPU's results. Both add in f32, in other
/// orders.
fn check_experts<T: Exact + Activation>(
    gpu: &Gpu,
    format: Format,
    [rows, cols]: [usize; 2],
    order: ExpertRows,
    gated: bool,
) {
    let (stream, top_k, count) = (gpu.stream(), 2, 5);
    let mut random = fastrand::Rng::with_seed(cols as u64);
    let draw = |seed: u64| tensor(format, rows, cols, Scales::Common, 3 * seed + 2);
    let experts: Vec<_> = (0..count).map(draw).collect();
    // Expert 2 has no rows, and numbers from `count` on leave their pairs out.
    let chosen: Vec<u32> = (0..120).map(|_| [0, 0, 0, 1, 3, 4, 5, u32::MAX][random.usize(..8)]).collect();
    let shared = matches!(order, ExpertRows::Gathered | ExpertRows::Indexed);
    let tokens = if shared { chosen.len() / top_k } else { chosen.len() };
    let x = tensor(format, tokens, cols, Scales::Common, 4);
    let x = x.convert_layout(if gated { ScaleLayout::Swizzled } else { ScaleLayout::Linear });
    let own: Vec<_> = (0..count).map(|expert| 0.25 + expert as f32).collect();
    let scales: Vec<_> = own.iter().map(|scale| GlobalScale::Multiplier(*scale)).collect();
    let by_expert = format == Format::Nvfp4 && !shared;
    let x_rows = Fp4Rows::from(&x);
    let x_rows = if by_expert { x_rows.global_scales(&scales) } else { x_rows };

    let results = if gated { rows / 2 } else { rows };
    let mut right = vec![T::of_bits(7); chosen.len() * results];
    if gated {
        let halves: Vec<[QuantizedTensor; 2]> =
            experts.iter().map(|expert| deinterleave_rows(expert).unwrap()).collect();
        let both = halves.iter().map(|halves| halves.each_ref().map(Fp4Weights::from));
        gemm_experts_fp4_gated(both, x_rows, &chosen, top_k, order, Gate::SILU, &mut right).unwrap();
    } else {
        gemm_experts_fp4(&experts, x_rows, &chosen, top_k, order, &mut right).unwrap();
    }

    let there = DeviceExperts::from_host(stream, &experts).unwrap();
    let mut routing = DeviceRouting::zeros(stream, experts.len(), chosen.len() + 3).unwrap();
    gpu.route_on(stream, &stream.clone_htod(&chosen).unwrap(), top_k, &mut routing).unwrap();
    let gate = gated.then_some(Gate::SILU);
    let linear = gpu.linear_experts_fp4::<T, T>(&there);
    let plan =
        linear.epilogue(DeviceEpilogue { gate, ..DeviceEpilogue::default() }).plan(chosen.len()).unwrap();
    assert!(plan.workspace_bytes() <= gpu.experts_fp4_workspace_bytes(&there, chosen.len(), false).unwrap());
    let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
    let x_there = DeviceTensor::from_host(stream, &x).unwrap();
    let mut slots = vec![0; experts.len() * DeviceExpertsView::GLOBAL_SLOT_WORDS];
    for (slot, scale) in slots.chunks_mut(DeviceExpertsView::GLOBAL_SLOT_WORDS).zip(&own) {
        slot[0] = scale.to_bits();
    }
    let slots = stream.clone_htod(&slots).unwrap();
    let rows_there = Fp4Activations::from(&x_there);
    let rows_there =
        if by_expert { rows_there.global_slots(Direction::Multiplier, &slots) } else { rows_there };
    let what = format!("{:?}, {format}, {rows}x{cols}, {order:?}, gate: {gated}", plan.config());
    // Twice: the workspace must be left as it was found.
    for _ in 0..2 {
        let mut out = stream.clone_htod(&vec![T::of_bits(7); right.len()]).unwrap();
        plan.run(stream, rows_there, &routing, order, &mut workspace, &mut out).unwrap();
        let found = stream.clone_dtoh(&out).unwrap();
        let largest = right.iter().map(|y| y.to_f64().abs()).fold(0.0, f64::max);
        for (i, (found, right)) in found.iter().zip(&right).enumerate() {
            let near = found.bits() == right.bits()
                || (found.to_f64() - right.to_f64()).abs() <= right.to_f64().abs() / 64.0 + largest / 1024.0;
            assert!(near, "{what}: {found:?} is not {right:?}: row {}, {}", i / results, i % results);
        }
    }
}

/// Results of activations with a global scale per token are near the CPU's, dense and by expert.
fn check_token_scales<T: Exact + Activation>(gpu: &Gpu, [rows, cols, tokens]: [usize; 3], gated: bool) {
    let (stream, top_k) = (gpu.stream(), 2);
    let gate = gated.then_some(Gate::SILU);
    let results = if gated { rows / 2 } else { rows };
    let experts: Vec<_> =
        (0..4).map(|seed| tensor(Format::Nvfp4, rows, cols, Scales::Common, 3 * seed + 2)).collect();
    let halves: Vec<[QuantizedTensor; 2]> =
        experts.iter().map(|expert| deinterleave_rows(expert).unwrap()).collect();
    let x = tensor(Format::Nvfp4, tokens, cols, Scales::Common, 4);
    let x = x.convert_layout(if gated { ScaleLayout::Swizzled } else { ScaleLayout::Linear });
    let scales: Vec<f32> = (0..tokens).map(|token| 0.25 + (token % 7) as f32).collect();
    let x_rows = Fp4Rows::from(&x).token_scales(&scales);
    let mut numbers = fastrand::Rng::with_seed(3);
    let chosen: Vec<u32> = (0..tokens * top_k).map(|_| numbers.u32(..5)).collect();
    let order = ExpertRows::Indexed;
    let mut dense = vec![T::of_bits(7); tokens * results];
    let mut routed = vec![T::of_bits(7); chosen.len() * results];
    if gated {
        let [first, second] = halves[0].each_ref().map(Fp4Weights::from);
        gemm_fp4_gated(x_rows, first.alpha(0.5), second.alpha(0.5), Gate::SILU, &mut dense).unwrap();
        let both = halves.iter().map(|halves| halves.each_ref().map(Fp4Weights::from));
        gemm_experts_fp4_gated(both, x_rows, &chosen, top_k, order, Gate::SILU, &mut routed).unwrap();
    } else {
        gemm_fp4(x_rows, Fp4Weights::from(&experts[0]).alpha(0.5), &mut dense).unwrap();
        gemm_experts_fp4(&experts, x_rows, &chosen, top_k, order, &mut routed).unwrap();
    }
    let near = |what: &str, found: &[T], right: &[T]| {
        let largest = right.iter().map(|y| y.to_f64().abs()).fold(0.0, f64::max);
        for (i, (found, right)) in found.iter().zip(right).enumerate() {
            let difference = (found.to_f64() - right.to_f64()).abs();
            let near =
                found.bits() == right.bits() || difference <= right.to_f64().abs() / 64.0 + largest / 1024.0;
            assert!(
                near,
                "{what}, gate: {gated}: {found:?} is not {right:?}: {}, {}",
                i / results,
                i % results
            );
        }
    };

    let x_there = DeviceTensor::from_host(stream, &x).unwrap();
    let scales = stream.clone_htod(&scales).unwrap();
    let rows_there = Fp4Activations::from(&x_there).token_scales(&scales);
    let weights = DeviceTensor::from_host(stream, &experts[0]).unwrap();
    let epilogue = DeviceEpilogue { gate, ..DeviceEpilogue::default() };
    let linear = gpu.linear_fp4::<T, T>(&weights).global_scale_per_token().alpha(0.5).epilogue(epilogue);
    let plan = linear.plan(tokens).unwrap();
    assert!(plan.workspace_bytes() <= gpu.fp4_workspace_bytes(weights.shape(), tokens, true).unwrap());
    let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
    let mut out = stream.clone_htod(&vec![T::of_bits(7); dense.len()]).unwrap();
    for _ in 0..2 {
        plan.run(stream, rows_there, &mut workspace, &mut out).unwrap();
    }
    near("dense", &stream.clone_dtoh(&out).unwrap(), &dense);
    let error = plan.run(stream, &x_there, &mut workspace, &mut out).unwrap_err();
    assert!(matches!(error, Error::Operands(OperandFault::TokenScales { .. })), "{error}");
    let plain = gpu.linear_fp4::<T, T>(&weights).plan(tokens).unwrap();
    let error = plain.run(stream, rows_there, &mut workspace, &mut out).unwrap_err();
    assert!(matches!(error, Error::Operands(OperandFault::TokenScales { .. })), "{error}");

    let there = DeviceExperts::from_host(stream, &experts).unwrap();
    let mut routing = DeviceRouting::zeros(stream, experts.len(), chosen.len()).unwrap();
    gpu.route_on(stream, &stream.clone_htod(&chosen).unwrap(), top_k, &mut routing).unwrap();
    let linear = gpu.linear_experts_fp4::<T, T>(&there).global_scale_per_token().epilogue(epilogue);
    let plan = linear.plan(chosen.len()).unwrap();
    let most = gpu.experts_fp4_workspace_bytes(&there, chosen.len(), true).unwrap();
    assert!(plan.workspace_bytes() <= most);
    let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
    let mut out = stream.clone_htod(&vec![T::of_bits(7); routed.len()]).unwrap();
    plan.run(stream, rows_there, &routing, order, &mut workspace, &mut out).unwrap();
    near("experts", &stream.clone_dtoh(&out).unwrap(), &routed);
}

pub(crate) fn takes_global_scales_per_token(gpu: &Gpu) {
    for (shape, gated) in [([300, 128, 5], false), ([40, 1024, 60], true), ([6, 48, 9], false)] {
        check_token_scales::<bf16>(gpu, shape, gated);
        check_token_scales::<f16>(gpu, shape, gated);
        check_token_scales::<f32>(gpu, shape, gated);
    }
    let stream = gpu.stream();
    let mxfp4 = tensor(Format::Mxfp4, 3, 64, Scales::Common, 1);
    let mxfp4 = DeviceTensor::from_host(stream, &mxfp4).unwrap();
    let error = gpu.linear_fp4::<bf16, bf16>(&mxfp4).global_scale_per_token().plan(2).map(drop).unwrap_err();
    assert!(matches!(error, Error::NoGlobalScale { .. }), "{error}");
}

pub(crate) fn experts_are_near_the_cpus(gpu: &Gpu) {
    let orders = [
        ExpertRows::Gathered,
        ExpertRows::Sorted,
        ExpertRows::Scattered,
        ExpertRows::Indexed,
        ExpertRows::Paired,
    ];
    for format in Format::MULTIPLIED {
        for order in orders {
            // Experts that start on whole words of scales, and ragged ones.
            for (size, gated) in [([300, 128], false), ([40, 1024], true), ([6, 48], false), ([30, 80], true)]
            {
                check_experts::<bf16>(gpu, format, size, order, gated);
                check_experts::<f16>(gpu, format, size, order, gated);
                check_experts::<f32>(gpu, format, size, order, gated);
            }
        }
    }
}
