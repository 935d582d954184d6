//! Tests the NVFP4 files.
//!
//! Every block must match the library's under its global scale. The computed global scale must
//! match too, except in the cases listed with a reason.

use std::collections::BTreeMap;

use half::bf16;
use microscale::cpu::{Isa, dequantize_with};
use microscale::{
    Error, Format, Global, GlobalScale, NonFinite, Numerics, QuantizedShape, QuantizedTensor, Recipe, Result,
    ScaleLayout, Shape,
};
use microscale_test_support::cases::{assert_as_expected, every_nvfp4_recipe, quantize, spread};
use microscale_test_support::golden::{Case, Input, Nvfp4, files};
use microscale_test_support::oracle::nvfp4::BLOCK;
use microscale_test_support::oracle::{self, Exact};

/// A file, and its cases with a different global scale, by reason.
type File = (&'static str, &'static [(Why, &'static [&'static str])]);

/// Every file.
const FILES: [File; 24] = [
    ("compressed-tensors-0.20.0-computed-bf16", &[(Why::Overflow, &TINIEST), (Why::NonFinite, &NON_FINITE)]),
    (
        "compressed-tensors-0.20.0-computed-f16",
        &[
            (Why::Overflow, &["normal-small", "tiny-1e-4", "tiny-1e-6", "tiny-subnormal", "tiny-smallest"]),
            (Why::NonFinite, &NON_FINITE),
        ],
    ),
    ("compressed-tensors-0.20.0-computed-f32", &[(Why::Overflow, &TINIEST), (Why::NonFinite, &NON_FINITE)]),
    ("compressed-tensors-0.20.0-given-bf16", &[]),
    ("compressed-tensors-0.20.0-given-f16", &[]),
    ("compressed-tensors-0.20.0-given-f32", &[]),
    (
        "modelopt-0.47.0-computed-bf16",
        &[(Why::Zeros, &["all-zero"]), (Why::Subnormal, &TINY), (Why::NonFinite, &NON_FINITE)],
    ),
    ("modelopt-0.47.0-computed-f16", &[(Why::Zeros, &["all-zero"]), (Why::NonFinite, &NON_FINITE)]),
    (
        "modelopt-0.47.0-computed-f32",
        &[(Why::Zeros, &["all-zero"]), (Why::Subnormal, &TINY), (Why::NonFinite, &NON_FINITE)],
    ),
    ("modelopt-0.47.0-given-bf16", &[]),
    ("modelopt-0.47.0-given-f16", &[]),
    ("modelopt-0.47.0-given-f32", &[]),
    (
        "torchao-0.18.0-computed-bf16",
        &[(Why::Zeros, &["all-zero"]), (Why::Subnormal, &TINY), (Why::NonFinite, &NON_FINITE)],
    ),
    (
        "torchao-0.18.0-computed-f32",
        &[(Why::Zeros, &["all-zero"]), (Why::Subnormal, &TINY), (Why::NonFinite, &NON_FINITE)],
    ),
    ("torchao-0.18.0-given-bf16", &[]),
    ("torchao-0.18.0-given-f32", &[]),
    ("torchao-0.18.0-none-bf16", &[]),
    ("torchao-0.18.0-none-f32", &[]),
    ("transformer-engine-formula-computed-bf16", &[(Why::NonFinite, &INFINITE)]),
    ("transformer-engine-formula-computed-f16", &[(Why::NonFinite, &INFINITE)]),
    ("transformer-engine-formula-computed-f32", &[(Why::NonFinite, &INFINITE)]),
    ("transformer-engine-formula-given-bf16", &[]),
    ("transformer-engine-formula-given-f16", &[]),
    ("transformer-engine-formula-given-f32", &[]),
];

/// Cases with NaN, infinities, or both.
const NON_FINITE: [&str; 5] =
    ["nan", "negative-nan", "positive-infinity", "negative-infinity", "nan-and-infinity"];
/// Cases with infinities. Transformer Engine ignores NaN, as microscale does.
const INFINITE: [&str; 3] = ["positive-infinity", "negative-infinity", "nan-and-infinity"];
/// Cases whose amax / 2688 is subnormal.
const TINY: [&str; 5] = ["tiny-1e-35", "tiny-1e-37", "tiny-1e-38", "tiny-subnormal", "tiny-smallest"];
/// Cases whose 2688 / amax overflows.
const TINIEST: [&str; 4] = ["tiny-1e-37", "tiny-1e-38", "tiny-subnormal", "tiny-smallest"];

