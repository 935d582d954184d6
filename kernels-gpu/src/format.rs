//! The formats: how a block's scale follows from its amax, and how chunks of its values become codes and come back.
//!
//! The definition is `microscale_formats`', which [`Format::define`] and [`Format::code`] apply as it stands; [`Format::scale`] and
//! [`Format::encode`] give the same bytes faster, for blocks that are [in range](Scaled::in_range).

use core::marker::PhantomData;

use microscale_formats::nvfp4::{self, Scaling};
use microscale_formats::plan::{NV_FAR, NvPlan, NvStep, power_of_two};
use microscale_formats::search::{PowersOfTwo, Scales};
use microscale_formats::{
    BlockEvents, E2m1, E4m3, E5m2, E8m0, GlobalScale, NegativeZero, Ties, block, e2m1, mx,
};
use microscale_kernels_abi::{ApplyGlobal, QuantizeOptions};

use crate::dtype::{self, Chunk, Dtype};
use crate::search::Ptx;
use crate::{ptx, warp};

/// How long blocks are, and how wide codes.
pub(crate) trait Blocks {
    /// Elements that share a scale.
    const BLOCK: u32;
    /// Bits of a code.
    const BITS: u32;
    /// Bytes of a block's codes.
    const BYTES: u32 = Self::BLOCK * Self::BITS / 8;
}

/// What a lane needs to encode values of a block.
pub(crate) type Factor = [u32; 3];

/// The scale of a block with finite values.
pub(crate) struct Scaled {
    /// Its byte.
    pub(crate) byte: u8,
    /// What its values are encoded with.
    pub(crate) factor: Factor,
    /// What happened.
    pub(crate) events: BlockEvents,
    /// [`Format::encode`] can do it, if the values of a block that is clipped are [limited](Format::limit) first.
    pub(crate) in_range: bool,
}

/// A format to quantize to, with its options.
pub(crate) trait Format: Blocks {
    /// The scale byte of a block that is not finite.
    const NAN_SCALE: u8;
    /// What the definition encodes a block's values with.
    type Scaling: Copy;
    /// Whether the values of clipped blocks must be limited.
    const LIMITS: bool;
    /// Whether blocks that are usual can have events.
    const USUALLY_EVENTFUL: bool;

    /// Words of a [`Factor`] that [`Format::encode`] needs.
    fn words<D: Dtype>() -> usize;

    /// [`Format::scale`], faster, for most blocks: those that are in range and have no events, or none that are not cheap to find.
    /// For any other it says that it is not in range, and so for an amax that is not finite.
    fn usual_scale<D: Dtype>(&self, amax_bits: u32) -> Scaled;

    /// The scale of a block, for the bits of its amax. That of a block that is not finite is not in range.
    fn scale<D: Dtype>(&self, amax_bits: u32) -> Scaled;

    /// A chunk with the same codes and smaller magnitudes.
    fn limit<D: Dtype>(chunk: &Chunk, factor: Factor) -> Chunk;

    /// A chunk's codes, the first in the lowest bits.
    fn encode<D: Dtype>(&self, chunk: &Chunk, factor: Factor) -> u64;

    /// Whether there is a shortcut for the tensor.
    fn has_shortcut<D: Dtype>(&self) -> bool;

    /// [`Format::usual_scale`], faster yet, with a factor of one word, for the shortcut. All lanes of the warp take part.
    fn shortcut_scale<D: Dtype>(&self, amax_bits: u32) -> Scaled;

    /// [`Format::encode`] by the shortcut.
    fn shortcut_encode<D: Dtype>(&self, chunk: &Chunk, factor: u32) -> u64;

    /// [`Format::scale`] by the definition.
    fn define<D: Dtype>(&self, amax_bits: u32) -> (u8, Self::Scaling, BlockEvents);

    /// What the definition encodes a block's values with under another scale, and what happens.
    fn define_under<D: Dtype>(&self, amax_bits: u32, byte: u8) -> (Self::Scaling, BlockEvents);

    /// A value's code by the definition.
    fn code(&self, value: f32, scaling: Self::Scaling) -> u8;

    /// What becomes of −0: `NegativeZero` as a number.
    fn negative_zero(&self) -> u32;

