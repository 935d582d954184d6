//! Tests the 8-bit floats from every f32 and from every byte.
//!
//! The references are the oracle's list of magnitudes, `ml_dtypes` and `float8`.

use std::ops::Range;

use microscale::formats::{E4m3, E5m2};
use microscale_test_support::golden::tables;
use microscale_test_support::oracle::{self, e4m3_value, e5m2_value};
use rayon::prelude::*;

use super::walk::{
    INFINITY, SIGN, Walk, assert_everywhere, assert_nan_codes, both_signs, first, value, walks,
};

/// Returns the range of magnitude bits of each code, between exact midpoints.
///
/// A midpoint belongs to the even code. The last range, of the largest number, ends at infinity.
fn steps(magnitudes: &[f64]) -> Vec<Range<u32>> {
    let last = magnitudes.len() - 1;
    let start = |code: usize| {
        let Some(below) = code.checked_sub(1) else { return 0 };
        let midpoint = (magnitudes[below] + magnitudes[code]) / 2.0;
        first(|v| v > midpoint || (v == midpoint && code.is_multiple_of(2)))
    };
    (0..=last).map(|code| start(code)..if code == last { INFINITY + 1 } else { start(code + 1) }).collect()
}

/// Asserts that every f32 of either sign converts to the nearest code, saturating, and NaN to one
/// code.
#[inline(always)]
fn assert_codes(walk: Walk, magnitudes: &[f64], found: impl Fn(u32) -> u32 + Sync, what: &str) {
    let steps = steps(magnitudes);
    (0..steps.len()).into_par_iter().for_each(|code| {
        let right = both_signs(code as u32, code as u32 | 0x80);
        let found = |bits| both_signs(found(bits), found(bits | SIGN));
        assert_everywhere(walk, steps[code].clone(), right, found, what);
    });
}

#[test]
fn codes_change_exactly_at_the_midpoints() {
    for magnitudes in [oracle::E4M3.as_slice(), &oracle::E5M2] {
        for (code, step) in steps(magnitudes).into_iter().enumerate() {
            for bits in [step.start, step.start + 1, step.end - 2, step.end - 1] {
                if bits < INFINITY {
                    let nearest = oracle::nearest(magnitudes, value(bits), microscale::formats::Ties::Even);
                    assert_eq!(usize::from(nearest), code, "{bits:#010x}");
                }
            }
        }
    }
}

walks! {
    fn e4m3_from_f32(walk: Walk) {
        let found = |bits| u32::from(E4m3::from_f32(f32::from_bits(bits)).to_bits());
        assert_codes(walk, &oracle::E4M3, found, "E4m3::from_f32");
        assert_nan_codes(walk, 0x7F, found, "E4m3::from_f32");
    }

    fn e5m2_from_f32(walk: Walk) {
        let found = |bits| u32::from(E5m2::from_f32(f32::from_bits(bits)).to_bits());
        assert_codes(walk, &oracle::E5M2, found, "E5m2::from_f32");
        assert_nan_codes(walk, 0x7F, found, "E5m2::from_f32");
    }
}

/// Returns whether two numbers have the same bits or are both NaN.
fn same(ours: f32, theirs: f64) -> bool {
    if theirs.is_nan() { ours.is_nan() } else { f64::from(ours).to_bits() == theirs.to_bits() }
}

