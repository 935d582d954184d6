//! Two 16-bit integers in a word (ISA 9.7.1, `min`, `max`, `add` with `.s16x2` and `.u16x2`).

use crate::lanes::{Pure, lanes};

/// Returns the function of an opcode of this family.
pub(crate) fn pure(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["min", "u16x2"] => lanes!(WWW, |a, b| halves(a, b, u16::min); B32 B32 B32),
        ["max", "u16x2"] => lanes!(WWW, |a, b| halves(a, b, u16::max); B32 B32 B32),
        ["min", "s16x2"] => lanes!(WWW, |a, b| halves(a, b, signed(i16::min)); B32 B32 B32),
        ["max", "s16x2"] => lanes!(WWW, |a, b| halves(a, b, signed(i16::max)); B32 B32 B32),
        ["add", "u16x2" | "s16x2"] => lanes!(WWW, |a, b| halves(a, b, u16::wrapping_add); B32 B32 B32),
        _ => return None,
    })
}

fn signed(f: impl Fn(i16, i16) -> i16) -> impl Fn(u16, u16) -> u16 {
    move |a, b| f(a as i16, b as i16) as u16
}

/// Applies a function to both halves.
pub(super) fn halves(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    let low = f(a as u16, b as u16);
    let high = f((a >> 16) as u16, (b >> 16) as u16);
    u32::from(low) | u32::from(high) << 16
}
