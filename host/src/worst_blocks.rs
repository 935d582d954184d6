//! The blocks of a matrix that lost most.

use rayon::prelude::*;

use crate::element::Element;
use crate::error::Result;
use crate::round_trip::{RoundTrip, Row};
use crate::tensor::{QuantizedTensor, Shape};

/// What one block lost. Elements that are not finite, or did not come back so, are left out, as
/// [`ErrorStats`](crate::ErrorStats) does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockError {
    /// The row, counted from 0.
    pub row: usize,
    /// The block's place in its row, counted from 0.
    pub block: usize,
    /// The largest magnitude.
    pub amax: f32,
    /// The scale as it is stored, by its bits.
    pub scale_bits: u16,
    /// What elements are multiplied with when they are dequantized: the block scale, under NVFP4's global scale.
    pub scale: f32,
    /// Σa².
    pub energy: f64,
    /// Σ(a − b)².
    pub squared_error: f64,
}

impl BlockError {
    /// Σ(a − b)² / Σa², 0 if both are 0.
    pub fn relative(&self) -> f64 {
        if self.squared_error == 0.0 { 0.0 } else { self.squared_error / self.energy }
    }
}

/// The blocks that lost most, the worst first; of those that lost the same, the first ones. What lost
/// nothing is not among them.
#[derive(Clone, Debug, PartialEq)]
pub struct WorstBlocks {
    /// By the squared error as a share of the block's energy.
    pub relative: Vec<BlockError>,
    /// By the squared error.
    pub absolute: Vec<BlockError>,
}

impl WorstBlocks {
    /// Finds at most `most` blocks of each kind in a matrix, given what it was quantized to.
    ///
    /// # Errors
    /// Those of [`quantize`](crate::quantize) about shapes.
    pub fn of<T: Element>(values: &[T], shape: Shape, tensor: &QuantizedTensor, most: usize) -> Result<Self> {
        let pairs = RoundTrip::new(values, shape, tensor)?;
        let none = || {
            [BlockError::relative, |block: &BlockError| block.squared_error].map(|by| Worst::new(most, by))
        };
        let [relative, absolute] = pairs
            .rows()
            .enumerate()
            .fold(none, |mut worst, (row, pair)| {
                blocks_of_row(&pairs, row, &pair, |block| {
                    worst.iter_mut().for_each(|worst| worst.offer(block));
                });
                worst
            })
            .reduce(none, |[a, b], [c, d]| [a.with(c), b.with(d)])
            .map(|worst| worst.blocks);
        Ok(Self { relative, absolute })
    }
}