/// Why a computed global scale differs from the library's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Why {
    /// The tensor is zero. The library's scale is 0, which gives NaN. Microscale's is 1.
    Zeros,
    /// The library's scale is 0 or subnormal, and its inverse overflows.
    ///
    /// Microscale's is the smallest normal number.
    Subnormal,
    /// The library's formula overflows, and it uses 1.
    ///
    /// The library is compressed-tensors. Microscale's scale is 2688 / amax, or the largest number.
    Overflow,
    /// The library includes a NaN or an infinity in amax. Microscale uses the finite elements.
    NonFinite,
}

/// Calls a generic function with the input of a case, whatever its type.
macro_rules! with_input {
    ($case:expr, $function:ident($($argument:expr),*)) => {
        match &$case.input {
            Input::F32(rows) => $function(rows, $($argument),*),
            Input::F16(rows) => $function(rows, $($argument),*),
            Input::Bf16(rows) => $function(rows, $($argument),*),
        }
    };
}

fn every_file() -> impl Iterator<Item = Nvfp4> {
    FILES.iter().map(|(name, _)| Nvfp4::read(name))
}

/// Returns the file's numerics with a global scale and the policy `propagate`.
fn recipe(file: &Nvfp4, global: Global) -> Recipe {
    let named = Recipe::of(Format::Nvfp4, file.numerics).expect("numerics of NVFP4");
    Recipe { non_finite: NonFinite::Propagate, ..named.with_global(global) }
}

fn shape(case: &Case) -> Shape {
    Shape::new(case.rows, 64)
}

#[test]
fn no_file_is_left_out() {
    let mut known: Vec<&str> = FILES.iter().map(|(name, _)| *name).collect();
    known.push("ml_dtypes-0.6.0-tables");
    known.sort_unstable();
    assert_eq!(files("nvfp4"), known);
}

/// Blocks whose negative quotient underflows to −0, which the library treats as +0.
const SLIPS: [(&str, usize); 6] = [
    ("compressed-tensors-0.20.0-given-bf16", 5),
    ("compressed-tensors-0.20.0-given-f16", 2),
    ("compressed-tensors-0.20.0-given-f32", 5),
    ("modelopt-0.47.0-given-bf16", 8),
    ("modelopt-0.47.0-given-f16", 8),
    ("modelopt-0.47.0-given-f32", 8),
];

#[test]
fn file_names_match_their_contents() {
    let mut blocks = 0;
    for file in every_file() {
        let (rest, dtype) = file.name.rsplit_once('-').expect("a dtype");
        assert!(rest.ends_with(&file.variant), "{}", file.name);
        let library = if file.numerics == Numerics::TransformerEngine {
            "transformer-engine"
        } else {
            file.name.split("-0.").next().expect("a name")
        };
        let numerics = match library {
            "torchao" => Numerics::Torchao,
            "compressed-tensors" => Numerics::CompressedTensors,
            "modelopt" => Numerics::Modelopt,
            "transformer-engine" => Numerics::TransformerEngine,
            other => panic!("{}: what is {other}?", file.name),
        };
        assert_eq!(file.numerics, numerics, "{}", file.name);
        for case in &file.cases {
            assert_eq!(case.input.what().0, dtype, "{}, {}", file.name, case.name);
            assert_eq!(case.global_scale.is_none(), file.variant == "none", "{}, {}", file.name, case.name);
            blocks += case.rows * 4;
        }
        let slips = SLIPS.iter().find(|(name, _)| *name == file.name).map_or(0, |(_, count)| *count);
        assert_eq!(file.slips.len(), slips, "{}", file.name);
        assert!(
            file.slips.iter().all(|(case, ..)| case.starts_with("zeros-")),
            "{}: {:?}",
            file.name,
            file.slips
        );
        assert!(file.degenerate.is_disjoint(&file.non_finite), "{}", file.name);
    }
    assert!(blocks > 10_000, "only {blocks} blocks");
}

/// Uses the library's own global scale, computed or given. Out-of-range scales must be refused.
#[test]
fn every_block_matches_the_library() {
    let (mut compared, mut refused) = (0, 0);
    for file in every_file() {
        for case in &file.cases {
            let counts = with_input!(case, assert_blocks(&file, case));
            compared += counts.0;
            refused += counts.1;
        }
    }
    assert!(compared > 19_000, "only {compared} blocks compared");
    assert_eq!(refused, 110, "cases whose global scale cannot be one");
}

