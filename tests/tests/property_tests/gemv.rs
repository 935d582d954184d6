//! Tests GEMV.
//!
//! Every instruction set must give the reference's bits, and the reference must be within its bound
//! of the exact sum.

use half::{bf16, f16};
use microscale::Words;
use microscale::cpu::{Isa, gemv_weights_with, gemv_with};
use microscale::{
    Activation, Batch, Dtype, Error, Format, OperandFault, QuantizedShape, QuantizedTensor, ScaleLayout,
    gemv, gemv_weights,
};
use microscale_test_support::operands::{Scales, tensor};
use microscale_test_support::oracle::{self, Exact, dot};
use microscale_test_support::weights::{Activations, Bound, ExactProducts, activations, near};
use proptest::prelude::*;

use super::inputs::runs;

const FORMATS: [Format; 2] = Format::MULTIPLIED;

/// Checks one product on every instruction set, and against the exact sum.
fn check<T: Exact>(matrix: &QuantizedTensor, vectors: &QuantizedTensor, batch: Batch) {
    let what = format!("{} {:?} {batch:?} {}", T::DTYPE.word(), matrix.shape(), vectors.rows());
    let mut expected = vec![T::of_bits(0); matrix.rows()];
    gemv_with(Isa::Reference, matrix, vectors, batch, &mut expected).expect("operands that fit");
    for isa in Isa::available() {
        let mut found = vec![T::of_bits(0x1234); matrix.rows() + 1];
        gemv_with(isa, matrix, vectors, batch, &mut found).expect("operands that fit");
        assert_eq!(found.pop().expect("one more").bits(), 0x1234, "{isa:?} wrote too much, {what}");
        assert!(found.iter().map(|y| y.bits()).eq(expected.iter().map(|y| y.bits())), "{isa:?}, {what}");
    }
    for (row, y) in expected.into_iter().enumerate() {
        let vector = row / (matrix.rows() / batch.count) * batch.vector_stride;
        let Some((sum, magnitudes)) = dot::quantized(matrix, row, vectors, vector) else {
            assert_eq!(y.bits(), T::round_f64(f64::NAN).bits(), "row {row}, {what}");
            continue;
        };
        let under = |sum| dot::under(dot::under(sum, matrix.global_scale()), vectors.global_scale());
        let exact = under(sum.to_f64());
        if matrix.format() == Format::Nvfp4 {
            assert_eq!(y.bits(), T::round_f64(exact).bits(), "{y:?} is not {exact:e}: row {row}, {what}");
        } else {
            let rounding = (matrix.cols() + 40) as f64 * 2f64.powi(-53);
            near(y, exact, rounding * under(magnitudes.to_f64()))
                .unwrap_or_else(|wrong| panic!("{wrong}: row {row}, {what}"));
        }
    }
}

#[test]
fn every_instruction_set_multiplies_like_the_reference() {
    let mut seed = 0;
    for format in FORMATS {
        for cols in [16, 32, 48, 64, 80, 256, 1024, 1536, 4112] {
            for (rows, count, stride) in [(1, 1, 1), (3, 1, 1), (17, 2, 1), (130, 1, 1), (5, 3, 7)] {
                for scales in [Scales::Common, Scales::Any] {
                    seed += 1;
                    let matrix = tensor(format, count * rows, cols, scales, seed);
                    let vectors = tensor(format, (count - 1) * stride + 1, cols, scales, seed / 3);
                    let batch = Batch::of(count).with_vector_stride(stride);
                    check::<f32>(&matrix, &vectors, batch);
                    check::<f16>(&matrix, &vectors, batch);
                    check::<bf16>(&matrix, &vectors, batch);
                }
            }
        }
    }
}

