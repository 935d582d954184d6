//! Random values to quantize: arbitrary bit patterns, finite or not.

use microscale::Element;

/// A source of pseudo-random numbers.
#[derive(Debug)]
pub struct Numbers(pub fastrand::Rng);

impl Numbers {
    /// Makes a source. The same seed gives the same numbers.
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// Returns a number from a normal distribution.
    pub fn normal(&mut self) -> f64 {
        let (a, b) = (1.0 - self.0.f64(), self.0.f64());
        (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    }
}

/// Returns random bit patterns.
///
/// A few rows contain every magnitude, zeros, subnormals and non-finite values.
pub fn patterns<T: Element>(elements: usize, non_finite: bool, seed: u64) -> Vec<T> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut values = Vec::with_capacity(elements);
    while values.len() < elements {
        // A run of elements shares a magnitude, so that ordinary ratios of amax and element occur
        // at every exponent.
        let exponent = rng.i32(-149..=127);
        let kind = rng.u32(0..8);
        for _ in 0..rng.usize(1..=40) {
            values.push(one(&mut rng, exponent, kind, non_finite));
        }
    }
    values.truncate(elements);
    values
}

fn one<T: Element>(rng: &mut fastrand::Rng, exponent: i32, kind: u32, non_finite: bool) -> T {
    let mantissa = 1.0 + f64::from(rng.u32(0..64)) / 64.0;
    let magnitude = mantissa * 2f64.powi(exponent - rng.i32(0..6));
    let wide = match kind {
        0 if rng.bool() => 0.0,
        1 => f64::from(f32::from_bits(rng.u32(..))),
        _ => magnitude,
    };
    let value = T::from_f32(if rng.bool() { wide as f32 } else { -wide as f32 });
    if non_finite && rng.u32(0..200) == 0 {
        return T::from_f32([f32::NAN, f32::INFINITY, f32::NEG_INFINITY][rng.usize(0..3)]);
    }
    if non_finite || value.to_f32().is_finite() { value } else { T::from_f32(1.0) }
}
