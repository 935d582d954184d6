//! Proves the property that NVFP4 quantizers rely on when they replace a division.
//!
//! They compute x / d as x·y + x·z, with 1/d in two parts, rounded once (`nvfp4::quotient`). The
//! result is off the true quotient by at most 2⁻⁴⁸ of it. Codes depend on how the rounded quotient
//! compares with E2M1's midpoints m. They are right unless x / d is that close to m ± half a unit
//! in the last place, the boundaries of rounding to m. The same applies to 6.5, above which values
//! count as clipped.
//!
//! For x of 11 bits or less and every divisor d of 24 bits, no quotient is that close, with one
//! exception: d = 2 − 2⁻²³ and a power of two.

use microscale_formats::e2m1::MIDPOINTS;
use microscale_formats::nvfp4::{self, CLIPPED};
use microscale_test_support::arithmetic::Scalars;
use rayon::prelude::*;

/// Mantissas of the midpoints and of 6.5, in eighths.
const MANTISSAS: [u64; 5] = [8, 10, 12, 13, 14];

/// The divisor of 24 ones.
const ONES: u64 = (1 << 24) - 1;

/// Returns the smallest distance of any x from d · (m ± half a unit).
///
/// The distance is in units of at least 2^-50 of the latter.
///
/// With d = D·2^(e−23) and m = μ·2^(f−3), d · (m ± 2^(f−24)) is D · (μ·2^21 ± 1) in units of
/// 2^(e+f−47). Below a power of two, whose lower neighbours are closer, it is D · (μ·2^22 − 1) in
/// half of these units. Both are between 2^47 and 2^50. An x of 11 bits near it is a multiple of
/// 2^37 in the same units, or of 2^38.
fn closest(divisor: u64) -> u64 {
    let mut closest = u64::MAX;
    for mantissa in MANTISSAS {
        let upper = (divisor * ((mantissa << 21) + 1), 37);
        let lower = if mantissa == 8 {
            (divisor * ((8 << 22) - 1), 38)
        } else {
            (divisor * ((mantissa << 21) - 1), 37)
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
    // 2^-48 of a product below 2^50 is less than 4 units.
    assert!(closest_of_all > 1000, "a quotient is within {closest_of_all} units");
    assert_eq!(closest(ONES), 1, "the divisor that is looked at below");
    // The property fails for x of 24 bits. Quotients of f32 are therefore corrected once more.
    assert_eq!(((3 << 22) + 1) * ((5u64 << 22) + 1) % (1 << 24), 1);
}

/// The quantizers' steps.
fn quotient(x: f32, d: f32, short: bool) -> f32 {
    nvfp4::quotient::<Scalars>(x, nvfp4::reciprocal::<Scalars>(d), d, short)
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
        let mut ties = 0;
        for mantissa in 1024..2048u32 {
            for shift in -16..=4 {
                let x = mantissa as f32 * 2f32.powi(exponent + shift);
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
