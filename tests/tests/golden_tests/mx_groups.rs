//! Checks that all groups of the MXFP4 and MXFP8 files exist and contain the case in their name.

use microscale::Format;
use microscale_test_support::golden::{Golden, Input};
use microscale_test_support::oracle::mx::BLOCK;
use microscale_test_support::oracle::{self, E4M3, E5M2, Exact, MAGNITUDES};

use super::mx::every_file;

/// Returns whether a block shows the case of its group, by exact values. One block per group must.
fn shows<T: Exact>(format: Format, group: &str, block: &[T]) -> bool {
    let values: Vec<f64> = block.iter().map(|v| v.to_f64()).collect();
    let all = |is: fn(&f64) -> bool| values.iter().all(is);
    let any = |is: fn(&f64) -> bool| values.iter().any(is);
    let amax = values.iter().fold(0.0, |amax: f64, v| amax.max(v.abs()));
    let mantissa = amax / 2f64.powf(amax.log2().floor());
    let zero = |sign: bool| move |v: &f64| *v == 0.0 && v.is_sign_negative() == sign;
    let magnitudes: &[f64] = match format {
        Format::Mxfp8E4m3 => &E4M3,
        Format::Mxfp8E5m2 => &E5M2,
        _ => &MAGNITUDES,
    };
    let largest = magnitudes[magnitudes.len() - 1];
    let mut specials = values.iter().filter(|v| !v.is_finite());
    match group {
        "zero" => values.iter().all(zero(false)),
        "negative-zero" => values.iter().all(zero(true)),
        "mixed-zero" => all(|v| *v == 0.0) && values.iter().any(zero(false)) && values.iter().any(zero(true)),
        "zeros-among-normals" => {
            any(|v| *v != 0.0) && values.iter().any(zero(false)) && values.iter().any(zero(true))
        }
        "power-of-two" => mantissa == 1.0,
        "six-times-power-of-two" => mantissa == 1.5,
        "seven-times-power-of-two" | "largest-times-power-of-two" => mantissa == 1.75,
        "saturated" => any(|v| v.abs().log2().fract() != 0.0) && mantissa > 1.75,
        "ties" | "ties-smallest-scale" => {
            let scale = if group == "ties" { 1.0 } else { oracle::power_of_two(-127) };
            // MXFP8 blocks have room for only some of them.
            let midpoints = magnitudes.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0 * scale);
            midpoints.filter(|tie| values.contains(tie) || values.contains(&-tie)).count() >= 7
        }
        "small-among-large" => {
            values.iter().any(|v| *v != 0.0 && v.abs() < amax / largest * magnitudes[1] / 2.0)
        }
        "smallest-scale" => (oracle::power_of_two(-126)..oracle::power_of_two(-124)).contains(&amax),
        "subnormal" => {
            let smallest_normal = if T::SMALLEST_EXPONENT == -24 { -14 } else { -126 };
            amax > 0.0 && amax < oracle::power_of_two(smallest_normal)
        }
        "largest-finite" => amax == T::LARGEST,
        "nan" => any(|v| v.is_nan() && v.is_sign_positive()),
        "negative-nan" => any(|v| v.is_nan() && v.is_sign_negative()),
        "positive-infinity" => specials.all(|v| *v == f64::INFINITY) && any(|v| v.is_infinite()),
        "negative-infinity" => specials.all(|v| *v == f64::NEG_INFINITY) && any(|v| v.is_infinite()),
        "both-infinities" => values.contains(&f64::INFINITY) && values.contains(&f64::NEG_INFINITY),
        "nan-and-infinity" => any(|v| v.is_nan()) && any(|v| v.is_infinite()),
        _ => amax > 0.0,
    }
}

/// Groups of both formats.
const GROUPS: [&str; 16] = [
    "normal-by-exponent",
    "heavy-tailed",
    "zero",
    "negative-zero",
    "mixed-zero",
    "zeros-among-normals",
    "power-of-two",
    "ties",
    "smallest-scale",
    "subnormal",
    "largest-finite",
    "nan",
    "negative-nan",
    "positive-infinity",
    "negative-infinity",
    "nan-and-infinity",
];

/// Groups of MXFP4 only.
const MXFP4_GROUPS: [&str; 6] = [
    "tiny-among-large",
    "six-times-power-of-two",
    "seven-times-power-of-two",
    "near-boundary",
    "ties-smallest-scale",
    "both-infinities",
];

/// Groups of MXFP8 only.
const MXFP8_GROUPS: [&str; 3] = ["small-among-large", "largest-times-power-of-two", "saturated"];

#[test]
fn every_group_exists_and_shows_its_case() {
    for golden in every_file() {
        match &golden.input {
            Input::F32(rows) => assert_groups(&golden, rows),
            Input::F16(rows) => assert_groups(&golden, rows),
            Input::Bf16(rows) => assert_groups(&golden, rows),
        }
    }
}

fn assert_groups<T: Exact>(golden: &Golden, rows: &[T]) {
    // f16 cannot represent the smallest scale.
    let in_reach = |name: &&str| !name.ends_with("smallest-scale") || T::SMALLEST_EXPONENT != -24;
    let own: &[&str] = if golden.format() == Format::Mxfp4 { &MXFP4_GROUPS } else { &MXFP8_GROUPS };
    for name in GROUPS.iter().chain(own).copied().filter(in_reach) {
        let group = golden.groups.iter().find(|group| group.name == name);
        let group = group.unwrap_or_else(|| panic!("{} has no group {name}", golden.name));
        let elements = &rows[group.first * golden.cols..(group.last + 1) * golden.cols];
        let shown = elements.chunks(BLOCK).any(|block| shows(golden.format(), name, block));
        assert!(shown, "{}: {name}", golden.name);
    }
    let grouped: usize = golden.groups.iter().map(|group| group.last + 1 - group.first).sum();
    assert_eq!(grouped, golden.rows, "{}", golden.name);
}
