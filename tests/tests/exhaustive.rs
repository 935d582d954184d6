//! Every bit pattern there is, through every scalar conversion.
//!
//! Expectations are step functions of a magnitude, so each test first finds the steps with exact f64 arithmetic and then
//! walks every pattern of each step, comparing the library's answer with the step's one answer.

use std::ops::Range;

use float4::F4E2M1;
use half::{bf16, f16};
use microfloat::f4e2m1fn;
use microscale::formats::e2m1::{self, E2m1, E2m1x2, Ties};
use microscale::formats::mxfp4::{rounded_exponent, scale_from_exponent};
use microscale::formats::{E8m0, ScaleRule};
use microscale::{Element, Shape};
use microscale_tests::cases::{assert_as_expected, every_recipe};
use microscale_tests::golden::{table, table_f32};
use microscale_tests::oracle::{self, Exact, MAGNITUDES, power_of_two};
use rayon::prelude::*;

const SIGN: u32 = 0x8000_0000;
const INFINITY: u32 = 0x7F80_0000;
const ALL_TIES: [Ties; 3] = [Ties::Even, Ties::Away, Ties::Zero];

/// The value of a finite f32's magnitude bits, by the definition of binary32.
fn value(magnitude: u32) -> f64 {
    let (exponent, mantissa) = (magnitude >> 23, f64::from(magnitude & 0x7F_FFFF));
    match exponent {
        0 => mantissa * power_of_two(-149),
        _ => (mantissa + power_of_two(23)) * power_of_two(exponent as i32 - 150),
    }
}

/// The first finite magnitude bits for which `passed` holds, which must not stop holding above; infinity's if none.
fn first(passed: impl Fn(f64) -> bool) -> u32 {
    let (mut below, mut above) = (0, INFINITY);
    while below < above {
        let middle = below + (above - below) / 2;
        if passed(value(middle)) {
            above = middle;
        } else {
            below = middle + 1;
        }
    }
    above
}

/// The magnitude bits of each code: where the exact midpoint below it is passed. The last range ends with infinity.
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

/// Asserts that `found` is `expected` on every pattern of a range. `found` must be inlined to be fast.
#[inline(always)]
fn assert_everywhere(range: Range<u32>, expected: u32, found: impl Fn(u32) -> u32 + Sync, what: &str) {
    const CHUNK: u32 = 1 << 18;
    let chunks = (range.end - range.start).div_ceil(CHUNK);
    (0..chunks).into_par_iter().for_each(|chunk| {
        let start = range.start + chunk * CHUNK;
        let end = range.end.min(start.saturating_add(CHUNK));
        // No early exit: the loop has to vectorise.
        let differences = (start..end).fold(0, |all, bits| all | (found(bits) ^ expected));
        if differences != 0 {
            let bits = (start..end).find(|bits| found(*bits) != expected).expect("one differs");
            panic!("{what} of {bits:#010x}: {:#x}, not {expected:#x}", found(bits));
        }
    });
}

/// What a magnitude gives and what its negative gives, to be compared at once.
#[inline(always)]
fn both_signs(positive: u32, negative: u32) -> u32 {
    positive | negative << 16
}

/// [`assert_everywhere`] for both signs of every magnitude but NaN, `found` being codes with a sign.
#[inline(always)]
fn assert_codes(ties: Ties, found: impl Fn(u32) -> u32 + Sync, what: &str) {
    for (code, range) in (0..).zip(steps(ties)) {
        assert_everywhere(range, both_signs(code, code | 8), |b| both_signs(found(b), found(b | SIGN)), what);
    }
}

/// [`assert_everywhere`] for every NaN.
#[inline(always)]
fn assert_nan_codes(expected: u32, found: impl Fn(u32) -> u32 + Sync, what: &str) {
    let every_nan = INFINITY + 1..SIGN;
    assert_everywhere(
        every_nan,
        both_signs(expected, expected),
        |b| both_signs(found(b), found(b | SIGN)),
        what,
    );
}

#[inline(always)]
fn encode<const TIES: usize>(bits: u32) -> u32 {
    E2m1::from_f32(f32::from_bits(bits), ALL_TIES[TIES]).to_bits().into()
}

