//! Chooses a block's scale by the error in a layer's output, with a Hessian for each block of
//! columns.
//!
//! # The error
//! H is symmetric and positive semidefinite, for example XᵀX of the inputs X of a block's columns.
//! Let r be the block minus its dequantized codes under a scale. The error of that scale is rᵀHr,
//! in f64, with each product and each sum rounded once:
//!
//! ```text
//! rᵢ = xᵢ − f·qᵢ          f·qᵢ is exact: f is the factor of codes, qᵢ the value of the code
//! yᵢ = ((H₀ᵢ·r₀ + H₁ᵢ·r₁) + H₂ᵢ·r₂) + …
//! E  = (chain 0 + chain 1) + (chain 2 + chain 3)     chain c adds yᵢ·rᵢ for i = c, c + 4, c + 8, …
//! ```
//!
//! The codes are the format's own under that scale, including its rule for ties: with a Hessian, it
//! matters which of two equally near codes is taken. No square overflows or vanishes, because f64
//! has eight times the exponents of f32.
//!
//! The plain scale wins ties, then the smallest scale.
//!
//! # Why most scales are skipped
//! *The floor.* For positive definite M, the minimum of rᵀMr with rᵢ fixed and all others free is
//! rᵢ²/(M⁻¹)ᵢᵢ. With dᵢ = 1/(M⁻¹)ᵢᵢ, no scale has an error below the largest dᵢ·rᵢ². That bound
//! takes N operations instead of N². A skipped scale must have a larger error *after rounding*.
//! Therefore M is not H but H − εtI, where t is the trace of H and ε = 2⁻⁴³. Then
//!
//! ```text
//! rᵀHr = rᵀMr + εt·|r|² ≥ max dᵢ·rᵢ² + εt·|r|²
//! ```
//!
//! and the last term covers all roundings. With u = 2⁻⁵³ and N up to 32:
//!
//! - The rounded E differs from rᵀHr by at most (2N + 2)u·Σ|rᵢ||Hᵢⱼ||rⱼ| ≤ (2N + 2)u·t·|r|²,
//!   because the Frobenius norm of a positive semidefinite H is at most its trace.
//! - The computed factors of M exist if the pivots are positive. They are the exact factors of a
//!   matrix at most (N + 2)u·t away, which is therefore positive definite. (The error is bounded by
//!   |L|D|Lᵀ|, whose norm is at most the trace of LDLᵀ.)
//! - Solving Lz = eᵢ is exact for another L, which moves that matrix by at most (2N + 1)u·t.
//!
//! The three add up to less than 2⁻⁴⁵t. A factor of 1 − 2⁻⁴⁰ on dᵢ outweighs the roundings of dᵢ
//! and dᵢ·rᵢ² themselves. If a pivot is not positive, dᵢ = 0 and nothing is skipped. Columns of
//! zeros, from padding and from inputs that are never active, are left out instead.
//!
//! *Below.* A code is at most 6, so |rᵢ| ≥ |xᵢ| − 6f, also after rounding. Once the floor of these
//! residuals exceeds the least error found, it does so for all smaller scales. For strongly
//! correlated columns the floors are low, and a second bound ends the search. √(rᵀHr) is a norm, so
//!
//! ```text
//! √(rᵀHr) ≥ √(xᵀHx) − √(fq·Hfq) ≥ √(xᵀHx) − 6f·√S         S is the sum of all |Hᵢⱼ|
//! ```
//!
//! This bound needs a semidefinite H only. A matrix rounded to f32 may just fail to be
//! semidefinite. The search therefore looks for an η such that H + ηtI is, and (η + ε)t·(|x|² +
//! |r|²) covers η and the roundings, with |r|² at most 2·(|x|² + 36·N·f²).
//!
//! *Above.* Codes do not grow with the scale. Once all codes are zero, they stay zero for all
//! larger scales, which therefore tie with the first such scale.

use core::cmp::Ordering;

use crate::search::{Found, Scales, Search, window};

/// Number of independent sums of products.
const CHAINS: usize = 4;

/// ε: the part of the trace that is subtracted from the diagonal to cover roundings.
const SHIFT: f64 = 1.0 / (1u64 << 43) as f64;
/// Factor that outweighs the roundings of a floor.
const SAFETY: f64 = 1.0 - 1.0 / (1u64 << 40) as f64;

