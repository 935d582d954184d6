//! A thing to measure: an operation with all that it takes.

#[cfg(feature = "cuda")]
use microscale::gpu::ExpertsKernel;
use microscale::{Dtype, Recipe};

use super::op::Op;
use super::size::Size;

/// One thing to measure.
pub(crate) struct Case {
    /// The operation.
    pub op: Op,
    /// The recipe.
    pub recipe: Recipe,
    /// The dtype of the unquantized values.
    pub dtype: Dtype,
    /// The matrix.
    pub size: Size,
    /// The kernel for a product of many tokens, or of experts' weights; none for the one that is chosen.
    #[cfg(feature = "cuda")]
    pub kernel: Option<ExpertsKernel>,
}
