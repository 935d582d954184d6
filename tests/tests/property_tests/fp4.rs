//! Tests products of two matrices of FP4.
//!
//! Results must have the bits of the definition on every instruction set, and the definition must
//! be within its bound of the exact sum. So must the sums of tensor cores.

use half::{bf16, f16};
use microscale::cpu::{Isa, gemm_fp4_gated_with, gemm_fp4_with};
use microscale::formats::weights::GROUP;
use microscale::formats::{E2m1x2, E4m3, E8m0, fp4_dot, int8};
use microscale::{
    Activation, Error, Format, Fp4Weights, Gate, OperandFault, QuantizedTensor, ScaleLayout, gemm_fp4,
    gemm_fp4_gated,
};
use microscale_test_support::arithmetic::Scalars;
use microscale_test_support::operands::{Scales, changed, row_of, tensor};
use microscale_test_support::oracle::{self, Exact, dot};
use proptest::prelude::*;

use super::inputs::runs;

/// The exponents of a row's scales, as the rule has them.
fn exponents(tensor: &QuantizedTensor, index: usize) -> impl Iterator<Item = i32> {
    let format = tensor.format();
    row_of(tensor, index).1.iter().map(move |byte| match format {
        Format::Nvfp4 => i32::from(byte >> 3).max(1) - 7,
        _ => i32::from(*byte) - 127,
    })
}

/// Returns the sum of a token and a row by the definition.
fn sum_of_groups(format: Format, x: (&[u8], &[u8]), weights: (&[u8], &[u8])) -> f64 {
    let mut lanes = [0.0; int8::LANES];
    let groups = x.0.chunks(GROUP / 2).zip(weights.0.chunks(GROUP / 2));
    for (group, (x_codes, codes)) in groups.enumerate() {
        let pairs = x_codes.iter().map(|byte| E2m1x2::from_bits(*byte));
        let doubled: Vec<i8> = pairs
            .flat_map(|pair| [pair.low(), pair.high()])
            .map(|code| (2.0 * code.to_f32()) as i8)
            .collect();
        let sum = int8::twice_sum(codes, &doubled);
        let block = group * GROUP / format.block();
        let by = int8::scale_of_twice(format, x.1[block]);
        let lane = &mut lanes[group % int8::LANES];
        *lane = match format {
            Format::Nvfp4 => int8::add_nvfp4::<Scalars>(*lane, sum, E4m3::from_bits(weights.1[block]), by),
            _ => int8::add_mxfp4::<Scalars>(*lane, sum, E8m0::from_bits(weights.1[block]), by),
        };
    }
    f64::from(int8::total(lanes)) * int8::factor(format)
}

/// Returns the sum of a token and a row by the definition, and checks that it and the sum of tensor
/// cores are within their bounds.
fn definition(x: &QuantizedTensor, token: usize, weights: &QuantizedTensor, index: usize) -> f64 {
    let format = weights.format();
    // The elements of the last block after K are multiplied, too.
    let cols = weights.blocks_per_row() * format.block();
    let found = sum_of_groups(format, row_of(x, token), row_of(weights, index));
    let of_tensor_cores = fp4_dot::row(format, row_of(x, token), row_of(weights, index));
    let what = || format!("token {token} of {:?}, row {index} of {:?}", x.shape(), weights.shape());
    let Some((sum, magnitudes)) = dot::quantized(x, token, weights, index) else {
        assert!(found.is_nan(), "{}", what());
        assert_eq!(of_tensor_cores.to_bits(), fp4_dot::NAN, "{}", what());
        return found;
    };
    let (sum, magnitudes) = (sum.to_f64(), magnitudes.to_f64());
    let near = |found: f64, error: f64| {
        assert!((found - sum).abs() <= error, "{found:e} is not {sum:e}: {}", what());
    };
    if magnitudes < 2f64.powi(125) {
        let lost = 2f64.powi(if format == Format::Nvfp4 { -143 } else { -152 });
        near(found, int8::gamma(cols) * magnitudes + cols.div_ceil(GROUP) as f64 * lost);
        let pairs = exponents(x, token).zip(exponents(weights, index));
        let largest = pairs.map(|(a, b)| a + b).max().map_or(0.0, |exponent| 2f64.powi(exponent));
        let error = fp4_dot::gamma(cols) * magnitudes + fp4_dot::delta(cols, largest);
        near(f64::from(of_tensor_cores), error);
    }
    found
}

