//! Bit-exact sums of weights times activations on GPUs, for inputs without loss in tensor cores.
//!
//! For such inputs only f32's roundings and their order remain.

use microscale::{Format, QuantizedTensor};

use crate::operands::{Scales, changed, scale_of_one, tensor};
use crate::oracle::{Exact, dot, power_of_two};
use crate::weights::K_ITERATION;

/// Columns of a chunk. A lane has one chunk per k-iteration.
const CHUNK: usize = 32;
/// Columns of a group.
///
/// With one token, tensor cores return the sum of a group. Otherwise they return the sum of a
/// [`K_ITERATION`].
const GROUP: usize = 16;

/// The order of a kernel's additions.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    /// One token: groups, then lanes in pairs, then slices of K.
    M1 {
        /// Warps per row.
        slices: usize,
    },
    /// Several tokens: k-iterations, then segments, then slices of K.
    M8 {
        /// Segments of a row that a warp has side by side.
        segments: usize,
        /// Warps per row.
        slices: usize,
    },
}

impl Order {
    /// Returns the products of weights and activations, row by row, one token after the other.
    ///
    /// # Panics
    /// Panics if a tensor core might lose bits of a sum.
    pub fn results<T: Exact>(self, weights: &QuantizedTensor, x: &[T], tokens: usize) -> Vec<T> {
        let rows: Vec<Vec<_>> =
            (0..weights.rows()).map(|row| dot::elements(weights, row).collect()).collect();
        let result = |(x, row): (&[T], &Vec<(f64, f64)>)| {
            let terms = row.iter().zip(x).map(|((weight, scale), x)| (weight * x.to_f64(), *scale));
            T::round_f64(dot::under(self.sum(&terms.collect::<Vec<_>>()), weights.global_scale()))
        };
        let tokens = x.chunks_exact(weights.cols()).take(tokens);
        tokens.flat_map(|x| rows.iter().map(move |row| (x, row))).map(result).collect()
    }

    /// Returns the sum of terms, each given with its scale, which is not yet applied.
    fn sum(self, terms: &[(f64, f64)]) -> f64 {
        match self {
            Self::M1 { slices } => {
                // Each lane has one chunk per k-iteration.
                let lane = |number: usize| {
                    let chunks = terms.chunks(CHUNK).skip(number).step_by(8 * slices);
                    chunks.flat_map(|chunk| chunk.chunks(GROUP)).fold(0f32, |sum, group| {
                        exact(group.iter().map(|(term, _)| *term)).mul_add(group[0].1 as f32, sum)
                    })
                };
                let segment = |first: usize| {
                    let [a, b, c, d] = [0, 1, 2, 3].map(|quarter| lane(first + quarter));
                    (a + b) + (c + d)
                };
                let slices = (0..slices).map(|slice| segment(8 * slice) + segment(8 * slice + 4));
                slices.fold(0.0, |sum, slice| sum + f64::from(slice))
            }
            Self::M8 { segments, slices } => {
                let parts = segments * slices;
                let part = |number: usize| {
                    let k_iterations = terms.chunks(K_ITERATION).skip(number).step_by(parts);
                    k_iterations.fold(0f32, |sum, k_iteration| {
                        sum + exact(k_iteration.iter().map(|(term, scale)| term * scale))
                    })
                };
                (0..parts).fold(0.0, |sum, number| sum + f64::from(part(number)))
            }
        }
    }
}

/// Returns a sum that is exact in any order, with two bits to spare.
///
/// The magnitudes add up to at most 2^22 times the lowest last bit of all terms.
fn exact(terms: impl Iterator<Item = f64> + Clone) -> f32 {
    let last_bit = |term: f64| {
        let significand = term.to_bits() & ((1 << 52) - 1) | 1 << 52;
        power_of_two((term.to_bits() >> 52 & 0x7FF) as i32 - 1075 + significand.trailing_zeros() as i32)
    };
    let least = terms.clone().filter(|term| *term != 0.0).map(last_bit).fold(f64::INFINITY, f64::min);
    let magnitudes = terms.clone().fold(0.0, |sum, term| sum + term.abs());
    assert!(magnitudes == 0.0 || magnitudes <= least * 2f64.powi(22), "{magnitudes:e}, in bits of {least:e}");
    terms.fold(0.0, |sum, term| sum + term) as f32
}

/// Columns at the end of a row that cancel the preceding sum.
const CANCELLING: usize = 2 * K_ITERATION;

/// Makes weights and activations without loss in tensor cores whose sums cancel almost completely.
///
/// Only the losses of the earlier sums remain, so the last bits of every sum matter. A row's
/// weights cancel the sum of one token. Each k-iteration has numbers of few bits, with a different
/// magnitude than the next. In the last two k-iterations, one group's activations are powers of
/// two, and its weights are the digits of the sum.
///
/// # Panics
/// Panics if rows are not longer than the cancelling columns, or do not consist of whole groups.
pub fn cancelling<T: Exact>(
    format: Format,
    [rows, cols, tokens]: [usize; 3],
    seed: u64,
) -> (QuantizedTensor, Vec<T>) {
    assert!(cols > CANCELLING && cols.is_multiple_of(GROUP));
    let last = (cols - 1) / K_ITERATION * K_ITERATION;
    let digits = (last - K_ITERATION..).take(GROUP).chain(last..).take(2 * GROUP);
    let digits: Vec<_> = digits.zip(0..).map(|(col, i)| (col, 2f64.powi(15 - i))).collect();

    let mut random = fastrand::Rng::with_seed(seed);
    let mut x = vec![T::default(); cols * tokens];
    for x in x.chunks_mut(cols) {
        for k_iteration in x[..last - K_ITERATION].chunks_mut(K_ITERATION) {
            let unit = 2f64.powi(random.i32(-14..=2));
            k_iteration.fill_with(|| T::round_f64(f64::from(random.i32(-15..=15)) * unit));
        }
        digits.iter().for_each(|(col, digit)| x[*col] = T::round_f64(*digit));
    }

    let (block, bytes) = (format.block(), cols.div_ceil(format.block()) * format.block_bytes());
    let before = changed(tensor(format, rows, cols, Scales::Common, seed), |codes, scales| {
        codes.chunks_mut(bytes).for_each(|row| row[(last - K_ITERATION) / 2..].fill(0));
        for scales in scales.chunks_mut(cols.div_ceil(block)) {
            let (before, cancelling) = scales.split_at_mut((last - K_ITERATION) / block);
            if format == Format::Mxfp4 {
                before.iter_mut().for_each(|scale| *scale = 120 + *scale % 8);
            }
            cancelling.fill(scale_of_one(format));
        }
    });
    let left = |row: usize| {
        let x: Vec<_> = x[row % tokens * cols..][..cols].iter().map(|x| x.to_f64()).collect();
        dot::weighted(&before, row, &x).sum.to_f64()
    };
    let lefts: Vec<_> = (0..rows).map(left).collect();
    let weights = changed(before, |codes, _| {
        for (row, mut left) in codes.chunks_mut(bytes).zip(lefts) {
            for (col, digit) in &digits {
                if left.abs() >= *digit {
                    // −1 or 1.
                    row[col / 2] |= (if left > 0.0 { 0xA } else { 0x2 }) << (col % 2 * 4);
                    left -= digit.copysign(left);
                }
            }
            assert!(left.abs() < digits[digits.len() - 1].1, "{left:e} is left");
        }
    });
    (weights, x)
}
