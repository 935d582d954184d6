//! Tests products of weights and activations of many tokens.
//!
//! Results must be within the error bound on every instruction set, and equal in every run.

use half::{bf16, f16};
use microscale::cpu::{Isa, gemm_weights_with, gemv_weights_with};
use microscale::{
    Activation, Dtype, Error, Format, OperandFault, QuantizedShape, QuantizedTensor, ScaleLayout, Words,
    gemm_weights,
};
use microscale_test_support::operands::{Scales, tensor};
use microscale_test_support::oracle::{self, Exact};
use microscale_test_support::weights::{Activations, Bound, ExactProducts, Instructions, activations};
use proptest::prelude::*;

use super::inputs::{instruction_sets, runs};

const FORMATS: [Format; 2] = Format::MULTIPLIED;

/// Multiplies, and checks that nothing is written after the results.
fn multiplied<T: Exact + Activation>(isa: Isa, weights: &QuantizedTensor, x: &[T], tokens: usize) -> Vec<T> {
    let mut found = vec![T::of_bits(0x1234); weights.rows() * tokens + 1];
    gemm_weights_with(isa, weights, x, tokens, &mut found).expect("operands that fit");
    assert_eq!(found.pop().expect("one more").bits(), 0x1234, "{isa:?} wrote too much");
    found
}

fn bits<T: Exact>(values: &[T]) -> Vec<u32> {
    values.iter().map(|x| x.bits()).collect()
}

/// Checks a product on every instruction set.
fn check<T: Exact + Activation>(weights: &QuantizedTensor, x: &[T], tokens: usize) {
    let what = format!("{} {:?} {tokens}", T::DTYPE.word(), weights.shape());
    let (cols, rows) = (weights.cols(), weights.rows());
    let expected = multiplied(Isa::Reference, weights, x, tokens);
    for isa in instruction_sets() {
        let found = multiplied(isa, weights, x, tokens);
        let instructions = instructions(isa, T::DTYPE, tokens);
        if isa != Isa::Reference && matches!(instructions, Instructions::Singles) {
            assert_eq!(bits(&found), bits(&expected), "{isa:?}, {what}");
            continue;
        }
        let many = tokens - few(isa, tokens);
        for (part, are_few) in [(0..many, false), (many..tokens, true)] {
            let exact = ExactProducts::of(weights, &x[part.start * cols..part.end * cols], part.len());
            let found = &found[part.start * rows..part.end * rows];
            for row in 0..rows {
                let mut bound = Bound::of_segments(weights, row, instructions);
                if are_few || are_far_apart(weights, row) {
                    let few = Bound::of_definition(weights);
                    bound =
                        bound.or(if T::DTYPE == Dtype::F32 { Bound::of_singles(weights, row) } else { few });
                }
                let near = exact.check_some(found, &bound, |other| other == row);
                near.unwrap_or_else(|wrong| panic!("{wrong}, {isa:?}, {what}, {part:?}"));
            }
        }
    }
}

/// Returns the number of tokens at the end that are multiplied like few tokens.
fn few(isa: Isa, tokens: usize) -> usize {
    let most = match (isa, tokens) {
        (Isa::AmxBf16, 0..16) => 4,
        (Isa::AmxBf16, _) => 0,
        (_, 0..16) => 12,
        _ => 8,
    };
    if tokens % 16 <= most { tokens % 16 } else { 0 }
}

/// Returns the instructions that multiply `tokens` tokens.
fn instructions(isa: Isa, dtype: Dtype, tokens: usize) -> Instructions {
    match (isa, dtype) {
        (Isa::AmxBf16, Dtype::F32) if few(isa, tokens) == 0 => Instructions::Tiles { parts: 3 },
        (Isa::AmxBf16, Dtype::F16) if few(isa, tokens) == 0 => Instructions::Tiles { parts: 2 },
        (Isa::AmxBf16, Dtype::Bf16) if few(isa, tokens) == 0 => Instructions::Tiles { parts: 1 },
        // Without tiles there are no instructions for pairs either.
        (Isa::AmxBf16, Dtype::Bf16) if Isa::available().any(|other| other == isa) => Instructions::Pairs,
        (Isa::Avx512Bf16, Dtype::Bf16) => Instructions::Pairs,
        _ => Instructions::Singles,
    }
}

