//! Tests that quantization with any strides equals quantization of a contiguous copy.

use half::{bf16, f16};
use microscale::cpu::Isa;
use microscale::formats::Search;
use microscale::{
    Error, Format, Position, QuantizeOptions, Quantized, QuantizedShape, QuantizedTensor, Recipe, Report,
    ScaleLayout, Shape, Strided, quantize, quantize_into, quantize_with,
};
use microscale_test_support::cases::options;
use microscale_test_support::oracle::Exact;
use proptest::prelude::*;

use super::inputs::{Case, any_of, case, runs};

/// Returns any strides: dense tensors in any order of dimensions, tensors with gaps, and overlaps.
fn strided() -> impl Strategy<Value = Strided> {
    let counts = (
        prop_oneof![Just(1), 0..5usize],
        prop_oneof![Just(1), 0..150usize],
        prop_oneof![1..100usize, 0..600usize],
    );
    let order = Just([0usize, 1, 2]).prop_shuffle();
    let gaps = prop_oneof![2 => Just([0usize; 3]), 1 => [0..3usize, 0..3, 0..20]];
    let overlapping = prop_oneof![3 => Just(None), 1 => [1..40usize, 1..40, 1..40].prop_map(Some)];
    (counts, order, gaps, overlapping).prop_map(|((outer, rows, cols), order, gaps, overlapping)| {
        let counts = [outer, rows, cols];
        let mut strides = [1; 3];
        let mut next = 1;
        for (dimension, gap) in order.into_iter().zip(gaps) {
            strides[dimension] = next + gap;
            next = (next + gap) * counts[dimension].max(1);
        }
        let [outer_stride, row_stride, col_stride] = overlapping.unwrap_or(strides);
        Strided { outer, outer_stride, rows, row_stride, cols, col_stride }
    })
}

/// Returns the rows, one after the other.
fn copy<T: Exact>(values: &[T], s: &Strided) -> Vec<T> {
    let mut copy = Vec::new();
    for (outer, row) in (0..s.outer).flat_map(|outer| (0..s.rows).map(move |row| (outer, row))) {
        let start = outer * s.outer_stride + row * s.row_stride;
        copy.extend((0..s.cols).map(|col| values[start + col * s.col_stride]));
    }
    copy
}

type Outcome = Result<(QuantizedTensor, Report), (Position, Report)>;

fn outcome(result: microscale::Result<(QuantizedTensor, Report)>) -> Outcome {
    result.map_err(|error| match error {
        Error::NonFinite { first, report } => (first, report),
        other => panic!("{other}"),
    })
}

/// Compares with the copy on every instruction set. The case's values are repeated.
fn check<T: Exact>(case: &Case<T>, strided: &Strided, recipe: &Recipe, weighted: bool) {
    let span = strided.span().expect("small");
    let some =
        if case.matrix.values.is_empty() { vec![T::round_f64(1.0)] } else { case.matrix.values.clone() };
    let values: Vec<T> = some.into_iter().cycle().take(span).collect();
    let importance: Vec<f32> = (0..strided.cols).map(|col| (col % 5) as f32).collect();
    let importance = weighted.then_some(&importance[..]);
    let copied = copy(&values, strided);
    let shape = Shape::new(strided.outer * strided.rows, strided.cols);
    for isa in Isa::available() {
        let quantized = QuantizedShape::new(recipe.format(), shape.rows, shape.cols);
        let out = || QuantizedTensor::zeros(quantized.with_scale_layout(recipe.scale_layout)).expect("small");
        let (mut found, mut expected) = (out(), out());
        let report = quantize_into(&values, *strided, recipe, options(isa, importance), &mut found);
        let right = quantize_into(&copied, shape, recipe, options(isa, importance), &mut expected);
        let [found, expected] = [report.map(|r| (found, r)), right.map(|r| (expected, r))].map(outcome);
        assert_eq!(found, expected, "{strided:?} by {isa:?}");
    }
}

macro_rules! equals_the_copy {
    ($($name:ident: $dtype:ty),+) => {
        proptest! {
            #![proptest_config(runs(1500))]
            $(
                #[test]
                fn $name(case in case::<$dtype>(), strided in strided(), search in any_of::<Search>(), weighted in any::<bool>()) {
                    let searched = matches!(case.recipe.format(), Format::Mxfp4 | Format::Nvfp4);
                    let recipe = Recipe { search: if searched { search } else { Search::None }, ..case.recipe };
                    check(&case, &strided, &recipe, weighted);
                }
            )+
        }
    };
}

equals_the_copy!(equals_the_copy_f32: f32, equals_the_copy_f16: f16, equals_the_copy_bf16: bf16);

/// Returns values that identify their position.
fn numbered<T: Exact>(len: usize) -> Vec<T> {
    (0..len).map(|i| T::round_f64((i as f64 * 0.37).sin() * (i % 97) as f64)).collect()
}

/// Many tasks, many tiles, groups that end within them, and every axis.
#[test]
fn every_axis_of_large_tensors() {
    every_axis(&[&[3, 300, 517], &[2, 3, 129, 5, 70], &[5000]]);
}