#[test]
fn the_largest_scales_do_not_overflow() {
    for format in FORMATS {
        let matrix = tensor(format, 3, 4096, Scales::Largest, 2);
        check::<f32>(&matrix, &tensor(format, 1, 4096, Scales::Largest, 5), Batch::default());
        check::<f32>(&matrix, &tensor(format, 1, 4096, Scales::Numbers, 5), Batch::default());
    }
    // 6 · 6 · 448 · 448 · 16
    let shape = QuantizedShape::new(Format::Nvfp4, 1, 16);
    let largest = QuantizedTensor::from_parts(shape, vec![0x77; 8], vec![0x7E]).expect("parts that fit");
    let mut out = [0f32];
    gemv(&largest, &largest, Batch::default(), &mut out).expect("operands that fit");
    assert_eq!(out, [36.0 * 448.0 * 448.0 * 16.0]);
}

#[test]
fn a_nan_scale_affects_only_its_row() {
    for format in FORMATS {
        let clean = tensor(format, 40, 96, Scales::Common, 2);
        let vectors = tensor(format, 2, 96, Scales::Common, 5);
        let shape = clean.shape();
        let (codes, mut scales) = clean.clone().into_parts();
        scales[7 * shape.blocks_per_row() + 1] = oracle::nan_scale(format);
        let spoilt = QuantizedTensor::from_parts(shape, codes, scales).expect("parts that fit");
        let activations: Vec<bf16> = (0..2 * 96).map(|i| bf16::from_f32(i as f32 - 90.5)).collect();
        for isa in Isa::available() {
            let of = |matrix: &QuantizedTensor| {
                let (mut product, mut weighted) = ([0f32; 40], [bf16::ZERO; 80]);
                gemv_with(isa, matrix, &vectors, Batch::of(2), &mut product).expect("operands that fit");
                gemv_weights_with(isa, matrix, &activations, 2, &mut weighted).expect("operands that fit");
                (product.map(f32::to_bits), weighted.map(bf16::to_bits))
            };
            let (mut expected, found) = (of(&clean), of(&spoilt));
            expected.0[7] = 0x7FC0_0000;
            (expected.1[7], expected.1[47]) = (0x7FC0, 0x7FC0);
            assert_eq!(found, expected, "{isa:?}, {format}");
        }
    }
}

/// Checks one product with activations.
///
/// Returns the number of results that are more than an ulp off, and the number of all results.
fn check_weights<T: Exact + Activation>(weights: &QuantizedTensor, x: &[T], tokens: usize) -> (usize, usize) {
    let rows = weights.rows();
    let what = format!("{} {:?} {tokens}", T::DTYPE.word(), weights.shape());
    let mut expected = vec![T::of_bits(0); rows * tokens];
    gemv_weights_with(Isa::Reference, weights, x, tokens, &mut expected).expect("operands that fit");
    for isa in Isa::available() {
        let mut found = vec![T::of_bits(0x1234); rows * tokens + 1];
        gemv_weights_with(isa, weights, x, tokens, &mut found).expect("operands that fit");
        assert_eq!(found.pop().expect("one more").bits(), 0x1234, "{isa:?} wrote too much, {what}");
        assert!(found.iter().map(|y| y.bits()).eq(expected.iter().map(|y| y.bits())), "{isa:?}, {what}");
    }
    let exact = ExactProducts::of(weights, x, tokens);
    let far = if T::DTYPE == Dtype::F32 {
        let of_row =
            |row| exact.check_some(&expected, &Bound::of_singles(weights, row), |other| other == row);
        (0..rows).map(of_row).sum()
    } else {
        exact.check(&expected, &Bound::of_definition(weights))
    };
    (far.unwrap_or_else(|wrong| panic!("{wrong}, {what}")), expected.len())
}

