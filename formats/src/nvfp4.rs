//! NVFP4: blocks of 16 [`E2m1`] elements along a row that share one [`E4m3`] scale.
//!
//! All blocks of a tensor share one [`GlobalScale`].
//!
//! Libraries agree on the format but not on the arithmetic that produces it. Their numerics differ
//! in f32 roundings, and therefore in bytes. An [`Arithmetic`] describes such numerics as data, and
//! [`Arithmetic::TORCHAO`] and its siblings are the table of known ones. Every step is a single f32
//! operation, rounded to nearest.

mod global_scale;
pub mod search_global;

pub use global_scale::{Direction, GlobalScale};

use crate::arithmetic::{Fused, Machine};
use crate::block::{self, BlockEvents, NegativeZero, with_zero_sign};
use crate::e2m1::{self, E2m1, Ties};
use crate::fp8::E4m3;

/// Elements that share a block scale.
pub const BLOCK: usize = 16;
/// Bytes of packed codes in a block.
pub const BLOCK_BYTES: usize = BLOCK / 2;

/// The largest element times the largest block scale, 6 · 448: the target of a tensor's amax.
pub const LARGEST: f32 = e2m1::MAX * E4m3::MAX;

/// A scaled amax above this counts as clipped.
///
/// Rounding the block scale to E4M3 can give up to 6 · 17/16 = 6.375 without clipping.
pub const CLIPPED: f32 = 6.5;

/// A wanted scale above this saturates.
///
/// Without an upper bound, E4M3 would continue with 480. Halfway there, 448 stops being the
/// nearest.
pub const LARGEST_UNSATURATED: f32 = 464.0;

/// The rule that derives the global scale from the tensor's finite amax above 0.
///
/// T is the input's dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum FromAmax {
    /// s = amax / 2688, at least the smallest normal number, so that 1 / s is finite: torchao,
    /// ModelOpt.
    OverLargest = 0,
    /// G = T(T(1 / amax) · 2688), each step rounded to T.
    ///
    /// Used by compressed-tensors with llm-compressor's observer.
    ///
    /// Where this overflows, that library uses 1 and loses the tensor's small blocks. microscale
    /// uses G = 2688 / amax there, as [`Self::LargestOver`] does.
    NarrowInverse = 1,
    /// G = 2688 / amax, at most the largest number: Transformer Engine, FlashInfer.
    LargestOver = 2,
}

/// The rule that derives a block's scale from its amax, before rounding to E4M3.
///
/// G is a divisor, s a multiplier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum BlockScale {
    /// (amax / 6) / s: torchao.
    SixthOverGlobal = 0,
    /// G · (amax / 6), the quotient rounded to the dtype of the input: compressed-tensors.
    GlobalTimesNarrowSixth = 1,
    /// amax / (6 · s): ModelOpt.
    OverSixGlobals = 2,
    /// amax · (G · (1 / 6)): Transformer Engine, and FlashInfer with exact math.
    TimesSixthOfGlobal = 3,
}

/// The rule that scales an element x into the range of E2M1, given its block's rounded scale b.
///
/// G is a divisor, s a multiplier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Quotient {
    /// x · min((1 / s) / b, the largest f32): torchao 0.17 and later.
    ///
    /// torchao itself lacks the minimum and makes NaN of zeros there.
    TimesInverseOverScale = 0,
    /// x / (b / G): compressed-tensors.
    OverScaleOverGlobal = 1,
    /// x / (b · s): ModelOpt.
    OverScaleTimesGlobal = 2,
    /// x · min(1 / (b · (1 / G)), the largest f32): Transformer Engine, and FlashInfer with exact
    /// math.
    TimesInverseOfProduct = 3,
}

/// The numerics of NVFP4: everything that determines a block's bytes.
///
/// The block's finite values and the global scale are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Arithmetic {
    /// How the global scale is stored: as a divisor or a multiplier.
    pub direction: Direction,
    /// The rule for the global scale.
    pub from_amax: FromAmax,
    /// The rule for a block's scale.
    pub block_scale: BlockScale,
    /// Block scales are clamped to at least this before rounding.
    pub least_scale: E4m3,
    /// Replaces a scale that is zero, before or after rounding.
    pub zero_scale: E4m3,
    /// The rule that divides elements by their scale.
    pub quotient: Quotient,
    /// How a zero's sign is encoded.
    pub negative_zero: NegativeZero,
}

