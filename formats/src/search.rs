//! Chooses a block's scale by its squared error instead of by amax.
//!
//! # The error
//! Values are first multiplied by a power of two p, the block's unit, so that no square overflows
//! or vanishes. p is 1 unless the block's amax is far from 1. Let a = |x|·p, and let f be p times
//! the factor that dequantizes codes ([`Scales::factor`]). The error of a scale is
//!
//! ```text
//! Σ w·(a − f·q)²          q the E2M1 magnitude nearest to a / f
//! ```
//!
//! Each step is one f32 operation, with products and sums fused ([`Candidate::rest`]). Sixteen
//! terms are added in four chains: element i goes to chain i mod 4, and the result is (chain 0 +
//! chain 1) + (chain 2 + chain 3). The two halves of a block of 32 are added last. This fixed order
//! makes every implementation find the same scale.
//!
//! The plain scale wins ties, then the smallest scale.
//!
//! # Why the full search skips most scales
//! *Above.* Let s be a scale such that 2s is a scale too and no element is above 7s. The values
//! under 2s are 0, 1, 2, 3, 4, 6, 8 and 12 times s. The nearest of these to an element up to 7s is
//! at most 6s (or 8s, which is as far away as 6s). Every such value exists under s as well. So the
//! error of s is not larger than the error of 2s in any element, and s is the smaller scale. (After
//! rounding, its error may be larger by a rounding.) Let m be the smallest scale such that no
//! element is above 7m. Every scale of 2m or more is the double of a scale of m or more, provided
//! that half of it can be stored. Only a subnormal E4M3 with an odd last bit has no such half, so
//! all bytes below 16 are tried.
//!
//! *Below.* Elements above 6s are clipped, and each loses at least its excess over 6s. Once the
//! squared and weighted excess of one element is larger than the error of the plain scale, no
//! smaller scale can win. Rounding is monotone, so this holds for the rounded numbers too. Without
//! importance, the largest element determines this bound.
//!
//! Both arguments are elementwise and hold with importance.

mod block;
mod candidate;
pub mod gptq;

use core::ops::RangeInclusive;

pub use block::Block;
pub use candidate::{CHAINED, CHAINS, Candidate, NEAR, add_term, limited, sum_of_chains};

use crate::arithmetic::Fused;
use crate::{E4m3, E8m0, GlobalScale};

/// How a block's scale is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Search {
    /// The plain scale, as the numerics choose it.
    #[default]
    None,
    /// The better of the plain scale and the plain scale for 1.5 times the amax.
    ///
    /// The second maps the largest element to 4 instead of 6. Transformer Engine and FlashInfer
    /// call this four over six.
    FourSix,
    /// The best of [`WINDOW`] around the plain scale.
    ///
    /// For NVFP4 this approximates [`Search::Full`]. For MXFP4 it is the same, except under
    /// [`ScaleRule::Ceil`](crate::ScaleRule::Ceil) or with importance.
    Window,
    /// The best of all scales that can be stored.
    Full,
}

/// Range of a window search: number of bytes below and above the plain one.
pub const WINDOW: (u8, u8) = (2, 6);

/// The block scales of a format.
pub trait Scales {
    /// The smallest scale byte other than 0.
    const FIRST: u8;
    /// The largest scale byte.
    const LAST: u8;
    /// The scales of bytes below this may have no byte for half their value.
    const UNHALVED: u8;
    /// Distance in bytes from a scale to its double, where that exists.
    const OCTAVE: u8;

    /// Returns the factor that dequantizes codes under a scale.
    fn factor(&self, byte: u8) -> f32;
}

impl Scales for Option<GlobalScale> {
    const FIRST: u8 = E4m3::MIN_POSITIVE.to_bits();
    const LAST: u8 = 0x7E;
    const UNHALVED: u8 = 0x10;
    const OCTAVE: u8 = 8;

    #[inline(always)]
    fn factor(&self, byte: u8) -> f32 {
        let scale = E4m3::from_bits(byte);
        self.map_or(scale.to_f32(), |global| global.factor(scale))
    }
}