#[test]
#[ignore = "takes most of a minute: .ci/long does it, or cargo test-all"]
fn every_axis_of_the_largest_tensors() {
    every_axis(&[&[700, 900], &[1, 40_000, 33]]);
}

/// Returns `blocks` different Hessians for blocks of MXFP4: a diagonal, and correlations of
/// neighbours.
fn hessian(blocks: usize) -> Vec<f32> {
    let entry = |at: usize| {
        let (block, row, col) = (at / 1024, at / 32 % 32, at % 32);
        match row.abs_diff(col) {
            0 => 1.0 + ((block + row) % 7) as f32,
            1 => 0.25,
            _ => 0.0,
        }
    };
    (0..blocks * 1024).map(entry).collect()
}

fn every_axis(tensors: &[&[usize]]) {
    for &dims in tensors {
        let values: Vec<bf16> = numbered(dims.iter().product());
        for axis in 0..dims.len() {
            let strided = Strided::along(dims, axis).expect("an axis");
            let copied = copy(&values, &strided);
            let shape = strided.shape();
            assert_eq!((shape.rows * shape.cols, shape.cols), (values.len(), dims[axis]));
            let mut strides = vec![1; dims.len()];
            (0..dims.len() - 1).rev().for_each(|i| strides[i] = strides[i + 1] * dims[i + 1]);
            let given = Strided::from_strides(dims, &strides, axis).expect("strides without gaps");
            for format in [Format::Mxfp4, Format::Nvfp4, Format::Mxfp8E4m3] {
                for scale_layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
                    let numerics = microscale::Numerics::default_for(format);
                    let recipe = Recipe { scale_layout, ..Recipe::of(format, numerics).expect("its own") };
                    let Quantized { tensor, report } = quantize(&copied, shape, &recipe).expect("finite");
                    for strided in [strided, given] {
                        let found = quantize(&values, strided, &recipe).expect("finite");
                        assert!(found.tensor == tensor, "{dims:?} along {axis}: {recipe:?}");
                        assert_eq!(found.report, report, "{dims:?} along {axis}: {recipe:?}");
                    }
                }
            }
            let recipe = Recipe { search: Search::Window, ..Recipe::default() };
            let weights: Vec<f32> = (0..shape.cols).map(|col| (col % 3) as f32).collect();
            let right = quantize_with(&copied, shape, &recipe, QuantizeOptions::new().importance(&weights))
                .expect("finite");
            let found = quantize_with(&values, strided, &recipe, QuantizeOptions::new().importance(&weights))
                .expect("finite");
            assert!(found == right, "{dims:?} along {axis}, weighted");
            let hessian = hessian(shape.cols.div_ceil(32));
            let options = QuantizeOptions::new().hessian(&hessian);
            let right = quantize_with(&copied, shape, &recipe, options).expect("finite");
            let found = quantize_with(&values, strided, &recipe, options).expect("finite");
            assert!(found == right, "{dims:?} along {axis}, by a Hessian");
        }
    }
}

#[test]
fn the_first_non_finite_element_is_named() {
    let dims = [500, 600];
    let mut values: Vec<f32> = numbered(500 * 600);
    // Row 400 of the copy comes after row 399, although it is before it in memory.
    (values[3 * 600 + 400], values[499 * 600 + 399], values[497 * 600 + 399]) =
        (f32::NAN, f32::INFINITY, f32::NAN);
    let strided = Strided::along(&dims, 0).expect("an axis");
    let found = quantize(&values, strided, &Recipe::default());
    let Err(Error::NonFinite { first, report }) = found else { panic!("{found:?}") };
    assert_eq!((first, report.nan, report.infinite), (Position { row: 399, col: 497 }, 2, 1));
}

#[test]
fn errors_name_the_cause() {
    let strided = Strided::along(&[40, 50], 0).expect("an axis");
    let recipe = Recipe::default();
    let found = quantize(&vec![1.0f32; 1999], strided, &recipe);
    assert!(matches!(found, Err(Error::StridedLength { expected: 2000, found: 1999, .. })), "{found:?}");
    let found = quantize(&[1.0f32; 9], Strided { col_stride: 0, ..strided }, &recipe);
    assert!(matches!(found, Err(Error::ZeroStride { what: "col_stride" })), "{found:?}");
    let huge = Strided { row_stride: usize::MAX / 3, ..strided };
    let found = quantize(&[1.0f32; 9], huge, &recipe);
    assert!(matches!(found, Err(Error::StridedTooLarge { .. })), "{found:?}");
    let found =
        quantize_with(&vec![1.0f32; 2000], strided, &recipe, QuantizeOptions::new().importance(&[1.0; 50]));
    assert!(matches!(found, Err(Error::Importance { found: 50, columns: 40, .. })), "{found:?}");
    let mxfp8 = Recipe::of(Format::Mxfp8E4m3, microscale::Numerics::Ocp).expect("there is one");
    let found = quantize(&vec![1.0f32; 2000], strided, &Recipe { search: Search::Full, ..mxfp8 });
    assert!(matches!(found, Err(Error::NoSearch { .. })), "{found:?}");
}