/// The table of known numerics.
impl Arithmetic {
    /// torchao 0.17 and later.
    pub const TORCHAO: Self = Self {
        direction: Direction::Multiplier,
        from_amax: FromAmax::OverLargest,
        block_scale: BlockScale::SixthOverGlobal,
        least_scale: E4m3::MIN_NORMAL,
        zero_scale: E4m3::MIN_NORMAL,
        quotient: Quotient::TimesInverseOverScale,
        negative_zero: NegativeZero::Keep,
    };
    /// compressed-tensors 0.20: zero scales become 0.125.
    pub const COMPRESSED_TENSORS: Self = Self {
        direction: Direction::Divisor,
        from_amax: FromAmax::NarrowInverse,
        block_scale: BlockScale::GlobalTimesNarrowSixth,
        least_scale: E4m3::from_bits(0),
        zero_scale: E4m3::from_bits(0x20),
        quotient: Quotient::OverScaleOverGlobal,
        negative_zero: NegativeZero::DropInput,
    };
    /// NVIDIA ModelOpt 0.47: the scale of a zero block becomes 1.
    pub const MODELOPT: Self = Self {
        direction: Direction::Multiplier,
        from_amax: FromAmax::OverLargest,
        block_scale: BlockScale::OverSixGlobals,
        least_scale: E4m3::MIN_POSITIVE,
        zero_scale: E4m3::ONE,
        quotient: Quotient::OverScaleTimesGlobal,
        negative_zero: NegativeZero::DropInput,
    };
    /// NVIDIA Transformer Engine, and FlashInfer with exact math.
    pub const TRANSFORMER_ENGINE: Self = Self {
        direction: Direction::Divisor,
        from_amax: FromAmax::LargestOver,
        block_scale: BlockScale::TimesSixthOfGlobal,
        least_scale: E4m3::from_bits(0),
        zero_scale: E4m3::from_bits(0),
        quotient: Quotient::TimesInverseOfProduct,
        negative_zero: NegativeZero::Keep,
    };
}

impl Arithmetic {
    /// Returns the global scale for a tensor's finite amax, or 1 if amax is 0.
    ///
    /// `narrow` rounds to the dtype of the input.
    #[inline(always)]
    pub fn global_scale(&self, amax: f32, narrow: impl Fn(f32) -> f32) -> GlobalScale {
        let divisor = (LARGEST / amax).min(f32::MAX);
        match self.from_amax {
            FromAmax::OverLargest if amax == 0.0 => GlobalScale::Multiplier(1.0),
            FromAmax::OverLargest => GlobalScale::Multiplier((amax / LARGEST).max(f32::MIN_POSITIVE)),
            FromAmax::NarrowInverse | FromAmax::LargestOver if amax == 0.0 => GlobalScale::Divisor(1.0),
            FromAmax::NarrowInverse => {
                let narrowed = narrow(narrow(1.0 / amax) * LARGEST);
                GlobalScale::Divisor(if narrowed < f32::INFINITY { narrowed } else { divisor })
            }
            FromAmax::LargestOver => GlobalScale::Divisor(divisor),
        }
    }
}

/// Numerics combined with a tensor's global scale.
///
/// Everything that does not depend on the block is precomputed.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Quantizer {
    arithmetic: Arithmetic,
    /// s, G, 6 · s or G · (1 / 6), as `block_scale` needs it.
    for_scale: f32,
    /// 1 / s, G, s or 1 / G, as `quotient` needs it.
    for_quotient: f32,
}

/// The operation that scales a block's elements into the range of E2M1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// Multiplies elements by this.
    Multiply(f32),
    /// Divides elements by this.
    Divide(f32),
}

impl Scaling {
    /// Scales an element.
    #[inline(always)]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Self::Multiply(factor) => x * factor,
            Self::Divide(divisor) => x / divisor,
        }
    }
}

/// The operations that compute a block's scale.
pub trait ScaleSteps<N> {
    /// Rounds to the dtype of the input.
    fn narrow(&self, x: N) -> N;

    /// x · y, rounded to f32.
    fn times(&self, x: N, y: f32) -> N;

    /// x / y, rounded to f32.
    fn over(&self, x: N, y: f32) -> N;
}

/// The operations on f32, with a function that narrows.
struct Narrowing<F>(F);

impl<F: Fn(f32) -> f32> ScaleSteps<f32> for Narrowing<F> {
    #[inline(always)]
    fn narrow(&self, x: f32) -> f32 {
        (self.0)(x)
    }

    #[inline(always)]
    fn times(&self, x: f32, y: f32) -> f32 {
        x * y
    }

    #[inline(always)]
    fn over(&self, x: f32, y: f32) -> f32 {
        x / y
    }
}