#[test]
fn every_instruction_set_multiplies_weights_like_the_reference() {
    let mut random = fastrand::Rng::with_seed(9);
    let mut seed = 0;
    for format in FORMATS {
        for cols in [16, 32, 48, 64, 80, 100, 512, 1024, 1536, 4112] {
            for (rows, tokens) in [(1, 1), (3, 2), (17, 3), (130, 1), (5, 8), (7, 9), (2, 21)] {
                for (kind, scales) in [
                    (Activations::Common, Scales::Common),
                    (Activations::Numbers, Scales::Numbers),
                    (Activations::Any, Scales::Any),
                ] {
                    seed += 1;
                    let weights = tensor(format, rows, cols, scales, seed);
                    check_weights::<f16>(&weights, &activations(tokens * cols, kind, &mut random), tokens);
                    check_weights::<bf16>(&weights, &activations(tokens * cols, kind, &mut random), tokens);
                    check_weights::<f32>(&weights, &activations(tokens * cols, kind, &mut random), tokens);
                }
            }
        }
    }
}

#[test]
fn several_tokens_equal_tokens_one_by_one() {
    let mut random = fastrand::Rng::with_seed(3);
    for format in FORMATS {
        let weights = tensor(format, 33, 1056, Scales::Common, 3);
        let x = activations::<f16>(12 * 1056, Activations::Common, &mut random);
        let mut one_by_one = vec![f16::ZERO; 12 * 33];
        for (x, out) in x.chunks(1056).zip(one_by_one.chunks_mut(33)) {
            gemv_weights(&weights, x, 1, out).expect("operands that fit");
        }
        for tokens in 1..=12 {
            let mut out = vec![f16::ZERO; tokens * 33];
            gemv_weights(&weights, &x, tokens, &mut out).expect("operands that fit");
            assert_eq!(out, one_by_one[..out.len()], "{tokens} tokens, {format}");
        }
    }
}

#[test]
fn typical_products_are_within_a_unit_in_the_last_place() {
    fn far<T: Exact + Activation>(format: Format, random: &mut fastrand::Rng) -> (usize, usize) {
        let weights = tensor(format, 2000, 2048, Scales::Common, 8);
        check_weights::<T>(&weights, &activations(2 * 2048, Activations::Common, random), 2)
    }
    let mut random = fastrand::Rng::with_seed(4);
    for format in FORMATS {
        for (far, of) in [far::<f16>(format, &mut random), far::<bf16>(format, &mut random)] {
            assert!(far * 1000 <= of, "{far} of {of}, {format}");
        }
    }
}

