//! The search for the scales of sixteen blocks at a time, one lane per block.
//!
//! It computes what `microscale_formats::search` does, without branches on values. Each lane tries
//! the scales that its block may take; the loop ends when the last lane is done.

use microscale_formats::search::{
    self, CHAINED, CHAINS, Candidate, Found, NEAR, REACH, Scales, last_to_try, limited, window,
};
use microscale_formats::{Search, block};

use crate::cpu::simd::{LANES, Lanes, Vector, arithmetic};

/// Sixteen blocks of finite values, transposed: one vector per element.
struct Group<'a, const N: usize> {
    /// Magnitudes, multiplied by `units`.
    magnitudes: [Lanes<f32>; N],
    /// The squares of `magnitudes`.
    squares: [Lanes<f32>; N],
    importance: Option<&'a [Lanes<f32>; N]>,
    units: Lanes<f32>,
    /// The amax of each block, multiplied by its unit.
    amax: Lanes<f32>,
}

impl<'a, const N: usize> Group<'a, N> {
    #[inline(always)]
    fn new<V: Vector>(simd: V, blocks: &Lanes<[f32; N]>, importance: Option<&'a [Lanes<f32>; N]>) -> Self {
        let mut units = [1.0; LANES];
        let mut amax = [0.0; LANES];
        let mut magnitudes = [[0.0; LANES]; N];
        for (lane, block) in blocks.iter().enumerate() {
            let bits = block::amax_bits(block);
            units[lane] = search::unit(bits);
            amax[lane] = f32::from_bits(bits) * units[lane];
            for (magnitudes, value) in magnitudes.iter_mut().zip(block) {
                magnitudes[lane] = value.abs() * units[lane];
            }
        }
        let mut squares = magnitudes;
        for square in &mut squares {
            let magnitudes = simd.load(square);
            *square = simd.store(simd.mul(magnitudes, magnitudes));
        }
        Self { magnitudes, squares, importance, units, amax }
    }

    /// The factor of codes under each lane's scale, multiplied by the unit.
    #[inline(always)]
    fn factors(&self, scales: &impl Scales, bytes: &Lanes<u8>) -> Lanes<f32> {
        let mut factors = [0.0; LANES];
        for (factor, byte) in factors.iter_mut().zip(bytes) {
            *factor = scales.factor(*byte);
        }
        for (factor, unit) in factors.iter_mut().zip(&self.units) {
            *factor = limited(*factor, *unit);
        }
        factors
    }

    /// The error of each block under its lane's scale.
    #[inline(always)]
    fn errors<V: Vector>(&self, simd: V, scales: &impl Scales, bytes: &Lanes<u8>) -> V::Number {
        let factors = simd.load(&self.factors(scales, bytes));
        let candidate = arithmetic::candidate(simd, factors, simd.div(simd.splat(1.0), factors));
        let all_near = simd.at_most(simd.load(&self.amax), simd.mul(factors, simd.splat(NEAR))) == u16::MAX;
        if all_near && self.importance.is_none() {
            self.errors_of::<V, true>(simd, &candidate)
        } else {
            self.errors_of::<V, false>(simd, &candidate)
        }
    }

    #[inline(always)]
    fn errors_of<V: Vector, const ALL_NEAR: bool>(
        &self,
        simd: V,
        candidate: &Candidate<V::Number>,
    ) -> V::Number {
        let mut errors = simd.splat(0.0);
        for first in (0..N).step_by(CHAINED) {
            let mut chains = [simd.splat(0.0); CHAINS];
            for i in 0..CHAINED {
                let (a, square) = (&self.magnitudes[first + i], &self.squares[first + i]);
                let rest = arithmetic::rest::<V, ALL_NEAR>(simd, candidate, simd.load(a), simd.load(square));
                #[expect(clippy::manual_map, reason = "a closure does not have the instance's features")]
                let weight = match self.importance {
                    Some(importance) => Some(simd.load(&importance[first + i])),
                    None => None,
                };
                chains[i % CHAINS] = arithmetic::add_term(simd, rest, weight, chains[i % CHAINS]);
            }
            errors = simd.add(errors, arithmetic::sum_of_chains(simd, chains));
        }
        errors
    }

    /// Bit `i` is set if clipping by itself does not exceed the plain scale's error in lane `i`.
    #[inline(always)]
    fn may_win<V: Vector>(
        &self,
        simd: V,
        scales: &impl Scales,
        bytes: &Lanes<u8>,
        plain_errors: V::Number,
    ) -> u16 {
        let factors = simd.load(&self.factors(scales, bytes));
        // `clipped` uses only the factors.
        let candidate = arithmetic::candidate(simd, factors, factors);
        let Some(importance) = self.importance else {
            let clipped = arithmetic::clipped(simd, &candidate, simd.load(&self.amax));
            return simd.at_most(arithmetic::add_term(simd, clipped, None, simd.splat(0.0)), plain_errors);
        };
        let mut most = simd.splat(0.0);
        for (magnitudes, importance) in self.magnitudes.iter().zip(importance) {
            let clipped = arithmetic::clipped(simd, &candidate, simd.load(magnitudes));
            most = simd
                .max(most, arithmetic::add_term(simd, clipped, Some(simd.load(importance)), simd.splat(0.0)));
        }
        simd.at_most(most, plain_errors)
    }

