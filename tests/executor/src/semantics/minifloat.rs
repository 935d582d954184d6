//! Narrow floating-point formats: decoding, and encoding with one rounding.

use super::round::{DOWN, NEAREST, UP};

/// A format with a sign, an exponent and a short significand.
///
/// Source: ISA 5.2.3 and 5.2.5 (`.f16`, `.bf16`, `.e4m3`, `.e5m2`, `.e2m1`).
pub(super) trait Minifloat {
    /// Exponent bits.
    const EXPONENT: u32;
    /// Stored significand bits.
    const MANTISSA: u32;
    /// The code of the largest finite number.
    const LARGEST: u32;
    /// True if the next code is infinity.
    const INFINITE: bool;
    /// The code of NaN results.
    const NAN: u32;

    /// The sign bit.
    const SIGN: u32 = 1 << (Self::EXPONENT + Self::MANTISSA);
    /// The exponent of the smallest normal number.
    const LEAST: i32 = 2 - (1 << (Self::EXPONENT - 1));
}

macro_rules! formats {
    ($($(#[$doc:meta])* $name:ident $exponent:literal $mantissa:literal $largest:literal $infinite:literal $nan:literal;)+) => {
        $(
            $(#[$doc])*
            pub(super) struct $name;

            impl Minifloat for $name {
                const EXPONENT: u32 = $exponent;
                const MANTISSA: u32 = $mantissa;
                const LARGEST: u32 = $largest;
                const INFINITE: bool = $infinite;
                const NAN: u32 = $nan;
            }
        )+
    };
}

formats! {
    /// `.f16`
    F16 5 10 0x7bff true 0x7fff;
    /// `.bf16`
    Bf16 8 7 0x7f7f true 0x7fff;
    /// `.e4m3`: no infinity, and one NaN per sign.
    E4m3 4 3 0x7e false 0x7f;
    /// `.e5m2`
    E5m2 5 2 0x7b true 0x7f;
    /// `.e2m1`: no infinity and no NaN.
    ///
    /// `.satfinite` turns NaN into the largest positive number (9.7.9, `cvt`).
    E2m1 2 1 0x7 false 0x7;
}

/// Returns the number of a code.
#[inline(always)]
pub(super) fn decode<F: Minifloat>(code: u32) -> f64 {
    let magnitude = code & (F::SIGN - 1);
    let exponent = magnitude >> F::MANTISSA;
    let mantissa = u64::from(magnitude & ((1 << F::MANTISSA) - 1));
    let value = if magnitude > F::LARGEST {
        if F::INFINITE && magnitude == F::LARGEST + 1 { f64::INFINITY } else { f64::NAN }
    } else if exponent == 0 {
        mantissa as f64 * power(F::LEAST - F::MANTISSA as i32)
    } else {
        let exponent = (exponent as i32 - 1 + F::LEAST + 1023) as u64;
        f64::from_bits(exponent << 52 | mantissa << (52 - F::MANTISSA))
    };
    if code & F::SIGN == 0 { value } else { -value }
}

/// Returns 2^`exponent`, which must be a normal f64.
#[inline(always)]
fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// Returns the code of a number that is exact or rounded to odd.
///
/// With `SATFINITE`, numbers that are too large and infinities become the largest finite number of
/// their sign. Otherwise the rounding mode decides.
#[inline(always)]
pub(super) fn encode<F: Minifloat, const MODE: u8, const SATFINITE: bool>(x: f64) -> u32 {
    if x.is_nan() {
        return F::NAN;
    }
    let negative = x.is_sign_negative();
    let sign = if negative { F::SIGN } else { 0 };
    let magnitude = if x.is_infinite() { u32::MAX } else { rounded::<F, MODE>(x) };
    if magnitude <= F::LARGEST {
        return sign | magnitude;
    }
    let infinite = match MODE {
        _ if SATFINITE || !F::INFINITE => false,
        _ if x.is_infinite() => true,
        NEAREST => true,
        UP => !negative,
        DOWN => negative,
        _ => false,
    };
    sign | if infinite { F::LARGEST + 1 } else { F::LARGEST }
}

/// Returns the code of a finite magnitude as if the exponent were unbounded.
#[inline(always)]
fn rounded<F: Minifloat, const MODE: u8>(x: f64) -> u32 {
    let bits = x.to_bits() & (u64::MAX >> 1);
    if bits == 0 {
        return 0;
    }
    // Never a subnormal f64: the smallest numbers here are products of two bf16s.
    let exponent = (bits >> 52) as i32 - 1023;
    let significand = bits & ((1 << 52) - 1) | 1 << 52;
    let base = exponent.max(F::LEAST);
    // Larger shifts than 63 change nothing, because everything is already less than half a unit.
    let shift = (52 - F::MANTISSA + (base - exponent) as u32).min(63);
    let (kept, rest) = (significand >> shift, significand & ((1 << shift) - 1));
    let half = 1 << (shift - 1);
    let negative = x.is_sign_negative();
    let away = match MODE {
        NEAREST => rest > half || (rest == half && kept & 1 == 1),
        UP => !negative && rest > 0,
        DOWN => negative && rest > 0,
        _ => false,
    };
    // The leading bit of the significand adds one to the exponent field, which starts at 1 for
    // normal numbers.
    (((base - F::LEAST) as u32) << F::MANTISSA) + kept as u32 + u32::from(away)
}

#[cfg(test)]
mod tests {
    use super::super::round::ZERO;
    use super::*;

    #[test]
    fn f16_and_bf16_match_the_half_crate() {
        for bits in 0..=u16::MAX {
            let (f16, bf16) = (half::f16::from_bits(bits), half::bf16::from_bits(bits));
            let (x, y) = (decode::<F16>(bits.into()), decode::<Bf16>(bits.into()));
            assert!(x.to_bits() == f16.to_f64().to_bits() || x.is_nan() && f16.is_nan());
            assert!(y.to_bits() == bf16.to_f64().to_bits() || y.is_nan() && bf16.is_nan());
        }
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..1_000_000 {
            let exponent = random.u32(90..150);
            let x = f32::from_bits(
                random.u32(..2) << 31 | exponent << 23 | random.u32(..1 << 23) & !0 << random.u32(..24),
            );
            let wide = f64::from(x);
            assert_eq!(encode::<F16, NEAREST, false>(wide), half::f16::from_f32(x).to_bits().into(), "{x:e}");
            assert_eq!(
                encode::<Bf16, NEAREST, false>(wide),
                half::bf16::from_f32(x).to_bits().into(),
                "{x:e}"
            );
            assert_eq!(encode::<Bf16, ZERO, false>(wide), x.to_bits() >> 16);
        }
    }

    #[test]
    fn every_code_round_trips_and_midpoints_go_to_even() {
        fn check<F: Minifloat>() {
            for code in 0..F::LARGEST {
                let (x, next) = (decode::<F>(code), decode::<F>(code + 1));
                assert!(x < next);
                assert_eq!(encode::<F, NEAREST, true>(x), code);
                assert_eq!(encode::<F, NEAREST, true>(-next), (code + 1) | F::SIGN);
                let middle = (x + next) / 2.0;
                assert_eq!(encode::<F, NEAREST, true>(middle), code + (code & 1));
                assert_eq!(encode::<F, NEAREST, true>(middle.next_down()), code);
                assert_eq!(encode::<F, NEAREST, true>(middle.next_up()), code + 1);
                assert_eq!(encode::<F, ZERO, true>(next.next_down()), code);
                assert_eq!(encode::<F, UP, true>(x.next_up().max(power(-300))), code + 1);
            }
            assert_eq!(encode::<F, NEAREST, true>(f64::NEG_INFINITY), F::SIGN | F::LARGEST);
            assert_eq!(encode::<F, NEAREST, true>(1e300), F::LARGEST);
            assert_eq!(encode::<F, NEAREST, true>(-f64::NAN), F::NAN);
            assert_eq!(encode::<F, NEAREST, true>(-0.0), F::SIGN);
        }
        check::<F16>();
        check::<Bf16>();
        check::<E4m3>();
        check::<E5m2>();
        check::<E2m1>();
        let e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        assert!((0..8).all(|code| decode::<E2m1>(code) == e2m1[code as usize]));
        assert_eq!(decode::<E4m3>(0x7e), 448.0);
        assert_eq!(decode::<E5m2>(0x7b), 57344.0);
        assert_eq!(encode::<E4m3, NEAREST, true>(f64::NAN), 0x7f);
        assert_eq!(encode::<E2m1, NEAREST, true>(-f64::NAN), 7);
    }
}
