//! Recipes and inputs for quantization, and comparison with the oracle.

use microscale::cpu::Isa;
use microscale::formats::mx;
use microscale::formats::nvfp4::{Arithmetic, Direction};
use microscale::formats::{GlobalScale, NegativeZero, ScaleRule, Ties};
use microscale::{
    Element, Error, Format, Global, NonFinite, Numerics, QuantizeOptions, QuantizedShape, QuantizedTensor,
    Recipe, Report, Result, ScaleLayout, Scheme, Search, Shape, Words, quantize_into,
};

use crate::oracle::nvfp4::Rule;
use crate::oracle::{self, Exact, Expected};

/// Returns every combination of MXFP4's scale rule, ties, sign of zeros and non-finite policy.
pub fn every_mxfp4_recipe() -> Vec<Recipe> {
    let mut recipes = Vec::new();
    for &(_, scale_rule) in ScaleRule::WORDS {
        for &(_, ties) in Ties::WORDS {
            for &(_, negative_zero) in NegativeZero::WORDS {
                let scheme = Scheme::Mxfp4(mx::Arithmetic { scale_rule, ties, negative_zero });
                recipes.extend(under_every_policy(scheme));
            }
        }
    }
    recipes
}

/// Returns every combination of MXFP8's element, scale rule and non-finite policy.
pub fn every_mxfp8_recipe() -> Vec<Recipe> {
    let rules = ScaleRule::values;
    let schemes = rules().map(Scheme::Mxfp8E4m3).chain(rules().map(Scheme::Mxfp8E5m2));
    schemes.flat_map(under_every_policy).collect()
}

/// Every search for block scales.
pub const SEARCHES: [Search; Search::WORDS.len()] = {
    let mut searches = [Search::None; Search::WORDS.len()];
    let mut i = 0;
    while i < searches.len() {
        searches[i] = Search::WORDS[i].1;
        i += 1;
    }
    searches
};

/// The numerics of NVFP4.
pub const NVFP4_NUMERICS: [Numerics; 4] =
    [Numerics::Torchao, Numerics::CompressedTensors, Numerics::Modelopt, Numerics::TransformerEngine];

/// Returns every combination of NVFP4's numerics, sign of zeros and non-finite policy.
///
/// The global scale is computed, absent, or given for each of `amaxes`.
pub fn every_nvfp4_recipe(amaxes: &[f32]) -> Vec<Recipe> {
    let mut recipes = Vec::new();
    for numerics in NVFP4_NUMERICS {
        for &(_, negative_zero) in NegativeZero::WORDS {
            let arithmetic = Arithmetic { negative_zero, ..nvfp4_arithmetic(numerics) };
            let given = amaxes.iter().map(|amax| Global::Given(given_for(arithmetic.direction, *amax)));
            for global in given.chain([Global::FromAmax, Global::Absent]) {
                recipes.extend(under_every_policy(Scheme::Nvfp4(arithmetic, global)));
            }
        }
    }
    assert_eq!(recipes.len(), 4 * 4 * (amaxes.len() + 2) * 3);
    recipes
}

/// Returns every recipe of every format, with linear scales.
pub fn every_recipe(amaxes: &[f32]) -> Vec<Recipe> {
    [every_mxfp4_recipe(), every_mxfp8_recipe(), every_nvfp4_recipe(amaxes)].concat()
}

/// Returns the arithmetic of NVFP4 numerics.
///
/// # Panics
/// Panics for other formats' numerics.
pub fn nvfp4_arithmetic(numerics: Numerics) -> Arithmetic {
    numerics.nvfp4().expect("numerics of NVFP4")
}

/// Returns the global scale for this amax, limited to the valid range.
///
/// 448 / G or 448 · s must be finite, and the scale a normal number.
pub fn given_for(direction: Direction, amax: f32) -> GlobalScale {
    match direction {
        Direction::Divisor => {
            // One step above the quotient, because the quotient is rounded.
            let least = (448.0 / f32::MAX).next_up();
            GlobalScale::Divisor((2688.0 / amax).clamp(least, f32::MAX))
        }
        Direction::Multiplier => {
            let most = (f32::MAX / 448.0).next_down();
            GlobalScale::Multiplier((amax / 2688.0).clamp(f32::MIN_POSITIVE, most))
        }
    }
}

fn under_every_policy(scheme: Scheme) -> impl Iterator<Item = Recipe> {
    NonFinite::WORDS.iter().map(move |&(_, non_finite)| Recipe { scheme, non_finite, ..Recipe::default() })
}

/// Returns a block that gets the scale byte `scale` under `rule` and is full of ties.
///
/// The other elements are E2M1's midpoints under that scale and their neighbours, so quotients are
/// ties or one step away from one.
pub fn block_of_ties<T: Exact>(rule: Rule, scale: u8, rng: &mut fastrand::Rng) -> Vec<T> {
    const MIDPOINTS: [f64; 8] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0];
    let scaling = rule.scaling(scale);
    let finite = |value: f64| T::round_f64(value.clamp(-T::LARGEST, T::LARGEST));
    let step = |value: T, steps: i32| {
        let stepped = T::of_bits(value.bits().saturating_add_signed(steps));
        if stepped.to_f64().is_finite() { stepped } else { value }
    };
    // The first element maps to 6 under the scale, so quantizing reproduces the scale, or nearly.
    let mut block = vec![finite(scaling.undo(6.0))];
    while block.len() < oracle::nvfp4::BLOCK {
        let at = step(finite(scaling.undo(MIDPOINTS[rng.usize(..8)])), rng.i32(-1..=1));
        block.push(if rng.bool() { at } else { T::round_f64(-at.to_f64()) });
    }
    block
}

