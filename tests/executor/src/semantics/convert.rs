//! Conversions (ISA 9.7.9, `cvt`). The first of two operands becomes the upper half of the result.
//!
//! Three details are interpretations of the ISA. A NaN of f16 or bf16 becomes the canonical f32
//! NaN. `.relu` turns −0 into +0. The sign of an operand of `.ue8m0x2` is ignored.

use super::half::relu;
use super::minifloat::{Bf16, E2m1, E4m3, E5m2, F16, Minifloat, decode, encode};
use super::round::{DOWN, NEAREST, UP, ZERO, to_f32};
use crate::lanes::{Pure, lanes};

/// Returns the function of an opcode of this family.
pub(crate) fn pure(opcode: &[&str]) -> Option<Pure> {
    let ["cvt", rest @ ..] = opcode else { return None };
    let (from, rest) = rest.split_last()?;
    let (to, modifiers) = rest.split_last()?;
    if let ["rn" | "rz", modifiers @ ..] = modifiers {
        let zero = rest[0] == "rz";
        return narrowing(modifiers, to, from, zero).or_else(|| with_mode(opcode));
    }
    integers(modifiers, to, from).or_else(|| with_mode(opcode))
}

/// Integers to integers, truncated or extended by the source's sign.
fn integers(modifiers: &[&str], to: &str, from: &str) -> Option<Pure> {
    if !modifiers.is_empty() {
        return None;
    }
    Some(match (to, from) {
        ("u16" | "s16", "u8") => lanes!(WW, |a| a & 0xff; B16 B8),
        ("u16" | "s16", "s8") => lanes!(WW, |a| u32::from(a as u8 as i8 as u16); B16 B8),
        ("u32" | "s32", "u8") => lanes!(WW, |a| a & 0xff; B32 B8),
        ("u32" | "s32", "s8") => lanes!(WW, |a| a as u8 as i8 as u32; B32 B8),
        ("u32" | "s32", "u16") => lanes!(WW, |a| a & 0xffff; B32 B16),
        ("u32" | "s32", "s16") => lanes!(WW, |a| a as u16 as i16 as u32; B32 B16),
        ("u64" | "s64", "u8") => lanes!(LW, |a| u64::from(a as u8); B64 B8),
        ("u64" | "s64", "s8") => lanes!(LW, |a| a as u8 as i8 as u64; B64 B8),
        ("u64" | "s64", "u16") => lanes!(LW, |a| u64::from(a as u16); B64 B16),
        ("u64" | "s64", "s16") => lanes!(LW, |a| a as u16 as i16 as u64; B64 B16),
        ("u64" | "s64", "u32") => lanes!(LW, |a| u64::from(a); B64 B32),
        ("u64" | "s64", "s32") => lanes!(LW, |a| a as i32 as u64; B64 B32),
        ("u8" | "s8", "u16" | "s16") => lanes!(WW, |a| a & 0xff; B8 B16),
        ("u8" | "s8", "u32" | "s32") => lanes!(WW, |a| a & 0xff; B8 B32),
        ("u16" | "s16", "u32" | "s32") => lanes!(WW, |a| a & 0xffff; B16 B32),
        ("u16" | "s16", "u64" | "s64") => lanes!(WL, |a| a as u32 & 0xffff; B16 B64),
        ("u32" | "s32", "u64" | "s64") => lanes!(WL, |a| a as u32; B32 B64),
        ("f32", "f16") => lanes!(WW, |a| to_f32::<NEAREST>(decode::<F16>(a)); F32 B16),
        ("f32", "bf16") => lanes!(WW, |a| to_f32::<NEAREST>(decode::<Bf16>(a)); F32 B16),
        _ => return None,
    })
}

/// Integers to f32 in every rounding mode, and f32 to integers.
fn with_mode(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["cvt", mode, "f32", from] => match *mode {
            "rn" => from_integer::<NEAREST>(from)?,
            "rz" => from_integer::<ZERO>(from)?,
            "rp" => from_integer::<UP>(from)?,
            "rm" => from_integer::<DOWN>(from)?,
            _ => return None,
        },
        ["cvt", mode, to, "f32"] => match *mode {
            "rni" => to_integer::<NEAREST>(to)?,
            "rzi" => to_integer::<ZERO>(to)?,
            "rpi" => to_integer::<UP>(to)?,
            "rmi" => to_integer::<DOWN>(to)?,
            _ => return None,
        },
        ["cvt", mode @ ("rz" | "rp"), "satfinite", "ue8m0x2", "f32"] => match *mode {
            "rz" => lanes!(WWW, |a, b| exponent::<ZERO>(a) << 8 | exponent::<ZERO>(b); B16 F32 F32),
            _ => lanes!(WWW, |a, b| exponent::<UP>(a) << 8 | exponent::<UP>(b); B16 F32 F32),
        },
        ["cvt", "rn", "bf16x2", "ue8m0x2"] => {
            lanes!(WW, |a| power(a >> 8 & 0xff) << 16 | power(a & 0xff); B32 B16)
        }
        _ => return None,
    })
}

