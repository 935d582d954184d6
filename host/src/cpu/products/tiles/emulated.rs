//! Emulates AMX with vectors, bit by bit.

use super::{Tile, TileUnit};
use crate::cpu::products::activations::Aligned;
use crate::cpu::products::panels::Lines;
use crate::cpu::simd::{Lanes, Vector};

/// TDPBF16PS, as Intel's manual defines it.
///
/// The products of a tile's even elements are fused into one sum, in order, and the products with
/// odd index into another. Both are added, and then added to the previous sum. Each step rounds to
/// nearest, and flushes subnormal operands and results to zero.
pub(in crate::cpu) struct EmulatedAmx<V>(pub(in crate::cpu) V);

impl<V: Vector> TileUnit for EmulatedAmx<V> {
    #[inline(always)]
    fn multiply(&self, x: &[Tile], parts: usize, weights: &[Lines], sums: &mut Lines) {
        let Self(simd) = *self;
        for (row, row_sums) in sums.iter_mut().enumerate() {
            let mut sum = simd.splat(0.0);
            for (weights, x) in weights.iter().zip(x.chunks_exact(parts)) {
                for x in x {
                    sum = add_products(simd, sum, &weights[row].0, x);
                }
            }
            *row_sums = Aligned(simd.store(sum));
        }
    }
}

/// Adds the products of a row's weights and a tile's tokens, one token per lane.
#[inline(always)]
fn add_products<V: Vector>(simd: V, sum: V::Number, weights: &Lanes<f32>, x: &Tile) -> V::Number {
    let [mut even, mut odd] = [simd.splat(0.0); 2];
    for (weights, x) in weights.iter().zip(x) {
        let ([low, high], [low_x, high_x]) =
            (pair(simd, simd.splat_bits(weights.to_bits())), pair(simd, simd.bits(simd.load(x))));
        even = flushed(simd, simd.fma(low_x, low, even));
        odd = flushed(simd, simd.fma(high_x, high, odd));
    }
    flushed(simd, simd.add(flushed(simd, simd.add(even, odd)), sum))
}

/// Widens both bf16 of each lane.
#[inline(always)]
fn pair<V: Vector>(simd: V, words: V::Bits) -> [V::Number; 2] {
    let (low, high) = (simd.shift_left(words, 16), simd.and(words, simd.splat_bits(0xFFFF_0000)));
    [flushed(simd, simd.number(low)), flushed(simd, simd.number(high))]
}

/// Flushes subnormal numbers to zeros of the same sign.
#[inline(always)]
fn flushed<V: Vector>(simd: V, numbers: V::Number) -> V::Number {
    let bits = simd.bits(numbers);
    let are_normal = simd.above(simd.and(bits, simd.splat_bits(0x7FFF_FFFF)), simd.splat_bits(0x007F_FFFF));
    simd.select(are_normal, numbers, simd.number(simd.and(bits, simd.splat_bits(0x8000_0000))))
}
