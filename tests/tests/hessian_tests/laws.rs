//! Tests laws that hold without knowing the best scale, and refused requests.

use half::f16;
use microscale::formats::Search;
use microscale::{
    Error, Format, Global, HessianFault, NonFinite, Numerics, QuantizeOptions, QuantizedTensor, Recipe,
    Shape, quantize, quantize_with,
};
use microscale_test_support::inputs::Numbers;
use microscale_test_support::oracle;

use super::every_scale::error_otherwise;
use super::inputs::{Inputs, hessian, matrix, recipes};

/// Returns a matrix of 64 rows and 1040 columns.
fn gaussian(seed: u64) -> (Vec<f32>, Shape) {
    let shape = Shape::new(64, 1040);
    (matrix(shape, 0, &mut Numbers::new(seed)), shape)
}

fn squared_error(values: &[f32], tensor: &QuantizedTensor, importance: impl Fn(usize) -> f64) -> f64 {
    let errors = values.iter().zip(oracle::dequantize(tensor)).enumerate();
    errors.map(|(i, (x, y))| importance(i % tensor.cols()) * (f64::from(*x) - y).powi(2)).sum()
}

#[test]
fn the_unit_matrix_gives_the_unweighted_search() {
    let (values, shape) = gaussian(4);
    for recipe in recipes() {
        let recipe = Recipe { search: Search::Full, ..recipe };
        let entries = hessian(Inputs::Identity, shape.cols, recipe.format().block(), &mut Numbers::new(0));
        let with =
            quantize_with(&values, shape, &recipe, QuantizeOptions::new().hessian(&entries)).unwrap().tensor;
        let without = quantize(&values, shape, &recipe).unwrap().tensor;
        let [with, without] = [with, without].map(|tensor| squared_error(&values, &tensor, |_| 1.0));
        // The unweighted search compares errors in f32, and takes either of two equally near codes.
        assert!((with / without - 1.0).abs() < 1e-6, "{recipe:?}: {with} and {without}");
        assert!(with <= without * (1.0 + 1e-12), "{recipe:?}: {with} and {without}");
    }
}

#[test]
fn a_diagonal_gives_the_weighted_search() {
    let (values, shape) = gaussian(5);
    let mut numbers = Numbers::new(6);
    for recipe in recipes() {
        let recipe = Recipe { search: Search::Full, ..recipe };
        let n = recipe.format().block();
        let entries = hessian(Inputs::Diagonal, shape.cols, n, &mut numbers);
        let importance: Vec<f32> =
            (0..shape.cols).map(|col| entries[col / n * n * n + col % n * (n + 1)]).collect();
        let with =
            quantize_with(&values, shape, &recipe, QuantizeOptions::new().hessian(&entries)).unwrap().tensor;
        let weighted = quantize_with(&values, shape, &recipe, QuantizeOptions::new().importance(&importance))
            .unwrap()
            .tensor;
        let error = |tensor| squared_error(&values, &tensor, |col| importance[col].into());
        let [with, weighted] = [error(with), error(weighted)];
        assert!((with / weighted - 1.0).abs() < 1e-6, "{recipe:?}: {with} and {weighted}");
        assert!(with <= weighted * (1.0 + 1e-12), "{recipe:?}: {with} and {weighted}");
    }
}

#[test]
fn values_of_zero_weight_may_be_clipped() {
    // The first element is 2^40 times the others, and its column is never active.
    let mut values = [0.375f32; 32];
    values[0] = 0.375 * 2f32.powi(40);
    let mut importance = [1.0; 32];
    importance[0] = 0.0;
    let mut entries = [0.0; 32 * 32];
    (0..32).for_each(|i| entries[i * 33] = importance[i]);
    let (recipe, shape) = (Recipe { search: Search::Full, ..Recipe::default() }, Shape::new(1, 32));
    for tensor in [
        quantize_with(&values, shape, &recipe, QuantizeOptions::new().hessian(&entries)).unwrap().tensor,
        quantize_with(&values, shape, &recipe, QuantizeOptions::new().importance(&importance))
            .unwrap()
            .tensor,
    ] {
        assert_eq!(tensor.scales(), [127 - 4]);
        assert_eq!(tensor.codes(), [0x77; 16]);
    }
}

#[test]
fn non_finite_values_follow_the_policy() {
    let shape = Shape::new(3, 40).with_row_stride(41);
    let mut values: Vec<f16> = matrix(shape, 0, &mut Numbers::new(7));
    let clean = {
        let mut clean = values.clone();
        (clean[41 + 33], clean[5]) = (f16::MIN, f16::ZERO);
        clean
    };
    (values[41 + 33], values[5]) = (f16::NEG_INFINITY, f16::NAN);
    for recipe in recipes() {
        let recipe = Recipe { search: Search::Full, ..recipe.with_global(Global::Absent) };
        let n = recipe.format().block();
        let entries = hessian(Inputs::Correlated, 40, n, &mut Numbers::new(8));
        let with = |non_finite| {
            quantize_with(
                &values,
                shape,
                &Recipe { non_finite, ..recipe },
                QuantizeOptions::new().hessian(&entries),
            )
        };
        let Err(Error::NonFinite { first, report }) = with(NonFinite::Error) else { panic!("accepted") };
        assert_eq!((first.row, first.col, report.nan, report.infinite), (0, 5, 1, 1));
        let right =
            quantize_with(&clean, shape, &recipe, QuantizeOptions::new().hessian(&entries)).unwrap().tensor;
        assert_eq!(with(NonFinite::Saturate).unwrap().tensor, right);
        let spoilt = with(NonFinite::Propagate).unwrap().tensor;
        let blocks = [0, right.blocks_per_row() + 33 / n];
        for (i, (scale, right)) in spoilt.scales().iter().zip(right.scales()).enumerate() {
            let expected = if blocks.contains(&i) { oracle::nan_scale(recipe.format()) } else { *right };
            assert_eq!(*scale, expected, "block {i}");
        }
    }
}

