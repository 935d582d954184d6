//! A block whose scale the reference searches.

use super::candidate::{CHAINED, CHAINS, Candidate, add_term, sum_of_chains};
use super::{Measure, unit};
use crate::arithmetic::Fused;
use crate::block;

/// A block whose scale is searched.
#[derive(Clone, Copy, Debug)]
pub struct Block<const N: usize> {
    /// Magnitudes, multiplied by the unit.
    magnitudes: [f32; N],
    importance: Option<[f32; N]>,
    unit: f32,
    amax: f32,
}

impl<const N: usize> Block<N> {
    /// Takes a block of finite values and its importance, or weights of 1 without one.
    ///
    /// Weights must be finite and not negative.
    #[inline(always)]
    pub fn new(values: &[f32; N], importance: Option<[f32; N]>) -> Self {
        const { assert!(N.is_multiple_of(CHAINED)) };
        let amax_bits = block::amax_bits(values);
        let unit = unit(amax_bits);
        let mut magnitudes = [0.0; N];
        for (magnitude, value) in magnitudes.iter_mut().zip(values) {
            *magnitude = f32::from_bits(value.to_bits() & 0x7FFF_FFFF) * unit;
        }
        Self { magnitudes, importance, unit, amax: f32::from_bits(amax_bits) * unit }
    }
}

impl<const N: usize> Measure for Block<N> {
    #[inline(always)]
    fn unit(&self) -> f32 {
        self.unit
    }

    #[inline(always)]
    fn amax(&self) -> f32 {
        self.amax
    }

    #[inline(always)]
    fn error<M: Fused>(&self, factor: f32) -> f32 {
        let candidate = Candidate::new::<M>(factor, self.unit);
        let mut error = 0.0;
        for first in (0..N).step_by(CHAINED) {
            let mut chains = [0.0; CHAINS];
            for i in 0..CHAINED {
                let a = self.magnitudes[first + i];
                let rest = candidate.rest::<M, false>(a, a * a);
                let weight = self.importance.map(|importance| importance[first + i]);
                chains[i % CHAINS] = add_term::<M>(rest, weight, chains[i % CHAINS]);
            }
            error += sum_of_chains::<M>(chains);
        }
        error
    }

    #[inline(always)]
    fn most_clipped<M: Fused>(&self, candidate: &Candidate) -> f32 {
        let Some(importance) = &self.importance else {
            return add_term::<M>(candidate.clipped::<M>(self.amax), None, 0.0);
        };
        let mut most = 0.0f32;
        for (a, weight) in self.magnitudes.iter().zip(importance) {
            most = most.max(add_term::<M>(candidate.clipped::<M>(*a), Some(*weight), 0.0));
        }
        most
    }
}
