//! Choosing a block's scale by the squared error that it makes, instead of by amax alone.
//!
//! # The error
//! A block is looked at through a power of two p, so that no square overflows or vanishes: 1, unless its amax
//! is far from that. With a = |x|·p and f = p times what the format multiplies codes with when it dequantizes
//! ([`Scales::factor`]), the error of a scale is
//!
//! ```text
//! Σ w·(a − f·q)²          q the E2M1 magnitude nearest to a / f
//! ```
//!
//! Each step is one operation of f32, products and sums fused ([`Candidate::rest`]), and sixteen terms are
//! added in four chains: element i to chain i mod 4, then (chain 0 + chain 1) + (chain 2 + chain 3); the
//! halves of a block of 32 are added last. So every implementation finds the same scale.
//!
//! The plain scale wins ties, then the smallest scale.
//!
//! # Why the full search skips most scales
//! *Above.* Let s be a scale with 2s a scale too, and no element above 7s. Doubling E2M1's values gives 0, 1,
//! 2, 3, 4, 6, 8, 12, and what is nearest to an element up to 7 among these is at most 6 (or 8, as far from
//! it as 6 is), so nearest among values that s has as well. So s errs no more than 2s in any element, and is
//! the smaller. (As the errors are rounded, it may err more by a rounding.) With m the smallest scale that
//! has no element above 7m, every scale of 2m or more is the double of one that is m or more, if that can be
//! stored; it can unless it is a subnormal E4M3 with an odd last bit, and so all bytes below 16 are looked
//! at.
//!
//! *Below.* Elements above 6s are clipped, and err by what they exceed it. Once that of one element, squared
//! and weighted, exceeds the error of the plain scale, no smaller scale can win. Rounding is monotone, so
//! this holds of the rounded numbers too. Without importance the largest element is the one.
//!
//! Both are elementwise and hold with importance.

mod block;
mod candidate;

use core::ops::RangeInclusive;

pub use block::Block;
pub use candidate::{CHAINED, CHAINS, Candidate, NEAR, add_term, limited, sum_of_chains};

use crate::arithmetic::Fused;
use crate::{E4m3, E8m0, GlobalScale};

/// The choice of a block's scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Search {
    /// The convention's choice: the plain scale.
    #[default]
    None,
    /// The better of the plain scale and the one that the convention gives a block with 1.5 times the amax,
    /// so that the largest element lands on 4 instead of 6 (Transformer Engine and FlashInfer call it four
    /// over six).
    FourSix,
    /// The best of [`WINDOW`] around the plain scale. For NVFP4 this is an approximation of [`Search::Full`];
    /// for MXFP4 it is the same, except under [`ScaleRule::Ceil`](crate::ScaleRule::Ceil) or with importance.
    Window,
    /// The best of all scales that can be stored.
    Full,
}

/// The bytes that a window search looks at, from the plain one on: so many below and above.
pub const WINDOW: (u8, u8) = (2, 6);

/// The block scales of a format.
pub trait Scales {
    /// The smallest byte of a scale that is not 0.
    const FIRST: u8;
    /// The largest byte of a scale.
    const LAST: u8;
    /// Bytes below this may have no half.
    const UNHALVED: u8;
    /// Bytes from a scale to its double, where it has one.
    const OCTAVE: u8;

    /// The factor that codes under a scale are multiplied with.
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

/// The distance from 1, in powers of two, within which a block's amax lets errors be computed as it stands:
/// squares neither overflow nor vanish beside each other.
pub const FAR: u32 = 40;

/// The power of two that a block is looked at through, from the bits of its finite amax: 1, or if that is
/// [far](FAR) from 1, what brings it into [1, 2), as far as powers of two go.
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
    /// Scales whose error was computed, the plain one among them.
    pub tried: u32,
}

/// A block whose scale is searched.
pub trait Measure {
    /// The power of two that it is looked at through.
    fn unit(&self) -> f32;

    /// Its amax, times the unit.
    fn amax(&self) -> f32;

    /// The error of a factor that codes are multiplied with, in squares of the unit.
    fn error<M: Fused>(&self, factor: f32) -> f32;

    /// The most that a candidate's clipping takes from an element, as its term of the error.
    fn most_clipped<M: Fused>(&self, candidate: &Candidate) -> f32;

    /// The search for the scale. `plain` is the convention's byte, `larger` what it would be for 1.5 times
    /// the amax.
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
                // In ascending order, so that of equals the smallest wins.
                if error < least {
                    (found.byte, least) = (byte, error);
                }
            }
            byte += 1;
        }
        found
    }

    /// The bytes of the scales to try, given the plain one's error.
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

    /// The first and the last byte of the scales that can win against the plain one with its error.
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

/// Elements up to so many scales are as near to 8 as to 6, or nearer to 6.
pub const REACH: f32 = 7.0;

/// The largest byte that can win where `least` is the smallest scale that [reaches](REACH) the amax.
#[inline(always)]
pub fn last_to_try<S: Scales>(least: u8) -> u8 {
    (least.saturating_add(S::OCTAVE) - 1).max(S::UNHALVED - 1).min(S::LAST)
}

/// The first and the last byte of a window search.
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

    /// Numbers between 0 and 1 that look random.
    pub(crate) fn numbers(mut seed: u32) -> impl FnMut() -> f32 {
        move || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 24) as f32
        }
    }

    #[test]
    fn the_example_of_a_smaller_power_of_two() {
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
        // Both 1 and 2 err by nothing.
        let block = Block::new(&[2.0; 32], None);
        for plain in [127, 128] {
            assert_eq!(block.search::<Hosts, _>(Search::Window, &PowersOfTwo, plain, plain).byte, plain);
        }
        // Among other equal scales the smallest wins: ½, 1, 2 and 4 err by nothing, 8 makes zeros of them.
        assert_eq!(block.search::<Hosts, _>(Search::Full, &PowersOfTwo, 130, 130).byte, 126);
    }

    #[test]
    fn what_is_skipped_cannot_win() {
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
