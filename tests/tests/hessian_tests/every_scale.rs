//! Compares the search with every scale, one by one, without any bound.

use half::{bf16, f16};
use microscale::cpu::Isa;
use microscale::formats::{GlobalScale, ScaleLayout, Search};
use microscale::{
    Format, QuantizeOptions, Quantized, QuantizedShape, QuantizedTensor, Recipe, Scheme, Shape, quantize,
    quantize_into, quantize_with,
};
use microscale_test_support::inputs::Numbers;
use microscale_test_support::oracle::nvfp4::{self, Rule};
use microscale_test_support::oracle::{self, Exact, mx};

use super::inputs::{ALL_INPUTS, Inputs, hessian, matrix, recipes};

/// The scales of a recipe under a tensor's global scale, by the oracle.
struct Scales<'a> {
    recipe: &'a Recipe,
    global: Option<GlobalScale>,
}

impl Scales<'_> {
    fn factor(&self, byte: u8) -> f64 {
        match self.recipe.format() {
            Format::Nvfp4 => nvfp4::factor(byte, self.global).into(),
            _ => mx::scale_value(byte),
        }
    }

    /// Returns the codes of a block under a scale.
    fn codes(&self, block: &[f64], byte: u8) -> Vec<u8> {
        match self.recipe.scheme {
            Scheme::Nvfp4(arithmetic, _) => {
                let scaling = self.rule(arithmetic).scaling(byte);
                let element = mx::MxElement::e2m1();
                let code = |x: &f64| {
                    let quotient = f64::from(scaling.apply(*x as f32));
                    element.code(quotient, 1.0, microscale::formats::Ties::Even, arithmetic.negative_zero)
                };
                block.iter().map(code).collect()
            }
            Scheme::Mxfp4(a) => {
                let scale = mx::scale_value(byte);
                let code = |x: &f64| mx::MxElement::e2m1().code(*x, scale, a.ties, a.negative_zero);
                block.iter().map(code).collect()
            }
            _ => unreachable!("formats of 4 bits alone"),
        }
    }

    fn rule(&self, arithmetic: microscale::formats::nvfp4::Arithmetic) -> Rule {
        let global = self.global.map_or(1.0, GlobalScale::value);
        Rule { numerics: nvfp4::numerics(arithmetic), global, negative_zero: arithmetic.negative_zero }
    }

    fn larger<T: Exact>(&self, block: &[f64]) -> u8 {
        let amax = block.iter().fold(0.0, |amax: f64, x| amax.max(x.abs())) as f32 * 1.5;
        match self.recipe.scheme {
            Scheme::Nvfp4(arithmetic, _) => {
                let rule = self.rule(arithmetic);
                rule.byte(rule.wanted::<T>(amax))
            }
            Scheme::Mxfp4(a) => {
                let exponent = mx::MxElement::e2m1().scale_exponent(amax.into(), a.scale_rule);
                (exponent.clamp(-127, 127) + 127) as u8
            }
            _ => unreachable!("formats of 4 bits alone"),
        }
    }

    /// Returns the bytes that a search may try besides the plain one, in ascending order.
    fn candidates<T: Exact>(&self, block: &[f64], plain: u8) -> Vec<u8> {
        let (nvfp4, plain) = (self.recipe.format() == Format::Nvfp4, i32::from(plain));
        let (first, last) = if nvfp4 { (1, 126) } else { (0, 254) };
        let (below, above) = if nvfp4 { (2, 6) } else { (1, 1) };
        match self.recipe.search {
            Search::None => vec![],
            Search::FourSix if block.iter().all(|x| *x == 0.0) => vec![],
            Search::FourSix => vec![self.larger::<T>(block)],
            Search::Window => (first.max(plain - below)..=last.min(plain + above)).map(|b| b as u8).collect(),
            Search::Full => (first..=last).map(|b| b as u8).collect(),
        }
    }

    fn rests(&self, block: &[f64], byte: u8) -> Vec<f64> {
        let codes = self.codes(block, byte);
        block
            .iter()
            .zip(codes)
            .map(|(x, code)| x - self.factor(byte) * oracle::value(Format::Mxfp4, code, 127, None))
            .collect()
    }
}

/// Returns the error in the documented order of summation.
fn error(hessian: &[f64], rests: &[f64]) -> f64 {
    let n = rests.len();
    let mut chains = [0.0; 4];
    for i in 0..n {
        let mut y = 0.0;
        for j in 0..n {
            y += hessian[j * n + i] * rests[j];
        }
        chains[i % 4] += y * rests[i];
    }
    (chains[0] + chains[1]) + (chains[2] + chains[3])
}

/// Returns the error in another order, and the maximum rounding error of either.
///
/// There are fewer than 2^8 roundings, each of 2^-53 of the sum of magnitudes.
pub(crate) fn error_otherwise(hessian: &[f64], rests: &[f64]) -> (f64, f64) {
    let n = rests.len();
    let terms = (0..n * n).rev().map(|at| hessian[at] * (rests[at / n] * rests[at % n]));
    let (sum, magnitudes) = terms.fold((0.0, 0.0), |(sum, all), term| (sum + term, all + term.abs()));
    // 1024 terms, added one after the other.
    (sum, magnitudes * 1100.0 * 2f64.powi(-53))
}