/// Values of η to try, in order.
const LIFTS: [f64; 5] = [0.0, SHIFT, 1.0 / (1 << 24) as f64, 1.0 / (1 << 20) as f64, 1.0 / (1 << 14) as f64];

/// The Hessian of a block of `N` columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hessian<const N: usize> {
    /// All entries, row by row. The matrix is symmetric.
    entries: [[f64; N]; N],
    /// dᵢ: no error is below dᵢ·rᵢ².
    floors: [f64; N],
    /// 4(η + ε)t, or infinity if no η was found.
    slack: f64,
    /// S, with η and ε added to the diagonal.
    sum: f64,
}

/// The error of a block whose codes are all zero.
#[derive(Clone, Copy)]
struct Zeros {
    error: f64,
    /// |x|².
    squares: f64,
}

impl<const N: usize> Hessian<N> {
    /// Takes finite entries, row by row.
    ///
    /// Only the first `used` rows and columns count. The others are padding.
    ///
    /// Mirrored entries are averaged. A matrix that is not positive semidefinite is accepted:
    /// errors may then be negative, and fewer scales are skipped.
    pub fn new(entries: &[[f32; N]; N], used: usize) -> Self {
        const { assert!(N.is_multiple_of(CHAINS) && N <= 32, "roundings are accounted for up to 32") };
        let mut mean = [[0.0; N]; N];
        for i in 0..used.min(N) {
            for j in 0..used.min(N) {
                mean[i][j] = (f64::from(entries[i][j]) + f64::from(entries[j][i])) * 0.5;
            }
        }
        let trace: f64 = (0..N).map(|i| mean[i][i]).sum();
        let floors = Factors::of(&mean, -SHIFT * trace).map(|factors| factors.floors());
        let lift = match floors {
            Some(_) => Some(0.0),
            None => LIFTS.into_iter().find(|lift| Factors::of(&mean, lift * trace).is_some()),
        };
        let lift = lift.map_or(f64::INFINITY, |lift| lift + SHIFT);
        let sum: f64 = mean.iter().flatten().map(|entry| entry.abs()).sum();
        Self {
            entries: mean,
            floors: floors.unwrap_or([0.0; N]),
            slack: 4.0 * lift * trace,
            sum: sum + N as f64 * lift * trace,
        }
    }

    /// Returns rᵀHr for the residuals r of a scale.
    #[inline(always)]
    pub fn error(&self, rests: &[f64; N]) -> f64 {
        let mut y = [0.0; N];
        for (row, rest) in self.entries.iter().zip(rests) {
            for (y, entry) in y.iter_mut().zip(row) {
                *y += entry * rest;
            }
        }
        let mut chains = [0.0; CHAINS];
        for i in 0..N {
            chains[i % CHAINS] += y[i] * rests[i];
        }
        (chains[0] + chains[1]) + (chains[2] + chains[3])
    }

    /// Returns a lower bound of the error.
    #[inline(always)]
    pub fn floor(&self, rests: &[f64; N]) -> f64 {
        let mut most = [0.0; N];
        for ((most, floor), rest) in most.iter_mut().zip(&self.floors).zip(rests) {
            *most = floor * (rest * rest);
        }
        largest(most)
    }

    /// Returns the floor that follows from clipping, for this factor and every smaller one.
    #[inline(always)]
    fn floor_of_clipping(&self, values: &[f32; N], factor: f32) -> f64 {
        let largest = f64::from(factor) * 6.0;
        let mut rests = [0.0; N];
        for (rest, value) in rests.iter_mut().zip(values) {
            let beyond = f64::from(*value).abs() - largest;
            *rest = if beyond > 0.0 { beyond } else { 0.0 };
        }
        self.floor(&rests)
    }

    /// Returns whether, by the norm bound, this factor and every smaller one err by more than
    /// `least`.
    #[inline(always)]
    fn all_exceed(&self, least: f64, zeros: &Zeros, factor: f32) -> bool {
        let reach = 36.0 * f64::from(factor) * f64::from(factor);
        let slack = self.slack * (zeros.squares + N as f64 * reach);
        let least = positive(least) + slack;
        // √zeros > √least + √(reach·sum), without square roots. An infinite slack makes it false.
        let rest = zeros.error - slack - least - reach * self.sum;
        rest > 0.0 && rest * rest > 4.0 * reach * self.sum * least
    }

