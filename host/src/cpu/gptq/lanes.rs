//! Sixteen rows of one block of columns, one lane per row.

use microscale_formats::Ties;
use microscale_formats::e2m1::{MAX, MIDPOINTS, VALUES};

use super::block::{BlockFactor, ScaleRange};
use super::operands::ScaleFactors;
use crate::cpu::simd::{LANES, Lanes, Vector};

/// The factors and the scalings of all scale bytes, and the rule for rounding.
pub(super) struct ScaleTable {
    scales: ScaleFactors,
    ties: Ties,
}

/// The scales of sixteen blocks.
#[derive(Clone, Copy)]
struct Candidate<N> {
    factors: N,
    scalings: N,
}

/// The differences of neighbouring magnitudes of E2M1.
const STEPS: [f32; 7] = {
    let mut steps = [0.0; 7];
    let mut i = 0;
    while i < 7 {
        steps[i] = VALUES[i + 1] - VALUES[i];
        i += 1;
    }
    steps
};

impl ScaleTable {
    pub(super) fn new(scales: ScaleFactors, ties: Ties) -> Self {
        Self { scales, ties }
    }

    #[inline(always)]
    fn candidate<V: Vector>(&self, simd: V, bytes: &Lanes<u8>) -> Candidate<V::Number> {
        let (mut factors, mut scalings) = ([0.0; LANES], [0.0; LANES]);
        for lane in 0..LANES {
            factors[lane] = self.scales.factors[usize::from(bytes[lane])];
            scalings[lane] = self.scales.scalings[usize::from(bytes[lane])];
        }
        Candidate { factors: simd.load(&factors), scalings: simd.load(&scalings) }
    }

    /// The magnitudes of the codes nearest to the magnitudes `values`.
    #[inline(always)]
    fn magnitudes<V: Vector>(&self, simd: V, values: V::Number, scalings: V::Number) -> V::Number {
        let scaled =
            if self.scales.divides { simd.div(values, scalings) } else { simd.mul(values, scalings) };
        // A NaN becomes 6 too, as in encoding.
        let scaled = simd.min(scaled, simd.splat(MAX));
        if self.ties == Ties::Even {
            return nearest_even(simd, scaled);
        }
        let mut rounded = simd.splat(0.0);
        for (midpoint, step) in MIDPOINTS.iter().zip(STEPS) {
            let midpoint = simd.splat(*midpoint);
            let passed = match self.ties {
                Ties::Away => simd.at_most(midpoint, scaled),
                _ => !simd.at_most(scaled, midpoint),
            };
            rounded = simd.add(rounded, simd.select(passed, simd.splat(step), simd.splat(0.0)));
        }
        rounded
    }

    /// Bit `i` is set if the code nearest to the magnitude in lane `i` is 0.
    #[inline(always)]
    fn are_zero<V: Vector>(&self, simd: V, magnitudes: V::Number, candidate: &Candidate<V::Number>) -> u16 {
        simd.at_most(self.magnitudes(simd, magnitudes, candidate.scalings), simd.splat(0.0))
    }

    /// The dequantized value of the code nearest to each value.
    #[inline(always)]
    fn round<V: Vector>(&self, simd: V, values: V::Number, candidate: &Candidate<V::Number>) -> V::Number {
        let magnitudes = self.magnitudes(simd, magnitude(simd, values), candidate.scalings);
        with_sign_of(simd, simd.mul(magnitudes, candidate.factors), values)
    }
}

/// |x|
#[inline(always)]
pub(super) fn magnitude<V: Vector>(simd: V, x: V::Number) -> V::Number {
    simd.number(simd.and(simd.bits(x), simd.splat_bits(0x7FFF_FFFF)))
}

/// Gives a magnitude the sign of another number.
#[inline(always)]
fn with_sign_of<V: Vector>(simd: V, magnitude: V::Number, of: V::Number) -> V::Number {
    let sign = simd.and(simd.bits(of), simd.splat_bits(0x8000_0000));
    simd.number(simd.or(simd.bits(magnitude), sign))
}

/// The magnitude of E2M1 nearest to 0 ≤ s ≤ 6, ties to the even code.
///
/// The parts of s below 2, from 2 to 4, and above 4 are rounded to multiples of ½, 1 and 2, ties to
/// the even multiple. Adding 1.5·2^(22 + i) rounds to a multiple of 2^(i − 1). All differences are
/// exact.
#[inline(always)]
fn nearest_even<V: Vector>(simd: V, s: V::Number) -> V::Number {
    const BASE: f32 = 1.5 * (1u32 << 22) as f32;
    let (two, four) = (simd.splat(2.0), simd.splat(4.0));
    let low = simd.min(s, two);
    let middle = simd.sub(simd.min(simd.max(s, two), four), two);
    let high = simd.sub(simd.max(s, four), four);
    let bases = [simd.splat(BASE), simd.splat(2.0 * BASE), simd.splat(4.0 * BASE)];
    let low = simd.sub(simd.add(low, bases[0]), bases[0]);
    let middle = simd.sub(simd.add(middle, bases[1]), bases[1]);
    let high = simd.sub(simd.add(high, bases[2]), bases[2]);
    simd.add(simd.add(low, middle), high)
}

