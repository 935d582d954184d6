//! Strategies: matrices of any bits and any shape, and recipes.

use std::fmt;

use microscale::formats::mxfp4::Arithmetic;
use microscale::formats::{NegativeZero, ScaleRule, Ties};
use microscale::{Format, NonFinite, Recipe, Shape, Words};
use microscale_tests::oracle::{Exact, power_of_two};
use proptest::prelude::*;

/// A matrix and its place in memory.
#[derive(Clone)]
pub(crate) struct Matrix<T> {
    pub(crate) values: Vec<T>,
    pub(crate) shape: Shape,
}

impl<T: Exact> fmt::Debug for Matrix<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits: Vec<_> = self.values.iter().map(|v| format!("{:#x}", v.bits())).collect();
        write!(f, "{:?} of {}", self.shape, bits.join(" "))
    }
}

/// How many runs, and no file of failures: a failing input is printed, shrunk.
pub(crate) fn runs(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Any value of a type that names its values.
pub(crate) fn any_of<W: Words + fmt::Debug>() -> impl Strategy<Value = W> {
    (0..W::WORDS.len()).prop_map(|index| W::WORDS[index].1)
}

/// Any recipe.
pub(crate) fn recipe() -> impl Strategy<Value = Recipe> {
    (any_of::<ScaleRule>(), any_of::<Ties>(), any_of::<NegativeZero>(), any_of::<NonFinite>()).prop_map(
        |(scale_rule, ties, negative_zero, non_finite)| {
            let arithmetic = Arithmetic { scale_rule, ties, negative_zero };
            Recipe { format: Format::Mxfp4, arithmetic, non_finite }
        },
    )
}

/// One element, given the exponent around which the matrix lies: near it, at a tie of it, a zero, or anything.
fn element<T: Exact>(exponent: i32) -> impl Strategy<Value = T> {
    let near = (any::<bool>(), 0..256u32, -6..3i32)
        .prop_map(|(negative, mantissa, below)| (negative, 1.0 + f64::from(mantissa) / 256.0, below));
    let ties = prop::sample::select(vec![0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 4.0, 5.0, 6.0, 7.0]);
    let tie = (any::<bool>(), ties).prop_map(|(negative, tie)| (negative, tie, 0));
    let scaled = prop_oneof![near, tie].prop_map(move |(negative, multiple, below)| {
        let magnitude = (multiple * power_of_two(exponent + below)).min(T::LARGEST);
        T::round_f64(if negative { -magnitude } else { magnitude })
    });
    let neighbour =
        (scaled, -2..=2i32).prop_map(|(value, ulps)| T::of_bits(value.bits().saturating_add_signed(ulps)));
    let zero = any::<bool>().prop_map(|negative| T::round_f64(if negative { -0.0 } else { 0.0 }));
    let bits = any::<u32>().prop_map(|bits| T::of_bits(bits >> (32 - T::BITS)));
    prop_oneof![12 => neighbour, 2 => zero, 1 => bits]
}

/// Any matrix of up to 9 rows and 200 columns; between its rows and behind it is NaN.
pub(crate) fn matrix<T: Exact>() -> impl Strategy<Value = Matrix<T>> {
    let shape = (0..=9usize, 1..=200usize, prop_oneof![Just(0), 0..40usize], 0..3usize);
    let exponents = T::SMALLEST_EXPONENT..=T::LARGEST.log2() as i32;
    (shape, exponents, any::<bool>()).prop_flat_map(|((rows, cols, gap, behind), exponent, finite)| {
        let shape = Shape::new(rows, cols).with_row_stride(cols + gap);
        let len = rows * shape.row_stride + behind;
        prop::collection::vec(element::<T>(exponent), len).prop_map(move |mut values| {
            for (index, value) in values.iter_mut().enumerate() {
                let (row, col) = (index / shape.row_stride, index % shape.row_stride);
                if row >= rows || col >= cols {
                    *value = T::round_f64(f64::NAN);
                } else if finite && !value.to_f64().is_finite() {
                    *value = T::round_f64(1.0);
                }
            }
            Matrix { values, shape }
        })
    })
}
