//! Quantizing equals the oracle: bytes, counts and refusals, on every instruction set.

use half::{bf16, f16};
use microscale::cpu::Isa;
use microscale::formats::NegativeZero;
use microscale::{NonFinite, Recipe, Shape};
use microscale_tests::cases::{assert_as_expected, every_recipe, quantize, spread};
use microscale_tests::oracle::{BLOCK, Exact, unpack};
use proptest::prelude::*;

use super::inputs::{matrix, recipe, runs};

proptest! {
    #![proptest_config(runs(3000))]

    #[test]
    fn f32_is_as_expected(matrix in matrix::<f32>(), recipe in recipe()) {
        assert_as_expected(&matrix.values, matrix.shape, &recipe);
    }

    #[test]
    fn f16_is_as_expected(matrix in matrix::<f16>(), recipe in recipe()) {
        assert_as_expected(&matrix.values, matrix.shape, &recipe);
    }

    #[test]
    fn bf16_is_as_expected(matrix in matrix::<bf16>(), recipe in recipe()) {
        assert_as_expected(&matrix.values, matrix.shape, &recipe);
    }

    #[test]
    fn padding_is_what_zeros_are(matrix in matrix::<f32>(), recipe in recipe()) {
        assert_padding(&matrix.values, matrix.shape, &recipe);
    }

    #[test]
    fn what_lies_between_rows_does_not_matter(matrix in matrix::<bf16>(), recipe in recipe(), fill in any::<u16>()) {
        let mut other = matrix.clone();
        let stride = other.shape.row_stride;
        for (index, value) in other.values.iter_mut().enumerate() {
            if index % stride >= other.shape.cols {
                *value = bf16::from_bits(fill);
            }
        }
        for isa in Isa::available() {
            let found = quantize(isa, &matrix.values, matrix.shape, &recipe).map_err(|why| why.to_string());
            let again = quantize(isa, &other.values, other.shape, &recipe).map_err(|why| why.to_string());
            prop_assert_eq!(found, again);
        }
    }
}

/// Padding behind K has the code of +0; in a block that became NaN it is 0 like the others.
fn assert_padding<T: Exact>(values: &[T], shape: Shape, recipe: &Recipe) {
    let recipe = Recipe { non_finite: NonFinite::Propagate, ..*recipe };
    for isa in Isa::available() {
        let (tensor, _) = quantize(isa, values, shape, &recipe).expect("nothing is refused");
        for (index, code) in unpack(tensor.codes()).into_iter().enumerate() {
            let col = index % (tensor.blocks_per_row() * BLOCK);
            let forced = recipe.arithmetic.negative_zero == NegativeZero::Force;
            let nan = tensor.scales()[index / BLOCK] == 255;
            if col >= shape.cols {
                assert_eq!(code, if forced && !nan { 8 } else { 0 }, "{isa:?}, {shape:?}, column {col}");
            }
        }
    }
}

/// Every K that leaves another tail, for every recipe, with one value of each kind where the tail ends.
#[test]
fn every_tail_is_as_expected() {
    fn check<T: Exact>(rng: &mut fastrand::Rng, cols: usize, recipe: &Recipe) {
        let mut values: Vec<T> =
            (0..2 * cols).map(|_| T::round_f64((rng.f64() - 0.5) * f64::from(rng.u8(1..)))).collect();
        let last = [7.0, -0.0, 1e-30, -1e-30, f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
        values[cols - 1] = T::round_f64(last[rng.usize(..last.len())]);
        let (values, shape) = spread(&values, Shape::new(2, cols), cols + rng.usize(..4));
        assert_as_expected(&values, shape, recipe);
    }
    let mut rng = fastrand::Rng::with_seed(2);
    for cols in 1..=130 {
        for recipe in every_recipe() {
            check::<f32>(&mut rng, cols, &recipe);
            check::<f16>(&mut rng, cols, &recipe);
            check::<bf16>(&mut rng, cols, &recipe);
        }
    }
}

/// Volume: random bits, as they come, and in one magnitude a block, of which half the codes are large.
#[test]
fn many_random_bits_are_as_expected() {
    fn check<T: Exact>(rng: &mut fastrand::Rng, recipe: &Recipe) {
        let any = |rng: &mut fastrand::Rng| T::of_bits(rng.u32(..) >> (32 - T::BITS));
        let shape = Shape::new(5, 16 * BLOCK);
        let values: Vec<T> = (0..shape.elements()).map(|_| any(rng)).collect();
        assert_as_expected(&values, shape, recipe);
        let mut blocks = Vec::new();
        while blocks.len() < shape.elements() {
            let like = any(rng).bits();
            let mantissa = if T::BITS == 32 { 0x80FF_FFFF } else { 0x8000 | rng.u32(..1 << 11) };
            blocks.extend((0..BLOCK).map(|_| T::of_bits(like ^ (rng.u32(..) & mantissa))));
        }
        assert_as_expected(&blocks, shape, recipe);
    }
    let mut rng = fastrand::Rng::with_seed(3);
    for recipe in every_recipe() {
        for _ in 0..10 {
            check::<f32>(&mut rng, &recipe);
            check::<f16>(&mut rng, &recipe);
            check::<bf16>(&mut rng, &recipe);
        }
    }
}

/// Each count alone, by construction.
#[test]
fn counts_count_what_they_say() {
    let recipe = Recipe { non_finite: NonFinite::Propagate, ..Recipe::default() };
    let block = |first: f32, rest: f32| std::iter::once(first).chain(std::iter::repeat_n(rest, BLOCK - 1));
    let smallest = f32::from_bits(1);
    let rows: Vec<f32> = block(6.0, 1.0)
        .chain(block(7.9, 1.0)) // clipped: above 6 scales of 1
        .chain(block(smallest, -0.0)) // flushed, and its scale clamped
        .chain(block(f32::MIN_POSITIVE, 0.0)) // 2 scales of 2^-127: clamped only
        .chain(block(f32::NAN, f32::INFINITY))
        .chain(block(0.0, -0.0)) // nothing to count
        .collect();
    let report = assert_as_expected(&rows, Shape::new(3, 2 * BLOCK), &recipe).report;
    assert_eq!((report.clipped_blocks, report.flushed_blocks, report.saturated_scales), (1, 1, 2));
    assert_eq!((report.nan, report.infinite), (1, 31));
    assert_eq!(report.first_non_finite.map(|at| (at.row, at.col)), Some((2, 0)));
}
