//! Quantizing on the CPU: checks arguments, and chooses the contiguous or the strided path.

mod contiguous;
mod importance;
mod strided;

use half::{bf16, f16};
use microscale_formats::GlobalScale;

use self::contiguous::ContiguousRequest;
use self::importance::PreparedImportance;
use self::strided::StridedRequest;
use super::amax::amax_of_matrix;
use super::comparison;
use super::isa::Isa;
use crate::amax::Amax;
use crate::cpu::rounding::params::{FormatParams, QuantizeParams};
use crate::element::{Dtype, Element};
use crate::elements::{Elements, by_dtype};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::options::QuantizeOptions;
use crate::recipe::Recipe;
use crate::report::Report;
use crate::scheme::Scheme;
use crate::shape::{MatrixShape, QuantizedShape};
use crate::tensor::{Quantized, QuantizedTensor};

/// Quantizes the matrix that `shape` describes in `values`, on the CPU.
///
/// A [`Strided`](crate::Strided) shape may run along any axis of a tensor. The result equals that
/// of a contiguous copy, but nothing is copied. Quantizing is fastest if either the elements of a
/// row or the elements of a column are contiguous in memory.
///
/// # Errors
///
/// If the slice does not hold the shape: [`Error::Length`], [`Error::RowStride`] or
/// [`Error::TooLarge`] for a [`Shape`](crate::Shape), and [`Error::StridedLength`],
/// [`Error::ZeroStride`] or [`Error::StridedTooLarge`] for a [`Strided`](crate::Strided).
/// [`Error::NonFinite`] if the recipe refuses a value of the input; the row and column of the error
/// refer to the matrix. [`Error::GlobalScale`] or [`Error::GlobalScaleDirection`] if the recipe's
/// global scale is invalid, and [`Error::NoSearch`] if the recipe searches scales but the format
/// has no search.
pub fn quantize<T: Element>(
    values: &[T],
    shape: impl Into<MatrixShape>,
    recipe: &Recipe,
) -> Result<Quantized> {
    quantize_with(values, shape, recipe, QuantizeOptions::new())
}

/// [`quantize`] with options.
///
/// # Errors
/// The errors of [`quantize`] and of the options, see [`QuantizeOptions`].
pub fn quantize_with<T: Element>(
    values: &[T],
    shape: impl Into<MatrixShape>,
    recipe: &Recipe,
    options: QuantizeOptions<'_>,
) -> Result<Quantized> {
    let request = Request::new(Elements::of(values), shape.into(), recipe, options)?;
    // The input is already checked, so a shape that no slice can hold does not get here.
    let mut tensor = QuantizedTensor::zeros(request.quantized())?;
    let report = request.quantize(&mut tensor)?;
    Ok(Quantized { tensor, report })
}

/// [`quantize_with`] into an existing tensor.
///
/// # Errors
///
/// The errors of [`quantize_with`], and [`Error::QuantizedShape`] if `out` has another shape,
/// format or scale layout.
pub fn quantize_into<T: Element>(
    values: &[T],
    shape: impl Into<MatrixShape>,
    recipe: &Recipe,
    options: QuantizeOptions<'_>,
    out: &mut QuantizedTensor,
) -> Result<Report> {
    let request = Request::new(Elements::of(values), shape.into(), recipe, options)?;
    out.shape().require(request.quantized())?;
    request.quantize(out)
}

/// [`quantize_with`] into slices of codes and scales, laid out as in a [`QuantizedTensor`].
///
/// Returns the global scale, if the format has one, and the report.
///
/// # Errors
///
/// The errors of [`quantize_with`], and [`Error::QuantizedLength`] if `codes` or `scales` do not
/// have exactly the lengths of [`QuantizedShape::bytes`].
pub fn quantize_into_parts<T: Element>(
    values: &[T],
    shape: impl Into<MatrixShape>,
    recipe: &Recipe,
    options: QuantizeOptions<'_>,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<(Option<GlobalScale>, Report)> {
    let request = Request::new(Elements::of(values), shape.into(), recipe, options)?;
    request.quantized().check(codes.len(), scales.len())?;
    request.quantize_parts(codes, scales)
}

/// A matrix to quantize, with the recipe.
struct Request<'a> {
    isa: Isa,
    /// The values. They are checked to hold the shape.
    values: Elements<'a>,
    shape: MatrixShape,
    recipe: &'a Recipe,
    importance: PreparedImportance<'a>,
}

impl<'a> Request<'a> {
    fn new(
        values: Elements<'a>,
        shape: MatrixShape,
        recipe: &'a Recipe,
        options: QuantizeOptions<'a>,
    ) -> Result<Self> {
        shape.check(values.len())?;
        let importance = PreparedImportance::new(options.importance, recipe, shape.dense().cols)?;
        Ok(Self { isa: options.chosen_isa(), values, shape: shape.simplified(), recipe, importance })
    }

    /// The shape of the result.
    fn quantized(&self) -> QuantizedShape {
        QuantizedShape::of(self.recipe, self.shape.dense())
    }

    /// Quantizes to a tensor of the result's shape.
    fn quantize(&self, out: &mut QuantizedTensor) -> Result<Report> {
        let (codes, scales) = out.parts_mut();
        let (global_scale, report) = self.quantize_parts(codes, scales)?;
        out.set_global_scale(global_scale);
        Ok(report)
    }

    /// Quantizes to codes and scales with the lengths of the result's shape.
    fn quantize_parts(&self, codes: &mut [u8], scales: &mut [u8]) -> Result<(Option<GlobalScale>, Report)> {
        self.recipe.check()?;
        let Self { isa, values, recipe, ref importance, .. } = *self;
        let quantized = self.quantized();
        if let Scheme::Comparison(format) = recipe.scheme {
            let strided = self.shape.strided();
            let report = by_dtype!(Elements, values => {
                comparison::quantize(values, &strided, recipe, format, codes, scales)
            });
            return Ok((None, report?));
        }
        let (params, global_scale) = self.params();
        let empty = self.shape.dense().is_empty();
        let report = match self.shape {
            _ if empty => Report::default(),
            MatrixShape::Rows(shape) => ContiguousRequest { isa, values, shape, params, importance }
                .quantize(quantized, codes, scales),
            MatrixShape::Strided(strided) => by_dtype!(Elements, values => {
                StridedRequest { isa, values, strided, params, importance, block: recipe.format().block() }.quantize(quantized, codes, scales)
            }),
        };
        Ok((global_scale.filter(|_| !empty), recipe.accept(report)?))
    }

    /// The parameters for these values, and the global scale to store.
    fn params(&self) -> (QuantizeParams, Option<GlobalScale>) {
        let Self { isa, values, recipe, .. } = *self;
        let (format, global_scale) = FormatParams::of(recipe, values.dtype(), |arithmetic| {
            let amax = self.amax();
            match values.dtype() {
                Dtype::F32 => amax.global_scale::<f32>(arithmetic, recipe.non_finite),
                Dtype::F16 => amax.global_scale::<f16>(arithmetic, recipe.non_finite),
                Dtype::Bf16 => amax.global_scale::<bf16>(arithmetic, recipe.non_finite),
            }
        });
        let thresholds = isa.thresholds(values, &format);
        (QuantizeParams::new(recipe, format, thresholds, global_scale), global_scale)
    }

    fn amax(&self) -> Amax {
        amax_of_matrix(self.isa, self.values, &self.shape)
    }
}
