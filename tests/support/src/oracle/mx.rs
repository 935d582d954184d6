//! The MX formats in f64. All values, scales and quotients are exact, so only the codes are
//! rounded.

use microscale::formats::{NegativeZero, ScaleRule, Ties};

use super::Block;
use super::element::{E4M3, E5M2, MAGNITUDES, nearest, power_of_two};

/// Elements of a block.
pub const BLOCK: usize = 32;

/// An element format, with the facts that scale rules need.
#[derive(Debug)]
pub struct MxElement {
    /// Magnitudes by code.
    magnitudes: &'static [f64],
    /// The largest power of two among the magnitudes.
    power: f64,
    /// The sign bit of a code.
    sign: u8,
}

impl MxElement {
    /// MXFP4's element.
    pub fn e2m1() -> Self {
        Self { magnitudes: &MAGNITUDES, power: 4.0, sign: 8 }
    }

    /// MXFP8's E4M3 element.
    pub fn e4m3() -> Self {
        Self { magnitudes: &E4M3, power: 256.0, sign: 128 }
    }

    /// MXFP8's E5M2 element.
    pub fn e5m2() -> Self {
        Self { magnitudes: &E5M2, power: 32768.0, sign: 128 }
    }

    /// Returns the smallest amax for which `even` uses the next scale.
    ///
    /// It is halfway between the power and the magnitude below it.
    pub fn even_from(&self) -> f64 {
        let below =
            self.magnitudes.iter().rfind(|magnitude| **magnitude < self.power).expect("there are some");
        (below + self.power) / 2.0
    }

    /// Returns the largest power of two.
    pub fn power(&self) -> f64 {
        self.power
    }

    /// Returns the largest magnitude.
    pub fn largest(&self) -> f64 {
        self.magnitudes[self.magnitudes.len() - 1]
    }

    /// Returns the scale exponent of a block with this finite `amax` > 0, before clamping.
    ///
    /// - floor: 2^k is the exponent of amax less the exponent of the largest element: power·2^k ≤
    ///   amax < 2·power·2^k.
    /// - ceil: the same, rounded up unless amax is a power of two.
    /// - even: amax rounded half up to the element's mantissa, then floor.
    /// - rceil: the smallest 2^k ≥ amax / largest.
    pub fn scale_exponent(&self, amax: f64, rule: ScaleRule) -> i32 {
        // The smallest f32 is 2^-149, and the largest power here is 2^15.
        let mut exponents = -170..=127;
        let found = match rule {
            ScaleRule::Floor => exponents.rfind(|k| self.power * power_of_two(*k) <= amax),
            ScaleRule::Ceil => exponents.find(|k| self.power * power_of_two(*k) >= amax),
            ScaleRule::Even => exponents.rfind(|k| self.even_from() * power_of_two(*k) <= amax),
            ScaleRule::Rceil => exponents.find(|k| self.largest() * power_of_two(*k) >= amax),
        };
        found.expect("amax is positive and finite")
    }

    /// Returns the code of a finite element.
    pub fn code(&self, value: f64, scale: f64, ties: Ties, negative_zero: NegativeZero) -> u8 {
        let magnitude = nearest(self.magnitudes, (value / scale).abs(), ties);
        let negative = super::is_negative(magnitude, value, negative_zero);
        magnitude | if negative { self.sign } else { 0 }
    }

    /// Quantizes a block of finite elements.
    pub(super) fn quantize(
        &self,
        block: &[f64],
        rule: ScaleRule,
        ties: Ties,
        negative_zero: NegativeZero,
    ) -> Block {
        let amax = block.iter().fold(0.0, |amax: f64, value| amax.max(value.abs()));
        let exponent = if amax == 0.0 { -127 } else { self.scale_exponent(amax, rule) };
        let clamped = exponent.clamp(-127, 127);
        let scale = power_of_two(clamped);
        let codes: Vec<u8> =
            block.iter().map(|value| self.code(*value, scale, ties, negative_zero)).collect();
        Block {
            scale: u8::try_from(clamped + 127).expect("clamped"),
            clipped: amax > self.largest() * scale,
            flushed: amax > 0.0 && codes.iter().all(|code| code & !self.sign == 0),
            scale_saturated: clamped != exponent,
            codes,
        }
    }
}

/// Returns the value of a scale byte. 255 is NaN.
pub fn scale_value(byte: u8) -> f64 {
    if byte == 255 { f64::NAN } else { power_of_two(i32::from(byte) - 127) }
}
