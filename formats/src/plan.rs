//! NVFP4 for one tensor, precomputed for fast code: numerics combined with the global scale.
//!
//! Products and quotients have one form, so numerics differ in data and not in branches.

use crate::E4m3;
use crate::nvfp4::{self, BlockScale, Direction, Quotient};
use crate::shortcut::NvShortcut;

/// A multiplication or division by a number that is the same for all blocks.
///
/// Both have one form, so NVFP4's numerics differ in data and not in branches. A quotient is the
/// product with the reciprocal, corrected twice by its remainder. NVIDIA's compiler emits the same
/// for a division, plus a test and a branch to a slow path for underflow and overflow, which this
/// form lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct NvStep {
    /// The factor, or the reciprocal of the divisor.
    pub factor: f32,
    /// The divisor, or 0 for a product.
    pub divisor: f32,
    /// The reciprocal again, or 0. A correction of 0 leaves a product unchanged.
    pub correction: f32,
}

impl NvStep {
    /// Makes the step that multiplies by `factor`.
    pub const fn times(factor: f32) -> Self {
        Self { factor, divisor: 0.0, correction: 0.0 }
    }

    /// Makes the step that divides by `divisor`.
    pub const fn over(divisor: f32) -> Self {
        Self { factor: 1.0 / divisor, divisor, correction: 1.0 / divisor }
    }
}

/// NVFP4 for one tensor: the reference [`Quantizer`](nvfp4::Quantizer) and the kernels' fast path.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct NvPlan {
    /// The reference.
    pub quantizer: nvfp4::Quantizer,
    /// The global scale, in the direction of the numerics.
    pub global_scale: f32,
    /// The step from amax to the number that may have to be rounded to the input's dtype.
    pub first: NvStep,
    /// The step from that number to the wanted scale.
    pub second: NvStep,
    /// The step from the rounded scale to the divisor.
    pub third: NvStep,
    /// The step from a scale to the factor that dequantizes its codes.
    pub decode: NvStep,
    /// Numerator of the factor of elements. The divisor is its denominator.
    pub numerator: f32,
    /// Lower bound of wanted scales.
    pub least_scale: f32,
    /// 1 if the result of the first step is rounded to the input's dtype.
    pub narrows: u32,
    /// 1 if elements are divided, 0 if they are multiplied.
    pub divides: u32,
    /// 1 if the global scale is far enough from overflow and underflow for the fast path.
    pub usual: u32,
    /// Blocks that want at least this scale have a normal scale that is not raised.
    ///
    /// Infinity if the global scale is out of the fast path's range.
    pub least_usual: f32,
    /// The shortcut for 16-bit values.
    pub shortcut: NvShortcut,
}

impl NvPlan {
    /// Plans numerics with a global scale in their direction, or 1 without one. The shortcut stays
    /// empty.
    pub fn new(arithmetic: nvfp4::Arithmetic, global_scale: f32) -> Self {
        let quantizer = nvfp4::Quantizer::new(arithmetic, global_scale);
        let [for_scale, for_quotient] = quantizer.operands();
        let (first, second) = match arithmetic.block_scale {
            BlockScale::SixthOverGlobal => (NvStep::over(6.0), NvStep::over(for_scale)),
            BlockScale::GlobalTimesNarrowSixth => (NvStep::over(6.0), NvStep::times(for_scale)),
            BlockScale::OverSixGlobals => (NvStep::times(1.0), NvStep::over(for_scale)),
            BlockScale::TimesSixthOfGlobal => (NvStep::times(1.0), NvStep::times(for_scale)),
        };
        let (third, numerator, divides) = match arithmetic.quotient {
            Quotient::TimesInverseOverScale => (NvStep::times(1.0), for_quotient, false),
            Quotient::OverScaleOverGlobal => (NvStep::over(for_quotient), 1.0, true),
            Quotient::OverScaleTimesGlobal => (NvStep::times(for_quotient), 1.0, true),
            Quotient::TimesInverseOfProduct => (NvStep::times(for_quotient), 1.0, false),
        };
        let near = |x: f32| x >= power_of_two(-NV_FAR) && x <= power_of_two(NV_FAR);
        let usual = near(for_scale) && near(for_quotient) && near(global_scale);
        let least_usual = arithmetic.least_scale.to_f32().max(E4m3::MIN_NORMAL.to_f32());
        Self {
            quantizer,
            global_scale,
            first,
            second,
            third,
            decode: match arithmetic.direction {
                Direction::Divisor => NvStep::over(global_scale),
                Direction::Multiplier => NvStep::times(global_scale),
            },
            numerator,
            least_scale: arithmetic.least_scale.to_f32(),
            narrows: u32::from(matches!(arithmetic.block_scale, BlockScale::GlobalTimesNarrowSixth)),
            divides: u32::from(divides),
            usual: u32::from(usual),
            least_usual: if usual { least_usual } else { f32::INFINITY },
            shortcut: NvShortcut::default(),
        }
    }
}

/// Limit of the kernels' fast path, as a distance from 1 in powers of two.
///
/// It applies to a block's amax and to the values derived from the global scale. Within it,
/// products, quotients and their remainders are normal numbers.
pub const NV_FAR: i32 = 60;

/// Returns 2^`exponent`, which must be a normal number.
pub const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}
