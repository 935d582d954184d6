//! A closer look at the tensors of a checkpoint while it is quantized, and only if that is wanted: it takes another
//! pass over the values.

use microscale::{BlockError, QuantizedTensor, WorstBlocks};

use crate::convention::Storage;
use crate::error::Result;
use crate::inspect::Histogram;
use crate::matrix::{self, Matrix};
use crate::read::Tensor;
use crate::summary::{Outcome, Summary, TensorSummary};
use crate::values::with_values;

/// A closer look at a tensor that was quantized.
#[derive(Clone, Debug)]
pub struct Details {
    /// How often each scale byte and each code occurs.
    pub histogram: Histogram,
    /// The blocks that lost most. Rows are those of the matrix that is stored.
    pub worst: WorstBlocks,
}

impl Details {
    pub(crate) fn of(
        tensor: &Tensor<'_>,
        storage: &Storage,
        quantized: &QuantizedTensor,
        worst_blocks: usize,
    ) -> Result<Self> {
        let Matrix { values, shape } = Matrix::of(tensor, storage)?;
        let worst = with_values!(&values, slice => WorstBlocks::of(slice, shape, quantized, worst_blocks));
        let worst = worst.map_err(|source| matrix::error(tensor, storage, source))?;
        Ok(Self { histogram: Histogram::of_tensor(quantized), worst })
    }
}

impl Summary {
    /// How often each scale byte and each code occurs in all tensors of a format, for each format; nothing unless
    /// details were collected.
    pub fn histograms(&self) -> Vec<Histogram> {
        let mut sums: Vec<Histogram> = Vec::new();
        for (_, Details { histogram, .. }) in self.details() {
            match sums.iter_mut().find(|sum| sum.format == histogram.format) {
                Some(sum) => sum.add(histogram),
                None => sums.push(histogram.clone()),
            }
        }
        sums
    }

    /// The worst blocks of all tensors, `most` at most, each with its tensor: by the squared error as a share
    /// of the block's energy.
    pub fn worst_relative(&self, most: usize) -> Vec<(&TensorSummary, &BlockError)> {
        self.worst(most, |worst| &worst.relative, BlockError::relative)
    }

    /// The worst blocks of all tensors, `most` at most, each with its tensor: by the squared error.
    pub fn worst_absolute(&self, most: usize) -> Vec<(&TensorSummary, &BlockError)> {
        self.worst(most, |worst| &worst.absolute, |block| block.squared_error)
    }

    fn worst(
        &self,
        most: usize,
        of: fn(&WorstBlocks) -> &[BlockError],
        by: fn(&BlockError) -> f64,
    ) -> Vec<(&TensorSummary, &BlockError)> {
        let blocks = self
            .details()
            .flat_map(|(tensor, details)| of(&details.worst).iter().map(move |block| (tensor, block)));
        let mut blocks: Vec<_> = blocks.collect();
        // Stable, so that of equal ones the first tensor's come first.
        blocks.sort_by(|(_, a), (_, b)| by(b).total_cmp(&by(a)));
        blocks.truncate(most);
        blocks
    }

    fn details(&self) -> impl Iterator<Item = (&TensorSummary, &Details)> {
        self.tensors.iter().filter_map(|tensor| match &tensor.outcome {
            Outcome::Quantized { details: Some(details), .. } => Some((tensor, &**details)),
            _ => None,
        })
    }
}
