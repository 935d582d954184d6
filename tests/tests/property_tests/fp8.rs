//! Tests products of 4-bit weights and FP8 activations.
//!
//! Results must have the bits of the definition on every instruction set. The definition's bound is
//! tested next to it.

use half::{bf16, f16};
use microscale::cpu::{Isa, gemm_experts_fp8_with, gemm_weights_fp8_with};
use microscale::formats::{E4m3, fp8_dot};
use microscale::{
    Activation, ActivationFormat, ActivationInput, ActivationRecipe, Error, ExpertRows, Format, Fp8Options,
    Fp8Rows, Fp8Scale, OperandFault, QuantizedActivations, QuantizedShape, QuantizedTensor, ScaleLayout,
    Shape, gemm_experts_fp8, gemm_weights_fp8, quantize_activations,
};
use microscale_test_support::arithmetic::Scalars;
use microscale_test_support::operands::{Scales, changed, tensor};
use microscale_test_support::oracle::{self, Exact, dot};
use microscale_test_support::weights::{Activations, activations};
use proptest::prelude::*;

use super::inputs::{instruction_sets, runs};

/// Marks results that were not written.
const UNTOUCHED: u32 = 0x1234;

fn options(per_group: bool) -> Fp8Options {
    Fp8Options { per_group, round_weights: true, ..Fp8Options::default() }
}

/// Returns random codes and scales of activations. Some codes are NaN if `nan` is set.
fn quantized(
    tokens: usize,
    cols: usize,
    per_group: bool,
    nan: bool,
    random: &mut fastrand::Rng,
) -> QuantizedActivations {
    let mut code = || loop {
        let code = random.u8(..);
        if !E4m3::from_bits(code).is_nan() || nan && random.u8(..) < 8 {
            return code;
        }
    };
    let codes = (0..tokens * cols).map(|_| code()).collect();
    let each = if per_group { cols.div_ceil(128).max(1) } else { 1 };
    let f32_scales = (0..tokens * each).map(|_| random.f32() * 0.1).collect();
    QuantizedActivations { codes, scales: Vec::new(), f32_scales }
}

fn as_rows<T>(x: &QuantizedActivations) -> Fp8Rows<'_, T> {
    Fp8Rows::Quantized { codes: &x.codes, scales: &x.f32_scales }
}

/// Returns the bits of all results by the definition, by token.
fn defined<T: Exact>(weights: &QuantizedTensor, x: &QuantizedActivations, tokens: usize) -> Vec<u32> {
    let (format, cols, blocks) = (weights.format(), weights.cols(), weights.blocks_per_row());
    let bytes = blocks * format.block_bytes();
    let codes: Vec<_> = x.codes.iter().map(|code| E4m3::from_bits(*code)).collect();
    let each = x.f32_scales.len() / tokens.max(1);
    let result = |token: usize, row: usize| {
        let scales = match &x.f32_scales[token * each..][..each] {
            [scale] => fp8_dot::Scales::Token(*scale),
            scales => fp8_dot::Scales::Packs(scales),
        };
        let of_row = fp8_dot::Weights {
            format,
            codes: &weights.codes()[row * bytes..][..bytes],
            scales: &weights.scales()[row * blocks..][..blocks],
        };
        let sum = fp8_dot::row::<Scalars>(of_row, &codes[token * cols..][..cols], scales);
        T::round_f64(dot::under(f64::from(sum), weights.global_scale())).bits()
    };
    (0..tokens).flat_map(|token| (0..weights.rows()).map(move |row| result(token, row))).collect()
}

/// Checks a product on every instruction set. Nothing may be written after the results.
fn check<T: Exact + Activation>(
    weights: &QuantizedTensor,
    x: &QuantizedActivations,
    tokens: usize,
    per_group: bool,
) {
    let mut expected = defined::<T>(weights, x, tokens);
    expected.push(UNTOUCHED);
    for isa in instruction_sets() {
        let mut found = vec![T::of_bits(UNTOUCHED); expected.len()];
        gemm_weights_fp8_with(isa, weights, as_rows(x), tokens, options(per_group), &mut found)
            .expect("operands that fit");
        let found: Vec<_> = found.iter().map(|y| y.bits()).collect();
        let what = format!("{isa:?}, {:?}, {tokens} tokens, per group: {per_group}", weights.shape());
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found, expected, "result {i}, {what}");
        }
    }
}

