//! Strategies for matrices of any bits and any shape, and for recipes.

use std::fmt;

use microscale::cpu::Isa;
use microscale::formats::nvfp4::Arithmetic;
use microscale::formats::{NegativeZero, ScaleLayout, ScaleRule, Ties, mx};
use microscale::{Format, Global, NonFinite, QuantizedShape, QuantizedTensor, Recipe, Scheme, Shape, Words};
use microscale_test_support::cases::{NVFP4_NUMERICS, given_for, nvfp4_arithmetic};
use microscale_test_support::oracle::nvfp4::tensor_amax;
use microscale_test_support::oracle::{self, Exact, power_of_two};
use proptest::prelude::*;

/// A matrix and its layout in memory.
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

/// Returns this machine's instruction sets, and matrix tiles, which are emulated if missing.
pub(crate) fn instruction_sets() -> impl Iterator<Item = Isa> {
    let emulated = Isa::available().all(|isa| isa != Isa::AmxBf16).then_some(Isa::AmxBf16);
    Isa::available().chain(emulated)
}

/// Returns a configuration for a number of runs without a file of failures. Failing inputs are
/// printed.
pub(crate) fn runs(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Returns any value of a type with words.
pub(crate) fn any_of<W: Words + fmt::Debug>() -> impl Strategy<Value = W> + Clone {
    (0..W::WORDS.len()).prop_map(|index| W::WORDS[index].1)
}

/// Returns any MXFP4 recipe with linear scales.
pub(crate) fn mxfp4_recipe() -> impl Strategy<Value = Recipe> {
    let arithmetic = (any_of::<ScaleRule>(), any_of::<Ties>(), any_of::<NegativeZero>())
        .prop_map(|(scale_rule, ties, negative_zero)| mx::Arithmetic { scale_rule, ties, negative_zero });
    (arithmetic, any_of::<NonFinite>()).prop_map(|(arithmetic, non_finite)| Recipe {
        scheme: Scheme::Mxfp4(arithmetic),
        non_finite,
        ..Recipe::default()
    })
}

/// Returns any recipe without a given global scale.
fn recipe() -> impl Strategy<Value = Recipe> {
    let nvfp4 = (0..4usize, any_of::<NegativeZero>(), any::<bool>(), any::<bool>()).prop_map(
        |(numerics, negative_zero, its_own, absent)| {
            let named = nvfp4_arithmetic(NVFP4_NUMERICS[numerics]);
            let arithmetic = if its_own { named } else { Arithmetic { negative_zero, ..named } };
            Scheme::Nvfp4(arithmetic, if absent { Global::Absent } else { Global::FromAmax })
        },
    );
    let scheme = prop_oneof![
        2 => mxfp4_recipe().prop_map(|recipe| recipe.scheme),
        1 => any_of::<ScaleRule>().prop_map(Scheme::Mxfp8E4m3),
        1 => any_of::<ScaleRule>().prop_map(Scheme::Mxfp8E5m2),
        4 => nvfp4,
    ];
    (scheme, any_of::<NonFinite>(), any_of::<ScaleLayout>()).prop_map(|(scheme, non_finite, scale_layout)| {
        Recipe { scheme, non_finite, scale_layout, ..Recipe::default() }
    })
}

/// A matrix and a recipe for it.
#[derive(Clone, Debug)]
pub(crate) struct Case<T: Exact> {
    pub(crate) matrix: Matrix<T>,
    pub(crate) recipe: Recipe,
}

/// Returns any matrix and recipe.
///
/// A given global scale of NVFP4 mostly fits the matrix approximately, and sometimes is arbitrary.
pub(crate) fn case<T: Exact>() -> impl Strategy<Value = Case<T>> {
    let near = (1.0..2.0f32, prop_oneof![3 => Just(0), 2 => -12..12i32]);
    let suits = near.prop_map(|(mantissa, exponent)| mantissa * power_of_two(exponent) as f32);
    let any_amax = (1..0x7F80_0000u32).prop_map(f32::from_bits);
    let given = prop_oneof![
        6 => Just(None),
        6 => suits.prop_map(|factor| Some((true, factor))),
        1 => any_amax.prop_map(|amax| Some((false, amax))),
    ];
    (matrix::<T>(), recipe(), given).prop_map(|(matrix, recipe, given)| {
        let Scheme::Nvfp4(arithmetic, _) = recipe.scheme else { return Case { matrix, recipe } };
        let Some((relative, amax)) = given else { return Case { matrix, recipe } };
        let amax = if relative { amax * matrix.amax() } else { amax };
        // The quotient of zero is not a number.
        let given = Global::Given(given_for(arithmetic.direction, amax.clamp(f32::MIN_POSITIVE, f32::MAX)));
        Case { matrix, recipe: recipe.with_global(given) }
    })
}

impl<T: Exact> Matrix<T> {
    /// Returns the largest finite magnitude.
    pub(crate) fn amax(&self) -> f32 {
        let elements = oracle::elements(&self.values, self.shape).map(|(_, value)| value);
        tensor_amax(elements, NonFinite::Propagate)
    }
}

/// Returns any tensor of a format, with any codes, valid scales, global scale or none, and layout.
pub(crate) fn any_tensor(format: Format) -> impl Strategy<Value = QuantizedTensor> {
    let common = if format == Format::Nvfp4 { 1..127u8 } else { 100..140u8 };
    let any_scale = any::<u8>().prop_map(move |byte| if format == Format::Nvfp4 { byte % 128 } else { byte });
    let scale = prop_oneof![any_scale, common];
    let amax = prop_oneof![Just(1.0f32), 0.01..100.0f32, (1..0x7F80_0000u32).prop_map(f32::from_bits)];
    let global = prop_oneof![Just(None), (any_of(), amax).prop_map(Some)];
    (0..=9usize, 0..=200usize, any_of::<ScaleLayout>(), global).prop_flat_map(
        move |(rows, cols, layout, global)| {
            let blocks = rows * cols.div_ceil(format.block());
            let codes = prop::collection::vec(any::<u8>(), blocks * format.block_bytes());
            let scales = prop::collection::vec(scale.clone(), blocks);
            (codes, scales).prop_map(move |(codes, scales)| {
                let shape = QuantizedShape::new(format, rows, cols);
                let scales = match layout {
                    ScaleLayout::Linear => scales,
                    ScaleLayout::Swizzled => oracle::layout::swizzle(&scales, rows, shape.blocks_per_row()),
                };
                let tensor = QuantizedTensor::from_parts(shape.with_scale_layout(layout), codes, scales);
                match global {
                    Some((direction, amax)) if format == Format::Nvfp4 => {
                        tensor.and_then(|tensor| tensor.with_global_scale(given_for(direction, amax)))
                    }
                    _ => tensor,
                }
                .expect("parts of the right length")
            })
        },
    )
}

/// [`any_tensor`] of every format except formats for comparison, which have their own tests.
pub(crate) fn any_tensor_of_any_format() -> impl Strategy<Value = QuantizedTensor> {
    prop::sample::select(&Format::WITH_KERNELS[..]).prop_flat_map(any_tensor)
}

/// Returns one element around the exponent of the matrix: near it, a tie under it, a zero, or
/// anything.
fn element<T: Exact>(exponent: i32) -> impl Strategy<Value = T> {
    let near = (any::<bool>(), 0..256u32, -6..3i32)
        .prop_map(|(negative, mantissa, below)| (negative, 1.0 + f64::from(mantissa) / 256.0, below));
    let ties =
        prop::sample::select(vec![0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 4.0, 5.0, 6.0, 7.0, 1.0625, 2.75, 464.0]);
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

/// Returns any matrix of up to 9 rows and 200 columns, with NaN between and after its rows.
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