/// Counts the matching blocks and the refused global scales (0 or 1).
fn assert_blocks<T: Exact>(rows: &[T], file: &Nvfp4, case: &Case) -> (usize, usize) {
    let global = case.global_scale.map_or(Global::Absent, Global::Given);
    let recipe = recipe(file, global);
    let mut same = 0;
    for isa in Isa::available() {
        for row_stride in [64, 65, 72, 101] {
            let what = format!("{}, {}, {isa:?}, row stride {row_stride}", file.name, case.name);
            let (values, shape) = spread(rows, shape(case), row_stride);
            let made = quantize(isa, &values, shape, &recipe);
            let usable = case.global_scale.is_none_or(GlobalScale::in_range);
            let (tensor, _) = match made {
                Err(Error::GlobalScale { .. }) if !usable => return (0, 1),
                made => made.unwrap_or_else(|why| panic!("{what}: {why}")),
            };
            assert!(usable, "{what}: {:?} was accepted", case.global_scale);
            same = 0;
            for (index, block) in case.blocks() {
                let ours = (tensor.scales()[index], &tensor.codes()[index * 8..][..8]);
                let theirs = (case.scales[index], &case.codes[index * 8..][..8]);
                if file.non_finite.contains(&block) {
                    assert_eq!(ours, (0x7F, [0; 8].as_slice()), "{what}, {block:?}");
                } else if file.degenerate.contains(&block) || file.slips.contains(&block) {
                    assert_ne!(ours, theirs, "no slip: {what}, {block:?}");
                } else {
                    assert_eq!(ours, theirs, "{what}, {block:?}");
                    same += 1;
                }
            }
        }
    }
    (same, 0)
}

/// Compares computed global scales, except in exactly the listed cases.
///
/// All blocks must be the same as with that scale given, which the test above compares.
#[test]
fn every_global_scale_matches_the_library() {
    for (name, departures) in FILES {
        let file = Nvfp4::read(name);
        if file.variant != "computed" {
            assert!(departures.is_empty(), "{name}");
            continue;
        }
        let mut found = BTreeMap::<Why, Vec<&str>>::new();
        for case in &file.cases {
            let theirs = case.global_scale.expect("a computed one");
            let ours = with_input!(case, computed(&file, case));
            if ours.value().to_bits() != theirs.value().to_bits() {
                let why = with_input!(case, why(&file, ours, theirs));
                found.entry(why).or_default().push(&case.name);
            }
            assert_eq!(ours.direction(), theirs.direction(), "{name}, {}", case.name);
        }
        let departures = departures.iter().map(|(why, cases)| (*why, cases.to_vec())).collect();
        assert_eq!(found, departures, "{name}");
    }
}

/// Returns the global scale of a case, which must be equal on every instruction set.
///
/// The tensor must be the same as with this scale given.
fn computed<T: Exact>(rows: &[T], file: &Nvfp4, case: &Case) -> GlobalScale {
    let mut found = None;
    for isa in Isa::available() {
        let made =
            quantize(isa, rows, shape(case), &recipe(file, Global::FromAmax)).expect("nothing is refused");
        let scale = made.0.global_scale().expect("a computed one");
        let given =
            quantize(isa, rows, shape(case), &recipe(file, Global::Given(scale))).expect("it is in range");
        assert_eq!(made, given, "{}, {}, {isa:?}", file.name, case.name);
        assert!(found.is_none_or(|before| before == scale), "{}, {}, {isa:?}", file.name, case.name);
        found = Some(scale);
    }
    found.expect("an instruction set")
}

/// Returns the reason for a difference, derived from the numbers.
fn why<T: Exact>(rows: &[T], file: &Nvfp4, ours: GlobalScale, theirs: GlobalScale) -> Why {
    let amax = rows.iter().map(|v| v.to_f64().abs()).filter(|v| v.is_finite()).fold(0.0, f64::max);
    let theirs = theirs.value();
    let what = format!("{}: {ours:?}, not {theirs:e}, for an amax of {amax:e}", file.name);
    if rows.iter().any(|v| !v.to_f64().is_finite()) {
        return Why::NonFinite;
    }
    match ours {
        GlobalScale::Multiplier(ours) if amax == 0.0 => {
            assert_eq!((ours, theirs), (1.0, 0.0), "{what}");
            Why::Zeros
        }
        GlobalScale::Multiplier(ours) => {
            assert!(ours == f32::MIN_POSITIVE && theirs < f32::MIN_POSITIVE, "{what}");
            Why::Subnormal
        }
        GlobalScale::Divisor(ours) => {
            let right = ((2688.0f32 / amax as f32).min(f32::MAX), 1.0);
            assert_eq!((ours, theirs), right, "{what}");
            assert_eq!(file.numerics, Numerics::CompressedTensors, "{what}");
            Why::Overflow
        }
    }
}