#[test]
fn errors_name_the_cause() {
    let (values, shape) = (vec![1.0f32; 3 * 40], Shape::new(3, 40));
    let recipe = Recipe { search: Search::Full, ..Recipe::default() };
    let right = hessian(Inputs::Independent(100), 40, 32, &mut Numbers::new(9));
    let with = |recipe: &Recipe, entries: &[f32]| {
        quantize_with(&values, shape, recipe, QuantizeOptions::new().hessian(entries))
    };
    assert!(with(&recipe, &right).is_ok(), "what lies behind the last column is ignored");

    let found = with(&Recipe::default(), &right);
    assert!(matches!(found, Err(Error::HessianWithoutSearch)), "{found:?}");
    let mxfp8 = Recipe::of(Format::Mxfp8E4m3, Numerics::Ocp).unwrap();
    let found = with(&mxfp8, &right);
    assert!(matches!(found, Err(Error::NoSearch { format: Format::Mxfp8E4m3 })), "{found:?}");
    let found = with(&recipe, &right[1..]).unwrap_err();
    assert!(
        matches!(found, Error::HessianLength { columns: 40, expected: 2048, found: 2047, .. }),
        "{found:?}"
    );
    assert!(found.to_string().contains("need 2 × 32 × 32 = 2048"), "{found}");

    // Row 3 and column 5 of the second block.
    let at = 32 * 32 + 3 * 32 + 5;
    for (index, value, fault, (row, col)) in [
        (at, f32::NAN, HessianFault::NotFinite, (3, 5)),
        (at, f32::NEG_INFINITY, HessianFault::NotFinite, (3, 5)),
        (at, right[at] + 3.0, HessianFault::NotSymmetric, (3, 5)),
        (32 * 32 + 2 * 33, -1.0, HessianFault::NegativeDiagonal, (2, 2)),
    ] {
        let mut entries = right.clone();
        entries[index] = value;
        let found = with(&recipe, &entries).unwrap_err();
        let Error::HessianEntry { block: 1, row: r, col: c, fault: f, .. } = found else {
            panic!("{found:?}")
        };
        assert_eq!((r, c, f), (row, col, fault), "{found}");
        assert!(found.to_string().contains("of block 1 of columns"), "{found}");
    }
    // The difference is in the range of rounded sums of 16-bit products.
    let mut entries = right;
    entries[at] += 0.1;
    assert!(with(&recipe, &entries).is_ok());
}

#[test]
fn empty_matrices_need_a_hessian_of_their_columns() {
    let recipe = Recipe { search: Search::Full, ..Recipe::default() };
    let entries = hessian(Inputs::Identity, 40, 32, &mut Numbers::new(0));
    assert!(
        quantize_with(&[0.0f32; 0], Shape::new(0, 40), &recipe, QuantizeOptions::new().hessian(&entries))
            .is_ok()
    );
    assert!(
        quantize_with(&[0.0f32; 0], Shape::new(0, 40), &recipe, QuantizeOptions::new().hessian(&[])).is_err()
    );
    assert!(
        quantize_with(&[0.0f32; 0], Shape::new(4, 0), &recipe, QuantizeOptions::new().hessian(&[])).is_ok()
    );
}

/// The search costs the outputs less than a search without a Hessian.
#[test]
fn outputs_lose_less() {
    let (values, shape) = gaussian(10);
    let recipe = Recipe { search: Search::Full, ..recipes()[3] };
    let entries = hessian(Inputs::Correlated, shape.cols, 16, &mut Numbers::new(11));
    let with =
        quantize_with(&values, shape, &recipe, QuantizeOptions::new().hessian(&entries)).unwrap().tensor;
    let without = quantize(&values, shape, &recipe).unwrap().tensor;
    let loss = |tensor: &QuantizedTensor| -> f64 {
        let left: Vec<f64> =
            values.iter().zip(oracle::dequantize(tensor)).map(|(x, y)| f64::from(*x) - y).collect();
        let blocks = left.as_chunks::<16>().0.iter().enumerate();
        blocks
            .map(|(i, rests)| {
                let entries = &entries[i % 65 * 256..][..256];
                error_otherwise(&entries.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), rests).0
            })
            .sum()
    };
    assert!(loss(&with) < 0.8 * loss(&without), "{} and {}", loss(&with), loss(&without));
}
