//! The operands of the tensor cores: weights decoded to the dtype of the activations, and their
//! scales.

use microscale_formats::Dtype as OutputDtype;
use microscale_formats::plan::power_of_two;
use microscale_formats::{E4m3, E8m0, weights};

use super::operand::CodeChunk;
use super::product_format::{Mxfp4, Nvfp4, ProductFormat};
use crate::arithmetic::Ptx;
use crate::dtype::{Bf16, Dtype, F16};
#[cfg(microscale_wgmma)]
use crate::hardware::warp_group::{WgmmaBf16, WgmmaF16};
use crate::hardware::{ptx, warp};

/// A lane's accumulators of a tile.
pub(crate) const SUMS: usize = 4;

/// A dtype of activations.
pub(crate) trait Activations {
    type Dtype: Dtype;
    /// The dtype of warp groups' instructions.
    #[cfg(microscale_wgmma)]
    type Wgmma;
    const OUTPUT: OutputDtype;
    /// [`Self::weights`] returns weights times 2^-`BELOW`.
    const BELOW: i32;
    /// The first and the last MXFP4 scale exponent for which scaled weights are exact.
    const IN_RANGE: [u32; 2];
    /// Scaled weights are multiplied by 2^-`LOWERED` so that they fit: for NVFP4 and MXFP4.
    const LOWERED: [i32; 2];
    /// [`Self::raised`] multiplies activations by 2^`RAISED`.
    const RAISED: i32;

    /// The lookup table of [`Self::weights`].
    const TABLE: u32 = 0;

    /// Decodes eight weights to four pairs.
    fn weights(codes: u32, table: u32) -> [u32; 4];

    /// Brings eight activations into the pairs of [`Self::weights`].
    fn pairs(activations: [u32; 4]) -> [u32; 4];

    /// Multiplies a pair of activations by 2^`RAISED`.
    fn raised(pair: u32) -> u32;

    /// A pair with the same factor in both halves.
    fn factor(scale: f32) -> u32;

    /// The factors for two scales of NVFP4, given as bytes.
    #[inline(always)]
    fn factors(scales: u32) -> [u32; 2] {
        let [low, high] = Nvfp4::pair(scales);
        let raised = power_of_two(Self::BELOW - Self::LOWERED[0]);
        [Self::factor(low * raised), Self::factor(high * raised)]
    }

    /// Multiplies a pair with a factor.
    fn scaled(pair: u32, factor: u32) -> u32;

    /// Rounds two values, the first to the upper half. NaN becomes the canonical one.
    fn rounded(high: f32, low: f32) -> u32;

    /// Adds the product of two tiles: sums + a · b.
    fn multiply(a: [u32; 4], b: [u32; 2], sums: [f32; SUMS]) -> [f32; SUMS];
}