#[test]
fn the_steps_are_where_the_nearest_code_changes() {
    let mut rng = fastrand::Rng::with_seed(1);
    for ties in ALL_TIES {
        let steps = steps(ties);
        let code_of =
            |bits: u32| steps.iter().position(|step| step.contains(&bits)).expect("a finite magnitude");
        let edges = steps.iter().flat_map(|step| step.start.saturating_sub(3)..step.start + 4);
        let anywhere = std::iter::repeat_with(|| rng.u32(..INFINITY)).take(200_000);
        for bits in edges.chain(anywhere).chain([INFINITY - 1]) {
            let nearest = oracle::magnitude_code(value(bits), ties);
            assert_eq!(code_of(bits), usize::from(nearest), "{bits:#010x} {ties:?}");
            assert_eq!(value(bits), f64::from(f32::from_bits(bits)));
        }
    }
}

#[test]
fn e2m1_from_every_f32_ties_to_even() {
    assert_codes(Ties::Even, encode::<0>, "E2m1::from_f32");
    assert_nan_codes(7, encode::<0>, "E2m1::from_f32");
}

#[test]
fn e2m1_from_every_f32_ties_away() {
    assert_codes(Ties::Away, encode::<1>, "E2m1::from_f32");
    assert_nan_codes(7, encode::<1>, "E2m1::from_f32");
}

#[test]
fn e2m1_from_every_f32_ties_to_zero() {
    assert_codes(Ties::Zero, encode::<2>, "E2m1::from_f32");
    assert_nan_codes(7, encode::<2>, "E2m1::from_f32");
}

/// `float4` agrees everywhere, on NaN too.
#[test]
fn float4_agrees_on_every_f32() {
    let float4 = |bits| u32::from(F4E2M1::from_f64(f32::from_bits(bits).into()).to_bits());
    assert_codes(Ties::Even, float4, "float4");
    assert_nan_codes(7, float4, "float4");
}

/// `microfloat` agrees on everything but NaN, which it makes −0.
#[test]
fn microfloat_agrees_on_every_f32_but_nan() {
    let microfloat = |bits| u32::from(f4e2m1fn::from_f32(f32::from_bits(bits)).to_bits());
    assert_codes(Ties::Even, microfloat, "microfloat");
    assert_nan_codes(8, microfloat, "microfloat");
}

#[test]
fn magnitude_codes_of_every_non_negative_f32() {
    for (code, range) in (0..).zip(steps(Ties::Even)) {
        let found = |bits| e2m1::magnitude_code(f32::from_bits(bits), Ties::Even).into();
        assert_everywhere(range, code, found, "magnitude_code, even");
    }
    for (code, range) in (0..).zip(steps(Ties::Away)) {
        let found = |bits| e2m1::magnitude_code(f32::from_bits(bits), Ties::Away).into();
        assert_everywhere(range, code, found, "magnitude_code, away");
    }
    for (code, range) in (0..).zip(steps(Ties::Zero)) {
        let found = |bits| e2m1::magnitude_code(f32::from_bits(bits), Ties::Zero).into();
        assert_everywhere(range, code, found, "magnitude_code, zero");
    }
}

#[test]
fn the_identity_of_every_f32_up_to_its_bound() {
    let end = first(|v| v > power_of_two(20));
    for (code, range) in (0..).zip(steps(Ties::Even)) {
        let found = |bits| e2m1::magnitude_code_even(f32::from_bits(bits));
        assert_everywhere(range.start..range.end.min(end), code, found, "magnitude_code_even");
    }
}

#[test]
fn the_scale_of_every_amax() {
    for rule in [ScaleRule::Floor, ScaleRule::Ceil, ScaleRule::Even, ScaleRule::Rceil] {
        // Scale 2^k begins where 2^k is wanted: at it for the rules that round down, past 2^(k-1)'s last amax else.
        let start = |k: i32| match rule {
            ScaleRule::Floor => first(|v| v >= 4.0 * power_of_two(k)),
            ScaleRule::Even => first(|v| v >= 3.5 * power_of_two(k)),
            ScaleRule::Ceil => first(|v| v > 4.0 * power_of_two(k - 1)),
            ScaleRule::Rceil => first(|v| v > 6.0 * power_of_two(k - 1)),
        };
        let addend = rule.mantissa_addend();
        let found = |bits| u32::from(scale_from_exponent(rounded_exponent(bits, addend)).to_bits());
        assert_everywhere(0..start(-126), 0, found, "the scale");
        for k in -126..=127 {
            assert_everywhere(start(k)..start(k + 1), (k + 127) as u32, found, "the scale");
            if start(k) < INFINITY {
                assert_eq!(oracle::scale_exponent(value(start(k)), rule), k);
                assert_eq!(oracle::scale_exponent(value(start(k) - 1), rule), k - 1);
            }
        }
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

/// Every f32 goes to the nearest value of a 16-bit type, from half a step below it to half a step above; a value midway
/// goes to the even one.
fn narrow_every_f32<T: Exact>(infinity: u32, nan: u32) {
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
            range,
            both_signs(bits, bits | 0x8000),
            |b| both_signs(narrow(b), narrow(b | SIGN)),
            "from_f32",
        );
    });
    assert_nan_codes(nan, narrow, "from_f32");
}

