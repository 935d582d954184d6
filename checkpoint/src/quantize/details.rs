//! A closer look at the tensors of a checkpoint while it is quantized, and only if that is wanted: it takes
//! another pass over the values.

use std::ops::Range;

use microscale::{QuantizedTensor, WorstBlocks};

use crate::conventions::storage::Storage;
use crate::error::Result;
use crate::histogram::Histogram;
use crate::quantize::matrix;
use crate::quantize::matrix::Matrix;
use crate::read::tensor::Tensor;
use crate::read::values::with_values;

/// A closer look at a tensor that was quantized.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Details {
    /// Counts of each scale byte and each code.
    pub histogram: Histogram,
    /// The blocks that lost most. Rows are those of the matrix that is stored.
    pub worst: WorstBlocks,
}

impl Details {
    /// Looks at some rows of a tensor.
    pub(crate) fn of(
        tensor: &Tensor<'_>,
        storage: &Storage,
        rows: Range<usize>,
        quantized: &QuantizedTensor,
        worst_blocks: usize,
    ) -> Result<Self> {
        let first = rows.start;
        let Matrix { values, shape } = Matrix::of(tensor, storage, rows)?;
        let mut worst = WorstBlocks { relative: Vec::new(), absolute: Vec::new() };
        let found = with_values!(&values, slice => WorstBlocks::of(slice, shape, quantized, worst_blocks));
        worst.add(found.map_err(|source| matrix::error(tensor, storage, source))?, first, worst_blocks);
        Ok(Self { histogram: Histogram::of_tensor(quantized), worst })
    }

    /// Takes in those of later rows.
    pub(crate) fn add(&mut self, later: Self, worst_blocks: usize) {
        self.histogram.add(&later.histogram);
        self.worst.add(later.worst, 0, worst_blocks);
    }
}
