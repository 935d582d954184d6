//! Converting scales from one layout to the other, on the CPU.

use microscale_formats::ScaleLayout;
use microscale_formats::layout::{TILE_BYTES, TILE_COLS, TILE_ROWS};
use rayon::prelude::*;

use crate::tensor::QuantizedShape;

/// Linear scales in the swizzled layout, padded with zeros. `shape` is the target's.
pub(crate) fn swizzle(linear: &[u8], shape: QuantizedShape) -> Vec<u8> {
    let blocks = shape.blocks_per_row();
    let bytes = ScaleLayout::Swizzled.bytes(shape.rows, blocks).unwrap_or(0);
    let mut swizzled = vec![0; bytes];
    if !linear.is_empty() {
        let tile_rows = swizzled.par_chunks_mut(blocks.div_ceil(TILE_COLS) * TILE_BYTES);
        tile_rows.zip(linear.par_chunks(TILE_ROWS * blocks)).for_each(|(tiles, linear)| {
            for (row, scales) in linear.chunks(blocks).enumerate() {
                scatter_row(scales, row, tiles);
            }
        });
    }
    swizzled
}

/// Swizzled scales in the linear layout, without padding. `shape` is the target's.
pub(crate) fn unswizzle(swizzled: &[u8], shape: QuantizedShape) -> Vec<u8> {
    let blocks = shape.blocks_per_row();
    let mut linear = vec![0; shape.rows * blocks];
    if !linear.is_empty() {
        linear.par_chunks_mut(blocks).enumerate().for_each(|(row, scales)| {
            for (block, scale) in scales.iter_mut().enumerate() {
                *scale = swizzled[ScaleLayout::Swizzled.offset(row, block, blocks)];
            }
        });
    }
    linear
}

/// Puts a row's scales into the tiles of its 128 rows; `row` counts within these.
pub(super) fn scatter_row(scales: &[u8], row: usize, tiles: &mut [u8]) {
    for (block, scale) in scales.iter().enumerate() {
        tiles[ScaleLayout::Swizzled.offset(row, block, scales.len())] = *scale;
    }
}
