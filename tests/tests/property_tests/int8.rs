//! Tests products of weights and activations that are rounded to INT8.
//!
//! Results must have the bits of the definition on every instruction set, and be within its bounds.

use half::{bf16, f16};
use microscale::cpu::{Isa, gemm_weights_int8_with};
use microscale::formats::weights::GROUP;
use microscale::formats::{E4m3, E8m0, int8};
use microscale::{
    Activation, ActivationRounding, Device, Error, Format, OperandFault, QuantizedShape, QuantizedTensor,
    ScaleLayout, Shape, Words, gemm_weights_int8,
};
use microscale_test_support::arithmetic::Scalars;
use microscale_test_support::operands::{Scales, tensor};
use microscale_test_support::oracle::{self, Exact, dot};
use microscale_test_support::weights::{Activations, activations, near};
use proptest::prelude::*;

use super::inputs::{instruction_sets, runs};

/// Multiplies, and checks that nothing is written after the results.
fn multiplied<T: Exact + Activation>(isa: Isa, weights: &QuantizedTensor, x: &[T], tokens: usize) -> Vec<T> {
    let mut found = vec![T::of_bits(0x1234); weights.rows() * tokens + 1];
    gemm_weights_int8_with(isa, weights, x, tokens, &mut found).expect("operands that fit");
    assert_eq!(found.pop().expect("one more").bits(), 0x1234, "{isa:?} wrote too much");
    found
}

fn bits<T: Exact>(values: &[T]) -> Vec<u32> {
    values.iter().map(|x| x.bits()).collect()
}

/// A token's blocks: their scales and codes.
fn blocks<T: Exact>(x: &[T]) -> Vec<(f32, [i8; int8::BLOCK])> {
    let x: Vec<f32> = x.iter().map(|x| x.to_f64() as f32).collect();
    x.chunks(int8::BLOCK).map(int8::quantize).collect()
}

/// The result of a row and a token by the definition.
fn definition<T: Exact>(weights: &QuantizedTensor, row: usize, x: &[T]) -> T {
    let (format, blocks) = (weights.format(), blocks(x));
    let per_row = weights.blocks_per_row();
    let codes = &weights.codes()[row * per_row * format.block_bytes()..][..per_row * format.block_bytes()];
    let scales = &weights.scales()[row * per_row..][..per_row];
    let mut lanes = [0.0; int8::LANES];
    for (group, codes) in codes.chunks(GROUP / 2).enumerate() {
        let (scale, x) = &blocks[group / 2];
        let sum = int8::twice_sum(codes, &x[group % 2 * GROUP..]);
        let (lane, byte) = (&mut lanes[group % int8::LANES], scales[group * GROUP / format.block()]);
        *lane = match format {
            Format::Nvfp4 => int8::add_nvfp4::<Scalars>(*lane, sum, E4m3::from_bits(byte), *scale),
            _ => int8::add_mxfp4::<Scalars>(*lane, sum, E8m0::from_bits(byte), *scale),
        };
    }
    let total = f64::from(int8::total(lanes)) * int8::factor(format);
    T::round_f64(dot::under(total, weights.global_scale()))
}

/// Checks that a result is within the bound of the exact product with rounded activations.
///
/// Returns the largest error that rounding the activations may cause.
fn check_bound<T: Exact>(weights: &QuantizedTensor, row: usize, x: &[T], found: T) -> Option<f64> {
    let blocks = blocks(x);
    let (mut sum, mut magnitudes, mut rounding) = (0.0, 0.0, 0.0);
    for (i, ((weight, scale), x)) in dot::elements(weights, row).zip(x).enumerate() {
        let (by, codes) = &blocks[i / int8::BLOCK];
        let (weight, rounded) = (weight * scale, f64::from(*by) * f64::from(codes[i % int8::BLOCK]));
        sum += weight * rounded;
        magnitudes += (weight * rounded).abs();
        let step = if *by == 0.0 { 2f64.powi(-119) } else { (0.5 + 2f64.powi(-15)) * f64::from(*by) };
        // The scale is rounded, by less than this.
        let step = step * (1.0 + 2f64.powi(-23));
        assert!(!by.is_finite() || (x.to_f64() - rounded).abs() <= step, "{x:?} is not {rounded}");
        rounding += step * weight.abs();
    }
    if !magnitudes.is_finite() || magnitudes > 2f64.powi(125) {
        return None;
    }
    let cols = weights.cols();
    let lost = if weights.format() == Format::Nvfp4 { -143 } else { -152 };
    // A unit of f64's sums is lost as well.
    let gamma = int8::gamma(cols) + cols as f64 * 2f64.powi(-52);
    let error = gamma * magnitudes + cols.div_ceil(GROUP) as f64 * 2f64.powi(lost);
    let under = |sum| dot::under(sum, weights.global_scale());
    if under(error) > T::LARGEST {
        return None;
    }
    let what = format!("row {row} of {:?}", weights.shape());
    near(found, under(sum), under(error)).unwrap_or_else(|wrong| panic!("{wrong}, {what}"));
    Some(under(rounding + error))
}

