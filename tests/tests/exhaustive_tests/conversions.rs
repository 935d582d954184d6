//! Tests E2M1, E8M0, the scale rules of the MX formats, and the 16-bit types.

use std::ops::Range;

use float4::F4E2M1;
use half::{bf16, f16};
use microfloat::f4e2m1fn;
use microscale::formats::e2m1::{self, E2m1, E2m1x2, Ties};
use microscale::formats::mx::{self, rounded_exponent, scale_from_exponent};
use microscale::formats::{E4m3, E5m2, E8m0, ScaleRule};
use microscale::{Element, Words};
use microscale_test_support::golden::tables;
use microscale_test_support::oracle::{self, Exact, MAGNITUDES, e2m1_value, nearest, power_of_two};
use rayon::prelude::*;

use super::walk::{
    INFINITY, SIGN, Walk, assert_everywhere, assert_nan_codes, both_signs, first, value, walks,
};

/// Returns the range of magnitude bits of each code, between exact midpoints.
///
/// The last range ends at infinity.
fn steps(ties: Ties) -> [Range<u32>; 8] {
    let start = |code: usize| {
        let Some(below) = code.checked_sub(1) else { return 0 };
        let midpoint = (MAGNITUDES[below] + MAGNITUDES[code]) / 2.0;
        let at_midpoint = match ties {
            Ties::Even => code.is_multiple_of(2),
            Ties::Away => true,
            Ties::Zero => false,
        };
        first(|v| v > midpoint || (v == midpoint && at_midpoint))
    };
    std::array::from_fn(|code| start(code)..if code == 7 { INFINITY + 1 } else { start(code + 1) })
}

/// [`assert_everywhere`] for both signs of every magnitude except NaN.
///
/// `found` returns codes with a sign.
#[inline(always)]
fn assert_codes(walk: Walk, ties: Ties, found: impl Fn(u32) -> u32 + Sync, what: &str) {
    for (code, range) in (0..).zip(steps(ties)) {
        assert_everywhere(
            walk,
            range,
            both_signs(code, code | 8),
            |b| both_signs(found(b), found(b | SIGN)),
            what,
        );
    }
}

#[test]
fn codes_change_exactly_at_the_midpoints() {
    let mut rng = fastrand::Rng::with_seed(1);
    for ties in Ties::values() {
        let steps = steps(ties);
        let code_of =
            |bits: u32| steps.iter().position(|step| step.contains(&bits)).expect("a finite magnitude");
        let edges = steps.iter().flat_map(|step| step.start.saturating_sub(3)..step.start + 4);
        let anywhere = std::iter::repeat_with(|| rng.u32(..INFINITY)).take(200_000);
        for bits in edges.chain(anywhere).chain([INFINITY - 1]) {
            let nearest = nearest(&MAGNITUDES, value(bits), ties);
            assert_eq!(code_of(bits), usize::from(nearest), "{bits:#010x} {ties:?}");
            assert_eq!(value(bits), f64::from(f32::from_bits(bits)));
        }
    }
}

walks! {
    fn e2m1_from_f32(walk: Walk) {
        for ties in Ties::values() {
            let encode = |bits| u32::from(E2m1::from_f32(f32::from_bits(bits), ties).to_bits());
            assert_codes(walk, ties, encode, "E2m1::from_f32");
            assert_nan_codes(walk, 7, encode, "E2m1::from_f32");
        }
    }

    /// `float4` agrees everywhere, also on NaN.
    fn float4_agrees(walk: Walk) {
        let float4 = |bits| u32::from(F4E2M1::from_f64(f32::from_bits(bits).into()).to_bits());
        assert_codes(walk, Ties::Even, float4, "float4");
        assert_nan_codes(walk, 7, float4, "float4");
    }

    /// `microfloat` agrees except on NaN, which it turns into −0.
    fn microfloat_agrees_but_nan(walk: Walk) {
        let microfloat = |bits| u32::from(f4e2m1fn::from_f32(f32::from_bits(bits)).to_bits());
        assert_codes(walk, Ties::Even, microfloat, "microfloat");
        assert_nan_codes(walk, 8, microfloat, "microfloat");
    }

    fn magnitude_codes(walk: Walk) {
        for ties in Ties::values() {
            for (code, range) in (0..).zip(steps(ties)) {
                let found = |bits| e2m1::magnitude_code(f32::from_bits(bits), ties).into();
                assert_everywhere(walk, range, code, found, "magnitude_code");
            }
        }
    }

    fn the_identity_up_to_its_bound(walk: Walk) {
        let end = first(|v| v > power_of_two(20));
        for (code, range) in (0..).zip(steps(Ties::Even)) {
            let found = |bits| e2m1::magnitude_code_even(f32::from_bits(bits));
            assert_everywhere(walk, range.start..range.end.min(end), code, found, "magnitude_code_even");
        }
    }
}

