//! Tiles by vectors, with the bits of AMX.

use std::marker::PhantomData;

use super::{Tile, TileUnit};
use crate::cpu::products::activations::Aligned;
use crate::cpu::products::panels::Lines;
use crate::cpu::simd::{Lanes, Vector};

/// TDPBF16PS, as Intel's manual and processors have it: the products of a tile's elements with an even index are fused to one sum, in
/// order, those with an odd index to another, and both sums, together, come to the sum before them. Each step rounds to nearest,
/// and takes subnormal numbers for zeros, before and after.
pub(in crate::cpu) struct EmulatedAmx<V>(PhantomData<V>);

impl<V> EmulatedAmx<V> {
    pub(in crate::cpu) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<V: Vector> TileUnit for EmulatedAmx<V> {
    #[inline(always)]
    fn multiply(&self, x: &[Tile], parts: usize, weights: &[Lines], sums: &mut Lines) {
        for (row, row_codes) in sums.iter_mut().enumerate() {
            let mut sum = V::splat(0.0);
            for (weights, x) in weights.iter().zip(x.chunks_exact(parts)) {
                for x in x {
                    sum = add_products::<V>(sum, &weights[row].0, x);
                }
            }
            *row_codes = Aligned(V::store(sum));
        }
    }
}

/// Adds the products of a row's weights and some tokens' activations, a token a lane.
#[inline(always)]
fn add_products<V: Vector>(sum: V::Number, weights: &Lanes<f32>, x: &Tile) -> V::Number {
    let [mut even, mut odd] = [V::splat(0.0); 2];
    for (weights, x) in weights.iter().zip(x) {
        let ([low, high], [low_x, high_x]) =
            (pair::<V>(V::splat_bits(weights.to_bits())), pair::<V>(V::bits(V::load(x))));
        even = flushed::<V>(V::fma(low_x, low, even));
        odd = flushed::<V>(V::fma(high_x, high, odd));
    }
    flushed::<V>(V::add(flushed::<V>(V::add(even, odd)), sum))
}

/// Both bf16 of each lane.
#[inline(always)]
fn pair<V: Vector>(words: V::Bits) -> [V::Number; 2] {
    let (low, high) = (V::shift_left(words, 16), V::and(words, V::splat_bits(0xFFFF_0000)));
    [flushed::<V>(V::number(low)), flushed::<V>(V::number(high))]
}

/// Zeros, with their signs, for subnormal numbers.
#[inline(always)]
fn flushed<V: Vector>(numbers: V::Number) -> V::Number {
    let bits = V::bits(numbers);
    let are_normal = V::above(V::and(bits, V::splat_bits(0x7FFF_FFFF)), V::splat_bits(0x007F_FFFF));
    V::select(are_normal, numbers, V::number(V::and(bits, V::splat_bits(0x8000_0000))))
}
