//! NVFP4: blocks of 16 [`E2m1`] elements along a row that share one [`E4m3`] scale, and a tensor's blocks
//! one [`GlobalScale`].
//!
//! Libraries agree on the format and not on the way to it. Their ways differ in f32 roundings, and so in
//! bytes; what tells them apart is data, an [`Arithmetic`], and the conventions by name are a table of those
//! ([`Arithmetic::TORCHAO`] and so on). All steps are single f32 operations, rounded to nearest.

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

/// The largest element times the largest block scale, 6 · 448: where a tensor's amax should land.
pub const LARGEST: f32 = e2m1::MAX * E4m3::MAX;

/// From here on a scaled amax counts as clipped. Up to 6 · 17/16 = 6.375 comes of rounding the block scale to
/// E4M3.
pub const CLIPPED: f32 = 6.5;

/// Above it a wanted scale saturates: E4M3 without bounds would go on with 480, and halfway there 448 is
/// no longer the nearest.
pub const LARGEST_UNSATURATED: f32 = 464.0;

/// The rule by which the global scale follows from the tensor's finite amax, if that is above 0; T is the
/// input's dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum FromAmax {
    /// s = amax / 2688, at least the smallest normal number, so that 1 / s is finite: torchao, ModelOpt.
    OverLargest = 0,
    /// G = T(T(1 / amax) · 2688), each step rounded to T: compressed-tensors with llm-compressor's observer.
    /// Where that overflows, they take 1 and lose the tensor's small blocks, and we G = 2688 / amax as below.
    NarrowInverse = 1,
    /// G = 2688 / amax, at most the largest number: Transformer Engine, FlashInfer.
    LargestOver = 2,
}

/// The rule by which a block's scale follows from its amax, before it is rounded to E4M3. G is a divisor, s a
/// multiplier.
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

/// The rule by which an element x is brought to the range of E2M1, given its block's rounded scale b. G is a
/// divisor, s a multiplier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Quotient {
    /// x · min((1 / s) / b, the largest f32): torchao 0.17 and later, which lacks the minimum and makes NaN
    /// of zeros there.
    TimesInverseOverScale = 0,
    /// x / (b / G): compressed-tensors.
    OverScaleOverGlobal = 1,
    /// x / (b · s): ModelOpt.
    OverScaleTimesGlobal = 2,
    /// x · min(1 / (b · (1 / G)), the largest f32): Transformer Engine, and FlashInfer with exact math.
    TimesInverseOfProduct = 3,
}

/// A way to NVFP4: everything that decides a block's bytes, given finite values and a global scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Arithmetic {
    /// The direction in which the global scale is written down.
    pub direction: Direction,
    /// The rule for the global scale.
    pub from_amax: FromAmax,
    /// The rule for a block's scale.
    pub block_scale: BlockScale,
    /// Block scales are clamped to at least this before they are rounded.
    pub least_scale: E4m3,
    /// The scale that takes the place of one that is zero, before or after it is rounded.
    pub zero_scale: E4m3,
    /// The rule by which elements are divided by their scale.
    pub quotient: Quotient,
    /// The treatment of −0.
    pub negative_zero: NegativeZero,
}

/// The table of conventions.
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
    /// The global scale for a tensor's finite amax, 1 if that is 0. `narrow` rounds to the dtype of the
    /// input.
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

/// An arithmetic with a tensor's global scale put in: what does not depend on the block is worked out.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Quantizer {
    arithmetic: Arithmetic,
    /// s, G, 6 · s or G · (1 / 6), as `block_scale` needs it.
    for_scale: f32,
    /// 1 / s, G, s or 1 / G, as `quotient` needs it.
    for_quotient: f32,
}

/// The operation that brings the elements of a block to the range of E2M1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// They are multiplied with this.
    Multiply(f32),
    /// They are divided by this.
    Divide(f32),
}

impl Scaling {
    /// A scaled element.
    #[inline(always)]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Self::Multiply(factor) => x * factor,
            Self::Divide(divisor) => x / divisor,
        }
    }
}

/// The operations from which a block's scale is computed.
pub trait ScaleSteps<N> {
    /// Rounds to the dtype of the input.
    fn narrow(&self, x: N) -> N;

    /// x · y, rounded to f32.
    fn times(&self, x: N, y: f32) -> N;

    /// x / y, rounded to f32.
    fn over(&self, x: N, y: f32) -> N;
}

