//! Plain rounding sixteen blocks at a time: a group. The scales of all are worked out together, a lane a block; then the codes, of 16-bit
//! values by comparing ([`words`]), of f32 by arithmetic ([`floats`]).

mod floats;
mod words;

use std::marker::PhantomData;

use microscale_formats::nvfp4::{self, ScaleSteps, Scaling};
use microscale_formats::plan::{NV_FAR, NvPlan, power_of_two};
use microscale_formats::{BlockEvents, E2m1, E4m3, E8m0, NegativeZero, mx};

use super::policy::{self, Tally};
use super::prefetch::ask_for;
use super::rule::{Blocks, Mx};
use super::thresholds::Thresholds;
use super::vector::{LANES, Lanes, Scalars, Vector};
use crate::element::{Dtype, Element};
use crate::recipe::NonFinite;

pub(super) use words::decode;

/// NVFP4's factors for each scale byte, under a tensor's global scale: what elements are multiplied with, or divided by as
/// [`nvfp4::quotient`] does it.
#[derive(Clone)]
pub(super) struct NvFactors {
    /// The factor, or one over the divisor.
    y: [f32; 128],
    /// What `y` leaves of one over the divisor.
    z: [f32; 128],
    divisor: [f32; 128],
    /// Whether elements are divided.
    pub(super) divides: bool,
    /// The scale byte of blocks of zeros.
    scale_of_zero: u8,
    /// The limits that the kernels have too.
    plan: NvPlan,
}

impl NvFactors {
    /// Values of 16 bits have no use for factors, and get none.
    pub(super) fn new(quantizer: &nvfp4::Quantizer, global_scale: f32, dtype: Dtype) -> Self {
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

/// Factors of two blocks, one in each half of a vector: what elements are multiplied with, or divided by as [`nvfp4::quotient`] does it.
#[derive(Clone, Copy)]
pub(super) struct Factors<N> {
    y: N,
    /// Of a quotient.
    rest: Option<[N; 2]>,
}

/// A format's blocks, in groups.
pub(super) trait Grouped<const N: usize>: Blocks<N> {
    /// Writes the scale byte of each block of a group with these finite amaxes, and adds what happens in them. Returns false, having
    /// done neither, if the group is not for this.
    fn scales<T: Element, V: Vector>(
        &self,
        amax: V::Number,
        bytes: &mut Lanes<u8>,
        tally: &mut Tally,
    ) -> bool;

    /// What f32 are scaled with in blocks with these scales.
    fn factors<V: Vector>(&self, bytes: [u8; 2]) -> Factors<V::Number>;

    /// What 16-bit values are compared with.
    fn thresholds(&self) -> &Thresholds;
}

/// MXFP4, for f32 with ties to even.
pub(super) struct MxGroups<'a> {
    pub(super) mx: Mx<E2m1>,
    pub(super) thresholds: &'a Thresholds,
}

impl Blocks<{ mx::BLOCK }> for MxGroups<'_> {
    fn quantize_block<T: Element>(&self, values: &[f32; mx::BLOCK], codes: &mut [u8]) -> (u8, BlockEvents) {
        Blocks::quantize_block::<T>(&self.mx, values, codes)
    }
}