fn from_integer<const MODE: u8>(from: &str) -> Option<Pure> {
    Some(match from {
        "u8" => lanes!(WW, |a| integer_to_f32::<MODE>((a as u8).into()); F32 B8),
        "s8" => lanes!(WW, |a| integer_to_f32::<MODE>((a as i8).into()); F32 B8),
        "u16" => lanes!(WW, |a| integer_to_f32::<MODE>((a as u16).into()); F32 B16),
        "s16" => lanes!(WW, |a| integer_to_f32::<MODE>((a as i16).into()); F32 B16),
        "u32" => lanes!(WW, |a| integer_to_f32::<MODE>(a.into()); F32 B32),
        "s32" => lanes!(WW, |a| integer_to_f32::<MODE>((a as i32).into()); F32 B32),
        "u64" => lanes!(WL, |a| integer_to_f32::<MODE>(a.into()); F32 B64),
        "s64" => lanes!(WL, |a| integer_to_f32::<MODE>((a as i64).into()); F32 B64),
        _ => return None,
    })
}

/// Rounds to odd first, because an f64 can lack at most the last bits of 64.
fn integer_to_f32<const MODE: u8>(x: i128) -> u32 {
    let magnitude = x.unsigned_abs() as u64;
    let odd = if magnitude >> 53 == 0 {
        magnitude
    } else {
        // The lowest 11 bits. Lost bits set the last kept bit.
        (magnitude & !0x7ff) | if magnitude & 0x7ff != 0 { 0x800 } else { 0 }
    };
    to_f32::<MODE>(if x < 0 { -(odd as f64) } else { odd as f64 })
}

fn to_integer<const MODE: u8>(to: &str) -> Option<Pure> {
    Some(match to {
        "u16" => lanes!(WW, |a| u32::from(whole::<MODE>(a) as u16); B16 F32),
        "s16" => lanes!(WW, |a| u32::from(whole::<MODE>(a) as i16 as u16); B16 F32),
        "u32" => lanes!(WW, |a| whole::<MODE>(a) as u32; B32 F32),
        "s32" => lanes!(WW, |a| whole::<MODE>(a) as i32 as u32; B32 F32),
        "u64" => lanes!(LW, |a| wide(a, whole::<MODE>(a) as u64); B64 F32),
        "s64" => lanes!(LW, |a| wide(a, whole::<MODE>(a) as i64 as u64); B64 F32),
        _ => return None,
    })
}

/// Rounds to an integer. Like `cvt`, `as` then clamps to the integer's range and turns NaN into 0.
fn whole<const MODE: u8>(bits: u32) -> f64 {
    let x = f64::from(f32::from_bits(bits));
    match MODE {
        NEAREST => x.round_ties_even(),
        ZERO => x.trunc(),
        UP => x.ceil(),
        _ => x.floor(),
    }
}

/// For 64-bit integers NaN becomes the highest bit.
fn wide(bits: u32, integer: u64) -> u64 {
    if f32::from_bits(bits).is_nan() { 1 << 63 } else { integer }
}

/// f32 to `.ue8m0` with `.satfinite`: the power of two below or above, as a biased exponent.
///
/// The format has no sign, so the magnitude counts. NaN is 0xff. 0 and anything below the smallest
/// power become the smallest power.
fn exponent<const MODE: u8>(bits: u32) -> u32 {
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return 0xff;
    }
    let floor = magnitude >> 23;
    let above = match floor {
        // 2^−127 is a subnormal f32.
        0 => magnitude > 0x40_0000,
        _ => magnitude & 0x7f_ffff != 0,
    };
    (floor + u32::from(MODE == UP && above)).min(0xfe)
}

/// `.ue8m0` to bf16. 2^−127 is a subnormal bf16.
fn power(code: u32) -> u32 {
    match code {
        0 => 0x0040,
        0xff => 0x7fff,
        _ => code << 7,
    }
}

