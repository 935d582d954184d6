//! Converts scales between the linear and the swizzled layout in host memory.

use microscale_formats::ScaleLayout;
use microscale_formats::layout::{TILE_BYTES, TILE_COLS, TILE_ROWS, TILE_ROWS_APART, TILE_ROWS_TOGETHER};
use rayon::prelude::*;

use crate::shape::QuantizedShape;

/// Swizzles linear scales and pads them with zeros. `shape` is the target's.
pub(crate) fn swizzle(linear: &[u8], shape: QuantizedShape) -> Vec<u8> {
    if shape.format.scale_bytes() > 1 {
        return moved(linear, shape, ScaleLayout::Linear, ScaleLayout::Swizzled);
    }
    let blocks = shape.blocks_per_row();
    let bytes = ScaleLayout::Swizzled.bytes(shape.rows, blocks).unwrap_or(0);
    let mut swizzled = vec![0; bytes];
    if !linear.is_empty() {
        let tile_rows = swizzled.par_chunks_mut(blocks.div_ceil(TILE_COLS) * TILE_BYTES);
        tile_rows.zip(linear.par_chunks(TILE_ROWS * blocks)).for_each(|(tiles, linear)| {
            scatter(linear, blocks, tiles);
        });
    }
    swizzled
}

/// Converts swizzled scales to the linear layout without padding. `shape` is the target's.
pub(crate) fn unswizzle(swizzled: &[u8], shape: QuantizedShape) -> Vec<u8> {
    if shape.format.scale_bytes() > 1 {
        return moved(swizzled, shape, ScaleLayout::Swizzled, ScaleLayout::Linear);
    }
    let blocks = shape.blocks_per_row();
    let mut linear = vec![0; shape.rows * blocks];
    if !linear.is_empty() {
        let tile_rows = swizzled.par_chunks(blocks.div_ceil(TILE_COLS) * TILE_BYTES);
        tile_rows.zip(linear.par_chunks_mut(TILE_ROWS * blocks)).for_each(|(tiles, linear)| {
            for (row, scales) in linear.chunks_mut(blocks).enumerate() {
                gather_row(tiles, row, scales);
            }
        });
    }
    linear
}

/// Converts scales of several bytes, one by one. Offsets count scales, not bytes.
fn moved(scales: &[u8], shape: QuantizedShape, from: ScaleLayout, to: ScaleLayout) -> Vec<u8> {
    let (bytes, blocks) = (shape.format.scale_bytes(), shape.blocks_per_row());
    let mut moved = vec![0; to.bytes(shape.rows, blocks).unwrap_or(0) * bytes];
    for (row, block) in (0..shape.rows).flat_map(|row| (0..blocks).map(move |block| (row, block))) {
        let [from, to] = [from, to].map(|layout| layout.offset(row, block, blocks) * bytes);
        moved[to..][..bytes].copy_from_slice(&scales[from..][..bytes]);
    }
    moved
}

/// Stores the scales of up to 128 rows in their tiles.
fn scatter(linear: &[u8], blocks: usize, tiles: &mut [u8]) {
    for row in 0..TILE_ROWS_APART.min(linear.len() / blocks) {
        let rows: [_; TILE_ROWS_TOGETHER] = std::array::from_fn(|i| {
            let row = row + i * TILE_ROWS_APART;
            linear.get(row * blocks..(row + 1) * blocks)
        });
        if let [Some(a), Some(b), Some(c), Some(d)] = rows {
            scatter_together([a, b, c, d], row, tiles);
            continue;
        }
        for (i, scales) in rows.into_iter().enumerate() {
            scatter_row(scales.unwrap_or_default(), row + i * TILE_ROWS_APART, tiles);
        }
    }
}

/// Stores the scales of four interleaved rows in their tiles, 16 bytes at a time.
///
/// `row` is the first of the rows.
fn scatter_together(rows: [&[u8]; TILE_ROWS_TOGETHER], row: usize, tiles: &mut [u8]) {
    let place = place_of(row);
    let (whole, _) = tiles.as_chunks_mut::<TILE_BYTES>();
    let [a, b, c, d] = rows.map(|row| row.as_chunks::<TILE_COLS>().0);
    for ((((tile, a), b), c), d) in whole.iter_mut().zip(a).zip(b).zip(c).zip(d) {
        let together = tile[place..][..TILE_ROWS_TOGETHER * TILE_COLS].as_chunks_mut().0;
        together.copy_from_slice(&[*a, *b, *c, *d]);
    }
    let done = rows[0].len() / TILE_COLS;
    if let Some(tile) = whole.get_mut(done) {
        for (row, place) in rows.into_iter().zip((place..).step_by(TILE_COLS)) {
            let rest = &row[done * TILE_COLS..];
            tile[place..][..rest.len()].copy_from_slice(rest);
        }
    }
}

/// Stores a row's scales in the tiles of its 128 rows. `row` counts within these.
#[inline]
pub(crate) fn scatter_row(scales: &[u8], row: usize, tiles: &mut [u8]) {
    let place = place_of(row);
    let (fours, rest) = scales.as_chunks::<TILE_COLS>();
    let (tiles, _) = tiles.as_chunks_mut::<TILE_BYTES>();
    for (four, tile) in fours.iter().zip(&mut *tiles) {
        tile[place..][..TILE_COLS].copy_from_slice(four);
    }
    if let Some(tile) = tiles.get_mut(fours.len()) {
        tile[place..][..rest.len()].copy_from_slice(rest);
    }
}

/// Reads a row's scales from the tiles of its 128 rows.
#[inline]
fn gather_row(tiles: &[u8], row: usize, scales: &mut [u8]) {
    let place = place_of(row);
    let (tiles, _) = tiles.as_chunks::<TILE_BYTES>();
    let (fours, rest) = scales.as_chunks_mut::<TILE_COLS>();
    for (four, tile) in fours.iter_mut().zip(tiles) {
        four.copy_from_slice(&tile[place..][..TILE_COLS]);
    }
    if let Some(tile) = tiles.get(fours.len()) {
        rest.copy_from_slice(&tile[place..][..rest.len()]);
    }
}

/// Returns the offset of a row's four scales in a tile. `row` counts within the tile.
#[inline]
fn place_of(row: usize) -> usize {
    ScaleLayout::Swizzled.offset(row % TILE_ROWS, 0, TILE_COLS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use microscale_formats::Format;

    #[test]
    fn every_scale_round_trips_through_the_swizzled_layout() {
        let mut random = fastrand::Rng::with_seed(5);
        for rows in [1, 31, 32, 33, 97, 127, 128, 129, 300] {
            for blocks in [1, 2, 3, 4, 5, 8, 17] {
                let linear: Vec<u8> = (0..rows * blocks).map(|_| random.u8(..)).collect();
                let shape = QuantizedShape::new(Format::Mxfp4, rows, blocks * Format::Mxfp4.block());
                let shape = shape.with_scale_layout(ScaleLayout::Swizzled);
                let mut expected = vec![0; ScaleLayout::Swizzled.bytes(rows, blocks).unwrap()];
                for (i, scale) in linear.iter().enumerate() {
                    expected[ScaleLayout::Swizzled.offset(i / blocks, i % blocks, blocks)] = *scale;
                }
                assert!(swizzle(&linear, shape) == expected, "{rows} rows of {blocks}");
                assert!(unswizzle(&expected, shape) == linear, "{rows} rows of {blocks}");
            }
        }
    }
}
