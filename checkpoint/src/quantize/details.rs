//! A closer look at the tensors of a checkpoint while it is quantized, and only if that is wanted: it takes
//! another pass over the values.

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
