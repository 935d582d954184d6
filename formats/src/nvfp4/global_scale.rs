//! The scale that all blocks of a tensor share, and its direction.

use crate::fp8::E4m3;

/// How a global scale is stored: as a divisor or a multiplier.
///
/// Confusing the two is this format's commonest defect, so the type always names the direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Direction {
    /// G ≈ 2688 / amax: values are element · block scale / G.
    ///
    /// Used by compressed-tensors, Transformer Engine and FlashInfer.
    Divisor = 0,
    /// s ≈ amax / 2688: values are element · block scale · s. torchao, ModelOpt (`weight_scale_2`).
    Multiplier = 1,
}

/// The scale that all blocks of a tensor share.
///
/// It is a positive normal number whose application to the largest block scale does not overflow.
/// Every amax has such a scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GlobalScale {
    /// Values are element · block scale / this.
    Divisor(f32),
    /// Values are element · block scale · this.
    Multiplier(f32),
}

impl GlobalScale {
    /// Makes a global scale, or returns `None` unless the value is [in range](Self::in_range).
    pub fn new(direction: Direction, value: f32) -> Option<Self> {
        let scale = Self::of(direction, value);
        scale.in_range().then_some(scale)
    }

    /// Makes a global scale without checking that it is [in range](Self::in_range).
    ///
    /// For example, to report a scale that is out of range.
    pub const fn of(direction: Direction, value: f32) -> Self {
        match direction {
            Direction::Divisor => Self::Divisor(value),
            Direction::Multiplier => Self::Multiplier(value),
        }
    }

    /// Returns whether the value is positive, normal and finite, and 448 / G or 448 · s is finite
    /// too.
    ///
    /// Zero elements then stay zero.
    pub fn in_range(self) -> bool {
        self.value() >= f32::MIN_POSITIVE
            && self.value() <= f32::MAX
            && self.factor(E4m3::from_f32(E4m3::MAX)).is_finite()
    }

    /// Converts the scale to a direction. The other direction's value is the rounded inverse.
    pub fn toward(self, direction: Direction) -> Self {
        if self.direction() == direction { self } else { Self::of(direction, 1.0 / self.value()) }
    }

    /// Returns the direction.
    #[inline(always)]
    pub const fn direction(self) -> Direction {
        match self {
            Self::Divisor(_) => Direction::Divisor,
            Self::Multiplier(_) => Direction::Multiplier,
        }
    }

    /// Returns the number as it is stored.
    #[inline(always)]
    pub const fn value(self) -> f32 {
        match self {
            Self::Divisor(value) | Self::Multiplier(value) => value,
        }
    }

    /// Returns the factor of a block's elements: the block's scale with the global scale applied.
    #[inline(always)]
    pub fn factor(self, scale: E4m3) -> f32 {
        match self {
            Self::Divisor(divisor) => scale.to_f32() / divisor,
            Self::Multiplier(multiplier) => scale.to_f32() * multiplier,
        }
    }
}
