//! Quantizing matrices whose rows are contiguous, in tasks for rayon's threads.

use microscale_formats::ScaleLayout;
use microscale_formats::layout::{TILE_BYTES, TILE_COLS, TILE_ROWS};
use rayon::prelude::*;

use super::importance::PreparedImportance;
use crate::cpu::blocks::output::Output;
use crate::cpu::blocks::partition::{Partition, Run, TASK_BLOCKS};
use crate::cpu::isa::Isa;
use crate::cpu::rounding::params::QuantizeParams;
use crate::elements::Elements;
use crate::layout::scatter_row;
use crate::report::{Position, Report};
use crate::shape::{QuantizedShape, Shape};

/// A matrix to quantize, with its parameters.
pub(in crate::cpu) struct ContiguousRequest<'a> {
    pub(in crate::cpu) isa: Isa,
    /// The values. They are checked to hold the shape.
    pub(in crate::cpu) values: Elements<'a>,
    pub(in crate::cpu) shape: Shape,
    pub(in crate::cpu) params: QuantizeParams,
    pub(in crate::cpu) importance: &'a PreparedImportance<'a>,
}

impl ContiguousRequest<'_> {
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

    /// Quantizes with linear scales, in tasks of [`TASK_BLOCKS`].
    fn linear(&self, quantized: QuantizedShape, codes: &mut [u8], scales: &mut [u8]) -> Report {
        let partition = match self.importance {
            PreparedImportance::Equal => Partition::of(self.shape, quantized.format.block()),
            PreparedImportance::Columns(_) | PreparedImportance::Hessians(_) => {
                Partition::by_row(self.shape, quantized.format.block())
            }
        };
        let block_bytes = quantized.format.block_bytes();
        let one = |(task, (codes, scales)): (usize, (&mut [u8], &mut [u8]))| {
            self.blocks(&partition, task * TASK_BLOCKS, Output { codes, scales })
        };
        if scales.len() <= TASK_BLOCKS {
            return one((0, (codes, scales)));
        }
        let tasks = codes.par_chunks_mut(TASK_BLOCKS * block_bytes).zip(scales.par_chunks_mut(TASK_BLOCKS));
        tasks.enumerate().map(one).reduce(Report::default, Report::plus)
    }

    /// Quantizes with swizzled scales, in tasks of the 128 rows that share a tile of scales.
    ///
    /// Each row's scales are scattered while they are in the cache. Padding is written too.
    fn swizzled(&self, quantized: QuantizedShape, codes: &mut [u8], scales: &mut [u8]) -> Report {
        let row_blocks = quantized.blocks_per_row();
        let row_bytes = row_blocks * quantized.format.block_bytes();
        let partition = Partition::by_row(self.shape, quantized.format.block());
        let one = |(task, (tiles, codes)): (usize, (&mut [u8], &mut [u8]))| {
            tiles.fill(0);
            let mut report = Report::default();
            let mut linear = vec![0; row_blocks];
            for (row, codes) in codes.chunks_mut(row_bytes).enumerate() {
                let first = (task * TILE_ROWS + row) * row_blocks;
                report += self.blocks(&partition, first, Output { codes, scales: &mut linear });
                scatter_row(&linear, row, tiles);
            }
            report
        };
        if scales.len() <= TASK_BLOCKS && codes.len() <= TILE_ROWS * row_bytes {
            return one((0, (scales, codes)));
        }
        let tasks = scales.par_chunks_mut(row_blocks.div_ceil(TILE_COLS) * TILE_BYTES);
        let tasks = tasks.zip(codes.par_chunks_mut(TILE_ROWS * row_bytes)).enumerate();
        tasks.map(one).reduce(Report::default, Report::plus)
    }

    /// Fills the output with blocks, starting at block `first`.
    fn blocks(&self, partition: &Partition, first: usize, mut output: Output<'_>) -> Report {
        let Self { isa, shape, ref params, importance, .. } = *self;
        let mut report = Report::default();
        let mut done = 0;
        for Run { start, len, blocks } in partition.runs(first, output.scales.len()) {
            let values = self.values.part(start, len);
            let output = output.blocks(done, blocks);
            let col = start % shape.row_stride;
            let tally = importance.quantize(isa, values, col, params, output);
            report += tally.placed(|offset| {
                let offset = start + offset;
                Position { row: offset / shape.row_stride, col: offset % shape.row_stride }
            });
            done += blocks;
        }
        report
    }
}