/// Returns whether a row's scales may be too far apart for segments.
fn are_far_apart(weights: &QuantizedTensor, row: usize) -> bool {
    let blocks = weights.blocks_per_row();
    let scales = &weights.scales()[row * blocks..][..blocks];
    let ends = (scales.iter().min().copied(), scales.iter().max().copied());
    weights.format() == Format::Mxfp4 && ends.1.unwrap_or(0) - ends.0.unwrap_or(0) > 125
}

fn check_all(weights: &QuantizedTensor, tokens: usize, kind: Activations, random: &mut fastrand::Rng) {
    let count = tokens * weights.cols();
    check::<f32>(weights, &activations(count, kind, random), tokens);
    check::<f16>(weights, &activations(count, kind, random), tokens);
    check::<bf16>(weights, &activations(count, kind, random), tokens);
}

#[test]
fn every_instruction_set_is_near_the_exact_sum() {
    let mut random = fastrand::Rng::with_seed(9);
    let mut seed = 0;
    for format in FORMATS {
        for cols in [1, 16, 32, 48, 100, 256, 272, 500, 1040, 4112, 4400] {
            for (rows, tokens) in [
                (5, 1),
                (3, 2),
                (1, 5),
                (3, 8),
                (17, 9),
                (49, 7),
                (17, 13),
                (100, 21),
                (50, 29),
                (50, 130),
                (2, 270),
            ] {
                for (kind, scales) in [
                    (Activations::Common, Scales::Common),
                    (Activations::Numbers, Scales::Numbers),
                    (Activations::Tiny, Scales::Common),
                    (Activations::Any, Scales::Any),
                ] {
                    seed += 1;
                    if rows * cols * tokens < 1 << 20 {
                        check_all(&tensor(format, rows, cols, scales, seed), tokens, kind, &mut random);
                    }
                }
            }
        }
    }
}

#[test]
fn results_do_not_depend_on_threads() {
    let mut random = fastrand::Rng::with_seed(4);
    let weights = tensor(Format::Nvfp4, 200, 1300, Scales::Common, 3);
    let x: Vec<bf16> = activations(300 * 1300, Activations::Common, &mut random);
    for isa in instruction_sets().filter(|isa| *isa != Isa::Reference) {
        let by = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| bits(&multiplied(isa, &weights, &x, 300)))
        };
        let one = by(1);
        for threads in [2, 3, 7] {
            assert_eq!(by(threads), one, "{isa:?}, {threads} threads");
        }
    }
}

/// A token's results depend on other tokens only in whether it counts as one of few.
#[test]
fn results_do_not_depend_on_other_tokens() {
    let mut random = fastrand::Rng::with_seed(5);
    let weights = tensor(Format::Mxfp4, 70, 600, Scales::Common, 3);
    let mut x: Vec<bf16> = activations(48 * 600, Activations::Common, &mut random);
    // One activation is not finite.
    x[7 * 600 + 5] = bf16::INFINITY;
    for isa in instruction_sets() {
        let all = bits(&multiplied(isa, &weights, &x, 48));
        for tokens in 1..48 {
            let few = few(isa, tokens);
            let many = tokens - few;
            let mut expected = all[..many * 70].to_vec();
            expected.extend(bits(&multiplied(isa, &weights, &x[many * 600..], few)));
            assert_eq!(bits(&multiplied(isa, &weights, &x, tokens)), expected, "{isa:?}, {tokens}");
        }
    }
}

#[test]
fn few_tokens_have_the_bits_of_gemv_weights() {
    let mut random = fastrand::Rng::with_seed(6);
    let weights = tensor(Format::Nvfp4, 35, 600, Scales::Common, 3);
    let x: Vec<f32> = activations(41 * 600, Activations::Common, &mut random);
    for isa in instruction_sets() {
        for tokens in 1..=41 {
            let few = few(isa, tokens);
            let first = tokens - few;
            let mut expected = vec![0.0; few * 35];
            gemv_weights_with(isa, &weights, &x[first * 600..], few, &mut expected)
                .expect("operands that fit");
            let found = multiplied(isa, &weights, &x, tokens);
            assert_eq!(bits(&found[first * 35..]), bits(&expected), "{isa:?}, {tokens}");
        }
    }
}

