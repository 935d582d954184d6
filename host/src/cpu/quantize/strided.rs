//! Quantizing along any axis. Strided rows are gathered in tiles that fit the L2 cache.

use microscale_formats::ScaleLayout;
use microscale_formats::layout::{TILE_BYTES, TILE_COLS, TILE_ROWS};
use rayon::prelude::*;

use super::importance::PreparedImportance;
use crate::cpu::blocks::output::Output;
use crate::cpu::blocks::partition::TASK_BLOCKS;
use crate::cpu::isa::Isa;
use crate::cpu::rounding::params::QuantizeParams;
use crate::element::Element;
use crate::elements::Elements;
use crate::layout::scatter_row;
use crate::report::{Position, Report};
use crate::shape::{QuantizedShape, Strided};

/// Columns of a tile: whole blocks.
const COLS: usize = 512;
/// Distance between the rows of a tile, in elements.
///
/// A power of two would map them to few sets of the L1 cache.
const PITCH: usize = COLS + 32;
/// Most rows of a tile. Their elements in one column fill at least two cache lines.
const ROWS: usize = TILE_ROWS;

/// A matrix to quantize, with its parameters.
pub(in crate::cpu) struct StridedRequest<'a, T> {
    pub(in crate::cpu) isa: Isa,
    /// The values. They are checked to hold the matrix.
    pub(in crate::cpu) values: &'a [T],
    pub(in crate::cpu) strided: Strided,
    pub(in crate::cpu) params: QuantizeParams,
    pub(in crate::cpu) importance: &'a PreparedImportance<'a>,
    pub(in crate::cpu) block: usize,
}

impl<T: Element> StridedRequest<'_, T> {
    /// Quantizes to codes and scales of the result's shape. The matrix must not be empty.
    pub(in crate::cpu) fn quantize(
        &self,
        quantized: QuantizedShape,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Report {
        match quantized.scale_layout {
            ScaleLayout::Linear => self.linear(quantized, codes, scales),
            ScaleLayout::Swizzled => self.swizzled(quantized, codes, scales),
        }
    }

    fn linear(&self, quantized: QuantizedShape, codes: &mut [u8], scales: &mut [u8]) -> Report {
        let row_blocks = quantized.blocks_per_row();
        let row_bytes = row_blocks * quantized.format.block_bytes();
        let rows = rows_per_task(size_of::<T>(), quantized);
        let tasks = codes.par_chunks_mut(rows * row_bytes).zip(scales.par_chunks_mut(rows * row_blocks));
        let report = |tile: &mut Vec<T>, (task, (codes, scales)): (usize, (&mut [u8], &mut [u8]))| {
            self.rows(task * rows, Output { codes, scales }, row_blocks, tile)
        };
        tasks.enumerate().map_init(Vec::new, report).reduce(Report::default, Report::plus)
    }

    /// Quantizes with swizzled scales, in tasks of the rows that share a tile of scales.
    fn swizzled(&self, quantized: QuantizedShape, codes: &mut [u8], scales: &mut [u8]) -> Report {
        let row_blocks = quantized.blocks_per_row();
        let row_bytes = row_blocks * quantized.format.block_bytes();
        let tasks = scales.par_chunks_mut(row_blocks.div_ceil(TILE_COLS) * TILE_BYTES);
        let tasks = tasks.zip(codes.par_chunks_mut(TILE_ROWS * row_bytes)).enumerate();
        let reports = tasks.map_init(Vec::new, |tile, (task, (places, codes))| {
            let mut linear = vec![0; codes.len() / row_bytes * row_blocks];
            let output = Output { codes, scales: &mut linear };
            let report = self.rows(task * TILE_ROWS, output, row_blocks, tile);
            places.fill(0);
            for (row, scales) in linear.chunks(row_blocks).enumerate() {
                scatter_row(scales, row, places);
            }
            report
        });
        reports.reduce(Report::default, Report::plus)
    }

    /// Fills the output with rows, starting at row `first`.
    fn rows(&self, first: usize, mut output: Output<'_>, row_blocks: usize, tile: &mut Vec<T>) -> Report {
        let count = output.scales.len() / row_blocks;
        let mut report = Report::default();
        let mut done = 0;
        while done < count {
            // Within a group, rows are `row_stride` apart.
            let in_group = self.strided.rows - (first + done) % self.strided.rows;
            let rows = in_group.min(count - done).min(ROWS);
            let mut output = output.blocks(done * row_blocks, rows * row_blocks);
            for col in (0..self.strided.cols).step_by(COLS) {
                report += self.tile(first + done, col, &mut output, row_blocks, tile);
            }
            done += rows;
        }
        report
    }

    /// Quantizes one tile: up to [`COLS`] columns from `col` on, of rows of one group.
    fn tile(
        &self,
        first: usize,
        col: usize,
        output: &mut Output<'_>,
        row_blocks: usize,
        tile: &mut Vec<T>,
    ) -> Report {
        let rows = output.scales.len() / row_blocks;
        let (cols, start) =
            (COLS.min(self.strided.cols - col), self.strided.start(first) + col * self.col_stride());
        let blocks = cols.div_ceil(self.block);
        let in_place = self.col_stride() == 1;
        if !in_place {
            tile.resize(ROWS * PITCH, T::default());
            self.gather(start, rows, cols, tile);
        }
        let mut report = Report::default();
        for row in 0..rows {
            let values = match in_place {
                true => &self.values[start + row * self.strided.row_stride..][..cols],
                false => &tile[row * PITCH..][..cols],
            };
            let output = output.blocks(row * row_blocks + col / self.block, blocks);
            let tally = self.importance.quantize(self.isa, Elements::of(values), col, &self.params, output);
            report += tally.placed(|offset| Position { row: first + row, col: col + offset });
        }
        report
    }

    /// The stride of columns, or 1 if there is one column.
    fn col_stride(&self) -> usize {
        if self.strided.cols > 1 { self.strided.col_stride } else { 1 }
    }

    /// Copies the rows of a tile, [`PITCH`] elements apart.
    fn gather(&self, start: usize, rows: usize, cols: usize, tile: &mut [T]) {
        let (row_stride, col_stride) = (self.strided.row_stride, self.col_stride());
        if rows > 1 && row_stride == 1 {
            return transpose(&self.values[start..], col_stride, rows, cols, tile);
        }
        for (row, line) in tile.chunks_mut(PITCH).take(rows).enumerate() {
            let values = self.values[start + row * row_stride..].iter().step_by(col_stride);
            line[..cols].iter_mut().zip(values).for_each(|(to, from)| *to = *from);
        }
    }
}

