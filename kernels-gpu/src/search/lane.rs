//! The search: each lane goes through the scales that its block may take.

use core::hint::cold_path;
use core::marker::PhantomData;

use microscale_formats::search::{self, CHAINED, CHAINS, Candidate, REACH, Search, add_term, last_to_try};
use microscale_kernels_abi::search::SEARCH_EACH;

use crate::arithmetic::Ptx;
use crate::dtype::Dtype;
use crate::format::{Blocks, Searched};
use crate::hardware::{ptx, warp};

/// Elements that a lane has.
const EACH: usize = SEARCH_EACH as usize;
const _: () = assert!(EACH == CHAINED);

/// An array of something for each number. Written out, lest a loop or a call leave arrays in
/// memory.
macro_rules! each {
    (4, $i:ident => $value:expr) => {
        each!([0, 1, 2, 3], $i => $value)
    };
    (16, $i:ident => $value:expr) => {
        each!([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], $i => $value)
    };
    ([$($number:literal),+], $i:ident => $value:expr) => {
        [$({ let $i: usize = $number; $value }),+]
    };
}
pub(super) use each;

/// Lanes that share a block.
pub(super) const fn lanes<F: Blocks>() -> u32 {
    F::BLOCK / SEARCH_EACH
}

/// Chunks that a lane has.
pub(super) const fn chunks<D: Dtype>() -> u32 {
    SEARCH_EACH / D::CHUNK
}

/// The largest of a block's lanes' numbers, in all of them.
#[inline(always)]
pub(super) fn most<F: Blocks>(number: u32) -> u32 {
    if const { lanes::<F>() } == 2 { number.max(warp::shuffle_xor(number, 1)) } else { number }
}

/// A lane's data for searching a block's scale: [`search::Measure`] for all blocks of a warp at a
/// time, with a unit of 1. All lanes of the warp call every method.
pub(super) struct Lane<F> {
    /// [`Searched::candidates_of_lanes`].
    pub(super) of_lane: (f32, f32),
    /// Magnitudes.
    pub(super) a: [f32; EACH],
    /// The block's amax.
    pub(super) amax: f32,
    pub(super) format: PhantomData<F>,
}

/// The importance of a lane's elements: sixteen weights of errors, on 16 bytes. They are loaded
/// whenever they are needed, lest they take the registers of searches without importance.
#[derive(Clone, Copy)]
pub(super) struct Importance(pub(super) *const f32);

impl Importance {
    /// Loads the importance of four elements.
    #[inline(always)]
    fn four(self, first: usize) -> [f32; 4] {
        // SAFETY: `usual` has seen that all sixteen are in global memory, and nothing writes them
        // during the kernel.
        unsafe { ptx::load_16_here(self.0.add(first).cast()).map(f32::from_bits) }
    }
}

impl<F: Searched> Lane<F> {
    /// A scale's candidate.
    #[inline(always)]
    fn candidate(&self, byte: u32) -> Candidate {
        let (factor, inverse) = F::candidate(self.of_lane, byte);
        Candidate::with_inverse::<Ptx>(factor, inverse)
    }

    /// The error of a scale.
    #[inline(always)]
    fn error(&self, byte: u32, importance: Option<Importance>) -> f32 {
        let candidate = self.candidate(byte);
        let mut chains = [0.0; CHAINS];
        chains = self.add_four(0, chains, &candidate, importance);
        chains = self.add_four(4, chains, &candidate, importance);
        chains = self.add_four(8, chains, &candidate, importance);
        chains = self.add_four(12, chains, &candidate, importance);
        let sum = search::sum_of_chains::<Ptx>(chains);
        if const { lanes::<F>() } == 2 {
            return sum + f32::from_bits(warp::shuffle_xor(sum.to_bits(), 1));
        }
        sum
    }

    /// Adds the terms of four elements to the chains.
    #[inline(always)]
    fn add_four(
        &self,
        first: usize,
        chains: [f32; CHAINS],
        candidate: &Candidate,
        importance: Option<Importance>,
    ) -> [f32; CHAINS] {
        let four = importance.map(|importance| importance.four(first));
        each!(4, i => {
            let a = self.a[first + i];
            match four {
                Some(importance) => {
                    add_term::<Ptx>(candidate.rest::<Ptx, false>(a, a * a), Some(importance[i]), chains[i])
                }
                None => add_term::<Ptx>(candidate.rest::<Ptx, true>(a, a * a), None, chains[i]),
            }
        })
    }