/// Returns the results before rounding, by token.
fn results(x: &QuantizedTensor, weights: &QuantizedTensor, alpha: f32, bias: &[f32]) -> Vec<f64> {
    let all = (0..x.rows()).flat_map(|token| (0..weights.rows()).map(move |row| (token, row)));
    let under = |sum| dot::under(dot::under(sum, x.global_scale()), weights.global_scale());
    let factor = f64::from(under(f64::from(alpha)) as f32);
    let bias = |row: usize| bias.get(row).map_or(0.0, |bias| f64::from(*bias));
    let result = |(token, row)| definition(x, token, weights, row) * factor + bias(row);
    all.map(result).collect()
}

fn rounded<T: Exact>(results: &[f64]) -> Vec<u32> {
    results.iter().map(|y| T::round_f64(*y).bits()).collect()
}

/// Checks that a product writes these bits, and nothing after them.
fn check_bits<T: Exact>(expected: &[u32], what: &str, multiply: impl FnOnce(&mut [T])) {
    let mut found = vec![T::of_bits(0x1234); expected.len() + 1];
    multiply(&mut found);
    assert_eq!(found.pop().expect("one more").bits(), 0x1234, "wrote too much, {what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.bits(), *expected, "result {i}, {what}");
    }
}

/// Checks a product on every instruction set.
fn check<T: Exact + Activation>(x: &QuantizedTensor, weights: &QuantizedTensor) {
    let expected = rounded::<T>(&results(x, weights, 1.0, &[]));
    for isa in Isa::available() {
        let what = format!("{isa:?}: {:?} by {:?}", x.shape(), weights.shape());
        check_bits::<T>(&expected, &what, |out| {
            gemm_fp4_with(isa, x, weights, out).expect("operands that fit");
        });
    }
}

/// Returns the tensor with scales whose results 16 bits have: in MXFP4, of eight exponents.
fn narrow(tensor: QuantizedTensor) -> QuantizedTensor {
    let format = tensor.format();
    changed(tensor, |_, scales| {
        for scale in scales.iter_mut().filter(|_| format == Format::Mxfp4) {
            *scale = 120 + *scale % 8;
        }
    })
}

/// Returns the tensor with every second k-step like the one before it, and the signs of all codes
/// changed except for a few.
fn cancelling(tensor: QuantizedTensor, seed: u64) -> QuantizedTensor {
    let mut random = fastrand::Rng::with_seed(seed);
    let (row_bytes, blocks) =
        (tensor.blocks_per_row() * tensor.format().block_bytes(), tensor.blocks_per_row());
    let step_blocks = fp4_dot::STEP / tensor.format().block();
    changed(tensor, |codes, scales| {
        for codes in codes.chunks_mut(row_bytes) {
            for pair in codes.chunks_exact_mut(fp4_dot::STEP) {
                let (first, second) = pair.split_at_mut(fp4_dot::STEP / 2);
                for (first, second) in first.iter().zip(second) {
                    *second = first ^ if random.u8(..) == 0 { 0x80 } else { 0x88 };
                }
            }
        }
        for scales in scales.chunks_mut(blocks) {
            for pair in scales.chunks_exact_mut(2 * step_blocks) {
                pair.copy_within(..step_blocks, step_blocks);
            }
        }
    })
}

/// Returns the tensor with every second k-step like the one before it.
fn repeating(tensor: QuantizedTensor) -> QuantizedTensor {
    let row_bytes = tensor.blocks_per_row() * tensor.format().block_bytes();
    let (blocks, step_blocks) = (tensor.blocks_per_row(), fp4_dot::STEP / tensor.format().block());
    changed(tensor, |codes, scales| {
        for pair in codes.chunks_mut(row_bytes).flat_map(|codes| codes.chunks_exact_mut(fp4_dot::STEP)) {
            pair.copy_within(..fp4_dot::STEP / 2, fp4_dot::STEP / 2);
        }
        for pair in scales.chunks_mut(blocks).flat_map(|scales| scales.chunks_exact_mut(2 * step_blocks)) {
            pair.copy_within(..step_blocks, step_blocks);
        }
    })
}

