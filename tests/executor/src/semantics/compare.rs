//! Comparisons (ISA 9.7.6, `setp`).

use super::double;
use super::float::flush;
use crate::lanes::{Pure, lanes};

/// Comparisons of f32: those without `u` are false if an operand is NaN, those with are true.
macro_rules! floats {
    ($comparison:expr, $prepare:expr) => {{
        Some(match $comparison {
            "eq" => lanes!(PWW, |a, b| ordered($prepare(a), $prepare(b), |a, b| a == b); F32 F32),
            "ne" => lanes!(PWW, |a, b| ordered($prepare(a), $prepare(b), |a, b| a != b); F32 F32),
            "lt" => lanes!(PWW, |a, b| ordered($prepare(a), $prepare(b), |a, b| a < b); F32 F32),
            "le" => lanes!(PWW, |a, b| ordered($prepare(a), $prepare(b), |a, b| a <= b); F32 F32),
            "gt" => lanes!(PWW, |a, b| ordered($prepare(a), $prepare(b), |a, b| a > b); F32 F32),
            "ge" => lanes!(PWW, |a, b| ordered($prepare(a), $prepare(b), |a, b| a >= b); F32 F32),
            "equ" => lanes!(PWW, |a, b| unordered($prepare(a), $prepare(b), |a, b| a == b); F32 F32),
            "neu" => lanes!(PWW, |a, b| unordered($prepare(a), $prepare(b), |a, b| a != b); F32 F32),
            "ltu" => lanes!(PWW, |a, b| unordered($prepare(a), $prepare(b), |a, b| a < b); F32 F32),
            "leu" => lanes!(PWW, |a, b| unordered($prepare(a), $prepare(b), |a, b| a <= b); F32 F32),
            "gtu" => lanes!(PWW, |a, b| unordered($prepare(a), $prepare(b), |a, b| a > b); F32 F32),
            "geu" => lanes!(PWW, |a, b| unordered($prepare(a), $prepare(b), |a, b| a >= b); F32 F32),
            "num" => lanes!(PWW, |a, b| ordered($prepare(a), $prepare(b), |_, _| true); F32 F32),
            "nan" => lanes!(PWW, |a, b| !ordered($prepare(a), $prepare(b), |_, _| true); F32 F32),
            _ => return None,
        })
    }};
}

/// Comparisons of integers of one type. `lo`, `ls`, `hi`, `hs` are the unsigned ones under other names.
macro_rules! integers {
    ($comparison:expr, $shape:ident, $ty:ident, |$x:ident| $value:expr, signed) => {
        integers!(@ $comparison, $shape, $ty, |$x| $value, "lt", "le", "gt", "ge")
    };
    ($comparison:expr, $shape:ident, $ty:ident, |$x:ident| $value:expr, unsigned) => {
        integers!(@ $comparison, $shape, $ty, |$x| $value, "lt" | "lo", "le" | "ls", "gt" | "hi", "ge" | "hs")
    };
    (@ $comparison:expr, $shape:ident, $ty:ident, |$x:ident| $value:expr, $lt:pat, $le:pat, $gt:pat, $ge:pat) => {
        Some(match $comparison {
            "eq" => lanes!($shape, |a, b| a == b; $ty $ty),
            "ne" => lanes!($shape, |a, b| a != b; $ty $ty),
            $lt => lanes!($shape, |a, b| { let f = |$x| $value; f(a) < f(b) }; $ty $ty),
            $le => lanes!($shape, |a, b| { let f = |$x| $value; f(a) <= f(b) }; $ty $ty),
            $gt => lanes!($shape, |a, b| { let f = |$x| $value; f(a) > f(b) }; $ty $ty),
            $ge => lanes!($shape, |a, b| { let f = |$x| $value; f(a) >= f(b) }; $ty $ty),
            _ => return None,
        })
    };
}

/// The comparison of this name of two operands of this type.
pub(super) fn comparison(comparison: &str, ty: &str, ftz: bool) -> Option<Pure> {
    match (ty, ftz) {
        ("f32", false) => floats!(comparison, std::convert::identity::<u32>),
        ("f32", true) => floats!(comparison, flush),
        (_, true) => None,
        ("f64", false) => double::comparison(comparison),
        ("u16", _) => integers!(comparison, PWW, B16, |x| x, unsigned),
        ("u32", _) => integers!(comparison, PWW, B32, |x| x, unsigned),
        ("u64", _) => integers!(comparison, PLL, B64, |x| x, unsigned),
        ("s16", _) => integers!(comparison, PWW, B16, |x| x as u16 as i16, signed),
        ("s32", _) => integers!(comparison, PWW, B32, |x| x as i32, signed),
        ("s64", _) => integers!(comparison, PLL, B64, |x| x as i64, signed),
        // Bits are only equal or not.
        ("b16", _) if matches!(comparison, "eq" | "ne") => {
            integers!(comparison, PWW, B16, |x| x, unsigned)
        }
        ("b32", _) if matches!(comparison, "eq" | "ne") => {
            integers!(comparison, PWW, B32, |x| x, unsigned)
        }
        ("b64", _) if matches!(comparison, "eq" | "ne") => {
            integers!(comparison, PLL, B64, |x| x, unsigned)
        }
        _ => None,
    }
}

#[inline(always)]
fn ordered(a: u32, b: u32, compare: impl Fn(f32, f32) -> bool) -> bool {
    let (a, b) = (f32::from_bits(a), f32::from_bits(b));
    !(a.is_nan() | b.is_nan()) & compare(a, b)
}

#[inline(always)]
fn unordered(a: u32, b: u32, compare: impl Fn(f32, f32) -> bool) -> bool {
    let (a, b) = (f32::from_bits(a), f32::from_bits(b));
    a.is_nan() | b.is_nan() | compare(a, b)
}
