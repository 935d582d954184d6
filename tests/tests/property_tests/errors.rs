//! Shapes that do not fit are refused with the documented error, and shapes without elements are fine.

use microscale::cpu::{Isa, dequantize_with, quantize_into, quantize_with};
use microscale::{
    Error, ErrorStats, Format, NonFinite, Position, QuantizedTensor, Recipe, Report, Result, Shape,
    dequantize, dequantize_into, quantize,
};
use proptest::prelude::*;

use super::inputs::runs;

/// What a shape's documentation promises about a slice of `len` elements, in arithmetic that cannot overflow.
#[derive(Debug, PartialEq)]
enum Fit {
    Holds,
    TooShort,
    Overlaps,
    /// Rows would overlap, and without overlap there would be more than can be counted.
    OverlapsOrCountless,
    /// More than can be counted; a shape close to that may be refused as too large or as too long.
    Countless,
}

fn fit(shape: Shape, len: usize) -> Fit {
    let [rows, cols, row_stride] = [shape.rows, shape.cols, shape.row_stride].map(|n| n as u128);
    if rows == 0 || cols == 0 {
        return Fit::Holds;
    }
    if row_stride < cols {
        let countless = rows.saturating_mul(cols) > usize::MAX as u128 / 16;
        return if countless { Fit::OverlapsOrCountless } else { Fit::Overlaps };
    }
    match (rows - 1) * row_stride + cols {
        span if span <= len as u128 => Fit::Holds,
        span if span > usize::MAX as u128 => Fit::Countless,
        _ => Fit::TooShort,
    }
}

/// Asserts that the result is what the fit asks for.
fn assert_fit<T>(found: Result<T>, fit: Fit, what: &str) {
    match (found, fit) {
        (Ok(_), Fit::Holds)
        | (Err(Error::Length { .. } | Error::TooLarge { .. }), Fit::TooShort)
        | (Err(Error::RowStride { .. }), Fit::Overlaps | Fit::OverlapsOrCountless)
        | (Err(Error::TooLarge { .. }), Fit::Countless | Fit::OverlapsOrCountless) => {}
        (Ok(_), fit) => panic!("{what}: accepted, but {fit:?}"),
        (Err(why), fit) => panic!("{what}: {fit:?}, but {why}"),
    }
}

fn size() -> impl Strategy<Value = usize> {
    let powers = (0..usize::BITS).prop_map(|shift| 1usize << shift);
    let near = (powers, -2..=2isize).prop_map(|(power, by)| power.wrapping_add_signed(by));
    prop_oneof![0..70usize, near, Just(usize::MAX), any::<usize>()]
}

proptest! {
    #![proptest_config(runs(20_000))]

    #[test]
    fn spans_are_counted_without_overflow(rows in size(), cols in size(), row_stride in size(), len in 0..5000usize) {
        let shape = Shape { rows, cols, row_stride };
        let what = format!("{shape:?} in {len}");
        assert_fit(shape.check("the slice", len), fit(shape, len), &what);
        if let Ok(span) = shape.span() {
            let right = if shape.is_empty() { 0 } else { (rows - 1) * row_stride + cols };
            prop_assert_eq!(span, right);
        }
    }

    #[test]
    fn quantize_refuses_shapes_that_do_not_fit(rows in size(), cols in size(), row_stride in size(), len in 0..200usize) {
        let shape = Shape { rows, cols, row_stride };
        let what = format!("{shape:?} in {len}");
        assert_fit(quantize(&vec![1.0f32; len], shape, &Recipe::default()), fit(shape, len), &what);
    }

    #[test]
    fn dequantize_refuses_rows_that_do_not_fit(
        rows in 0..9usize,
        cols in 0..70usize,
        row_stride in prop_oneof![0..140usize, size()],
        len in 0..400usize,
    ) {
        let tensor = QuantizedTensor::zeros(Format::Mxfp4, rows, cols).expect("a small tensor");
        let shape = Shape { rows, cols, row_stride };
        let mut out = vec![1.0f32; len];
        let found = dequantize_into(&tensor, &mut out, row_stride);
        let refused = found.is_err();
        assert_fit(found, fit(shape, len), &format!("{shape:?} in {len}"));
        if refused {
            prop_assert!(out.iter().all(|v| *v == 1.0), "a refused call has written");
        }
    }
}

