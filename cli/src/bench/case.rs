//! A case to measure: an operation with its parameters.

use microscale::{ActivationRounding, Dtype, Recipe};

use super::op::Op;
use super::size::Size;

#[cfg(feature = "cuda")]
impl Case {
    /// The requested configuration.
    #[cfg_attr(
        not(feature = "internals"),
        expect(clippy::unused_self, reason = "kernels have no words then")
    )]
    pub(crate) fn kernel(&self) -> Option<microscale::gpu::GemmConfig> {
        #[cfg(feature = "internals")]
        return self.kernel;
        #[cfg(not(feature = "internals"))]
        None
    }
}

/// One case to measure.
pub(crate) struct Case {
    /// The operation.
    pub op: Op,
    /// The recipe.
    pub recipe: Recipe,
    /// The dtype of the unquantized values.
    pub dtype: Dtype,
    /// How activations are rounded, for products with weights.
    pub activations: ActivationRounding,
    /// The matrix.
    pub size: Size,
    /// The word of the configuration for a product with weights; `None` lets the plan choose.
    #[cfg(feature = "internals")]
    pub kernel: Option<microscale::gpu::GemmConfig>,
}