    /// Whether NaN and infinities are replaced.
    fn saturates_non_finite(&self) -> bool;
}

/// The kinds of −0 by their numbers.
#[inline(always)]
fn negative_zero(number: u32) -> NegativeZero {
    match number {
        0 => NegativeZero::Keep,
        1 => NegativeZero::DropInput,
        2 => NegativeZero::Drop,
        _ => NegativeZero::Force,
    }
}

/// An element of the MX formats, a chunk at a time.
pub(crate) trait Element: mx::Element {
    /// A chunk's codes for the scale byte b.
    fn encode_chunk<D: Dtype>(chunk: &Chunk, scale: u32, ties: Ties) -> u64;

    /// Up to eight codes as exact f32.
    fn decode_chunk(codes: u64) -> [f32; 8];

    /// Whether there are codes of infinity and NaN.
    const HAS_SPECIALS: bool;
}

impl Element for E2m1 {
    const HAS_SPECIALS: bool = false;

    #[inline(always)]
    fn encode_chunk<D: Dtype>(chunk: &Chunk, scale: u32, ties: Ties) -> u64 {
        u64::from(dtype::encode::<D>(chunk, scale, ties))
    }

    #[inline(always)]
    fn decode_chunk(codes: u64) -> [f32; 8] {
        dtype::decode(codes as u32)
    }
}

/// Both 8-bit elements by the same text: by the hardware's conversions where there are some, and by the definition elsewhere.
macro_rules! element_of_8_bits {
    ($type:ident, $to:path, $from:path) => {
        impl Element for $type {
            const HAS_SPECIALS: bool = true;

            #[inline(always)]
            fn encode_chunk<D: Dtype>(chunk: &Chunk, scale: u32, _: Ties) -> u64 {
                let reciprocal = dtype::reciprocal(scale);
                let mut codes = 0;
                for i in 0..D::CHUNK / 2 {
                    let [low, high] = [2 * i, 2 * i + 1].map(|i| D::widen(chunk, i) * reciprocal);
                    #[cfg(microscale_sm90)]
                    let pair = $to(high, low);
                    #[cfg(not(microscale_sm90))]
                    let pair = u32::from(<$type>::from_f32(low).to_bits())
                        | u32::from(<$type>::from_f32(high).to_bits()) << 8;
                    codes |= u64::from(pair) << (16 * i);
                }
                codes
            }

            #[inline(always)]
            fn decode_chunk(codes: u64) -> [f32; 8] {
                let mut values = [0.0; 8];
                for i in 0..4 {
                    let pair = (codes >> (16 * i)) as u32;
                    #[cfg(microscale_sm90)]
                    {
                        let pair = $from(pair);
                        values[2 * i] = ptx::f16_low_to_f32(pair);
                        values[2 * i + 1] = ptx::f16_high_to_f32(pair);
                    }
                    #[cfg(not(microscale_sm90))]
                    {
                        values[2 * i] = <$type>::from_bits(pair as u8).to_f32();
                        values[2 * i + 1] = <$type>::from_bits((pair >> 8) as u8).to_f32();
                    }
                }
                values
            }
        }
    };
}
element_of_8_bits!(E4m3, ptx::e4m3x2, ptx::e4m3x2_to_f16x2);
element_of_8_bits!(E5m2, ptx::e5m2x2, ptx::e5m2x2_to_f16x2);

/// Which ties an [`Mx`] has: to even, whatever the options say.
pub(crate) const EVEN: u32 = 0;
/// Away from zero or toward it, as the options say.
pub(crate) const OTHER: u32 = 1;
/// As the options say.
pub(crate) const ANY: u32 = 2;

/// An MX format with [ties](EVEN).
pub(crate) struct Mx<E, const TIES: u32> {
    options: QuantizeOptions,
    element: PhantomData<E>,
}

impl<E, const TIES: u32> Mx<E, TIES> {
    #[inline(always)]
    fn ties(&self) -> Ties {
        const TO_EVEN: u32 = Ties::Even as u32;
        const AWAY: u32 = Ties::Away as u32;
        match self.options.ties {
            _ if TIES == EVEN => Ties::Even,
            TO_EVEN if TIES == ANY => Ties::Even,
            AWAY => Ties::Away,
            _ => Ties::Zero,
        }
    }