impl Grouped<{ mx::BLOCK }> for MxGroups<'_> {
    #[inline(always)]
    fn scales<T: Element, V: Vector>(
        &self,
        amax: V::Number,
        bytes: &mut Lanes<u8>,
        tally: &mut Tally,
    ) -> bool {
        let arithmetic = &self.mx.arithmetic;
        let addend = arithmetic.scale_rule.mantissa_addend::<E2m1>();
        // As `mx` has them: the rounded exponents, the scales, and what clips.
        let largest_exponent = <E2m1 as mx::Element>::LARGEST_EXPONENT;
        let exponents = V::shift_right(V::add_bits(V::bits(amax), V::splat_bits(addend)), 23);
        let unclamped = V::max_bits(exponents, V::splat_bits(largest_exponent));
        *bytes = V::low_bytes(V::add_bits(unclamped, V::splat_bits(largest_exponent.wrapping_neg())));
        // Only so small an amax, or zero, can want a smaller scale than there is.
        if V::at_most(amax, V::splat(E8m0::MIN.to_f32() * 8.0)) != 0 {
            for amax in V::store(amax) {
                let exponent = mx::rounded_exponent(amax.to_bits(), addend);
                tally.add(mx::events::<E2m1>(amax.to_bits(), exponent, arithmetic.ties));
            }
            return true;
        }
        let mantissa = V::splat_bits(<E2m1 as mx::Element>::LARGEST_MANTISSA);
        let clips = V::above(V::bits(amax), V::or(V::shift_left(unclamped, 23), mantissa));
        tally.add_clipped(clips.count_ones());
        true
    }

    #[inline(always)]
    fn factors<V: Vector>(&self, [byte, _]: [u8; 2]) -> Factors<V::Number> {
        Factors { y: V::splat(E8m0::from_bits(byte).reciprocal_of_number()), rest: None }
    }

    #[inline(always)]
    fn thresholds(&self) -> &Thresholds {
        self.thresholds
    }
}

/// The smallest normal f16.
const F16_NORMAL: f32 = 1.0 / 16384.0;

/// NVFP4 with its factors at hand.
pub(super) struct NvGroups<'a, const DIVIDES: bool> {
    pub(super) quantizer: &'a nvfp4::Quantizer,
    pub(super) factors: &'a NvFactors,
    pub(super) thresholds: &'a Thresholds,
}

impl<const DIVIDES: bool> Blocks<{ nvfp4::BLOCK }> for NvGroups<'_, DIVIDES> {
    fn quantize_block<T: Element>(
        &self,
        values: &[f32; nvfp4::BLOCK],
        codes: &mut [u8],
    ) -> (u8, BlockEvents) {
        Blocks::quantize_block::<T>(self.quantizer, values, codes)
    }
}

impl<const DIVIDES: bool> Grouped<{ nvfp4::BLOCK }> for NvGroups<'_, DIVIDES> {
    #[inline(always)]
    fn scales<T: Element, V: Vector>(
        &self,
        amax: V::Number,
        bytes: &mut Lanes<u8>,
        tally: &mut Tally,
    ) -> bool {
        let (quantizer, plan) = (self.quantizer, &self.factors.plan);
        let zeros = V::at_most(amax, V::splat(0.0));
        if T::DTYPE == Dtype::F32 {
            // What the arithmetic of quotients needs.
            let (least, most) = (V::splat(power_of_two(-NV_FAR)), V::splat(power_of_two(NV_FAR)));
            let near = V::at_most(least, amax) & V::at_most(amax, most);
            if plan.usual == 0 || near | zeros != u16::MAX {
                return false;
            }
        }
        let wanted = quantizer.wanted_scale_by(amax, Steps::<T, V>(PhantomData));
        // Where a normal scale is within rounding of what was wanted, nothing happens; nor in blocks of zeros.
        let mut usual = V::at_most(V::splat(plan.least_usual), wanted)
            & V::at_most(wanted, V::splat(nvfp4::LARGEST_UNSATURATED));
        if T::DTYPE == Dtype::F16 {
            // A sixth that is a subnormal f16 was rounded more coarsely than that.
            usual &= V::at_most(V::splat(8.0 * F16_NORMAL), amax);
        }
        if usual | zeros != u16::MAX {
            unusual_scales(quantizer, &V::store(amax), &V::store(wanted), bytes, tally);
            return true;
        }
        // A normal E4M3: the bits of the f32, rounded to fewer.
        let dropped = f32::MANTISSA_DIGITS - 1 - E4m3::MANTISSA_BITS;
        let bits = V::bits(wanted);
        let odd = V::and(V::shift_right(bits, dropped), V::splat_bits(1));
        let half = ((1 << (dropped - 1)) - 1u32).wrapping_sub(E4m3::NORMAL_ZERO);
        let codes = V::shift_right(V::add_bits(V::add_bits(bits, odd), V::splat_bits(half)), dropped);
        let of_zero = V::splat_bits(u32::from(self.factors.scale_of_zero));
        let codes = V::bits(V::select(zeros, V::number(of_zero), V::number(codes)));
        *bytes = V::low_bytes(codes);
        true
    }

    #[inline(always)]
    fn factors<V: Vector>(&self, [first, second]: [u8; 2]) -> Factors<V::Number> {
        let NvFactors { y, z, divisor, .. } = self.factors;
        let (first, second) = (usize::from(first & 0x7F), usize::from(second & 0x7F));
        let rest = [V::halves(z[first], z[second]), V::halves(divisor[first], divisor[second])];
        Factors { y: V::halves(y[first], y[second]), rest: if DIVIDES { Some(rest) } else { None } }
    }

    #[inline(always)]
    fn thresholds(&self) -> &Thresholds {
        self.thresholds
    }
}

