//! f32 (ISA 9.7.3). Without `.ftz`, subnormals are preserved.
//!
//! `.ftz` flushes subnormal operands and results to zeros of the same sign. The ISA does not
//! specify the result of `abs` and `neg` of a NaN. Here they change only its sign, as the ISA
//! announces for the future.

use super::round::{CANONICAL_NAN, DOWN, NEAREST, UP, ZERO, canonical, quotient, root, sum, to_f32};
use crate::lanes::{Pure, lanes};

/// Returns the function of an opcode of this family.
pub(crate) fn pure(opcode: &[&str]) -> Option<Pure> {
    match opcode {
        ["abs", "f32"] => Some(lanes!(WW, |a| a & 0x7fff_ffff; F32 F32)),
        ["neg", "f32"] => Some(lanes!(WW, |a| a ^ 0x8000_0000; F32 F32)),
        ["abs", "ftz", "f32"] => Some(lanes!(WW, |a| flush(a) & 0x7fff_ffff; F32 F32)),
        ["neg", "ftz", "f32"] => Some(lanes!(WW, |a| flush(a) ^ 0x8000_0000; F32 F32)),
        // 9.7.3.2: the first operand gives the sign, the second the rest. There are no modifiers
        // and no rounding.
        ["copysign", "f32"] => Some(lanes!(WWW, |a, b| (a & 0x8000_0000) | (b & 0x7fff_ffff); F32 F32 F32)),
        ["min", modifiers @ .., "f32"] => extreme::<false>(modifiers),
        ["max", modifiers @ .., "f32"] => extreme::<true>(modifiers),
        // The rounding mode is required. Without it the assembler may fuse (9.7.3, `add` and `mul`)
        // or approximate.
        [operation, mode, "f32"] => rounded::<false>(operation, mode),
        [operation, mode, "ftz", "f32"] => rounded::<true>(operation, mode),
        _ => None,
    }
}

/// Flushes subnormals to zeros of the same sign.
#[inline(always)]
pub(super) fn flush(bits: u32) -> u32 {
    if bits & 0x7f80_0000 == 0 { bits & 0x8000_0000 } else { bits }
}

fn rounded<const FTZ: bool>(operation: &str, mode: &str) -> Option<Pure> {
    match mode {
        "rn" => in_mode::<FTZ, NEAREST>(operation),
        "rz" => in_mode::<FTZ, ZERO>(operation),
        "rp" => in_mode::<FTZ, UP>(operation),
        "rm" => in_mode::<FTZ, DOWN>(operation),
        _ => None,
    }
}

/// `add`, `sub`, `mul`, `fma`, `div`, `rcp` and `sqrt`, each rounded once.
fn in_mode<const FTZ: bool, const MODE: u8>(operation: &str) -> Option<Pure> {
    Some(match operation {
        "add" => lanes!(WWW, |a, b| add::<FTZ, MODE>(a, b); F32 F32 F32),
        "sub" => lanes!(WWW, |a, b| add::<FTZ, MODE>(a, negated(b)); F32 F32 F32),
        "mul" => lanes!(WWW, |a, b| mul::<FTZ, MODE>(a, b); F32 F32 F32),
        "fma" => lanes!(WWWW, |a, b, c| fma::<FTZ, MODE>(a, b, c); F32 F32 F32 F32),
        "div" => lanes!(WWW, |a, b| div::<FTZ, MODE>(a, b); F32 F32 F32),
        "rcp" => lanes!(WW, |a| div::<FTZ, MODE>(0x3f80_0000, a); F32 F32),
        "sqrt" => lanes!(WW, |a| sqrt::<FTZ, MODE>(a); F32 F32),
        _ => return None,
    })
}

/// Negates the second operand of a subtraction. A NaN stays a NaN.
#[inline(always)]
fn negated(bits: u32) -> u32 {
    bits ^ 0x8000_0000
}

#[inline(always)]
fn operand<const FTZ: bool>(bits: u32) -> f32 {
    f32::from_bits(if FTZ { flush(bits) } else { bits })
}

#[inline(always)]
fn result<const FTZ: bool>(bits: u32) -> u32 {
    if FTZ { flush(bits) } else { bits }
}

#[inline(always)]
fn add<const FTZ: bool, const MODE: u8>(a: u32, b: u32) -> u32 {
    let (a, b) = (operand::<FTZ>(a), operand::<FTZ>(b));
    if MODE == NEAREST {
        return result::<FTZ>(canonical(a + b));
    }
    result::<FTZ>(to_f32::<MODE>(sum::<MODE>(f64::from(a), f64::from(b))))
}

#[inline(always)]
fn mul<const FTZ: bool, const MODE: u8>(a: u32, b: u32) -> u32 {
    let (a, b) = (operand::<FTZ>(a), operand::<FTZ>(b));
    if MODE == NEAREST {
        return result::<FTZ>(canonical(a * b));
    }
    // Exact: 48 bits.
    result::<FTZ>(to_f32::<MODE>(f64::from(a) * f64::from(b)))
}

#[inline(always)]
fn fma<const FTZ: bool, const MODE: u8>(a: u32, b: u32, c: u32) -> u32 {
    let [a, b, c] = [a, b, c].map(|x| f64::from(operand::<FTZ>(x)));
    result::<FTZ>(to_f32::<MODE>(sum::<MODE>(a * b, c)))
}

