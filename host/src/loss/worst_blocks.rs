//! [`WorstBlocks`]: the blocks of a matrix with the largest relative and absolute error.

use rayon::prelude::*;

use super::round_trip::{PART, RoundTrip, Row};
use crate::element::Element;
use crate::elements::{Elements, by_dtype};
use crate::error::Result;
use crate::shape::Shape;
use crate::view::QuantizedView;

/// The loss of one block.
///
/// Pairs with a non-finite element are excluded, as in [`ErrorStats`](crate::ErrorStats).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct BlockError {
    /// The row, counted from 0.
    pub row: usize,
    /// The index of the block in its row, counted from 0.
    pub block: usize,
    /// The largest magnitude.
    pub amax: f32,
    /// The bits of the stored scale.
    pub scale_bits: u16,
    /// The dequantization factor of elements: the block scale with NVFP4's global scale applied.
    pub scale: f32,
    /// Σa².
    pub energy: f64,
    /// Σ(a − b)².
    pub squared_error: f64,
}

impl BlockError {
    /// Returns Σ(a − b)² / Σa², or 0 if both are 0.
    pub fn relative(&self) -> f64 {
        if self.squared_error == 0.0 { 0.0 } else { self.squared_error / self.energy }
    }
}

/// The blocks with the largest loss, worst first.
///
/// Blocks of equal loss come in row-major order. Blocks without a loss are not included.
#[derive(Clone, Debug, PartialEq)]
pub struct WorstBlocks {
    /// The worst blocks by squared error relative to the block's energy.
    pub relative: Vec<BlockError>,
    /// The worst blocks by the squared error.
    pub absolute: Vec<BlockError>,
}

impl WorstBlocks {
    /// Finds at most `most` blocks of each kind in a matrix, given its quantized form.
    ///
    /// # Errors
    /// The errors of [`quantize`](crate::quantize) about shapes.
    pub fn of<'a, T: Element>(
        values: &[T],
        shape: Shape,
        tensor: impl Into<QuantizedView<'a>>,
        most: usize,
    ) -> Result<Self> {
        Ok(Self::of_pairs(&RoundTrip::new(values, shape, tensor.into())?, most))
    }

    /// Merges the result of a later band of rows whose first row is `first`.
    ///
    /// Keeps at most `most` blocks of each kind.
    pub fn add(&mut self, later: Self, first: usize, most: usize) {
        let moved = |block: BlockError| BlockError { row: block.row + first, ..block };
        let with = |blocks: &mut Vec<BlockError>, later: Vec<BlockError>, by| {
            let mut worst = Worst { most, by, blocks: std::mem::take(blocks) };
            later.into_iter().for_each(|block| worst.offer(moved(block)));
            *blocks = worst.blocks;
        };
        with(&mut self.relative, later.relative, BlockError::relative);
        with(&mut self.absolute, later.absolute, |block| block.squared_error);
    }

    fn of_pairs(pairs: &RoundTrip<'_>, most: usize) -> Self {
        let none = || {
            [BlockError::relative, |block: &BlockError| block.squared_error].map(|by| Worst::new(most, by))
        };
        let [relative, absolute] = pairs
            .rows()
            .enumerate()
            .fold(none, |mut worst, (row, pair)| {
                blocks_of_row(pairs, row, &pair, |block| {
                    worst.iter_mut().for_each(|worst| worst.offer(block));
                });
                worst
            })
            .reduce(none, |[a, b], [c, d]| [a.with(c), b.with(d)])
            .map(|worst| worst.blocks);
        Self { relative, absolute }
    }
}

/// Calls `found` for each block of a row.
fn blocks_of_row(pairs: &RoundTrip<'_>, row: usize, pair: &Row<'_>, mut found: impl FnMut(BlockError)) {
    let (length, scale_type, mut block) = (pairs.format().block(), pairs.format().facts().scale, 0);
    pair.for_each_part(|values, back, scales| {
        let mut wide = [0.0; PART];
        let wide = &mut wide[..back.len()];
        by_dtype!(Elements, values => {
            wide.iter_mut().zip(values).for_each(|(wide, value)| *wide = Element::to_f32(*value));
        });
        let scales = scales.chunks(scale_type.bytes()).map(|bytes| scale_type.read(bytes));
        for ((values, back), scale_bits) in wide.chunks(length).zip(back.chunks(length)).zip(scales) {
            let (mut amax, mut energy, mut squared_error) = (0.0f32, 0.0, 0.0);
            for (a, b) in values.iter().zip(back) {
                let a = *a;
                if a.is_finite() && b.is_finite() {
                    let difference = f64::from(a) - f64::from(*b);
                    amax = amax.max(a.abs());
                    energy += f64::from(a) * f64::from(a);
                    squared_error += difference * difference;
                }
            }
            let scale = pairs.factor(scale_bits).unwrap_or(f32::NAN);
            found(BlockError { row, block, amax, scale_bits, scale, energy, squared_error });
            block += 1;
        }
    });
}

/// The worst blocks so far by some metric, at most `most`.
struct Worst {
    most: usize,
    by: fn(&BlockError) -> f64,
    blocks: Vec<BlockError>,
}

impl Worst {
    fn new(most: usize, by: fn(&BlockError) -> f64) -> Self {
        Self { most, by, blocks: Vec::new() }
    }

    fn offer(&mut self, block: BlockError) {
        let error = (self.by)(&block);
        // Nearly all blocks end here.
        if error <= 0.0
            || self.blocks.len() == self.most && self.blocks.last().is_none_or(|last| error < (self.by)(last))
        {
            return;
        }
        let before = |other: &BlockError| {
            let order = error.total_cmp(&(self.by)(other));
            order.then((other.row, other.block).cmp(&(block.row, block.block))).is_lt()
        };
        self.blocks.insert(self.blocks.partition_point(before), block);
        self.blocks.truncate(self.most);
    }

    fn with(mut self, other: Self) -> Self {
        other.blocks.into_iter().for_each(|block| self.offer(block));
        self
    }
}
