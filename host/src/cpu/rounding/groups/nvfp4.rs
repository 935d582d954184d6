//! The scales of NVFP4 for sixteen blocks at a time, one lane per block, and its factors.

use std::marker::PhantomData;

use microscale_formats::nvfp4::{self, ScaleSteps, Scaling};
use microscale_formats::plan::{NV_FAR, NvPlan, power_of_two};
use microscale_formats::{BlockEvents, E4m3};

use super::format::{Factors, GroupFormat};
use crate::cpu::blocks::format::BlockFormat;
use crate::cpu::blocks::tally::Tally;
use crate::cpu::rounding::thresholds::Thresholds;
use crate::cpu::simd::{Lanes, Scalars, Vector};
use crate::element::{Dtype, Element};

/// The factors of each scale byte under a tensor's global scale.
///
/// Elements are multiplied by them, or divided as by [`nvfp4::quotient`].
#[derive(Clone)]
pub(in crate::cpu) struct Nvfp4Factors {
    /// The factor, or the reciprocal of the divisor.
    y: [f32; 128],
    /// The reciprocal minus `y`, for one more step of precision.
    z: [f32; 128],
    divisor: [f32; 128],
    /// True if elements are divided.
    pub(in crate::cpu) divides: bool,
    /// The scale byte of blocks of zeros.
    scale_of_zero: u8,
    /// The bounds of the fast arithmetic. GPU kernels use the same.
    plan: NvPlan,
}

impl Nvfp4Factors {
    /// Computes the factors. 16-bit values use thresholds instead, and get no factors.
    pub(in crate::cpu) fn new(quantizer: &nvfp4::Quantizer, global_scale: f32, dtype: Dtype) -> Self {
        let plan = NvPlan::new(*quantizer.arithmetic(), global_scale);
        let [mut y, mut z, mut divisor] = [[0.0; 128]; 3];
        let bytes = if dtype == Dtype::F32 { 0..128 } else { 0..0 };
        for byte in bytes {
            match quantizer.scaling(E4m3::from_bits(byte as u8)) {
                Scaling::Multiply(factor) => y[byte] = factor,
                Scaling::Divide(d) => {
                    [y[byte], z[byte]] = nvfp4::reciprocal::<Scalars>(d);
                    divisor[byte] = d;
                }
            }
        }
        let scale_of_zero = quantizer.rounded_scale(quantizer.wanted_scale(0.0, |x| x)).to_bits();
        Self { y, z, divisor, divides: plan.divides != 0, scale_of_zero, plan }
    }
}

/// The smallest normal f16.
const F16_NORMAL: f32 = 1.0 / 16384.0;

/// NVFP4 with its factors and thresholds.
pub(in crate::cpu) struct Nvfp4Groups<'a, const DIVIDES: bool> {
    pub(in crate::cpu) quantizer: &'a nvfp4::Quantizer,
    pub(in crate::cpu) factors: &'a Nvfp4Factors,
    pub(in crate::cpu) thresholds: &'a Thresholds,
}

impl<const DIVIDES: bool> BlockFormat<{ nvfp4::BLOCK }> for Nvfp4Groups<'_, DIVIDES> {
    fn quantize_block<T: Element>(
        &self,
        values: &[f32; nvfp4::BLOCK],
        codes: &mut [u8],
    ) -> (u8, BlockEvents) {
        BlockFormat::quantize_block::<T>(self.quantizer, values, codes)
    }
}

