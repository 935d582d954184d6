//! Products of two matrices of FP4: operands, and checks that they match.

use crate::error::{Error, OperandFault, Result};
use crate::shape::Shape;
use crate::tensor::QuantizedTensor;
use crate::view::QuantizedView;

/// Weights of [`gemm_fp4`](crate::gemm_fp4()), and the steps that follow the sum of a row.
///
/// The default alpha is 1, and there is no bias.
#[derive(Clone, Copy, Debug)]
pub struct Fp4Weights<'a> {
    pub(crate) view: QuantizedView<'a>,
    pub(crate) alpha: f32,
    pub(crate) bias: Option<&'a [f32]>,
}

impl<'a> Fp4Weights<'a> {
    /// Multiplies results by a number, before the bias is added.
    #[must_use]
    pub const fn alpha(self, alpha: f32) -> Self {
        Self { alpha, ..self }
    }

    /// Adds a number to the results of each row of weights. `bias` has one per row.
    #[must_use]
    pub const fn bias(self, bias: &'a [f32]) -> Self {
        Self { bias: Some(bias), ..self }
    }
}

impl<'a> From<QuantizedView<'a>> for Fp4Weights<'a> {
    fn from(view: QuantizedView<'a>) -> Self {
        Self { view, alpha: 1.0, bias: None }
    }
}

impl<'a> From<&'a QuantizedTensor> for Fp4Weights<'a> {
    fn from(tensor: &'a QuantizedTensor) -> Self {
        tensor.view().into()
    }
}

/// Checks that activations, weights and output match. Returns the rows of the weights (M).
///
/// `output` is the output's number of elements.
pub(crate) fn check<const N: usize>(
    activations: QuantizedView<'_>,
    weights: &[Fp4Weights<'_>; N],
    output: usize,
) -> Result<usize> {
    let rows = weights[0].view.rows();
    for Fp4Weights { view, bias, .. } in weights {
        let (format, found) = (view.format(), activations.format());
        if format != found || !format.is_multiplied() {
            return Err(Error::Operands(OperandFault::Formats { matrix: format, vector: found }));
        }
        if view.cols() != activations.cols() {
            let fault = OperandFault::Activations { weights: view.cols(), activations: activations.cols() };
            return Err(Error::Operands(fault));
        }
        if view.rows() != rows {
            return Err(Error::Operands(OperandFault::GateRows { gate: rows, up: view.rows() }));
        }
        if let Some(bias) = bias {
            Shape::new(1, rows).check("the bias", bias.len())?;
        }
    }
    Shape::new(activations.rows(), rows).check("the output", output)?;
    Ok(rows)
}