#[test]
fn f16_from_every_f32() {
    narrow_every_f32::<f16>(0x7C00, 0x7E00);
}

#[test]
fn bf16_from_every_f32() {
    narrow_every_f32::<bf16>(0x7F80, 0x7FC0);
}

/// `ml_dtypes` agrees on everything but NaN, which it makes a zero of the opposite sign.
#[test]
fn e2m1_from_every_16_bit_pattern_agrees_with_ml_dtypes() {
    let (from_f16, from_bf16) = (table("e2m1_from_f16"), table("e2m1_from_bf16"));
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
    let table = table_f32("e2m1_to_f32");
    assert_eq!(table.len(), 16);
    for byte in 0..=u8::MAX {
        let code = byte % 16;
        let ours = E2m1::from_bits(byte);
        assert_eq!(ours.to_bits(), code);
        assert_eq!(ours.to_f32().to_bits(), table[usize::from(code)].to_bits(), "code {code}");
        assert_eq!(f64::from(ours.to_f32()).to_bits(), oracle::value(code, 127).to_bits(), "code {code}");
        for ties in ALL_TIES {
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
    let table = table_f32("e8m0_to_f32");
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

/// Blocks of neighbouring patterns, whose codes are all large, and of patterns from everywhere, whose codes are mostly
/// zeros; and in between.
fn quantize_every_16_bit_pattern<T: Exact>() {
    for step in [1, 1 << 3, 1 << 5, 1 << 8, 1 << 11] {
        let patterns = (0..step).flat_map(|start| (start..1 << 16).step_by(step));
        let values: Vec<T> = patterns.map(|bits| T::of_bits(bits as u32)).collect();
        every_recipe().par_iter().for_each(|recipe| {
            assert_as_expected(&values, Shape::new(1 << 6, 1 << 10), recipe);
        });
    }
}

#[test]
fn quantize_every_f16() {
    quantize_every_16_bit_pattern::<f16>();
}

#[test]
fn quantize_every_bf16() {
    quantize_every_16_bit_pattern::<bf16>();
}

/// With amax at 4 and 6 scales and one ulp to either side, each scale rule reaches every scale byte and every code.
#[test]
fn quantize_every_tie_at_every_scale() {
    let mut values = Vec::new();
    for k in -149..=127 {
        for (multiple, ulps) in [(4.0, 0), (4.0, -1), (6.0, 0), (6.0, 1), (7.0, 0), (7.0, -1), (3.5, 0)] {
            let step = |v: f64, ulps: i32| f32::from_bits((v as f32).to_bits().saturating_add_signed(ulps));
            let finite = |v: f32| if v.is_finite() { v } else { f32::MAX };
            let amax = finite(step(multiple * power_of_two(k), ulps));
            let ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0].map(|tie| tie * power_of_two(k));
            let around = ties.iter().flat_map(|tie| [-1, 0, 1].map(|ulps| step(*tie, ulps)));
            let elements =
                around.map(|v| v.min(amax)).chain([amax, 0.0, -0.0, amax / 2.0, amax / 3.0, amax / 64.0]);
            let signed = elements.enumerate().map(|(i, v)| if i % 2 == 0 { v } else { -v });
            values.extend(signed.chain([
                -f32::MIN_POSITIVE.min(amax),
                f32::from_bits(1),
                -f32::from_bits(1),
                amax / 7.0,
                -amax,
            ]));
        }
    }
    assert_eq!(values.len() % oracle::BLOCK, 0);
    let blocks = values.len() / oracle::BLOCK;
    every_recipe().par_iter().for_each(|recipe| {
        assert_as_expected(&values, Shape::new(blocks, oracle::BLOCK), recipe);
    });
}
