//! f16 and bf16, one or two per register (ISA 9.7.4).
//!
//! Every result is rounded once, to nearest. NaN results are 0x7fff, and subnormals are preserved.

use super::minifloat::{Bf16, F16, Minifloat, decode, encode};
use super::packed::halves;
use super::round::{NEAREST, sum};
use crate::lanes::{Pure, lanes};

/// Returns the function of an opcode of this family.
pub(crate) fn pure(opcode: &[&str]) -> Option<Pure> {
    let (ty, rest) = opcode.split_last()?;
    match *ty {
        "f16" => single::<F16>(rest),
        "bf16" => single::<Bf16>(rest),
        "f16x2" => double::<F16>(rest),
        "bf16x2" => double::<Bf16>(rest),
        _ => None,
    }
}

fn single<F: Minifloat>(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["add", "rn"] => lanes!(WWW, |a, b| one(a, b, add::<F>); B16 B16 B16),
        ["sub", "rn"] => lanes!(WWW, |a, b| one(a, b, sub::<F>); B16 B16 B16),
        ["mul", "rn"] => lanes!(WWW, |a, b| one(a, b, mul::<F>); B16 B16 B16),
        ["fma", "rn"] => {
            lanes!(WWWW, |a, b, c| u32::from(fma::<F>(a as u16, b as u16, c as u16)); B16 B16 B16 B16)
        }
        ["fma", "rn", "relu"] => {
            lanes!(WWWW, |a, b, c| u32::from(relu(fma::<F>(a as u16, b as u16, c as u16))); B16 B16 B16 B16)
        }
        ["neg"] => lanes!(WW, |a| a ^ 0x8000; B16 B16),
        ["abs"] => lanes!(WW, |a| a & 0x7fff; B16 B16),
        ["min"] => lanes!(WWW, |a, b| one(a, b, choose::<F, false, false, false>); B16 B16 B16),
        ["max"] => lanes!(WWW, |a, b| one(a, b, choose::<F, true, false, false>); B16 B16 B16),
        ["min", "NaN"] => lanes!(WWW, |a, b| one(a, b, choose::<F, false, true, false>); B16 B16 B16),
        ["max", "NaN"] => lanes!(WWW, |a, b| one(a, b, choose::<F, true, true, false>); B16 B16 B16),
        ["min", "xorsign", "abs"] => {
            lanes!(WWW, |a, b| one(a, b, choose::<F, false, false, true>); B16 B16 B16)
        }
        ["max", "xorsign", "abs"] => {
            lanes!(WWW, |a, b| one(a, b, choose::<F, true, false, true>); B16 B16 B16)
        }
        ["min", "NaN", "xorsign", "abs"] => {
            lanes!(WWW, |a, b| one(a, b, choose::<F, false, true, true>); B16 B16 B16)
        }
        ["max", "NaN", "xorsign", "abs"] => {
            lanes!(WWW, |a, b| one(a, b, choose::<F, true, true, true>); B16 B16 B16)
        }
        _ => return None,
    })
}