/// The steps to blocks' scales, of vectors and a dtype.
struct Steps<T, V>(PhantomData<(T, V)>);

impl<T: Element, V: Vector> ScaleSteps<V::Number> for Steps<T, V> {
    #[inline(always)]
    fn narrow(&self, x: V::Number) -> V::Number {
        if T::DTYPE == Dtype::F32 { x } else { V::widened::<T>(V::narrowed::<T>(x)) }
    }

    #[inline(always)]
    fn times(&self, x: V::Number, y: f32) -> V::Number {
        V::mul(x, V::splat(y))
    }

    #[inline(always)]
    fn over(&self, x: V::Number, y: f32) -> V::Number {
        V::div(x, V::splat(y))
    }
}

/// The scales of any blocks, and what happens in them.
#[inline(never)]
fn unusual_scales(
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

/// The treatments of −0, for which loops are compiled apart; each is `NegativeZero as u8`.
pub(super) const KEEP: u8 = NegativeZero::Keep as u8;
pub(super) const DROP_INPUT: u8 = NegativeZero::DropInput as u8;
pub(super) const DROP: u8 = NegativeZero::Drop as u8;
pub(super) const FORCE: u8 = NegativeZero::Force as u8;

/// Bytes of the values of a window: they stay in the first-level cache from the scales to the codes.
const WINDOW: usize = 2048;

/// Places of a piece that are worked at in turn, a window each: processors read ahead in each, and there is more time for it.
const STREAMS: usize = 2;

/// Quantizes a piece in windows of whole groups.
#[inline(always)]
pub(super) fn quantize<T: Element, V: Vector, G: Grouped<N>, const N: usize, const SIGNS: u8>(
    values: &[T],
    groups: &G,
    non_finite: NonFinite,
    codes: &mut [u8],
    scales: &mut [u8],
    tally: &mut Tally,
) {
    let window = WINDOW / (LANES * N * size_of::<T>());
    let (group, group_codes) = (LANES * N, LANES * N / 2);
    let whole = values.len() / group;
    let windows = whole.div_ceil(window);
    let turns = windows.div_ceil(STREAMS);
    for i in 0..turns * STREAMS {
        let first = (i % STREAMS * turns + i / STREAMS) * window;
        if first >= whole {
            continue;
        }
        let end = whole.min(first + window);
        let window = Window {
            offset: first * group,
            values: &values[first * group..end * group],
            codes: &mut codes[first * group_codes..end * group_codes],
            scales: &mut scales[first * LANES..end * LANES],
        };
        window.quantize::<V, G, N, SIGNS>(groups, non_finite, tally);
    }
    // What is left, as a group with zeros after it.
    let scales = &mut scales[whole * LANES..];
    if !scales.is_empty() {
        let (values, codes) = (&values[whole * group..], &mut codes[whole * group_codes..]);
        let mut padded = [T::default(); MOST];
        padded[..values.len()].copy_from_slice(values);
        let (mut all_codes, mut all_scales) = ([0; MOST / 2], [0; LANES]);
        let window = Window {
            offset: whole * group,
            values: &padded[..group],
            codes: &mut all_codes[..group_codes],
            scales: &mut all_scales,
        };
        window.quantize::<V, G, N, SIGNS>(groups, non_finite, tally);
        codes.copy_from_slice(&all_codes[..codes.len()]);
        scales.copy_from_slice(&all_scales[..scales.len()]);
    }
}

/// Elements of the largest group.
const MOST: usize = LANES * mx::BLOCK;

/// Whole groups, with where they go to.
struct Window<'a, T> {
    /// Of the first value in its piece.
    offset: usize,
    values: &'a [T],
    codes: &'a mut [u8],
    scales: &'a mut [u8],
}

