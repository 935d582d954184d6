//! Tests quantization of every 16-bit pattern, and of every tie at every scale.

use half::{bf16, f16};
use microscale::{Format, Global, Recipe, Shape};
use microscale_test_support::cases::{
    NVFP4_NUMERICS, assert_as_expected, every_mxfp4_recipe, every_mxfp8_recipe, every_nvfp4_recipe,
    given_for, nvfp4_arithmetic,
};
use microscale_test_support::oracle::mx::BLOCK;
use microscale_test_support::oracle::{Exact, power_of_two};
use rayon::prelude::*;

/// Tests blocks of neighbouring patterns, blocks of patterns from everywhere, and steps in between.
///
/// Codes of neighbouring patterns are all large, and codes of the others are mostly zero.
fn quantize_every_16_bit_pattern<T: Exact>(recipes: &[Recipe]) {
    for step in [1, 1 << 3, 1 << 5, 1 << 8, 1 << 11] {
        let patterns = (0..step).flat_map(|start| (start..1 << 16).step_by(step));
        let values: Vec<T> = patterns.map(|bits| T::of_bits(bits as u32)).collect();
        recipes.par_iter().for_each(|recipe| {
            assert_as_expected(&values, Shape::new(1 << 6, 1 << 10), recipe);
        });
    }
}

#[test]
fn quantize_every_f16_to_mx() {
    quantize_every_16_bit_pattern::<f16>(&[every_mxfp4_recipe(), every_mxfp8_recipe()].concat());
}

#[test]
fn quantize_every_bf16_to_mx() {
    quantize_every_16_bit_pattern::<bf16>(&[every_mxfp4_recipe(), every_mxfp8_recipe()].concat());
}

/// The global scales are computed, absent, and given for amaxes of many magnitudes.
#[test]
fn quantize_every_f16_to_nvfp4() {
    quantize_every_16_bit_pattern::<f16>(&every_nvfp4_recipe(&[1e-5, 0.37, 700.0]));
}

#[test]
fn quantize_every_bf16_to_nvfp4() {
    quantize_every_16_bit_pattern::<bf16>(&every_nvfp4_recipe(&[1e-36, 0.37, 1e30]));
}

/// Tests every pattern under many block scales. One element of each block determines its scale.
fn quantize_every_16_bit_pattern_under_one_scale<T: Exact>(leads: &[f64]) {
    for lead in leads {
        let limit = T::round_f64(*lead).to_f64();
        let patterns = (0..1u32 << 16).map(T::of_bits).filter(|v| v.to_f64().abs() <= limit);
        let patterns: Vec<T> = patterns.collect();
        let blocks = patterns.chunks(15).flat_map(|part| {
            let zeros = std::iter::repeat_n(T::round_f64(0.0), 15 - part.len());
            [T::round_f64(*lead)].into_iter().chain(part.iter().copied()).chain(zeros)
        });
        let values: Vec<T> = blocks.collect();
        let shape = Shape::new(values.len() / 16, 16);
        for numerics in NVFP4_NUMERICS {
            let named = Recipe::of(Format::Nvfp4, numerics).expect("numerics of NVFP4");
            // The block is the tensor's largest, or smaller by a factor of about a hundred.
            for above in [1.0, 1.9, 117.3] {
                let direction = nvfp4_arithmetic(numerics).direction;
                let given = Global::Given(given_for(direction, (limit * above).min(3e38) as f32));
                assert_as_expected(&values, shape, &named.with_global(given));
            }
            assert_as_expected(&values, shape, &named);
        }
    }
}

#[test]
fn quantize_every_f16_to_nvfp4_under_one_scale() {
    quantize_every_16_bit_pattern_under_one_scale::<f16>(&[6e-8, 1e-5, 0.01, 1.0, 5.0, 77.7, 65504.0]);
}

#[test]
fn quantize_every_bf16_to_nvfp4_under_one_scale() {
    quantize_every_16_bit_pattern_under_one_scale::<bf16>(&[1e-39, 1e-30, 0.01, 1.0, 5.0, 77.7, 3.3e38]);
}

/// Each scale rule reaches every scale byte and code.
///
/// amax is 4 and 6 scales, and one ulp to either side.
#[test]
fn quantize_every_tie_at_every_scale() {
    let mut values = Vec::new();
    for k in -149..=127 {
        for (multiple, ulps) in [(4.0, 0), (4.0, -1), (6.0, 0), (6.0, 1), (7.0, 0), (7.0, -1), (3.5, 0)] {
            let step = |v: f64, ulps: i32| f32::from_bits((v as f32).to_bits().saturating_add_signed(ulps));
            let finite = |v: f32| if v.is_finite() { v } else { f32::MAX };
            let amax = finite(step(multiple * power_of_two(k), ulps));
            let ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0].map(|tie| tie * power_of_two(k));
            let around = ties.iter().flat_map(|tie| [-1, 0, 1].map(|ulps| step(*tie, ulps)));
            let elements =
                around.map(|v| v.min(amax)).chain([amax, 0.0, -0.0, amax / 2.0, amax / 3.0, amax / 64.0]);
            let signed = elements.enumerate().map(|(i, v)| if i % 2 == 0 { v } else { -v });
            values.extend(signed.chain([
                -f32::MIN_POSITIVE.min(amax),
                f32::from_bits(1),
                -f32::from_bits(1),
                amax / 7.0,
                -amax,
            ]));
        }
    }
    assert_eq!(values.len() % BLOCK, 0);
    let blocks = values.len() / BLOCK;
    let recipes = [every_mxfp4_recipe(), every_mxfp8_recipe(), every_nvfp4_recipe(&[1.0])].concat();
    recipes.par_iter().for_each(|recipe| {
        assert_as_expected(&values, Shape::new(blocks, BLOCK), recipe);
    });
}
