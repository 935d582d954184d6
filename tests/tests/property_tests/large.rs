//! Tests that matrices split between threads give the same results as their rows one by one.

use half::{bf16, f16};
use microscale::cpu::{Isa, amax_with, dequantize_with};
use microscale::{
    ErrorStats, Format, Global, NonFinite, Numerics, Position, QuantizeOptions, QuantizedShape,
    QuantizedTensor, Recipe, Report, ScaleLayout, Shape, Words, quantize, quantize_into,
};
use microscale_test_support::cases::{assert_same_blocks, quantized_shape, spread};
use microscale_test_support::oracle::mx::BLOCK;
use microscale_test_support::oracle::{self, Exact, Expected};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Shapes around the sizes at which work is split, multiples of 65 536 elements.
///
/// They have one or many rows, and whole or partial blocks.
const SHAPES: [(usize, usize); 16] = [
    (1, 65_535),
    (1, 65_536),
    (1, 65_537),
    (1, 65_569),
    (1, 131_071),
    (1, 200_001),
    (3, 65_536),
    (3, 65_505),
    (2047, 32),
    (2048, 32),
    (2049, 32),
    (2049, 31),
    (4099, 7),
    (700, 97),
    (97, 1001),
    (5, 33_333),
];

fn pools() -> [ThreadPool; 3] {
    [1, 2, 3].map(|threads| ThreadPoolBuilder::new().num_threads(threads).build().expect("threads"))
}

/// Returns every magnitude, with similar elements in a block, and few non-finite ones.
fn values<T: Exact>(rows: usize, cols: usize, rng: &mut fastrand::Rng) -> Vec<T> {
    let mut exponent = 0;
    let one = |index: usize| {
        if index.is_multiple_of(BLOCK) {
            exponent = rng.i32(T::SMALLEST_EXPONENT..T::LARGEST.log2() as i32);
        }
        match rng.u32(..5000) {
            0 => f64::NAN,
            1 => f64::NEG_INFINITY,
            2 => f64::INFINITY,
            _ => (rng.f64() - 0.5) * oracle::power_of_two(exponent),
        }
    };
    (0..rows * cols).map(one).map(T::round_f64).collect()
}

/// Quantizes rows one by one with the reference under the common global scale, and adds the
/// reports.
fn row_by_row<T: Exact>(values: &[T], shape: Shape, recipe: &Recipe, whole: &Expected) -> Expected {
    let global = whole.global_scale.map_or(Global::Absent, Global::Given);
    let alone = Recipe { scale_layout: ScaleLayout::Linear, ..recipe.with_global(global) };
    let mut sum = Expected { global_scale: whole.global_scale, ..Expected::default() };
    for row in 0..shape.rows {
        let mut tensor =
            QuantizedTensor::zeros(QuantizedShape::new(recipe.format(), 1, shape.cols)).expect("a row");
        let row_values = &values[row * shape.row_stride..][..shape.cols];
        let row_shape = Shape::new(1, shape.cols);
        let mut report = quantize_into(
            row_values,
            row_shape,
            &alone,
            QuantizeOptions::new().isa(Isa::Reference),
            &mut tensor,
        )
        .expect("a row");
        report.first_non_finite = report.first_non_finite.map(|at| Position { row, ..at });
        sum.report += report;
        sum.codes.extend(tensor.codes());
        sum.scales.extend(tensor.scales());
    }
    if recipe.scale_layout == ScaleLayout::Swizzled {
        let in_row = shape.cols.div_ceil(recipe.format().block());
        sum.scales = oracle::layout::swizzle(&sum.scales, shape.rows, in_row);
    }
    sum
}

/// Returns recipes of each format, in both layouts, under both policies that refuse nothing.
fn recipes() -> Vec<Recipe> {
    let mut recipes = Vec::new();
    for format in Format::WITH_KERNELS {
        for &(_, scale_layout) in ScaleLayout::WORDS {
            for non_finite in [NonFinite::Propagate, NonFinite::Saturate] {
                let named = Recipe::of(format, Numerics::default_for(format)).expect("the default");
                recipes.push(Recipe { scale_layout, non_finite, ..named });
            }
        }
    }
    recipes
}