/// The operations on f32, given how to narrow.
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
    /// For a tensor with this global scale, whose direction is taken to be the arithmetic's. A tensor without
    /// one has 1.
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

    /// A block's scale before it is rounded, given its finite amax and how the input's dtype rounds.
    #[inline(always)]
    pub fn wanted_scale(&self, amax: f32, narrow: impl Fn(f32) -> f32) -> f32 {
        self.wanted_scale_by(amax, Narrowing(narrow))
    }

    /// [`Self::wanted_scale`] by the steps of a kind of numbers, such as vectors.
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

    /// The block scale that is stored.
    #[inline(always)]
    pub fn rounded_scale(&self, wanted: f32) -> E4m3 {
        let least = self.arithmetic.least_scale.to_f32();
        self.rounded_by(wanted, E4m3::from_f32(if wanted > least { wanted } else { least }))
    }

    /// [`Self::rounded_scale`] given the nearest E4M3 to the clamped wanted scale.
    #[inline(always)]
    pub fn rounded_by(&self, wanted: f32, nearest: E4m3) -> E4m3 {
        if wanted == 0.0 || nearest.to_bits() == 0 { self.arithmetic.zero_scale } else { nearest }
    }

    /// The operation that brings a block's elements to the range of E2M1.
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

    /// The events of a block, given its finite amax, the scale that it wanted and got, and its scaling.
    #[inline(always)]
    pub fn events(&self, amax: f32, wanted: f32, scale: E4m3, scaling: Scaling) -> BlockEvents {
        self.events_of(amax, wanted, self.arithmetic.least_scale.to_f32(), scale, scaling.apply(amax))
    }

    /// [`Self::events`] given the least scale's value and the scaled amax.
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

    /// The code of one finite element.
    #[inline(always)]
    pub fn encode(&self, value: f32, scaling: Scaling) -> u8 {
        let code = E2m1::from_f32(scaling.apply(value), Ties::Even).to_bits();
        with_zero_sign(code, 8, value, self.arithmetic.negative_zero)
    }

    /// The numbers that the global scale entered into; where both are far from underflow and overflow, so are
    /// the steps.
    #[inline(always)]
    pub const fn operands(&self) -> [f32; 2] {
        [self.for_scale, self.for_quotient]
    }

    /// The convention.
    #[inline(always)]
    pub const fn arithmetic(&self) -> &Arithmetic {
        &self.arithmetic
    }

    /// The treatment of −0.
    #[inline(always)]
    pub const fn negative_zero(&self) -> NegativeZero {
        self.arithmetic.negative_zero
    }

    /// Quantizes a block: the definition. `narrow` rounds to the dtype that the values have in the input. A
    /// block that holds a NaN or an infinity gets the NaN scale and codes 0; callers with another policy
    /// replace those values first.
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

/// 1 / d in two parts: the nearest number, and the rest. `d` is a normal number far from underflow and
/// overflow.
#[inline(always)]
pub fn reciprocal<F: Fused>(d: f32) -> [f32; 2] {
    let y = 1.0 / d;
    [y, rest_of_reciprocal::<F>(d, y)]
}

/// The rest that [`reciprocal`] leaves: 1 / d − y, for y the nearest number to 1 / d.
#[inline(always)]
pub fn rest_of_reciprocal<F: Fused>(d: f32, y: f32) -> f32 {
    let rest = <F as Fused>::fma(-d, y, 1.0);
    <F as Fused>::fma(rest * y, rest, rest * y)
}

/// x / d, rounded, from 1 / d in two [parts](reciprocal), by products and sums alone, or in each lane of
/// vectors. A `short` x has a significand of 11 bits or less.
///
/// x·y + x·z is off x/d by no more than 2⁻⁴⁸ of it before it is rounded. That may still be the wrong
/// neighbour, and matters where x/d rounds to a tie of E2M1; but for x of 11 bits or less no x/d is that
/// close to where it begins to, but for one d, with which the parts are exact (`tests/tests/division.rs`
/// looks at every d). Another x is corrected once more, by Markstein's theorem to x/d rounded to nearest: q +
/// (x − d·q)·y, for q off by at most one unit in the last place. Where x/d is so small that what is left
/// underflows, the code is 0 all the same.
///
/// With z = 0 it is the product x·y, rounded, of a short x.
#[inline(always)]
pub fn quotient<M: Machine>(x: M::Number, [y, z]: [M::Number; 2], d: M::Number, short: bool) -> M::Number {
    let q = M::fma(x, y, M::mul(x, z));
    if short { q } else { M::fma(M::fnma(d, q, x), y, q) }
}

/// Dequantizes a block: each element times [`GlobalScale::factor`] in f32, or times the scale alone without a
/// global one. A NaN scale gives 16 times the canonical NaN.
pub fn dequantize_block(scale: E4m3, global: Option<GlobalScale>, codes: &[u8]) -> [f32; BLOCK] {
    let factor = global.map_or(scale.to_f32(), |global| global.factor(scale));
    let mut values = [f32::from_bits(0x7FC0_0000); BLOCK];
    if !scale.is_nan() {
        e2m1::unpack(codes, &mut values, 4, |code| E2m1::from_bits(code).to_f32() * factor);
    }
    values
}