#[test]
fn every_instruction_set_has_the_bits_of_the_definition() {
    let mut random = fastrand::Rng::with_seed(3);
    let mut seed = 0;
    for format in Format::MULTIPLIED {
        for cols in [1, 16, 31, 48, 128, 130, 260, 512, 1100] {
            for (tokens, rows) in [(1, 1), (3, 17), (5, 8), (21, 9)] {
                // Blocks are left out where scales differ widely, as in `Numbers`.
                for scales in [Scales::Common, Scales::Numbers, Scales::Any, Scales::Smallest] {
                    seed += 1;
                    let per_group = seed % 2 == 0;
                    let weights = tensor(format, rows, cols, scales, seed);
                    let x = quantized(tokens, cols, per_group, seed % 3 == 0, &mut random);
                    check::<f32>(&weights, &x, tokens, per_group);
                    check::<bf16>(&weights, &x, tokens, per_group);
                }
            }
        }
    }
}

/// Large sums next to small terms, sums that cancel, and the largest and smallest terms.
#[test]
fn sums_that_lose_bits_have_the_bits_of_the_definition() {
    let mut random = fastrand::Rng::with_seed(4);
    for format in Format::MULTIPLIED {
        for kind in 0..4 {
            let weights = changed(tensor(format, 16, 640, Scales::Common, 2), |codes, scales| {
                if kind == 0 {
                    codes.fill(0x77);
                    scales.fill(oracle::nan_scale(format) - 1);
                }
            });
            let mut x = quantized(4, 640, false, false, &mut random);
            for (i, code) in x.codes.iter_mut().enumerate() {
                *code = match kind {
                    0 => 0x7E,
                    1 => *code & 0x87,
                    // The second half of a k-step undoes the first, except for small terms.
                    2 => (if i % 32 < 16 { 0x7E } else { 0xFE }) - u8::from(i % 37 == 0),
                    _ => {
                        if i % 128 < 32 {
                            0x7E
                        } else {
                            *code & 0x9F
                        }
                    }
                };
            }
            check::<f32>(&weights, &x, 4, false);
        }
    }
}

/// Values are quantized as by the library's quantizer, per token and per group.
#[test]
fn values_are_quantized_first() {
    let mut random = fastrand::Rng::with_seed(5);
    fn check_dtype<T: Exact + Activation>(cols: usize, per_group: bool, random: &mut fastrand::Rng) {
        for kind in [Activations::Common, Activations::Any] {
            let weights = tensor(Format::Mxfp4, 11, cols, Scales::Common, 2);
            let x: Vec<T> = activations(7 * cols, kind, random);
            let many = per_group && cols > 128;
            let scale = if many { Fp8Scale::PerGroup { power_of_two: false } } else { Fp8Scale::PerToken };
            let recipe = ActivationRecipe::new(ActivationFormat::Fp8(scale));
            let codes = quantize_activations(ActivationInput::new(&x, Shape::new(7, cols)), &recipe);
            let expected = defined::<T>(&weights, &codes.expect("values"), 7);
            let mut out = vec![T::default(); 77];
            let options = Fp8Options { per_group, ..Fp8Options::default() };
            gemm_weights_fp8(&weights, Fp8Rows::Values(&x), 7, options, &mut out).expect("operands that fit");
            let found: Vec<_> = out.iter().map(|y| y.bits()).collect();
            assert_eq!(found, expected, "{cols} columns, per group: {per_group}");
        }
    }
    for cols in [64, 200, 256] {
        for per_group in [false, true] {
            check_dtype::<f32>(cols, per_group, &mut random);
            check_dtype::<f16>(cols, per_group, &mut random);
            check_dtype::<bf16>(cols, per_group, &mut random);
        }
    }
}