    pub(crate) fn new(options: QuantizeOptions) -> Self {
        Self { options, element: PhantomData }
    }
}

impl<E: mx::Element, const TIES: u32> Blocks for Mx<E, TIES> {
    const BLOCK: u32 = mx::BLOCK as u32;
    const BITS: u32 = E::BITS as u32;
}

impl<E: Element, const TIES: u32> Format for Mx<E, TIES> {
    const NAN_SCALE: u8 = mx::NAN_SCALE.to_bits();
    type Scaling = E8m0;
    const LIMITS: bool = false;
    const USUALLY_EVENTFUL: bool = true;

    fn words<D: Dtype>() -> usize {
        1
    }

    #[inline(always)]
    fn usual_scale<D: Dtype>(&self, amax_bits: u32) -> Scaled {
        let (byte, _, events) = self.define::<D>(amax_bits);
        let in_range = !block::is_non_finite(amax_bits);
        Scaled { byte, factor: [u32::from(byte), 0, 0], events, in_range }
    }

    #[inline(always)]
    fn scale<D: Dtype>(&self, amax_bits: u32) -> Scaled {
        self.usual_scale::<D>(amax_bits)
    }

    #[inline(always)]
    fn limit<D: Dtype>(chunk: &Chunk, _: Factor) -> Chunk {
        *chunk
    }

    #[inline(always)]
    fn encode<D: Dtype>(&self, chunk: &Chunk, [scale, ..]: Factor) -> u64 {
        E::encode_chunk::<D>(chunk, scale, self.ties())
    }

    #[inline(always)]
    fn has_shortcut<D: Dtype>(&self) -> bool {
        false
    }

    #[inline(always)]
    fn shortcut_scale<D: Dtype>(&self, amax_bits: u32) -> Scaled {
        self.usual_scale::<D>(amax_bits)
    }

    #[inline(always)]
    fn shortcut_encode<D: Dtype>(&self, chunk: &Chunk, scale: u32) -> u64 {
        E::encode_chunk::<D>(chunk, scale, self.ties())
    }

    #[inline(always)]
    fn define<D: Dtype>(&self, amax_bits: u32) -> (u8, E8m0, BlockEvents) {
        let exponent = mx::rounded_exponent(amax_bits, self.options.mantissa_addend);
        let scale = mx::scale_from_exponent::<E>(exponent);
        (scale.to_bits(), scale, mx::events::<E>(amax_bits, exponent, self.ties()))
    }

    #[inline(always)]
    fn define_under<D: Dtype>(&self, amax_bits: u32, byte: u8) -> (E8m0, BlockEvents) {
        let scale = E8m0::from_bits(byte);
        let scaled = f32::from_bits(amax_bits) * scale.reciprocal();
        let flushed = amax_bits != 0 && E::encode(scaled, self.ties()) == 0;
        (scale, BlockEvents { clipped: mx::clips::<E>(amax_bits, scale), flushed, scale_saturated: false })
    }

    #[inline(always)]
    fn code(&self, value: f32, scale: E8m0) -> u8 {
        mx::encode::<E>(value, scale.reciprocal(), self.ties(), negative_zero(self.options.negative_zero))
    }

    #[inline(always)]
    fn negative_zero(&self) -> u32 {
        self.options.negative_zero
    }

    #[inline(always)]
    fn saturates_non_finite(&self) -> bool {
        self.options.saturate_non_finite != 0
    }
}

/// An [`NvStep`] taken, for operands that are not [far](NV_FAR) from 1.
#[inline(always)]
fn step(NvStep { factor, divisor, correction }: NvStep, a: f32) -> f32 {
    let q = a * factor;
    let q = ptx::fma_f32(ptx::fma_f32(-divisor, q, a), correction, q);
    ptx::fma_f32(ptx::fma_f32(-divisor, q, a), correction, q)
}

/// a / b as the steps do it, with the reciprocal to about a unit in the last place.
#[inline(always)]
pub(crate) fn divide(a: f32, b: f32) -> f32 {
    let r = ptx::approximate_reciprocal(b);
    let r = ptx::fma_f32(ptx::fma_f32(-b, r, 1.0), r, r);
    step(NvStep { factor: r, divisor: b, correction: r }, a)
}

