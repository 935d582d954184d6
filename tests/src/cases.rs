//! Inputs for the CPU's quantization, and its comparison with the oracle.

use microscale::cpu::{Isa, quantize_with};
use microscale::formats::mxfp4::Arithmetic;
use microscale::formats::{NegativeZero, ScaleRule, Ties};
use microscale::{Error, Format, NonFinite, QuantizedTensor, Recipe, Report, Result, Shape, Words};

use crate::oracle::{self, BLOCK, Exact, Expected};

/// Every combination of scale rule, ties, treatment of −0 and non-finite policy.
pub fn every_recipe() -> Vec<Recipe> {
    let mut recipes = Vec::new();
    for &(_, scale_rule) in ScaleRule::WORDS {
        for &(_, ties) in Ties::WORDS {
            for &(_, negative_zero) in NegativeZero::WORDS {
                for &(_, non_finite) in NonFinite::WORDS {
                    let arithmetic = Arithmetic { scale_rule, ties, negative_zero };
                    recipes.push(Recipe { format: Format::Mxfp4, arithmetic, non_finite });
                }
            }
        }
    }
    assert_eq!(recipes.len(), 4 * 3 * 4 * 3);
    recipes
}

/// The same rows `row_stride` elements apart, with NaN between them: who reads it will count it.
pub fn spread<T: Exact>(values: &[T], shape: Shape, row_stride: usize) -> (Vec<T>, Shape) {
    assert_eq!(shape.row_stride, shape.cols);
    let mut spread = vec![T::round_f64(f64::NAN); shape.rows * row_stride];
    for row in 0..shape.rows {
        spread[row * row_stride..][..shape.cols].copy_from_slice(&values[row * shape.cols..][..shape.cols]);
    }
    (spread, shape.with_row_stride(row_stride))
}

/// Quantizes into a tensor whose every byte has another value before.
///
/// # Errors
/// Those of [`quantize_with`].
pub fn quantize<T: Exact>(
    isa: Isa,
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
) -> Result<(QuantizedTensor, Report)> {
    let blocks = shape.rows * shape.cols.div_ceil(BLOCK);
    let used = (vec![0xA5; blocks * BLOCK / 2], vec![0x5A; blocks]);
    let mut tensor = QuantizedTensor::from_parts(recipe.format, shape.rows, shape.cols, used.0, used.1)?;
    let report = quantize_with(isa, values, shape, recipe, &mut tensor)?;
    Ok((tensor, report))
}

/// Asserts that every instruction set gives what the oracle gives, bytes and counts, or refuses with the same counts.
pub fn assert_as_expected<T: Exact>(values: &[T], shape: Shape, recipe: &Recipe) -> Expected {
    let expected = oracle::quantize(values, shape, recipe);
    for isa in Isa::available() {
        let what = format!("{isa:?}, {}, {shape:?}, {recipe:?}", T::DTYPE.word());
        match (quantize(isa, values, shape, recipe), recipe.non_finite, expected.report.first_non_finite) {
            (Err(Error::NonFinite { first, report }), NonFinite::Error, Some(position)) => {
                assert_eq!((first, report), (position, expected.report), "{what}");
            }
            (Err(why), _, _) => panic!("{what}: {why}"),
            (Ok(_), NonFinite::Error, Some(position)) => panic!("{what}: accepted {position:?}"),
            (Ok((tensor, report)), _, _) => {
                assert_same_blocks(&tensor, &expected, &what);
                assert_eq!(report, expected.report, "{what}");
            }
        }
    }
    expected
}

/// Asserts that the bytes are the same, naming the first block that is not.
pub fn assert_same_blocks(tensor: &QuantizedTensor, expected: &Expected, what: &str) {
    assert_eq!((tensor.scales().len(), tensor.codes().len()), (expected.scales.len(), expected.codes.len()));
    if tensor.scales() == expected.scales && tensor.codes() == expected.codes {
        return;
    }
    let in_row = tensor.blocks_per_row();
    let found = tensor.scales().iter().zip(tensor.codes().chunks(BLOCK / 2));
    let right = expected.scales.iter().zip(expected.codes.chunks(BLOCK / 2));
    for (index, (found, right)) in found.zip(right).enumerate() {
        assert_eq!(found, right, "row {}, block {}: {what}", index / in_row, index % in_row);
    }
}
