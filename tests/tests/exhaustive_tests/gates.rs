//! Tests the distribution function of GELU from every 16-bit value, and from many f32.

use half::{bf16, f16};
use microscale::formats::gate::normal_cdf;
use microscale_test_support::activations::{normal_cdf as in_f64, normal_cdf_error};
use microscale_test_support::arithmetic::Scalars;
use rayon::prelude::*;

/// Asserts that Φ of a number and of its negative are within the bound.
fn assert_within(x: f32) {
    for x in [x, -x] {
        let (found, right) = (f64::from(normal_cdf::<Scalars>(x)), in_f64(x.into()));
        assert!((found - right).abs() <= normal_cdf_error(right), "{x:e}: {found:e}, not {right:e}");
    }
}

#[test]
fn normal_cdf_of_every_16_bit_value_is_within_its_bound() {
    (0..=i16::MAX as u16).into_par_iter().for_each(|bits| {
        for x in [f16::from_bits(bits).to_f32(), bf16::from_bits(bits).to_f32()] {
            if x.is_nan() {
                assert!(normal_cdf::<Scalars>(x).is_nan());
            } else if x.is_finite() {
                assert_within(x);
            }
        }
    });
    assert_eq!(normal_cdf::<Scalars>(f32::INFINITY), 1.0);
    assert_eq!(normal_cdf::<Scalars>(f32::NEG_INFINITY), 0.0);
}

#[test]
fn normal_cdf_of_every_1009th_f32_is_within_its_bound() {
    let bits = 0..f32::INFINITY.to_bits() / 1009;
    bits.into_par_iter().for_each(|bits| assert_within(f32::from_bits(1009 * bits)));
}

/// Smaller magnitudes have the result of 0, and larger ones of infinity.
#[test]
#[ignore = "takes minutes: .ci/long does it, or cargo test-all"]
fn normal_cdf_of_every_f32_is_within_its_bound() {
    let bits = 2f32.powi(-30).to_bits()..14f32.to_bits();
    bits.into_par_iter().for_each(|bits| assert_within(f32::from_bits(bits)));
}
