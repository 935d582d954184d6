//! Choosing a block's scale by the squared error that it makes, instead of by amax alone.
//!
//! # The error
//! A block is looked at through a power of two p that brings its amax into [1, 2), so that no square overflows or vanishes. With
//! a = |x|·p and f = p times what the format multiplies codes with when it dequantizes ([`Scales::factor`]), the error of a scale is
//!
//! ```text
//! Σ w·(a − f·q)²          q the E2M1 magnitude nearest to a·(1/f), ties to even
//! ```
//!
//! Every step is rounded to f32 once, and terms are added in pairs: neighbours, then neighbouring sums, and so on. So every
//! implementation finds the same scale. (1/f is rounded by itself; where a·(1/f) is so close to a midpoint that a convention's quotient
//! is rounded to the other side, both codes are as far from a.)
//!
//! The plain scale wins ties, then the smallest scale.
//!
//! # Why the full search skips most scales
//! *Above.* Let s be a scale with 2s a scale too, and no element above 7s. Doubling E2M1's values gives 0, 1, 2, 3, 4, 6, 8, 12, and what
//! is nearest to an element up to 7 among these is at most 6 (or 8, as far from it as 6 is), so nearest among values that s has as well. So
//! s errs no more than 2s in any element, and is the smaller. With m the smallest scale that has no element above 7m, every scale of
//! 2m or more is the double of one that is m or more, if that can be stored; it can unless it is a subnormal E4M3 with an odd last bit,
//! and so all bytes below 16 are looked at.
//!
//! *Below.* Elements above 6s are clipped, and err by what they exceed it. Once that of one element, squared and weighted, exceeds the
//! error of the plain scale, no smaller scale can win. Rounding is monotone, so this holds of the rounded numbers too. Without weights
//! the largest element is the one.
//!
//! Both are elementwise and hold with weights.

use crate::e2m1::{magnitude_code_even, magnitude_value};
use crate::{E4m3, E8m0, GlobalScale, block};

/// How a block's scale is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Search {
    /// By the convention: the plain scale.
    #[default]
    None,
    /// The better of the plain scale and the one that the convention gives a block with 1.5 times the amax, so that the largest element
    /// lands on 4 instead of 6 (Transformer Engine and FlashInfer call it four over six).
    FourSix,
    /// The best of [`WINDOW`] around the plain scale. For NVFP4 this is an approximation of [`Search::Full`].
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

    /// What codes are multiplied with.
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

/// The power of two that brings a finite amax into [1, 2), from its bits, as far as powers of two go.
#[inline(always)]
pub const fn unit(amax_bits: u32) -> f32 {
    let exponent = amax_bits >> 23;
    let exponent = if exponent < 1 { 1 } else { exponent };
    let exponent = if exponent > 253 { 253 } else { exponent };
    f32::from_bits((254 - exponent) << 23)
}

/// A factor as errors take it: times the unit, and far enough from 0 and infinity that a reciprocal exists. (A block under a factor
/// that is not is all zeros or all clipped.)
#[inline(always)]
pub fn unit_factor(factor: f32, unit: f32) -> f32 {
    const FAR: f32 = f32::from_bits((127 + 60) << 23);
    (factor * unit).clamp(1.0 / FAR, FAR)
}

/// The error's term of one element, given its magnitude times the unit.
#[inline(always)]
pub fn term(a: f32, factor: f32, inverse: f32) -> f32 {
    let scaled = a * inverse;
    let code = magnitude_code_even(if scaled < 8.0 { scaled } else { 8.0 });
    let rest = a - factor * magnitude_value(code);
    rest * rest
}

/// The error's term of an element that is clipped; 0 for others.
#[inline(always)]
pub fn clipped(a: f32, factor: f32) -> f32 {
    let rest = (a - 6.0 * factor).max(0.0);
    rest * rest
}

/// A block to search the scale of.
#[derive(Clone, Copy, Debug)]
pub struct Block<const N: usize> {
    /// Magnitudes, times the unit.
    magnitudes: [f32; N],
    weights: Option<[f32; N]>,
    unit: f32,
    amax: f32,
}