/// f32 activations are not rounded to fewer bits.
#[test]
fn f32_activations_keep_their_precision() {
    for format in FORMATS {
        let shape = QuantizedShape::new(format, 20, 32);
        let (codes, scales) = shape.bytes().expect("a small tensor");
        // Ones, one in each row.
        let mut ones = vec![0; codes];
        ones.chunks_mut(16).for_each(|row| row[5] = 2);
        let scale = if format == Format::Nvfp4 { 0x38 } else { 127 };
        let weights = QuantizedTensor::from_parts(shape, ones, vec![scale; scales]).expect("parts that fit");
        let x: Vec<f32> = (0..25 * 32).map(|i| 1.0 + f32::EPSILON * i as f32).collect();
        for isa in instruction_sets() {
            for (token, found) in multiplied(isa, &weights, &x, 25).chunks(20).enumerate() {
                assert_eq!(found, [x[token * 32 + 10]; 20], "{isa:?}");
            }
        }
    }
}

/// Zero blocks have scale byte 0, whatever the other scales are.
#[test]
fn scales_far_apart_are_exact() {
    let shape = QuantizedShape::new(Format::Mxfp4, 20, 64);
    // Only the block with the lower scale has nonzero activations.
    let x: Vec<f32> = (0..30 * 64).map(|i| if i % 64 < 32 { 0.0 } else { 1.0 }).collect();
    for (low, codes) in [(0, 0x00), (0, 0x11), (1, 0x80), (104, 0x11)] {
        for high in [120, 126, 160, 229, 254] {
            let all = (0..20 * 32).map(|i| if i / 16 % 2 == 0 { 0x22 } else { codes }).collect();
            let weights = QuantizedTensor::from_parts(shape, all, [high, low].repeat(20));
            let weights = weights.expect("parts that fit");
            check(&weights, &x[..6 * 64], 6);
            check(&weights, &x[..18 * 64], 18);
            check(&weights, &x, 30);
            let halves = if codes == 0x11 { 16.0 } else { 0.0 };
            let expected = (halves * 2f64.powi(i32::from(low) - 127)) as f32;
            for isa in instruction_sets() {
                for tokens in [6, 18, 30] {
                    let found = multiplied(isa, &weights, &x, tokens);
                    assert_eq!(found, vec![expected; 20 * tokens], "{isa:?}, {high}, {codes}");
                }
            }
        }
    }
}

#[test]
fn a_nan_scale_affects_only_its_row() {
    for format in FORMATS {
        let clean = tensor(format, 60, 96, Scales::Common, 2);
        let shape = clean.shape();
        let (codes, mut scales) = clean.clone().into_parts();
        scales[7 * shape.blocks_per_row() + 1] = oracle::nan_scale(format);
        let spoilt = QuantizedTensor::from_parts(shape, codes, scales).expect("parts that fit");
        let clean = QuantizedTensor::from_parts(shape, clean.codes().to_vec(), clean.scales().to_vec());
        let clean = clean.expect("parts that fit");
        let x: Vec<bf16> = (0..18 * 96).map(|i| bf16::from_f32(i as f32 - 90.5)).collect();
        for isa in instruction_sets() {
            let mut expected = bits(&multiplied(isa, &clean, &x, 18));
            expected.iter_mut().skip(7).step_by(60).for_each(|y| *y = 0x7FC0);
            assert_eq!(bits(&multiplied(isa, &spoilt, &x, 18)), expected, "{isa:?}, {format}");
        }
    }
}