/// Compares every block with all scales. Returns the number of scales, and how many the search
/// tried.
fn check<T: Exact>(values: &[T], shape: Shape, recipe: &Recipe, entries: &[f32], what: &str) -> (usize, u64) {
    let Quantized { tensor, report } =
        quantize_with(values, shape, recipe, QuantizeOptions::new().hessian(entries)).expect(what);
    for isa in Isa::available() {
        let mut other = QuantizedTensor::zeros(
            QuantizedShape::new(tensor.format(), shape.rows, shape.cols)
                .with_scale_layout(recipe.scale_layout),
        )
        .expect(what);
        let again = quantize_into(
            values,
            shape,
            recipe,
            QuantizeOptions::new().isa(isa).hessian(entries),
            &mut other,
        )
        .expect(what);
        assert_eq!((&other, again), (&tensor, report), "{what} by {isa:?}");
    }
    let plain = quantize(values, shape, &Recipe { search: Search::None, ..*recipe }).expect(what).tensor;
    let [tensor, plain] = [tensor, plain].map(|tensor| tensor.convert_layout(ScaleLayout::Linear));
    assert_eq!(tensor.global_scale(), plain.global_scale(), "{what}");
    let scales = Scales { recipe, global: tensor.global_scale() };
    let (n, in_row) = (recipe.format().block(), tensor.blocks_per_row());
    let codes = oracle::unpack(recipe.format(), tensor.codes());
    let mut rescaled = 0;
    for (i, (found, plain)) in tensor.scales().iter().zip(plain.scales()).enumerate() {
        let (row, first) = (i / in_row, i % in_row * n);
        let used = n.min(shape.cols - first);
        let mut block = vec![0.0; n];
        for (x, value) in block.iter_mut().zip(&values[row * shape.row_stride + first..][..used]) {
            *x = value.to_f64();
        }
        let entry = |at: usize| f64::from(entries[i % in_row * n * n + at]);
        let inside = |at: usize| at / n < used && at % n < used;
        let hessian: Vec<f64> = (0..n * n).map(|at| if inside(at) { entry(at) } else { 0.0 }).collect();
        let zeros = block.iter().all(|x| *x == 0.0);
        let mut best = (*plain, error(&hessian, &scales.rests(&block, *plain)));
        let (mut least, mut slack) = error_otherwise(&hessian, &scales.rests(&block, *plain));
        for byte in scales.candidates::<T>(&block, *plain) {
            let rests = scales.rests(&block, byte);
            let error = error(&hessian, &rests);
            // The first of equals in ascending order, or the plain one if it is among them.
            if !zeros && error < best.1 {
                best = (byte, error);
            }
            let otherwise = error_otherwise(&hessian, &rests);
            (least, slack) = (least.min(otherwise.0), slack.max(otherwise.1));
        }
        let what = format!("{what}: block {first} of row {row}, {block:?}, plain {plain}");
        assert_eq!(*found, best.0, "{what}");
        assert_eq!(codes[i * n..][..n], scales.codes(&block, *found), "{what}");
        let of_found = error_otherwise(&hessian, &scales.rests(&block, *found)).0;
        assert!(of_found <= least + 2.0 * slack, "{what}: {of_found} of {found} for {least}");
        rescaled += u64::from(found != plain);
    }
    assert_eq!(report.rescaled_blocks, rescaled, "{what}");
    assert!(report.tried_scales >= tensor.scales().len() as u64, "{what}");
    (tensor.scales().len(), report.tried_scales)
}

fn every_scale<T: Exact>(seed: u64) {
    let mut numbers = Numbers::new(seed);
    let (mut blocks, mut tried) = ([0; 7], [0; 7]);
    for (index, recipe) in recipes().into_iter().enumerate() {
        for (which, inputs) in ALL_INPUTS.into_iter().enumerate() {
            for kind in 0..5 {
                let shape = Shape::new(5, 32 * 4 + 13).with_row_stride(150);
                let values: Vec<T> = matrix(shape, kind, &mut numbers);
                let entries = hessian(inputs, shape.cols, recipe.format().block(), &mut numbers);
                let searches = [Search::Full, Search::Window, Search::FourSix];
                for search in &searches[..if index % 3 == 0 { 3 } else { 1 }] {
                    let scale_layout =
                        if kind % 2 == 0 { ScaleLayout::Linear } else { ScaleLayout::Swizzled };
                    let recipe = Recipe { search: *search, scale_layout, ..recipe };
                    let what = format!("{recipe:?}, {inputs:?}, kind {kind}");
                    let checked = check(&values, shape, &recipe, &entries, &what);
                    if *search == Search::Full && recipe.format() == Format::Nvfp4 {
                        (blocks[which], tried[which]) = (blocks[which] + checked.0, tried[which] + checked.1);
                    }
                }
            }
        }
    }
    for (which, inputs) in ALL_INPUTS.iter().enumerate() {
        let each = tried[which] as f64 / blocks[which] as f64;
        eprintln!("{inputs:?}: {each:.1} of 126 scales tried");
        assert!(matches!(inputs, Inputs::Indefinite) || each < 45.0, "{inputs:?}");
    }
}

#[test]
fn no_scale_is_better_f32() {
    every_scale::<f32>(1);
}

#[test]
fn no_scale_is_better_f16() {
    every_scale::<f16>(2);
}

#[test]
fn no_scale_is_better_bf16() {
    every_scale::<bf16>(3);
}
