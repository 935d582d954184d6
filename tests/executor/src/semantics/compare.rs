//! Comparisons (ISA 9.7.6, `setp`).

use super::float::flush;
use crate::lanes::{Pure, lanes};

/// Comparisons of floats, which `$value` decodes from operands.
///
/// Comparisons without `u` are false if an operand is NaN, and those with `u` are true.
macro_rules! floats {
    ($comparison:expr, $shape:ident, $ty:ident, $value:expr) => {{
        Some(match $comparison {
            "eq" => floats!(@ $shape, $ty, $value, |a, b, nan| !nan & (a == b)),
            "ne" => floats!(@ $shape, $ty, $value, |a, b, nan| !nan & (a != b)),
            "lt" => floats!(@ $shape, $ty, $value, |a, b, nan| !nan & (a < b)),
            "le" => floats!(@ $shape, $ty, $value, |a, b, nan| !nan & (a <= b)),
            "gt" => floats!(@ $shape, $ty, $value, |a, b, nan| !nan & (a > b)),
            "ge" => floats!(@ $shape, $ty, $value, |a, b, nan| !nan & (a >= b)),
            "equ" => floats!(@ $shape, $ty, $value, |a, b, nan| nan | (a == b)),
            "neu" => floats!(@ $shape, $ty, $value, |a, b, nan| nan | (a != b)),
            "ltu" => floats!(@ $shape, $ty, $value, |a, b, nan| nan | (a < b)),
            "leu" => floats!(@ $shape, $ty, $value, |a, b, nan| nan | (a <= b)),
            "gtu" => floats!(@ $shape, $ty, $value, |a, b, nan| nan | (a > b)),
            "geu" => floats!(@ $shape, $ty, $value, |a, b, nan| nan | (a >= b)),
            "num" => floats!(@ $shape, $ty, $value, |a, b, nan| !nan),
            "nan" => floats!(@ $shape, $ty, $value, |a, b, nan| nan),
            _ => return None,
        })
    }};
    (@ $shape:ident, $ty:ident, $value:expr, |$a:ident, $b:ident, $nan:ident| $holds:expr) => {
        lanes!($shape, |$a, $b| { let ($a, $b) = ($value($a), $value($b)); let $nan = $a.is_nan() | $b.is_nan(); $holds }; $ty $ty)
    };
}

/// Comparisons of one integer type. `lo`, `ls`, `hi` and `hs` are other names of the unsigned ones.
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

/// Returns the comparison of this name for two operands of this type.
pub(super) fn comparison(comparison: &str, ty: &str, ftz: bool) -> Option<Pure> {
    match (ty, ftz) {
        ("f32", false) => floats!(comparison, PWW, F32, f32::from_bits),
        ("f32", true) => floats!(comparison, PWW, F32, |a| f32::from_bits(flush(a))),
        (_, true) => None,
        ("f64", false) => floats!(comparison, PLL, F64, f64::from_bits),
        ("u16", _) => integers!(comparison, PWW, B16, |x| x, unsigned),
        ("u32", _) => integers!(comparison, PWW, B32, |x| x, unsigned),
        ("u64", _) => integers!(comparison, PLL, B64, |x| x, unsigned),
        ("s16", _) => integers!(comparison, PWW, B16, |x| x as u16 as i16, signed),
        ("s32", _) => integers!(comparison, PWW, B32, |x| x as i32, signed),
        ("s64", _) => integers!(comparison, PLL, B64, |x| x as i64, signed),
        // Untyped bits are only equal or not.
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
