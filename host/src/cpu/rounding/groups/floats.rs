//! Groups of f32, by arithmetic on vectors: even and odd elements apart, for a byte has the codes of one of
//! each.

use microscale_formats::{e2m1, nvfp4};

use super::format::{DROP_INPUT, Factors, GroupFormat, KEEP};
use super::windows::{four_streams, prefetch_next_window};
use crate::cpu::simd::{LANES, Vector};

/// Elements that two vectors hold: of one block of MXFP4 or two of NVFP4.
const PAIRS: usize = 2 * LANES;

/// Elements with an even index, and the others.
#[inline(always)]
fn pairs<V: Vector>(values: &[f32; PAIRS]) -> (V::Number, V::Number) {
    let halves = values.as_chunks::<LANES>().0;
    V::deinterleave(V::load(&halves[0]), V::load(&halves[1]))
}

/// The bits of magnitudes.
#[inline(always)]
fn magnitudes<V: Vector>(x: V::Number) -> V::Bits {
    V::and(V::bits(x), V::splat_bits(0x7FFF_FFFF))
}

/// The magnitudes of two vectors, the larger ones of each two.
#[inline(always)]
fn larger<V: Vector>(values: &[f32; PAIRS]) -> V::Bits {
    let halves = values.as_chunks::<LANES>().0;
    V::max_bits(magnitudes::<V>(V::load(&halves[0])), magnitudes::<V>(V::load(&halves[1])))
}

/// The bits of the largest magnitude.
#[inline(always)]
pub(in crate::cpu) fn amax_bits<V: Vector>(values: &[f32]) -> u32 {
    let (chunks, rest) = values.as_chunks::<PAIRS>();
    let (fours, chunks) = four_streams(chunks);
    let mut largest = [V::splat_bits(0); 4];
    for four in fours {
        for (chunk, largest) in four.into_iter().zip(&mut largest) {
            prefetch_next_window(chunk);
            *largest = V::max_bits(*largest, larger::<V>(chunk));
        }
    }
    for (chunk, largest) in chunks.iter().zip(&mut largest) {
        *largest = V::max_bits(*largest, larger::<V>(chunk));
    }
    let [a, b, c, d] = largest;
    let mut most = 0;
    for magnitude in V::store(V::number(V::max_bits(V::max_bits(a, b), V::max_bits(c, d)))) {
        most = magnitude.to_bits().max(most);
    }
    for value in rest {
        most = most.max(value.to_bits() & 0x7FFF_FFFF);
    }
    most
}

/// The amax of each block of a group; it is not finite where an element is not.
#[inline(always)]
pub(in crate::cpu) fn amax<V: Vector, const N: usize>(group: &[f32]) -> V::Number {
    let mut halves = [V::splat_bits(0); LANES / 2];
    let (chunks, _) = group.as_chunks::<PAIRS>();
    for (half, chunks) in halves.iter_mut().zip(chunks.chunks_exact(N / LANES)) {
        let mut both = [*half; 2];
        for (largest, chunk) in both.iter_mut().zip(chunks) {
            let (even, odd) = pairs::<V>(chunk);
            *largest = V::max_bits(magnitudes::<V>(even), magnitudes::<V>(odd));
        }
        *half = if N == LANES { both[0] } else { V::fold_max(both[0], both[1]) };
    }
    V::number(V::max_of_halves(&halves))
}

/// The codes of groups whose blocks have these scales.
#[inline(always)]
pub(in crate::cpu) fn encode<V: Vector, G: GroupFormat<N>, const N: usize, const SIGNS: u8>(
    values: &[f32],
    groups: &G,
    scales: &[u8],
    codes: &mut [u8],
) {
    assert!(SIGNS == KEEP || SIGNS == DROP_INPUT, "f32 with another treatment of -0 are not for groups");
    let chunks = values.as_chunks::<PAIRS>().0.iter().zip(codes.as_chunks_mut::<LANES>().0);
    for ((chunk, codes), scales) in chunks.zip(scales.chunks_exact(PAIRS / N)) {
        prefetch_next_window(chunk);
        // The blocks of the two halves.
        let factors = groups.factors::<V>([scales[0], scales[PAIRS / N - 1]]);
        let (even, odd) = pairs::<V>(chunk);
        let (even, even_signs) = code::<V, SIGNS>(even, &factors);
        let (odd, odd_signs) = code::<V, SIGNS>(odd, &factors);
        let magnitudes = V::or(even, V::shift_left(odd, 4));
        // The odd one's sign is in bit 31 and the even one's brought to bit 27.
        let bit_31 = V::splat_bits(0x8000_0000);
        let signs = V::select_bits(bit_31, odd_signs, V::shift_right(even_signs, 4));
        let signs = V::and(V::shift_right(signs, 24), V::splat_bits(0x88));
        *codes = V::low_bytes(V::or(magnitudes, signs));
    }
}

/// The magnitudes of the codes in the low three bits, below zeros, and bits that begin with the codes' signs.
#[inline(always)]
fn code<V: Vector, const SIGNS: u8>(x: V::Number, factors: &Factors<V::Number>) -> (V::Bits, V::Bits) {
    let scaled = match factors.rest {
        None => V::mul(x, factors.y),
        Some([z, d]) => nvfp4::quotient::<V>(x, [factors.y, z], d, false),
    };
    // Values above 6 have the code of 6, and the identity holds up to there.
    let code = e2m1::magnitude_codes_even::<V>(V::min_magnitude(scaled, V::splat(e2m1::MAX)));
    // -0 + 0 is 0; all else stays as it is.
    let signs = if SIGNS == KEEP { x } else { V::add(x, V::splat(0.0)) };
    (V::bits(code), V::bits(signs))
}