/// Copies `cols` columns of `rows` elements each, `col_stride` apart, into rows of [`PITCH`].
fn transpose<T: Element>(values: &[T], col_stride: usize, rows: usize, cols: usize, tile: &mut [T]) {
    let column = |col: usize| &values[col * col_stride..][..rows];
    let whole = cols / SIDE * SIDE;
    for col in (0..whole).step_by(SIDE) {
        let columns: [_; SIDE] = std::array::from_fn(|i| column(col + i).as_chunks::<SIDE>());
        for square in 0..rows / SIDE {
            let columns = columns.map(|(squares, _)| squares[square]);
            let lines = &mut tile[square * SIDE * PITCH + col..][..(SIDE - 1) * PITCH + SIDE];
            for (i, row) in shuffle(shuffle(shuffle(columns))).iter().enumerate() {
                lines[i * PITCH..][..SIDE].copy_from_slice(row);
            }
        }
        for row in rows / SIDE * SIDE..rows {
            let to = &mut tile[row * PITCH + col..][..SIDE];
            to.iter_mut().zip(&columns).for_each(|(to, (_, rest))| *to = rest[row % SIDE]);
        }
    }
    for col in whole..cols {
        column(col).iter().enumerate().for_each(|(row, value)| tile[row * PITCH + col] = *value);
    }
}

/// The side of the squares that are transposed at a time.
const SIDE: usize = 8;

/// Interleaves the first half of 64 elements with the second half.
///
/// This rotates the six bits of an element's index by one, so three calls transpose the square. The
/// compiler uses interleaving instructions for it; a loop over elements would stay scalar.
#[inline(always)]
fn shuffle<T: Element>(lines: [[T; SIDE]; SIDE]) -> [[T; SIDE]; SIDE] {
    let low = |a: [T; SIDE], b: [T; SIDE]| [a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]];
    let high = |a: [T; SIDE], b: [T; SIDE]| [a[4], b[4], a[5], b[5], a[6], b[6], a[7], b[7]];
    let [a, b, c, d, e, f, g, h] = lines;
    [low(a, e), high(a, e), low(b, f), high(b, f), low(c, g), high(c, g), low(d, h), high(d, h)]
}

/// Rows per task with linear scales: about [`TASK_BLOCKS`] blocks in whole tiles.
///
/// Tiles get smaller if threads would otherwise be idle.
fn rows_per_task(size: usize, quantized: QuantizedShape) -> usize {
    const LINE: usize = 64;
    let tasks = quantized.rows.div_ceil(ROWS);
    let tile = if tasks < 4 * rayon::current_num_threads() { LINE / size } else { ROWS };
    (TASK_BLOCKS / quantized.blocks_per_row()).next_multiple_of(tile).max(tile)
}