#[test]
fn nan_affects_only_its_row_or_token() {
    let mut random = fastrand::Rng::with_seed(6);
    for format in Format::MULTIPLIED {
        let weights = changed(tensor(format, 20, 320, Scales::Common, 2), |_, scales| {
            let blocks = scales.len() / 20;
            scales[7 * blocks + 1] = oracle::nan_scale(format);
        });
        let mut x = quantized(5, 320, false, false, &mut random);
        x.codes[3 * 320 + 319] = 0xFF;
        for isa in Isa::available() {
            let mut out = vec![0f32; 100];
            gemm_weights_fp8_with(isa, &weights, as_rows(&x), 5, options(false), &mut out)
                .expect("operands that fit");
            for (i, y) in out.iter().enumerate() {
                assert_eq!(y.is_nan(), i / 20 == 3 || i % 20 == 7, "{isa:?}, {format}, result {i}: {y}");
            }
        }
    }
}

/// More tokens than share a decoding of the weights.
#[test]
fn results_do_not_depend_on_threads() {
    let mut random = fastrand::Rng::with_seed(7);
    let weights = tensor(Format::Mxfp4, 90, 256, Scales::Common, 2);
    let x = quantized(300, 256, true, false, &mut random);
    let expected = defined::<f32>(&weights, &x, 300);
    for threads in [1, 2, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        let mut out = vec![0f32; 300 * 90];
        pool.install(|| gemm_weights_fp8(&weights, as_rows(&x), 300, options(true), &mut out))
            .expect("operands that fit");
        let found: Vec<_> = out.iter().map(|y| y.to_bits()).collect();
        assert!(found == expected, "{threads} threads");
    }
}

