//! Tests products of devices: the CPU's results, and errors that name what to change.

use half::{bf16, f16};
use microscale::{
    Activation, Device, Error, Format, OperandFault, QuantizedShape, QuantizedTensor, ScaleLayout, Shape,
    Words, gemm_weights,
};
use microscale_test_support::operands::{Scales, tensor};
use microscale_test_support::oracle::Exact;
use microscale_test_support::weights::{Activations, Bound, ExactProducts, Instructions, activations};

/// Checks a product against exact sums, and against the bits of `gemm_weights`.
fn check<T: Exact + Activation>(weights: &QuantizedTensor, tokens: usize, random: &mut fastrand::Rng) {
    let (rows, cols) = (weights.rows(), weights.cols());
    let x: Vec<T> = activations(tokens * cols, Activations::Common, random);
    let found = Device::Cpu.linear(&x, Shape::new(tokens, cols), weights).expect("operands that fit");
    let what = format!("{} {:?}, {tokens} tokens", T::DTYPE.word(), weights.shape());

    let exact = ExactProducts::of(weights, &x, tokens);
    for row in 0..rows {
        // The widest of the bounds of all instruction sets.
        let bound = Bound::of_segments(weights, row, Instructions::Tiles { parts: 3 })
            .or(Bound::of_segments(weights, row, Instructions::Pairs))
            .or(Bound::of_singles(weights, row));
        let near = exact.check_some(&found, &bound, |other| other == row);
        near.unwrap_or_else(|wrong| panic!("{wrong}, {what}"));
    }

    let mut expected = vec![T::default(); tokens * rows];
    gemm_weights(weights, &x, tokens, &mut expected).expect("operands that fit");
    let bits = |values: &[T]| values.iter().map(|y| y.bits()).collect::<Vec<_>>();
    assert_eq!(bits(&found), bits(&expected), "{what}");

    // Gaps between rows are not read.
    let stride = cols + 3;
    let mut gaps = vec![T::round_f64(f64::NAN); tokens * stride];
    for (gaps, x) in gaps.chunks_mut(stride).zip(x.chunks(cols)) {
        gaps[..cols].copy_from_slice(x);
    }
    let shape = Shape::new(tokens, cols).with_row_stride(stride);
    let loaded = Device::Cpu.load_weights(weights).expect("weights that are multiplied");
    let apart = loaded.linear(&gaps[..tokens * stride - 3], shape).expect("operands that fit");
    assert_eq!(bits(&apart), bits(&expected), "{what}, with gaps");
}

#[test]
fn linear_is_near_the_exact_sum() {
    let mut random = fastrand::Rng::with_seed(11);
    for format in Format::MULTIPLIED {
        for (rows, cols, tokens) in
            [(1, 1, 1), (1, 32, 9), (7, 33, 1), (5, 47, 8), (16, 100, 9), (35, 272, 17), (3, 500, 40)]
        {
            let weights = tensor(format, rows, cols, Scales::Common, cols as u64);
            check::<f32>(&weights, tokens, &mut random);
            check::<f16>(&weights, tokens, &mut random);
            check::<bf16>(&weights, tokens, &mut random);
        }
    }
}

#[test]
fn linear_of_nothing_is_nothing_or_zeros() {
    for (rows, cols, tokens) in [(0, 64, 9), (3, 0, 9), (3, 64, 0), (0, 0, 0)] {
        let weights = tensor(Format::Mxfp4, rows, cols, Scales::Common, 2);
        let found = Device::Cpu.linear(&vec![1f32; cols * tokens], Shape::new(tokens, cols), &weights);
        assert_eq!(found.expect("operands that fit"), vec![0.0; rows * tokens]);
    }
}

#[test]
fn linear_refuses_operands_that_do_not_fit() {
    let weights = tensor(Format::Nvfp4, 6, 64, Scales::Common, 2);
    let linear = |weights: &QuantizedTensor, x: usize, shape| {
        Device::Cpu.linear(&vec![1f32; x], shape, weights).expect_err("operands that do not fit")
    };
    let narrow = linear(&weights, 9 * 63, Shape::new(9, 63));
    let message =
        "the activations have 63 columns and the weights 64; pass activations of shape [tokens, 64]";
    assert_eq!(narrow.to_string(), message);
    let short = linear(&weights, 9 * 64 - 1, Shape::new(9, 64));
    assert!(matches!(short, Error::Length { what: "the activations", .. }), "{short}");
    assert!(short.to_string().ends_with("pass a longer slice or a smaller shape"), "{short}");
    let overlapping = linear(&weights, 9 * 64, Shape::new(9, 64).with_row_stride(60));
    assert!(matches!(overlapping, Error::RowStride { .. }), "{overlapping}");
    let swizzled = linear(&weights.convert_layout(ScaleLayout::Swizzled), 9 * 64, Shape::new(9, 64));
    assert!(swizzled.to_string().contains("`convert_layout`"), "{swizzled}");
    let wide = QuantizedTensor::zeros(QuantizedShape::new(Format::Mxfp8E4m3, 6, 64)).expect("a small tensor");
    let wide = linear(&wide, 9 * 64, Shape::new(9, 64));
    assert!(matches!(wide, Error::Operands(OperandFault::Weights { .. })), "{wide}");

    let loaded = Device::Cpu.load_weights(&weights).expect("weights that are multiplied");
    let short = loaded.linear_into(&[1f32; 2 * 64], Shape::new(2, 64), &mut [0.0; 11]);
    assert!(matches!(short, Err(Error::Length { what: "the output", .. })), "{short:?}");
}
