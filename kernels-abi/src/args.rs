//! The structures that travel as kernel arguments or lie in device memory.

use crate::kernels::WARP_ELEMENTS;
use crate::shortcut::NvShortcut;
use microscale_formats::E4m3;
use microscale_formats::layout::{TILE_COLS, TILE_ROWS, swizzled_offset};
use microscale_formats::nvfp4::{self, BlockScale, Direction, Quotient};

/// A divisor with its reciprocal, so that a kernel divides by multiplying.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Divider {
    /// What is divided by; at least 1.
    pub divisor: u64,
    /// ⌊(2⁶⁴ − 1) / `divisor`⌋.
    reciprocal: u64,
}

impl Divider {
    /// For a divisor that is not 0.
    pub const fn new(divisor: u64) -> Self {
        Self { divisor, reciprocal: u64::MAX / divisor }
    }

    /// Quotient and rest.
    ///
    /// With the divisor d and r = `reciprocal` > (2⁶⁴ − 1) / d − 1, the estimate ⌊i·r / 2⁶⁴⌋ is at most one below
    /// ⌊i / d⌋ for every i < 2⁶³: i·r / 2⁶⁴ > i/d − i·(1 + 1/d) / 2⁶⁴ > i/d − 1. One correction makes it exact.
    #[inline(always)]
    pub fn divide(&self, i: u64) -> (u64, u64) {
        let estimate = ((i as u128 * self.reciprocal as u128) >> 64) as u64;
        let rest = i - estimate * self.divisor;
        if rest >= self.divisor { (estimate + 1, rest - self.divisor) } else { (estimate, rest) }
    }

    /// [`Self::divide`] of 32 bits by a divisor of 32.
    ///
    /// The upper half of the reciprocal is ⌊2³² / d⌋, or one less for powers of two, so the same holds of the estimate.
    #[inline(always)]
    pub fn divide_32(&self, i: u32) -> (u32, u32) {
        let (divisor, reciprocal) = (self.divisor as u32, self.reciprocal >> 32);
        let estimate = ((u64::from(i) * reciprocal) >> 32) as u32;
        let rest = i.wrapping_sub(estimate.wrapping_mul(divisor));
        if rest >= divisor { (estimate + 1, rest - divisor) } else { (estimate, rest) }
    }
}

/// How a matrix falls into blocks along its rows.
///
/// Blocks are numbered row by row; codes are stored in that order without gaps. A row whose length is not a multiple
/// of the block ends in a block padded with zeros.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BlockGrid {
    /// Elements in a row.
    pub cols: u64,
    /// Elements from one row's start to the next's, in the unquantized matrix.
    pub row_stride: u64,
    /// Blocks in all.
    pub blocks: u64,
    /// Elements from the unquantized matrix' first to its last, gaps between rows included.
    pub span: u64,
    /// Blocks in a row.
    pub row_blocks: Divider,
}

impl BlockGrid {
    /// The grid of a matrix; `None` if it is empty or its counts overflow.
    pub fn new(rows: u64, cols: u64, row_stride: u64, block: u64) -> Option<Self> {
        if rows == 0 || cols == 0 {
            return None;
        }
        let blocks_per_row = cols.div_ceil(block);
        let blocks = rows.checked_mul(blocks_per_row)?;
        blocks.checked_mul(block)?;
        let span = (rows - 1).checked_mul(row_stride)?.checked_add(cols)?;
        Some(Self { cols, row_stride, blocks, span, row_blocks: Divider::new(blocks_per_row) })
    }
}

/// Where a block's scale byte lies.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ScaleGrid {
    /// Blocks in a row of the matrix as it is, not as [`BlockGrid`] may have put its rows together.
    pub row_blocks: Divider,
    /// Tiles of the swizzled layout side by side; 0 for linear scales, which lie in the order of the blocks.
    pub tiles_per_row: u64,
    /// 1 if warps of the quantizers take a quarter of their elements from each of four rows whose scales lie
    /// together. Scales are swizzled; the matrix, of whole tiles and with fewer blocks than 2³², is described row by
    /// row in its [`BlockGrid`]; and a quarter of a warp's elements, [`WARP_ELEMENTS`] / 4, divides its rows.
    pub by_tiles: u64,
}

impl ScaleGrid {
    /// For linear scales of a matrix with so many blocks in a row, at least 1.
    pub const fn linear(blocks_per_row: u64) -> Self {
        Self { row_blocks: Divider::new(blocks_per_row), tiles_per_row: 0, by_tiles: 0 }
    }

    /// For swizzled scales of a matrix with so many blocks in a row, at least 1.
    pub const fn swizzled(blocks_per_row: u64) -> Self {
        Self {
            row_blocks: Divider::new(blocks_per_row),
            tiles_per_row: blocks_per_row.div_ceil(TILE_COLS as u64),
            by_tiles: 0,
        }
    }

    /// Whether a matrix whose rows start on 16 bytes, with swizzled scales, can go by tiles.
    pub const fn can_go_by_tiles(rows: u64, cols: u64, blocks: u64) -> bool {
        rows.is_multiple_of(TILE_ROWS as u64)
            && cols.is_multiple_of((WARP_ELEMENTS / 4) as u64)
            && blocks <= u32::MAX as u64
    }

    /// Where the scale byte of a block of a row lies, if scales are swizzled.
    #[inline(always)]
    pub fn swizzled_offset(&self, row: u64, block: u64) -> u64 {
        swizzled_offset(row, block, self.tiles_per_row)
    }
}