impl<const DIVIDES: bool> GroupFormat<{ nvfp4::BLOCK }> for Nvfp4Groups<'_, DIVIDES> {
    #[inline(always)]
    fn scales<T: Element, V: Vector>(
        &self,
        simd: V,
        amax: V::Number,
        bytes: &mut Lanes<u8>,
        tally: &mut Tally,
    ) -> bool {
        let (quantizer, plan) = (self.quantizer, &self.factors.plan);
        let zeros = simd.at_most(amax, simd.splat(0.0));
        if T::DTYPE == Dtype::F32 {
            // Quotients are exact only for amaxes in this range.
            let (least, most) = (simd.splat(power_of_two(-NV_FAR)), simd.splat(power_of_two(NV_FAR)));
            let near = simd.at_most(least, amax) & simd.at_most(amax, most);
            if plan.usual == 0 || near | zeros != u16::MAX {
                return false;
            }
        }
        let wanted = quantizer.wanted_scale_by(amax, Steps(simd, PhantomData::<T>));
        // A block of zeros has no event. Neither has a block whose wanted scale is in the normal
        // range of E4M3.
        let mut in_range = simd.at_most(simd.splat(plan.least_usual), wanted)
            & simd.at_most(wanted, simd.splat(nvfp4::LARGEST_UNSATURATED));
        if T::DTYPE == Dtype::F16 {
            // If a sixth of the amax is a subnormal f16, its rounding error is larger.
            in_range &= simd.at_most(simd.splat(8.0 * F16_NORMAL), amax);
        }
        if in_range | zeros != u16::MAX {
            slow_scales(quantizer, &simd.store(amax), &simd.store(wanted), bytes, tally);
            return true;
        }
        // Rounds the f32 bits to a normal E4M3.
        let dropped = f32::MANTISSA_DIGITS - 1 - E4m3::MANTISSA_BITS;
        let bits = simd.bits(wanted);
        let odd = simd.and(simd.shift_right(bits, dropped), simd.splat_bits(1));
        let half = ((1 << (dropped - 1)) - 1u32).wrapping_sub(E4m3::NORMAL_ZERO);
        let codes = simd.shift_right(simd.add_bits(simd.add_bits(bits, odd), simd.splat_bits(half)), dropped);
        let of_zero = simd.splat_bits(u32::from(self.factors.scale_of_zero));
        let codes = simd.bits(simd.select(zeros, simd.number(of_zero), simd.number(codes)));
        *bytes = simd.low_bytes(codes);
        true
    }

    #[inline(always)]
    fn factors<V: Vector>(&self, simd: V, [first, second]: [u8; 2]) -> Factors<V::Number> {
        let Nvfp4Factors { y, z, divisor, .. } = self.factors;
        let (first, second) = (usize::from(first & 0x7F), usize::from(second & 0x7F));
        let rest = [simd.halves(z[first], z[second]), simd.halves(divisor[first], divisor[second])];
        Factors { y: simd.halves(y[first], y[second]), rest: if DIVIDES { Some(rest) } else { None } }
    }

    #[inline(always)]
    fn thresholds(&self) -> &Thresholds {
        self.thresholds
    }
}

/// The operations of `wanted_scale_by` on vectors, with roundings to dtype `T`.
struct Steps<T, V>(V, PhantomData<T>);

impl<T: Element, V: Vector> ScaleSteps<V::Number> for Steps<T, V> {
    #[inline(always)]
    fn narrow(&self, x: V::Number) -> V::Number {
        if T::DTYPE == Dtype::F32 { x } else { self.0.widen::<T>(self.0.narrow::<T>(x)) }
    }

    #[inline(always)]
    fn times(&self, x: V::Number, y: f32) -> V::Number {
        self.0.mul(x, self.0.splat(y))
    }

    #[inline(always)]
    fn over(&self, x: V::Number, y: f32) -> V::Number {
        self.0.div(x, self.0.splat(y))
    }
}

/// Chooses scales one at a time, with all checks, and counts the events.
#[inline(never)]
fn slow_scales(
    quantizer: &nvfp4::Quantizer,
    amax: &Lanes<f32>,
    wanted: &Lanes<f32>,
    bytes: &mut Lanes<u8>,
    tally: &mut Tally,
) {
    for ((byte, wanted), amax) in bytes.iter_mut().zip(wanted).zip(amax) {
        let scale = quantizer.rounded_scale(*wanted);
        tally.add(quantizer.events(*amax, *wanted, scale, quantizer.scaling(scale)));
        *byte = scale.to_bits();
    }
}
