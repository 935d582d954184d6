//! Tests that amax is the largest finite magnitude, on every instruction set.

use half::{bf16, f16};
use microscale::cpu::{Isa, amax_with};
use microscale::{Amax, Error, Format, NonFinite, Recipe, Shape, amax, quantize};
use microscale_test_support::cases::{NVFP4_NUMERICS, nvfp4_arithmetic};
use microscale_test_support::oracle::{self, Exact};
use proptest::prelude::*;

use super::inputs::{Matrix, matrix, runs};

fn check<T: Exact>(Matrix { values, shape }: &Matrix<T>) {
    let right = oracle::amax(values, *shape);
    for isa in Isa::available() {
        let found = amax_with(isa, values, *shape).expect("the shape fits");
        let bits = |amax: Amax| (amax.finite.to_bits(), amax.nan, amax.infinite);
        assert_eq!(bits(found), bits(right), "{isa:?}, {shape:?}");
    }
    assert_eq!(amax(values, *shape).expect("the shape fits"), right, "{shape:?}");
    for policy in [NonFinite::Error, NonFinite::Propagate, NonFinite::Saturate] {
        let elements = oracle::elements(values, *shape).map(|(_, value)| value);
        let counted = oracle::nvfp4::tensor_amax(elements, policy);
        assert_eq!(right.under::<T>(policy).to_bits(), counted.to_bits(), "{policy:?}, {shape:?}");
        for numerics in NVFP4_NUMERICS {
            let scale = oracle::nvfp4::global_scale::<T>(numerics, counted);
            let found = right.global_scale::<T>(&nvfp4_arithmetic(numerics), policy);
            assert_eq!(found, scale, "{numerics:?}, {policy:?}, {shape:?}");
        }
    }
}

proptest! {
    #![proptest_config(runs(1500))]

    #[test]
    fn amax_is_the_largest_finite_magnitude(
        f32s in matrix::<f32>(),
        f16s in matrix::<f16>(),
        bf16s in matrix::<bf16>(),
    ) {
        check(&f32s);
        check(&f16s);
        check(&bf16s);
    }

    /// The amax of tensors that share a global scale is the combination of their amaxes.
    #[test]
    fn the_amax_of_two_tensors_covers_both(a in matrix::<f32>(), b in matrix::<f32>()) {
        let all = |matrix: &Matrix<f32>| {
            oracle::elements(&matrix.values, matrix.shape).map(|(_, value)| value).collect::<Vec<_>>()
        };
        let both = [all(&a), all(&b)].concat();
        let mut sum = amax(&a.values, a.shape).expect("the shape fits");
        sum.add(amax(&b.values, b.shape).expect("the shape fits"));
        prop_assert_eq!(sum, oracle::amax(&both, Shape::new(1, both.len())));
    }
}

#[test]
fn every_position_counts() {
    fn check_places<T: Exact>() {
        for cols in 1..=200 {
            for place in 0..cols {
                let mut values = vec![T::round_f64(-0.25); cols];
                for special in [-3.5, f64::NAN, f64::NEG_INFINITY, f64::INFINITY] {
                    values[place] = T::round_f64(special);
                    check(&Matrix { values: values.clone(), shape: Shape::new(1, cols) });
                }
            }
        }
    }
    check_places::<f32>();
    check_places::<f16>();
    check_places::<bf16>();
}

#[test]
fn empty_tensors_have_an_amax_of_zero() {
    for shape in [Shape::new(0, 0), Shape::new(0, 7), Shape::new(7, 0), Shape::new(usize::MAX, 0)] {
        for isa in Isa::available() {
            assert_eq!(
                amax_with::<f32>(isa, &[], shape).expect("nothing to do"),
                Amax::default(),
                "{shape:?}"
            );
        }
    }
    let only_non_finite = [f32::NAN, f32::INFINITY];
    let right = Amax { finite: 0.0, nan: true, infinite: true };
    assert_eq!(amax(&only_non_finite, Shape::new(1, 2)).expect("the shape fits"), right);
}

#[test]
fn mismatched_shapes_are_refused() {
    let found = amax(&[1.0f32; 139], Shape::new(3, 40).with_row_stride(50));
    assert!(matches!(found, Err(Error::Length { expected: 140, found: 139, .. })), "{found:?}");
    let found = amax(&[1.0f32; 139], Shape::new(3, 40).with_row_stride(39));
    assert!(matches!(found, Err(Error::RowStride { .. })), "{found:?}");
}

/// Quantizing computes the global scale of the amax, and giving that scale changes nothing.
#[test]
fn a_computed_global_scale_equals_a_given_one() {
    let mut rng = fastrand::Rng::with_seed(35);
    let shape = Shape::new(30, 333);
    let mut values: Vec<f32> = (0..shape.elements()).map(|_| (rng.f32() - 0.5) * 3.0).collect();
    values[77] = f32::INFINITY;
    values[770] = f32::NAN;
    for numerics in NVFP4_NUMERICS {
        for non_finite in [NonFinite::Propagate, NonFinite::Saturate] {
            let named = Recipe::of(Format::Nvfp4, numerics).expect("numerics of NVFP4");
            let recipe = Recipe { non_finite, ..named };
            let computed = quantize(&values, shape, &recipe).expect("nothing is refused");
            let amax = amax(&values, shape).expect("the shape fits");
            let scale = amax.global_scale::<f32>(&nvfp4_arithmetic(numerics), non_finite);
            assert_eq!(computed.tensor.global_scale(), Some(scale), "{recipe:?}");
            let given = quantize(&values, shape, &recipe.with_global(microscale::Global::Given(scale)));
            assert_eq!(given.expect("nothing is refused"), computed, "{recipe:?}");
        }
    }
}
