//! Tests the global scale that `search_global::choose` returns.

use std::convert::Infallible;

use microscale::search_global::{choose, global_scales};
use microscale::{ErrorStats, Format, Global, Numerics, Recipe, Search, Shape, quantize};

#[test]
fn the_least_error_wins_and_the_first_of_equals() {
    let values: Vec<f32> = (0..64 * 64).map(|i| (i as f32 * 0.731).sin() * 2f32.powi(i % 7)).collect();
    let shape = Shape::new(64, 64);
    let mut recipe = Recipe::of(Format::Nvfp4, Numerics::TransformerEngine).unwrap();
    recipe.search = Search::Full;
    let measure = |scale| {
        let quantized = quantize(&values, shape, &recipe.with_global(Global::Given(scale)))?;
        ErrorStats::of_quantized(&values, shape, &quantized.tensor)
            .map(|errors| errors.relative_squared_error())
    };
    let scales = global_scales(&Numerics::TransformerEngine.nvfp4().unwrap(), 64.0, |x| x);
    let best = choose(&scales, measure).unwrap();
    let error = |scale| measure(scale).unwrap();
    assert!(scales.iter().all(|scale| error(best) <= error(*scale)));
    let same = |_| Ok::<_, Infallible>(0.0);
    assert_eq!(choose(&scales, same).unwrap(), scales[0]);
}
