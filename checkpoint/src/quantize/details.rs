//! Details of the tensors of a checkpoint for its report. They are collected only on request,
//! because they take another pass over the values. Their memory does not depend on the number of
//! tensors.

use std::ops::Range;

use microscale::{BlockError, QuantizedTensor, WorstBlocks};

use crate::error::Result;
use crate::histogram::Histogram;
use crate::plan::tensor_recipe::TensorRecipe;
use crate::quantize::matrix;
use crate::quantize::matrix::Matrix;
use crate::read::tensor::Tensor;
use crate::read::values::with_values;

/// Details of some rows of a tensor.
pub(crate) struct BandDetails {
    /// Counts of each scale byte and each code.
    histogram: Histogram,
    /// The blocks with the largest loss, by rows of the stored matrix.
    worst: WorstBlocks,
}

impl BandDetails {
    /// Collects the details of some rows.
    pub(crate) fn of(
        tensor: &Tensor<'_>,
        used: &TensorRecipe,
        rows: Range<usize>,
        quantized: &QuantizedTensor,
        worst_blocks: usize,
    ) -> Result<Self> {
        let (first, storage) = (rows.start, used.storage);
        let Matrix { values, shape } = Matrix::of(tensor, storage, rows)?.transformed(used.hadamard);
        let mut worst = WorstBlocks { relative: Vec::new(), absolute: Vec::new() };
        let found = with_values!(&values, slice => WorstBlocks::of(slice, shape, quantized, worst_blocks));
        worst.add(found.map_err(|source| matrix::error(tensor, storage, source))?, first, worst_blocks);
        Ok(Self { histogram: Histogram::of_tensor(quantized), worst })
    }

    /// Adds the details of later rows.
    pub(crate) fn add(&mut self, later: Self, worst_blocks: usize) {
        self.histogram.add(&later.histogram);
        self.worst.add(later.worst, 0, worst_blocks);
    }
}

/// Details of all tensors: their sums, and the worst blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Details {
    /// The counts of each format, with the first tensor of the format.
    histograms: Vec<(usize, Histogram)>,
    /// The worst blocks by the squared error as a share of the block's energy, and by the squared
    /// error.
    pub(crate) relative: Vec<WorstBlock>,
    pub(crate) absolute: Vec<WorstBlock>,
}

/// A block, and the tensor that it is in.
#[derive(Clone, Debug)]
pub(crate) struct WorstBlock {
    number: usize,
    pub(crate) tensor: String,
    pub(crate) block: BlockError,
}

impl Details {
    /// Adds a tensor by its number in the checkpoint. The result does not depend on the order of
    /// the tensors.
    pub(crate) fn add(&mut self, number: usize, tensor: &str, details: BandDetails, most: usize) {
        let BandDetails { histogram, worst } = details;
        match self.histograms.iter_mut().find(|(_, sum)| sum.format == histogram.format) {
            Some((first, sum)) => {
                *first = number.min(*first);
                sum.add(&histogram);
            }
            None => self.histograms.push((number, histogram)),
        }
        let of = |block| WorstBlock { number, tensor: tensor.into(), block };
        keep_worst(&mut self.relative, worst.relative.into_iter().map(of), most, BlockError::relative);
        keep_worst(&mut self.absolute, worst.absolute.into_iter().map(of), most, |block| block.squared_error);
    }

    /// The counts of each format, in the order of the tensors.
    pub(crate) fn histograms(&self) -> Vec<Histogram> {
        let mut sums: Vec<_> = self.histograms.iter().collect();
        sums.sort_by_key(|(first, _)| *first);
        sums.into_iter().map(|(_, sum)| sum.clone()).collect()
    }
}

/// Adds blocks to the `most` worst ones by an error. Of equal blocks the first tensor's come first,
/// in their order.
fn keep_worst(
    worst: &mut Vec<WorstBlock>,
    blocks: impl Iterator<Item = WorstBlock>,
    most: usize,
    error: fn(&BlockError) -> f64,
) {
    worst.extend(blocks);
    worst.sort_by(|a, b| error(&b.block).total_cmp(&error(&a.block)).then(a.number.cmp(&b.number)));
    worst.truncate(most);
}