/// Conversions to formats of at most 16 bits, and between them.
fn narrowing(modifiers: &[&str], to: &str, from: &str, zero: bool) -> Option<Pure> {
    let (relu, satfinite) = match modifiers {
        [] => (false, false),
        ["relu"] => (true, false),
        ["satfinite"] => (false, true),
        ["relu", "satfinite"] | ["satfinite", "relu"] => (true, true),
        _ => return None,
    };
    match (zero, relu, satfinite) {
        (false, false, false) => {
            let mode = sixteen::<NEAREST, false, false>(to, from);
            mode.or_else(|| widening::<false>(to, from))
        }
        (false, true, false) => {
            let mode = sixteen::<NEAREST, true, false>(to, from);
            mode.or_else(|| widening::<true>(to, from))
        }
        (false, false, true) => {
            let mode = sixteen::<NEAREST, false, true>(to, from);
            mode.or_else(|| tiny::<false>(to, from))
        }
        (false, true, true) => {
            let mode = sixteen::<NEAREST, true, true>(to, from);
            mode.or_else(|| tiny::<true>(to, from))
        }
        (true, false, false) => sixteen::<ZERO, false, false>(to, from),
        (true, true, false) => sixteen::<ZERO, true, false>(to, from),
        (true, false, true) => sixteen::<ZERO, false, true>(to, from),
        (true, true, true) => sixteen::<ZERO, true, true>(to, from),
    }
}

/// f32 to f16 and bf16, single or in pairs.
fn sixteen<const MODE: u8, const RELU: bool, const SATFINITE: bool>(to: &str, from: &str) -> Option<Pure> {
    Some(match (to, from) {
        ("f16", "f32") => lanes!(WW, |a| narrow::<F16, MODE, RELU, SATFINITE>(a); B16 F32),
        ("bf16", "f32") => lanes!(WW, |a| narrow::<Bf16, MODE, RELU, SATFINITE>(a); B16 F32),
        ("f16x2", "f32") => {
            lanes!(WWW, |a, b| narrow::<F16, MODE, RELU, SATFINITE>(a) << 16 | narrow::<F16, MODE, RELU, SATFINITE>(b); B32 F32 F32)
        }
        ("bf16x2", "f32") => {
            lanes!(WWW, |a, b| narrow::<Bf16, MODE, RELU, SATFINITE>(a) << 16 | narrow::<Bf16, MODE, RELU, SATFINITE>(b); B32 F32 F32)
        }
        _ => return None,
    })
}

fn narrow<F: Minifloat, const MODE: u8, const RELU: bool, const SATFINITE: bool>(bits: u32) -> u32 {
    clamp::<F, RELU>(encode::<F, MODE, SATFINITE>(f32::from_bits(bits).into()))
}

/// `.relu`: negative results become 0. A NaN is already canonical and has no sign.
fn clamp<F: Minifloat, const RELU: bool>(code: u32) -> u32 {
    if RELU && code & F::SIGN != 0 { 0 } else { code }
}

/// Pairs of f32, f16 or bf16 to pairs of 8 or 4 bits, always with `.satfinite`.
fn tiny<const RELU: bool>(to: &str, from: &str) -> Option<Pure> {
    Some(match (to, from) {
        ("e4m3x2", "f32") => {
            lanes!(WWW, |a, b| eight::<E4m3, RELU>(a) << 8 | eight::<E4m3, RELU>(b); B16 F32 F32)
        }
        ("e5m2x2", "f32") => {
            lanes!(WWW, |a, b| eight::<E5m2, RELU>(a) << 8 | eight::<E5m2, RELU>(b); B16 F32 F32)
        }
        ("e2m1x2", "f32") => {
            lanes!(WWW, |a, b| eight::<E2m1, RELU>(a) << 4 | eight::<E2m1, RELU>(b); B8 F32 F32)
        }
        ("e4m3x2", "f16x2") => lanes!(WW, |a| repack::<F16, E4m3, RELU>(a); B16 B32),
        ("e5m2x2", "f16x2") => lanes!(WW, |a| repack::<F16, E5m2, RELU>(a); B16 B32),
        ("e2m1x2", "f16x2") => lanes!(WW, |a| repack::<F16, E2m1, RELU>(a); B8 B32),
        ("e4m3x2", "bf16x2") => lanes!(WW, |a| repack::<Bf16, E4m3, RELU>(a); B16 B32),
        ("e5m2x2", "bf16x2") => lanes!(WW, |a| repack::<Bf16, E5m2, RELU>(a); B16 B32),
        ("e2m1x2", "bf16x2") => lanes!(WW, |a| repack::<Bf16, E2m1, RELU>(a); B8 B32),
        _ => return None,
    })
}