/// Compares the libraries' own dequantization.
#[test]
fn every_dequantized_number_matches_the_library() {
    let mut compared = 0;
    for file in every_file() {
        for case in &file.cases {
            compared += match &case.dequantized {
                Some(Input::F32(theirs)) => assert_dequantized::<f32>(&file, case, theirs),
                Some(Input::Bf16(theirs)) => assert_dequantized::<bf16>(&file, case, theirs),
                Some(other) => panic!("{}: dequantized to {}", file.name, other.what().0),
                None => {
                    assert_eq!(file.numerics, Numerics::TransformerEngine, "{}", file.name);
                    0
                }
            };
        }
    }
    assert!(compared > 100_000, "only {compared} numbers were compared");
}

fn tensor(case: &Case) -> Result<QuantizedTensor> {
    let shape = QuantizedShape::new(Format::Nvfp4, case.rows, 64);
    let tensor = QuantizedTensor::from_parts(shape, case.codes.clone(), case.scales.clone())?;
    match case.global_scale {
        Some(scale) => tensor.with_global_scale(scale),
        None => Ok(tensor),
    }
}

/// Counts the matching numbers. All must match unless the tensor is refused.
fn assert_dequantized<T: Exact>(file: &Nvfp4, case: &Case, theirs: &[T]) -> usize {
    let what = format!("{}, {}", file.name, case.name);
    let signed = case.scales.iter().any(|scale| *scale >= 128);
    let usable = case.global_scale.is_none_or(GlobalScale::in_range);
    let tensor = match tensor(case) {
        Err(Error::SignedScale { .. }) if signed => return 0,
        Err(Error::GlobalScale { .. }) if !signed && !usable => return 0,
        tensor => tensor.unwrap_or_else(|why| panic!("{what}: {why}")),
    };
    assert!(!signed && usable, "{what}: accepted");
    let codes = oracle::unpack(Format::Nvfp4, &case.codes);
    for tensor in [tensor.convert_layout(ScaleLayout::Swizzled), tensor] {
        for isa in Isa::available() {
            let mut ours = vec![T::of_bits(0xA5A5); case.rows * 64];
            dequantize_with(isa, &tensor, &mut ours, 64).expect("room for all");
            for (index, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
                let (row, col) = (index / 64, index % 64);
                let (ours_bits, right) = match (ours.to_f64(), theirs.to_f64()) {
                    (ours, theirs) if ours.is_nan() && theirs.is_nan() => continue,
                    // ModelOpt reads code 8 as +0.
                    _ if file.numerics == Numerics::Modelopt && codes[index] == 8 => {
                        (ours.bits(), T::round_f64(-0.0).bits())
                    }
                    _ => (ours.bits(), theirs.bits()),
                };
                assert_eq!(
                    ours_bits, right,
                    "{what}, {isa:?}, row {row}, column {col}: {ours:?}, {theirs:?}"
                );
            }
        }
    }
    theirs.len()
}

/// The golden inputs are the hardest ones, so they are used for every other recipe too.
#[test]
fn every_input_is_as_expected_for_every_recipe() {
    fn check<T: Exact>(rows: &[T], case: &Case) {
        for recipe in every_nvfp4_recipe(&[1.7]) {
            assert_as_expected(rows, shape(case), &recipe);
        }
    }
    for (name, _) in FILES.iter().filter(|(name, _)| name.starts_with("transformer-engine-formula-computed"))
    {
        for case in &Nvfp4::read(name).cases {
            with_input!(case, check(case));
        }
    }
}

#[test]
fn non_finite_blocks_are_listed_and_refused() {
    fn check<T: Exact>(rows: &[T], file: &Nvfp4, case: &Case) {
        for (index, block) in case.blocks() {
            let finite = rows[index * BLOCK..][..BLOCK].iter().all(|v| v.to_f64().is_finite());
            assert_eq!(finite, !file.non_finite.contains(&block), "{}, {block:?}", file.name);
        }
        let refusing = Recipe { non_finite: NonFinite::Error, ..recipe(file, Global::FromAmax) };
        let is_finite = rows.iter().all(|v| v.to_f64().is_finite());
        let made = quantize(Isa::best(), rows, shape(case), &refusing);
        assert_eq!(made.is_ok(), is_finite, "{}, {}", file.name, case.name);
    }
    for file in every_file() {
        assert!(!file.non_finite.is_empty(), "{}", file.name);
        for case in &file.cases {
            with_input!(case, check(&file, case));
        }
    }
}