    /// Bit `i` is set if the scale of lane `i` reaches the block's amax without clipping.
    #[inline(always)]
    fn reaches<V: Vector>(&self, simd: V, scales: &impl Scales, bytes: &Lanes<u8>) -> u16 {
        let factors = simd.load(&self.factors(scales, bytes));
        simd.at_most(simd.load(&self.amax), simd.mul(simd.splat(REACH), factors))
    }

    /// The first and the last scale to try, as `Measure::bounds` finds them.
    #[inline(always)]
    fn bounds<V: Vector, S: Scales>(
        &self,
        simd: V,
        scales: &S,
        plain_errors: V::Number,
        plain: &Lanes<u8>,
    ) -> (Lanes<u8>, Lanes<u8>) {
        let mut least = *plain;
        for byte in &mut least {
            *byte = (*byte).clamp(S::FIRST, S::LAST);
        }
        loop {
            let below = minus_one(&least);
            let down = self.reaches(simd, scales, &below) & differs(&least, S::FIRST);
            if down == 0 {
                break;
            }
            least = select(down, &below, &least);
        }
        loop {
            let up = !self.reaches(simd, scales, &least) & differs(&least, S::LAST);
            if up == 0 {
                break;
            }
            least = select(up, &plus_one(&least), &least);
        }
        let mut first = least;
        loop {
            let below = minus_one(&first);
            let lower = self.may_win(simd, scales, &below, plain_errors) & differs(&first, S::FIRST);
            if lower == 0 {
                break;
            }
            first = select(lower, &below, &first);
        }
        let mut last = least;
        for byte in &mut last {
            *byte = last_to_try::<S>(*byte);
        }
        (first, last)
    }
}

#[inline(always)]
fn minus_one(bytes: &Lanes<u8>) -> Lanes<u8> {
    let mut less = *bytes;
    for byte in &mut less {
        *byte = byte.saturating_sub(1);
    }
    less
}

#[inline(always)]
fn plus_one(bytes: &Lanes<u8>) -> Lanes<u8> {
    let mut more = *bytes;
    for byte in &mut more {
        *byte = byte.saturating_add(1);
    }
    more
}

/// Bit `i` is set if byte `i` differs from `other`.
#[inline(always)]
fn differs(bytes: &Lanes<u8>, other: u8) -> u16 {
    let mut mask = 0;
    for (lane, byte) in bytes.iter().enumerate() {
        mask |= u16::from(*byte != other) << lane;
    }
    mask
}

/// Bit `i` is set if `a[i] <= b[i]`.
#[inline(always)]
fn at_most(a: &Lanes<u8>, b: &Lanes<u8>) -> u16 {
    let mut mask = 0;
    for (lane, (a, b)) in a.iter().zip(b).enumerate() {
        mask |= u16::from(a <= b) << lane;
    }
    mask
}

/// Takes the bytes of `set` whose mask bits are set, and the bytes of `unset` elsewhere.
#[inline(always)]
fn select(mask: u16, set: &Lanes<u8>, unset: &Lanes<u8>) -> Lanes<u8> {
    let mut selected = *unset;
    for (lane, (selected, set)) in selected.iter_mut().zip(set).enumerate() {
        if mask >> lane & 1 != 0 {
            *selected = *set;
        }
    }
    selected
}

/// `Measure::search` for sixteen blocks.
#[inline(always)]
pub(in crate::cpu) fn search<V: Vector, const N: usize, S: Scales>(
    simd: V,
    blocks: &Lanes<[f32; N]>,
    importance: Option<&[Lanes<f32>; N]>,
    search: Search,
    scales: &S,
    plain: &Lanes<u8>,
    larger: &Lanes<u8>,
) -> Lanes<Found> {
    let group = Group::new(simd, blocks, importance);
    let plain_errors = group.errors(simd, scales, plain);
    let (mut byte, mut last) = (*larger, *larger);
    if search != Search::FourSix {
        (byte, last) = group.bounds::<V, S>(simd, scales, plain_errors, plain);
    }
    if search == Search::Window {
        for ((byte, last), plain) in byte.iter_mut().zip(&mut last).zip(plain) {
            let (low, high) = window::<S>(*plain);
            (*byte, *last) = ((*byte).max(low), (*last).min(high));
        }
    }
    // A block of zeros keeps its scale.
    for ((byte, last), amax) in byte.iter_mut().zip(&mut last).zip(&group.amax) {
        if *amax == 0.0 {
            (*byte, *last) = (1, 0);
        }
    }
    let (mut best, mut least, mut tried) = (*plain, plain_errors, [1; LANES]);
    loop {
        // Skips the plain scale, whose error is known.
        for (byte, plain) in byte.iter_mut().zip(plain) {
            *byte += u8::from(byte == plain);
        }
        let tries = at_most(&byte, &last);
        if tries == 0 {
            break;
        }
        let errors = group.errors(simd, scales, &byte);
        // Scales ascend, so the smallest of equally good scales wins.
        let wins = tries & !simd.at_most(least, errors);
        best = select(wins, &byte, &best);
        least = simd.select(wins, errors, least);
        for (lane, tried) in tried.iter_mut().enumerate() {
            *tried += u32::from(tries >> lane & 1);
        }
        byte = select(tries, &plus_one(&byte), &byte);
    }
    let mut found = [Found { byte: 0, tried: 0 }; LANES];
    for ((found, byte), tried) in found.iter_mut().zip(best).zip(tried) {
        *found = Found { byte, tried };
    }
    found
}