/// Sums over pairs of values, original and approximation. Pairs in which either is not finite are counted and left out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct ErrorSums {
    /// Of squares of the originals.
    pub signal: f64,
    /// Of squares of the differences.
    pub noise: f64,
    /// Of squares of the approximations.
    pub approximation: f64,
    /// Of products.
    pub product: f64,
    /// The largest difference.
    pub max_abs: f64,
    /// Pairs left out.
    pub non_finite: u64,
}

/// What the kernels of the MX formats read at run time.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct QuantizeOptions {
    /// `ScaleRule::mantissa_addend`.
    pub mantissa_addend: u32,
    /// `NegativeZero` as a number.
    pub negative_zero: u32,
    /// 1 to replace ±Inf by the largest finite value and NaN by 0; 0 to give such blocks the NaN scale.
    pub saturate_non_finite: u32,
}

/// A multiplication or a division by a number that is the same for all blocks, in one form, so that NVFP4's
/// conventions differ in data and not in branches.
///
/// A quotient is the product with the reciprocal, corrected twice by what it leaves: what NVIDIA's compiler makes of
/// a division, without the test and the branch to a slow way where something underflows or overflows.
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

/// NVFP4 for one tensor: a convention with the global scale put in, and the same as the kernels' fast way wants it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct NvPlan {
    /// The definition.
    pub quantizer: nvfp4::Quantizer,
    /// The global scale, in the convention's direction.
    pub global_scale: f32,
    /// From amax to what may have to be rounded to the input's dtype.
    pub first: NvStep,
    /// From there to the wanted scale.
    pub second: NvStep,
    /// From the rounded scale to the divisor.
    pub third: NvStep,
    /// From a scale to what its codes are multiplied with when they are dequantized.
    pub decode: NvStep,
    /// What is divided by the divisor to get the factor that elements are multiplied with.
    pub numerator: f32,
    /// Wanted scales are at least this.
    pub least_scale: f32,
    /// 1 if the result of the first step is rounded to the input's dtype.
    pub narrows: u32,
    /// 1 if elements are divided, 0 if they are multiplied.
    pub divides: u32,
    /// 1 if the global scale is so far from overflow and underflow that the fast way is right.
    pub usual: u32,
    /// Blocks that want this scale or more have a normal one that is not raised; infinity if the global scale is not
    /// usual.
    pub least_usual: f32,
    /// For 16-bit values.
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

/// How far from 1, in powers of two, a block's amax and what follows from the global scale may be for the kernels'
/// fast way: their products and quotients, and what these leave, are normal numbers.
pub const NV_FAR: i32 = 60;

/// 2^`exponent`, for a normal number.
pub const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// What the NVFP4 quantizers read at run time.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NvQuantizeOptions {
    /// The plan, or where that is in the tensor's [`GlobalSlot`] one of the same convention.
    pub plan: NvPlan,
    /// As in [`QuantizeOptions`].
    pub saturate_non_finite: u32,
}

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

/// A tensor's global scale and amax in device memory. Zeroed memory is the amax of nothing.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GlobalSlot {
    /// NVFP4's global scale, as it is stored. The quantizers write it.
    pub scale: f32,
    /// The largest magnitude among the finite elements, as the bits of an f32, raised by atomic maxima.
    pub amax_bits: u32,
    /// 1 if there is a NaN.
    pub nan: u32,
    /// 1 if there is an infinity.
    pub infinite: u32,
    /// What follows from the amax.
    pub plan: NvPlan,
}

/// Report slots in device memory; warps spread their counts over them so that they do not queue for one address.
pub const REPORT_SLOTS: usize = 64;

/// [`ReportSlot::first_non_finite`] when nothing non-finite was met.
pub const NO_POSITION: u64 = 0;

/// Counts that a kernel adds to. Zeroed memory is the empty report; the sum over all slots is what happened.
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
    /// The complement of the smallest B · block + index, B the block size, of a non-finite element, kept by an atomic
    /// maximum; or [`NO_POSITION`].
    pub first_non_finite: u64,
    /// Blocks that a search gave another scale than the convention's.
    pub rescaled: u64,
    /// Scales whose error a search computed.
    pub tried: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn division_is_exact() {
        for cols in [1u64, 31, 32, 33, 96, 4097, 1 << 20, (1 << 40) + 1] {
            let grid = BlockGrid::new(3, cols, cols, 32).unwrap();
            let d = grid.row_blocks.divisor;
            for block in
                [0, 1, d - 1, d, d + 1, 2 * d - 1, 2 * d, 12_345_678_901, (1 << 58) - 1, (1 << 63) - 1]
            {
                assert_eq!(
                    grid.row_blocks.divide(block),
                    (block / d, block % d),
                    "block {block} of rows of {d}"
                );
            }
            let Ok(d) = u32::try_from(d) else { continue };
            for block in [0, 1, d - 1, d, d + 1, 2 * d - 1, 2 * d, 1 << 31, u32::MAX - 1, u32::MAX] {
                assert_eq!(
                    grid.row_blocks.divide_32(block),
                    (block / d, block % d),
                    "block {block} of rows of {d}"
                );
            }
        }
    }

    #[test]
    fn empty_and_overflowing_grids_are_refused() {
        assert!(BlockGrid::new(0, 32, 32, 32).is_none());
        assert!(BlockGrid::new(1, 0, 0, 32).is_none());
        assert!(BlockGrid::new(u64::MAX, 64, 64, 32).is_none());
    }
}