/// Multiplies partly non-finite activations with a row of sixes and a row of zeros.
fn check_not_finite<T: Exact + Activation>(isa: Isa, weights: &QuantizedTensor, tokens: usize) {
    let mut x = vec![T::round_f64(1.0); 64 * tokens];
    let [infinity, minus_infinity, nan] = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN].map(T::round_f64);
    (x[64 + 40], x[2 * 64 + 40], x[4 * 64 + 40]) = (infinity, minus_infinity, T::of_bits(nan.bits() | 1));
    let found = multiplied(isa, weights, &x, tokens);
    let finite = found[0];
    assert!(finite.to_f64().is_finite());
    let mut expected = [finite, T::round_f64(0.0)].repeat(tokens);
    expected[2..6].copy_from_slice(&[infinity, nan, minus_infinity, nan]);
    expected[8..10].fill(nan);
    assert_eq!(bits(&found), bits(&expected), "{isa:?}, {}, {tokens}", T::DTYPE.word());
}

#[test]
fn non_finite_activations_propagate() {
    for format in FORMATS {
        let shape = QuantizedShape::new(format, 2, 64);
        let (codes, scales) = shape.bytes().expect("a small tensor");
        // Sixes and zeros.
        let codes = (0..codes).map(|i| if i < 32 { 0x77 } else { 0 }).collect();
        let weights = QuantizedTensor::from_parts(shape, codes, vec![0x38; scales]).expect("parts that fit");
        for (isa, tokens) in instruction_sets().flat_map(|isa| [(isa, 6), (isa, 15), (isa, 18)]) {
            check_not_finite::<f32>(isa, &weights, tokens);
            check_not_finite::<f16>(isa, &weights, tokens);
            check_not_finite::<bf16>(isa, &weights, tokens);
        }
    }
}

/// Only the result itself may overflow, for any activations.
#[test]
fn the_largest_activations_do_not_overflow() {
    for (format, scale) in [(Format::Nvfp4, 1), (Format::Mxfp4, 100)] {
        let shape = QuantizedShape::new(format, 2, 96);
        let (codes, scales) = shape.bytes().expect("a small tensor");
        let weights = QuantizedTensor::from_parts(shape, vec![0x77; codes], vec![scale; scales]);
        let weights = weights.expect("parts that fit");
        for tokens in [6, 18, 30] {
            check(&weights, &vec![bf16::MAX; tokens * 96], tokens);
            check(&weights, &vec![f32::MAX; tokens * 96], tokens);
        }
    }
}

#[test]
fn mismatched_operands_are_refused() {
    let weights = tensor(Format::Nvfp4, 6, 64, Scales::Common, 2);
    let multiply = |weights: &QuantizedTensor, x: usize, out: usize| {
        gemm_weights(weights, &vec![1f32; x], 9, &mut vec![0.0; out])
    };
    assert!(multiply(&weights, 9 * 64, 54).is_ok());
    let short = multiply(&weights, 9 * 64 - 1, 54);
    assert!(matches!(short, Err(Error::Length { what: "the activations", .. })), "{short:?}");
    let short = multiply(&weights, 9 * 64, 53);
    assert!(matches!(short, Err(Error::Length { what: "the output", .. })), "{short:?}");
    let swizzled = multiply(&weights.convert_layout(ScaleLayout::Swizzled), 9 * 64, 54);
    let refused = matches!(swizzled, Err(Error::Operands(OperandFault::Layout { what: "weights" })));
    assert!(refused, "{swizzled:?}");
    let wide = QuantizedTensor::zeros(QuantizedShape::new(Format::Mxfp8E4m3, 6, 64)).expect("a small tensor");
    let refused = multiply(&wide, 9 * 64, 54);
    assert!(matches!(refused, Err(Error::Operands(OperandFault::Weights { .. }))), "{refused:?}");
}

proptest! {
    #![proptest_config(runs(40))]

    #[test]
    fn any_shape_is_multiplied(
        mxfp4 in any::<bool>(),
        (rows, cols, tokens) in (1..120usize, 1..1500usize, 1..131usize),
        any_scale in any::<bool>(),
        (kind, seed) in (0..Activations::ALL.len(), any::<u64>()),
    ) {
        let scales = if any_scale { Scales::Any } else { Scales::Numbers };
        let weights = tensor(FORMATS[usize::from(mxfp4)], rows, cols, scales, seed);
        let kind = Activations::ALL[kind];
        let mut random = fastrand::Rng::with_seed(seed);
        check_all(&weights, tokens, kind, &mut random);
    }
}