/// [`nvfp4::quotient`] from the words `[y, z, d]`.
#[inline(always)]
fn quotient<D: Dtype>(x: f32, [y, z, d]: Factor) -> f32 {
    let (y, z, d) = (f32::from_bits(y), f32::from_bits(z), f32::from_bits(d));
    nvfp4::quotient::<Ptx>(x, [y, z], d, D::BYTES == 2)
}

/// The nearest E4M3 to a number that is not negative, by the hardware where it can.
#[inline(always)]
fn to_e4m3(x: f32) -> E4m3 {
    #[cfg(microscale_sm90)]
    return E4m3::from_bits(ptx::e4m3x2(0.0, x) as u8);
    #[cfg(not(microscale_sm90))]
    E4m3::from_f32(x)
}

/// The value of an E4M3 that is not negative, by the hardware where it can.
#[inline(always)]
fn from_e4m3(scale: E4m3) -> f32 {
    #[cfg(microscale_sm90)]
    return ptx::f16_low_to_f32(ptx::e4m3x2_to_f16x2(u32::from(scale.to_bits())));
    #[cfg(not(microscale_sm90))]
    scale.to_f32()
}

/// Whether values of the dtype may be scaled by a tensor's `NvShortcut`: the hardware's conversion to E2M1 has no use for it.
pub(crate) const fn uses_shortcut<D: Dtype>() -> bool {
    cfg!(not(microscale_fp4)) && D::BYTES == 2
}

/// NVFP4, for a tensor.
pub(crate) struct Nv {
    plan: NvPlan,
    saturate_non_finite: u32,
    /// The shortcut's factor for the lane's number, modulo 8, as mantissa, times 2^7.
    factor_of_lane: u32,
}

/// A little below where values count as clipped, so that it does not matter how a scaled amax was rounded.
const USUAL: f32 = nvfp4::CLIPPED - 0.01;

impl Nv {
    pub(crate) fn new(plan: NvPlan, saturate_non_finite: u32) -> Self {
        // Opaque, lest the compiler index an array in memory instead.
        let [a, b, c, d, e, f, g, h] = plan.shortcut.factors.map(ptx::opaque);
        let lane = warp::lane();
        let of = |bit: u32, low: u32, high: u32| if lane & bit != 0 { high } else { low };
        let factor = of(4, of(2, of(1, a, b), of(1, c, d)), of(2, of(1, e, f), of(1, g, h)));
        Self { plan, saturate_non_finite, factor_of_lane: factor.wrapping_add(7 << 23) }
    }
}

impl Nv {
    /// The block scale before it is rounded.
    #[inline(always)]
    fn wanted<D: Dtype>(&self, amax: f32) -> f32 {
        let first = step(self.plan.first, amax);
        step(self.plan.second, if self.plan.narrows != 0 { D::round(first) } else { first })
    }

    /// What [`quotient`] needs.
    #[inline(always)]
    fn factor(&self, scale: E4m3) -> Factor {
        let divisor = step(self.plan.third, from_e4m3(scale));
        let y = divide(self.plan.numerator, divisor);
        let z = nvfp4::rest_of_reciprocal::<Ptx>(divisor, y);
        [y.to_bits(), if self.plan.divides != 0 { z.to_bits() } else { 0 }, divisor.to_bits()]
    }

    /// Whether elements are scaled by [`quotient`]: a 16-bit one also where it is a product.
    #[inline(always)]
    fn divides<D: Dtype>(&self) -> bool {
        D::BYTES == 2 || self.plan.divides != 0
    }

    /// The shortcut's factor of a scale. All lanes of the warp take part.
    #[inline(always)]
    fn shortcut_factor(&self, byte: u8) -> u32 {
        // The factor of the mantissa, times 2^-7 to the exponent field.
        let of_mantissa = warp::shuffle(self.factor_of_lane, u32::from(byte));
        of_mantissa.wrapping_sub(u32::from(byte & 0x78) << (23 - 3))
    }

    /// A scaled element.
    #[inline(always)]
    fn apply<D: Dtype>(&self, x: f32, factor: Factor) -> f32 {
        if self.divides::<D>() { quotient::<D>(x, factor) } else { x * f32::from_bits(factor[0]) }
    }
}