/// What a search found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    /// The scale's byte.
    pub byte: u8,
    /// Scales whose error was computed, the plain one among them.
    pub tried: u32,
}

impl<const N: usize> Block<N> {
    /// A block of finite values with weights that are finite and not negative; 1 if there are none.
    #[inline(always)]
    pub fn new(values: &[f32; N], weights: Option<[f32; N]>) -> Self {
        let unit = unit(block::amax_bits(values));
        let mut magnitudes = [0.0; N];
        let mut amax = 0.0f32;
        for (magnitude, value) in magnitudes.iter_mut().zip(values) {
            *magnitude = f32::from_bits(value.to_bits() & 0x7FFF_FFFF) * unit;
            amax = amax.max(*magnitude);
        }
        Self { magnitudes, weights, unit, amax }
    }

    /// The error of a factor that codes are multiplied with, in squares of the unit.
    #[inline(always)]
    pub fn error(&self, factor: f32) -> f32 {
        let factor = unit_factor(factor, self.unit);
        let inverse = 1.0 / factor;
        let mut terms = [0.0; N];
        for (term, a) in terms.iter_mut().zip(&self.magnitudes) {
            *term = self::term(*a, factor, inverse);
        }
        if let Some(weights) = &self.weights {
            terms.iter_mut().zip(weights).for_each(|(term, weight)| *term *= weight);
        }
        let mut count = N;
        while count > 1 {
            count /= 2;
            for i in 0..count {
                terms[i] = terms[2 * i] + terms[2 * i + 1];
            }
        }
        terms[0]
    }

    /// The errors of several factors at once: the same, with lanes for factors instead of elements.
    #[inline(always)]
    pub fn errors<const L: usize>(&self, factors: [f32; L]) -> [f32; L] {
        let factors = factors.map(|factor| unit_factor(factor, self.unit));
        let inverses = factors.map(|factor| 1.0 / factor);
        // Sums of 1, 2, 4 and so on terms that wait for their neighbour. No block has more than 2^7 elements.
        let mut waiting = [[0.0; L]; 8];
        for i in 0..N {
            let (a, weight) = (self.magnitudes[i], self.weights.as_ref().map(|weights| weights[i]));
            let mut sum = [0.0; L];
            for lane in 0..L {
                sum[lane] = term(a, factors[lane], inverses[lane]);
                if let Some(weight) = weight {
                    sum[lane] *= weight;
                }
            }
            let mut level = 0;
            while i >> level & 1 == 1 {
                for lane in 0..L {
                    sum[lane] += waiting[level][lane];
                }
                level += 1;
            }
            waiting[level] = sum;
        }
        waiting[N.ilog2() as usize]
    }

    /// The search for the scale, `L` scales at a time, which changes nothing but the speed. `plain` is the convention's byte, `larger` what
    /// it would be for 1.5 times the amax.
    #[inline(always)]
    pub fn search<const L: usize>(
        &self,
        search: Search,
        scales: &impl Scales,
        plain: u8,
        larger: u8,
    ) -> Found {
        let mut found = Found { byte: plain, tried: 1 };
        if search == Search::None || self.amax == 0.0 {
            return found;
        }
        let plain_error = self.error(scales.factor(plain));
        let (first, last) = match search {
            Search::None | Search::FourSix => (larger, larger),
            Search::Window => Self::window(plain, scales),
            Search::Full => self.bounds(plain_error, scales, plain),
        };
        let mut least = plain_error;
        let mut see = |byte, error| {
            // In ascending order, so that of equals the smallest wins; the plain one never wins against itself.
            if error < least {
                (found.byte, least) = (byte, error);
            }
        };
        // Few are faster one by one.
        let mut next = u32::from(first);
        if last - first < 4 {
            for byte in (first..=last).filter(|byte| *byte != plain) {
                see(byte, self.error(scales.factor(byte)));
            }
            next = u32::from(last) + 1;
        }
        while next <= u32::from(last) {
            let mut bytes = [0; L];
            for (byte, ahead) in bytes.iter_mut().zip(next..) {
                // Past the end the last once more, which does not win again.
                *byte = ahead.min(u32::from(last)) as u8;
            }
            for (byte, error) in bytes.into_iter().zip(self.errors(bytes.map(|byte| scales.factor(byte)))) {
                see(byte, error);
            }
            next += L as u32;
        }
        let with_plain = (first..=last).contains(&plain);
        found.tried += u32::from(last - first) + 1 - u32::from(with_plain);
        found
    }

