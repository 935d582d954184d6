//! Tests arbitrary input, shapes and layouts against the oracle and against general laws.

use half::{bf16, f16};
use microscale::cpu::Isa;
use microscale::{
    Error, ErrorStats, NonFinite, QuantizeOptions, QuantizedShape, QuantizedTensor, Recipe, ScaleLayout,
    Search, Shape, Strided, WorstBlocks, dequantize, dequantize_into, gemv, quantize_with,
};
use microscale_test_support::cases::quantize;
use microscale_test_support::oracle::Exact;
use proptest::prelude::*;

use super::oracle::{self, FORMATS, format, recipe, taken_apart};

/// Returns arbitrary bits, or numbers of moderate size.
fn values<T: Exact>(seed: u64, count: usize) -> Vec<T> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let arbitrary = rng.u8(..4) == 0;
    let number = |rng: &mut fastrand::Rng| (rng.f64() - 0.5) * 2f64.powi(rng.i32(-9..9));
    let value =
        |rng: &mut fastrand::Rng| if arbitrary { T::of_bits(rng.u32(..)) } else { T::round_f64(number(rng)) };
    (0..count).map(|_| value(&mut rng)).collect()
}

fn check<T: Exact>(seed: u64, rows: usize, cols: usize, gap: usize, policy: NonFinite) {
    let shape = Shape::new(rows, cols).with_row_stride(cols + gap);
    let values = values::<T>(seed, rows * (cols + gap));
    for (word, _) in FORMATS {
        let expected = oracle::quantize(word, &values, shape, policy);
        let recipe = Recipe { non_finite: policy, ..recipe(word) };
        for isa in Isa::available() {
            let made = quantize(isa, &values, shape, &recipe);
            let refused = policy == NonFinite::Error && expected.report.first_non_finite.is_some();
            let (tensor, report) = match made {
                Err(Error::NonFinite { first, report }) if refused => {
                    assert_eq!((Some(first), report), (expected.report.first_non_finite, expected.report));
                    continue;
                }
                made => made.expect("nothing to refuse"),
            };
            assert!(!refused);
            assert_eq!(report, expected.report);
            let (scales, codes) = taken_apart(&tensor);
            assert_eq!((&scales, &codes), (&expected.scales, &expected.codes));
            same_in_other_layouts(&values, shape, &recipe, &tensor);
            same_by_strides(&values, shape, &recipe, &tensor);
            loss_is_that_of_elements(&values, shape, &tensor);
        }
    }
}

fn same_in_other_layouts<T: Exact>(values: &[T], shape: Shape, recipe: &Recipe, tensor: &QuantizedTensor) {
    let swizzled = Recipe { scale_layout: ScaleLayout::Swizzled, ..*recipe };
    let (found, _) = quantize(Isa::best(), values, shape, &swizzled).expect("the same values");
    assert_eq!(found, tensor.convert_layout(ScaleLayout::Swizzled));
    assert_eq!(&found.convert_layout(ScaleLayout::Linear), tensor);
    let (bytes, blocks) = (tensor.format().scale_bytes(), tensor.blocks_per_row());
    for (row, block) in (0..shape.rows).flat_map(|row| (0..blocks).map(move |block| (row, block))) {
        let [linear, other] = [(ScaleLayout::Linear, tensor), (ScaleLayout::Swizzled, &found)]
            .map(|(layout, tensor)| &tensor.scales()[layout.offset(row, block, blocks) * bytes..][..bytes]);
        assert_eq!(linear, other);
    }
    let (a, b): (Vec<T>, Vec<T>) = (dequantize(tensor), dequantize(&found));
    assert!(a.iter().zip(&b).all(|(a, b)| a.bits() == b.bits()));
}

/// Quantizes the transpose along its other axis.
fn same_by_strides<T: Exact>(values: &[T], shape: Shape, recipe: &Recipe, tensor: &QuantizedTensor) {
    let Shape { rows, cols, row_stride } = shape;
    let mut transposed = vec![T::default(); rows * cols];
    for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
        transposed[col * rows + row] = values[row * row_stride + col];
    }
    let strided = Strided::along(&[cols, rows], 0).expect("an axis");
    let found = microscale::quantize(&transposed, strided, recipe).expect("the same values");
    assert_eq!(&found.tensor, tensor);
}

