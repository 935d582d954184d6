//! Structures in device memory that families share: a tensor's global scale and amax, and the
//! report.

use microscale_formats::plan::NvPlan;
use microscale_formats::{GlobalScale, dot, nvfp4};

/// How the NVFP4 dequantizers apply [`GlobalSlot::scale`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ApplyGlobal {
    /// Block scales are divided by it.
    Divisor = nvfp4::Direction::Divisor as u32,
    /// Block scales are multiplied with it.
    Multiplier = nvfp4::Direction::Multiplier as u32,
    /// There is none.
    Absent = 2,
}

impl ApplyGlobal {
    /// The global scale of this value, if there is one.
    #[inline(always)]
    pub const fn global_scale(self, value: f32) -> Option<GlobalScale> {
        match self {
            Self::Absent => None,
            Self::Divisor => Some(GlobalScale::Divisor(value)),
            Self::Multiplier => Some(GlobalScale::Multiplier(value)),
        }
    }

    /// Applies a global scale to a value, if there is one.
    #[inline(always)]
    pub fn scaled(self, value: f64, global: f32) -> f64 {
        dot::scaled(value, self.global_scale(global))
    }
}

/// A tensor's global scale and amax in device memory. Zeroed memory is the amax of nothing.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GlobalSlot {
    /// NVFP4's global scale, as it is stored. The quantizers write it.
    pub scale: f32,
    /// The largest magnitude among the finite elements, as the bits of an f32, raised by atomic
    /// maxima.
    pub amax_bits: u32,
    /// 1 if there is a NaN.
    pub nan: u32,
    /// 1 if there is an infinity.
    pub infinite: u32,
    /// The plan that follows from the amax.
    pub plan: NvPlan,
}

/// Report slots in device memory; warps spread their counts over them so that they do not queue for
/// one address.
pub const REPORT_SLOTS: usize = 64;

/// [`ReportSlot::first_non_finite`] when nothing non-finite was met.
pub const NO_POSITION: u64 = 0;

/// Counts that a kernel adds to. Zeroed memory is the empty report; the sum over all slots is what
/// happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct ReportSlot {
    /// NaN elements.
    pub nan: u64,
    /// Infinite elements.
    pub infinite: u64,
    /// Blocks with an element clipped by more than rounding.
    pub clipped: u64,
    /// Blocks that are not zero and were written as zeros.
    pub flushed: u64,
    /// Blocks whose scale left the range of the scale format.
    pub scale_saturated: u64,
    /// The complement of the smallest B · block + index, B the block size, of a non-finite element,
    /// kept by an atomic maximum; or [`NO_POSITION`].
    pub first_non_finite: u64,
    /// Blocks that a search gave another scale than the numerics'.
    pub rescaled: u64,
    /// Scales whose error a search computed.
    pub tried: u64,
}