fn eight<F: Minifloat, const RELU: bool>(bits: u32) -> u32 {
    narrow::<F, NEAREST, RELU, true>(bits)
}

fn repack<From: Minifloat, To: Minifloat, const RELU: bool>(pair: u32) -> u32 {
    let one = |half: u32| clamp::<To, RELU>(encode::<To, NEAREST, true>(decode::<From>(half)));
    let width = 1 + To::EXPONENT + To::MANTISSA;
    one(pair >> 16) << width | one(pair & 0xffff)
}

/// Pairs of 8 or 4 bits to pairs of f16 or bf16, exactly.
fn widening<const RELU: bool>(to: &str, from: &str) -> Option<Pure> {
    Some(match (to, from) {
        ("f16x2", "e4m3x2") => lanes!(WW, |a| unpack::<E4m3, F16, RELU>(a); B32 B16),
        ("f16x2", "e5m2x2") => lanes!(WW, |a| unpack::<E5m2, F16, RELU>(a); B32 B16),
        ("f16x2", "e2m1x2") => lanes!(WW, |a| unpack::<E2m1, F16, RELU>(a); B32 B8),
        ("bf16x2", "e4m3x2") => lanes!(WW, |a| unpack::<E4m3, Bf16, RELU>(a); B32 B16),
        ("bf16x2", "e5m2x2") => lanes!(WW, |a| unpack::<E5m2, Bf16, RELU>(a); B32 B16),
        ("bf16x2", "e2m1x2") => lanes!(WW, |a| unpack::<E2m1, Bf16, RELU>(a); B32 B8),
        _ => return None,
    })
}

fn unpack<From: Minifloat, To: Minifloat, const RELU: bool>(pair: u32) -> u32 {
    let width = 1 + From::EXPONENT + From::MANTISSA;
    let one = |code: u32| {
        let code = encode::<To, NEAREST, false>(decode::<From>(code & ((1 << width) - 1)));
        if RELU { u32::from(relu(code as u16)) } else { code }
    };
    one(pair >> width) << 16 | one(pair)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_pairs_have_the_documented_order() {
        let f = f32::to_bits;
        assert_eq!(eight::<E2m1, false>(f(-6.5)) << 4 | eight::<E2m1, false>(f(0.75)), 0xf2);
        assert_eq!(eight::<E2m1, false>(0xffc0_0000), 7);
        assert_eq!(eight::<E4m3, false>(f(f32::NEG_INFINITY)), 0xfe);
        assert_eq!(eight::<E4m3, true>(f(-0.0)), 0);
        assert_eq!(unpack::<E2m1, F16, false>(0xf1), 0xc600_3800);
        assert_eq!(unpack::<E5m2, F16, false>(0xfc7d), 0xfc00_7fff);
        assert_eq!(repack::<F16, E4m3, false>(0x3c00_bc00), 0x38b8);
    }

    #[test]
    fn exponents() {
        let up = |x: f32| exponent::<UP>(x.to_bits());
        assert_eq!([up(0.0), up(1.0), up(1.1), up(f32::MAX), up(f32::INFINITY)], [0, 127, 128, 254, 254]);
        assert_eq!([up(f32::from_bits(0x40_0000)), up(f32::from_bits(0x40_0001))], [0, 1]);
        assert_eq!(exponent::<ZERO>(1.9f32.to_bits()), 127);
        assert_eq!([power(0), power(127), power(255)], [0x40, 0x3f80, 0x7fff]);
    }

    #[test]
    fn integers_to_floats_and_back() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..100_000 {
            let x = random.u64(..) >> random.u32(..64);
            assert_eq!(integer_to_f32::<NEAREST>(x.into()), (x as f32).to_bits(), "{x:x}");
            let down = f32::from_bits(integer_to_f32::<ZERO>(x.into()));
            let up = f32::from_bits(integer_to_f32::<UP>(x.into()));
            assert!(down as u128 <= x.into() && up as u128 >= x.into());
            assert!(down == up || down.next_up() == up);
        }
        assert_eq!(whole::<NEAREST>(2.5f32.to_bits()) as u32, 2);
        assert_eq!(whole::<DOWN>((-2.5f32).to_bits()) as i32, -3);
        assert_eq!(wide(super::super::round::CANONICAL_NAN, 0), 1 << 63);
    }
}
