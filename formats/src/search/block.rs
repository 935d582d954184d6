//! A block in registers, whose scale the CPU searches.

use super::candidate::{CHAINED, CHAINS, Candidate, Fused, add_term, sum_of_chains};
use super::{Found, Measure, Scales, Search, unit};
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

    /// The errors of several factors at once, the smallest first: the same, with lanes for factors instead of elements.
    #[inline(always)]
    pub fn errors<M: Fused, const L: usize>(&self, factors: [f32; L]) -> [f32; L] {
        let candidates = factors.map(|factor| Candidate::new(factor, self.unit));
        if self.amax <= Candidate::NEAR * candidates[0].factor {
            self.errors_of::<M, L, true>(&candidates)
        } else {
            self.errors_of::<M, L, false>(&candidates)
        }
    }

    #[inline(always)]
    fn errors_of<M: Fused, const L: usize, const NEAR: bool>(&self, candidates: &[Candidate; L]) -> [f32; L] {
        let mut errors = [0.0; L];
        for first in (0..N).step_by(CHAINED) {
            let mut chains = [[0.0; L]; CHAINS];
            for i in 0..CHAINED {
                let (a, square) = (self.magnitudes[first + i], self.squares[first + i]);
                let weight = self.weights.as_ref().map(|weights| weights[first + i]);
                let chain = &mut chains[i % CHAINS];
                for (sum, candidate) in chain.iter_mut().zip(candidates) {
                    *sum = add_term::<M>(candidate.rest::<M, NEAR>(a, square), weight, *sum);
                }
            }
            for (lane, error) in errors.iter_mut().enumerate() {
                *error += sum_of_chains(chains.map(|chain| chain[lane]));
            }
        }
        errors
    }

    /// [`Measure::search`], `L` scales at a time, which changes nothing but the speed.
    #[inline(always)]
    pub fn search_by<M: Fused, S: Scales, const L: usize>(
        &self,
        search: Search,
        scales: &S,
        plain: u8,
        larger: u8,
    ) -> Found {
        let plain_error = self.error::<M>(scales.factor(plain));
        let span = self.span::<M, S>(search, scales, plain_error, plain, larger);
        let mut found = Found { byte: plain, tried: 1 };
        let mut least = plain_error;
        let mut see = |byte, error| {
            // In ascending order, so that of equals the smallest wins; the plain one never wins against itself.
            if error < least {
                (found.byte, least) = (byte, error);
            }
        };
        let candidates = span.clone().count() as u32;
        found.tried += candidates - u32::from(span.contains(&plain));
        // Few are faster one by one.
        if candidates <= 4 {
            span.filter(|byte| *byte != plain)
                .for_each(|byte| see(byte, self.error::<M>(scales.factor(byte))));
            return found;
        }
        let (mut next, last) = (u32::from(*span.start()), *span.end());
        while next <= u32::from(last) {
            let mut bytes = [0; L];
            for (byte, ahead) in bytes.iter_mut().zip(next..) {
                // Past the end the last once more, which does not win again.
                *byte = ahead.min(u32::from(last)) as u8;
            }
            let errors = self.errors::<M, L>(bytes.map(|byte| scales.factor(byte)));
            bytes.into_iter().zip(errors).for_each(|(byte, error)| see(byte, error));
            next += L as u32;
        }
        found
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
        let candidate = Candidate::new(factor, self.unit);
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
