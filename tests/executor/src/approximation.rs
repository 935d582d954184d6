//! Instructions whose results are not exact.

use std::fmt;
use std::sync::Arc;

/// The choice among the permitted results of an instruction that is not exact.
///
/// `rcp.approx` may give the results within one ulp of the exact one, `mma` the sums in f32 of exact
/// products, in any order and rounded in any way.
#[derive(Clone, Default)]
pub enum Approximation {
    /// The correctly rounded one.
    #[default]
    Nearest,
    /// The smallest magnitude that is permitted. Of `mma`, the sum as tensor cores make it: addends are cut
    /// to 24 bits, counted from the largest one's first, and so is the sum.
    Low,
    /// The largest magnitude that is permitted. Of `mma`, the sum of one addition after the other, each
    /// rounded to nearest.
    High,
    /// One that depends on the seed and the operand. Of `mma`, as `High`, in an order that depends on both.
    Scattered(u64),
    /// The caller's: operand bits to result bits. Zeros, infinities and NaN are not asked for, and with
    /// `.ftz` subnormals neither. Of `mma`, the correctly rounded sum.
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
