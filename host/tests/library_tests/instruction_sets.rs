//! Compares small matrices on every instruction set with the reference.
//!
//! Miri runs these tests to check memory accesses, although it has no vector instructions. `tests/`
//! tests all values.

use half::{bf16, f16};
use microscale::cpu::{Isa, amax, amax_with, dequantize_with};
use microscale::formats::nvfp4::Arithmetic;
use microscale::{
    Element, Format, Global, Numerics, QuantizeOptions, QuantizedShape, QuantizedTensor, Recipe, ScaleLayout,
    Scheme, Search, Shape, Words, quantize_into,
};

/// Returns rows with gaps and partial blocks, zeros of both signs, a zero block, and overflowing
/// values.
fn matrix<T: Element>(shape: Shape) -> Vec<T> {
    let mut random = fastrand::Rng::with_seed(3);
    let one = |i: usize| match i % 97 {
        0 => -0.0,
        1..=3 => 0.0,
        4 => 6e4,
        _ => (random.f32() - 0.5) * 2f32.powi(random.i32(-8..4)),
    };
    let mut values: Vec<T> = (0..shape.span().expect("a span")).map(one).map(T::from_f32).collect();
    values[..32].fill(T::from_f32(0.0));
    values
}

fn recipes() -> Vec<Recipe> {
    let mut recipes: Vec<_> =
        Format::WORDS.iter().filter_map(|(_, format)| Recipe::of(*format, Numerics::Torchao).ok()).collect();
    recipes.push(Recipe::of(Format::Mxfp4, Numerics::Ggml).expect("a recipe"));
    recipes.push(Recipe { scheme: Scheme::Nvfp4(Arithmetic::MODELOPT, Global::Absent), ..Recipe::default() });
    if cfg!(miri) {
        // The other recipes take too long under Miri, or use several threads: Miri cannot run
        // rayon.
        return recipes;
    }
    for search in [Search::FourSix, Search::Full] {
        recipes.push(Recipe { search, ..Recipe::of(Format::Nvfp4, Numerics::Torchao).expect("a recipe") });
    }
    recipes.push(Recipe { scale_layout: ScaleLayout::Swizzled, ..Recipe::default() });
    recipes
}

fn check<T: Element>() {
    // More than two windows of f32, and a single block. Miri is slow.
    let shapes =
        [Shape::new(2, 77).with_row_stride(80), Shape::new(3, 1033), Shape::new(1, 4096), Shape::new(1, 5)];
    for shape in &shapes[..if cfg!(miri) { 1 } else { shapes.len() }] {
        let shape = *shape;
        let values = matrix::<T>(Shape::new(1, shape.span().expect("a span").max(32)));
        let values = &values[..shape.span().expect("a span")];
        let expected = amax_with(Isa::Reference, values, shape).expect("a shape that fits");
        assert_eq!(amax(values, shape).expect("a shape that fits"), expected);
        for recipe in recipes() {
            let quantized = QuantizedShape::new(recipe.format(), shape.rows, shape.cols)
                .with_scale_layout(recipe.scale_layout);
            let on = |isa| {
                let mut tensor = QuantizedTensor::zeros(quantized).expect("a tensor");
                let report =
                    quantize_into(values, shape, &recipe, QuantizeOptions::new().isa(isa), &mut tensor)
                        .expect("finite values");
                let mut back = vec![T::default(); shape.rows * shape.cols];
                dequantize_with(isa, &tensor, &mut back, shape.cols).expect("rows that fit");
                (tensor, report, back.into_iter().map(|value| value.to_f32().to_bits()).collect::<Vec<_>>())
            };
            let expected = on(Isa::Reference);
            for isa in Isa::available() {
                assert!(on(isa) == expected, "{isa:?} {shape:?} {recipe:?}");
            }
        }
    }
}

#[test]
fn f32_matches_the_reference() {
    check::<f32>();
}

#[test]
fn f16_matches_the_reference() {
    check::<f16>();
}

#[test]
fn bf16_matches_the_reference() {
    check::<bf16>();
}
