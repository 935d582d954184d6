//! f64 (ISA 9.7.3), rounded to nearest, and conversions to and from it (9.7.9, `cvt`).
//!
//! There is no `.ftz`: subnormals are preserved.

use super::round::{DOWN, NEAREST, UP, ZERO, to_f32};
use crate::lanes::{Pure, lanes};

/// The result of every operation on NaN. The ISA leaves its payload open.
const CANONICAL_NAN: u64 = 0x7fff_ffff_ffff_ffff;

/// Returns the function of an opcode of this family.
pub(crate) fn pure(opcode: &[&str]) -> Option<Pure> {
    arithmetic(opcode).or_else(|| conversions(opcode))
}

fn arithmetic(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["abs", "f64"] => lanes!(LL, |a| a & !(1 << 63); F64 F64),
        ["neg", "f64"] => lanes!(LL, |a| a ^ 1 << 63; F64 F64),
        // The rounding mode is required, as for f32. Without it the assembler may fuse.
        ["add", "rn", "f64"] => {
            lanes!(LLL, |a, b| canonical(f64::from_bits(a) + f64::from_bits(b)); F64 F64 F64)
        }
        ["sub", "rn", "f64"] => {
            lanes!(LLL, |a, b| canonical(f64::from_bits(a) - f64::from_bits(b)); F64 F64 F64)
        }
        ["mul", "rn", "f64"] => {
            lanes!(LLL, |a, b| canonical(f64::from_bits(a) * f64::from_bits(b)); F64 F64 F64)
        }
        ["div", "rn", "f64"] => {
            lanes!(LLL, |a, b| canonical(f64::from_bits(a) / f64::from_bits(b)); F64 F64 F64)
        }
        ["rcp", "rn", "f64"] => lanes!(LL, |a| canonical(1.0 / f64::from_bits(a)); F64 F64),
        ["fma", "rn", "f64"] => {
            lanes!(LLLL, |a, b, c| canonical(f64::from_bits(a).mul_add(f64::from_bits(b), f64::from_bits(c))); F64 F64 F64 F64)
        }
        _ => return None,
    })
}

/// Conversions. From integers, `as` rounds to nearest.
fn conversions(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["cvt", "f64", "f32"] => lanes!(LW, |a| widened(a); F64 F32),
        ["cvt", "rn", "f64", "u32"] => lanes!(LW, |a| f64::from(a).to_bits(); F64 B32),
        ["cvt", "rn", "f64", "s32"] => lanes!(LW, |a| f64::from(a as i32).to_bits(); F64 B32),
        ["cvt", "rn", "f64", "u64"] => lanes!(LL, |a| (a as f64).to_bits(); F64 B64),
        ["cvt", "rn", "f64", "s64"] => lanes!(LL, |a| (a as i64 as f64).to_bits(); F64 B64),
        ["cvt", "rn", "f32", "f64"] => lanes!(WL, |a| to_f32::<NEAREST>(f64::from_bits(a)); F32 F64),
        ["cvt", "rz", "f32", "f64"] => lanes!(WL, |a| to_f32::<ZERO>(f64::from_bits(a)); F32 F64),
        ["cvt", "rp", "f32", "f64"] => lanes!(WL, |a| to_f32::<UP>(f64::from_bits(a)); F32 F64),
        ["cvt", "rm", "f32", "f64"] => lanes!(WL, |a| to_f32::<DOWN>(f64::from_bits(a)); F32 F64),
        _ => return None,
    })
}

/// Converts an f32 to f64. A NaN keeps its payload, as on an H200.
fn widened(bits: u32) -> u64 {
    let value = f32::from_bits(bits);
    if value.is_nan() {
        return u64::from(bits >> 31) << 63 | 0x7ff8 << 48 | u64::from(bits & 0x7f_ffff) << 29;
    }
    f64::from(value).to_bits()
}

fn canonical(value: f64) -> u64 {
    if value.is_nan() { CANONICAL_NAN } else { value.to_bits() }
}
