//! How weights and activations of a dtype meet in the tensor cores.

use microscale_formats::plan::power_of_two;
use microscale_formats::{E4m3, E8m0, weights};
use microscale_kernels_abi::Dtype as OutputDtype;

use super::format::{Format, Mxfp4, Nvfp4};
use crate::arithmetic::Ptx;
use crate::dtype::{Bf16, Dtype, F16};
use crate::{ptx, warp};

/// Sums that a lane has of a tile.
pub(crate) const SUMS: usize = 4;

/// A dtype of activations.
pub(crate) trait Activations {
    type Dtype: Dtype;
    const OUTPUT: OutputDtype;
    /// By how many powers of two [`Self::weights`] are too low.
    const BELOW: i32;
    /// The exponents of MXFP4 scales under which scaled weights are exact, the first and the last.
    const USUAL: [u32; 2];
    /// Scaled weights are lower by this power of two, in NVFP4 and in MXFP4, so that they fit.
    const LOWERED: [i32; 2];
    /// By how many powers of two [`Self::raised`] activations are too high.
    const RAISED: i32;

    /// What [`Self::weights`] is to be given.
    const TABLE: u32 = 0;

    /// Eight weights in four pairs.
    fn weights(codes: u32, table: u32) -> [u32; 4];

    /// Eight activations in the pairs that [`Self::weights`] makes.
    fn pairs(activations: [u32; 4]) -> [u32; 4];

    /// A pair of activations to be multiplied with weights that are too low.
    fn raised(pair: u32) -> u32;

    /// A factor in both halves.
    fn factor(scale: f32) -> u32;

    /// The factors for two scales of NVFP4, given as bytes.
    #[inline(always)]
    fn factors(scales: u32) -> [u32; 2] {
        let [low, high] = Nvfp4::pair(scales);
        let raised = power_of_two(Self::BELOW - Self::LOWERED[0]);
        [Self::factor(low * raised), Self::factor(high * raised)]
    }

    /// A pair under a factor.
    fn scaled(pair: u32, factor: u32) -> u32;

    /// sums + a · b.
    fn multiply(a: [u32; 4], b: [u32; 2], sums: [f32; SUMS]) -> [f32; SUMS];
}

/// Eight activations in four pairs: of those with even numbers and of those with odd ones.
#[inline(always)]
fn even_and_odd([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    let (even, odd) = (0x5410, 0x7632);
    [ptx::permute(a, b, even), ptx::permute(c, d, even), ptx::permute(a, b, odd), ptx::permute(c, d, odd)]
}

/// With f16: a weight's bits, moved to where f16 has an exponent's last two bits and a significand's first, are the
/// weight times 2^-14. Its byte is the upper one of the f16.
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
    fn multiply(a: [u32; 4], b: [u32; 2], sums: [f32; SUMS]) -> [f32; SUMS] {
        warp::multiply_f16(a, b, sums)
    }
}

/// With bf16, whose exponents lie across its bytes: 16 times twice a weight's magnitude is looked up and is the lower
/// byte, which below the second exponent is a number; its sign is the upper one. That is the weight times 2^-128.
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
    fn multiply(a: [u32; 4], b: [u32; 2], sums: [f32; SUMS]) -> [f32; SUMS] {
        warp::multiply_bf16(a, b, sums)
    }
}

/// A format's scales.
pub(crate) trait Weights: Format {
    /// Where in [`Activations::LOWERED`] it is.
    const PLACE: usize;

    /// How far a chunk's scale is from the first that is to be used, if there are others: above the last one's distance
    /// for those below, too.
    #[inline(always)]
    fn distance<D: Activations>(_: u32) -> u32 {
        0
    }

    /// The largest distance of a scale that is to be used.
    fn farthest<D: Activations>() -> u32 {
        0
    }

    /// The factors of a chunk's halves, given the bytes of its scales.
    fn factors<D: Activations>(scales: u32) -> [u32; 2];

    /// The scales of a chunk's halves, given their bytes.
    fn halves(scales: u32) -> [f32; 2];

    /// A stream's sum and a group by the definition.
    fn add_group(sum: f32, fraction: f32, scale: u8) -> f32;
}

impl Weights for Nvfp4 {
    const PLACE: usize = 0;

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
    const PLACE: usize = 1;

    #[inline(always)]
    fn distance<D: Activations>(scales: u32) -> u32 {
        scales.wrapping_sub(D::USUAL[0])
    }

    #[inline(always)]
    fn farthest<D: Activations>() -> u32 {
        D::USUAL[1] - D::USUAL[0]
    }

    #[inline(always)]
    fn factors<D: Activations>(scales: u32) -> [u32; 2] {
        // Some number under which zeros stay zeros, if the scale is not to be used.
        let distance = Self::distance::<D>(scales).min(Self::farthest::<D>());
        let raised = const { D::USUAL[0] as i32 + D::BELOW - D::LOWERED[1] } as u32;
        [D::factor(f32::from_bits((distance + raised) << 23)); 2]
    }

    /// Infinite in the place of NaN.
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