/// Checks a product on every instruction set.
fn check<T: Exact + Activation>(weights: &QuantizedTensor, x: &[T], tokens: usize) {
    let cols = weights.cols();
    let expected: Vec<T> = (0..tokens)
        .flat_map(|token| {
            let x = &x[token * cols..][..cols];
            (0..weights.rows()).map(move |row| definition(weights, row, x))
        })
        .collect();
    for isa in instruction_sets() {
        let found = multiplied(isa, weights, x, tokens);
        assert_eq!(
            bits(&found),
            bits(&expected),
            "{isa:?}, {} {:?} {tokens}",
            T::DTYPE.word(),
            weights.shape()
        );
    }
    for (i, found) in expected.iter().enumerate() {
        let (token, row) = (i / weights.rows(), i % weights.rows());
        check_bound(weights, row, &x[token * cols..][..cols], *found);
    }
}

fn check_all(weights: &QuantizedTensor, tokens: usize, kind: Activations, random: &mut fastrand::Rng) {
    let count = tokens * weights.cols();
    check::<f32>(weights, &activations(count, kind, random), tokens);
    check::<f16>(weights, &activations(count, kind, random), tokens);
    check::<bf16>(weights, &activations(count, kind, random), tokens);
}

#[test]
fn every_instruction_set_has_the_bits_of_the_definition() {
    let mut random = fastrand::Rng::with_seed(9);
    let mut seed = 0;
    for format in Format::MULTIPLIED {
        for cols in [1, 16, 32, 48, 100, 256, 272, 500, 1040, 2100] {
            for (rows, tokens) in
                [(5, 1), (3, 2), (1, 5), (17, 8), (33, 3), (49, 7), (16, 13), (50, 29), (2, 270)]
            {
                for (kind, scales) in [
                    (Activations::Common, Scales::Common),
                    (Activations::Numbers, Scales::Numbers),
                    (Activations::Tiny, Scales::Common),
                    (Activations::Any, Scales::Any),
                ] {
                    seed += 1;
                    if rows * cols * tokens < 1 << 18 {
                        check_all(&tensor(format, rows, cols, scales, seed), tokens, kind, &mut random);
                    }
                }
            }
        }
    }
}

/// The error against exact activations is within the documented bound of rounding them.
#[test]
fn rounding_activations_loses_at_most_half_a_step_each() {
    let mut random = fastrand::Rng::with_seed(10);
    for format in Format::MULTIPLIED {
        let weights = tensor(format, 40, 700, Scales::Common, 3);
        let x: Vec<f32> = activations(700, Activations::Common, &mut random);
        let exact: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
        for (row, found) in multiplied(Isa::best(), &weights, &x, 1).into_iter().enumerate() {
            let most = check_bound(&weights, row, &x, found).expect("common numbers");
            let exact = dot::under(dot::weighted(&weights, row, &exact).sum.to_f64(), weights.global_scale());
            near(found, exact, most).unwrap_or_else(|wrong| panic!("{wrong}"));
        }
    }
}

#[test]
fn results_do_not_depend_on_threads_or_other_tokens() {
    let mut random = fastrand::Rng::with_seed(4);
    let weights = tensor(Format::Nvfp4, 200, 1300, Scales::Common, 3);
    let mut x: Vec<bf16> = activations(300 * 1300, Activations::Common, &mut random);
    x[7 * 1300 + 5] = bf16::INFINITY;
    for isa in instruction_sets().filter(|isa| *isa != Isa::Reference) {
        let by = |threads, tokens| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| bits(&multiplied(isa, &weights, &x, tokens)))
        };
        let all = by(1, 300);
        for (threads, tokens) in [(2, 300), (3, 1), (3, 2), (7, 15), (2, 20), (1, 259)] {
            assert_eq!(by(threads, tokens), all[..200 * tokens], "{isa:?}, {threads} threads, {tokens}");
        }
    }
}