impl Quantizer {
    /// Precomputes the steps for a tensor with this global scale, or 1 if it has none.
    ///
    /// The scale must have the direction of `arithmetic`.
    #[inline(always)]
    pub fn new(arithmetic: Arithmetic, global_scale: f32) -> Self {
        let for_scale = match arithmetic.block_scale {
            BlockScale::SixthOverGlobal | BlockScale::GlobalTimesNarrowSixth => global_scale,
            BlockScale::OverSixGlobals => 6.0 * global_scale,
            BlockScale::TimesSixthOfGlobal => global_scale * (1.0 / 6.0),
        };
        let for_quotient = match arithmetic.quotient {
            Quotient::OverScaleOverGlobal | Quotient::OverScaleTimesGlobal => global_scale,
            Quotient::TimesInverseOverScale | Quotient::TimesInverseOfProduct => 1.0 / global_scale,
        };
        Self { arithmetic, for_scale, for_quotient }
    }

    /// Returns a block's scale before rounding.
    ///
    /// `amax` is the block's finite amax, and `narrow` rounds to the input's dtype.
    #[inline(always)]
    pub fn wanted_scale(&self, amax: f32, narrow: impl Fn(f32) -> f32) -> f32 {
        self.wanted_scale_by(amax, Narrowing(narrow))
    }

    /// [`Self::wanted_scale`] over the operations of any number type, such as vectors.
    #[inline(always)]
    pub fn wanted_scale_by<N>(&self, amax: N, steps: impl ScaleSteps<N>) -> N {
        match self.arithmetic.block_scale {
            BlockScale::SixthOverGlobal => steps.over(steps.over(amax, 6.0), self.for_scale),
            BlockScale::GlobalTimesNarrowSixth => {
                steps.times(steps.narrow(steps.over(amax, 6.0)), self.for_scale)
            }
            BlockScale::OverSixGlobals => steps.over(amax, self.for_scale),
            BlockScale::TimesSixthOfGlobal => steps.times(amax, self.for_scale),
        }
    }

    /// Returns the block scale to store.
    #[inline(always)]
    pub fn rounded_scale(&self, wanted: f32) -> E4m3 {
        let least = self.arithmetic.least_scale.to_f32();
        self.rounded_by(wanted, E4m3::from_f32(if wanted > least { wanted } else { least }))
    }

    /// [`Self::rounded_scale`], given the nearest E4M3 to the clamped wanted scale.
    #[inline(always)]
    pub fn rounded_by(&self, wanted: f32, nearest: E4m3) -> E4m3 {
        if wanted == 0.0 || nearest.to_bits() == 0 { self.arithmetic.zero_scale } else { nearest }
    }

    /// Returns the operation that scales a block's elements into the range of E2M1.
    #[inline(always)]
    pub fn scaling(&self, scale: E4m3) -> Scaling {
        let scale = scale.to_f32();
        match self.arithmetic.quotient {
            Quotient::TimesInverseOverScale => Scaling::Multiply((self.for_quotient / scale).min(f32::MAX)),
            Quotient::OverScaleOverGlobal => Scaling::Divide(scale / self.for_quotient),
            Quotient::OverScaleTimesGlobal => Scaling::Divide(scale * self.for_quotient),
            Quotient::TimesInverseOfProduct => {
                Scaling::Multiply((1.0 / (scale * self.for_quotient)).min(f32::MAX))
            }
        }
    }

    /// Returns the events of a block, given its finite amax, its wanted and stored scale, and its
    /// scaling.
    #[inline(always)]
    pub fn events(&self, amax: f32, wanted: f32, scale: E4m3, scaling: Scaling) -> BlockEvents {
        self.events_of(amax, wanted, self.arithmetic.least_scale.to_f32(), scale, scaling.apply(amax))
    }

    /// [`Self::events`], given the least scale's value and the scaled amax.
    #[inline(always)]
    pub fn events_of(
        &self,
        amax: f32,
        wanted: f32,
        least: f32,
        scale: E4m3,
        scaled_amax: f32,
    ) -> BlockEvents {
        // Half of E4M3's smallest step still rounds to zero.
        let low = wanted < least || wanted <= E4m3::MIN_POSITIVE.to_f32() / 2.0;
        BlockEvents {
            clipped: scaled_amax > CLIPPED,
            flushed: amax != 0.0 && (scale.to_bits() == 0 || scaled_amax <= e2m1::MIDPOINTS[0]),
            scale_saturated: amax != 0.0 && (low || wanted > LARGEST_UNSATURATED),
        }
    }

    /// Returns the code of one finite element.
    #[inline(always)]
    pub fn encode(&self, value: f32, scaling: Scaling) -> u8 {
        let code = E2m1::from_f32(scaling.apply(value), Ties::Even).to_bits();
        with_zero_sign(code, 8, value, self.arithmetic.negative_zero)
    }

    /// Returns the numbers that depend on the global scale.
    ///
    /// If both are far from underflow and overflow, so are all steps.
    #[inline(always)]
    pub const fn operands(&self) -> [f32; 2] {
        [self.for_scale, self.for_quotient]
    }