/// The values, or the others where they are not finite.
#[inline(always)]
pub(super) fn finite_or<V: Vector>(simd: V, values: V::Number, others: V::Number) -> V::Number {
    let finite = simd.at_most(magnitude(simd, values), simd.splat(f32::MAX));
    if finite == u16::MAX { values } else { simd.select(finite, values, others) }
}

/// Sixteen blocks of updated weights.
pub(super) struct Group<'a, V: Vector, const N: usize> {
    pub(super) simd: V,
    pub(super) factor: &'a BlockFactor<N>,
    /// The updated weights, by position.
    pub(super) updated: [V::Number; N],
    /// The power of two that multiplies each block's residuals before they are squared.
    pub(super) units: Lanes<f32>,
    /// The amax of each block, times its unit.
    pub(super) amax: Lanes<f32>,
}

/// The result of the recursion over sixteen blocks.
pub(super) struct Descent<V: Vector, const N: usize> {
    /// The weights that were rounded.
    pub(super) rounded_from: [V::Number; N],
    /// Their dequantized values.
    pub(super) dequantized: [V::Number; N],
    /// The sum of squared errors, in squares of the unit.
    pub(super) errors: V::Number,
}

/// The scales that a search chose.
pub(super) struct Chosen {
    pub(super) bytes: Lanes<u8>,
    pub(super) tried: Lanes<u32>,
}

/// Columns between two tests whether all candidates are already worse.
const TEST_EVERY: usize = 4;

impl<V: Vector, const N: usize> Group<'_, V, N> {
    /// Quantizes the blocks under their scales, column by column, with feedback.
    #[inline(always)]
    pub(super) fn descend(&self, table: &ScaleTable, bytes: &Lanes<u8>) -> Descent<V, N> {
        let rounding = Quantizing { table, candidate: table.candidate(self.simd, bytes) };
        self.descend_by(self.simd.splat(f32::INFINITY), rounding)
    }

    /// [`Self::descend`] with scales for each column.
    #[inline(always)]
    pub(super) fn descend_columns(&self, table: &ScaleTable, bytes: &[Lanes<u8>; N]) -> Descent<V, N> {
        self.descend_by(self.simd.splat(f32::INFINITY), QuantizingColumns { table, bytes })
    }

    /// Stops early, with an undefined result, once every error exceeds `least`.
    #[inline(always)]
    fn descend_by(&self, least: V::Number, rounding: impl Rounding<V>) -> Descent<V, N> {
        let (simd, zero) = (self.simd, self.simd.splat(0.0));
        let units = simd.load(&self.units);
        let mut descent = Descent { rounded_from: self.updated, dequantized: [zero; N], errors: zero };
        for k in 0..N {
            // Infinite limits and NaN keep the others going.
            if k % TEST_EVERY == 0 && k > 0 && !may_win(simd, descent.errors, least) {
                break;
            }
            let updated = self.updated[k];
            let from = finite_or(simd, descent.rounded_from[k], updated);
            let dequantized = rounding.round(simd, k, from);
            let rest = simd.mul(simd.sub(from, dequantized), units);
            let error = simd.mul(rest, simd.splat(self.factor.pivots[k]));
            descent.errors = simd.add(descent.errors, simd.mul(error, error));
            descent.rounded_from[k] = from;
            descent.dequantized[k] = dequantized;
            let residual = simd.sub(dequantized, updated);
            let feedback = &self.factor.feedback[k];
            for (later, feedback) in descent.rounded_from.iter_mut().zip(feedback).skip(k + 1) {
                *later = simd.fnma(residual, simd.splat(*feedback), *later);
            }
        }
        descent
    }

    /// Searches the scale of each block. `plain` and `larger` are the bytes to start from.
    #[inline(always)]
    pub(super) fn search(
        &self,
        table: &ScaleTable,
        range: &ScaleRange,
        plain: &Lanes<u8>,
        larger: &Lanes<u8>,
    ) -> Chosen {
        let simd = self.simd;
        let zeros = self.descend_by(simd.splat(f32::INFINITY), Zeros);
        let mut largest = simd.splat(0.0);
        for k in 0..N {
            largest = simd.max(magnitude(simd, zeros.rounded_from[k]), largest);
        }
        let of_plain = self.descend(table, plain);
        let mut found = Found {
            least: simd.store(finite_or(simd, of_plain.errors, simd.splat(f32::INFINITY))),
            chosen: Chosen { bytes: *plain, tried: [1; LANES] },
        };
        let (mut low, mut high) = ([1; LANES], [0; LANES]);
        for lane in 0..LANES {
            // A block of zeros keeps its scale.
            if self.amax[lane] > 0.0 {
                (low[lane], high[lane]) = range.around(plain[lane], larger[lane]);
            }
        }

        // Larger scales, until one makes all codes zero.
        let zero = table.are_zero(simd, largest, &table.candidate(simd, plain));
        let (mut next, mut active) = (*plain, 0u16);
        for lane in 0..LANES {
            let first = plain[lane].saturating_add(1).max(low[lane]);
            if zero >> lane & 1 == 0 && first <= high[lane] {
                (active, next[lane]) = (active | 1 << lane, first);
            }
        }
        while active != 0 {
            let candidate = table.candidate(simd, &next);
            self.compare(table, candidate, &next, active, plain, &mut found);
            active &= !table.are_zero(simd, largest, &candidate);
            for lane in 0..LANES {
                if next[lane] >= high[lane] {
                    active &= !(1 << lane);
                }
                next[lane] = if active >> lane & 1 != 0 { next[lane] + 1 } else { plain[lane] };
            }
        }

        // Smaller scales, until no smaller one can win.
        let errors = simd.store(zeros.errors);
        let (bounds, mut limits) = (&self.factor.bounds, [0.0; LANES]);
        for lane in 0..LANES {
            limits[lane] =
                bounds.least_factor(errors[lane].sqrt(), found.least[lane].sqrt(), self.amax[lane]);
        }
        let may_try = |byte: u8, lane: usize| {
            let factor = table.scales.factors[usize::from(byte)] * self.units[lane];
            // Nothing is known if the limit is NaN.
            byte >= low[lane] && (factor >= limits[lane] || limits[lane].is_nan())
        };
        for lane in 0..LANES {
            let first = plain[lane].saturating_sub(1).min(high[lane]);
            if first < plain[lane] && may_try(first, lane) {
                (active, next[lane]) = (active | 1 << lane, first);
            }
        }
        while active != 0 {
            self.compare(table, table.candidate(simd, &next), &next, active, plain, &mut found);
            for lane in 0..LANES {
                if next[lane] == 0 || !may_try(next[lane] - 1, lane) {
                    active &= !(1 << lane);
                }
                next[lane] = if active >> lane & 1 != 0 { next[lane] - 1 } else { plain[lane] };
            }
        }
        found.chosen
    }

    /// Compares a scale of each active lane with the best one so far.
    #[inline(always)]
    fn compare(
        &self,
        table: &ScaleTable,
        candidate: Candidate<V::Number>,
        bytes: &Lanes<u8>,
        active: u16,
        plain: &Lanes<u8>,
        found: &mut Found,
    ) {
        let simd = self.simd;
        // Lanes that are not active do not keep the others going.
        let limits = simd.select(active, simd.load(&found.least), simd.splat(f32::NEG_INFINITY));
        let errors = simd.store(self.descend_by(limits, Quantizing { table, candidate }).errors);
        let Found { least, chosen } = found;
        for lane in 0..LANES {
            if active >> lane & 1 == 0 {
                continue;
            }
            let best = chosen.bytes[lane];
            let smaller = errors[lane] == least[lane] && best != plain[lane] && bytes[lane] < best;
            if errors[lane] < least[lane] || smaller {
                (chosen.bytes[lane], least[lane]) = (bytes[lane], errors[lane]);
            }
            chosen.tried[lane] += 1;
        }
    }
}

