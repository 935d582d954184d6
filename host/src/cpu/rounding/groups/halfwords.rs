//! The codes of groups of 16-bit values, by comparing them with thresholds.

use super::format::{DROP, DROP_INPUT, FORCE, KEEP};
use super::windows::{four_streams, prefetch_next_window};
use crate::cpu::rounding::thresholds::Thresholds;
use crate::cpu::simd::halfwords::{HALFWORDS, HalfwordVector, Halfwords};
use crate::cpu::simd::{LANES, Vector};
use crate::element::{Element, halfword_to_f32};

/// The bits of the largest magnitude.
#[inline(always)]
pub(in crate::cpu) fn amax_bits<T: Element, V: HalfwordVector>(values: &[u16]) -> u32 {
    let (chunks, rest) = values.as_chunks::<HALFWORDS>();
    let (fours, chunks) = four_streams(chunks);
    let mut largest = [V::splat_halfword(0); 4];
    for four in fours {
        for (chunk, largest) in four.into_iter().zip(&mut largest) {
            prefetch_next_window(chunk);
            *largest = V::max_halfwords(*largest, V::magnitudes(V::load_halfwords(chunk)));
        }
    }
    for (chunk, largest) in chunks.iter().zip(&mut largest) {
        *largest = V::max_halfwords(*largest, V::magnitudes(V::load_halfwords(chunk)));
    }
    let [a, b, c, d] = largest;
    let mut most = V::max_halfword(V::max_halfwords(V::max_halfwords(a, b), V::max_halfwords(c, d)));
    for bits in rest {
        most = most.max(bits & 0x7FFF);
    }
    halfword_to_f32::<T>(most).to_bits()
}

/// The amax of each block of a group; it is not finite where an element is not.
#[inline(always)]
pub(in crate::cpu) fn amax<T: Element, V: Vector, const N: usize>(group: &[T]) -> V::Number {
    let (chunks, _) = bytemuck::cast_slice::<T, u16>(group).as_chunks::<HALFWORDS>();
    let mut halves = [V::splat_halfword(0); 8];
    for (half, chunks) in halves.iter_mut().zip(chunks.chunks_exact(N / LANES)) {
        let mut both = [*half; 2];
        for (magnitudes, chunk) in both.iter_mut().zip(chunks) {
            *magnitudes = V::magnitudes(V::load_halfwords(chunk));
        }
        *half = if N == LANES { both[0] } else { V::fold_halfwords(both[0], both[1]) };
    }
    V::widen::<T>(V::max_halfwords_of_halves(&halves))
}

/// The codes of groups whose blocks have these scales.
#[inline(always)]
pub(in crate::cpu) fn encode<V: HalfwordVector, const N: usize, const SIGNS: u8>(
    values: &[u16],
    thresholds: &Thresholds,
    scales: &[u8],
    codes: &mut [u8],
) {
    let steps = V::steps();
    let chunks = values.as_chunks::<HALFWORDS>().0.as_chunks::<4>().0;
    let chunks = chunks.iter().zip(codes.as_chunks_mut::<{ 2 * HALFWORDS }>().0);
    for ((chunks, codes), scales) in chunks.zip(scales.chunks_exact(4 * HALFWORDS / N)) {
        let mut nibbles = [V::splat_halfword(0); 4];
        for ((nibbles, chunk), scales) in
            nibbles.iter_mut().zip(chunks).zip(scales.chunks_exact(HALFWORDS / N))
        {
            prefetch_next_window(chunk);
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
fn nibbles_of<V: HalfwordVector, const SIGNS: u8>(
    values: &Halfwords,
    rows: V::Rows,
    steps: V::Steps,
) -> V::Halfwords {
    let x = V::load_halfwords(values);
    let magnitudes = V::magnitudes(x);
    let codes = V::codes(magnitudes, rows, steps);
    let signs = match SIGNS {
        KEEP => x,
        DROP_INPUT => V::and_halfwords(x, V::above_zero(magnitudes)),
        DROP => V::and_halfwords(x, V::above_zero(V::and_halfwords(codes, V::splat_halfword(7)))),
        FORCE => V::or_not_halfwords(x, V::above_zero(magnitudes)),
        _ => unreachable!("a treatment of -0"),
    };
    V::signed(codes, signs)
}
