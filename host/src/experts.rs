//! Products of rows with the weights of experts: the operands, and checks that they fit each other.

use crate::error::{Error, OperandFault, Result};
use crate::gemv::check_weights_shape;
use crate::shape::{QuantizedShape, Shape};
use crate::view::QuantizedView;

/// The order of the rows of activations and of results of a product with experts' weights.
///
/// A pair of a token and one of its experts has a number, token · `top_k` + i: that is the order of pairs. Sorted, pairs come by expert,
/// and those of an expert by number. Rows of results of pairs of no expert are left as they are; sorted, they lie behind all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertRows {
    /// A row of activations a token, and results sorted by expert: the first product of a layer.
    Gathered,
    /// Both sorted by expert.
    Sorted,
    /// Activations sorted by expert, and results in the order of pairs: the last product of a layer.
    Scattered,
    /// A row of activations a token, and results in the order of pairs: a product by itself.
    Indexed,
    /// Both in the order of pairs.
    Paired,
}

impl ExpertRows {
    /// Whether there is a row of activations a token, and not one a pair.
    pub(crate) const fn share_activations(self) -> bool {
        matches!(self, Self::Gathered | Self::Indexed)
    }

    /// Whether results are sorted.
    pub(crate) const fn sort_results(self) -> bool {
        matches!(self, Self::Gathered | Self::Sorted)
    }

    /// The row of activations of a pair, by its number and by that among sorted ones.
    pub(crate) const fn activations_of(self, pair: usize, sorted: usize, top_k: usize) -> usize {
        match self {
            Self::Gathered | Self::Indexed => pair / top_k,
            Self::Sorted | Self::Scattered => sorted,
            Self::Paired => pair,
        }
    }

    /// Checks that activations and an output of so many elements fit weights of a shape and pairs, `top_k` a token.
    pub(crate) fn check(
        self,
        weights: QuantizedShape,
        [pairs, top_k]: [usize; 2],
        activations: usize,
        output: usize,
    ) -> Result<()> {
        let rows = if self.share_activations() { pairs / top_k } else { pairs };
        Shape::new(rows, weights.cols).check("the activations", activations)?;
        Shape::new(pairs, weights.rows).check("the output", output)
    }
}

/// Checks that pairs of a token and an expert are those of whole tokens.
pub(crate) fn check_pairs(pairs: usize, top_k: usize) -> Result<()> {
    if top_k == 0 || !pairs.is_multiple_of(top_k) {
        return Err(Error::Operands(OperandFault::TopK { pairs, top_k }));
    }
    Ok(())
}

/// The shape of experts' weights, which is that of all.
///
/// # Errors
/// [`OperandFault::Experts`] if there are none, or they differ in format or shape, and those of [`check_weights_shape`].
pub(crate) fn shape_of(experts: &[QuantizedView<'_>]) -> Result<QuantizedShape> {
    let fault = |what| Error::Operands(OperandFault::Experts { what });
    let shape = experts.first().ok_or(fault("one or more"))?.shape();
    check_weights_shape(shape)?;
    if experts.iter().any(|expert| expert.shape() != shape) {
        return Err(fault("of one format and shape"));
    }
    Ok(shape)
}
