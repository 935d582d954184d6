//! Tests that quantization equals the oracle in bytes, counts and refusals, on every instruction
//! set.

use half::{bf16, f16};
use microscale::cpu::Isa;
use microscale::formats::{NegativeZero, ScaleLayout};
use microscale::{Format, Global, NonFinite, QuantizedShape, QuantizedTensor, Recipe, Report, Scheme, Shape};
use microscale_test_support::cases::{
    NVFP4_NUMERICS, assert_as_expected, block_of_ties, every_recipe, given_for, nvfp4_arithmetic, quantize,
    spread,
};
use microscale_test_support::oracle::mx::BLOCK;
use microscale_test_support::oracle::nvfp4::{Rule, Scaling};
use microscale_test_support::oracle::{self, Exact, power_of_two, unpack};
use proptest::prelude::*;

use super::inputs::{case, runs};

proptest! {
    #![proptest_config(runs(3000))]

    #[test]
    fn f32_is_as_expected(case in case::<f32>()) {
        assert_as_expected(&case.matrix.values, case.matrix.shape, &case.recipe);
    }

    #[test]
    fn f16_is_as_expected(case in case::<f16>()) {
        assert_as_expected(&case.matrix.values, case.matrix.shape, &case.recipe);
    }

    #[test]
    fn bf16_is_as_expected(case in case::<bf16>()) {
        assert_as_expected(&case.matrix.values, case.matrix.shape, &case.recipe);
    }

    #[test]
    fn padding_equals_explicit_zeros(case in case::<f32>()) {
        assert_padding(&case.matrix.values, case.matrix.shape, &case.recipe);
    }

    #[test]
    fn values_between_rows_do_not_matter(case in case::<bf16>(), fill in any::<u16>()) {
        let mut other = case.matrix.clone();
        let stride = other.shape.row_stride;
        for (index, value) in other.values.iter_mut().enumerate() {
            if index % stride >= other.shape.cols {
                *value = bf16::from_bits(fill);
            }
        }
        for isa in Isa::available() {
            let found = quantize(isa, &case.matrix.values, case.matrix.shape, &case.recipe);
            let again = quantize(isa, &other.values, other.shape, &case.recipe);
            prop_assert_eq!(found.map_err(|why| why.to_string()), again.map_err(|why| why.to_string()));
        }
    }
}

/// Returns whether a scheme encodes +0 as −0.
fn is_forced(scheme: Scheme) -> bool {
    match scheme {
        Scheme::Mxfp4(arithmetic) => arithmetic.negative_zero == NegativeZero::Force,
        Scheme::Nvfp4(arithmetic, _) => arithmetic.negative_zero == NegativeZero::Force,
        Scheme::Mxfp8E4m3(_) | Scheme::Mxfp8E5m2(_) | Scheme::Comparison(_) => false,
    }
}

/// Asserts that padding after K has the code of +0, or 0 in a NaN block.
fn assert_padding<T: Exact>(values: &[T], shape: Shape, recipe: &Recipe) {
    let recipe = Recipe { non_finite: NonFinite::Propagate, scale_layout: ScaleLayout::Linear, ..*recipe };
    let block = recipe.format().block();
    for isa in Isa::available() {
        let (tensor, _) = quantize(isa, values, shape, &recipe).expect("nothing is refused");
        for (index, code) in unpack(recipe.format(), tensor.codes()).into_iter().enumerate() {
            let col = index % (tensor.blocks_per_row() * block);
            let nan = tensor.scales()[index / block] == oracle::nan_scale(recipe.format());
            let right = if is_forced(recipe.scheme) && !nan { 8 } else { 0 };
            if col >= shape.cols {
                assert_eq!(code, right, "{isa:?}, {shape:?}, {recipe:?}, column {col}");
            }
        }
    }
}

/// Tests every K with a different tail, for every recipe, with one value of each kind at the end.
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
    let recipes = every_recipe(&[3.0]);
    for cols in 1..=130 {
        for recipe in &recipes {
            let scale_layout = if rng.bool() { ScaleLayout::Linear } else { ScaleLayout::Swizzled };
            let recipe = Recipe { scale_layout, ..*recipe };
            check::<f32>(&mut rng, cols, &recipe);
            check::<f16>(&mut rng, cols, &recipe);
            check::<bf16>(&mut rng, cols, &recipe);
        }
    }
}

