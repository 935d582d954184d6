//! Integer arithmetic (ISA 9.7.1). Words hold 16-bit values zero-extended.

use crate::lanes::{Pure, lanes};

/// Interprets a word's 16-bit value as signed.
fn s16(word: u32) -> i32 {
    i32::from(word as u16 as i16)
}

/// Returns the function of an opcode of this family.
pub(crate) fn pure(opcode: &[&str]) -> Option<Pure> {
    sums(opcode)
        .or_else(|| products(opcode))
        .or_else(|| quotients(opcode))
        .or_else(|| dots(opcode))
        .or_else(|| extremes(opcode))
}

/// `add`, `sub`, `neg` and `abs`, modulo two to the width.
fn sums(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["add", "s16" | "u16"] => lanes!(WWW, |a, b| a.wrapping_add(b) & 0xffff; B16 B16 B16),
        ["add", "s32" | "u32"] => lanes!(WWW, |a, b| a.wrapping_add(b); B32 B32 B32),
        ["add", "s64" | "u64"] => lanes!(LLL, |a, b| a.wrapping_add(b); B64 B64 B64),
        ["sub", "s16" | "u16"] => lanes!(WWW, |a, b| a.wrapping_sub(b) & 0xffff; B16 B16 B16),
        ["sub", "s32" | "u32"] => lanes!(WWW, |a, b| a.wrapping_sub(b); B32 B32 B32),
        ["sub", "s64" | "u64"] => lanes!(LLL, |a, b| a.wrapping_sub(b); B64 B64 B64),
        ["neg", "s16"] => lanes!(WW, |a| a.wrapping_neg() & 0xffff; B16 B16),
        ["neg", "s32"] => lanes!(WW, |a| a.wrapping_neg(); B32 B32),
        ["neg", "s64"] => lanes!(LL, |a| a.wrapping_neg(); B64 B64),
        ["abs", "s16"] => lanes!(WW, |a| s16(a).unsigned_abs() & 0xffff; B16 B16),
        ["abs", "s32"] => lanes!(WW, |a| (a as i32).unsigned_abs(); B32 B32),
        ["abs", "s64"] => lanes!(LL, |a| (a as i64).unsigned_abs(); B64 B64),
        _ => return None,
    })
}

/// `mul` and `mad`: the low half, the high half, or the whole product.
fn products(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["mul", "lo", "s16" | "u16"] => lanes!(WWW, |a, b| a.wrapping_mul(b) & 0xffff; B16 B16 B16),
        ["mul", "lo", "s32" | "u32"] => lanes!(WWW, |a, b| a.wrapping_mul(b); B32 B32 B32),
        ["mul", "lo", "s64" | "u64"] => lanes!(LLL, |a, b| a.wrapping_mul(b); B64 B64 B64),
        ["mul", "hi", "s16"] => lanes!(WWW, |a, b| ((s16(a) * s16(b)) >> 16) as u32 & 0xffff; B16 B16 B16),
        ["mul", "hi", "u16"] => lanes!(WWW, |a, b| a.wrapping_mul(b) >> 16; B16 B16 B16),
        ["mul", "hi", "s32"] => lanes!(WWW, |a, b| high_s32(a, b); B32 B32 B32),
        ["mul", "hi", "u32"] => lanes!(WWW, |a, b| high_u32(a, b); B32 B32 B32),
        ["mul", "hi", "s64"] => lanes!(LLL, |a, b| high_s64(a, b); B64 B64 B64),
        ["mul", "hi", "u64"] => lanes!(LLL, |a, b| high_u64(a, b); B64 B64 B64),
        ["mul", "wide", "s16"] => lanes!(WWW, |a, b| (s16(a) * s16(b)) as u32; B32 B16 B16),
        ["mul", "wide", "u16"] => lanes!(WWW, |a, b| a.wrapping_mul(b); B32 B16 B16),
        ["mul", "wide", "s32"] => lanes!(LWW, |a, b| wide_s32(a, b); B64 B32 B32),
        ["mul", "wide", "u32"] => lanes!(LWW, |a, b| u64::from(a) * u64::from(b); B64 B32 B32),
        ["mad", "lo", "s16" | "u16"] => {
            lanes!(WWWW, |a, b, c| a.wrapping_mul(b).wrapping_add(c) & 0xffff; B16 B16 B16 B16)
        }
        ["mad", "lo", "s32" | "u32"] => {
            lanes!(WWWW, |a, b, c| a.wrapping_mul(b).wrapping_add(c); B32 B32 B32 B32)
        }
        ["mad", "lo", "s64" | "u64"] => {
            lanes!(LLLL, |a, b, c| a.wrapping_mul(b).wrapping_add(c); B64 B64 B64 B64)
        }
        ["mad", "hi", "s32"] => {
            lanes!(WWWW, |a, b, c| high_s32(a, b).wrapping_add(c); B32 B32 B32 B32)
        }
        ["mad", "hi", "u32"] => {
            lanes!(WWWW, |a, b, c| high_u32(a, b).wrapping_add(c); B32 B32 B32 B32)
        }
        ["mad", "hi", "s64"] => {
            lanes!(LLLL, |a, b, c| high_s64(a, b).wrapping_add(c); B64 B64 B64 B64)
        }
        ["mad", "hi", "u64"] => {
            lanes!(LLLL, |a, b, c| high_u64(a, b).wrapping_add(c); B64 B64 B64 B64)
        }
        ["mad", "wide", "u16"] => {
            lanes!(WWWW, |a, b, c| a.wrapping_mul(b).wrapping_add(c); B32 B16 B16 B32)
        }
        ["mad", "wide", "s16"] => {
            lanes!(WWWW, |a, b, c| ((s16(a) * s16(b)) as u32).wrapping_add(c); B32 B16 B16 B32)
        }
        ["mad", "wide", "u32"] => {
            lanes!(LWWL, |a, b, c| (u64::from(a) * u64::from(b)).wrapping_add(c); B64 B32 B32 B64)
        }
        ["mad", "wide", "s32"] => {
            lanes!(LWWL, |a, b, c| wide_s32(a, b).wrapping_add(c); B64 B32 B32 B64)
        }
        _ => return None,
    })
}