fn loss_is_that_of_elements<T: Exact>(values: &[T], shape: Shape, tensor: &QuantizedTensor) {
    let back: Vec<f32> = dequantize(tensor);
    let copied: Vec<T> =
        values.chunks(shape.row_stride.max(1)).flat_map(|row| row[..shape.cols].to_vec()).collect();
    let (found, right) = (
        ErrorStats::of_quantized(values, shape, tensor).expect("it fits"),
        ErrorStats::between(&copied, &back),
    );
    assert_eq!((found.elements(), found.non_finite()), (right.elements(), right.non_finite()));
    let close =
        |a: f64, b: f64| a == b || (a - b).abs() <= 1e-9 * a.abs().max(b.abs()) || a.is_nan() && b.is_nan();
    assert!(close(found.relative_squared_error(), right.relative_squared_error()), "{found:?} {right:?}");
    let worst = WorstBlocks::of(values, shape, tensor, 3).expect("it fits");
    for block in worst.absolute {
        let bits = taken_apart(&tensor.convert_layout(ScaleLayout::Linear)).0;
        assert_eq!(block.scale_bits, bits[block.row * tensor.blocks_per_row() + block.block]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn any_matrix_quantizes_like_the_reference(
        seed: u64, rows in 0..5usize, cols in 0..150usize, gap in 0..3usize, policy in 0..3usize,
    ) {
        let policy = [NonFinite::Error, NonFinite::Propagate, NonFinite::Saturate][policy];
        check::<f32>(seed, rows, cols, gap, policy);
        check::<f16>(seed, rows, cols, gap, policy);
        check::<bf16>(seed, rows, cols, gap, policy);
    }
}

#[test]
fn many_rows_equal_the_rows_one_by_one() {
    check::<bf16>(7, 300, 130, 2, NonFinite::Propagate);
}

#[test]
fn gaps_between_rows_are_not_written() {
    for (word, _) in FORMATS {
        let values = values::<f32>(2, 3 * 70);
        let recipe = Recipe { non_finite: NonFinite::Propagate, ..recipe(word) };
        let (tensor, _) = quantize(Isa::best(), &values, Shape::new(3, 70), &recipe).unwrap();
        let mut out = [12345.0f32; 3 * 75];
        dequantize_into(&tensor, &mut out, 75).unwrap();
        let right: Vec<f32> = dequantize(&tensor);
        for (row, right) in out.chunks(75).zip(right.chunks(70)) {
            assert!(row[..70].iter().zip(right).all(|(a, b)| a.to_bits() == b.to_bits()));
            assert!(row[70..].iter().all(|gap| *gap == 12345.0));
        }
    }
}

#[test]
fn lengths_and_signs_are_checked() {
    for (word, length) in FORMATS {
        let format = format(word);
        let shape = QuantizedShape::new(format, 2, length + 1);
        let (codes, scales) = shape.bytes().unwrap();
        assert_eq!((codes, scales), (2 * length, 4 * format.scale_bytes()));
        let swizzled = shape.with_scale_layout(ScaleLayout::Swizzled);
        assert_eq!(swizzled.bytes().unwrap().1, 512 * format.scale_bytes());
        let of = |codes, scales| QuantizedTensor::from_parts(shape, vec![0; codes], scales);
        assert!(matches!(of(codes, vec![0; scales - 1]), Err(Error::QuantizedLength { .. })));
        assert!(matches!(of(codes - 1, vec![0; scales]), Err(Error::QuantizedLength { .. })));
        let mut signed = vec![0; scales];
        signed[scales - 1] = 0x80;
        match of(codes, signed) {
            Ok(_) => assert_eq!(word, "mxfp4-e3m0"),
            Err(why @ Error::SignedScale { index: 3, scale: 0x8000, .. }) => {
                assert!(why.to_string().contains("nf4"), "{why}");
            }
            Err(why) => panic!("{why}"),
        }
        let tensor = QuantizedTensor::zeros(shape).unwrap();
        assert!(tensor.clone().with_global_scale(microscale::GlobalScale::Divisor(1.0)).is_err());
        let huge = QuantizedShape::new(format, usize::MAX / 16, 8).with_scale_layout(ScaleLayout::Swizzled);
        assert!(matches!(huge.bytes(), Err(Error::TooLarge { .. })));
    }
}

/// Operations that these formats lack are refused.
#[test]
fn searches_hessians_and_products_are_refused() {
    for (word, length) in FORMATS {
        let (values, shape) = (vec![1.0f32; length], Shape::new(1, length));
        let searching = Recipe { search: Search::Full, ..recipe(word) };
        let refused = quantize(Isa::best(), &values, shape, &searching);
        assert!(matches!(refused, Err(Error::NoSearch { .. })), "{refused:?}");
        let refused = quantize_with(
            &values,
            shape,
            &searching,
            QuantizeOptions::new().hessian(&vec![0.0; length * length]),
        );
        assert!(matches!(refused, Err(Error::NoSearch { .. })), "{refused:?}");
        // Weights affect only searches.
        let (tensor, _) = quantize(Isa::best(), &values, shape, &recipe(word)).unwrap();
        let weighted = quantize_with(
            &values,
            shape,
            &recipe(word),
            QuantizeOptions::new().importance(&vec![0.5; length]),
        )
        .unwrap();
        assert_eq!(weighted.tensor, tensor);
        let refused = gemv(&tensor, &tensor, microscale::Batch::default(), &mut [0.0f32]);
        assert!(matches!(refused, Err(Error::Operands(_))), "{refused:?}");
    }
}