impl<T: Element> Window<'_, T> {
    /// All scales first, then the codes, so that neither waits for the other; and at last the groups that were left.
    #[inline(always)]
    fn quantize<V: Vector, G: Grouped<N>, const N: usize, const SIGNS: u8>(
        self,
        groups: &G,
        non_finite: NonFinite,
        tally: &mut Tally,
    ) {
        let Self { values, codes, scales, .. } = self;
        let mut left = 0;
        let (all_scales, _) = scales.as_chunks_mut::<LANES>();
        for (i, (group, scales)) in values.chunks_exact(LANES * N).zip(all_scales).enumerate() {
            let amax = match T::DTYPE {
                Dtype::F32 => floats::amax::<V, N>(bytemuck::cast_slice(group)),
                Dtype::F16 | Dtype::Bf16 => words::amax::<T, V, N>(group),
            };
            let finite = V::at_most(amax, V::splat(f32::MAX)) == u16::MAX;
            if !(finite && groups.scales::<T, V>(amax, scales, tally)) {
                left |= 1 << i;
            }
        }
        match T::DTYPE {
            Dtype::F32 => {
                floats::encode::<V, G, N, SIGNS>(bytemuck::cast_slice(values), groups, scales, codes);
            }
            Dtype::F16 | Dtype::Bf16 => {
                let thresholds = groups.thresholds();
                words::encode::<V, N, SIGNS>(bytemuck::cast_slice(values), thresholds, scales, codes);
            }
        }
        if left != 0 {
            Self { values, codes, scales, ..self }.by_definition(left, groups, non_finite, tally);
        }
    }

    /// Quantizes the groups whose bits are set, block by block.
    #[cold]
    #[inline(never)]
    fn by_definition<const N: usize>(
        self,
        left: u32,
        blocks: &impl Blocks<N>,
        non_finite: NonFinite,
        tally: &mut Tally,
    ) {
        let codes = self.codes.chunks_exact_mut(N / 2).zip(self.scales);
        for (i, (block, (codes, scale))) in self.values.as_chunks::<N>().0.iter().zip(codes).enumerate() {
            if left >> (i / LANES) & 1 != 0 {
                let offset = self.offset + i * N;
                *scale = policy::quantize_block(block, offset, blocks, non_finite, codes, tally);
            }
        }
    }
}

/// Asks for the memory of the window after this one.
#[inline(always)]
fn prefetch<T>(behind: &T) {
    ask_for(std::ptr::from_ref(behind).cast::<u8>().wrapping_add(WINDOW), size_of::<T>());
}

/// The bits of the largest magnitude of a piece: those of a NaN or an infinity if it has one.
#[inline(always)]
pub(super) fn amax_bits<T: Element, V: Vector>(values: &[T]) -> u32 {
    match T::DTYPE {
        Dtype::F32 => floats::amax_bits::<V>(bytemuck::cast_slice(values)),
        Dtype::F16 | Dtype::Bf16 => words::amax_bits::<T, V>(bytemuck::cast_slice(values)),
    }
}

/// Four parts of as many chunks, side by side, and what is left. Memory is read at four places at once, as [`STREAMS`] says.
#[inline(always)]
fn side_by_side<C>(chunks: &[C]) -> (impl Iterator<Item = [&C; 4]>, &[C]) {
    let part = chunks.len() / 4;
    let (a, rest) = chunks.split_at(part);
    let (b, rest) = rest.split_at(part);
    let (c, rest) = rest.split_at(part);
    let (d, rest) = rest.split_at(part);
    (a.iter().zip(b).zip(c).zip(d).map(|(((a, b), c), d)| [a, b, c, d]), rest)
}
