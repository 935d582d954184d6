//! NVFP4: an E4M3 number as the scale of a block of 16, under a global scale.

use microscale_formats::nvfp4::{self, Scaling};
use microscale_formats::plan::{NV_FAR, NvPlan, NvStep, power_of_two};
use microscale_formats::{BlockEvents, E4m3};

use super::blocks::Blocks;
use super::encode::{Factor, Format, Scaled};
use crate::arithmetic::Ptx;
use crate::dtype::{self, Chunk, Dtype};
use crate::hardware::{ptx, warp};

/// Whether values of the dtype may be scaled by a tensor's `NvShortcut`: the hardware's conversion
/// to E2M1 has no use for it.
pub(crate) const fn uses_shortcut<D: Dtype>() -> bool {
    cfg!(not(microscale_fp4)) && D::BYTES == 2
}

/// NVFP4, for a tensor.
pub(crate) struct Nv {
    pub(super) plan: NvPlan,
    saturate_non_finite: u32,
    /// The shortcut's factor for the lane's number, modulo 8, as mantissa, times 2^7.
    factor_of_lane: u32,
}

/// A little below where values count as clipped, so that it does not matter how a scaled amax was
/// rounded.
pub(super) const USUAL: f32 = nvfp4::CLIPPED - 0.01;

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
    pub(super) fn wanted<D: Dtype>(&self, amax: f32) -> f32 {
        let first = step(self.plan.first, amax);
        step(self.plan.second, if self.plan.narrows != 0 { D::round(first) } else { first })
    }

    /// What [`quotient`] needs.
    #[inline(always)]
    pub(super) fn factor(&self, scale: E4m3) -> Factor {
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

    /// The shortcut's factor of a scale. All lanes of the warp call it.
    #[inline(always)]
    pub(super) fn shortcut_factor(&self, byte: u8) -> u32 {
        // The factor of the mantissa, times 2^-7 to the exponent field.
        let of_mantissa = warp::shuffle(self.factor_of_lane, u32::from(byte));
        of_mantissa.wrapping_sub(u32::from(byte & 0x78) << (23 - 3))
    }

    /// A scaled element.
    #[inline(always)]
    pub(super) fn apply<D: Dtype>(&self, x: f32, factor: Factor) -> f32 {
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
        // The largest number also if the divisor is 0; then all elements are, or the block is not
        // in range.
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
        // Values above 5 after scaling have code 7. The limit of 6.5 may be rounded: it is far
        // enough from 5, and from 7, where `encode_scaled` fails.
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

/// An [`NvStep`] taken, for operands that are not [far](NV_FAR) from 1.
#[inline(always)]
pub(super) fn step(NvStep { factor, divisor, correction }: NvStep, a: f32) -> f32 {
    let q = a * factor;
    let q = ptx::fma_f32(ptx::fma_f32(-divisor, q, a), correction, q);
    ptx::fma_f32(ptx::fma_f32(-divisor, q, a), correction, q)
}

/// a / b as the steps do it, with the reciprocal to about a unit in the last place.
#[inline(always)]
pub(super) fn divide(a: f32, b: f32) -> f32 {
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
pub(super) fn to_e4m3(x: f32) -> E4m3 {
    #[cfg(microscale_sm90)]
    return E4m3::from_bits(ptx::e4m3x2(0.0, x) as u8);
    #[cfg(not(microscale_sm90))]
    E4m3::from_f32(x)
}

/// The value of an E4M3 that is not negative, by the hardware where it can.
#[inline(always)]
pub(super) fn from_e4m3(scale: E4m3) -> f32 {
    #[cfg(microscale_sm90)]
    return ptx::f16_low_to_f32(ptx::e4m3x2_to_f16x2(u32::from(scale.to_bits())));
    #[cfg(not(microscale_sm90))]
    scale.to_f32()
}
