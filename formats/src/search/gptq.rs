//! The bound that ends the search for a scale in GPTQ's loop.

/// A factor that outweighs some roundings in f32.
const MARGIN: f32 = 1.0 / 1024.0;
/// The error of an error's root, in units of the norms of R and of the residuals.
///
/// A chain of 32 fused products and differences is off by less than 40·2⁻²⁴ of the sum of its
/// terms' magnitudes, and the squares and their sum by less still.
const ROUNDING: f64 = 1.0 / 65536.0;

/// Bounds of the errors of a block of columns with the conditional Hessian S = R·Rᵀ.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct BlockBounds {
    /// √Σ|Sᵢⱼ|, rounded up.
    pub sum: f32,
    /// Bound of the error of an error's root, relative to the largest residual.
    pub slack: f32,
}

impl BlockBounds {
    /// Returns the bounds of a block of `columns` columns.
    ///
    /// `sum_root` is √Σ|Sᵢⱼ|, `norm` the Frobenius norm of R, and `columns_root` √`columns`.
    pub fn new(sum_root: f64, norm: f64, columns_root: f32) -> Self {
        let slack = (norm * ROUNDING) as f32 * (1.0 + MARGIN);
        Self { sum: sum_root as f32 * (1.0 + MARGIN), slack: 2.0 * slack * columns_root }
    }

    /// Returns the smallest factor whose error may be below a least error.
    ///
    /// `zeros_root` is the root of the error of codes 0, `least_root` the root of the least error,
    /// and `amax` the block's amax. All are in units of the block's unit, and so is the result. It
    /// is NaN if nothing is known.
    ///
    /// The root of the error is a norm: with the values x, the codes' values q and a factor f, √E(x
    /// − f·q) ≥ √E(x) − 6·f·√Σ|Sᵢⱼ|. Rounded roots differ by at most the slack times the norm of
    /// the residual, which is at most √N·(amax + 6·f).
    #[inline(always)]
    pub fn least_factor(&self, zeros_root: f32, least_root: f32, amax: f32) -> f32 {
        let room = zeros_root * (1.0 - MARGIN) - least_root * (1.0 + MARGIN) - self.slack * amax;
        room / (6.0 * (self.sum + self.slack))
    }
}