    #[inline(always)]
    fn window<S: Scales>(plain: u8, _: &S) -> (u8, u8) {
        let (below, above) = if S::OCTAVE == 1 { (1, 1) } else { WINDOW };
        (plain.saturating_sub(below).max(S::FIRST), plain.saturating_add(above).min(S::LAST))
    }

    /// The largest term of an element that a factor clips.
    #[inline(always)]
    fn most_clipped(&self, factor: f32) -> f32 {
        let Some(weights) = &self.weights else { return clipped(self.amax, factor) };
        let mut most = 0.0f32;
        for (a, weight) in self.magnitudes.iter().zip(weights) {
            most = most.max(clipped(*a, factor) * weight);
        }
        most
    }

    /// The first and the last byte of the scales that can win against the plain one with its error.
    #[inline(always)]
    pub fn bounds<S: Scales>(&self, plain_error: f32, scales: &S, plain: u8) -> (u8, u8) {
        let at = |byte: u8| unit_factor(scales.factor(byte), self.unit);
        let reaches = |byte: u8| 7.0 * at(byte) >= self.amax;
        // The smallest scale with no element above 7 of it.
        let mut least = plain.clamp(S::FIRST, S::LAST);
        while least > S::FIRST && reaches(least - 1) {
            least -= 1;
        }
        while least < S::LAST && !reaches(least) {
            least += 1;
        }
        let mut first = least;
        while first > S::FIRST {
            if self.most_clipped(at(first - 1)) > plain_error {
                break;
            }
            first -= 1;
        }
        let last = (least.saturating_add(S::OCTAVE) - 1).max(S::UNHALVED - 1).min(S::LAST);
        (first, last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers between 0 and 1 that look random.
    fn numbers(mut seed: u32) -> impl FnMut() -> f32 {
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
        // 1 is the plain scale: 4 is code 6. 2^-2 of the amax is the unit.
        let error = |byte| block.error(PowersOfTwo.factor(byte)) * 16.0;
        assert_eq!([126, 127, 128].map(error), [1.0, 1.9375, 1.9375]);
        let found = block.search::<1>(Search::Full, &PowersOfTwo, 127, 127);
        assert_eq!(found, Found { byte: 126, tried: 2 });
    }

    #[test]
    fn the_plain_scale_wins_ties() {
        // Both 1 and 2 err by nothing.
        let block = Block::new(&[2.0; 32], None);
        for plain in [127, 128] {
            assert_eq!(block.search::<4>(Search::Window, &PowersOfTwo, plain, plain).byte, plain);
        }
        // Of others the smallest does: ½, 1, 2 and 4 err by nothing, 8 makes zeros of them.
        assert_eq!(block.search::<4>(Search::Full, &PowersOfTwo, 130, 130).byte, 126);
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
            let weights = (round % 2 == 1).then(|| [(); 16].map(|()| number()));
            let block = Block::new(&values, weights);
            let plain = E4m3::from_f32(block.amax / block.unit / 6.0).to_bits();
            let found = block.search::<8>(Search::Full, &scales, plain, plain);
            assert_eq!(found, block.search::<1>(Search::Full, &scales, plain, plain));
            tried += found.tried;
            let least = block.error(scales.factor(found.byte));
            for byte in 1..=0x7E {
                let error = block.error(scales.factor(byte));
                assert!(error >= least * (1.0 - 1e-6), "{byte:#x} errs by {error}, {found:?} by {least}");
            }
        }
        assert!(tried < 20 * 3000, "{tried} scales tried");
    }

    #[test]
    fn lanes_change_nothing() {
        let mut number = numbers(2);
        for _ in 0..200 {
            let values = [(); 32].map(|()| number() * 2.0 - 1.0);
            let block = Block::new(&values, None);
            let factors = [(); 16].map(|()| number());
            assert_eq!(block.errors(factors), factors.map(|factor| block.error(factor)));
        }
    }
}