/// Whether an amax is not [far](NV_FAR) from 1, from its bits; not for 0, NaN and infinities.
#[inline(always)]
fn not_far(amax_bits: u32) -> bool {
    const LEAST: u32 = power_of_two(-NV_FAR).to_bits();
    const SPAN: u32 = power_of_two(NV_FAR).to_bits() - LEAST;
    amax_bits.wrapping_sub(LEAST) <= SPAN
}

impl Blocks for Nv {
    const BLOCK: u32 = nvfp4::BLOCK as u32;
    const BITS: u32 = 4;
}

impl Format for Nv {
    const NAN_SCALE: u8 = E4m3::NAN.to_bits();
    type Scaling = Scaling;
    // The hardware's conversion saturates.
    const LIMITS: bool = cfg!(not(microscale_fp4));
    const USUALLY_EVENTFUL: bool = false;

    fn words<D: Dtype>() -> usize {
        if D::BYTES == 4 { 3 } else { 2 }
    }

    #[inline(always)]
    fn usual_scale<D: Dtype>(&self, amax_bits: u32) -> Scaled {
        let amax = f32::from_bits(amax_bits);
        let wanted = self.wanted::<D>(amax);
        let scale = to_e4m3(wanted);
        let factor = self.factor(scale);
        let scaled = self.apply::<D>(amax, factor);
        let in_range = not_far(amax_bits)
            && wanted >= self.plan.least_usual
            && wanted <= nvfp4::LARGEST_UNSATURATED
            && scaled < USUAL;
        Scaled { byte: scale.to_bits(), factor, events: BlockEvents::default(), in_range }
    }

    #[inline(always)]
    fn scale<D: Dtype>(&self, amax_bits: u32) -> Scaled {
        let plan = &self.plan;
        let amax = f32::from_bits(amax_bits);
        let wanted = self.wanted::<D>(amax);
        let scale = plan.quantizer.rounded_by(wanted, to_e4m3(wanted.max(plan.least_scale)));
        let [y, z, divisor] = self.factor(scale);
        // The largest number also if the divisor is 0; then all elements are, or the block is not in range.
        let y = f32::from_bits(y).min(f32::MAX);
        let factor = [y.to_bits(), z, divisor];
        let events =
            plan.quantizer.events_of(amax, wanted, plan.least_scale, scale, self.apply::<D>(amax, factor));
        let usual = not_far(amax_bits) && scale.to_bits() != 0;
        // What `limit` limits to must be a normal number of the dtype, with a binade to spare.
        let limits = !events.clipped || y <= 3.0 / D::MIN_POSITIVE;
        let in_range = plan.usual != 0 && (usual && limits || amax_bits == 0);
        Scaled { byte: scale.to_bits(), factor, events, in_range }
    }

    #[inline(always)]
    fn limit<D: Dtype>(chunk: &Chunk, factor: Factor) -> Chunk {
        // What is scaled to more than 5 has code 7; 6.5 is far enough from there, and from 7, where `encode_scaled` goes wrong, for
        // the limit to be rounded.
        D::limit(chunk, nvfp4::CLIPPED * ptx::approximate_reciprocal(f32::from_bits(factor[0])))
    }

    #[inline(always)]
    fn encode<D: Dtype>(&self, chunk: &Chunk, factor: Factor) -> u64 {
        u64::from(if self.divides::<D>() {
            dtype::encode_scaled::<D>(chunk, |x| dtype::signed_for_hardware(quotient::<D>(x, factor), x))
        } else {
            dtype::encode_scaled::<D>(chunk, |x| x * f32::from_bits(factor[0]))
        })
    }

    #[inline(always)]
    fn has_shortcut<D: Dtype>(&self) -> bool {
        uses_shortcut::<D>() && self.plan.shortcut.complete != 0
    }

    #[inline(always)]
    fn shortcut_scale<D: Dtype>(&self, amax_bits: u32) -> Scaled {
        let amax = f32::from_bits(amax_bits);
        let wanted = self.wanted::<D>(amax);
        let byte = to_e4m3(wanted).to_bits();
        let factor = self.shortcut_factor(byte);
        let in_range = not_far(amax_bits)
            && wanted >= self.plan.least_usual
            && wanted <= nvfp4::LARGEST_UNSATURATED
            && amax * f32::from_bits(factor) < USUAL;
        Scaled { byte, factor: [factor, 0, 0], events: BlockEvents::default(), in_range }
    }