/// Goes along a row, block by block.
fn blocks_of_row<T: Element>(
    pairs: &RoundTrip<'_, T>,
    row: usize,
    pair: &Row<'_, T>,
    mut found: impl FnMut(BlockError),
) {
    let (length, scale_type, mut block) = (pairs.format().block(), pairs.format().facts().scale, 0);
    pair.for_each_part(|values, back, scales| {
        let scales = scales.chunks(scale_type.bytes()).map(|bytes| scale_type.read(bytes));
        for ((values, back), scale_bits) in values.chunks(length).zip(back.chunks(length)).zip(scales) {
            let (mut amax, mut energy, mut squared_error) = (0.0f32, 0.0, 0.0);
            for (a, b) in values.iter().zip(back) {
                let a = a.to_f32();
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

/// The worst blocks so far, by some figure: never more than `most`, whatever the size of the matrix.
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

#[cfg(test)]
mod tests {
    use approx::assert_relative_eq;

    use super::*;
    use crate::{Convention, Format, NonFinite, Recipe, ScaleLayout, dequantize, quantize};

    /// Every block, without this file's means.
    fn all(values: &[f32], shape: Shape, tensor: &QuantizedTensor) -> Vec<(usize, usize, f64, f64)> {
        let (back, length) = (dequantize::<f32>(tensor), tensor.format().block());
        let mut blocks = Vec::new();
        for row in 0..shape.rows {
            for start in (0..shape.cols).step_by(length) {
                let (mut energy, mut error) = (0.0, 0.0);
                for col in start..shape.cols.min(start + length) {
                    let (a, b) = (values[row * shape.row_stride + col], back[row * shape.cols + col]);
                    if a.is_finite() && b.is_finite() {
                        energy += f64::from(a).powi(2);
                        error += (f64::from(a) - f64::from(b)).powi(2);
                    }
                }
                blocks.push((row, start / length, energy, error));
            }
        }
        blocks
    }

    #[test]
    fn they_are_the_first_ones_of_all_blocks_sorted() {
        let mut random = fastrand::Rng::with_seed(7);
        for format in [Format::Mxfp4, Format::Nvfp4, Format::Mxfp8E4m3] {
            for (rows, cols, gap) in
                [(1, 1, 0), (37, 2085, 3), (200, 64, 0), (3, 40, 0), (0, 5, 0), (5, 0, 0)]
            {
                let shape = Shape::new(rows, cols).with_row_stride(cols + gap);
                let mut values: Vec<f32> = (0..rows * (cols + gap))
                    .map(|_| (random.f32() - 0.5) * 2f32.powi(random.i32(-6..6)))
                    .collect();
                if values.len() > 100 {
                    (values[3], values[70], values[71]) = (f32::NAN, f32::INFINITY, 0.0);
                    values[..2].copy_from_slice(&[0.0, -0.0]);
                }
                let convention = Convention::default_for(format);
                let recipe =
                    Recipe { non_finite: NonFinite::Propagate, ..Recipe::of(format, convention).unwrap() };
                let tensor = quantize(&values, shape, &recipe).unwrap().tensor;
                for (tensor, most) in
                    [(tensor.convert_layout(ScaleLayout::Swizzled), 4), (tensor.clone(), 0), (tensor, 1000)]
                {
                    let worst = WorstBlocks::of(&values, shape, &tensor, most).unwrap();
                    let mut blocks = all(&values, shape, &tensor);
                    blocks.retain(|(_, _, _, error)| *error > 0.0);
                    // Sorting is stable: those that lost the same stay in their order.
                    blocks.sort_by(|a, b| b.3.total_cmp(&a.3));
                    same(&worst.absolute, &blocks, most);
                    blocks.sort_by_key(|block| (block.0, block.1));
                    blocks.sort_by(|a, b| (b.3 / b.2).total_cmp(&(a.3 / a.2)));
                    same(&worst.relative, &blocks, most);
                }
            }
        }
    }

    fn same(found: &[BlockError], expected: &[(usize, usize, f64, f64)], most: usize) {
        assert_eq!(found.len(), expected.len().min(most));
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!((found.row, found.block), (expected.0, expected.1));
            assert_eq!((found.energy, found.squared_error), (expected.2, expected.3));
        }
    }

    #[test]
    fn amax_and_scales_are_those_of_the_block() {
        let mut values = [1.0f32; 64];
        (values[40], values[50]) = (5.0, f32::INFINITY);
        let recipe = Recipe { non_finite: NonFinite::Saturate, ..Recipe::default() };
        let tensor = quantize(&values, Shape::new(1, 64), &recipe).unwrap().tensor;
        let worst = WorstBlocks::of(&values, Shape::new(1, 64), &tensor, 9).unwrap();
        let [block] = worst.absolute[..] else { panic!("the first block lost nothing: {worst:?}") };
        assert_eq!(
            (block.row, block.block, block.amax, block.scale_bits),
            (0, 1, 5.0, tensor.scales()[1].into())
        );
        assert_relative_eq!(f64::from(block.scale), 2f64.powi(i32::from(block.scale_bits) - 127));
        assert_relative_eq!(block.energy, 55.0);
        assert_relative_eq!(block.relative(), 1.0);
        assert_eq!(worst.relative, worst.absolute);
    }
}