#[inline(always)]
fn div<const FTZ: bool, const MODE: u8>(a: u32, b: u32) -> u32 {
    let (a, b) = (operand::<FTZ>(a), operand::<FTZ>(b));
    if MODE == NEAREST {
        return result::<FTZ>(canonical(a / b));
    }
    result::<FTZ>(to_f32::<MODE>(quotient(f64::from(a), f64::from(b))))
}

#[inline(always)]
fn sqrt<const FTZ: bool, const MODE: u8>(a: u32) -> u32 {
    let a = operand::<FTZ>(a);
    if MODE == NEAREST {
        return result::<FTZ>(canonical(a.sqrt()));
    }
    result::<FTZ>(to_f32::<MODE>(root(f64::from(a))))
}

/// `min` and `max`.
fn extreme<const MAX: bool>(modifiers: &[&str]) -> Option<Pure> {
    Some(match modifiers {
        [] => lanes!(WWW, |a, b| choose::<MAX, false, false>(a, b); F32 F32 F32),
        ["ftz"] => lanes!(WWW, |a, b| choose::<MAX, false, false>(flush(a), flush(b)); F32 F32 F32),
        ["NaN"] => lanes!(WWW, |a, b| choose::<MAX, true, false>(a, b); F32 F32 F32),
        ["ftz", "NaN"] => lanes!(WWW, |a, b| choose::<MAX, true, false>(flush(a), flush(b)); F32 F32 F32),
        ["xorsign", "abs"] => lanes!(WWW, |a, b| choose::<MAX, false, true>(a, b); F32 F32 F32),
        ["NaN", "xorsign", "abs"] => lanes!(WWW, |a, b| choose::<MAX, true, true>(a, b); F32 F32 F32),
        _ => return None,
    })
}

/// Returns the smaller or larger operand, with −0 below +0.
///
/// If one operand is NaN, the result is the other one, or with `.NaN` the canonical NaN. Two NaNs
/// give the canonical NaN. `.xorsign.abs` compares magnitudes and gives the result the product of
/// the signs, unless it is NaN.
#[inline(always)]
fn choose<const MAX: bool, const NAN: bool, const XORSIGN: bool>(a: u32, b: u32) -> u32 {
    let (x, y) = if XORSIGN { (a & 0x7fff_ffff, b & 0x7fff_ffff) } else { (a, b) };
    let is_nan = |x: u32| x & 0x7fff_ffff > 0x7f80_0000;
    // Maps floats to integers in the same order: the magnitude bits of negative floats are
    // inverted.
    let key = |x: u32| (x ^ ((x as i32 >> 31) as u32 >> 1)) as i32;
    let chosen = if (key(x) > key(y)) == MAX { x } else { y };
    let (x_nan, y_nan) = (is_nan(x), is_nan(y));
    let chosen = if y_nan { x } else { chosen };
    let chosen = if x_nan { y } else { chosen };
    let nan = if NAN { x_nan | y_nan } else { x_nan & y_nan };
    let signed = if XORSIGN { chosen | ((a ^ b) & 0x8000_0000) } else { chosen };
    if nan { CANONICAL_NAN } else { signed }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extremes_of_zeros_and_nan() {
        let (minus_zero, nan, one) = (0x8000_0000, 0xffc1_2345, 0x3f80_0000);
        assert_eq!(choose::<true, false, false>(minus_zero, 0), 0);
        assert_eq!(choose::<true, false, false>(0, minus_zero), 0);
        assert_eq!(choose::<false, false, false>(0, minus_zero), minus_zero);
        assert_eq!(choose::<false, false, false>(nan, one), one);
        assert_eq!(choose::<true, false, false>(one, nan), one);
        assert_eq!(choose::<true, false, false>(nan, nan), CANONICAL_NAN);
        assert_eq!(choose::<true, true, false>(one, nan), CANONICAL_NAN);
        assert_eq!(choose::<true, true, true>(one | 1 << 31, 0x4000_0000), 0xc000_0000);
        assert_eq!(choose::<true, true, true>(one | 1 << 31, nan), CANONICAL_NAN);
        assert_eq!(choose::<false, false, true>(one | 1 << 31, 0x4000_0000), one | 1 << 31);
    }

    #[test]
    fn extremes_order_all_numbers() {
        let mut random = fastrand::Rng::with_seed(4);
        for _ in 0..100_000 {
            let (a, b) = (random.u32(..), random.u32(..));
            let (x, y) = (f32::from_bits(a), f32::from_bits(b));
            if x.is_nan() || y.is_nan() {
                continue;
            }
            assert_eq!(f32::from_bits(choose::<true, false, false>(a, b)), x.max(y));
            assert_eq!(f32::from_bits(choose::<false, true, false>(a, b)), x.min(y));
        }
    }

    #[test]
    fn results_that_are_nan_are_canonical() {
        let inf = 0x7f80_0000;
        assert_eq!(add::<false, NEAREST>(inf, negated(inf)), CANONICAL_NAN);
        assert_eq!(mul::<false, ZERO>(inf, 0), CANONICAL_NAN);
        assert_eq!(div::<false, NEAREST>(0xffc0_0001, 1), CANONICAL_NAN);
        assert_eq!(div::<true, NEAREST>(0x3f80_0000, 0x8000_0001), 0xff80_0000);
        assert_eq!(sqrt::<false, UP>(0xbf80_0000), CANONICAL_NAN);
        assert_eq!(mul::<true, NEAREST>(0x0080_0000, 0x3f00_0000), 0);
    }
}