/// Spreads the rows to `row_stride` elements apart, with NaN between them.
///
/// Reading a gap changes counts.
pub fn spread<T: Exact>(values: &[T], shape: Shape, row_stride: usize) -> (Vec<T>, Shape) {
    assert_eq!(shape.row_stride, shape.cols);
    let mut spread = vec![T::round_f64(f64::NAN); shape.rows * row_stride];
    for row in 0..shape.rows {
        spread[row * row_stride..][..shape.cols].copy_from_slice(&values[row * shape.cols..][..shape.cols]);
    }
    (spread, shape.with_row_stride(row_stride))
}

/// Returns the shape of the tensor that a recipe makes of a matrix.
pub fn quantized_shape(shape: Shape, recipe: &Recipe) -> QuantizedShape {
    QuantizedShape::new(recipe.format(), shape.rows, shape.cols).with_scale_layout(recipe.scale_layout)
}

/// Returns a tensor whose bytes and global scale all differ from any quantization result.
///
/// # Panics
/// Panics if the shape is too large.
pub fn used_tensor(shape: QuantizedShape) -> QuantizedTensor {
    let (codes, scales) = shape.bytes().expect("a small shape");
    let used = QuantizedTensor::from_parts(shape, vec![0xA5; codes], vec![0x5A; scales]).expect("its bytes");
    match shape.format {
        Format::Nvfp4 => used.with_global_scale(GlobalScale::Divisor(0.3)).expect("a global scale"),
        _ => used,
    }
}

/// Returns options for an instruction set and optional importance by column.
pub fn options(isa: Isa, importance: Option<&[f32]>) -> QuantizeOptions<'_> {
    let options = QuantizeOptions::new().isa(isa);
    importance.map_or(options, |importance| options.importance(importance))
}

/// Quantizes into a [`used_tensor`].
///
/// # Errors
/// Returns the errors of [`quantize_into`].
pub fn quantize<T: Element>(
    isa: Isa,
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
) -> Result<(QuantizedTensor, Report)> {
    let mut tensor = used_tensor(quantized_shape(shape, recipe));
    let report = quantize_into(values, shape, recipe, QuantizeOptions::new().isa(isa), &mut tensor)?;
    Ok((tensor, report))
}

/// Asserts that every instruction set matches the oracle in bytes and counts.
///
/// If the oracle's policy refuses the input, every instruction set must refuse it with the same
/// counts.
pub fn assert_as_expected<T: Exact>(values: &[T], shape: Shape, recipe: &Recipe) -> Expected {
    let expected = oracle::quantize(values, shape, recipe);
    for isa in Isa::available() {
        let what = || format!("{isa:?}, {}, {shape:?}, {recipe:?}", T::DTYPE.word());
        match (quantize(isa, values, shape, recipe), recipe.non_finite, expected.report.first_non_finite) {
            (Err(Error::NonFinite { first, report }), NonFinite::Error, Some(position)) => {
                assert_eq!((first, report), (position, expected.report), "{}", what());
            }
            (Err(why), _, _) => panic!("{}: {why}", what()),
            (Ok(_), NonFinite::Error, Some(position)) => panic!("{}: accepted {position:?}", what()),
            (Ok((tensor, report)), _, _) => {
                assert_same_blocks(&tensor, &expected, what);
                assert_eq!(report, expected.report, "{}", what());
            }
        }
    }
    expected
}

/// Asserts that the bytes are the same. The message names the first different block.
pub fn assert_same_blocks(tensor: &QuantizedTensor, expected: &Expected, what: impl Fn() -> String) {
    let bits = |global: Option<GlobalScale>| global.map(|scale| (scale.direction(), scale.value().to_bits()));
    assert_eq!(
        bits(tensor.global_scale()),
        bits(expected.global_scale),
        "{:?}, not {:?}: {}",
        tensor.global_scale(),
        expected.global_scale,
        what()
    );
    assert_eq!((tensor.scales().len(), tensor.codes().len()), (expected.scales.len(), expected.codes.len()));
    if tensor.scales() == expected.scales && tensor.codes() == expected.codes {
        return;
    }
    let (in_row, block_bytes) = (tensor.blocks_per_row(), tensor.format().block_bytes());
    let codes = tensor.codes().chunks(block_bytes).zip(expected.codes.chunks(block_bytes));
    let linear = |scales: &[u8]| match tensor.shape().scale_layout {
        ScaleLayout::Linear => scales.to_vec(),
        ScaleLayout::Swizzled => oracle::layout::unswizzle(scales, tensor.rows(), in_row),
    };
    let scales = linear(tensor.scales()).into_iter().zip(linear(&expected.scales));
    for (index, (found, right)) in scales.zip(codes).map(|((a, b), (c, d))| ((a, c), (b, d))).enumerate() {
        assert_eq!(found, right, "row {}, block {}: {}", index / in_row, index % in_row, what());
    }
    assert_eq!(tensor.scales(), expected.scales, "the padding of the scales: {}", what());
}