    #[inline(always)]
    fn shortcut_encode<D: Dtype>(&self, chunk: &Chunk, factor: u32) -> u64 {
        #[cfg(not(microscale_fp4))]
        return u64::from(dtype::encode_by_shortcut::<D>(chunk, factor));
        #[cfg(microscale_fp4)]
        self.encode::<D>(chunk, [factor, 0, 0])
    }

    #[inline(always)]
    fn define<D: Dtype>(&self, amax_bits: u32) -> (u8, Scaling, BlockEvents) {
        let amax = f32::from_bits(amax_bits);
        let wanted = self.plan.quantizer.wanted_scale(amax, D::round);
        let scale = self.plan.quantizer.rounded_scale(wanted);
        let scaling = self.plan.quantizer.scaling(scale);
        (scale.to_bits(), scaling, self.plan.quantizer.events(amax, wanted, scale, scaling))
    }

    #[inline(always)]
    fn define_under<D: Dtype>(&self, amax_bits: u32, byte: u8) -> (Scaling, BlockEvents) {
        let amax = f32::from_bits(amax_bits);
        let wanted = self.plan.quantizer.wanted_scale(amax, D::round);
        let scale = E4m3::from_bits(byte);
        let scaling = self.plan.quantizer.scaling(scale);
        (scaling, self.plan.quantizer.events(amax, wanted, scale, scaling))
    }

    #[inline(always)]
    fn code(&self, value: f32, scaling: Scaling) -> u8 {
        self.plan.quantizer.encode(value, scaling)
    }

    #[inline(always)]
    fn negative_zero(&self) -> u32 {
        self.plan.quantizer.negative_zero() as u32
    }

    #[inline(always)]
    fn saturates_non_finite(&self) -> bool {
        self.saturate_non_finite != 0
    }
}

/// The plain scale of a block that is [near](microscale_formats::search::is_near).
pub(crate) struct Plain {
    /// Its byte.
    pub(crate) byte: u8,
    /// The byte of the smallest scale of which 7 reach the amax, or the one below.
    pub(crate) near_least: u8,
    /// The scale did not saturate, and [`Searched::candidate`] has the candidates of both bytes.
    pub(crate) usual: bool,
}

/// A format whose scales can be searched.
pub(crate) trait Searched: Format + Scales {
    /// Bytes above this have candidates by [`Searched::candidate`].
    const LAST_UNUSUAL: u32;

    /// The plain scale of a block that is near, for the bits of its amax. The byte is right also if the scale is not usual because it
    /// is too large.
    fn plain<D: Dtype>(&self, amax_bits: u32) -> Plain;

    /// The factors and inverses that [`Searched::candidate`] shuffles: the lane's.
    fn candidates_of_lanes(&self) -> (f32, f32);

    /// The factor and inverse of a byte's [candidate](microscale_formats::search::Candidate), with a unit of 1. All lanes of the warp
    /// take part.
    fn candidate(of_lane: (f32, f32), byte: u32) -> (f32, f32);

    /// What values of a block that is near are encoded with under a scale, by the shortcut if there is one. Not in range if the block has
    /// events that are not given. All lanes of the warp take part.
    fn usual_under<D: Dtype>(&self, amax_bits: u32, byte: u8) -> Scaled;

    /// Whether [`Searched::encode_usually`] is right: one question for all of a lane's chunks.
    fn encodes_usually(&self) -> bool;

    /// [`Format::encode`] by the most usual options.
    fn encode_usually<D: Dtype>(&self, chunk: &Chunk, factor: Factor) -> u64;

    /// The same with all events but the scale's saturation, without the shortcut; in range as of [`Format::scale`].
    fn scale_under<D: Dtype>(&self, amax_bits: u32, byte: u8) -> Scaled;
}

impl<const TIES: u32> Searched for Mx<E2m1, TIES> {
    const LAST_UNUSUAL: u32 = 0;