    /// Searches the scale of a block of finite values.
    ///
    /// `plain` is the byte that the numerics choose, and `larger` their choice for 1.5 times the
    /// amax. `decoded` returns the values, from −6 to 6, of the block's codes under a scale.
    #[inline(always)]
    pub fn search<S: Scales>(
        &self,
        values: &[f32; N],
        search: Search,
        scales: &S,
        (plain, larger): (u8, u8),
        decoded: impl Fn(u8) -> [f32; N],
    ) -> Found {
        let mut found = Found { byte: plain, tried: 1 };
        let (low, high) = match search {
            Search::None => return found,
            Search::FourSix => (larger, larger),
            Search::Window => window::<S>(plain),
            Search::Full => (S::FIRST, S::LAST),
        };
        let rests = |byte: u8, decoded: &[f32; N]| {
            let factor = f64::from(scales.factor(byte));
            let mut rests = [0.0; N];
            for ((rest, value), code) in rests.iter_mut().zip(values).zip(decoded) {
                *rest = f64::from(*value) - factor * f64::from(*code);
            }
            rests
        };
        let wide = values.map(f64::from);
        let zeros = Zeros { error: self.error(&wide), squares: wide.iter().map(|value| value * value).sum() };
        if zeros.squares == 0.0 {
            return found;
        }
        let mut least = self.error(&rests(plain, &decoded(plain)));
        let mut see = |byte: u8, decoded: &[f32; N], least: &mut f64| {
            let rests = rests(byte, decoded);
            if self.floor(&rests) > positive(*least) {
                return;
            }
            let error = self.error(&rests);
            found.tried += 1;
            if error < *least || (error == *least && found.byte != plain && byte < found.byte) {
                (found.byte, *least) = (byte, error);
            }
        };
        for byte in (low..plain.min(high.saturating_add(1))).rev() {
            let factor = scales.factor(byte);
            if self.all_exceed(least, &zeros, factor)
                || self.floor_of_clipping(values, factor) > positive(least)
            {
                break;
            }
            see(byte, &decoded(byte), &mut least);
        }
        for byte in plain.saturating_add(1).max(low)..=high {
            let decoded = decoded(byte);
            see(byte, &decoded, &mut least);
            if decoded.iter().all(|code| *code == 0.0) {
                break;
            }
        }
        found
    }
}

/// Clamps an error to at least 0.
///
/// Errors of an indefinite matrix may be negative, and a bound of 0 skips nothing.
#[inline(always)]
fn positive(error: f64) -> f64 {
    if error > 0.0 { error } else { 0.0 }
}

/// Returns the largest number, by halving, so that the compiler vectorizes it.
#[inline(always)]
fn largest<const N: usize>(mut numbers: [f64; N]) -> f64 {
    let mut half = N / 2;
    while half > 0 {
        for i in 0..half {
            let other = numbers[i + half];
            numbers[i] = if other > numbers[i] { other } else { numbers[i] };
        }
        half /= 2;
    }
    numbers[0]
}

/// The factorization L·D·Lᵀ, which needs no square root.
struct Factors<const N: usize> {
    /// L, below its diagonal of ones.
    l: [[f64; N]; N],
    /// D, with 0 for columns of zeros, which are left out.
    pivots: [f64; N],
}

impl<const N: usize> Factors<N> {
    /// Factors a matrix with `shift` added to its diagonal.
    ///
    /// Returns `None` if the pivots do not show it to be positive definite.
    fn of(entries: &[[f64; N]; N], shift: f64) -> Option<Self> {
        let mut l = [[0.0; N]; N];
        let mut pivots = [0.0; N];
        for j in 0..N {
            if entries[j].iter().all(|entry| *entry == 0.0) {
                continue;
            }
            let mut pivot = entries[j][j] + shift;
            for k in 0..j {
                pivot -= l[j][k] * l[j][k] * pivots[k];
            }
            // A NaN is not positive either.
            if pivot.partial_cmp(&0.0) != Some(Ordering::Greater) {
                return None;
            }
            pivots[j] = pivot;
            for i in j + 1..N {
                let mut entry = entries[i][j];
                for k in 0..j {
                    entry -= l[i][k] * l[j][k] * pivots[k];
                }
                l[i][j] = entry / pivot;
            }
        }
        Some(Self { l, pivots })
    }

