//! Compares each instruction set with the reference.
//!
//! The inputs are every 16-bit element with many amaxes, and f32 next to every tie.

use half::{bf16, f16};
use microscale::cpu::Isa;
use microscale::formats::{NegativeZero, ScaleRule, Ties, e2m1, mx};
use microscale::{
    Element, Global, QuantizeOptions, QuantizedTensor, Recipe, Scheme, Shape, Words, dequantize,
    quantize_into,
};
use microscale_test_support::cases::{NVFP4_NUMERICS, given_for, nvfp4_arithmetic, quantized_shape};
use rayon::prelude::*;

/// The recipes with separate code paths: every scale rule, every rule for ties, every treatment of
/// −0.
///
/// Instruction sets get a scale rule as a number that they add, so that each rule needs one pair of
/// the other choices only.
fn recipes() -> Vec<Recipe> {
    let mut recipes = Vec::new();
    let usual = ScaleRule::values().map(|rule| (rule, Ties::Even, NegativeZero::Keep));
    for (scale_rule, ties, negative_zero) in [
        (ScaleRule::Floor, Ties::Even, NegativeZero::DropInput),
        (ScaleRule::Floor, Ties::Even, NegativeZero::Drop),
        (ScaleRule::Floor, Ties::Even, NegativeZero::Force),
        (ScaleRule::Ceil, Ties::Even, NegativeZero::DropInput),
        (ScaleRule::Floor, Ties::Away, NegativeZero::Keep),
        (ScaleRule::Ceil, Ties::Away, NegativeZero::Force),
        (ScaleRule::Floor, Ties::Zero, NegativeZero::Drop),
        (ScaleRule::Ceil, Ties::Zero, NegativeZero::DropInput),
    ]
    .into_iter()
    .chain(usual)
    {
        let arithmetic = mx::Arithmetic { scale_rule, ties, negative_zero };
        recipes.push(Recipe { scheme: Scheme::Mxfp4(arithmetic), ..Recipe::default() });
    }
    for arithmetic in NVFP4_NUMERICS.map(nvfp4_arithmetic) {
        for global in [Global::Given(given_for(arithmetic.direction, 3.0)), Global::Absent] {
            recipes.push(Recipe { scheme: Scheme::Nvfp4(arithmetic, global), ..Recipe::default() });
        }
    }
    recipes
}

/// Quantizes whole blocks on an instruction set.
fn quantized<T: Element>(isa: Isa, values: &[T], recipe: &Recipe) -> (QuantizedTensor, microscale::Report) {
    let shape = Shape::new(1, values.len());
    let mut tensor = QuantizedTensor::zeros(quantized_shape(shape, recipe)).expect("a tensor");
    let report = quantize_into(values, shape, recipe, QuantizeOptions::new().isa(isa), &mut tensor)
        .expect("finite values");
    (tensor, report)
}

fn assert_the_same<T: Element>(values: &[T], recipe: &Recipe, what: &str) {
    let expected = quantized(Isa::Reference, values, recipe);
    for isa in Isa::available().filter(|isa| *isa != Isa::Reference) {
        let found = quantized(isa, values, recipe);
        assert!(found == expected, "{isa:?}, {what}, {recipe:?}");
    }
}

/// Tests every element up to an amax, for amaxes of many exponents and mantissas.
fn every_element<T: Element>(of: fn(u16) -> T) {
    let amaxes: Vec<f32> =
        (-30..=15).map(|exponent| (1.0 + (exponent & 15) as f32 / 16.0) * 2f32.powi(exponent)).collect();
    amaxes.par_iter().for_each(|&amax| {
        let amax = T::from_f32(amax);
        let smaller = (0..=u16::MAX).map(of).filter(|x| x.to_f32().abs() <= amax.to_f32());
        let elements: Vec<T> = smaller.collect();
        for recipe in recipes() {
            let block = recipe.format().block();
            let blocks = elements.chunks(block - 1).flat_map(|rest| {
                let zeros = vec![T::default(); block - 1 - rest.len()];
                [&[amax], rest, &zeros].concat()
            });
            assert_the_same(&blocks.collect::<Vec<_>>(), &recipe, &format!("{amax:?}"));
        }
    });
}

#[test]
fn every_bf16_with_many_amaxes() {
    every_element(bf16::from_bits);
}

#[test]
fn every_f16_with_many_amaxes() {
    every_element(f16::from_bits);
}

/// Tests every exponent of amax, with values that scale to each midpoint of E2M1 and to its
/// neighbours.
#[test]
fn every_f32_next_to_a_tie() {
    recipes().par_iter().for_each(|recipe| {
        let block = recipe.format().block();
        let mut rng = fastrand::Rng::with_seed(11);
        let mut values: Vec<f32> = Vec::new();
        for exponent in 0..255u32 {
            for _ in 0..8 {
                let amax = f32::from_bits(exponent << 23 | rng.u32(..1 << 23));
                // The value of code 2, which stands for 1, under the amax's scale.
                let mut alone = vec![0.0; block];
                alone[0] = amax;
                let tensor = quantized(Isa::Reference, &alone, recipe).0;
                let one: f32 = {
                    let codes = vec![0x22; tensor.codes().len()];
                    let mut ones =
                        QuantizedTensor::from_parts(tensor.shape(), codes, tensor.scales().to_vec())
                            .expect("a tensor");
                    if let Some(global) = tensor.global_scale() {
                        ones = ones.with_global_scale(global).expect("NVFP4");
                    }
                    dequantize::<f32>(&ones)[0]
                };
                for midpoint in e2m1::MIDPOINTS {
                    for steps in -2..=2 {
                        if values.len().is_multiple_of(block) {
                            values.push(amax);
                        }
                        let tie = (one * midpoint).to_bits().saturating_add_signed(steps);
                        let sign = if rng.bool() { 1.0 } else { -1.0 };
                        // The minimum compares integers: above infinity there are NaN.
                        values.push(f32::from_bits(tie.min(amax.to_bits())) * sign);
                    }
                }
                values.resize(values.len().next_multiple_of(block), 0.0);
            }
        }
        assert!(values.iter().all(|value| value.is_finite()), "{recipe:?}");
        assert_the_same(&values, recipe, "ties");
    });
}