    /// The largest of the bits of four elements' [`search::Measure::most_clipped`].
    #[inline(always)]
    fn clipped_of_four(&self, first: usize, candidate: &Candidate, importance: Importance) -> u32 {
        let importance = importance.four(first);
        let [a, b, c, d] = each!(4, i => {
            add_term::<Ptx>(candidate.clipped::<Ptx>(self.a[first + i]), Some(importance[i]), 0.0).to_bits()
        });
        a.max(b).max(c.max(d))
    }

    /// [`search::Measure::most_clipped`].
    #[inline(always)]
    fn most_clipped(&self, candidate: &Candidate, importance: Option<Importance>) -> f32 {
        let Some(importance) = importance else {
            return add_term::<Ptx>(candidate.clipped::<Ptx>(self.amax), None, 0.0);
        };
        // Not negative, so their bits order as they do.
        let low = self
            .clipped_of_four(0, candidate, importance)
            .max(self.clipped_of_four(4, candidate, importance));
        let high = self
            .clipped_of_four(8, candidate, importance)
            .max(self.clipped_of_four(12, candidate, importance));
        f32::from_bits(most::<F>(low.max(high)))
    }

    /// Returns whether a scale's clipping error is at most the whole error of the plain scale.
    #[inline(always)]
    fn may_win(&self, byte: u32, plain_error: f32, importance: Option<Importance>) -> bool {
        self.most_clipped(&self.candidate(byte), importance) <= plain_error
    }

    /// [`search::Measure::bounds`]. A first byte that has no usual candidate may be too large.
    #[inline(always)]
    fn bounds(&self, plain_error: f32, near_least: u32, importance: Option<Importance>) -> (u32, u32) {
        let reaches = REACH * self.candidate(near_least).factor >= self.amax;
        let least = near_least + u32::from(!reaches);
        let mut first = least;
        let mut lower = true;
        while warp::ballot(lower) != 0 {
            // Two steps at a time; where the first is one too many, so is the second.
            let one = self.may_win(first.saturating_sub(1), plain_error, importance);
            let two = self.may_win(first.saturating_sub(2), plain_error, importance);
            first -= u32::from(lower && one && first > F::LAST_UNUSUAL);
            lower &= one && two && first > F::LAST_UNUSUAL;
            first -= u32::from(lower);
        }
        (first, u32::from(last_to_try::<F>(least as u8)))
    }

    /// [`search::Measure::search`]: the byte of the scale that is chosen, and how many were tried.
    /// `None`, in all lanes, if a block may take a scale that has no [usual
    /// candidate](Searched::LAST_UNUSUAL) or is limited, or without importance an element is not
    /// [near](search::NEAR).
    #[inline(always)]
    pub(super) fn search(
        &self,
        search: Search,
        plain: u32,
        near_least: u32,
        larger: u32,
        importance: Option<Importance>,
    ) -> Option<(u32, u32)> {
        let plain_error = self.error(plain, importance);
        let (mut byte, mut last) = (larger, larger);
        if !matches!(search, Search::FourSix) {
            (byte, last) = self.bounds(plain_error, near_least, importance);
            if matches!(search, Search::Window) {
                let (low, high) = search::window::<F>(plain as u8);
                (byte, last) = (byte.max(u32::from(low)), last.min(u32::from(high)));
            }
            let factor = self.candidate(byte).factor;
            // Importance may lead to scales so small that the definition limits them, or the one
            // below, which the bounds have looked at.
            let limited = search::limited(0.5 * factor, 1.0) != 0.5 * factor;
            let far = if importance.is_none() { self.amax > search::NEAR * factor } else { limited };
            if warp::ballot(byte <= F::LAST_UNUSUAL || far) != 0 {
                cold_path();
                return None;
            }
        }
        let (mut best, mut least, mut tried) = (plain, plain_error, 1);
        byte += u32::from(byte == plain);
        while warp::ballot(byte <= last) != 0 {
            let error = self.error(byte, importance);
            if byte <= last {
                tried += 1;
                if error < least {
                    (best, least) = (byte, error);
                }
            }
            byte += 1;
            byte += u32::from(byte == plain);
        }
        Some((best, tried))
    }
}