/// Unsigned `div` and `rem`.
///
/// Division by zero is machine-specific. Here it gives bits that no quotient or remainder has.
fn quotients(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["div", "u32"] => lanes!(WWW, |a, b| a.checked_div(b).unwrap_or(0xDEAD_BEEF); B32 B32 B32),
        ["rem", "u32"] => lanes!(WWW, |a, b| a.checked_rem(b).unwrap_or(0xDEAD_BEEF); B32 B32 B32),
        ["div", "u64"] => lanes!(LLL, |a, b| a.checked_div(b).unwrap_or(0xDEAD_BEEF_DEAD_BEEF); B64 B64 B64),
        ["rem", "u64"] => lanes!(LLL, |a, b| a.checked_rem(b).unwrap_or(0xDEAD_BEEF_DEAD_BEEF); B64 B64 B64),
        _ => return None,
    })
}

fn wide_s32(a: u32, b: u32) -> u64 {
    (i64::from(a as i32) * i64::from(b as i32)) as u64
}

fn high_s32(a: u32, b: u32) -> u32 {
    (wide_s32(a, b) >> 32) as u32
}

fn high_u32(a: u32, b: u32) -> u32 {
    ((u64::from(a) * u64::from(b)) >> 32) as u32
}

fn high_s64(a: u64, b: u64) -> u64 {
    ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64
}

fn high_u64(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

/// `dp4a`: four products of bytes, added to a word modulo 2^32.
///
/// The types are the element types of `a` and `b`, in this order.
fn dots(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["dp4a", "s32", "s32"] => lanes!(WWWW, |a, b, c| dot(a, b, c, s8, s8); B32 B32 B32 B32),
        ["dp4a", "s32", "u32"] => lanes!(WWWW, |a, b, c| dot(a, b, c, s8, u8); B32 B32 B32 B32),
        ["dp4a", "u32", "s32"] => lanes!(WWWW, |a, b, c| dot(a, b, c, u8, s8); B32 B32 B32 B32),
        ["dp4a", "u32", "u32"] => lanes!(WWWW, |a, b, c| dot(a, b, c, u8, u8); B32 B32 B32 B32),
        _ => return None,
    })
}

fn s8(byte: u8) -> i32 {
    i32::from(byte as i8)
}

fn u8(byte: u8) -> i32 {
    i32::from(byte)
}

#[inline(always)]
fn dot(a: u32, b: u32, c: u32, of_a: impl Fn(u8) -> i32, of_b: impl Fn(u8) -> i32) -> u32 {
    let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
    (0..4).fold(c, |sum, i| sum.wrapping_add((of_a(a[i]) * of_b(b[i])) as u32))
}

/// `min` and `max`.
fn extremes(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["min", "u16"] => lanes!(WWW, |a, b| a.min(b); B16 B16 B16),
        ["max", "u16"] => lanes!(WWW, |a, b| a.max(b); B16 B16 B16),
        ["min", "s16"] => lanes!(WWW, |a, b| s16(a).min(s16(b)) as u32 & 0xffff; B16 B16 B16),
        ["max", "s16"] => lanes!(WWW, |a, b| s16(a).max(s16(b)) as u32 & 0xffff; B16 B16 B16),
        ["min", "u32"] => lanes!(WWW, |a, b| a.min(b); B32 B32 B32),
        ["max", "u32"] => lanes!(WWW, |a, b| a.max(b); B32 B32 B32),
        ["min", "s32"] => lanes!(WWW, |a, b| (a as i32).min(b as i32) as u32; B32 B32 B32),
        ["max", "s32"] => lanes!(WWW, |a, b| (a as i32).max(b as i32) as u32; B32 B32 B32),
        ["min", "u64"] => lanes!(LLL, |a, b| a.min(b); B64 B64 B64),
        ["max", "u64"] => lanes!(LLL, |a, b| a.max(b); B64 B64 B64),
        ["min", "s64"] => lanes!(LLL, |a, b| (a as i64).min(b as i64) as u64; B64 B64 B64),
        ["max", "s64"] => lanes!(LLL, |a, b| (a as i64).max(b as i64) as u64; B64 B64 B64),
        _ => return None,
    })
}
