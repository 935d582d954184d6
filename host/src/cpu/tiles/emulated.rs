//! Tiles by vectors, with the bits of AMX.

use std::marker::PhantomData;

use super::{PAIRS, TOKENS, Tile, TileProducts};
use crate::cpu::arranged::Aligned;
use crate::cpu::panels::{PANELS, TokenSums};
use crate::cpu::vector::Vector;

/// TDPBF16PS, as Intel's manual and processors have it: the products of a tile's elements with an even index are fused to one sum, in
/// order, those with an odd index to another, and both sums, together, come to the sum before them. Each step rounds to nearest,
/// and takes subnormal numbers for zeros, before and after.
pub(in crate::cpu) struct Emulated<V>(PhantomData<V>);

impl<V> Emulated<V> {
    pub(in crate::cpu) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<V: Vector> TileProducts for Emulated<V> {
    #[inline(always)]
    fn multiply(
        &self,
        x: &[Tile],
        parts: usize,
        weights: &[[Aligned; PANELS]],
        sums: &mut [TokenSums; TOKENS],
    ) {
        let weights = weights.as_chunks::<PAIRS>().0;
        for (token, sums) in sums.iter_mut().enumerate() {
            for (panel, of_panel) in sums.iter_mut().enumerate() {
                let mut sum = V::splat(0.0);
                for (weights, x) in weights.iter().zip(x.chunks_exact(parts)) {
                    for x in x {
                        sum = add_products::<V>(sum, weights, panel, &x[token]);
                    }
                }
                *of_panel = Aligned(V::store(sum));
            }
        }
    }
}

/// Adds the products of a token's activations and a panel's weights, a row of weights a lane.
#[inline(always)]
fn add_products<V: Vector>(
    sum: V::Number,
    weights: &[[Aligned; PANELS]; PAIRS],
    panel: usize,
    x: &[u16; 2 * PAIRS],
) -> V::Number {
    let [mut even, mut odd] = [V::splat(0.0); 2];
    for pair in 0..PAIRS {
        let weights = V::bits(V::load(&weights[pair][panel].0));
        let low = flushed::<V>(V::number(V::shift_left(weights, 16)));
        let high = flushed::<V>(V::number(V::and(weights, V::splat_bits(0xFFFF_0000))));
        even = flushed::<V>(V::fma(activation::<V>(x[2 * pair]), low, even));
        odd = flushed::<V>(V::fma(activation::<V>(x[2 * pair + 1]), high, odd));
    }
    flushed::<V>(V::add(flushed::<V>(V::add(even, odd)), sum))
}

/// A bf16 in every lane.
#[inline(always)]
fn activation<V: Vector>(bits: u16) -> V::Number {
    flushed::<V>(V::number(V::splat_bits(u32::from(bits) << 16)))
}

/// Zeros, with their signs, for subnormal numbers.
#[inline(always)]
fn flushed<V: Vector>(numbers: V::Number) -> V::Number {
    let bits = V::bits(numbers);
    let are_normal = V::above(V::and(bits, V::splat_bits(0x7FFF_FFFF)), V::splat_bits(0x007F_FFFF));
    V::select(are_normal, numbers, V::number(V::and(bits, V::splat_bits(0x8000_0000))))
}
