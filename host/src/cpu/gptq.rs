//! GPTQ: quantizes a layer's weights by the error in its outputs, with error feedback.
//!
//! # Definition
//! H = XᵀX of the layer's inputs, damped and ordered as [`GptqFactor`] says, is R·Rᵀ with R upper
//! triangular. With the dequantized row q and the residuals r = q − w of a row w, the squared error
//! in the layer's outputs is
//!
//! ```text
//! (q − w)·H·(q − w)ᵀ = |r·R|² = Σₖ (Rₖₖ·(qₖ − yₖ))²     yₖ = wₖ − Σⱼ<ₖ rⱼ·Rⱼₖ/Rₖₖ
//! ```
//!
//! Position k is rounded from yₖ, which compensates all earlier errors. This is GPTQ (Frantar et
//! al., arXiv 2210.17323) in the form of LDLQ (QuIP, Chee et al., arXiv 2307.13304, whose theorem 6
//! proves that the codes are the same). It needs neither H⁻¹ nor its factor: with
//! H⁻¹ = UᵀU, U = R⁻¹.
//!
//! A block's scale is chosen when all earlier blocks are done. Its updated weights x are the yₖ
//! that would follow if the block itself had no errors. The numerics choose the plain scale from
//! their amax, in f32. A search compares scales by the sum of the block's terms, each from the
//! recursion over the block's columns under that scale. As every later column compensates, this sum
//! is the conditional error (q − x)·S·(q − x)ᵀ with the Schur complement S of the later columns,
//! as in Schur Replay (arXiv 2609.36654). The plain scale wins ties, then the smallest.
//!
//! # Arithmetic
//! The factorization is in f64 (see `cholesky`). In the loop each product and its difference are
//! one fused f32 operation, and differences are taken in the order of positions:
//!
//! ```text
//! x_k = w_k − r_0·F_0k − … − r_b·F_bk − (x_b+1 − w_b+1)·F_(b+1)k − …       F_jk = R_jk/R_kk
//! y_k = x_k − (q_b+1 − x_b+1)·F_(b+1)k − …                        b: the last earlier block's end
//! e_k = (y_k − q_k)·u·R_kk,   E = e_b+1² + e_b+2² + …         u: the block's unit, as in `search`
//! ```
//!
//! A weight whose update leaves the range of f32 is rounded without it: x_k is w_k, or y_k is x_k.
//! [`lanes`] computes this for sixteen rows at a time, and [`reference`] for one element at a time.
//!
//! # Which scales are not tried
//! Once a scale makes all codes zero, no larger one is tried: codes stay zero, so errors are equal.
//! The search stops below where `BlockBounds::least_factor` proves larger errors. A candidate is
//! abandoned once its partial sum exceeds the least error: sums of squares only grow.

mod block;
mod cholesky;
mod factor;
mod fixed;
mod in_loop;
mod lanes;
mod load;
mod loop_state;
mod loss;
mod operands;
mod order;
mod products;
mod reference;
mod reference_task;
mod rows;
mod tasks;
mod triangle;

pub(super) use cholesky::{factor_panel, solve, subtract_panel};
pub use factor::GptqFactor;
pub(super) use loop_state::{Blocks, LoopParams, TaskRows};
pub(super) use loss::add_norms;
use microscale_formats::{Format, Search};
pub use operands::{FactorOperands, ScaleFactors};
pub(super) use tasks::quantize_task;

use super::amax::amax_of_matrix;
use super::isa::Isa;
use super::quantize::quantize;
use crate::cpu::dequantize::dequantize;
use crate::element::Element;
use crate::elements::Elements;
use crate::error::{Error, GptqFault, Result};
use crate::gptq::{GptqQuantized, GptqScales, OutputLoss};
use crate::recipe::Recipe;
use crate::report::Report;
use crate::scheme::{Global, Scheme};
use crate::shape::{MatrixShape, QuantizedShape, Shape};
use crate::tensor::QuantizedTensor;
use crate::view::QuantizedView;

/// Quantizes a layer's weights by GPTQ, in rayon's threads.
///
/// `shape` describes the weights `[outputs, columns]` in `values`. NVFP4's global scale is the one
/// of plain quantization, or given in the recipe; updated weights beyond its range saturate. Use
/// [`Search::Full`] for the least error. `factor` is the factor of the layer's inputs.
///
/// Under [`NonFinite::Propagate`](crate::NonFinite), a NaN block takes no part in the feedback.
///
/// ```
/// use microscale::{
///     Format, GptqFactor, GptqOptions, GptqScales, Numerics, Recipe, Search, Shape, quantize_gptq,
/// };
///
/// let (columns, tokens) = (32, 100);
/// let inputs: Vec<f32> = (0..tokens * columns).map(|i| (i as f32 * 0.37).sin()).collect();
/// let mut hessian = vec![0.0; columns * columns];
/// for token in inputs.chunks(columns) {
///     for i in 0..columns {
///         for j in 0..columns {
///             hessian[i * columns + j] += token[i] * token[j];
///         }
///     }
/// }
/// let factor = GptqFactor::new(&hessian, columns, Format::Nvfp4, GptqOptions::new())?;
///
/// let weights: Vec<f32> = (0..4 * columns).map(|i| (i as f32 * 0.73).cos()).collect();
/// let plain = Recipe::of(Format::Nvfp4, Numerics::CompressedTensors)?;
/// let recipe = Recipe { search: Search::Full, ..plain };
/// let shape = Shape::new(4, columns);
/// let gptq = quantize_gptq(&weights, shape, &recipe, &factor, GptqScales::InLoop)?;
///
/// let rounded = microscale::quantize(&weights, shape, &plain)?;
/// let loss = factor.output_loss(&weights, shape, &rounded.tensor)?;
/// assert!(gptq.output_error < loss.error);
/// # Ok::<(), microscale::Error>(())
/// ```
///
/// # Errors
/// [`Error::Gptq`] if the recipe's format is not of 4 bits, or the factor is for another format or
/// number of columns, and the errors of [`quantize`](crate::quantize()).
pub fn quantize_gptq<T: Element>(
    values: &[T],
    shape: impl Into<MatrixShape>,
    recipe: &Recipe,
    factor: &GptqFactor,
    scales: GptqScales,
) -> Result<GptqQuantized> {
    quantize_gptq_with(Isa::best(), values, shape, recipe, factor, scales)
}