fn double<F: Minifloat>(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["add", "rn"] => lanes!(WWW, |a, b| halves(a, b, add::<F>); B32 B32 B32),
        ["sub", "rn"] => lanes!(WWW, |a, b| halves(a, b, sub::<F>); B32 B32 B32),
        ["mul", "rn"] => lanes!(WWW, |a, b| halves(a, b, mul::<F>); B32 B32 B32),
        ["fma", "rn"] => lanes!(WWWW, |a, b, c| both(a, b, c, fma::<F>); B32 B32 B32 B32),
        ["fma", "rn", "relu"] => {
            lanes!(WWWW, |a, b, c| both(a, b, c, |a, b, c| relu(fma::<F>(a, b, c))); B32 B32 B32 B32)
        }
        ["neg"] => lanes!(WW, |a| a ^ 0x8000_8000; B32 B32),
        ["abs"] => lanes!(WW, |a| a & 0x7fff_7fff; B32 B32),
        ["min"] => lanes!(WWW, |a, b| halves(a, b, choose::<F, false, false, false>); B32 B32 B32),
        ["max"] => lanes!(WWW, |a, b| halves(a, b, choose::<F, true, false, false>); B32 B32 B32),
        ["min", "NaN"] => lanes!(WWW, |a, b| halves(a, b, choose::<F, false, true, false>); B32 B32 B32),
        ["max", "NaN"] => lanes!(WWW, |a, b| halves(a, b, choose::<F, true, true, false>); B32 B32 B32),
        ["min", "xorsign", "abs"] => {
            lanes!(WWW, |a, b| halves(a, b, choose::<F, false, false, true>); B32 B32 B32)
        }
        ["max", "xorsign", "abs"] => {
            lanes!(WWW, |a, b| halves(a, b, choose::<F, true, false, true>); B32 B32 B32)
        }
        ["min", "NaN", "xorsign", "abs"] => {
            lanes!(WWW, |a, b| halves(a, b, choose::<F, false, true, true>); B32 B32 B32)
        }
        ["max", "NaN", "xorsign", "abs"] => {
            lanes!(WWW, |a, b| halves(a, b, choose::<F, true, true, true>); B32 B32 B32)
        }
        _ => return None,
    })
}

#[inline(always)]
fn one(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    f(a as u16, b as u16).into()
}

#[inline(always)]
fn both(a: u32, b: u32, c: u32, f: impl Fn(u16, u16, u16) -> u16) -> u32 {
    let low = f(a as u16, b as u16, c as u16);
    let high = f((a >> 16) as u16, (b >> 16) as u16, (c >> 16) as u16);
    u32::from(low) | u32::from(high) << 16
}

#[inline(always)]
fn value<F: Minifloat>(bits: u16) -> f64 {
    decode::<F>(bits.into())
}

#[inline(always)]
fn code<F: Minifloat>(x: f64) -> u16 {
    encode::<F, NEAREST, false>(x) as u16
}

/// `add`
fn add<F: Minifloat>(a: u16, b: u16) -> u16 {
    code::<F>(sum::<NEAREST>(value::<F>(a), value::<F>(b)))
}

/// `sub`
fn sub<F: Minifloat>(a: u16, b: u16) -> u16 {
    add::<F>(a, b ^ 0x8000)
}

/// `mul`. The product is exact in f64.
fn mul<F: Minifloat>(a: u16, b: u16) -> u16 {
    code::<F>(value::<F>(a) * value::<F>(b))
}

/// `fma`
fn fma<F: Minifloat>(a: u16, b: u16, c: u16) -> u16 {
    code::<F>(sum::<NEAREST>(value::<F>(a) * value::<F>(b), value::<F>(c)))
}

/// `.relu`: negative results become 0. NaN stays the canonical NaN.
pub(super) fn relu(bits: u16) -> u16 {
    if bits & 0x8000 != 0 { 0 } else { bits }
}