/// The scales of the MX formats.
#[derive(Clone, Copy, Debug)]
pub struct PowersOfTwo;

impl Scales for PowersOfTwo {
    const FIRST: u8 = 0;
    const LAST: u8 = 254;
    const UNHALVED: u8 = 1;
    const OCTAVE: u8 = 1;

    #[inline(always)]
    fn factor(&self, byte: u8) -> f32 {
        E8m0::from_bits(byte).to_f32()
    }
}

/// Exponent range of amax, around 1, where errors are computed without a unit.
///
/// Within it, squares neither overflow nor vanish next to each other.
pub const FAR: u32 = 40;

/// Returns a block's unit, the power of two that multiplies it, from the bits of its finite amax.
///
/// It is 1 unless amax is [far](FAR) from 1. Then it maps amax into [1, 2), as far as powers of two
/// reach.
#[inline(always)]
pub const fn unit(amax_bits: u32) -> f32 {
    if is_near(amax_bits) {
        return 1.0;
    }
    let exponent = amax_bits >> 23;
    let exponent = if exponent < 1 { 1 } else { exponent };
    let exponent = if exponent > 253 { 253 } else { exponent };
    f32::from_bits((254 - exponent) << 23)
}

/// Returns whether an amax, given by its bits, is not [far](FAR) from 1.
#[inline(always)]
pub const fn is_near(amax_bits: u32) -> bool {
    amax_bits.wrapping_sub((127 - FAR) << 23) < (2 * FAR) << 23
}

/// The result of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    /// The scale's byte.
    pub byte: u8,
    /// Number of scales whose error was computed, including the plain one.
    pub tried: u32,
}

/// A block whose scale is searched.
pub trait Measure {
    /// Returns the power of two that multiplied the block.
    fn unit(&self) -> f32;

    /// Returns the block's amax times the unit.
    fn amax(&self) -> f32;

    /// Returns the error of a dequantization factor, in squares of the unit.
    fn error<M: Fused>(&self, factor: f32) -> f32;

    /// Returns the largest error term that clipping causes in one element under a candidate.
    fn most_clipped<M: Fused>(&self, candidate: &Candidate) -> f32;

    /// Searches the scale. `plain` is the plain byte, `larger` the plain byte for 1.5 times the
    /// amax.
    #[inline(always)]
    fn search<M: Fused, S: Scales>(&self, search: Search, scales: &S, plain: u8, larger: u8) -> Found {
        let mut least = self.error::<M>(scales.factor(plain));
        let mut found = Found { byte: plain, tried: 1 };
        let span = self.span::<M, S>(search, scales, least, plain, larger);
        let mut byte = *span.start();
        while byte <= *span.end() {
            if byte != plain {
                let error = self.error::<M>(scales.factor(byte));
                found.tried += 1;
                // Bytes ascend, so the smallest of equal scales wins.
                if error < least {
                    (found.byte, least) = (byte, error);
                }
            }
            byte += 1;
        }
        found
    }

    /// Returns the bytes of the scales to try, given the plain scale's error.
    #[inline(always)]
    fn span<M: Fused, S: Scales>(
        &self,
        search: Search,
        scales: &S,
        plain_error: f32,
        plain: u8,
        larger: u8,
    ) -> RangeInclusive<u8> {
        // A block of zeros keeps its scale.
        if search == Search::None || self.amax() == 0.0 {
            return RangeInclusive::new(1, 0);
        }
        if search == Search::FourSix {
            return larger..=larger;
        }
        let (first, last) = self.bounds::<M, S>(scales, plain_error, plain);
        if search == Search::Full {
            return first..=last;
        }
        let (low, high) = window::<S>(plain);
        first.max(low)..=last.min(high)
    }

    /// Returns the first and the last byte that can win against the plain scale's error.
    #[inline(always)]
    fn bounds<M: Fused, S: Scales>(&self, scales: &S, plain_error: f32, plain: u8) -> (u8, u8) {
        let at = |byte: u8| Candidate::new::<M>(scales.factor(byte), self.unit());
        let reaches = |byte: u8| REACH * at(byte).factor >= self.amax();
        let mut least = plain.clamp(S::FIRST, S::LAST);
        while least > S::FIRST && reaches(least - 1) {
            least -= 1;
        }
        while least < S::LAST && !reaches(least) {
            least += 1;
        }
        let mut first = least;
        while first > S::FIRST && self.most_clipped::<M>(&at(first - 1)) <= plain_error {
            first -= 1;
        }
        (first, last_to_try::<S>(least))
    }
}

