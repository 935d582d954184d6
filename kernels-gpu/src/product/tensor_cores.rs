//! The operands of the tensor cores: weights brought to the dtype of the activations, and their scales.

use microscale_formats::plan::power_of_two;
use microscale_formats::{E4m3, E8m0, weights};
use microscale_formats::Dtype as OutputDtype;

use super::format::{Format, Mxfp4, Nvfp4};
use crate::arithmetic::Ptx;
use crate::dtype::{Bf16, Dtype, F16};
use crate::{ptx, warp};

/// A lane's sums of a tile.
pub(crate) const SUMS: usize = 4;

/// A dtype of activations.
pub(crate) trait Activations {
    type Dtype: Dtype;
    const OUTPUT: OutputDtype;
    /// The exponent by which [`Self::weights`] are too low.
    const BELOW: i32;
    /// The first and the last exponent of MXFP4 scales under which scaled weights are exact.
    const USUAL: [u32; 2];
    /// The exponents by which scaled weights are lowered so that they fit, in NVFP4 and in MXFP4.
    const LOWERED: [i32; 2];
    /// The exponent by which [`Self::raised`] activations are too high.
    const RAISED: i32;

    /// The table that [`Self::weights`] takes.
    const TABLE: u32 = 0;

    /// Decodes eight weights to four pairs.
    fn weights(codes: u32, table: u32) -> [u32; 4];

    /// Arranges eight activations in the pairs that [`Self::weights`] makes.
    fn pairs(activations: [u32; 4]) -> [u32; 4];

    /// Raises a pair of activations that is multiplied with weights that are too low.
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

/// Arranges eight activations in four pairs: those with even numbers first, those with odd ones after them.
#[inline(always)]
fn even_and_odd([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    let (even, odd) = (0x5410, 0x7632);
    [ptx::permute(a, b, even), ptx::permute(c, d, even), ptx::permute(a, b, odd), ptx::permute(c, d, odd)]
}

/// A rounded pair of values with the canonical NaN, two of which are in `nan`: conversions give the largest positive bits for NaN,
/// and those of all numbers are below the canonical one's.
#[inline(always)]
fn canonical_nan(pair: u32, nan: u32) -> u32 {
    ptx::min_signed_16x2(pair, nan)
}

/// Activations in f16. A weight's bits, moved to where f16 has an exponent's last two bits and a
/// significand's first, are the weight times 2^-14. They fill the upper byte of the f16.
pub(crate) struct WithF16;

impl Activations for WithF16 {
    type Dtype = F16;
    const OUTPUT: OutputDtype = OutputDtype::F16;
    const BELOW: i32 = if cfg!(microscale_fp4) { 0 } else { 14 };
    const USUAL: [u32; 2] = [107, 131];
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
        super::decode::pairs(codes)
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

/// Activations in bf16, whose exponents lie across its bytes. 16 times twice a weight's magnitude is looked
/// up and is the lower byte, which is a number below the second exponent; the weight's sign is the upper
/// byte. That makes the weight times 2^-128.
pub(crate) struct WithBf16;

impl Activations for WithBf16 {
    type Dtype = Bf16;
    const OUTPUT: OutputDtype = OutputDtype::Bf16;
    const BELOW: i32 = 128;
    const USUAL: [u32; 2] = [16, 142];
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

/// The scales of a format of weights.
pub(crate) trait Weights: Format {
    /// The format's index in [`Activations::LOWERED`].
    const INDEX: usize;

    /// The distance of a chunk's scale from the first usual one, if a format has unusual ones. Scales below
    /// it have a distance above the last usual one's, too, because the difference wraps.
    #[inline(always)]
    fn distance<D: Activations>(_: u32) -> u32 {
        0
    }

    /// The largest distance of a usual scale.
    fn farthest<D: Activations>() -> u32 {
        0
    }

    /// The scales of a chunk, as bytes, whose distance is 0.
    #[inline(always)]
    fn first_usual<D: Activations>() -> u32 {
        0
    }

    /// The factors of a chunk's halves, given the bytes of its scales.
    fn factors<D: Activations>(scales: u32) -> [u32; 2];

    /// The scales of a chunk's halves, given their bytes.
    fn halves(scales: u32) -> [f32; 2];

    /// Adds a group to a stream's sum by the definition.
    fn add_group(sum: f32, fraction: f32, scale: u8) -> f32;
}

impl Weights for Nvfp4 {
    const INDEX: usize = 0;

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

impl Weights for Mxfp4 {
    const INDEX: usize = 1;

    #[inline(always)]
    fn distance<D: Activations>(scales: u32) -> u32 {
        scales.wrapping_sub(D::USUAL[0])
    }

    #[inline(always)]
    fn farthest<D: Activations>() -> u32 {
        D::USUAL[1] - D::USUAL[0]
    }

    #[inline(always)]
    fn first_usual<D: Activations>() -> u32 {
        D::USUAL[0]
    }

    #[inline(always)]
    fn factors<D: Activations>(scales: u32) -> [u32; 2] {
        // An unusual scale is replaced by some number, under which zeros stay zeros.
        let distance = Self::distance::<D>(scales).min(Self::farthest::<D>());
        let raised = const { D::USUAL[0] as i32 + D::BELOW - D::LOWERED[1] } as u32;
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