fn check<T: Exact>(pools: &[ThreadPool], seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    for (rows, cols) in SHAPES {
        let values = values::<T>(rows, cols, &mut rng);
        let gap = rng.usize(1..9);
        for (values, shape) in
            [(values.clone(), Shape::new(rows, cols)), spread(&values, Shape::new(rows, cols), cols + gap)]
        {
            for recipe in recipes() {
                let whole = oracle::quantize(&values, shape, &recipe);
                let right = row_by_row(&values, shape, &recipe, &whole);
                assert_eq!(right, whole, "the oracle: {shape:?}, {recipe:?}");
                for isa in Isa::available() {
                    for pool in pools {
                        let what = || {
                            format!("{isa:?}, {shape:?}, {recipe:?}, {} threads", pool.current_num_threads())
                        };
                        let mut found =
                            QuantizedTensor::zeros(quantized_shape(shape, &recipe)).expect("a tensor");
                        let report = pool
                            .install(|| {
                                quantize_into(
                                    &values,
                                    shape,
                                    &recipe,
                                    QuantizeOptions::new().isa(isa),
                                    &mut found,
                                )
                            })
                            .unwrap_or_else(|why| panic!("{}: {why}", what()));
                        assert_same_blocks(&found, &right, what);
                        assert_eq!(report, right.report, "{}", what());
                    }
                }
            }
        }
    }
}

#[test]
fn quantizing_f32_is_row_by_row() {
    check::<f32>(&pools(), 4);
}

#[test]
fn quantizing_f16_is_row_by_row() {
    check::<f16>(&pools(), 5);
}

#[test]
fn quantizing_bf16_is_row_by_row() {
    check::<bf16>(&pools(), 6);
}

/// The first of several non-finite elements is found by whichever thread, and nothing is counted
/// twice.
#[test]
fn the_first_non_finite_element_is_the_first_in_row_major_order() {
    let mut rng = fastrand::Rng::with_seed(7);
    for pool in pools() {
        for (rows, cols) in SHAPES {
            let shape = Shape::new(rows, cols);
            let mut values = vec![1.0f32; rows * cols];
            let mut places: Vec<usize> = (0..3).map(|_| rng.usize(..values.len())).collect();
            places.sort_unstable();
            places.dedup();
            for place in &places {
                values[*place] = f32::NAN;
            }
            let why = pool.install(|| quantize(&values, shape, &Recipe::default()));
            let Err(microscale::Error::NonFinite { first, report }) = why else { panic!("{why:?}") };
            assert_eq!(first, Position { row: places[0] / cols, col: places[0] % cols });
            let mut right = Report::default();
            (right.nan, right.first_non_finite) = (places.len() as u64, Some(first));
            assert_eq!(report, right);
        }
    }
}

#[test]
fn dequantizing_is_row_by_row_and_does_not_write_gaps() {
    let mut rng = fastrand::Rng::with_seed(8);
    for (rows, cols) in SHAPES {
        for format in Format::WITH_KERNELS {
            dequantize_row_by_row(format, rows, cols, &mut rng);
        }
    }
}

fn dequantize_row_by_row(format: Format, rows: usize, cols: usize, rng: &mut fastrand::Rng) {
    let shape = QuantizedShape::new(format, rows, cols);
    let (in_row, block_bytes) = (shape.blocks_per_row(), format.block_bytes());
    let codes: Vec<u8> = (0..rows * in_row * block_bytes).map(|_| rng.u8(..)).collect();
    let largest = if format == Format::Nvfp4 { 0x7F } else { 0xFF };
    let scales: Vec<u8> = (0..rows * in_row).map(|_| rng.u8(..=largest)).collect();
    let row_stride = cols + rng.usize(..9);
    let untouched = 12345.0f32;
    let mut right = vec![untouched; rows * row_stride];
    for row in 0..rows {
        let codes = codes[row * in_row * block_bytes..][..in_row * block_bytes].to_vec();
        let scales = scales[row * in_row..][..in_row].to_vec();
        let alone =
            QuantizedTensor::from_parts(QuantizedShape::new(format, 1, cols), codes, scales).expect("a row");
        let out = &mut right[row * row_stride..][..cols];
        dequantize_with(Isa::Reference, &alone, out, cols).expect("a row");
    }
    let linear = QuantizedTensor::from_parts(shape, codes, scales).expect("a tensor");
    for tensor in [linear.convert_layout(ScaleLayout::Swizzled), linear] {
        for isa in Isa::available() {
            for pool in pools() {
                let mut found = vec![untouched; rows * row_stride];
                pool.install(|| dequantize_with(isa, &tensor, &mut found, row_stride)).expect("room for all");
                let different = found.iter().zip(&right).position(|(a, b)| a.to_bits() != b.to_bits());
                assert_eq!(different, None, "{isa:?}, {:?}/{row_stride}", tensor.shape());
            }
        }
    }
}

