//! Groups of 16-bit values, by comparing.

use super::grouped::{DROP, DROP_INPUT, FORCE, KEEP};
use super::reading::{prefetch, side_by_side};
use crate::cpu::thresholds::Thresholds;
use crate::cpu::vector::{LANES, Vector};
use crate::cpu::words::{WORDS, WordVector, Words};
use crate::element::{Element, word_to_f32};

/// The bits of the largest magnitude.
#[inline(always)]
pub(super) fn amax_bits<T: Element, V: WordVector>(values: &[u16]) -> u32 {
    let (chunks, rest) = values.as_chunks::<WORDS>();
    let (fours, chunks) = side_by_side(chunks);
    let mut largest = [V::splat_word(0); 4];
    for four in fours {
        for (chunk, largest) in four.into_iter().zip(&mut largest) {
            prefetch(chunk);
            *largest = V::larger(*largest, V::magnitudes(V::load_words(chunk)));
        }
    }
    for (chunk, largest) in chunks.iter().zip(&mut largest) {
        *largest = V::larger(*largest, V::magnitudes(V::load_words(chunk)));
    }
    let [a, b, c, d] = largest;
    let mut most = V::largest(V::larger(V::larger(a, b), V::larger(c, d)));
    for bits in rest {
        most = most.max(bits & 0x7FFF);
    }
    word_to_f32::<T>(most).to_bits()
}

/// The amax of each block of a group: something that is not finite where an element is not.
#[inline(always)]
pub(super) fn amax<T: Element, V: Vector, const N: usize>(group: &[T]) -> V::Number {
    let (chunks, _) = bytemuck::cast_slice::<T, u16>(group).as_chunks::<WORDS>();
    let mut halves = [V::splat_word(0); 8];
    for (half, chunks) in halves.iter_mut().zip(chunks.chunks_exact(N / LANES)) {
        let mut both = [*half; 2];
        for (magnitudes, chunk) in both.iter_mut().zip(chunks) {
            *magnitudes = V::magnitudes(V::load_words(chunk));
        }
        *half = if N == LANES { both[0] } else { V::folded_words(both[0], both[1]) };
    }
    V::widened::<T>(V::largest_words_of_halves(&halves))
}

/// The codes of groups whose blocks have these scales.
#[inline(always)]
pub(super) fn encode<V: WordVector, const N: usize, const SIGNS: u8>(
    values: &[u16],
    thresholds: &Thresholds,
    scales: &[u8],
    codes: &mut [u8],
) {
    let steps = V::steps();
    let chunks = values.as_chunks::<WORDS>().0.as_chunks::<4>().0;
    let chunks = chunks.iter().zip(codes.as_chunks_mut::<{ 2 * WORDS }>().0);
    for ((chunks, codes), scales) in chunks.zip(scales.chunks_exact(4 * WORDS / N)) {
        let mut nibbles = [V::splat_word(0); 4];
        for ((nibbles, chunk), scales) in nibbles.iter_mut().zip(chunks).zip(scales.chunks_exact(WORDS / N)) {
            prefetch(chunk);
            let rows = match scales {
                [one] => V::one_row(thresholds.row(*one)),
                _ => V::two_rows(thresholds.row(scales[0]), thresholds.row(scales[1])),
            };
            *nibbles = nibbles_of::<V, SIGNS>(chunk, rows, steps);
        }
        *codes = V::pack(&nibbles);
    }
}

/// Codes with their signs.
#[inline(always)]
fn nibbles_of<V: WordVector, const SIGNS: u8>(values: &Words, rows: V::Rows, steps: V::Steps) -> V::Words {
    let x = V::load_words(values);
    let magnitudes = V::magnitudes(x);
    let codes = V::codes(magnitudes, rows, steps);
    let signs = match SIGNS {
        KEEP => x,
        DROP_INPUT => V::and_words(x, V::above_zero(magnitudes)),
        DROP => V::and_words(x, V::above_zero(V::and_words(codes, V::splat_word(7)))),
        FORCE => V::or_not_words(x, V::above_zero(magnitudes)),
        _ => unreachable!("a treatment of -0"),
    };
    V::signed(codes, signs)
}
