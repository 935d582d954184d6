//! Products of matrices of FP4: operands, and checks that they match.

use microscale_formats::GlobalScale;

use crate::error::{Error, OperandFault, Result};
use crate::experts::{ExpertRows, check_pairs};
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

/// Rows of activations of [`gemm_fp4`](crate::gemm_fp4()) and
/// [`gemm_experts_fp4`](crate::gemm_experts_fp4()): `[tokens, K]`, or `[pairs, K]` if each pair has
/// its own row.
///
/// A tensor has one global scale for all rows, or none.
#[derive(Clone, Copy, Debug)]
pub struct Fp4Rows<'a> {
    pub(crate) view: QuantizedView<'a>,
    global_scales: Option<&'a [GlobalScale]>,
    pub(crate) token_scales: Option<&'a [f32]>,
}

impl<'a> Fp4Rows<'a> {
    /// Applies a global scale per expert, instead of one for all rows: the rows of an expert were
    /// quantized with its global scale, as
    /// [`quantize_activations`](crate::quantize_activations()) does by expert.
    #[must_use]
    pub const fn global_scales(self, by_expert: &'a [GlobalScale]) -> Self {
        Self { global_scales: Some(by_expert), token_scales: None, ..self }
    }

    /// Applies a global scale per row, instead of one for all rows: a multiplier, `[tokens]` or
    /// `[pairs]`, as [`quantize_activations`](crate::quantize_activations()) computes them with
    /// [`ActivationScale::PerToken`](crate::ActivationScale::PerToken). FlashInfer calls this
    /// `per_token_activation`.
    #[must_use]
    pub const fn token_scales(self, multipliers: &'a [f32]) -> Self {
        Self { token_scales: Some(multipliers), global_scales: None, ..self }
    }

    /// The global scale of a row, given the one of all rows.
    pub(crate) fn global_scale(&self, row: usize) -> Option<GlobalScale> {
        let of_row = self.token_scales.map(|scales| GlobalScale::Multiplier(scales[row]));
        of_row.or_else(|| self.view.global_scale())
    }

    /// Checks that a product needs no other global scales than by row.
    fn check_scales(&self, rows: usize) -> Result<()> {
        let Some(scales) = self.token_scales else { return Ok(()) };
        if !self.view.format().has_global_scale() {
            return Err(Error::NoGlobalScale { format: self.view.format() });
        }
        Shape::new(rows, 1).check("the global scales of the activations", scales.len())
    }
}

impl<'a> From<QuantizedView<'a>> for Fp4Rows<'a> {
    fn from(view: QuantizedView<'a>) -> Self {
        Self { view, global_scales: None, token_scales: None }
    }
}

impl<'a> From<&'a QuantizedTensor> for Fp4Rows<'a> {
    fn from(tensor: &'a QuantizedTensor) -> Self {
        tensor.view().into()
    }
}

/// Checks that activations, weights and output match. Returns the rows of the weights (M).
///
/// `output` is the output's number of elements. Global scales by expert are of one expert.
pub(crate) fn check<'a, const N: usize>(
    activations: Fp4Rows<'a>,
    weights: &[Fp4Weights<'_>; N],
    output: usize,
) -> Result<(usize, Fp4Rows<'a>)> {
    let Fp4Rows { view, global_scales, .. } = activations;
    let rows = check_weights(view, weights)?;
    Shape::new(view.rows(), rows).check("the output", output)?;
    activations.check_scales(view.rows())?;
    let Some(global_scales) = global_scales else { return Ok((rows, activations)) };
    Shape::new(1, 1).check("the global scales of the activations", global_scales.len())?;
    Ok((rows, view.with_global_scale(global_scales[0])?.into()))
}

/// Checks that activations and weights match. Returns the rows of the weights (M).
fn check_weights<const N: usize>(
    activations: QuantizedView<'_>,
    weights: &[Fp4Weights<'_>; N],
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
    Ok(rows)
}

/// Checks that activations, experts' weights, pairs and output match. Returns the rows of an
/// expert's weights (M), and each expert's view of the activations.
///
/// There are `top_k` pairs per token. `output` is the output's number of elements.
pub(crate) fn check_experts<'a, const N: usize>(
    activations: Fp4Rows<'a>,
    experts: &[[Fp4Weights<'_>; N]],
    (pairs, top_k): (usize, usize),
    rows: ExpertRows,
    output: usize,
) -> Result<(usize, Vec<QuantizedView<'a>>)> {
    let Fp4Rows { view, global_scales, .. } = activations;
    let fault = |what| Error::Operands(OperandFault::Experts { what });
    let results = check_weights(view, experts.first().ok_or(fault("one or more"))?)?;
    for weights in experts {
        if check_weights(view, weights)? != results {
            return Err(fault("of one format and shape"));
        }
    }
    check_pairs(pairs, top_k)?;
    let needed = rows.activation_rows([pairs, top_k]);
    Shape::new(needed, view.cols()).check("the activations", view.rows().saturating_mul(view.cols()))?;
    Shape::new(pairs, results).check("the output", output)?;
    activations.check_scales(needed)?;
    let Some(global_scales) = global_scales else { return Ok((results, vec![view; experts.len()])) };
    Shape::new(experts.len(), 1).check("the global scales of the activations", global_scales.len())?;
    let scaled = global_scales.iter().take(experts.len()).map(|scale| view.with_global_scale(*scale));
    Ok((results, scaled.collect::<Result<_>>()?))
}