/// `min` and `max`, with the rules of f32.
#[inline(always)]
fn choose<F: Minifloat, const MAX: bool, const NAN: bool, const XORSIGN: bool>(a: u16, b: u16) -> u16 {
    let infinity = (F::LARGEST + 1) as u16;
    let (x, y) = if XORSIGN { (a & 0x7fff, b & 0x7fff) } else { (a, b) };
    let key = |x: u16| (x ^ ((x as i16 >> 15) as u16 >> 1)) as i16;
    let (x_nan, y_nan) = (x & 0x7fff > infinity, y & 0x7fff > infinity);
    let chosen = if (key(x) > key(y)) == MAX { x } else { y };
    let chosen = if y_nan { x } else { chosen };
    let chosen = if x_nan { y } else { chosen };
    let nan = if NAN { x_nan | y_nan } else { x_nan & y_nan };
    let signed = if XORSIGN { chosen | ((a ^ b) & 0x8000) } else { chosen };
    if nan { F::NAN as u16 } else { signed }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns numbers with close exponents, and sometimes arbitrary bits.
    fn operand(random: &mut fastrand::Rng, one: u16, mantissa: u32) -> u16 {
        if random.u8(..4) == 0 {
            return random.u16(..);
        }
        let bits = one.wrapping_add(random.u16(..16 << mantissa)).wrapping_sub(8 << mantissa);
        bits & !0 << random.u32(..mantissa) | random.u16(..2) << 15
    }

    /// Returns the sum as an integer in units of 2^−300, rounded by comparing both neighbours.
    fn exact_fma<F: Minifloat>(a: u16, b: u16, c: u16) -> Option<u16> {
        let split = |x: u16| {
            let x = value::<F>(x);
            let bits = x.abs().to_bits();
            let significand = (bits & ((1 << 52) - 1) | 1 << 52) >> 30;
            let exponent = (bits >> 52) as i32 - 1023 - 22;
            (x != 0.0).then(|| (if x < 0.0 { -1 } else { 1 } * significand as i128, exponent))
        };
        let ((a, ea), (b, eb), (c, ec)) = (split(a)?, split(b)?, split(c)?);
        let (mut product, mut addend) = (a * b, c);
        let low = (ea + eb).min(ec);
        let (shift_product, shift_addend) = (ea + eb - low, ec - low);
        if shift_product > 70 || shift_addend > 90 {
            return None;
        }
        product <<= shift_product;
        addend <<= shift_addend;
        let total = product + addend;
        if total == 0 {
            return Some(0);
        }
        // Truncated to 60 bits with a sticky bit, so the f64 below is rounded to odd by integers
        // only.
        let magnitude = total.unsigned_abs();
        let drop = (128 - magnitude.leading_zeros()).saturating_sub(52);
        let kept = magnitude >> drop;
        let sticky = u128::from(kept << drop != magnitude);
        let x = (kept | sticky) as f64 * 2f64.powi(low + drop as i32);
        Some(code::<F>(if total < 0 { -x } else { x }))
    }

    /// Compares with the exact result if it is known, and returns whether it is.
    fn compare_fma<F: Minifloat>(operands: [u16; 3]) -> bool {
        let [a, b, c] = operands;
        let finite = operands.iter().all(|&x| u32::from(x & 0x7fff) <= F::LARGEST);
        let expected = if finite { exact_fma::<F>(a, b, c) } else { None };
        if let Some(expected) = expected {
            assert_eq!(fma::<F>(a, b, c), expected, "{a:04x} {b:04x} {c:04x}");
        }
        expected.is_some()
    }

    #[test]
    fn fma_is_rounded_once() {
        let mut random = fastrand::Rng::with_seed(6);
        let mut compared = 0;
        for _ in 0..200_000 {
            let operands = [(); 3].map(|()| operand(&mut random, 0x3c00, 10));
            compared += u32::from(compare_fma::<F16>(operands));
            let operands = [(); 3].map(|()| operand(&mut random, 0x3f80, 7));
            compared += u32::from(compare_fma::<Bf16>(operands));
        }
        assert!(compared > 100_000);
    }

    #[test]
    fn a_tie_is_broken_by_bits_beyond_f64() {
        // 9 · 29/256 = 261/256 is between 130/128 and 131/128, and 7 · 37/256 = 259/256 between
        // 129/128 and 130/128. 2^−120 decides.
        let (nine, rest, least) = (0x4110, 0x3de8, 0x0380);
        assert_eq!(fma::<Bf16>(nine, rest, 0), 0x3f82);
        assert_eq!(fma::<Bf16>(nine, rest, least), 0x3f83);
        assert_eq!(fma::<Bf16>(0x40e0, 0x3e14, 0), 0x3f82);
        assert_eq!(fma::<Bf16>(0x40e0, 0x3e14, 0x8000 | least), 0x3f81);
    }

    #[test]
    fn extremes() {
        assert_eq!(choose::<Bf16, true, true, true>(0xbf80, 0x4000), 0xc000);
        assert_eq!(choose::<Bf16, true, true, true>(0xbf80, 0xffff), 0x7fff);
        assert_eq!(choose::<F16, true, false, false>(0xfe01, 0xbc00), 0xbc00);
        assert_eq!(choose::<F16, false, false, false>(0, 0x8000), 0x8000);
        assert_eq!(choose::<F16, true, true, false>(0x7c00, 0x7c01), 0x7fff);
    }
}
