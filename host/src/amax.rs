//! The largest magnitude of a tensor, with NaN and infinities kept apart.

use microscale_formats::GlobalScale;
use microscale_formats::nvfp4::Arithmetic;

use crate::element::Element;
use crate::scheme::NonFinite;

/// The largest magnitude of a tensor's finite elements, and whether there are others.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Amax {
    /// The largest magnitude among finite elements; 0 if there are none.
    pub finite: f32,
    /// There is a NaN.
    pub nan: bool,
    /// There is an infinity.
    pub infinite: bool,
}

impl Amax {
    /// The amax of one value.
    pub(crate) fn of_value(value: f32) -> Self {
        let finite = if value.is_finite() { value.abs() } else { 0.0 };
        Self { finite, nan: value.is_nan(), infinite: value.is_infinite() }
    }

    /// Takes in another part of the tensor, or a tensor that is to share its global scale.
    pub fn add(&mut self, other: Self) {
        self.finite = self.finite.max(other.finite);
        self.nan |= other.nan;
        self.infinite |= other.infinite;
    }

    /// The amax that counts under a policy for a tensor of `T`: where infinities become the largest number,
    /// that.
    pub fn under<T: Element>(&self, policy: NonFinite) -> f32 {
        if self.infinite && policy == NonFinite::Saturate { T::MAX } else { self.finite }
    }

    /// NVFP4's global scale for a tensor of `T` with this amax.
    pub fn global_scale<T: Element>(&self, arithmetic: &Arithmetic, policy: NonFinite) -> GlobalScale {
        arithmetic.global_scale(self.under::<T>(policy), |x| T::from_f32(x).to_f32())
    }
}