    #[inline(always)]
    fn plain<D: Dtype>(&self, amax_bits: u32) -> Plain {
        let exponent = mx::rounded_exponent(amax_bits, self.options.mantissa_addend);
        let byte = mx::scale_from_exponent::<E2m1>(exponent).to_bits();
        // 7 · 2^-2 is 1.75: it reaches a quarter of a power of two, or half of it.
        Plain { byte, near_least: (amax_bits >> 23) as u8 - 2, usual: true }
    }

    #[inline(always)]
    fn candidates_of_lanes(&self) -> (f32, f32) {
        (1.0, 1.0)
    }

    #[inline(always)]
    fn candidate(_: (f32, f32), byte: u32) -> (f32, f32) {
        (f32::from_bits(byte << 23), f32::from_bits((254 - byte) << 23))
    }

    #[inline(always)]
    fn usual_under<D: Dtype>(&self, amax_bits: u32, byte: u8) -> Scaled {
        let scale = E8m0::from_bits(byte);
        let events = BlockEvents { clipped: mx::clips::<E2m1>(amax_bits, scale), ..BlockEvents::default() };
        let in_range = f32::from_bits(amax_bits) > 0.5 * scale.to_f32();
        Scaled { byte, factor: [u32::from(byte), 0, 0], events, in_range }
    }

    #[inline(always)]
    fn encodes_usually(&self) -> bool {
        matches!(self.ties(), Ties::Even)
    }

    #[inline(always)]
    fn encode_usually<D: Dtype>(&self, chunk: &Chunk, [scale, ..]: Factor) -> u64 {
        E2m1::encode_chunk::<D>(chunk, scale, Ties::Even)
    }

    #[inline(always)]
    fn scale_under<D: Dtype>(&self, amax_bits: u32, byte: u8) -> Scaled {
        let (_, events) = self.define_under::<D>(amax_bits, byte);
        Scaled { byte, factor: [u32::from(byte), 0, 0], events, in_range: true }
    }
}

impl Searched for Nv {
    const LAST_UNUSUAL: u32 = E4m3::MIN_NORMAL.to_bits() as u32;

    #[inline(always)]
    fn plain<D: Dtype>(&self, amax_bits: u32) -> Plain {
        let wanted = self.wanted::<D>(f32::from_bits(amax_bits));
        // The nearest to amax / 7 is the smallest that is not below it, or the one below that. The wanted scale may have been rounded to
        // the input's dtype, which is less than a tenth of a step.
        let near_least = to_e4m3(wanted * (6.0 / 7.0)).to_bits();
        let usual = wanted >= self.plan.least_usual
            && wanted <= nvfp4::LARGEST_UNSATURATED
            && u32::from(near_least) > Self::LAST_UNUSUAL;
        Plain { byte: to_e4m3(wanted).to_bits(), near_least, usual }
    }

    #[inline(always)]
    fn candidates_of_lanes(&self) -> (f32, f32) {
        // Those of the scales from 1 up to 2, of which all normal scales are powers of two times one.
        let byte = E4m3::ONE.to_bits() + (warp::lane() % 8) as u8;
        let factor = step(self.plan.decode, from_e4m3(E4m3::from_bits(byte)));
        (factor, divide(1.0, factor))
    }

    #[inline(always)]
    fn candidate((factor, inverse): (f32, f32), byte: u32) -> (f32, f32) {
        const ONE: u32 = (E4m3::ONE.to_bits() as u32) << (23 - 3);
        // What the scale adds to the exponent field.
        let exponent = ((byte & 0x78) << (23 - 3)).wrapping_sub(ONE);
        let factor = warp::shuffle(factor.to_bits(), byte).wrapping_add(exponent);
        let inverse = warp::shuffle(inverse.to_bits(), byte).wrapping_sub(exponent);
        (f32::from_bits(factor), f32::from_bits(inverse))
    }

    #[inline(always)]
    fn usual_under<D: Dtype>(&self, amax_bits: u32, byte: u8) -> Scaled {
        let amax = f32::from_bits(amax_bits);
        let (factor, scaled) = if self.has_shortcut::<D>() {
            let factor = self.shortcut_factor(byte);
            ([factor, 0, 0], amax * f32::from_bits(factor))
        } else {
            let factor = self.factor(E4m3::from_bits(byte));
            (factor, self.apply::<D>(amax, factor))
        };
        // A little above where values become 0.
        let in_range = scaled < USUAL && scaled > e2m1::MIDPOINTS[0] + 0.01;
        Scaled { byte, factor, events: BlockEvents::default(), in_range }
    }

