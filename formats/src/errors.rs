//! Quantization loss as sums over pairs of a value and its approximation.
//!
//! The order of the sums is fixed, so every device produces the same bits.

/// Elements of a row that form one part. Each part is summed separately.
pub const ERROR_PART: u32 = 1024;
/// Independent partial sums of a part. Element i is added to sum i % 8.
pub const ERROR_LANES: u32 = 8;

/// Sums over pairs of an original value and its approximation.
///
/// Pairs with a non-finite value are excluded and counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct ErrorSums {
    /// Sum of the squared originals.
    pub signal: f64,
    /// Sum of the squared differences.
    pub noise: f64,
    /// Sum of the squared approximations.
    pub approximation: f64,
    /// Sum of the products of original and approximation.
    pub product: f64,
    /// Largest absolute difference.
    pub max_abs: f64,
    /// Number of excluded pairs.
    pub non_finite: u64,
}