/// The best scales so far, and their errors.
struct Found {
    least: Lanes<f32>,
    chosen: Chosen,
}

/// Returns whether an error does not exceed its limit.
#[inline(always)]
fn may_win<V: Vector>(simd: V, errors: V::Number, limits: V::Number) -> bool {
    // A NaN does not exceed, but is not at most the limit either.
    let ordered = simd.at_most(errors, simd.splat(f32::INFINITY));
    simd.at_most(errors, limits) != 0 || ordered != u16::MAX
}

/// How the recursion rounds.
trait Rounding<V: Vector> {
    /// Rounds the weights of column `k` of the block.
    fn round(&self, simd: V, k: usize, values: V::Number) -> V::Number;
}

/// To codes under sixteen scales.
struct Quantizing<'a, V: Vector> {
    table: &'a ScaleTable,
    candidate: Candidate<V::Number>,
}

impl<V: Vector> Rounding<V> for Quantizing<'_, V> {
    #[inline(always)]
    fn round(&self, simd: V, _: usize, values: V::Number) -> V::Number {
        self.table.round(simd, values, &self.candidate)
    }
}

/// To codes under sixteen scales for each column.
struct QuantizingColumns<'a, const N: usize> {
    table: &'a ScaleTable,
    bytes: &'a [Lanes<u8>; N],
}

impl<V: Vector, const N: usize> Rounding<V> for QuantizingColumns<'_, N> {
    #[inline(always)]
    fn round(&self, simd: V, k: usize, values: V::Number) -> V::Number {
        self.table.round(simd, values, &self.table.candidate(simd, &self.bytes[k]))
    }
}

/// To zero, with the sign of the value.
struct Zeros;

impl<V: Vector> Rounding<V> for Zeros {
    #[inline(always)]
    fn round(&self, simd: V, _: usize, values: V::Number) -> V::Number {
        with_sign_of(simd, simd.splat(0.0), values)
    }
}
