//! Proves the property that quantizers to NVFP4 and FP8 rely on when they replace a division.
//!
//! They compute x / d as x·y + x·z, with 1/d in two parts, rounded once (`nvfp4::quotient`). The
//! result is off the true quotient by at most 2⁻⁴⁸ of it. Codes depend on how the rounded quotient
//! compares with the midpoints m of E2M1 or E4M3. They are right unless x / d is that close to m ±
//! half a unit in the last place, the boundaries of rounding to m. The same applies to 6.5, above
//! which values of E2M1 count as clipped.
//!
//! For x of 11 bits or less and every divisor d of 24 bits, no quotient is that close, with one
//! exception: d = 2 − 2⁻²³ and a power of two.

use microscale_formats::E4m3;
use microscale_formats::activations::LEAST_GROUP_AMAX;
use microscale_formats::e2m1::MIDPOINTS;
use microscale_formats::nvfp4::{self, CLIPPED};
use microscale_test_support::arithmetic::Scalars;
use rayon::prelude::*;

/// Mantissas of E4M3's midpoints, in sixteenths. They include E2M1's and 6.5.
const MANTISSAS: std::ops::Range<u64> = 16..32;

/// The divisor of 24 ones.
const ONES: u64 = (1 << 24) - 1;

/// Returns the smallest distance of any x from d · (m ± half a unit).
///
/// The distance is in units of at least 2^-50 of the latter.
///
/// With d = D·2^(e−23) and m = μ·2^(f−4), d · (m ± 2^(f−24)) is D · (μ·2^20 ± 1) in units of
/// 2^(e+f−47). Below a power of two, whose lower neighbours are closer, it is D · (μ·2^21 − 1) in
/// half of these units. Both are between 2^47 and 2^50. An x of 11 bits near it is a multiple of
/// 2^37 in the same units, or of 2^38.
fn closest(divisor: u64) -> u64 {
    let mut closest = u64::MAX;
    for mantissa in MANTISSAS {
        let upper = (divisor * ((mantissa << 20) + 1), 37);
        let lower = if mantissa == 16 {
            (divisor * ((16 << 21) - 1), 38)
        } else {
            (divisor * ((mantissa << 20) - 1), 37)
        };
        for (product, places) in [upper, lower] {
            let rest = product % (1 << places);
            closest = closest.min(rest.min((1 << places) - rest));
        }
    }
    closest
}

#[test]
fn no_quotient_of_11_bits_is_close_to_a_tie_boundary() {
    let closest_of_all = (1u64 << 23..ONES).into_par_iter().map(closest).min().expect("divisors");
    // 2^-48 of a product below 2^50 is less than 4 units, and 2^-47, by parts from below, 8.
    assert!(closest_of_all > 1000, "a quotient is within {closest_of_all} units");
    assert_eq!(closest(ONES), 1, "the divisor that is looked at below");
    // The property fails for x of 24 bits. Quotients of f32 are therefore corrected once more.
    assert_eq!(((3 << 22) + 1) * ((5u64 << 22) + 1) % (1 << 24), 1);
}

/// The quantizers' steps.
fn quotient(x: f32, d: f32, short: bool) -> f32 {
    nvfp4::quotient::<Scalars>(x, nvfp4::reciprocal::<Scalars>(d), d, short)
}

/// Codes of FP8 under many scales: all x of 8 and of 11 bits whose codes are not saturated. Zeros keep
/// their sign.
#[test]
fn codes_of_fp8_are_those_of_the_quotient() {
    (0..1 << 12).into_par_iter().for_each(|seed| {
        let mut rng = fastrand::Rng::with_seed(seed);
        let d = f32::from_bits(rng.u32(67 << 23..187 << 23));
        let parts = nvfp4::reciprocal_from_below::<Scalars>(d);
        for bits in (0..1u32 << 15).map(|bits| bits << 13) {
            // 12 bits of significand in the range of E4M3's codes; the last bit is cleared.
            let quotient = f32::from_bits((bits + ((127 - 11) << 23)) & 0xFFFF_C000);
            let x = f32::from_bits((quotient * d).to_bits() & 0xFFFF_E000);
            for x in [x, -x, 0.0, -0.0] {
                let found = nvfp4::quotient::<Scalars>(x, parts, d, true);
                assert_eq!(E4m3::from_f32(found).to_bits(), E4m3::from_f32(x / d).to_bits(), "{x:e} / {d:e}");
            }
        }
    });
}

/// The largest code divides 16-bit amax exactly, too, and the least amax of a group.
#[test]
fn every_amax_of_16_bits_is_divided_by_the_largest_code() {
    let parts = nvfp4::reciprocal::<Scalars>(E4m3::MAX);
    let halves = (0..0x7C00).map(|bits| half::f16::from_bits(bits).to_f32());
    // Smaller ones are raised to the least.
    let bf16 =
        (0..0x7F80).map(|bits| half::bf16::from_bits(bits).to_f32()).filter(|x| *x >= LEAST_GROUP_AMAX);
    for amax in halves.chain(bf16).chain([LEAST_GROUP_AMAX]) {
        assert_eq!(nvfp4::quotient::<Scalars>(amax, parts, E4m3::MAX, true), amax / E4m3::MAX, "{amax:e}");
    }
}

/// Compares more than a hundred million quotients. This is no proof.
#[test]
fn quotients_of_24_bits_are_rounded_to_nearest() {
    (0..1 << 10).into_par_iter().for_each(|seed| {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut number = || f32::from_bits(rng.u32(67 << 23..187 << 23));
        for _ in 0..1 << 12 {
            let d = number();
            for _ in 0..1 << 6 {
                let x = number();
                // Quotients in the range of E2M1's codes, and a little beyond.
                let exact = x / d;
                if (2f32.powi(-40)..2f32.powi(40)).contains(&exact) {
                    assert_eq!(quotient(x, d, false), exact, "{x:e} / {d:e}");
                }
            }
        }
    });
}

#[test]
fn the_one_divisor_close_to_a_boundary_is_exact() {
    for exponent in [-40, -3, 0, 1, 17] {
        let d = (ONES as f32) * 2f32.powi(exponent - 23);
        let from_below = nvfp4::reciprocal_from_below::<Scalars>(d);
        assert!(from_below[1] >= 0.0);
        let mut ties = 0;
        for mantissa in 1024..2048u32 {
            for shift in -16..=4 {
                let x = mantissa as f32 * 2f32.powi(exponent + shift);
                let fp8 = nvfp4::quotient::<Scalars>(x, from_below, d, true);
                assert_eq!(E4m3::from_f32(fp8), E4m3::from_f32(x / d), "{x:e} / {d:e}");
                for midpoint in MIDPOINTS.into_iter().chain([CLIPPED]) {
                    let (ours, exact) = (quotient(x, d, true), x / d);
                    assert_eq!(ours.partial_cmp(&midpoint), exact.partial_cmp(&midpoint), "{x:e} / {d:e}");
                    ties += u32::from((exact / midpoint - 1.0).abs() < 1e-6);
                }
            }
        }
        assert!(ties > 0, "no quotient near a tie");
    }
}