/// [`quantize_gptq`] with a given instruction set, for tests and comparisons.
///
/// # Errors
/// The errors of [`quantize_gptq`].
pub fn quantize_gptq_with<T: Element>(
    isa: Isa,
    values: &[T],
    shape: impl Into<MatrixShape>,
    recipe: &Recipe,
    factor: &GptqFactor,
    scales: GptqScales,
) -> Result<GptqQuantized> {
    let shape = shape.into();
    shape.check(values.len())?;
    factor.check_request(recipe, shape.dense().cols, scales)?;
    let dense = shape.dense();
    let linear = QuantizedShape::new(recipe.format(), dense.rows, dense.cols);
    let mut tensor = QuantizedTensor::zeros(linear)?;
    if dense.is_empty() {
        let tensor = tensor.convert_layout(recipe.scale_layout);
        return Ok(GptqQuantized { tensor, report: Report::default(), output_error: 0.0 });
    }
    let global = match recipe.scheme {
        Scheme::Nvfp4(arithmetic, Global::FromAmax) => {
            let amax = amax_of_matrix(isa, Elements::of(values), &shape.simplified());
            Some(amax.global_scale::<T>(&arithmetic, recipe.non_finite))
        }
        Scheme::Nvfp4(_, Global::Given(given)) => Some(given),
        _ => None,
    };
    let chosen = match scales {
        GptqScales::InLoop => None,
        GptqScales::Static => Some(quantize(values, shape, recipe)?),
    };
    let request = tasks::Request {
        isa,
        values: Elements::of(values),
        shape: shape.strided(),
        policy: recipe.non_finite,
        factor,
        chosen: chosen.as_ref().map(|chosen| chosen.tensor.linear_scales()),
    };
    let search = if chosen.is_some() { Search::None } else { recipe.search };
    let (mut report, error) = request.quantize(recipe.scheme, search, global, &mut tensor);
    if let Some(chosen) = chosen {
        let Report { saturated_scales, rescaled_blocks, tried_scales, .. } = chosen.report;
        report = Report { saturated_scales, rescaled_blocks, tried_scales, ..report };
    }
    tensor.set_global_scale(global);
    let tensor = tensor.convert_layout(recipe.scale_layout);
    Ok(GptqQuantized { tensor, report: recipe.accept(report)?, output_error: error * factor.unit })
}

/// Checks that a factor is for this format and this number of columns.
fn check_format(format: Format, factor: &GptqFactor, cols: usize) -> Result<()> {
    if !format.is_searched() {
        return Err(Error::Gptq(GptqFault::Format { format }));
    }
    factor.require(cols, format)
}

impl GptqFactor {
    /// Checks a request of GPTQ for a matrix with this number of columns.
    ///
    /// # Errors
    /// As for [`quantize_gptq`](crate::quantize_gptq()).
    pub(crate) fn check_request(&self, recipe: &Recipe, cols: usize, scales: GptqScales) -> Result<()> {
        recipe.check()?;
        check_format(recipe.format(), self, cols)?;
        if scales == GptqScales::InLoop && !self.order.keeps_blocks() {
            return Err(Error::Gptq(GptqFault::ColumnOrder));
        }
        Ok(())
    }

    /// Computes the error of a quantized matrix in the outputs of its layer.
    ///
    /// `values` and `shape` are the original, `quantized` any quantization of it. Products and sums
    /// over columns are f32, and their squares are summed in f64. Values that are not finite, and
    /// the differences from them, count as 0.
    ///
    /// # Errors
    /// [`Error::Gptq`] if the quantized matrix has another format or shape, and the errors of
    /// [`quantize`](crate::quantize()) for a slice that does not hold the shape.
    pub fn output_loss<'a, T: Element>(
        &self,
        values: &[T],
        shape: impl Into<MatrixShape>,
        quantized: impl Into<QuantizedView<'a>>,
    ) -> Result<OutputLoss> {
        let (shape, quantized) = (shape.into(), quantized.into());
        shape.check(values.len())?;
        let Shape { rows: expected, cols, .. } = shape.dense();
        check_format(quantized.format(), self, cols)?;
        self.require(quantized.cols(), quantized.format())?;
        if quantized.rows() != expected {
            return Err(Error::Gptq(GptqFault::Rows { expected, found: quantized.rows() }));
        }
        let dequantized: Vec<f32> = dequantize(quantized);
        let (error, energy) = tasks::norms(self, Elements::of(values), &shape.strided(), &dequantized);
        Ok(OutputLoss { error: error * self.unit, energy: energy * self.unit })
    }
}
