//! f64 (ISA 9.7.3), rounded to nearest. There is no `.ftz`: subnormals are always kept.

use crate::lanes::{Pure, lanes};

/// What every operation makes of NaN: the ISA leaves its payload open.
const CANONICAL_NAN: u64 = 0x7fff_ffff_ffff_ffff;

/// The function of an opcode, if it is one of these.
pub(crate) fn pure(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["abs", "f64"] => lanes!(LL, |a| a & !(1 << 63); F64 F64),
        ["neg", "f64"] => lanes!(LL, |a| a ^ 1 << 63; F64 F64),
        // As for f32: without a rounding mode, the assembler is free to fuse.
        ["add", "rn", "f64"] => {
            lanes!(LLL, |a, b| canonical(f64::from_bits(a) + f64::from_bits(b)); F64 F64 F64)
        }
        ["sub", "rn", "f64"] => {
            lanes!(LLL, |a, b| canonical(f64::from_bits(a) - f64::from_bits(b)); F64 F64 F64)
        }
        ["mul", "rn", "f64"] => {
            lanes!(LLL, |a, b| canonical(f64::from_bits(a) * f64::from_bits(b)); F64 F64 F64)
        }
        ["cvt", "f64", "f32"] => lanes!(LW, |a| canonical(f64::from(f32::from_bits(a))); F64 F32),
        _ => return None,
    })
}

/// The comparison of this name, of those that are false if an operand is NaN.
pub(crate) fn comparison(comparison: &str) -> Option<Pure> {
    Some(match comparison {
        "lt" => lanes!(PLL, |a, b| f64::from_bits(a) < f64::from_bits(b); F64 F64),
        "gt" => lanes!(PLL, |a, b| f64::from_bits(a) > f64::from_bits(b); F64 F64),
        _ => return None,
    })
}

fn canonical(value: f64) -> u64 {
    if value.is_nan() { CANONICAL_NAN } else { value.to_bits() }
}
