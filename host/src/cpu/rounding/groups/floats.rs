//! Groups of f32. Even and odd elements are in separate vectors, because a byte has one of each.

use microscale_formats::e2m1;

use super::format::{DROP_INPUT, Factors, GroupFormat, KEEP};
use super::windows::{four_streams, prefetch_next_window};
use crate::cpu::simd::{LANES, Vector, arithmetic};

/// Elements of two vectors: one block of MXFP4 or two of NVFP4.
const PAIRS: usize = 2 * LANES;

/// Splits into elements with even and odd index.
#[inline(always)]
fn pairs<V: Vector>(simd: V, values: &[f32; PAIRS]) -> (V::Number, V::Number) {
    let halves = values.as_chunks::<LANES>().0;
    simd.deinterleave(simd.load(&halves[0]), simd.load(&halves[1]))
}

/// Clears the sign bits.
#[inline(always)]
fn magnitudes<V: Vector>(simd: V, x: V::Number) -> V::Bits {
    simd.and(simd.bits(x), simd.splat_bits(0x7FFF_FFFF))
}

/// The larger magnitude of the elements `i` and `i + 16`.
#[inline(always)]
fn larger<V: Vector>(simd: V, values: &[f32; PAIRS]) -> V::Bits {
    let halves = values.as_chunks::<LANES>().0;
    simd.max_bits(magnitudes(simd, simd.load(&halves[0])), magnitudes(simd, simd.load(&halves[1])))
}

/// The bits of the largest magnitude.
#[inline(always)]
pub(in crate::cpu) fn amax_bits<V: Vector>(simd: V, values: &[f32]) -> u32 {
    let (chunks, rest) = values.as_chunks::<PAIRS>();
    let (fours, chunks) = four_streams(chunks);
    let mut largest = [simd.splat_bits(0); 4];
    for four in fours {
        for (chunk, largest) in four.into_iter().zip(&mut largest) {
            prefetch_next_window(chunk);
            *largest = simd.max_bits(*largest, larger(simd, chunk));
        }
    }
    for (chunk, largest) in chunks.iter().zip(&mut largest) {
        *largest = simd.max_bits(*largest, larger(simd, chunk));
    }
    let [a, b, c, d] = largest;
    let mut most = 0;
    for magnitude in simd.store(simd.number(simd.max_bits(simd.max_bits(a, b), simd.max_bits(c, d)))) {
        most = magnitude.to_bits().max(most);
    }
    for value in rest {
        most = most.max(value.to_bits() & 0x7FFF_FFFF);
    }
    most
}

/// The amax of each block of a group. NaN or infinite if an element is.
#[inline(always)]
pub(in crate::cpu) fn amax<V: Vector, const N: usize>(simd: V, group: &[f32]) -> V::Number {
    let mut halves = [simd.splat_bits(0); LANES / 2];
    let (chunks, _) = group.as_chunks::<PAIRS>();
    for (half, chunks) in halves.iter_mut().zip(chunks.chunks_exact(N / LANES)) {
        let mut both = [*half; 2];
        for (largest, chunk) in both.iter_mut().zip(chunks) {
            let (even, odd) = pairs(simd, chunk);
            *largest = simd.max_bits(magnitudes(simd, even), magnitudes(simd, odd));
        }
        *half = if N == LANES { both[0] } else { simd.fold_max(both[0], both[1]) };
    }
    simd.number(simd.max_of_halves(&halves))
}

/// Encodes groups under the scales of their blocks.
#[inline(always)]
pub(in crate::cpu) fn encode<V: Vector, G: GroupFormat<N>, const N: usize, const SIGNS: u8>(
    simd: V,
    values: &[f32],
    groups: &G,
    scales: &[u8],
    codes: &mut [u8],
) {
    assert!(SIGNS == KEEP || SIGNS == DROP_INPUT, "f32 with another treatment of -0 are not for groups");
    let chunks = values.as_chunks::<PAIRS>().0.iter().zip(codes.as_chunks_mut::<LANES>().0);
    for ((chunk, codes), scales) in chunks.zip(scales.chunks_exact(PAIRS / N)) {
        prefetch_next_window(chunk);
        // The factors of the first and second half; MXFP4 has one block in both.
        let factors = groups.factors(simd, [scales[0], scales[PAIRS / N - 1]]);
        let (even, odd) = pairs(simd, chunk);
        let (even, even_signs) = code::<V, SIGNS>(simd, even, &factors);
        let (odd, odd_signs) = code::<V, SIGNS>(simd, odd, &factors);
        let magnitudes = simd.or(even, simd.shift_left(odd, 4));
        // The sign of the odd element is in bit 31; the sign of the even one moves to bit 27.
        let bit_31 = simd.splat_bits(0x8000_0000);
        let signs = simd.select_bits(bit_31, odd_signs, simd.shift_right(even_signs, 4));
        let signs = simd.and(simd.shift_right(signs, 24), simd.splat_bits(0x88));
        *codes = simd.low_bytes(simd.or(magnitudes, signs));
    }
}

/// Encodes elements. Returns the magnitude codes in the low three bits, and the signs in bit 31.
#[inline(always)]
fn code<V: Vector, const SIGNS: u8>(
    simd: V,
    x: V::Number,
    factors: &Factors<V::Number>,
) -> (V::Bits, V::Bits) {
    let scaled = match factors.rest {
        None => simd.mul(x, factors.y),
        Some([z, d]) => arithmetic::quotient(simd, x, [factors.y, z], d),
    };
    // Magnitudes above 6 get the code of 6, and the identity holds up to 6.
    let code = arithmetic::magnitude_codes_even(simd, simd.min_magnitude(scaled, simd.splat(e2m1::MAX)));
    // Adding 0 turns −0 into 0 and changes nothing else.
    let signs = if SIGNS == KEEP { x } else { simd.add(x, simd.splat(0.0)) };
    (simd.bits(code), simd.bits(signs))
}
