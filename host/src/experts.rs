//! Products of rows with experts' weights: operands, and checks that they match.

use crate::error::{Error, OperandFault, Result};
use crate::gemv::check_weights_shape;
use crate::shape::{QuantizedShape, Shape};
use crate::view::QuantizedView;

/// The order of activation rows and result rows of a product with experts' weights.
///
/// A pair of a token and one of its experts has the number token · `top_k` + i. "In the order of
/// pairs" means by this number. Sorted pairs are ordered by expert, and by number within an expert.
/// Result rows of pairs without an expert are not written. In sorted order they come last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertRows {
    /// One activation row per token, and results sorted by expert: the first product of a layer.
    Gathered,
    /// Activations and results sorted by expert.
    Sorted,
    /// Activations sorted by expert, and results in the order of pairs: the last product of a
    /// layer.
    Scattered,
    /// One activation row per token, and results in the order of pairs: a single product.
    Indexed,
    /// Activations and results in the order of pairs.
    Paired,
}

impl ExpertRows {
    /// Returns whether there is one activation row per token instead of one per pair.
    pub(crate) const fn share_activations(self) -> bool {
        matches!(self, Self::Gathered | Self::Indexed)
    }

    /// Returns whether results are sorted.
    pub(crate) const fn sort_results(self) -> bool {
        matches!(self, Self::Gathered | Self::Sorted)
    }

    /// Returns the activation row of a pair, given its number and its index among sorted pairs.
    pub(crate) const fn activations_of(self, pair: usize, sorted: usize, top_k: usize) -> usize {
        match self {
            Self::Gathered | Self::Indexed => pair / top_k,
            Self::Sorted | Self::Scattered => sorted,
            Self::Paired => pair,
        }
    }

    /// Returns the number of activation rows, given the pairs of all tokens and of each token.
    pub(crate) const fn activation_rows(self, [pairs, top_k]: [usize; 2]) -> usize {
        if self.share_activations() { pairs / top_k } else { pairs }
    }

    /// Checks that the lengths of activations and output match the weights and pairs.
    ///
    /// There are `top_k` pairs per token.
    pub(crate) fn check(
        self,
        weights: QuantizedShape,
        [pairs, top_k]: [usize; 2],
        activations: usize,
        output: usize,
    ) -> Result<()> {
        Shape::new(self.activation_rows([pairs, top_k]), weights.cols)
            .check("the activations", activations)?;
        Shape::new(pairs, weights.rows).check("the output", output)
    }
}

/// Checks that pairs of a token and an expert make up whole tokens.
pub(crate) fn check_pairs(pairs: usize, top_k: usize) -> Result<()> {
    if top_k == 0 || !pairs.is_multiple_of(top_k) {
        return Err(Error::Operands(OperandFault::TopK { pairs, top_k }));
    }
    Ok(())
}

/// Returns the common shape of the experts' weights.
///
/// # Errors
/// [`OperandFault::Experts`] if there are none, or if they differ in format or shape, and the
/// errors of [`check_weights_shape`].
pub(crate) fn shape_of(experts: &[QuantizedView<'_>]) -> Result<QuantizedShape> {
    let fault = |what| Error::Operands(OperandFault::Experts { what });
    let shape = experts.first().ok_or(fault("one or more"))?.shape();
    check_weights_shape(shape)?;
    if experts.iter().any(|expert| expert.shape() != shape) {
        return Err(fault("of one format and shape"));
    }
    Ok(shape)
}
