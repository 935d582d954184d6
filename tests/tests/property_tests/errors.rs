//! Tests that mismatched shapes are refused with the documented error, and empty shapes are
//! accepted.

use half::{bf16, f16};
use microscale::cpu::{Isa, dequantize_with, quantize_into};
use microscale::{
    Error, ErrorStats, Format, Global, GlobalScale, NonFinite, Numerics, Position, QuantizeOptions,
    QuantizedShape, QuantizedTensor, Recipe, Report, Result, ScaleLayout, Shape, Words, dequantize,
    dequantize_into, quantize,
};
use microscale_test_support::cases::{NVFP4_NUMERICS, every_recipe, nvfp4_arithmetic, quantized_shape};
use microscale_test_support::oracle::{self, Exact};
use proptest::prelude::*;

use super::inputs::{any_of, runs};

/// The documented result for a slice of `len` elements, computed without overflow.
#[derive(Debug, PartialEq)]
enum Fit {
    Holds,
    TooShort,
    Overlaps,
    /// Rows would overlap, and `rows` · `cols` is also too large or close to it. Both errors fit.
    OverlapsOrCountless,
    /// The count overflows. A shape close to that may be refused as too large or as too long.
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

/// Asserts that the result is the expected one.
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
    fn quantize_refuses_mismatched_shapes(rows in size(), cols in size(), row_stride in size(), len in 0..200usize) {
        let shape = Shape { rows, cols, row_stride };
        let what = format!("{shape:?} in {len}");
        assert_fit(quantize(&vec![1.0f32; len], shape, &Recipe::default()), fit(shape, len), &what);
    }

