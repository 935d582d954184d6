//! Exact arithmetic, rounded once.
//!
//! Sums of f32 and products with them are computed in f64 and *rounded to odd*: truncated, with the
//! last bit set if anything was lost. An f64 has more than two bits beyond any format here.
//! Rounding such a number again, in any mode, therefore equals rounding the exact number (Boldo and
//! Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to
//! odd").

/// Rounding modes as const parameters (ISA 9.7.3, `.rn`, `.rz`, `.rp`, `.rm`).
pub(super) const NEAREST: u8 = 0;
pub(super) const ZERO: u8 = 1;
pub(super) const UP: u8 = 2;
pub(super) const DOWN: u8 = 3;

/// The NaN result of f32 arithmetic.
///
/// ISA 9.7.3: "NaN payloads are not preserved; the canonical NaN is 0x7fffffff".
pub(super) const CANONICAL_NAN: u32 = 0x7fff_ffff;

/// Rounds to odd, given the nearest f64 and the sign of its error.
#[inline(always)]
pub(super) fn to_odd(nearest: f64, lacks: f64) -> f64 {
    if lacks == 0.0 || !nearest.is_finite() {
        return nearest;
    }
    let too_large = (lacks > 0.0) != (nearest > 0.0);
    f64::from_bits((nearest.to_bits() - u64::from(too_large)) | 1)
}

/// Returns the f64 nearest to x + y and the remainder, by Knuth's two-sum.
///
/// The remainder is exact because nothing here is near the limits of f64's range.
#[inline(always)]
pub(super) fn two_sum(x: f64, y: f64) -> (f64, f64) {
    let s = x + y;
    let virtual_y = s - x;
    (s, (x - (s - virtual_y)) + (y - virtual_y))
}

/// Returns x + y rounded to odd. A zero has the sign that the mode gives it.
#[inline(always)]
pub(super) fn sum<const MODE: u8>(x: f64, y: f64) -> f64 {
    let (s, lacks) = two_sum(x, y);
    if MODE == DOWN && s == 0.0 && (x.is_sign_negative() || y.is_sign_negative()) {
        return -0.0;
    }
    to_odd(s, lacks)
}

/// Returns x / y rounded to odd.
#[inline(always)]
pub(super) fn quotient(x: f64, y: f64) -> f64 {
    let q = x / y;
    if x == 0.0 || !x.is_finite() || !y.is_finite() || y == 0.0 {
        return q;
    }
    // The remainder of a nearest quotient is an f64, so the fused multiply-add gives it exactly.
    let remainder = (-q).mul_add(y, x);
    to_odd(q, remainder * y.signum())
}

/// Returns the square root rounded to odd.
#[inline(always)]
pub(super) fn root(x: f64) -> f64 {
    let s = x.sqrt();
    if x.is_nan() || x <= 0.0 || !x.is_finite() { s } else { to_odd(s, (-s).mul_add(s, x)) }
}

/// Returns the f32 bits of a number that is exact or rounded to odd, with the canonical NaN.
#[inline(always)]
pub(super) fn to_f32<const MODE: u8>(x: f64) -> u32 {
    let nearest = x as f32;
    let back = f64::from(nearest);
    let rounded = match MODE {
        NEAREST => nearest,
        ZERO if back.abs() > x.abs() => f32::from_bits(nearest.to_bits() - 1),
        UP if back < x => nearest.next_up(),
        DOWN if back > x => nearest.next_down(),
        _ => nearest,
    };
    canonical(rounded)
}

/// Returns the bits, with the canonical NaN for every NaN.
///
/// The test uses the bits: LLVM 22 has been seen to evaluate `is_nan` of a negative number's square
/// root to false.
#[inline(always)]
pub(super) fn canonical(x: f32) -> u32 {
    let bits = x.to_bits();
    if bits & 0x7fff_ffff > 0x7f80_0000 { CANONICAL_NAN } else { bits }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fma<const MODE: u8>(a: f32, b: f32, c: f32) -> u32 {
        to_f32::<MODE>(sum::<MODE>(f64::from(a) * f64::from(b), f64::from(c)))
    }

    /// Returns operands with close exponents, so that sums cancel and tie, and sometimes distant
    /// ones.
    fn operand(random: &mut fastrand::Rng) -> f32 {
        let exponent = if random.u8(..8) == 0 { random.u32(..256) } else { random.u32(115..140) };
        let mantissa = random.u32(..1 << 23) & (u32::MAX << random.u32(..24));
        f32::from_bits(random.u32(..2) << 31 | exponent << 23 | mantissa & 0x7f_ffff)
    }

    #[test]
    fn nearest_matches_the_host() {
        let mut random = fastrand::Rng::with_seed(2);
        for _ in 0..300_000 {
            let [a, b, c] = [(); 3].map(|()| operand(&mut random));
            assert_eq!(fma::<NEAREST>(a, b, c), canonical(a.mul_add(b, c)), "{a:e} {b:e} {c:e}");
            let (x, y) = (f64::from(a), f64::from(b));
            assert_eq!(to_f32::<NEAREST>(quotient(x, y)), canonical(a / b), "{a:e} {b:e}");
            assert_eq!(to_f32::<NEAREST>(root(x)), canonical(a.sqrt()), "{a:e}");
        }
    }

    #[test]
    fn directed_modes_enclose_the_exact_result() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..300_000 {
            let [a, b, c] = [(); 3].map(|()| operand(&mut random));
            let (up, down) = (fma::<UP>(a, b, c), fma::<DOWN>(a, b, c));
            let (nearest, zero) = (fma::<NEAREST>(a, b, c), fma::<ZERO>(a, b, c));
            let value = f32::from_bits;
            if value(nearest).is_nan() {
                assert!([up, down, zero].iter().all(|&x| x == CANONICAL_NAN));
                continue;
            }
            if value(up) == value(down) {
                assert_eq!(value(up), value(nearest));
                assert_eq!(value(zero), value(nearest));
            } else {
                assert_eq!(value(down).next_up(), value(up), "{a:e} {b:e} {c:e}");
                assert!(nearest == up || nearest == down);
                assert_eq!(zero, if value(up) > 0.0 { down } else { up });
            }
        }
    }

    #[test]
    fn the_sign_of_zero_follows_the_rounding_mode() {
        assert_eq!(fma::<NEAREST>(1.0, 1.0, -1.0), 0);
        assert_eq!(fma::<DOWN>(1.0, 1.0, -1.0), 1 << 31);
        assert_eq!(fma::<DOWN>(1.0, 0.0, 0.0), 0);
        assert_eq!(fma::<UP>(-1.0, 0.0, 0.0), 0);
        assert_eq!(fma::<NEAREST>(-1.0, 0.0, -0.0), 1 << 31);
        assert_eq!(fma::<UP>(f32::MIN_POSITIVE, -f32::MIN_POSITIVE, 0.0), 1 << 31);
        assert_eq!(fma::<ZERO>(f32::MAX, 2.0, 0.0), f32::MAX.to_bits());
    }
}