#[test]
fn scales_far_apart_keep_their_products() {
    // Only the block with the lower scale has nonzero activations.
    let x: Vec<f32> = (0..64).map(|i| if i % 64 < 32 { 0.0 } else { 127.0 }).collect();
    let shape = QuantizedShape::new(Format::Mxfp4, 20, 64);
    for low in [0, 1, 104, 120] {
        for high in [120, 230, 231, 238, 239, 254] {
            let codes = vec![0x22; 20 * 32];
            let weights = QuantizedTensor::from_parts(shape, codes, [high, low].repeat(20));
            let weights = weights.expect("parts that fit");
            let expected = 32.0 * 127.0 * 2f64.powi(i32::from(low) - 127);
            for isa in instruction_sets() {
                assert_eq!(multiplied(isa, &weights, &x, 1), [expected as f32; 20], "{isa:?}, {low}, {high}");
            }
        }
    }
}

#[test]
fn a_nan_scale_affects_only_its_row() {
    for format in Format::MULTIPLIED {
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

/// NaN and infinities are never lost: all results of their tokens are NaN.
#[test]
fn what_is_not_finite_makes_its_tokens_results_nan() {
    for format in Format::MULTIPLIED {
        let weights = tensor(format, 33, 80, Scales::Common, 2);
        let clean: Vec<f32> = (0..9 * 80).map(|i| (i as f32).sin()).collect();
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 31, 79] {
                let mut x = clean.clone();
                x[4 * 80 + place] = bad;
                for isa in instruction_sets() {
                    let mut expected = bits(&multiplied(isa, &weights, &clean, 9));
                    expected[4 * 33..5 * 33].fill(f32::NAN.to_bits());
                    assert_eq!(bits(&multiplied(isa, &weights, &x, 9)), expected, "{isa:?}, {format}, {bad}");
                }
            }
        }
    }
}

#[test]
fn rounding_of_a_device_is_the_functions() {
    let mut random = fastrand::Rng::with_seed(6);
    let weights = tensor(Format::Nvfp4, 20, 300, Scales::Common, 3);
    let x: Vec<f16> = activations(3 * 300, Activations::Common, &mut random);
    let loaded = Device::Cpu.load_weights(&weights).expect("weights that are multiplied");
    let exact = loaded.linear(&x, Shape::new(3, 300)).expect("operands that fit");
    let loaded = loaded.with_activations(ActivationRounding::Int8).expect("a CPU");
    let found = loaded.linear(&x, Shape::new(3, 300)).expect("operands that fit");
    assert_eq!(bits(&found), bits(&multiplied(Isa::best(), &weights, &x, 3)));
    assert_ne!(bits(&found), bits(&exact));
}

#[test]
fn mismatched_operands_are_refused() {
    let weights = tensor(Format::Nvfp4, 6, 64, Scales::Common, 2);
    let multiply = |weights: &QuantizedTensor, x: usize, out: usize| {
        gemm_weights_int8(weights, &vec![1f32; x], 9, &mut vec![0.0; out])
    };
    assert!(multiply(&weights, 9 * 64, 54).is_ok());
    let short = multiply(&weights, 9 * 64 - 1, 54);
    assert!(matches!(short, Err(Error::Length { what: "the activations", .. })), "{short:?}");
    let short = multiply(&weights, 9 * 64, 53);
    assert!(matches!(short, Err(Error::Length { what: "the output", .. })), "{short:?}");
    let swizzled = multiply(&weights.convert_layout(ScaleLayout::Swizzled), 9 * 64, 54);
    assert!(matches!(swizzled, Err(Error::Operands(OperandFault::Layout { .. }))), "{swizzled:?}");
}

proptest! {
    #![proptest_config(runs(40))]

    #[test]
    fn any_shape_is_multiplied(
        mxfp4 in any::<bool>(),
        (rows, cols, tokens) in (1..60usize, 1..1100usize, 1..40usize),
        any_scale in any::<bool>(),
        (kind, seed) in (0..Activations::ALL.len(), any::<u64>()),
    ) {
        let scales = if any_scale { Scales::Any } else { Scales::Numbers };
        let weights = tensor(Format::MULTIPLIED[usize::from(mxfp4)], rows, cols, scales, seed);
        let mut random = fastrand::Rng::with_seed(seed);
        check_all(&weights, tokens, Activations::ALL[kind], &mut random);
    }
}