/// The largest magnitude and non-finite values are found at any position, by whichever thread.
#[test]
fn the_amax_of_large_matrices_is_found() {
    let mut rng = fastrand::Rng::with_seed(13);
    for pool in pools() {
        for (rows, cols) in SHAPES {
            let shape = Shape::new(rows, cols).with_row_stride(cols + rng.usize(..3));
            let mut values = vec![f32::NAN; rows * shape.row_stride];
            let place = |rng: &mut fastrand::Rng| rng.usize(..rows) * shape.row_stride + rng.usize(..cols);
            for row in 0..rows {
                values[row * shape.row_stride..][..cols].fill_with(|| rng.f32() - 0.5);
            }
            let check = |values: &[f32]| {
                for isa in Isa::available() {
                    let found = pool.install(|| amax_with(isa, values, shape)).expect("the shape fits");
                    assert_eq!(found, oracle::amax(values, shape), "{isa:?}, {shape:?}");
                }
            };
            check(&values);
            values[place(&mut rng)] = -7.5;
            check(&values);
            values[place(&mut rng)] = f32::NEG_INFINITY;
            check(&values);
            values[place(&mut rng)] = f32::NAN;
            check(&values);
        }
    }
}

#[test]
fn error_figures_do_not_depend_on_threads() {
    let mut rng = fastrand::Rng::with_seed(9);
    let shape = Shape::new(97, 1001);
    let values = values::<f32>(97, 1001, &mut rng);
    let recipe = Recipe { non_finite: NonFinite::Propagate, ..Recipe::default() };
    let tensor = quantize(&values, shape, &recipe).expect("nothing is refused").tensor;
    let figures = pools().map(|pool| {
        pool.install(|| ErrorStats::of_quantized(&values, shape, &tensor))
            .expect("the tensor is of the shape")
    });
    assert!(figures.iter().all(|figure| *figure == figures[0]), "{figures:?}");
}

/// Tests an output large enough for non-temporal stores.
///
/// It starts at any address, and its rows have gaps or none.
fn past_the_caches<T: Exact>(format: Format) {
    let (rows, cols) = (4100, 33 * 128);
    let mut rng = fastrand::Rng::with_seed(5);
    let shape = QuantizedShape::new(format, rows, cols);
    let (code_bytes, scale_bytes) = shape.bytes().expect("a size");
    let codes = (0..code_bytes).map(|_| rng.u8(..)).collect();
    // Includes the bytes of NaN.
    let scales = (0..scale_bytes).map(|_| rng.u8(0x40..=0x7F)).collect();
    let tensor = QuantizedTensor::from_parts(shape, codes, scales).expect("a tensor");
    for (row_stride, offset) in [(cols, 0), (cols, 3), (cols + 5, 1)] {
        let len = rows * row_stride + offset;
        assert!(len * size_of::<T>() > 32 << 20, "large enough");
        let filled = |isa| {
            let mut out = vec![T::round_f64(7.0); len];
            dequantize_with(isa, &tensor, &mut out[offset..], row_stride).expect("rows that fit");
            out
        };
        let expected = filled(Isa::Reference);
        for isa in Isa::available() {
            let same = filled(isa).iter().zip(&expected).all(|(a, b)| a.bits() == b.bits());
            assert!(same, "{isa:?} {format:?} {row_stride} {offset}");
        }
    }
}

#[test]
fn non_temporal_stores_write_the_same_bytes() {
    past_the_caches::<bf16>(Format::Nvfp4);
    past_the_caches::<f16>(Format::Mxfp4);
    past_the_caches::<f32>(Format::Nvfp4);
}