    /// Returns the numerics.
    #[inline(always)]
    pub const fn arithmetic(&self) -> &Arithmetic {
        &self.arithmetic
    }

    /// Returns how a zero's sign is encoded.
    #[inline(always)]
    pub const fn negative_zero(&self) -> NegativeZero {
        self.arithmetic.negative_zero
    }

    /// Quantizes a block. This is the reference.
    ///
    /// `narrow` rounds to the dtype that the values have in the input. A block that holds a NaN or
    /// an infinity gets the NaN scale and codes 0. Callers with another policy replace those values
    /// first.
    pub fn quantize_block(
        &self,
        values: &[f32; BLOCK],
        narrow: impl Fn(f32) -> f32,
        codes: &mut [u8],
    ) -> (E4m3, BlockEvents) {
        let amax_bits = block::amax_bits(values);
        if block::is_non_finite(amax_bits) {
            codes.fill(0);
            return (E4m3::NAN, BlockEvents::default());
        }
        let amax = f32::from_bits(amax_bits);
        let wanted = self.wanted_scale(amax, narrow);
        let scale = self.rounded_scale(wanted);
        self.encode_block(values, scale, codes);
        (scale, self.events(amax, wanted, scale, self.scaling(scale)))
    }

    /// Encodes a block of finite values under a scale.
    pub fn encode_block(&self, values: &[f32; BLOCK], scale: E4m3, codes: &mut [u8]) {
        let scaling = self.scaling(scale);
        e2m1::pack(codes, values, 4, |value| self.encode(value, scaling));
    }
}

/// Returns 1 / d as two numbers: the nearest f32 and the remainder.
///
/// `d` must be a normal number far from underflow and overflow.
#[inline(always)]
pub fn reciprocal<F: Fused>(d: f32) -> [f32; 2] {
    let y = 1.0 / d;
    [y, rest_of_reciprocal::<F>(d, y)]
}

/// Returns the remainder of [`reciprocal`]: 1 / d − y, where y is the f32 nearest to 1 / d.
#[inline(always)]
pub fn rest_of_reciprocal<F: Fused>(d: f32, y: f32) -> f32 {
    let rest = <F as Fused>::fma(-d, y, 1.0);
    <F as Fused>::fma(rest * y, rest, rest * y)
}

/// Returns the two parts of 1 / d with a second part that is not negative. So [`quotient`] of a
/// `short` zero has its sign.
#[inline(always)]
pub fn reciprocal_from_below<F: Fused>(d: f32) -> [f32; 2] {
    let [y, z] = reciprocal::<F>(d);
    if z >= 0.0 {
        return [y, z];
    }
    let below = f32::from_bits(y.to_bits() - 1);
    [below, rest_of_reciprocal::<F>(d, below)]
}

/// Returns x / d, rounded, from the two [parts](reciprocal) of 1 / d, by products and sums only.
///
/// On vectors it works per lane. A `short` x has a significand of 11 bits or less.
///
/// Before rounding, x·y + x·z is off x/d by at most 2⁻⁴⁸ of it. Rounding may still pick the wrong
/// neighbour, which matters where x/d rounds to a tie of E2M1. For an x of 11 bits or less, no x/d
/// is close enough to such a boundary, with the exception of one d, for which the parts are exact
/// (`tests/tests/division.rs` checks every d, and E4M3's boundaries too). Other x are corrected
/// once more by q + (x − d·q)·y. By Markstein's theorem that is x/d rounded to nearest if q is off
/// by at most one unit in the last place. If x/d is so small that the remainder underflows, the
/// code is 0 in either case.
///
/// With z = 0 and a short x, the result is the product x·y, rounded.
#[inline(always)]
pub fn quotient<M: Machine>(x: M::Number, [y, z]: [M::Number; 2], d: M::Number, short: bool) -> M::Number {
    let q = M::fma(x, y, M::mul(x, z));
    if short { q } else { M::fma(M::fnma(d, q, x), y, q) }
}

/// Dequantizes a block: each element times [`GlobalScale::factor`] in f32.
///
/// Without a global scale, the factor is the block scale. A NaN scale gives 16 canonical NaNs.
pub fn dequantize_block(scale: E4m3, global: Option<GlobalScale>, codes: &[u8]) -> [f32; BLOCK] {
    let factor = global.map_or(scale.to_f32(), |global| global.factor(scale));
    let mut values = [f32::from_bits(0x7FC0_0000); BLOCK];
    if !scale.is_nan() {
        e2m1::unpack(codes, &mut values, 4, |code| E2m1::from_bits(code).to_f32() * factor);
    }
    values
}
