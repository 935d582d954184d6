//! Compares the GPU's NVFP4 encoding of 16-bit values with the reference.
//!
//! The steps of `formats/src/shortcut.rs` are performed here as in the kernels, for every value,
//! block scales of every mantissa and exponent, and many global scales.

use half::{bf16, f16};
use microscale::Words;
use microscale_formats::nvfp4::{Quantizer, Scaling};
use microscale_formats::shortcut::NvShortcut;
use microscale_formats::{E2m1, E4m3, Ties};
use microscale_test_support::cases::{NVFP4_NUMERICS, nvfp4_arithmetic};
use rayon::prelude::*;

/// A 16-bit dtype.
trait Short {
    const SIGNIFICAND: u32;
    fn widen(bits: u16) -> f32;
    fn round(value: f32) -> f32;
}

impl Short for bf16 {
    const SIGNIFICAND: u32 = 8;
    fn widen(bits: u16) -> f32 {
        Self::from_bits(bits).to_f32()
    }
    fn round(value: f32) -> f32 {
        Self::from_f32(value).to_f32()
    }
}

impl Short for f16 {
    const SIGNIFICAND: u32 = 11;
    fn widen(bits: u16) -> f32 {
        Self::from_bits(bits).to_f32()
    }
    fn round(value: f32) -> f32 {
        Self::from_f32(value).to_f32()
    }
}

/// Encodes a positive value with the kernels' steps.
///
/// The product is truncated to f16, possibly subnormal, with its last bit set or not, and rounded
/// to E2M1 with ties to even.
fn by_shortcut(value: f32, factor: u32) -> u8 {
    let nearest = f16::from_f32(value * f32::from_bits(factor));
    let above = nearest.to_f32() > value * f32::from_bits(factor);
    let cut = nearest.to_bits() - u16::from(above);
    let scaled = f16::from_bits(cut | (factor & 1) as u16);
    E2m1::from_f32(scaled.to_f32(), Ties::Even).to_bits()
}

/// Compares all positive values of a dtype under a third of the normal scales, up to 6.5 scaled.
///
/// Returns the number of ties.
fn compare<T: Short>(quantizer: &Quantizer, shortcut: &NvShortcut, what: &str) -> usize {
    let mut ties = 0;
    for byte in (0x08..=0x7Eu8).step_by(3) {
        let scaling = quantizer.scaling(E4m3::from_bits(byte));
        let exponent_field = u32::from(byte >> 3) << 23;
        let factor =
            shortcut.factors[usize::from(byte % 8)].wrapping_add(7 << 23).wrapping_sub(exponent_field);
        for value in (0..=u16::MAX / 2).map(T::widen).filter(|value| value.is_finite()) {
            let exact = scaling.apply(value);
            if exact < 6.5 {
                let expected = E2m1::from_f32(exact, Ties::Even).to_bits();
                assert_eq!(by_shortcut(value, factor), expected, "{value:e}, scale {byte:#x}: {what}");
                ties += usize::from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0].contains(&exact));
            }
        }
    }
    ties
}

/// Counts the global scales of these amaxes, and those with a shortcut.
///
/// Compares each with the reference.
fn complete<T: Short>(amaxes: &[f32]) -> Vec<(usize, usize)> {
    let of_numerics = |numerics| {
        let arithmetic = nvfp4_arithmetic(numerics);
        let of_amax = |amax: &f32| {
            let global = arithmetic.global_scale(*amax, T::round).value();
            let quantizer = Quantizer::new(arithmetic, global);
            let shortcut = NvShortcut::new(&quantizer, T::SIGNIFICAND);
            let what = format!("{} of amax {amax:e}", numerics.word());
            (shortcut.complete != 0).then(|| compare::<T>(&quantizer, &shortcut, &what))
        };
        let ties: Vec<usize> = amaxes.par_iter().filter_map(of_amax).collect();
        (ties.len(), ties.iter().sum())
    };
    NVFP4_NUMERICS.into_iter().map(of_numerics).collect()
}

#[test]
fn bf16_encodes_like_the_reference() {
    // Every mantissa that an amax of the dtype can have.
    let amaxes: Vec<f32> = (0..128).map(|i| bf16::from_bits(0x3F80 + i).to_f32()).collect();
    for (complete, ties) in complete::<bf16>(&amaxes) {
        assert!(complete >= 120, "only {complete} of 128 mantissas have a shortcut");
        assert!(ties > 100, "only {ties} ties");
    }
}

#[test]
fn f16_encodes_like_the_reference() {
    let amaxes: Vec<f32> = (0..1024).step_by(5).map(|i| f16::from_bits(0x3C00 + i).to_f32()).collect();
    for (complete, ties) in complete::<f16>(&amaxes) {
        assert!(
            complete >= amaxes.len() / 2,
            "only {complete} of {} mantissas have a shortcut",
            amaxes.len()
        );
        assert!(ties > 100, "only {ties} ties");
    }
}

#[test]
fn arbitrary_global_scales_encode_like_the_reference() {
    let mut rng = fastrand::Rng::with_seed(60);
    let amaxes: Vec<f32> = (0..64).map(|_| 2f32.powi(rng.i32(-20..20)) * (1.0 + rng.f32())).collect();
    assert!(complete::<bf16>(&amaxes).iter().all(|(complete, _)| *complete >= 60));
    assert!(complete::<f16>(&amaxes).iter().all(|(complete, _)| *complete >= 32));
}

#[test]
fn a_factor_is_not_just_the_reciprocal() {
    // Shows that the test of factors is needed: without it, some values would be encoded
    // differently.
    let arithmetic = nvfp4_arithmetic(NVFP4_NUMERICS[0]);
    let wrong = (0..128).map(|i| bf16::from_bits(0x3F80 + i).to_f32()).filter(|amax| {
        let quantizer = Quantizer::new(arithmetic, arithmetic.global_scale(*amax, bf16::round).value());
        (0..8u8).any(|mantissa| {
            let scaling = quantizer.scaling(E4m3::from_bits(0x38 + mantissa));
            let reciprocal = match scaling {
                Scaling::Multiply(factor) => factor,
                Scaling::Divide(divisor) => 1.0 / divisor,
            };
            (0..=u16::MAX / 2).map(bf16::widen).any(|value| {
                let exact = scaling.apply(value);
                exact < 6.5
                    && by_shortcut(value, reciprocal.to_bits() | 1)
                        != E2m1::from_f32(exact, Ties::Even).to_bits()
            })
        })
    });
    assert!(wrong.count() > 10);
}