#[test]
fn every_instruction_set_has_the_bits_of_the_definition() {
    let mut seed = 0;
    for format in Format::MULTIPLIED {
        for cols in [1, 16, 48, 64, 80, 256, 300, 1024, 2064] {
            for (tokens, rows) in [(1, 1), (3, 17), (7, 5), (8, 16), (21, 33)] {
                for scales in
                    [Scales::Common, Scales::Numbers, Scales::Any, Scales::Largest, Scales::Smallest]
                {
                    seed += 1;
                    let x = tensor(format, tokens, cols, scales, seed);
                    let weights = tensor(format, rows, cols, scales, seed / 3);
                    check::<f32>(&x, &weights);
                    check::<bf16>(&narrow(x), &narrow(weights));
                }
            }
        }
    }
}

/// Small accumulators of tensor cores lose bits next to large scales.
#[test]
fn sums_that_cancel_have_the_bits_of_the_definition() {
    for format in Format::MULTIPLIED {
        for seed in 0..20 {
            for scales in [Scales::Common, Scales::Numbers] {
                let x = cancelling(narrow(tensor(format, 9, 1100, scales, seed)), seed);
                let weights = repeating(narrow(tensor(format, 18, 1100, scales, seed + 1)));
                check::<f32>(&x, &weights);
            }
        }
    }
}

/// Zeros, whose scales count all the same.
#[test]
fn blocks_rows_and_tokens_of_zeros_are_multiplied() {
    for format in Format::MULTIPLIED {
        let zeros = |tensor: QuantizedTensor, every: usize| {
            let blocks = tensor.blocks_per_row();
            changed(tensor, |codes, scales| {
                for (i, codes) in codes.chunks_mut(format.block_bytes()).enumerate() {
                    if i % every == 0 || i / blocks == 2 {
                        codes.fill(0x80);
                        scales[i] = [0, scales[i], oracle::nan_scale(format) - 1][i % 3];
                    }
                }
            })
        };
        for seed in 0..6 {
            let x = zeros(narrow(tensor(format, 11, 640, Scales::Common, seed)), 5);
            let weights = zeros(narrow(tensor(format, 19, 640, Scales::Common, seed + 1)), 3);
            check::<f32>(&x, &weights);
        }
    }
}

#[test]
fn a_nan_scale_affects_only_its_row_or_token() {
    for format in Format::MULTIPLIED {
        let spoilt = |tensor: QuantizedTensor, row: usize| {
            let blocks = tensor.blocks_per_row();
            changed(tensor, |_, scales| scales[row * blocks + 1] = oracle::nan_scale(format))
        };
        let (x, weights) =
            (tensor(format, 5, 320, Scales::Common, 1), tensor(format, 20, 320, Scales::Common, 4));
        let mut clean = vec![0f32; 100];
        gemm_fp4(&x, &weights, &mut clean).expect("operands that fit");
        let (x, weights) = (spoilt(x, 3), spoilt(weights, 7));
        for isa in Isa::available() {
            let mut found = vec![0f32; 100];
            gemm_fp4_with(isa, &x, &weights, &mut found).expect("operands that fit");
            for (i, (found, clean)) in found.iter().zip(&clean).enumerate() {
                let expected = if i / 20 == 3 || i % 20 == 7 { 0x7FC0_0000 } else { clean.to_bits() };
                assert_eq!(found.to_bits(), expected, "{isa:?}, {format}, {i}");
            }
        }
    }
}

