//! The structures that travel as kernel arguments or lie in device memory.

use crate::kernels::{Ahead, ROW_PLACES, TOKEN_PLACES, WARP, WARP_ELEMENTS, WEIGHTS_THREADS};
use crate::shortcut::NvShortcut;
use microscale_formats::E4m3;
use microscale_formats::dot::CHUNK;
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

/// How the rows of two quantized tensors are matrices and vectors to multiply with each other.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GemvGrid {
    /// Rows of a matrix, at least 1.
    pub rows: u64,
    /// Matrices.
    pub batches: u64,
    /// Blocks in a row, of matrices and vectors; fewer than 2²⁶.
    pub blocks: u64,
    /// Rows of the vectors' tensor from one matrix' vector to the next.
    pub vector_stride: u64,
    /// Warps that a matrix' rows fall to: with those of all matrices, fewer than 2³¹.
    pub groups: Divider,
}

/// Weights, a quantized matrix, to multiply with tokens' activations, which are not quantized.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WeightsShape {
    /// Rows of the matrix, at least 1.
    pub rows: u64,
    /// Its columns, and a token's activations.
    pub cols: u64,
    /// Blocks in a row; fewer than 2²⁶.
    pub blocks: u64,
}

impl WeightsShape {
    /// Whether kernels can count what there is, with so many tokens, and there is something.
    const fn counts(&self, tokens: u64) -> bool {
        self.rows > 0 && self.blocks < 1 << 26 && tokens > 0 && tokens < 1 << 24
    }
}

/// How weights are multiplied with up to eight tokens at a time.
///
/// Tensor cores multiply 16 places of rows with eight places of tokens. With fewer tokens than that, parts of the
/// same row and of the same token lie in places side by side: segments. Counts that kernels divide by are powers of
/// two, given by their exponents.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WeightsGrid {
    /// What is multiplied.
    pub shape: WeightsShape,
    /// Tokens, at least 1; fewer than 2²⁴.
    pub tokens: u64,
    /// Of the warps that share rows, each with a part of the columns: at most as many as a thread block has.
    pub split_bits: u32,
    /// Of the segments: up to 3.
    pub segment_bits: u32,
    /// Of the tokens of a lot.
    pub lot_bits: u32,
    /// Of the tiles that a warp has.
    pub tile_bits: u32,
    /// Lots that the tokens fall to, one for each thread block with the same rows: fewer than 2³¹ thread blocks in all.
    pub lots: Divider,
}

impl WeightsGrid {
    /// With so many tiles a warp, and rows shared by so many warps; `None` if there is nothing to multiply, or more
    /// than a launch can count, or if these are not powers of two or more warps than a thread block has.
    pub fn new(shape: WeightsShape, tokens: u64, tiles: u32, splits: u32) -> Option<Self> {
        let shared = tiles.is_power_of_two() && splits.is_power_of_two() && splits <= WEIGHTS_THREADS / WARP;
        if !shared || !shape.counts(tokens) {
            return None;
        }
        let lot = (tokens as u32).next_power_of_two().min(TOKEN_PLACES);
        let grid = Self {
            shape,
            tokens,
            split_bits: splits.ilog2(),
            segment_bits: (TOKEN_PLACES / lot).ilog2(),
            tile_bits: tiles.ilog2(),
            lot_bits: lot.ilog2(),
            lots: Divider::new(tokens.div_ceil(u64::from(lot))),
        };
        (grid.thread_blocks() < 1 << 31).then_some(grid)
    }

    /// The exponent of the rows that half a tile stands for.
    #[inline(always)]
    pub const fn half_row_bits(&self) -> u32 {
        (ROW_PLACES / 2).ilog2() - self.segment_bits
    }

    /// The exponent of the rows that a group of warps shares.
    #[inline(always)]
    pub const fn group_row_bits(&self) -> u32 {
        ROW_PLACES.ilog2() + self.tile_bits - self.segment_bits
    }

    /// The exponent of the groups in a thread block.
    #[inline(always)]
    pub const fn group_bits(&self) -> u32 {
        (WEIGHTS_THREADS / WARP).ilog2() - self.split_bits
    }

    /// Thread blocks of a launch.
    pub const fn thread_blocks(&self) -> u64 {
        self.shape.rows.div_ceil(1 << (self.group_bits() + self.group_row_bits())) * self.lots.divisor
    }
}

/// How weights are multiplied by the kernels that copy ahead.
///
/// The rows of a turn are multiplied by the warps of a team, each with steps of its own; a thread block has one team or
/// several. Teams take turns' rows one after the other, the first teams of all thread blocks first, so that thread
/// blocks have as many turns, or one more.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TurnsGrid {
    /// What is multiplied.
    pub shape: WeightsShape,
    /// Lots that the tokens fall to. Each has thread blocks of its own.
    pub lots: Divider,
    /// Tokens.
    pub tokens: u32,
    /// The exponent of those of a lot.
    pub lot_bits: u32,
    /// Thread blocks of a lot.
    pub row_blocks: u32,
    /// Turns that each team has, and how many teams have one more: at most [`Ahead::turns`] each.
    pub turns: [u32; 2],
    /// Warps of a thread block.
    pub warps: u32,
    /// The exponent of the warps of a team.
    pub split_bits: u32,
    /// Steps of a row: every so many-th is a warp's.
    pub steps: u32,
}

impl TurnsGrid {
    /// For a kernel, with so many warps of a team and of a thread block, on a GPU that has so many thread blocks at
    /// once; `None` if there is nothing to multiply, or more than a launch can count, or if warps are not powers of two
    /// or a team has more than a thread block.
    pub fn new(
        kernel: Ahead,
        shape: WeightsShape,
        tokens: u64,
        [splits, warps]: [u32; 2],
        at_once: u32,
    ) -> Option<Self> {
        let teams = splits.is_power_of_two() && warps.is_power_of_two() && splits <= warps;
        if !teams || at_once == 0 || !shape.counts(tokens) {
            return None;
        }
        let lot = if kernel.one { 1 } else { (tokens as u32).next_power_of_two().min(TOKEN_PLACES) };
        let segment_bits = kernel.segment_bits(lot.ilog2());
        let teams = u64::from(warps / splits);
        let turns = shape.rows.div_ceil(u64::from((kernel.tiles * ROW_PLACES) >> segment_bits));
        if turns >= 1 << 31 {
            return None;
        }
        let waves = turns.div_ceil(u64::from(at_once) * teams * u64::from(kernel.turns()));
        let row_blocks = turns.div_ceil(teams).min(u64::from(at_once) * waves);
        let (each, more) = (turns / (row_blocks * teams), turns % (row_blocks * teams));
        let grid = Self {
            shape,
            lots: Divider::new(tokens.div_ceil(u64::from(lot))),
            tokens: tokens as u32,
            lot_bits: lot.ilog2(),
            row_blocks: row_blocks as u32,
            turns: [each as u32, more as u32],
            warps,
            split_bits: splits.ilog2(),
            // A chunk for each of four lanes, in each segment.
            steps: u32::try_from(shape.cols.div_ceil((4 * CHUNK as u64) << segment_bits)).ok()?,
        };
        (grid.thread_blocks() < 1 << 31).then_some(grid)
    }

    /// Thread blocks of a launch.
    pub const fn thread_blocks(&self) -> u64 {
        self.row_blocks as u64 * self.lots.divisor
    }

    /// Threads in a thread block, and bytes of shared memory for them.
    pub const fn threads_and_shared(&self, kernel: Ahead) -> (u32, u32) {
        (self.warps * WARP, self.warps * kernel.warp_bytes())
    }
}

/// What results are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum OutputDtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
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
