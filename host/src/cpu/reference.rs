//! The reference: the block definition of `microscale_formats`, a block after another.

use microscale_formats::E8m0;
use microscale_formats::mxfp4::{self, BLOCK, BLOCK_BYTES};

use super::policy::{Tally, block_at, quantize_block};
use crate::element::Element;
use crate::recipe::Recipe;

pub(super) fn quantize<T: Element>(
    values: &[T],
    recipe: &Recipe,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Tally {
    let mut tally = Tally::default();
    for (i, (codes, scale)) in codes.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().zip(scales).enumerate() {
        let mut padded = [T::default(); BLOCK];
        let block = block_at(values, i, &mut padded);
        *scale = quantize_block(block, i * BLOCK, recipe, codes, &mut tally);
    }
    tally
}

pub(super) fn dequantize<T: Element>(codes: &[u8], scales: &[u8], values: &mut [T]) {
    let blocks = codes.as_chunks::<BLOCK_BYTES>().0.iter().zip(scales);
    for ((codes, scale), values) in blocks.zip(values.chunks_mut(BLOCK)) {
        let block = mxfp4::dequantize_block(E8m0::from_bits(*scale), codes);
        values.iter_mut().zip(block).for_each(|(value, wide)| *value = T::from_f32(wide));
    }
}