    #[test]
    fn dequantize_refuses_mismatched_rows(
        rows in 0..9usize,
        cols in 0..70usize,
        format in any_of::<Format>(),
        row_stride in prop_oneof![0..140usize, size()],
        len in 0..400usize,
    ) {
        let tensor = QuantizedTensor::zeros(QuantizedShape::new(format, rows, cols)).expect("a small tensor");
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
fn errors_name_the_cause() {
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
    let mut right = Report::default();
    (right.nan, right.infinite, right.first_non_finite) = (2, 1, Some(first));
    assert_eq!(report, right);
}

/// A large but countable shape of a short slice is refused before anything of its size is
/// allocated.
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
    let (values, shape) = ([1.0f32; 64], Shape::new(2, 32));
    for format in Format::WITH_KERNELS {
        let recipe = Recipe::of(format, Numerics::default_for(format)).expect("the default");
        let right = quantized_shape(shape, &recipe);
        let sizes = [(1, 64), (2, 31), (3, 32), (0, 0), (64, 1)];
        let of_size = |(rows, cols): (usize, usize)| QuantizedShape { rows, cols, ..right };
        let mut others: Vec<_> = sizes.into_iter().map(of_size).collect();
        others.push(right.with_scale_layout(ScaleLayout::Swizzled));
        others.extend(Format::WITH_KERNELS.iter().map(|format| QuantizedShape { format: *format, ..right }));
        others.retain(|other| *other != right);
        assert_eq!(others.len(), 5 + 1 + 3);
        for other in others {
            let mut tensor = QuantizedTensor::zeros(other).expect("a small tensor");
            let before = tensor.clone();
            for isa in Isa::available() {
                let refused =
                    quantize_into(&values, shape, &recipe, QuantizeOptions::new().isa(isa), &mut tensor);
                let Err(Error::QuantizedShape { expected, found }) = refused else {
                    panic!("{other:?}: {refused:?}")
                };
                assert_eq!((expected, found), (right, other));
            }
            let refused = quantize_into(&values, shape, &recipe, QuantizeOptions::new(), &mut tensor);
            assert!(matches!(refused, Err(Error::QuantizedShape { .. })), "{other:?}: {refused:?}");
            assert_eq!(tensor, before, "a refused call has written");
            if (other.rows, other.cols) != (2, 32) {
                let refused = ErrorStats::of_quantized(&values, shape, &tensor);
                assert!(matches!(refused, Err(Error::QuantizedShape { .. })), "{other:?}: {refused:?}");
            }
        }
    }
}

#[test]
fn parts_of_another_length_are_refused() {
    // Blocks per row, and bytes per block. The swizzled scales of 2 rows are a tile of 512 bytes
    // per 4 blocks.
    let sizes = [
        (Format::Mxfp4, 2, 16, 512),
        (Format::Nvfp4, 3, 8, 512),
        (Format::Mxfp8E4m3, 2, 32, 512),
        (Format::Mxfp8E5m2, 2, 32, 512),
    ];
    for (format, in_row, block_bytes, tiles) in sizes {
        for (scale_layout, scales) in [(ScaleLayout::Linear, 2 * in_row), (ScaleLayout::Swizzled, tiles)] {
            let shape = QuantizedShape::new(format, 2, 33).with_scale_layout(scale_layout);
            let right = (2 * in_row * block_bytes, scales);
            assert_eq!(shape.bytes().expect("a small shape"), right, "{shape:?}");
            let made = |codes, scales| QuantizedTensor::from_parts(shape, vec![0; codes], vec![0; scales]);
            assert!(made(right.0, right.1).is_ok(), "{shape:?}");
            for (codes, scales) in [
                (right.0 - 1, right.1),
                (right.0 + 1, right.1),
                (right.0, right.1 - 1),
                (right.0, right.1 + 1),
                (33, right.1),
                (0, 0),
            ] {
                let refused = made(codes, scales);
                let Err(Error::QuantizedLength { what, shape: of, expected, found }) = refused else {
                    panic!("{codes} and {scales} bytes: {refused:?}")
                };
                let wrong =
                    if codes == right.0 { ("scales", right.1, scales) } else { ("codes", right.0, codes) };
                assert_eq!(((what, expected, found), of), (wrong, shape));
            }
        }
    }
}

#[test]
fn shapes_beyond_memory_are_refused() {
    for &(_, format) in Format::WORDS {
        for &(_, scale_layout) in ScaleLayout::WORDS {
            let huge = [(usize::MAX, usize::MAX), (usize::MAX, 1), (1, usize::MAX), (1 << 40, 1 << 40)];
            for (rows, cols) in huge {
                let shape = QuantizedShape::new(format, rows, cols).with_scale_layout(scale_layout);
                let found = QuantizedTensor::from_parts(shape, vec![], vec![]);
                let refused = matches!(found, Err(Error::TooLarge { .. } | Error::QuantizedLength { .. }));
                assert!(refused, "{shape:?}");
                let shape = QuantizedShape { rows: usize::MAX, ..shape };
                let found = QuantizedTensor::zeros(shape);
                assert!(matches!(found, Err(Error::TooLarge { .. })), "{shape:?}");
            }
        }
    }
}

/// A sign bit on an NVFP4 scale means something else. The MX formats use all eight bits.
#[test]
fn signed_scales_are_refused() {
    for format in Format::WITH_KERNELS {
        for &(_, scale_layout) in ScaleLayout::WORDS {
            let shape = QuantizedShape::new(format, 2, 40).with_scale_layout(scale_layout);
            let (codes, scales) = shape.bytes().expect("a small shape");
            for byte in 0..=255u8 {
                let index = usize::from(byte) % scales;
                let mut with_byte = vec![0x38; scales];
                with_byte[index] = byte;
                let found = QuantizedTensor::from_parts(shape, vec![0; codes], with_byte);
                match found {
                    Ok(_) => {
                        assert!(format != Format::Nvfp4 || byte < 128, "{byte:#04x} was accepted in {format}")
                    }
                    Err(Error::SignedScale { format: of, index: at, scale }) => {
                        assert_eq!((format, of, at), (Format::Nvfp4, format, index));
                        assert_eq!((scale, byte >= 128), (byte.into(), true));
                    }
                    Err(why) => panic!("{format}, {byte:#04x}: {why}"),
                }
            }
        }
    }
}

#[test]
fn formats_refuse_the_numerics_of_other_formats() {
    use Numerics::{CompressedTensors, Ggml, Modelopt, Ocp, Torchao, TransformerEngine};
    let table: [(Format, &[Numerics]); 4] = [
        (Format::Mxfp4, &[Ocp, Torchao, CompressedTensors, Modelopt, Ggml]),
        (Format::Nvfp4, &[Torchao, CompressedTensors, Modelopt, TransformerEngine]),
        (Format::Mxfp8E4m3, &[Ocp, Torchao]),
        (Format::Mxfp8E5m2, &[Ocp, Torchao]),
    ];
    for (format, known) in table {
        for &(_, numerics) in Numerics::WORDS {
            match Recipe::of(format, numerics) {
                Ok(recipe) => {
                    assert!(known.contains(&numerics), "{format} has {numerics:?}");
                    assert_eq!((recipe.format(), recipe.non_finite), (format, NonFinite::Error));
                    assert_eq!(recipe.scale_layout, ScaleLayout::Linear);
                }
                Err(Error::NoNumerics { format: named, numerics: missing }) => {
                    assert!(!known.contains(&numerics), "{format} has no {numerics:?}");
                    assert_eq!((named, missing), (format, numerics));
                }
                Err(why) => panic!("{format}, {numerics:?}: {why}"),
            }
        }
        assert!(known.contains(&Numerics::default_for(format)), "the default of {format}");
    }
}

/// Returns whether a number is a valid global scale.
///
/// It must be positive and normal, and the largest block scale must stay finite under it.
fn is_in_range(given: GlobalScale) -> bool {
    let value = given.value();
    let largest = match given {
        GlobalScale::Divisor(_) => 448.0 / f64::from(value),
        GlobalScale::Multiplier(_) => 448.0 * f64::from(value),
    };
    // From half a step beyond the largest number on, rounding to nearest gives infinity.
    let overflows = f64::from(f32::MAX) * (1.0 + f64::from(f32::EPSILON) / 4.0);
    value.is_normal() && value > 0.0 && largest < overflows
}

fn assert_global_scale(value: f32) {
    for numerics in NVFP4_NUMERICS {
        let expected = nvfp4_arithmetic(numerics).direction;
        for given in [GlobalScale::Divisor(value), GlobalScale::Multiplier(value)] {
            let recipe = Recipe::of(Format::Nvfp4, numerics).expect("numerics of NVFP4");
            let recipe = recipe.with_global(Global::Given(given));
            let what = format!("{numerics:?} with {given:?}");
            assert_eq!(given.in_range(), is_in_range(given), "{what}");
            assert_eq!(GlobalScale::new(given.direction(), value).is_some(), is_in_range(given), "{what}");
            match quantize(&[1.0f32; 16], Shape::new(1, 16), &recipe) {
                Err(Error::GlobalScaleDirection { given: found, expected: wanted }) => {
                    assert_ne!(given.direction(), expected, "{what}");
                    assert_eq!((found, wanted), (given.direction(), expected), "{what}");
                }
                Err(Error::GlobalScale { .. }) => {
                    assert!(given.direction() == expected && !is_in_range(given), "{what}");
                }
                Err(why) => panic!("{what}: {why}"),
                Ok(quantized) => {
                    assert!(given.direction() == expected && is_in_range(given), "{what}");
                    assert_eq!(quantized.tensor.global_scale(), Some(given), "{what}");
                }
            }
            let tensor = QuantizedTensor::zeros(QuantizedShape::new(Format::Nvfp4, 1, 16)).expect("a block");
            match tensor.with_global_scale(given) {
                Ok(tensor) => assert!(is_in_range(given) && tensor.global_scale() == Some(given), "{what}"),
                Err(Error::GlobalScale { .. }) => assert!(!is_in_range(given), "{what}"),
                Err(why) => panic!("{what}: {why}"),
            }
        }
    }
}

#[test]
fn out_of_range_global_scales_are_refused() {
    let ends = [f32::MIN_POSITIVE, f32::MAX, f32::MAX / 448.0, 448.0 / f32::MAX, 1.0, f32::from_bits(1)];
    for end in ends {
        for value in
            [end.next_down().next_down(), end.next_down(), end, end.next_up(), end.next_up().next_up()]
        {
            assert_global_scale(value);
            assert_global_scale(-value);
        }
    }
    for value in [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        assert_global_scale(value);
    }
}

/// Every amax gives a scale in range, and it equals the oracle's.
///
/// f16 and bf16 are tested with every amax.
#[test]
fn every_amax_has_a_global_scale_in_range() {
    fn check<T: Exact>(amax: T) {
        let amax = amax.to_f64() as f32;
        for numerics in NVFP4_NUMERICS {
            let arithmetic = nvfp4_arithmetic(numerics);
            let found = arithmetic.global_scale(amax, |x| T::from_f32(x).to_f32());
            let right = oracle::nvfp4::global_scale::<T>(numerics, amax);
            let what = || format!("{numerics:?}, {} {amax:e}: {found:?}", T::DTYPE.word());
            assert_eq!(found, right, "{}", what());
            assert!(is_in_range(found) && found.direction() == arithmetic.direction, "{}", what());
        }
    }
    let mut rng = fastrand::Rng::with_seed(34);
    let every_exponent =
        (0..255u32).flat_map(|exponent| [0u32, 1, 0x28_0000, 0x7F_FFFF].map(|m| exponent << 23 | m));
    let random = std::iter::repeat_with(|| rng.u32(..0x7F80_0000)).take(1 << 20);
    every_exponent.chain(random).for_each(|bits| check(f32::from_bits(bits)));
    (0..0x7C00).for_each(|bits| check(f16::from_bits(bits)));
    (0..0x7F80).for_each(|bits| check(bf16::from_bits(bits)));
}

#[test]
fn global_scales_are_for_nvfp4_only() {
    for format in [Format::Mxfp4, Format::Mxfp8E4m3, Format::Mxfp8E5m2] {
        let tensor = QuantizedTensor::zeros(QuantizedShape::new(format, 1, 32)).expect("a block");
        let refused = tensor.with_global_scale(GlobalScale::Divisor(1.0));
        assert!(matches!(refused, Err(Error::NoGlobalScale { format: of }) if of == format), "{refused:?}");
        let recipe = Recipe::of(format, Numerics::Ocp).expect("OCP's");
        assert_eq!(recipe.with_global(Global::Given(GlobalScale::Divisor(2.0))), recipe);
    }
}

#[test]
fn empty_shapes_are_accepted() {
    for (rows, cols) in [(0, 0), (0, 7), (7, 0), (0, usize::MAX), (usize::MAX, 0)] {
        for row_stride in [0, cols, usize::MAX] {
            let shape = Shape::new(rows, cols).with_row_stride(row_stride);
            for recipe in every_recipe(&[3.0]) {
                let quantized = quantize::<f32>(&[], shape, &recipe).expect("nothing to do");
                assert_eq!(quantized.report, Report::default(), "{recipe:?}");
                assert_eq!((quantized.tensor.rows(), quantized.tensor.cols()), (rows, cols), "{recipe:?}");
                let empty = ([].as_slice(), [].as_slice());
                assert_eq!((quantized.tensor.codes(), quantized.tensor.scales()), empty, "{recipe:?}");
                assert!(dequantize::<f32>(&quantized.tensor).is_empty(), "{recipe:?}");
            }
            let recipe = Recipe { non_finite: NonFinite::Error, ..Recipe::default() };
            let quantized = quantize::<f32>(&[], shape, &recipe).expect("nothing to do");
            assert_eq!(quantized.report, Report::default());
            assert_eq!((quantized.tensor.rows(), quantized.tensor.cols()), (rows, cols));
            assert_eq!((quantized.tensor.codes(), quantized.tensor.scales()), ([].as_slice(), [].as_slice()));
            assert!(dequantize::<f32>(&quantized.tensor).is_empty());
            for isa in Isa::available() {
                let mut out = [5.0f32; 3];
                dequantize_with(isa, &quantized.tensor, &mut out, row_stride).expect("nothing to do");
                assert_eq!(out, [5.0; 3], "{isa:?}, {shape:?}");
            }
            let stats =
                ErrorStats::of_quantized::<f32>(&[], shape, &quantized.tensor).expect("nothing to do");
            assert_eq!(stats.elements(), 0);
        }
    }
}