#[test]
fn experts_have_the_results_of_their_own_products() {
    let mut random = fastrand::Rng::with_seed(8);
    let (rows, cols, top_k) = (19, 200, 2);
    for (format, per_group) in [(Format::Mxfp4, true), (Format::Nvfp4, false)] {
        let experts: Vec<_> =
            (0..4).map(|expert| tensor(format, rows, cols, Scales::Common, 3 * expert + 1)).collect();
        // Numbers past the last expert leave their pairs out. Expert 2 has no rows.
        let chosen: Vec<u32> = (0..60).map(|_| [0, 1, 3, 3, 4, u32::MAX][random.usize(..6)]).collect();
        let sorted: Vec<_> = (0..4)
            .flat_map(|expert| (0..60).filter(|pair| chosen[*pair] == expert).collect::<Vec<_>>())
            .collect();
        for order in [
            ExpertRows::Gathered,
            ExpertRows::Sorted,
            ExpertRows::Scattered,
            ExpertRows::Indexed,
            ExpertRows::Paired,
        ] {
            let by_token = matches!(order, ExpertRows::Gathered | ExpertRows::Indexed);
            let count = if by_token { 30 } else { 60 };
            let x = quantized(count, cols, per_group, false, &mut random);
            let mut expected = vec![UNTOUCHED; 60 * rows];
            for (index, pair) in sorted.iter().enumerate() {
                let (from, to) = match order {
                    ExpertRows::Gathered => (pair / top_k, index),
                    ExpertRows::Sorted => (index, index),
                    ExpertRows::Scattered => (index, *pair),
                    ExpertRows::Indexed => (pair / top_k, *pair),
                    ExpertRows::Paired => (*pair, *pair),
                };
                let each = x.f32_scales.len() / count;
                let token = QuantizedActivations {
                    codes: x.codes[from * cols..][..cols].to_vec(),
                    scales: Vec::new(),
                    f32_scales: x.f32_scales[from * each..][..each].to_vec(),
                };
                let of_pair = defined::<f32>(&experts[chosen[*pair] as usize], &token, 1);
                expected[to * rows..][..rows].copy_from_slice(&of_pair);
            }
            for isa in instruction_sets() {
                let mut out = vec![f32::of_bits(UNTOUCHED); 60 * rows];
                let how = (isa, options(per_group));
                gemm_experts_fp8_with(how, &experts, as_rows(&x), &chosen, top_k, order, &mut out)
                    .expect("operands that fit");
                let found: Vec<_> = out.iter().map(|y| y.to_bits()).collect();
                assert!(found == expected, "{isa:?}, {format}, {order:?}");
            }
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let mxfp4 = tensor(Format::Mxfp4, 6, 256, Scales::Common, 2);
    let codes = vec![0; 2 * 256];
    let multiply = |weights: &QuantizedTensor, codes: &[u8], scales: usize, per_group: bool, out: usize| {
        let x = Fp8Rows::Quantized { codes, scales: &vec![1.0; scales] };
        let options = Fp8Options { per_group, ..Fp8Options::default() };
        gemm_weights_fp8(weights, x, 2, options, &mut vec![0f32; out])
    };
    assert!(multiply(&mxfp4, &codes, 2, false, 12).is_ok());
    assert!(multiply(&mxfp4, &codes, 4, true, 12).is_ok());
    for (codes, scales, per_group, out, short) in [
        (&codes[1..], 2, false, 12, "the codes of the activations"),
        (&codes, 1, false, 12, "the scales of the activations"),
        (&codes, 3, true, 12, "the scales of the activations"),
        (&codes, 2, false, 11, "the output"),
    ] {
        let refused = multiply(&mxfp4, codes, scales, per_group, out).expect_err("too few");
        assert!(matches!(refused, Error::Length { what, .. } if what == short), "{refused}");
    }
    let refused =
        gemm_weights_fp8(&mxfp4, Fp8Rows::Values(&[1f32; 511]), 2, Fp8Options::default(), &mut [0f32; 12]);
    assert!(matches!(refused, Err(Error::Length { what: "the activations", .. })), "{refused:?}");

    let nvfp4 = tensor(Format::Nvfp4, 6, 256, Scales::Common, 2);
    let refused = multiply(&nvfp4, &codes, 2, false, 12);
    assert!(matches!(refused, Err(Error::Operands(OperandFault::RoundedWeights))), "{refused:?}");
    let x = Fp8Rows::Values(&[1f32; 512]);
    let refused =
        gemm_experts_fp8([&nvfp4], x, &[0, 0], 1, ExpertRows::Paired, Fp8Options::default(), &mut [0f32; 12]);
    assert!(matches!(refused, Err(Error::Operands(OperandFault::RoundedWeights))), "{refused:?}");
    let refused = multiply(&mxfp4.convert_layout(ScaleLayout::Swizzled), &codes, 2, false, 12);
    assert!(matches!(refused, Err(Error::Operands(OperandFault::Layout { .. }))), "{refused:?}");
    let wide =
        QuantizedTensor::zeros(QuantizedShape::new(Format::Mxfp8E4m3, 6, 256)).expect("a small tensor");
    let refused = multiply(&wide, &codes, 2, false, 12);
    assert!(matches!(refused, Err(Error::Operands(OperandFault::Weights { .. }))), "{refused:?}");
}

proptest! {
    #![proptest_config(runs(60))]

    #[test]
    fn any_shape_is_multiplied(
        mxfp4 in any::<bool>(),
        (tokens, rows) in (1..40usize, 1..40usize),
        cols in 1..1000usize,
        kind in 0..3usize,
        (per_group, nan) in (any::<bool>(), any::<bool>()),
        seed in any::<u64>(),
    ) {
        let format = Format::MULTIPLIED[usize::from(mxfp4)];
        let scales = [Scales::Common, Scales::Numbers, Scales::Any][kind];
        let weights = tensor(format, rows, cols, scales, seed);
        let mut random = fastrand::Rng::with_seed(seed);
        check::<f32>(&weights, &quantized(tokens, cols, per_group, nan, &mut random), tokens, per_group);
    }
}
