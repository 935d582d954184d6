//! Instructions whose results are not exact.

use std::fmt;
use std::sync::Arc;

/// Which of the permitted results an inexact instruction gives.
///
/// `rcp.approx` may give any result within one ulp of the exact one. `mma` may give the f32 sum of
/// exact products, in any order and with any rounding.
#[derive(Clone, Default)]
pub enum Approximation {
    /// The correctly rounded result.
    #[default]
    Nearest,
    /// The smallest permitted magnitude.
    ///
    /// `mma` sums as tensor cores do: addends are truncated to 24 bits, counted from the largest
    /// addend's first bit, and so is the sum.
    Low,
    /// The largest permitted magnitude. `mma` adds one addend after the other, each sum rounded to
    /// nearest.
    High,
    /// A result that depends on the seed and the operand.
    ///
    /// `mma` adds as with `High`, in an order that depends on both.
    Scattered(u64),
    /// The caller's function from operand bits to result bits.
    ///
    /// It is not called for zeros, infinities and NaN, nor for subnormals with `.ftz`. `mma` gives
    /// the correctly rounded sum.
    Table(Arc<dyn Fn(u32) -> u32 + Send + Sync>),
}

impl fmt::Debug for Approximation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nearest => f.write_str("Nearest"),
            Self::Low => f.write_str("Low"),
            Self::High => f.write_str("High"),
            Self::Scattered(seed) => write!(f, "Scattered({seed})"),
            Self::Table(_) => f.write_str("Table(..)"),
        }
    }
}