#[test]
fn every_byte_decodes() {
    let tables = tables("nvfp4");
    let (e4m3, e5m2) = (tables.f32s("e4m3_to_f32"), tables.f32s("e5m2_to_f32"));
    assert_eq!((e4m3.len(), e5m2.len()), (256, 256));
    for byte in 0..=u8::MAX {
        let (ours, index) = (E4m3::from_bits(byte), usize::from(byte));
        assert_eq!((ours.to_bits(), ours.is_nan()), (byte, byte % 128 == 0x7F), "E4M3 {byte:#04x}");
        assert_eq!(ours.is_sign_negative(), byte >= 128, "E4M3 {byte:#04x}");
        assert!(same(ours.to_f32(), e4m3_value(byte)), "E4M3 {byte:#04x}: {}", ours.to_f32());
        assert!(same(ours.to_f32(), e4m3[index].into()), "ml_dtypes: E4M3 {byte:#04x}: {}", ours.to_f32());
        let ours = E5m2::from_bits(byte);
        assert_eq!((ours.to_bits(), ours.is_nan()), (byte, byte % 128 >= 0x7D), "E5M2 {byte:#04x}");
        assert_eq!(ours.is_sign_negative(), byte >= 128, "E5M2 {byte:#04x}");
        assert!(same(ours.to_f32(), e5m2_value(byte)), "E5M2 {byte:#04x}: {}", ours.to_f32());
        assert!(same(ours.to_f32(), e5m2[index].into()), "ml_dtypes: E5M2 {byte:#04x}: {}", ours.to_f32());
    }
    assert_eq!((E4m3::MAX, E5m2::MAX), (448.0, 57344.0));
    assert_eq!((E4m3::NAN.to_bits(), E5m2::NAN.to_bits()), (0x7F, 0x7F));
    assert_eq!((E4m3::MIN_NORMAL.to_f32(), E4m3::MIN_POSITIVE.to_f32()), (0.015625, 0.001953125));
}

/// `ml_dtypes` agrees up to half a step beyond the largest number.
///
/// It continues with NaN or infinity, while microscale saturates.
#[test]
fn conversions_agree_with_ml_dtypes_up_to_saturation() {
    let tables = tables("nvfp4");
    let e4m3 = |x| E4m3::from_f32(x).to_bits();
    let e5m2 = |x| E5m2::from_f32(x).to_bits();
    // The type, ml_dtypes' result beyond (E5M2's infinity is 0x7C), its NaN, and the largest
    // number's code.
    type FromF32<'a> = &'a dyn Fn(f32) -> u8;
    let types: [(&str, FromF32<'_>, f32, u8, u8); 2] =
        [("e4m3", &e4m3, 464.0, 0x7F, 0x7E), ("e5m2", &e5m2, 61439.996, 0x7C, 0x7B)];
    for (name, from_f32, limit, beyond, largest) in types {
        let inputs = tables.f32s(&format!("{name}_from_f32_in"));
        let codes = tables.bytes(&format!("{name}_from_f32_out"));
        assert_eq!((inputs.len(), inputs.len() > 60_000), (codes.len(), true));
        let (mut saturated, mut nan) = (0, 0);
        for (x, theirs) in inputs.into_iter().zip(codes) {
            let (ours, sign) = (from_f32(x), if x.is_sign_negative() { 0x80 } else { 0 });
            if x.is_nan() {
                nan += 1;
                assert_eq!(ours, 0x7F, "{name} of NaN");
                assert!(theirs % 128 > 0x7C, "{name} of NaN");
            } else if x.abs() > limit {
                saturated += 1;
                assert_eq!((ours, *theirs), (largest | sign, beyond | sign), "{name} of {x:e}");
            } else {
                assert_eq!(ours, *theirs, "{name} of {x:e}");
            }
        }
        assert!(saturated > 1000 && nan > 100, "{name}: {saturated} saturated, {nan} NaN");
    }
}

walks! {
    /// `float8` agrees on every f32 except NaN and saturating values.
    fn float8_agrees_up_to_saturation(walk: Walk) {
        fn check(walk: Walk, magnitudes: &[f64], found: impl Fn(u32) -> u32 + Sync, what: &str) {
            let largest = magnitudes[magnitudes.len() - 1];
            let end = first(|v| v > largest);
            let steps = steps(magnitudes);
            (0..steps.len()).into_par_iter().for_each(|code| {
                let range = steps[code].start..steps[code].end.min(end);
                let right = both_signs(code as u32, code as u32 | 0x80);
                assert_everywhere(walk, range, right, |bits| both_signs(found(bits), found(bits | SIGN)), what);
            });
        }
        let e4m3 = |bits| u32::from(float8::F8E4M3::from_f32(f32::from_bits(bits)).to_bits());
        check(walk, &oracle::E4M3, e4m3, "float8's E4M3");
        let e5m2 = |bits| u32::from(float8::F8E5M2::from_f32(f32::from_bits(bits)).to_bits());
        check(walk, &oracle::E5M2, e5m2, "float8's E5M2");
    }
}