    /// Returns dᵢ for each column, 0 for columns of zeros.
    fn floors(&self) -> [f64; N] {
        let Self { l, pivots } = self;
        let mut floors = [0.0; N];
        for i in (0..N).filter(|i| pivots[*i] != 0.0) {
            // (M⁻¹)ᵢᵢ = Σ zₖ²/Dₖ, where Lz = eᵢ.
            let mut z = [0.0; N];
            z[i] = 1.0;
            let mut inverse = 1.0 / pivots[i];
            for k in (i + 1..N).filter(|k| pivots[*k] != 0.0) {
                for j in i..k {
                    z[k] -= l[k][j] * z[j];
                }
                inverse += z[k] * z[k] / pivots[k];
            }
            let floor = SAFETY / inverse;
            floors[i] = if floor > 0.0 && floor < f64::INFINITY { floor } else { 0.0 };
        }
        floors
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use crate::search::PowersOfTwo;
    use crate::{E2m1, E8m0, Ties};

    /// Returns the values of the nearest codes under an E8M0 scale.
    fn nearest<const N: usize>(values: &[f32; N]) -> impl Fn(u8) -> [f32; N] {
        move |byte| {
            values.map(|x| E2m1::from_f32(x * E8m0::from_bits(byte).reciprocal(), Ties::Even).to_f32())
        }
    }

    fn diagonal<const N: usize>(diagonal: [f32; N]) -> Hessian<N> {
        let mut entries = [[0.0; N]; N];
        (0..N).for_each(|i| entries[i][i] = diagonal[i]);
        Hessian::new(&entries, N)
    }

    #[test]
    fn floors_of_a_diagonal_are_its_entries() {
        let hessian = diagonal([2.0, 0.5, 0.0, 1e30]);
        let floors = hessian.floors.map(|floor| floor as f32);
        // The shift is 2^-43 of the trace and exceeds the small entries, so the matrix does not
        // count as positive definite.
        assert_eq!(floors, [0.0; 4]);
        let hessian = diagonal([2.0, 0.5, 0.0, 3.0]);
        for (floor, entry) in hessian.floors.iter().zip([2.0, 0.5, 0.0, 3.0]) {
            assert!(*floor <= entry && *floor >= entry * (1.0 - 1e-10), "{floor} for {entry}");
        }
    }

    #[test]
    fn floors_are_reciprocals_of_the_inverse_diagonal() {
        // [[2, 1], [1, 2]] has the inverse [[2, -1], [-1, 2]] / 3. Padding changes nothing.
        let mut entries = [[0.0; 4]; 4];
        (entries[0][0], entries[1][1], entries[0][1], entries[1][0]) = (2.0, 2.0, 1.0, 1.0);
        entries[3] = [7.0; 4];
        let hessian = Hessian::new(&entries, 2);
        assert_eq!(hessian.error(&[1.0, -1.0, 5.0, 5.0]), 2.0);
        for (floor, right) in hessian.floors.into_iter().zip([1.5, 1.5, 0.0, 0.0]) {
            assert!((floor - right).abs() <= 1e-10, "{floor} for {right}");
        }
        // A matrix of rank 1, then an indefinite one.
        for off in [2.0, 3.0] {
            (entries[0][1], entries[1][0]) = (off, off);
            assert_eq!(Hessian::new(&entries, 2).floors, [0.0; 4]);
        }
    }

    #[test]
    fn the_plain_scale_wins_ties() {
        // The scales 1 and 2 have no error, nor do ½ and 4.
        let (values, hessian) = ([2.0; 32], diagonal([1.0; 32]));
        let search = |plain| {
            let found = hessian.search(&values, Search::Full, &PowersOfTwo, (plain, plain), nearest(&values));
            found.byte
        };
        assert_eq!([126, 127, 128, 129].map(search), [126, 127, 128, 129]);
        // Among equal scales other than the plain one, the smallest wins.
        assert_eq!([120, 130, 254, 0].map(search), [126; 4]);
    }

    #[test]
    fn a_column_of_zeros_does_not_influence_the_scale() {
        // The first column has no weight, so the other columns determine the scale.
        let mut values = [0.375; 32];
        values[0] = 1e30;
        let mut entries = [1.0; 32];
        entries[0] = 0.0;
        let hessian = diagonal(entries);
        let plain = E8m0::from_bits(127 + 97).to_bits();
        let found = hessian.search(&values, Search::Full, &PowersOfTwo, (plain, plain), nearest(&values));
        // 0.375 is 6 · 2^-4, the smallest scale without an error.
        assert_eq!(found.byte, 127 - 4);
    }
}