/// Tests many random bits, as they are and with a common magnitude per block.
///
/// The common magnitude makes half the codes large.
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
            blocks.extend((0..recipe.format().block()).map(|_| T::of_bits(like ^ (rng.u32(..) & mantissa))));
        }
        assert_as_expected(&blocks, shape, recipe);
    }
    let mut rng = fastrand::Rng::with_seed(3);
    for recipe in every_recipe(&[1.0, 1e-20]) {
        for _ in 0..10 {
            check::<f32>(&mut rng, &recipe);
            check::<f16>(&mut rng, &recipe);
            check::<bf16>(&mut rng, &recipe);
        }
    }
}

/// Tests each count separately, by construction.
#[test]
fn counts_match_their_events() {
    let recipe = Recipe { non_finite: NonFinite::Propagate, ..Recipe::default() };
    let block = |first: f32, rest: f32| std::iter::once(first).chain(std::iter::repeat_n(rest, BLOCK - 1));
    let smallest = f32::from_bits(1);
    let rows: Vec<f32> = block(6.0, 1.0)
        .chain(block(7.9, 1.0)) // Clipped: above 6 scales of 1.
        .chain(block(smallest, -0.0)) // Flushed, with a clamped scale.
        .chain(block(f32::MIN_POSITIVE, 0.0)) // 2 scales of 2^-127: only clamped.
        .chain(block(f32::NAN, f32::INFINITY))
        .chain(block(0.0, -0.0)) // Not counted.
        .collect();
    let report = assert_as_expected(&rows, Shape::new(3, 2 * BLOCK), &recipe).report;
    assert_eq!((report.clipped_blocks, report.flushed_blocks, report.saturated_scales), (1, 1, 2));
    assert_eq!((report.nan, report.infinite), (1, 31));
    assert_eq!(report.first_non_finite.map(|at| (at.row, at.col)), Some((2, 0)));
}