    #[inline(always)]
    fn encodes_usually(&self) -> bool {
        true
    }

    #[inline(always)]
    fn encode_usually<D: Dtype>(&self, chunk: &Chunk, factor: Factor) -> u64 {
        self.encode::<D>(chunk, factor)
    }

    #[inline(always)]
    fn scale_under<D: Dtype>(&self, amax_bits: u32, byte: u8) -> Scaled {
        let amax = f32::from_bits(amax_bits);
        let scale = E4m3::from_bits(byte);
        let factor = self.factor(scale);
        let scaled = self.apply::<D>(amax, factor);
        let events = self.plan.quantizer.events_of(amax, 1.0, 0.0, scale, scaled);
        let in_range = !events.clipped || f32::from_bits(factor[0]) <= 3.0 / D::MIN_POSITIVE;
        Scaled { byte, factor, events, in_range }
    }
}

impl<E, const TIES: u32> Scales for Mx<E, TIES> {
    const FIRST: u8 = PowersOfTwo::FIRST;
    const LAST: u8 = PowersOfTwo::LAST;
    const UNHALVED: u8 = PowersOfTwo::UNHALVED;
    const OCTAVE: u8 = PowersOfTwo::OCTAVE;

    #[inline(always)]
    fn factor(&self, byte: u8) -> f32 {
        PowersOfTwo.factor(byte)
    }
}

impl Scales for Nv {
    const FIRST: u8 = <Option<GlobalScale>>::FIRST;
    const LAST: u8 = <Option<GlobalScale>>::LAST;
    const UNHALVED: u8 = <Option<GlobalScale>>::UNHALVED;
    const OCTAVE: u8 = <Option<GlobalScale>>::OCTAVE;

    #[inline(always)]
    fn factor(&self, byte: u8) -> f32 {
        if self.plan.usual != 0 {
            return step(self.plan.decode, from_e4m3(E4m3::from_bits(byte)));
        }
        let direction = self.plan.quantizer.arithmetic().direction;
        GlobalScale::of(direction, self.plan.global_scale).factor(E4m3::from_bits(byte))
    }
}

/// A format to dequantize from.
pub(crate) trait Decode: Blocks {
    /// What a block's elements are multiplied with; NaN for the NaN scale.
    fn factor(&self, scale: u8) -> f32;

    /// Up to eight codes, the first in the lowest bits, as exact f32.
    fn decode(codes: u64) -> [f32; 8];

    /// Whether elements can be infinite or NaN.
    const HAS_SPECIALS: bool;
}

impl<E: Element> Decode for Mx<E, EVEN> {
    const HAS_SPECIALS: bool = E::HAS_SPECIALS;

    #[inline(always)]
    fn factor(&self, scale: u8) -> f32 {
        E8m0::from_bits(scale).to_f32()
    }

    #[inline(always)]
    fn decode(codes: u64) -> [f32; 8] {
        E::decode_chunk(codes)
    }
}

impl<E> Mx<E, EVEN> {
    /// To dequantize from.
    pub(crate) fn decoder() -> Self {
        Self::new(QuantizeOptions { mantissa_addend: 0, ties: 0, negative_zero: 0, saturate_non_finite: 0 })
    }
}

/// NVFP4 to dequantize from, with its global scale.
pub(crate) struct NvDecoder {
    pub(crate) global: f32,
    pub(crate) apply: ApplyGlobal,
}

impl Blocks for NvDecoder {
    const BLOCK: u32 = Nv::BLOCK;
    const BITS: u32 = Nv::BITS;
}

impl Decode for NvDecoder {
    const HAS_SPECIALS: bool = false;

    #[inline(always)]
    fn factor(&self, scale: u8) -> f32 {
        let scale = from_e4m3(E4m3::from_bits(scale));
        match self.apply {
            ApplyGlobal::Divisor => scale / self.global,
            ApplyGlobal::Multiplier => scale * self.global,
            ApplyGlobal::Absent => scale,
        }
    }

    #[inline(always)]
    fn decode(codes: u64) -> [f32; 8] {
        dtype::decode(codes as u32)
    }
}