/// Brings eight activations into four pairs: the even ones first, then the odd ones.
#[inline(always)]
fn even_and_odd([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    let (even, odd) = (0x5410, 0x7632);
    [ptx::permute(a, b, even), ptx::permute(c, d, even), ptx::permute(a, b, odd), ptx::permute(c, d, odd)]
}

/// Replaces NaN in a rounded pair by the canonical NaN; `nan` holds two of them. Conversions make
/// NaN the largest positive bit pattern, and the canonical NaN is larger than every number.
#[inline(always)]
fn canonical_nan(pair: u32, nan: u32) -> u32 {
    ptx::min_signed_16x2(pair, nan)
}

/// Activations in f16. A weight's bits, moved to the last two exponent bits and the first
/// significand bit of an f16, are the weight times 2^-14. They are all in the upper byte.
pub(crate) struct WithF16;

impl Activations for WithF16 {
    type Dtype = F16;
    #[cfg(microscale_wgmma)]
    type Wgmma = WgmmaF16;
    const OUTPUT: OutputDtype = OutputDtype::F16;
    const BELOW: i32 = if cfg!(microscale_fp4) { 0 } else { 14 };
    const IN_RANGE: [u32; 2] = [107, 131];
    const LOWERED: [i32; 2] = [7, 3];
    const RAISED: i32 = 0;

    #[cfg(not(microscale_fp4))]
    #[inline(always)]
    fn weights(codes: u32, _: u32) -> [u32; 4] {
        const SIGNS: u32 = 0x8080_8080;
        const MAGNITUDES: u32 = 0x0E0E_0E0E;
        let even = (codes << 4 & SIGNS) | (codes << 1 & MAGNITUDES);
        let odd = (codes & SIGNS) | (codes >> 3 & MAGNITUDES);
        let (first, second) = (0x1404, 0x3424);
        [
            ptx::permute(even, 0, first),
            ptx::permute(even, 0, second),
            ptx::permute(odd, 0, first),
            ptx::permute(odd, 0, second),
        ]
    }

    #[cfg(microscale_fp4)]
    #[inline(always)]
    fn weights(codes: u32, _: u32) -> [u32; 4] {
        super::product_format::e2m1_to_f16_pairs(codes)
    }

    #[inline(always)]
    fn pairs(activations: [u32; 4]) -> [u32; 4] {
        if cfg!(microscale_fp4) { activations } else { even_and_odd(activations) }
    }

    #[inline(always)]
    fn raised(pair: u32) -> u32 {
        pair
    }

    #[inline(always)]
    fn factor(scale: f32) -> u32 {
        ptx::f16x2(scale, scale)
    }

    #[cfg(microscale_sm90)]
    #[inline(always)]
    fn factors(scales: u32) -> [u32; 2] {
        let raised = const { ((15 + Self::BELOW - Self::LOWERED[0]) as u32) << 10 };
        let pair = ptx::multiply_f16x2(ptx::e4m3x2_to_f16x2(scales), raised << 16 | raised);
        [ptx::permute(pair, 0, 0x1010), ptx::permute(pair, 0, 0x3232)]
    }

    #[inline(always)]
    fn scaled(pair: u32, factor: u32) -> u32 {
        ptx::multiply_f16x2(pair, factor)
    }

    #[inline(always)]
    fn rounded(high: f32, low: f32) -> u32 {
        canonical_nan(ptx::f16x2(high, low), F16::NAN_WORD)
    }

    #[inline(always)]
    fn multiply(a: [u32; 4], b: [u32; 2], sums: [f32; SUMS]) -> [f32; SUMS] {
        warp::multiply_f16(a, b, sums)
    }
}

/// Activations in bf16, whose exponent spans both bytes. The lower byte is looked up: 32 times the
/// weight's magnitude, a bf16 with exponent field 0 or 1. The upper byte is the weight's sign.
/// Together they are the weight times 2^-128.
pub(crate) struct WithBf16;

impl Activations for WithBf16 {
    type Dtype = Bf16;
    #[cfg(microscale_wgmma)]
    type Wgmma = WgmmaBf16;
    const OUTPUT: OutputDtype = OutputDtype::Bf16;
    const BELOW: i32 = 128;
    const IN_RANGE: [u32; 2] = [16, 142];
    const LOWERED: [i32; 2] = [14, 16];
    const RAISED: i32 = 104;
    /// The bytes of 0, 0.5, 1 and 1.5.
    const TABLE: u32 = 0x3020_1000;

    #[inline(always)]
    fn weights(codes: u32, table: u32) -> [u32; 4] {
        const SIGNS: u32 = 0x8080_8080;
        // The bytes of 2, 3, 4 and 6.
        const UPPER: u32 = 0xC080_6040;
        let magnitudes = codes & !0x8888_8888;
        let [low, high] = [magnitudes, magnitudes >> 16].map(|codes| ptx::permute(table, UPPER, codes));
        let [even, odd] = [codes << 4 & SIGNS, codes & SIGNS];
        [
            ptx::permute(low, even, 0x5240),
            ptx::permute(high, even, 0x7260),
            ptx::permute(low, odd, 0x5341),
            ptx::permute(high, odd, 0x7361),
        ]
    }

    #[inline(always)]
    fn pairs(activations: [u32; 4]) -> [u32; 4] {
        even_and_odd(activations)
    }

    #[inline(always)]
    fn raised(pair: u32) -> u32 {
        let half = const { ((127 + Self::RAISED) as u32) << 7 };
        ptx::multiply_bf16x2(pair, half << 16 | half)
    }

    #[inline(always)]
    fn factor(scale: f32) -> u32 {
        ptx::bf16x2(scale, scale)
    }

    #[inline(always)]
    fn scaled(pair: u32, factor: u32) -> u32 {
        ptx::multiply_bf16x2(pair, factor)
    }

    #[inline(always)]
    fn rounded(high: f32, low: f32) -> u32 {
        canonical_nan(ptx::bf16x2(high, low), Bf16::NAN_WORD)
    }

    #[inline(always)]
    fn multiply(a: [u32; 4], b: [u32; 2], sums: [f32; SUMS]) -> [f32; SUMS] {
        warp::multiply_bf16(a, b, sums)
    }
}

/// A format of weights: its scales for the tensor cores.
pub(crate) trait WeightFormat: ProductFormat {
    /// The format's index in [`Activations::LOWERED`].
    const INDEX: usize;
    /// True if the tensor cores can multiply with every scale. Then kernels have no slow path for
    /// scales.
    const ALWAYS_IN_RANGE: bool = false;

    /// The offset of a chunk's scale from the first scale in range. Scales below the range have an
    /// offset above [`Self::last_in_range`] too, as the difference wraps. 0 if the format's scales
    /// are always in range.
    #[inline(always)]
    fn scale_offset<D: Activations>(_: u32) -> u32 {
        0
    }

    /// The offset of the last scale in range.
    fn last_in_range<D: Activations>() -> u32 {
        0
    }

    /// The bytes of a chunk's scales with offset 0.
    #[inline(always)]
    fn first_in_range<D: Activations>() -> u32 {
        0
    }

    /// The factors of a chunk's halves, given the bytes of its scales.
    fn factors<D: Activations>(scales: u32) -> [u32; 2];

    /// The scales of a chunk's halves, given their bytes.
    fn halves(scales: u32) -> [f32; 2];

    /// Adds a group to a stream's sum, as the reference does.
    fn add_group(sum: f32, fraction: f32, scale: u8) -> f32;
}

impl WeightFormat for Nvfp4 {
    const INDEX: usize = 0;
    /// The factor of every E4M3 scale is exact, and so are scaled weights: products of a scale and
    /// a weight are multiples of 2^-10 and at most 448 · 6, with at most six significant bits.
    /// [`Activations::LOWERED`] makes them multiples of 2^-17 and at most 21 in f16, which has
    /// multiples of 2^-24, and of 2^-24 and below 1 in bf16. A NaN scale gives NaN, as the
    /// reference does.
    const ALWAYS_IN_RANGE: bool = true;

    #[inline(always)]
    fn factors<D: Activations>(scales: u32) -> [u32; 2] {
        D::factors(scales)
    }

    #[inline(always)]
    fn halves(scales: u32) -> [f32; 2] {
        Self::pair(scales)
    }

    #[inline(always)]
    fn add_group(sum: f32, fraction: f32, scale: u8) -> f32 {
        weights::add_nvfp4::<Ptx>(sum, fraction, E4m3::from_bits(scale))
    }
}

impl WeightFormat for Mxfp4 {
    const INDEX: usize = 1;

    #[inline(always)]
    fn scale_offset<D: Activations>(scales: u32) -> u32 {
        scales.wrapping_sub(D::IN_RANGE[0])
    }

    #[inline(always)]
    fn last_in_range<D: Activations>() -> u32 {
        D::IN_RANGE[1] - D::IN_RANGE[0]
    }

    #[inline(always)]
    fn first_in_range<D: Activations>() -> u32 {
        D::IN_RANGE[0]
    }

    #[inline(always)]
    fn factors<D: Activations>(scales: u32) -> [u32; 2] {
        // A scale out of range is replaced by one in range. Zeros stay zeros.
        let distance = Self::scale_offset::<D>(scales).min(Self::last_in_range::<D>());
        let raised = const { D::IN_RANGE[0] as i32 + D::BELOW - D::LOWERED[1] } as u32;
        [D::factor(f32::from_bits((distance + raised) << 23)); 2]
    }

    /// The scales of a chunk's halves. NaN becomes infinity.
    #[inline(always)]
    fn halves(scale: u32) -> [f32; 2] {
        const LEAST: u32 = 1 << 22;
        [f32::from_bits((scale << 23).max(LEAST)); 2]
    }

    #[inline(always)]
    fn add_group(sum: f32, fraction: f32, scale: u8) -> f32 {
        weights::add_mxfp4::<Ptx>(sum, fraction, E8m0::from_bits(scale))
    }
}

/// Returns whether the tensor cores may multiply a chunk: its scale is in range for the dtype, or
/// all its codes are zeros and its scale is not NaN.
#[inline(always)]
pub(crate) fn is_in_range<F: WeightFormat, D: Activations>(
    CodeChunk { codes: [a, b, c, d], scales }: &CodeChunk,
) -> bool {
    let zeros = (a | b | c | d) & 0x7777_7777 == 0 && *scales != u32::from(E8m0::NAN.to_bits());
    zeros || F::scale_offset::<D>(*scales) <= F::last_in_range::<D>()
}