/// Elements of at most this many scales are as near to code value 6 as to 8, or nearer.
pub const REACH: f32 = 7.0;

/// Returns the largest byte that can win if `least` is the smallest scale that [reaches](REACH)
/// amax.
#[inline(always)]
pub fn last_to_try<S: Scales>(least: u8) -> u8 {
    (least.saturating_add(S::OCTAVE) - 1).max(S::UNHALVED - 1).min(S::LAST)
}

/// Returns the first and the last byte of a window search.
#[inline(always)]
pub fn window<S: Scales>(plain: u8) -> (u8, u8) {
    let (below, above) = if S::OCTAVE == 1 { (1, 1) } else { WINDOW };
    (plain.saturating_sub(below).max(S::FIRST), plain.saturating_add(above).min(S::LAST))
}

#[cfg(test)]
pub(crate) mod tests {
    extern crate std;

    use super::*;

    pub(crate) struct Hosts;

    impl Fused for Hosts {
        fn fma(a: f32, b: f32, c: f32) -> f32 {
            a.mul_add(b, c)
        }
    }

    /// Returns pseudo-random numbers between 0 and 1.
    pub(crate) fn numbers(mut seed: u32) -> impl FnMut() -> f32 {
        move || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 24) as f32
        }
    }

    #[test]
    fn a_smaller_power_of_two_can_win() {
        let mut values = [0.25; 32];
        values[0] = 4.0;
        let block = Block::new(&values, None);
        // 1 is the plain scale: 4 is code 6.
        let error = |byte| block.error::<Hosts>(PowersOfTwo.factor(byte));
        assert_eq!([126, 127, 128].map(error), [1.0, 1.9375, 1.9375]);
        let found = block.search::<Hosts, _>(Search::Full, &PowersOfTwo, 127, 127);
        assert_eq!(found, Found { byte: 126, tried: 2 });
    }

    #[test]
    fn the_plain_scale_wins_ties() {
        // The scales 1 and 2 have no error.
        let block = Block::new(&[2.0; 32], None);
        for plain in [127, 128] {
            assert_eq!(block.search::<Hosts, _>(Search::Window, &PowersOfTwo, plain, plain).byte, plain);
        }
        // Among other equal scales the smallest wins: ½, 1, 2 and 4 have no error, and 8 gives
        // zeros.
        assert_eq!(block.search::<Hosts, _>(Search::Full, &PowersOfTwo, 130, 130).byte, 126);
    }

    #[test]
    fn skipped_scales_cannot_win() {
        let mut number = numbers(1);
        let scales = None::<GlobalScale>;
        let mut tried = 0;
        for round in 0..3000 {
            let spread = [1.0, 0.1, 0.01][round % 3];
            let mut values = [0.0f32; 16];
            for value in &mut values {
                let shape = number() * 2.0 - 1.0;
                *value =
                    if number() < 0.2 { shape } else { shape * spread } * [1.0, 0.1, 0.04, 300.0][round % 4];
            }
            let importance = (round % 2 == 1).then(|| [(); 16].map(|()| number()));
            let block = Block::new(&values, importance);
            let plain = E4m3::from_f32(block.amax() / block.unit() / 6.0).to_bits();
            let found = block.search::<Hosts, _>(Search::Full, &scales, plain, plain);
            tried += found.tried;
            let least = block.error::<Hosts>(scales.factor(found.byte));
            for byte in 1..=0x7E {
                let error = block.error::<Hosts>(scales.factor(byte));
                assert!(error >= least * (1.0 - 1e-6), "{byte:#x} errs by {error}, {found:?} by {least}");
            }
        }
        assert!(tried < 20 * 3000, "{tried} scales tried");
    }
}
