//! A block whose scale is searched by the definition.

use super::candidate::{CHAINED, CHAINS, Candidate, Fused, add_term, sum_of_chains};
use super::{Measure, unit};
use crate::block;

/// A block to search the scale of.
#[derive(Clone, Copy, Debug)]
pub struct Block<const N: usize> {
    /// Magnitudes, times the unit.
    magnitudes: [f32; N],
    /// Their squares.
    squares: [f32; N],
    weights: Option<[f32; N]>,
    unit: f32,
    amax: f32,
}

impl<const N: usize> Block<N> {
    /// A block of finite values with weights that are finite and not negative; 1 if there are none.
    #[inline(always)]
    pub fn new(values: &[f32; N], weights: Option<[f32; N]>) -> Self {
        const { assert!(N.is_multiple_of(CHAINED)) };
        let amax_bits = block::amax_bits(values);
        let unit = unit(amax_bits);
        let mut magnitudes = [0.0; N];
        let mut squares = [0.0; N];
        for ((magnitude, square), value) in magnitudes.iter_mut().zip(&mut squares).zip(values) {
            *magnitude = f32::from_bits(value.to_bits() & 0x7FFF_FFFF) * unit;
            *square = *magnitude * *magnitude;
        }
        Self { magnitudes, squares, weights, unit, amax: f32::from_bits(amax_bits) * unit }
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
        let mut rests = [0.0; N];
        for (rest, (a, square)) in rests.iter_mut().zip(self.magnitudes.iter().zip(&self.squares)) {
            *rest = candidate.rest::<M, false>(*a, *square);
        }
        let mut weighted = rests;
        if let Some(weights) = &self.weights {
            weighted.iter_mut().zip(weights).for_each(|(rest, weight)| *rest *= weight);
        }
        let mut error = 0.0;
        for (rests, weighted) in rests.as_chunks::<CHAINED>().0.iter().zip(weighted.as_chunks::<CHAINED>().0)
        {
            let mut chains = [0.0; CHAINS];
            for i in 0..CHAINED {
                chains[i % CHAINS] = M::fma(weighted[i], rests[i], chains[i % CHAINS]);
            }
            error += sum_of_chains(chains);
        }
        error
    }

    #[inline(always)]
    fn most_clipped<M: Fused>(&self, candidate: &Candidate) -> f32 {
        let Some(weights) = &self.weights else {
            return add_term::<M>(candidate.clipped::<M>(self.amax), None, 0.0);
        };
        let mut most = 0.0f32;
        for (a, weight) in self.magnitudes.iter().zip(weights) {
            most = most.max(add_term::<M>(candidate.clipped::<M>(*a), Some(*weight), 0.0));
        }
        most
    }
}
