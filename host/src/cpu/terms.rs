//! Products of decoded weights and activations of many tokens by vectors: a token a lane, several rows and tiles at once.

use super::arranged::{Aligned, Word};
use super::panels::{Lines, ROWS, SegmentProducts, lines_a_chunk};
#[cfg(target_arch = "x86_64")]
use super::products::PairProducts;
use super::products::Products;
use super::tables::place_of_element;
use super::vector::{LANES, Lanes};

/// The terms that a lane multiplies and adds: elements, or pairs of elements.
pub(super) trait Terms<V: Products> {
    const WORD: Word;

    /// Adds the products of a word of weights and a word of activations.
    fn add(sum: V::Number, weights: V::Number, x: V::Number) -> V::Number;
}

/// f32.
pub(super) struct Singles;

impl<V: Products> Terms<V> for Singles {
    const WORD: Word = Word::Single;

    #[inline(always)]
    fn add(sum: V::Number, weights: V::Number, x: V::Number) -> V::Number {
        V::fma(weights, x, sum)
    }
}

/// Pairs of bf16.
#[cfg(target_arch = "x86_64")]
pub(super) struct Pairs;

#[cfg(target_arch = "x86_64")]
impl<V: PairProducts> Terms<V> for Pairs {
    const WORD: Word = Word::Pair;

    #[inline(always)]
    fn add(sum: V::Number, weights: V::Number, x: V::Number) -> V::Number {
        V::add_pairs(sum, weights, x)
    }
}

/// Products by vectors of these terms.
pub(super) struct ByVectors<A>(pub(super) A);

impl<V: Products, A: Terms<V>> SegmentProducts<V> for ByVectors<A> {
    const WORD: Word = A::WORD;

    #[inline(always)]
    fn add(&self, x: &[Lanes<f32>], weights: &[Lines], sums: &mut [Lines]) {
        let lines = weights.len() * LANES;
        let (two, one) = if V::MANY_REGISTERS { sums.as_chunks_mut() } else { (&mut [][..], sums) };
        let (of_two, of_one) = x.split_at(2 * two.len() * lines);
        for (sums, x) in two.iter_mut().zip(of_two.chunks_exact(2 * lines)) {
            let (first, second) = x.split_at(lines);
            for rows in 0..ROWS / 8 {
                at_once::<V, A, 8, 2>([first, second], weights, sums, rows);
            }
        }
        for (sums, x) in one.iter_mut().zip(of_one.chunks_exact(lines)) {
            let sums = std::array::from_mut(sums);
            if V::MANY_REGISTERS {
                for rows in 0..ROWS / 16 {
                    at_once::<V, A, 16, 1>([x], weights, sums, rows);
                }
            } else {
                for rows in 0..ROWS / 4 {
                    at_once::<V, A, 4, 1>([x], weights, sums, rows);
                }
            }
        }
    }
}

/// R rows, of those that are as many together, and T tiles.
#[inline(always)]
fn at_once<V: Products, A: Terms<V>, const R: usize, const T: usize>(
    x: [&[Lanes<f32>]; T],
    weights: &[Lines],
    sums: &mut [Lines; T],
    rows: usize,
) {
    let lines = lines_a_chunk(A::WORD);
    let mut of_segment = [[V::splat(0.0); T]; R];
    for (chunk, weights) in weights.chunks_exact(lines).enumerate() {
        for i in 0..LANES * lines {
            // Elements come in order, and pairs as they lie.
            let (line, word) = match A::WORD {
                Word::Single => (place_of_element(i) % 2, place_of_element(i) / 2),
                Word::Pair => (0, i),
            };
            let mut values = [V::splat(0.0); T];
            for t in 0..T {
                values[t] = V::load(&x[t][chunk * LANES * lines + i]);
            }
            let weights: &[_; R] = &weights[line].as_chunks().0[rows];
            for r in 0..R {
                let weight = V::splat(weights[r].0[word]);
                for t in 0..T {
                    of_segment[r][t] = A::add(of_segment[r][t], weight, values[t]);
                }
            }
        }
    }
    for (sums, t) in sums.iter_mut().zip(0..T) {
        let sums: &mut [_; R] = &mut sums.as_chunks_mut().0[rows];
        for r in 0..R {
            sums[r] = Aligned(V::store(V::add(V::load(&sums[r].0), of_segment[r][t])));
        }
    }
}

const _: () = assert!(ROWS.is_multiple_of(16));