#[test]
fn non_finite_activations_propagate() {
    for format in FORMATS {
        let shape = QuantizedShape::new(format, 2, 64);
        let (codes, scales) = shape.bytes().expect("a small tensor");
        // Sixes and zeros.
        let codes = (0..codes).map(|i| if i < 32 { 0x77 } else { 0 }).collect();
        let weights = QuantizedTensor::from_parts(shape, codes, vec![0x38; scales]).expect("parts that fit");
        for isa in Isa::available() {
            let of = |x: f32| {
                let mut activations = [bf16::ONE; 64];
                activations[40] = bf16::from_f32(x);
                let mut out = [bf16::ZERO; 2];
                gemv_weights_with(isa, &weights, &activations, 1, &mut out).expect("operands that fit");
                out.map(bf16::to_bits)
            };
            assert_eq!(of(f32::INFINITY), [0x7F80, 0x7FC0], "{isa:?}");
            assert_eq!(of(f32::NEG_INFINITY), [0xFF80, 0x7FC0], "{isa:?}");
            assert_eq!(of(-f32::NAN), [0x7FC0, 0x7FC0], "{isa:?}");
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
        check_weights(&weights.expect("parts that fit"), &[bf16::MAX; 96], 1);
    }
}

#[test]
fn mismatched_operands_are_refused() {
    let matrix = tensor(Format::Nvfp4, 6, 64, Scales::Common, 2);
    let fault = |matrix: &QuantizedTensor, vectors: &QuantizedTensor, batch| match gemv(
        matrix,
        vectors,
        batch,
        &mut [0f32; 6],
    )
    .expect_err("operands that do not fit")
    {
        Error::Operands(fault) => fault,
        other => panic!("{other}"),
    };
    let one = Batch::default();
    let other = tensor(Format::Mxfp4, 1, 64, Scales::Common, 2);
    let (matrix_format, vector) = (Format::Nvfp4, Format::Mxfp4);
    assert_eq!(fault(&matrix, &other, one), OperandFault::Formats { matrix: matrix_format, vector });
    let short = tensor(Format::Nvfp4, 1, 48, Scales::Common, 2);
    assert_eq!(fault(&matrix, &short, one), OperandFault::Columns { matrix: 64, vector: 48 });
    let swizzled = matrix.convert_layout(ScaleLayout::Swizzled);
    assert_eq!(fault(&swizzled, &matrix, one), OperandFault::Layout { what: "matrix" });
    assert_eq!(fault(&matrix, &swizzled, one), OperandFault::Layout { what: "vector" });
    assert_eq!(fault(&matrix, &matrix, Batch::of(4)), OperandFault::Batches { rows: 6, batches: 4 });
    assert_eq!(fault(&matrix, &matrix, Batch::of(0)), OperandFault::Batches { rows: 6, batches: 0 });
    for vector_stride in [3, usize::MAX] {
        let batch = Batch::of(3).with_vector_stride(vector_stride);
        let expected = OperandFault::Vectors { rows: 6, batches: 3, vector_stride };
        assert_eq!(fault(&matrix, &matrix, batch), expected);
    }
    let found = gemv(&matrix, &matrix, one, &mut [0f32; 5]);
    assert!(
        matches!(found, Err(Error::Length { what: "the output", expected: 6, found: 5, .. })),
        "{found:?}"
    );

    let x = [f16::ONE; 128];
    let weighted = |weights: &QuantizedTensor, x: &[f16], tokens, out: usize| {
        gemv_weights(weights, x, tokens, &mut vec![f16::ZERO; out]).map_err(|error| match error {
            Error::Operands(fault) => fault.to_string(),
            Error::Length { what, expected, found, .. } => format!("{what}: {expected}, {found}"),
            other => panic!("{other}"),
        })
    };
    assert_eq!(weighted(&matrix, &x, 2, 12), Ok(()));
    assert_eq!(weighted(&matrix, &[], 0, 0), Ok(()));
    let refused = |found: Result<(), String>, expected: &str| assert_eq!(found, Err(expected.to_owned()));
    refused(weighted(&matrix, &x, 3, 18), "the activations: 192, 128");
    refused(weighted(&matrix, &x, 2, 11), "the output: 12, 11");
    refused(
        weighted(&swizzled, &x, 1, 6),
        "the scales of the weights are swizzled; convert them to the linear layout first (`convert_layout`)",
    );
    let wide = QuantizedTensor::zeros(QuantizedShape::new(Format::Mxfp8E4m3, 6, 64)).expect("a small tensor");
    refused(weighted(&wide, &x, 1, 6), "the weights are in mxfp8-e4m3; quantize them to nvfp4 or mxfp4");
}

proptest! {
    #![proptest_config(runs(100))]

    #[test]
    fn any_shape_is_multiplied(
        mxfp4 in any::<bool>(),
        rows in 1..40usize,
        cols in 1..3000usize,
        (count, stride) in (1..4usize, 1..4usize),
        tokens in 1..12usize,
        any_scale in any::<bool>(),
        (kind, seed) in (0..Activations::ALL.len(), any::<u64>()),
    ) {
        let format = FORMATS[usize::from(mxfp4)];
        let scales = if any_scale { Scales::Any } else { Scales::Numbers };
        let matrix = tensor(format, count * rows, cols, scales, seed);
        let vectors = tensor(format, count * stride, cols, scales, seed / 3);
        check::<f32>(&matrix, &vectors, Batch::of(count).with_vector_stride(stride));
        let kind = Activations::ALL[kind];
        let mut random = fastrand::Rng::with_seed(seed);
        check_weights::<f16>(&matrix, &activations(tokens * cols, kind, &mut random), tokens);
        check_weights::<bf16>(&matrix, &activations(tokens * cols, kind, &mut random), tokens);
        check_weights::<f32>(&matrix, &activations(tokens * cols, kind, &mut random), tokens);
    }
}
