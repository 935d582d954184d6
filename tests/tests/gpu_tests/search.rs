//! Tests searched scales.

use half::{bf16, f16};
use microscale::gpu::Gpu;
use microscale::{
    Element, Error, Format, Global, NonFinite, QuantizeOptions, Recipe, ScaleLayout, Search, Shape, Words,
    quantize_with,
};
use microscale_test_support::cases::{NVFP4_NUMERICS, given_for, nvfp4_arithmetic};

use super::support::{SHAPES, check, patterns};

/// Returns every search of all numerics and rules for ties.
///
/// Global scales are computed, given and absent.
fn searches() -> Vec<Recipe> {
    let mut recipes = Vec::new();
    for &(_, search) in &Search::WORDS[1..] {
        for (_, numerics) in microscale::Numerics::WORDS {
            for format in [Format::Mxfp4, Format::Nvfp4] {
                let Ok(recipe) = Recipe::of(format, *numerics) else { continue };
                recipes.push(Recipe { search, ..recipe });
            }
        }
        for numerics in NVFP4_NUMERICS {
            let given = |amax| Global::Given(given_for(nvfp4_arithmetic(numerics).direction, amax));
            for global in [Global::Absent, given(7.0), given(1e-6), given(1e30)] {
                let recipe = Recipe::of(Format::Nvfp4, numerics).unwrap().with_global(global);
                recipes.push(Recipe { search, ..recipe });
            }
        }
    }
    recipes
}

pub(crate) fn equals_the_cpu(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu) {
        for (i, shape) in SHAPES.into_iter().enumerate() {
            for non_finite in [NonFinite::Propagate, NonFinite::Saturate] {
                let values = patterns::<T>(shape.span().unwrap(), true, i as u64);
                for recipe in searches() {
                    let scale_layout = [ScaleLayout::Linear, ScaleLayout::Swizzled][i % 2];
                    check(gpu, &values, shape, &Recipe { non_finite, scale_layout, ..recipe });
                }
            }
        }
        // Values distributed like weights.
        let mut rng = fastrand::Rng::with_seed(90);
        let shape = Shape::new(300, 1000).with_row_stride(1003);
        let mut normal = || (0..6).map(|_| rng.f32() - 0.5).sum::<f32>();
        let values: Vec<T> = (0..300 * 1003).map(|_| T::from_f32(normal() * 0.05)).collect();
        for recipe in searches() {
            check(gpu, &values, shape, &recipe);
        }
    }
    run::<f32>(gpu);
    run::<f16>(gpu);
    run::<bf16>(gpu);
}

pub(crate) fn equals_the_cpu_with_importance(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu) {
        let mut rng = fastrand::Rng::with_seed(91);
        for (rows, cols) in [(1, 1), (40, 64), (33, 100), (128, 2048)] {
            let shape = Shape::new(rows, cols).with_row_stride(cols + 3);
            let values: Vec<T> = (0..rows * (cols + 3)).map(|_| T::from_f32(rng.f32() - 0.5)).collect();
            // Some weights are 0, and some blocks have only such weights.
            let mut weights: Vec<f32> = (0..cols).map(|_| rng.f32().powi(8)).collect();
            weights.iter_mut().step_by(7).for_each(|weight| *weight = 0.0);
            weights.iter_mut().take(32).for_each(|weight| *weight = 0.0);
            let options = QuantizeOptions::new().importance(&weights);
            for recipe in searches() {
                let found = gpu.quantize_with(&values, shape, &recipe, options).unwrap();
                let expected = quantize_with(&values, shape, &recipe, options).unwrap();
                assert_eq!(found.tensor, expected.tensor, "{} {shape:?} {recipe:?}", T::DTYPE.word());
                assert_eq!(found.report, expected.report, "{} {shape:?} {recipe:?}", T::DTYPE.word());
            }
        }
    }
    run::<f32>(gpu);
    run::<f16>(gpu);
    run::<bf16>(gpu);
}

pub(crate) fn refuses_hessians(gpu: &Gpu) {
    let (values, hessian) = ([1.0f32; 32], [0.0f32; 32 * 32]);
    let recipe = Recipe { search: Search::Full, ..Recipe::default() };
    let options = QuantizeOptions::new().hessian(&hessian);
    assert!(quantize_with(&values, Shape::new(1, 32), &recipe, options).is_ok());
    let found = gpu.quantize_with(&values, Shape::new(1, 32), &recipe, options);
    assert!(matches!(found, Err(Error::HessianOnGpu)), "{found:?}");
}