fn the_scale_of_amaxes<E: mx::Element>(walk: Walk, element: &oracle::MxElement) {
    for rule in ScaleRule::values() {
        // The range of scale 2^k starts at its own smallest amax for rules that round down, and
        // otherwise after the last amax of 2^(k-1).
        let start = |k: i32| match rule {
            ScaleRule::Floor => first(|v| v >= element.power() * power_of_two(k)),
            ScaleRule::Even => first(|v| v >= element.even_from() * power_of_two(k)),
            ScaleRule::Ceil => first(|v| v > element.power() * power_of_two(k - 1)),
            ScaleRule::Rceil => first(|v| v > element.largest() * power_of_two(k - 1)),
        };
        let addend = rule.mantissa_addend::<E>();
        let found = |bits| u32::from(scale_from_exponent::<E>(rounded_exponent(bits, addend)).to_bits());
        assert_everywhere(walk, 0..start(-126), 0, found, "the scale");
        for k in -126..=127 {
            assert_everywhere(walk, start(k)..start(k + 1), (k + 127) as u32, found, "the scale");
            if start(k) < INFINITY {
                assert_eq!(element.scale_exponent(value(start(k)), rule), k);
                assert_eq!(element.scale_exponent(value(start(k) - 1), rule), k - 1);
            }
        }
    }
}

walks! {
    fn the_e2m1_scale(walk: Walk) {
        the_scale_of_amaxes::<E2m1>(walk, &oracle::MxElement::e2m1());
    }

    fn the_e4m3_scale(walk: Walk) {
        the_scale_of_amaxes::<E4m3>(walk, &oracle::MxElement::e4m3());
    }

    fn the_e5m2_scale(walk: Walk) {
        the_scale_of_amaxes::<E5m2>(walk, &oracle::MxElement::e5m2());
    }
}

#[test]
fn every_16_bit_pattern_widens_exactly() {
    for bits in 0..=u16::MAX {
        let same = |ours: f32, exact: f64| match exact.is_nan() {
            true => ours.is_nan(),
            false => f64::from(ours).to_bits() == exact.to_bits(),
        };
        let (h, b) = (f16::from_bits(bits), bf16::from_bits(bits));
        assert!(same(Element::to_f32(h), Exact::to_f64(h)), "f16 {bits:#06x}");
        assert!(same(Element::to_f32(b), Exact::to_f64(b)), "bf16 {bits:#06x}");
    }
}

/// Tests that every f32 rounds to the nearest value of a 16-bit type, with ties to even.
fn narrow_to<T: Exact>(walk: Walk, infinity: u32, nan: u32) {
    let value_of = |bits: u32| match infinity - bits {
        0 => 2.0 * T::LARGEST - T::of_bits(infinity - 2).to_f64(),
        _ => T::of_bits(bits).to_f64(),
    };
    let start = |bits: u32| match bits {
        0 => 0,
        _ => (((value_of(bits - 1) + value_of(bits)) / 2.0) as f32).to_bits() + bits % 2,
    };
    let narrow = |bits| <T as Element>::from_f32(f32::from_bits(bits)).bits();
    (0..=infinity).into_par_iter().for_each(|bits| {
        let range = start(bits)..if bits == infinity { INFINITY + 1 } else { start(bits + 1) };
        assert_everywhere(
            walk,
            range,
            both_signs(bits, bits | 0x8000),
            |b| both_signs(narrow(b), narrow(b | SIGN)),
            "from_f32",
        );
    });
    assert_nan_codes(walk, nan, narrow, "from_f32");
}