#[test]
fn errors_say_what_is_wrong() {
    let shape = Shape::new(3, 40).with_row_stride(50);
    let Err(Error::Length { rows: 3, cols: 40, row_stride: 50, expected: 140, found: 139, .. }) =
        quantize(&[0.0f32; 139], shape, &Recipe::default())
    else {
        panic!("139 elements for 140")
    };
    assert!(
        quantize(&[0.0f32; 140], shape, &Recipe::default()).is_ok(),
        "nothing is needed behind the last row"
    );

    let overlapping = Shape::new(3, 40).with_row_stride(39);
    let found = quantize(&[0.0f32; 500], overlapping, &Recipe::default());
    assert!(matches!(found, Err(Error::RowStride { cols: 40, row_stride: 39 })), "{found:?}");

    let endless = Shape { rows: usize::MAX, cols: 2, row_stride: usize::MAX };
    let found = quantize(&[0.0f32; 500], endless, &Recipe::default());
    assert!(matches!(found, Err(Error::TooLarge { rows: usize::MAX, cols: 2, .. })), "{found:?}");

    let mut values = [1.0f32; 120];
    (values[77], values[90], values[111]) = (f32::NEG_INFINITY, f32::NAN, f32::NAN);
    let first = Position { row: 1, col: 37 };
    let Err(Error::NonFinite { first: found, report }) =
        quantize(&values, Shape::new(3, 40), &Recipe::default())
    else {
        panic!("an infinity was accepted")
    };
    assert_eq!(found, first);
    assert_eq!(report, Report { nan: 2, infinite: 1, first_non_finite: Some(first), ..Report::default() });
}

/// A slice too short for a shape that is large, but can be counted, is refused before anything of its size is allocated.
#[test]
fn a_large_shape_of_a_short_slice_is_refused() {
    for shape in [
        Shape::new(1 << 40, 1 << 20),
        Shape::new(1 << 20, 1 << 39),
        Shape::new(1, 1 << 60),
        Shape::new(1 << 50, 1).with_row_stride(2),
    ] {
        let found = quantize(&[1.0f32; 64], shape, &Recipe::default());
        assert!(matches!(found, Err(Error::Length { .. } | Error::TooLarge { .. })), "{shape:?}: {found:?}");
    }
}

#[test]
fn tensors_of_another_shape_are_refused() {
    let values = [1.0f32; 64];
    for (rows, cols) in [(1, 64), (2, 31), (3, 32), (0, 0), (64, 1)] {
        let mut other = QuantizedTensor::zeros(Format::Mxfp4, rows, cols).expect("a small tensor");
        let before = other.clone();
        for isa in Isa::available() {
            let found = quantize_with(isa, &values, Shape::new(2, 32), &Recipe::default(), &mut other);
            assert!(matches!(found, Err(Error::QuantizedLength { .. })), "{rows}x{cols}: {found:?}");
        }
        let found = quantize_into(&values, Shape::new(2, 32), &Recipe::default(), &mut other);
        assert!(matches!(found, Err(Error::QuantizedLength { .. })), "{rows}x{cols}: {found:?}");
        assert_eq!(other, before, "a refused call has written");
        let found = ErrorStats::of_quantized(&values, Shape::new(2, 32), &other);
        assert!(matches!(found, Err(Error::QuantizedLength { .. })), "{rows}x{cols}: {found:?}");
    }
}

#[test]
fn parts_of_another_length_are_refused() {
    let made =
        |codes, scales| QuantizedTensor::from_parts(Format::Mxfp4, 2, 33, vec![0; codes], vec![0; scales]);
    assert!(made(64, 4).is_ok());
    for (codes, scales) in [(63, 4), (65, 4), (64, 3), (64, 5), (34, 4), (0, 0)] {
        let found = made(codes, scales);
        assert!(matches!(found, Err(Error::QuantizedLength { rows: 2, cols: 33, .. })), "{codes}, {scales}");
    }
    for (rows, cols) in [(usize::MAX, usize::MAX), (usize::MAX, 1), (1, usize::MAX), (1 << 40, 1 << 40)] {
        let found = QuantizedTensor::from_parts(Format::Mxfp4, rows, cols, vec![], vec![]);
        assert!(
            matches!(found, Err(Error::TooLarge { .. } | Error::QuantizedLength { .. })),
            "{rows}x{cols}"
        );
        let found = QuantizedTensor::zeros(Format::Mxfp4, usize::MAX, cols);
        assert!(matches!(found, Err(Error::TooLarge { .. })), "{rows}x{cols}");
    }
}

#[test]
fn shapes_without_elements_are_fine() {
    for (rows, cols) in [(0, 0), (0, 7), (7, 0), (0, usize::MAX), (usize::MAX, 0)] {
        for row_stride in [0, cols, usize::MAX] {
            let shape = Shape::new(rows, cols).with_row_stride(row_stride);
            let recipe = Recipe { non_finite: NonFinite::Error, ..Recipe::default() };
            let quantized = quantize::<f32>(&[], shape, &recipe).expect("nothing to do");
            assert_eq!(quantized.report, Report::default());
            assert_eq!((quantized.tensor.rows(), quantized.tensor.cols()), (rows, cols));
            assert_eq!((quantized.tensor.codes(), quantized.tensor.scales()), ([].as_slice(), [].as_slice()));
            assert!(dequantize::<f32>(&quantized.tensor).is_empty());
            for isa in Isa::available() {
                let mut out = [5.0f32; 3];
                dequantize_with(isa, &quantized.tensor, &mut out, row_stride).expect("nothing to do");
                assert_eq!(out, [5.0; 3]);
            }
            let stats =
                ErrorStats::of_quantized::<f32>(&[], shape, &quantized.tensor).expect("nothing to do");
            assert_eq!(stats.elements(), 0);
        }
    }
}