#[test]
fn swizzled_scales_alpha_bias_and_gate_follow_the_sum() {
    let mut random = fastrand::Rng::with_seed(3);
    for format in Format::MULTIPLIED {
        let x = narrow(tensor(format, 13, 208, Scales::Common, 3));
        let [gate, up] = [4, 6].map(|seed| narrow(tensor(format, 37, 208, Scales::Common, seed)));
        let bias: Vec<f32> = (0..37).map(|_| random.f32() * 100.0 - 50.0).collect();
        let both = [results(&x, &gate, 0.3, &bias), results(&x, &up, 1.0, &[])];
        let gated = |(gate, up): (&f64, &f64)| {
            f64::from(Gate::GPT_OSS.of::<Scalars>(f32::round_f64(*gate), f32::round_f64(*up)))
        };
        let combined: Vec<f64> = both[0].iter().zip(&both[1]).map(gated).collect();
        let layouts = [ScaleLayout::Linear, ScaleLayout::Swizzled];
        for (i, j) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
            let x = x.convert_layout(layouts[i]);
            let (gate, up) = (gate.convert_layout(layouts[j]), up.convert_layout(layouts[i]));
            let weights = Fp4Weights::from(&gate).alpha(0.3).bias(&bias);
            for isa in Isa::available() {
                check_bits::<f16>(&rounded::<f16>(&both[0]), "bias", |out| {
                    gemm_fp4_with(isa, &x, weights, out).expect("operands that fit");
                });
                check_bits::<bf16>(&rounded::<bf16>(&combined), "gate", |out| {
                    let both = [weights, Fp4Weights::from(&up)];
                    gemm_fp4_gated_with(isa, &x, both, Gate::GPT_OSS, out).expect("operands that fit");
                });
            }
        }
    }
}

/// More tokens than are multiplied together.
#[test]
fn many_tokens_have_the_bits_of_few() {
    for format in Format::MULTIPLIED {
        check::<bf16>(
            &narrow(tensor(format, 300, 128, Scales::Common, 5)),
            &narrow(tensor(format, 18, 128, Scales::Common, 6)),
        );
    }
}

#[test]
fn mismatched_operands_are_refused() {
    let weights = tensor(Format::Nvfp4, 6, 64, Scales::Common, 2);
    let fault = |x: &QuantizedTensor, up: &QuantizedTensor, bias: &[f32], out: usize| {
        let gate = Fp4Weights::from(&weights).bias(bias);
        let found = gemm_fp4_gated(x, gate, up, Gate::SILU, &mut vec![0f32; out]);
        match found.expect_err("operands that do not fit") {
            Error::Operands(fault) => fault.to_string(),
            Error::Length { what, expected, found, .. } => format!("{what}: {expected}, {found}"),
            other => panic!("{other}"),
        }
    };
    let (other, short) =
        (tensor(Format::Mxfp4, 2, 64, Scales::Common, 2), tensor(Format::Nvfp4, 2, 48, Scales::Common, 2));
    let formats = OperandFault::Formats { matrix: Format::Nvfp4, vector: Format::Mxfp4 }.to_string();
    assert_eq!(fault(&other, &weights, &[0.0; 6], 12), formats);
    let columns = OperandFault::Activations { weights: 64, activations: 48 }.to_string();
    assert_eq!(fault(&short, &weights, &[0.0; 6], 12), columns);
    let x = tensor(Format::Nvfp4, 2, 64, Scales::Common, 2);
    assert_eq!(
        fault(&x, &x, &[0.0; 6], 12),
        "the gate has 6 rows and up has 2; both must have the same number"
    );
    assert_eq!(fault(&x, &weights, &[0.0; 5], 12), "the bias: 6, 5");
    assert_eq!(fault(&x, &weights, &[0.0; 6], 11), "the output: 12, 11");
}

proptest! {
    #![proptest_config(runs(60))]

    #[test]
    fn any_shape_is_multiplied(
        mxfp4 in any::<bool>(),
        (tokens, rows) in (1..40usize, 1..40usize),
        cols in 1..1500usize,
        kind in 0..4usize,
        seed in any::<u64>(),
    ) {
        let format = Format::MULTIPLIED[usize::from(mxfp4)];
        let scales = [Scales::Common, Scales::Numbers, Scales::Any, Scales::Numbers][kind];
        let (x, weights) = (tensor(format, tokens, cols, scales, seed), tensor(format, rows, cols, scales, seed / 3));
        if kind == 3 {
            check::<f32>(&cancelling(narrow(x), seed), &repeating(narrow(weights)));
        } else {
            check::<f16>(&x, &weights);
            check::<f32>(&narrow(x), &narrow(weights));
        }
    }
}
