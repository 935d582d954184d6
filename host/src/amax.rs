//! The largest magnitude of a tensor, with separate flags for NaN and infinities.

use microscale_formats::GlobalScale;
use microscale_formats::nvfp4::Arithmetic;

use crate::element::Element;
use crate::scheme::NonFinite;

/// The largest magnitude of a tensor's finite elements, and whether there are non-finite ones.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Amax {
    /// The largest magnitude of finite elements, or 0 if there are none.
    pub finite: f32,
    /// Whether there is a NaN.
    pub nan: bool,
    /// Whether there is an infinity.
    pub infinite: bool,
}

impl Amax {
    /// Returns the amax of one value.
    pub(crate) fn of_value(value: f32) -> Self {
        let finite = if value.is_finite() { value.abs() } else { 0.0 };
        Self { finite, nan: value.is_nan(), infinite: value.is_infinite() }
    }

    /// Adds another part of the tensor, or a tensor that will share its global scale.
    pub fn add(&mut self, other: Self) {
        self.finite = self.finite.max(other.finite);
        self.nan |= other.nan;
        self.infinite |= other.infinite;
    }

    /// Returns the amax under a policy for a tensor of `T`.
    ///
    /// If the policy turns infinities into the largest number, they count as that.
    pub fn under<T: Element>(&self, policy: NonFinite) -> f32 {
        if self.infinite && policy == NonFinite::Saturate { T::MAX } else { self.finite }
    }

    /// Returns NVFP4's global scale for a tensor of `T` with this amax.
    pub fn global_scale<T: Element>(&self, arithmetic: &Arithmetic, policy: NonFinite) -> GlobalScale {
        arithmetic.global_scale(self.under::<T>(policy), |x| T::from_f32(x).to_f32())
    }
}
