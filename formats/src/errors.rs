//! The loss of quantizing, as sums over pairs of a value and its approximation. The order of the sums is
//! fixed, so that every device has the same bits.

/// Elements of a row whose errors are summed by themselves.
pub const ERROR_PART: u32 = 1024;
/// Running sums of such a part, kept side by side: element i belongs to sum i % 8.
pub const ERROR_LANES: u32 = 8;

/// Sums over pairs of values, original and approximation. Pairs in which either is not finite are counted and
/// left out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct ErrorSums {
    /// The sum of the squares of the originals.
    pub signal: f64,
    /// The sum of the squares of the differences.
    pub noise: f64,
    /// The sum of the squares of the approximations.
    pub approximation: f64,
    /// The sum of the products of original and approximation.
    pub product: f64,
    /// The largest difference.
    pub max_abs: f64,
    /// Pairs left out.
    pub non_finite: u64,
}