/// Tests each of NVFP4's counts separately, by construction.
///
/// The global scale is 1 in all numerics, so block scales are amax / 6.
#[test]
fn nvfp4_counts_match_their_events() {
    let block = |first: f32, rest: f32| std::iter::once(first).chain(std::iter::repeat_n(rest, 15));
    /// Clipped, flushed and saturated blocks.
    ///
    /// One row each for torchao, compressed-tensors, ModelOpt and Transformer Engine.
    type Counts = [[u64; 3]; 4];
    let cases: [(&str, [f32; 2], Counts); 12] = [
        ("ordinary", [6.0, -1.0], [[0, 0, 0]; 4]),
        ("zero", [0.0, -0.0], [[0, 0, 0]; 4]),
        ("the largest", [2688.0, 5.0], [[0, 0, 0]; 4]),
        ("rounded down to 448, at the tie", [2784.0, 5.0], [[0, 0, 0]; 4]),
        ("beyond the tie", [2784.001, 5.0], [[0, 0, 1]; 4]),
        ("6.47 scales", [2900.0, 5.0], [[0, 0, 1]; 4]),
        ("6.54 scales", [2930.0, 5.0], [[1, 0, 1]; 4]),
        ("6.19 scales of 1", [6.1875, 5.0], [[0, 0, 0]; 4]),
        // torchao clamps to 8 of these scales.
        ("8.4 of the least scales", [0.01640625, 0.0], [[0, 0, 1], [1, 0, 0], [1, 0, 0], [1, 0, 0]]),
        ("a scale of 2^-7", [0.046875, 0.01], [[0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]),
        (
            "a scale of 2^-10, half the least",
            [0.005859375, 0.0],
            [[0, 0, 1], [0, 1, 1], [0, 0, 1], [1, 1, 1]],
        ),
        ("next to nothing", [1e-30, -1e-30], [[0, 1, 1], [0, 1, 1], [0, 1, 1], [1, 1, 1]]),
    ];
    for (index, numerics) in NVFP4_NUMERICS.into_iter().enumerate() {
        for (name, [first, rest], counts) in &cases {
            let recipe = Recipe::of(Format::Nvfp4, numerics).expect("numerics of NVFP4");
            let recipe = recipe.with_global(Global::Absent);
            let values: Vec<f32> = block(*first, *rest).collect();
            let report = assert_as_expected(&values, Shape::new(1, 16), &recipe).report;
            let found = [report.clipped_blocks, report.flushed_blocks, report.saturated_scales];
            assert_eq!(found, counts[index], "{name}, {numerics:?}");
        }
    }
}

/// Tests quotients that are ties, and their neighbours.
///
/// Every block scale occurs, under global scales of every size.
#[test]
fn nvfp4_ties_are_as_expected_under_every_scale() {
    fn check<T: Exact>(rng: &mut fastrand::Rng) {
        for numerics in NVFP4_NUMERICS {
            let arithmetic = nvfp4_arithmetic(numerics);
            let extreme = [f32::from_bits(1), 1e-38, 1e-36, 1e-30, 1e30, f32::MAX];
            let random = std::iter::repeat_with(|| f32::from_bits(rng.u32(1..0x7F80_0000))).take(20);
            let amaxes: Vec<f32> = extreme.into_iter().chain(random).collect();
            for amax in amaxes.into_iter().chain([1.0, 2688.0, 3.1, 0.37]) {
                let given = given_for(arithmetic.direction, amax);
                let rule = Rule { numerics, global: given.value(), negative_zero: NegativeZero::Keep };
                let scales = (1..=0x7E).chain([0x08, 0x38, 0x7E]);
                let values: Vec<T> = scales.flat_map(|scale| block_of_ties(rule, scale, rng)).collect();
                let shape = Shape::new(values.len() / 16, 16);
                for global in [Global::Given(given), Global::FromAmax] {
                    let recipe = Recipe::of(Format::Nvfp4, numerics).expect("numerics of NVFP4");
                    assert_as_expected(&values, shape, &recipe.with_global(global));
                }
            }
        }
    }
    let mut rng = fastrand::Rng::with_seed(30);
    check::<f32>(&mut rng);
    check::<f16>(&mut rng);
    check::<bf16>(&mut rng);
}

/// Checks that many quotients of the test above are ties.
#[test]
fn blocks_of_ties_have_ties() {
    let mut rng = fastrand::Rng::with_seed(31);
    for numerics in NVFP4_NUMERICS {
        let rule = Rule { numerics, global: 1.37, negative_zero: NegativeZero::Keep };
        let (mut ties, mut beside) = (0, 0);
        for scale in 1..=0x7E {
            let scaling: Scaling = rule.scaling(scale);
            for value in block_of_ties::<f32>(rule, scale, &mut rng) {
                let quotient = scaling.apply(value).abs();
                let midpoints = [0.25f32, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
                ties += usize::from(midpoints.contains(&quotient));
                beside +=
                    usize::from(midpoints.iter().any(|m| [m.next_up(), m.next_down()].contains(&quotient)));
            }
        }
        assert!(ties > 300 && beside > 300, "{numerics:?}: {ties} ties of {}, {beside} beside", 126 * 16);
    }
}

/// A zero tensor gives zeros of either sign, with a computed or given global scale.
#[test]
fn zero_blocks_become_zeros() {
    let values: Vec<f32> = (0..3 * 70).map(|index| if index % 3 == 0 { -0.0 } else { 0.0 }).collect();
    for recipe in every_recipe(&[1.0, 1e-38, 1e38]) {
        for scale_layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
            let recipe = Recipe { scale_layout, ..recipe };
            let expected = assert_as_expected(&values, Shape::new(3, 70), &recipe);
            assert_eq!(expected.report, Report::default(), "{recipe:?}");
            for isa in Isa::available() {
                let (tensor, _) = quantize(isa, &values, Shape::new(3, 70), &recipe).expect("finite");
                let back = microscale::dequantize::<f32>(&tensor);
                assert!(back.iter().all(|value| *value == 0.0), "{isa:?}, {recipe:?}: {back:?}");
            }
        }
    }
}

/// Without a global scale, blocks are the same as under a global scale of 1.
#[test]
fn an_absent_global_scale_is_one() {
    let mut rng = fastrand::Rng::with_seed(32);
    let shape = Shape::new(20, 100);
    let values: Vec<f32> =
        (0..2000).map(|_| ((rng.f64() - 0.5) * power_of_two(rng.i32(-20..12))) as f32).collect();
    for numerics in NVFP4_NUMERICS {
        let recipe = Recipe::of(Format::Nvfp4, numerics).expect("numerics of NVFP4");
        let one = given_for(nvfp4_arithmetic(numerics).direction, 2688.0);
        assert_eq!(one.value(), 1.0);
        let made = |global| {
            microscale::quantize(&values, shape, &recipe.with_global(global)).expect("finite").tensor
        };
        let (absent, given) = (made(Global::Absent), made(Global::Given(one)));
        assert_eq!((absent.global_scale(), given.global_scale()), (None, Some(one)), "{numerics:?}");
        let without = |tensor: QuantizedTensor| {
            let (codes, scales) = tensor.into_parts();
            QuantizedTensor::from_parts(QuantizedShape::new(Format::Nvfp4, 20, 100), codes, scales)
                .expect("parts")
        };
        assert_eq!(without(given), without(absent), "{numerics:?}");
    }
}
