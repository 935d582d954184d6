//! Groups of 16-bit values, encoded by comparing with thresholds.

use super::format::{DROP, DROP_INPUT, FORCE, KEEP};
use super::windows::{four_streams, prefetch_next_window};
use crate::cpu::rounding::thresholds::Thresholds;
use crate::cpu::simd::halfwords::{HALFWORDS, HalfwordVector, Halfwords};
use crate::cpu::simd::{LANES, Vector};
use crate::element::{Element, halfword_to_f32};

/// The bits of the largest magnitude, widened to f32.
#[inline(always)]
pub(in crate::cpu) fn amax_bits<T: Element, V: HalfwordVector>(simd: V, values: &[u16]) -> u32 {
    let (chunks, rest) = values.as_chunks::<HALFWORDS>();
    let (fours, chunks) = four_streams(chunks);
    let mut largest = [simd.splat_halfword(0); 4];
    for four in fours {
        for (chunk, largest) in four.into_iter().zip(&mut largest) {
            prefetch_next_window(chunk);
            *largest = simd.max_halfwords(*largest, simd.magnitudes(simd.load_halfwords(chunk)));
        }
    }
    for (chunk, largest) in chunks.iter().zip(&mut largest) {
        *largest = simd.max_halfwords(*largest, simd.magnitudes(simd.load_halfwords(chunk)));
    }
    let [a, b, c, d] = largest;
    let mut most = simd.max_halfword(simd.max_halfwords(simd.max_halfwords(a, b), simd.max_halfwords(c, d)));
    for bits in rest {
        most = most.max(bits & 0x7FFF);
    }
    halfword_to_f32::<T>(most).to_bits()
}

/// The amax of each block of a group. NaN or infinite if an element is.
#[inline(always)]
pub(in crate::cpu) fn amax<T: Element, V: Vector, const N: usize>(simd: V, group: &[T]) -> V::Number {
    let (chunks, _) = bytemuck::cast_slice::<T, u16>(group).as_chunks::<HALFWORDS>();
    let mut halves = [simd.splat_halfword(0); 8];
    for (half, chunks) in halves.iter_mut().zip(chunks.chunks_exact(N / LANES)) {
        let mut both = [*half; 2];
        for (magnitudes, chunk) in both.iter_mut().zip(chunks) {
            *magnitudes = simd.magnitudes(simd.load_halfwords(chunk));
        }
        *half = if N == LANES { both[0] } else { simd.fold_halfwords(both[0], both[1]) };
    }
    simd.widen::<T>(simd.max_halfwords_of_halves(&halves))
}

/// Encodes groups under the scales of their blocks.
#[inline(always)]
pub(in crate::cpu) fn encode<V: HalfwordVector, const N: usize, const SIGNS: u8>(
    simd: V,
    values: &[u16],
    thresholds: &Thresholds,
    scales: &[u8],
    codes: &mut [u8],
) {
    let steps = simd.steps();
    let chunks = values.as_chunks::<HALFWORDS>().0.as_chunks::<4>().0;
    let chunks = chunks.iter().zip(codes.as_chunks_mut::<{ 2 * HALFWORDS }>().0);
    for ((chunks, codes), scales) in chunks.zip(scales.chunks_exact(4 * HALFWORDS / N)) {
        let mut nibbles = [simd.splat_halfword(0); 4];
        for ((nibbles, chunk), scales) in
            nibbles.iter_mut().zip(chunks).zip(scales.chunks_exact(HALFWORDS / N))
        {
            prefetch_next_window(chunk);
            let rows = match scales {
                [one] => simd.one_row(thresholds.row(*one)),
                _ => simd.two_rows(thresholds.row(scales[0]), thresholds.row(scales[1])),
            };
            *nibbles = nibbles_of::<V, SIGNS>(simd, chunk, rows, steps);
        }
        *codes = simd.pack(&nibbles);
    }
}

/// Encodes values, with signs.
#[inline(always)]
fn nibbles_of<V: HalfwordVector, const SIGNS: u8>(
    simd: V,
    values: &Halfwords,
    rows: V::Rows,
    steps: V::Steps,
) -> V::Halfwords {
    let x = simd.load_halfwords(values);
    let magnitudes = simd.magnitudes(x);
    let codes = simd.codes(magnitudes, rows, steps);
    let signs = match SIGNS {
        KEEP => x,
        DROP_INPUT => simd.and_halfwords(x, simd.above_zero(magnitudes)),
        DROP => simd.and_halfwords(x, simd.above_zero(simd.and_halfwords(codes, simd.splat_halfword(7)))),
        FORCE => simd.or_not_halfwords(x, simd.above_zero(magnitudes)),
        _ => unreachable!("a treatment of -0"),
    };
    simd.signed(codes, signs)
}
