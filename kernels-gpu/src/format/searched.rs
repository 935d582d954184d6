//! The questions of a search to a format: its plain scale, its candidates, and encoding under
//! another scale.

use microscale_formats::search::{PowersOfTwo, Scales};
use microscale_formats::{BlockEvents, E2m1, E4m3, E8m0, GlobalScale, e2m1, mx, nvfp4};

use super::encode::{Format, Scaled};
use super::mx::Mx;
use super::nv::{Nv, USUAL, divide, from_e4m3, step, to_e4m3};
use crate::dtype::Dtype;
use crate::hardware::warp;

/// The plain scale of a block that is [near](microscale_formats::search::is_near).
pub(crate) struct Plain {
    /// Its byte.
    pub(crate) byte: u8,
    /// The byte of the smallest scale whose sevenfold reaches the amax, or the byte below.
    pub(crate) near_least: u8,
    /// The scale did not saturate, and [`Searched::candidate`] has the candidates of both bytes.
    pub(crate) usual: bool,
}

/// A format whose scales can be searched.
pub(crate) trait Searched: Format + Scales {
    /// Bytes above this have candidates by [`Searched::candidate`].
    const LAST_UNUSUAL: u32;

    /// The plain scale of a block that is near, for the bits of its amax. The byte is right also if
    /// the scale is not usual because it is too large.
    fn plain<D: Dtype>(&self, amax_bits: u32) -> Plain;

    /// The factors and inverses that [`Searched::candidate`] shuffles: the lane's.
    fn candidates_of_lanes(&self) -> (f32, f32);

    /// The factor and inverse of a byte's [candidate](microscale_formats::search::Candidate), with
    /// a unit of 1. All lanes of the warp call it.
    fn candidate(of_lane: (f32, f32), byte: u32) -> (f32, f32);

    /// What values of a block that is near are encoded with under a scale, by the shortcut if there
    /// is one. Not in range if the block has events that are not given. All lanes of the warp take
    /// part.
    fn usual_under<D: Dtype>(&self, amax_bits: u32, byte: u8) -> Scaled;

    /// The same with all events but the scale's saturation, without the shortcut; in range as of
    /// [`Format::scale`].
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
        // The nearest to amax / 7 is the smallest that is not below it, or the one below that. The
        // wanted scale may have been rounded to the input's dtype, which is less than a tenth of a
        // step.
        let near_least = to_e4m3(wanted * (6.0 / 7.0)).to_bits();
        let usual = wanted >= self.plan.least_usual
            && wanted <= nvfp4::LARGEST_UNSATURATED
            && u32::from(near_least) > Self::LAST_UNUSUAL;
        Plain { byte: to_e4m3(wanted).to_bits(), near_least, usual }
    }

    #[inline(always)]
    fn candidates_of_lanes(&self) -> (f32, f32) {
        // The candidates of the scales from 1 to below 2. Every normal scale is one of them times a
        // power of two.
        let byte = E4m3::ONE.to_bits() + (warp::lane() % 8) as u8;
        let factor = step(self.plan.decode, from_e4m3(E4m3::from_bits(byte)));
        (factor, divide(1.0, factor))
    }

    #[inline(always)]
    fn candidate((factor, inverse): (f32, f32), byte: u32) -> (f32, f32) {
        const ONE: u32 = (E4m3::ONE.to_bits() as u32) << (23 - 3);
        // The scale's contribution to the exponent field.
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
