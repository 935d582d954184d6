//! The factor of the sums: the global scale, and the exponent that lowered the weights.

use microscale_formats::plan::power_of_two;
use microscale_kernels_abi::ApplyGlobal;

use crate::hardware::ptx;

/// A factor as the sum of two f32, with a relative error of at most 2^-46.
#[derive(Clone, Copy)]
pub(super) struct GlobalFactor {
    /// Below the factor, so that `low` is positive; 0 for [`Self::NONE`].
    pub(super) high: f32,
    low: f32,
}

impl GlobalFactor {
    /// Global scales outside of this range have no factor.
    const FITTING: [f32; 2] = [power_of_two(-64), power_of_two(64)];
    /// No factor.
    const NONE: Self = Self { high: 0.0, low: 0.0 };
    /// The factor 1.
    pub(super) const ONE: Self = Self::exactly(1.0);

    /// The factor `number`.
    #[inline(always)]
    const fn exactly(number: f32) -> Self {
        let high = f32::from_bits(number.to_bits() - 1);
        Self { high, low: number - high }
    }

    /// The factor that applies a global scale; [`Self::NONE`] if the scale is too large or too
    /// small.
    #[inline(always)]
    pub(super) fn new(apply: ApplyGlobal, global: f32) -> Self {
        let fits = (Self::FITTING[0]..Self::FITTING[1]).contains(&global);
        match apply {
            ApplyGlobal::Absent => Self::ONE,
            _ if !fits => Self::NONE,
            ApplyGlobal::Multiplier => Self::exactly(global),
            ApplyGlobal::Divisor => {
                let nearest = 1.0 / global;
                // The remainder is exact.
                let above = ptx::fma_f32(-nearest, global, 1.0) <= 0.0;
                let high = if above { f32::from_bits(nearest.to_bits() - 1) } else { nearest };
                Self { high, low: ptx::fma_f32(-high, global, 1.0) * nearest }
            }
        }
    }

    /// The factor times 2^`exponent`.
    #[inline(always)]
    pub(super) fn raised(self, exponent: i32) -> Self {
        let by = power_of_two(exponent);
        Self { high: self.high * by, low: self.low * by }
    }

    /// The product of a sum and the factor, rounded once. Within 2^-21 units of a tie, and below
    /// 2^-100, the result may be the other neighbour. Both terms of the factor are positive, so
    /// infinities are kept.
    #[inline(always)]
    pub(super) fn scaled(self, sum: f32) -> f32 {
        ptx::fma_f32(sum, self.high, sum * self.low)
    }
}
