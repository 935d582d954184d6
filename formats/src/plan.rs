//! NVFP4 for one tensor as fast code wants it: a convention with the global scale put in. Its products and
//! quotients have one form, so that conventions differ in data and not in branches.

use crate::E4m3;
use crate::nvfp4::{self, BlockScale, Direction, Quotient};
use crate::shortcut::NvShortcut;

/// A multiplication or a division by a number that is the same for all blocks, in one form, so that NVFP4's
/// conventions differ in data and not in branches.
///
/// A quotient is the product with the reciprocal, corrected twice by the rest it leaves. NVIDIA's compiler
/// makes the same of a division, with a test and a branch to a slow way for underflow and overflow, which
/// this form lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct NvStep {
    /// The factor, or the reciprocal of the divisor.
    pub factor: f32,
    /// The divisor, or 0.
    pub divisor: f32,
    /// The reciprocal again, or 0: corrections by nothing leave a product as it is.
    pub correction: f32,
}

impl NvStep {
    /// Multiplies.
    pub const fn times(factor: f32) -> Self {
        Self { factor, divisor: 0.0, correction: 0.0 }
    }

    /// Divides.
    pub const fn over(divisor: f32) -> Self {
        Self { factor: 1.0 / divisor, divisor, correction: 1.0 / divisor }
    }
}

/// NVFP4 for one tensor: a convention with the global scale put in, and the same as the kernels' fast way
/// wants it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct NvPlan {
    /// The definition.
    pub quantizer: nvfp4::Quantizer,
    /// The global scale, in the convention's direction.
    pub global_scale: f32,
    /// The step from amax to the number that may have to be rounded to the input's dtype.
    pub first: NvStep,
    /// The step from there to the wanted scale.
    pub second: NvStep,
    /// The step from the rounded scale to the divisor.
    pub third: NvStep,
    /// The step from a scale to the factor that its codes are multiplied with when they are dequantized.
    pub decode: NvStep,
    /// The number that is divided by the divisor to get the factor that elements are multiplied with.
    pub numerator: f32,
    /// Wanted scales are at least this.
    pub least_scale: f32,
    /// 1 if the result of the first step is rounded to the input's dtype.
    pub narrows: u32,
    /// 1 if elements are divided, 0 if they are multiplied.
    pub divides: u32,
    /// 1 if the global scale is so far from overflow and underflow that the fast way is right.
    pub usual: u32,
    /// Blocks that want this scale or more have a normal one that is not raised; infinity if the global scale
    /// is not usual.
    pub least_usual: f32,
    /// The shortcut for 16-bit values.
    pub shortcut: NvShortcut,
}

impl NvPlan {
    /// For a convention and a global scale in its direction; 1 if there is none. Without the shortcut.
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

/// The distance from 1, in powers of two, within which a block's amax and the values that follow from the
/// global scale must lie for the kernels' fast way. Within it products, quotients and their rests are normal
/// numbers.
pub const NV_FAR: i32 = 60;

/// 2^`exponent`, for a normal number.
pub const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}