walks! {
    fn f16_from_f32(walk: Walk) {
        narrow_to::<f16>(walk, 0x7C00, 0x7E00);
    }

    fn bf16_from_f32(walk: Walk) {
        narrow_to::<bf16>(walk, 0x7F80, 0x7FC0);
    }
}

/// `ml_dtypes` agrees except on NaN, which it turns into a zero of the opposite sign.
#[test]
fn e2m1_from_every_16_bit_pattern_agrees_with_ml_dtypes() {
    let tables = tables("mxfp4");
    let (from_f16, from_bf16) = (tables.bytes("e2m1_from_f16"), tables.bytes("e2m1_from_bf16"));
    assert_eq!((from_f16.len(), from_bf16.len()), (1 << 16, 1 << 16));
    for bits in 0..=u16::MAX {
        let widened = [Element::to_f32(f16::from_bits(bits)), Element::to_f32(bf16::from_bits(bits))];
        let theirs = [from_f16[usize::from(bits)], from_bf16[usize::from(bits)]];
        for (x, theirs) in widened.into_iter().zip(theirs) {
            let ours = E2m1::from_f32(x, Ties::Even).to_bits();
            if x.is_nan() {
                assert_eq!((ours, theirs), (7, if x.is_sign_negative() { 0 } else { 8 }), "{bits:#06x}");
            } else {
                assert_eq!(ours, theirs, "{bits:#06x} = {x:e}");
            }
        }
    }
}

#[test]
fn every_code_agrees_with_ml_dtypes() {
    let table = tables("mxfp4").f32s("e2m1_to_f32");
    assert_eq!(table.len(), 16);
    for byte in 0..=u8::MAX {
        let code = byte % 16;
        let ours = E2m1::from_bits(byte);
        assert_eq!(ours.to_bits(), code);
        assert_eq!(ours.to_f32().to_bits(), table[usize::from(code)].to_bits(), "code {code}");
        assert_eq!(f64::from(ours.to_f32()).to_bits(), e2m1_value(code).to_bits(), "code {code}");
        for ties in Ties::values() {
            assert_eq!(E2m1::from_f32(ours.to_f32(), ties), ours, "a code's value is nearest to itself");
        }
    }
}

#[test]
fn every_pair_has_its_lower_element_in_the_low_nibble() {
    for byte in 0..=u8::MAX {
        let (low, high) = (E2m1::from_bits(byte % 16), E2m1::from_bits(byte / 16));
        let pair = E2m1x2::new(low, high);
        assert_eq!((pair.to_bits(), pair.low(), pair.high()), (byte, low, high));
        assert_eq!(E2m1x2::from_bits(byte), pair);
    }
}

#[test]
fn the_tables_of_values_and_midpoints() {
    assert_eq!(e2m1::VALUES.map(f64::from), MAGNITUDES);
    assert_eq!(e2m1::MIDPOINTS, [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]);
    assert_eq!(e2m1::MAX, 6.0);
}

#[test]
fn every_scale_byte_agrees_with_ml_dtypes() {
    let table = tables("mxfp4").f32s("e8m0_to_f32");
    assert_eq!(table.len(), 256);
    for byte in 0..=u8::MAX {
        let scale = E8m0::from_bits(byte);
        assert_eq!((scale.to_bits(), scale.is_nan()), (byte, byte == 255));
        if byte == 255 {
            assert!(scale.to_f32().is_nan() && scale.reciprocal().is_nan() && table[255].is_nan());
            continue;
        }
        let exponent = i32::from(byte) - 127;
        assert_eq!(scale.to_f32().to_bits(), table[usize::from(byte)].to_bits(), "byte {byte}");
        assert_eq!(f64::from(scale.to_f32()), power_of_two(exponent), "byte {byte}");
        assert_eq!(f64::from(scale.reciprocal()), power_of_two(-exponent), "byte {byte}");
    }
    assert_eq!((E8m0::MIN.to_bits(), E8m0::NAN.to_bits()), (0, 255));
}
