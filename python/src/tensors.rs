//! Operations on arrays. Outputs exist already; shapes, dtypes and memory are checked here.

use half::{bf16, f16};
use microscale::{
    Activation, Amax, Batch, Element, ErrorStats, Global, GlobalScale, QuantizeOptions, ScaleLayout, Scheme,
    gemv as multiply_quantized,
};
use pyo3::prelude::*;

use crate::array::{Array, Kind, with_output, with_values};
use crate::errors::{error, of_tensors, type_error};
use crate::gate::{combine, gate_of, results};
use crate::inputs::Activations;
use crate::interface::array_of;
use crate::operand::Operand;
use crate::recipe::{Recipe, word};
use crate::rounding::Rounding;
use crate::workers::work;

/// Counts of a report, in the order of Python's `Report`.
pub(crate) type Counts = (u64, u64, u64, u64, u64, u64, u64, Option<(usize, usize)>);

/// Figures of a loss, in the order of Python's `Loss`.
type Figures = (u64, u64, f64, f64, f64, f64);

pub(crate) fn counts(report: microscale::Report) -> Counts {
    (
        report.nan,
        report.infinite,
        report.clipped_blocks,
        report.flushed_blocks,
        report.saturated_scales,
        report.rescaled_blocks,
        report.tried_scales,
        report.first_non_finite.map(|first| (first.row, first.col)),
    )
}

fn figures(stats: ErrorStats) -> Figures {
    (
        stats.elements(),
        stats.non_finite(),
        stats.relative_squared_error(),
        stats.sqnr_db(),
        stats.max_abs_error(),
        stats.cosine(),
    )
}

/// A recipe with the global scale of an amax, if the scale is computed and an amax is given.
fn with_amax<T: Element>(_: &[T], recipe: &microscale::Recipe, amax: Option<Amax>) -> microscale::Recipe {
    let mut recipe = *recipe;
    if let (Some(amax), Scheme::Nvfp4(arithmetic, global @ Global::FromAmax)) = (amax, &mut recipe.scheme) {
        *global = Global::Given(amax.global_scale::<T>(arithmetic, recipe.non_finite));
    }
    recipe
}

/// Quantizes the rows of an array to codes and scales, which are `new` if the package made them of
/// PyTorch for this call. Returns the global scale, which comes of the amax if one is given, and
/// counts.
#[pyfunction]
#[pyo3(signature = (values, recipe, importance, amax, codes, scales, new))]
#[expect(clippy::too_many_arguments, reason = "inputs and outputs of one call in Python")]
pub(crate) fn quantize(
    py: Python<'_>,
    values: &Bound<'_, PyAny>,
    recipe: &Recipe,
    importance: Option<&Bound<'_, PyAny>>,
    amax: Option<(f32, bool, bool)>,
    codes: &Bound<'_, PyAny>,
    scales: &Bound<'_, PyAny>,
    new: bool,
) -> PyResult<(Option<f32>, Option<&'static str>, Counts)> {
    let values = array_of(values, "x")?;
    let shape = values.matrix(py)?;
    let importance = importance.map(|importance| array_of(importance, "importance")).transpose()?;
    let columns = importance.as_ref().map(|importance| columns(py, importance)).transpose()?;
    let options =
        columns.map_or(QuantizeOptions::new(), |columns| QuantizeOptions::new().importance(columns));
    let [mut codes, mut scales] = if new {
        recipe.new_outputs(&values, [codes, scales])?
    } else {
        [array_of(codes, "codes")?, array_of(scales, "scales")?]
    };
    let inputs: Vec<_> = [&values].into_iter().chain(&importance).collect();
    let codes_out: &mut [u8] = codes.output(py, Kind::Bytes, &inputs)?;
    let range = codes_out.as_ptr_range();
    let scales_out: &mut [u8] = scales.output(py, Kind::Bytes, &inputs)?;
    let other = scales_out.as_ptr_range();
    if range.start < other.end && other.start < range.end {
        return Err(error(py, "codes and scales share memory; pass arrays of their own"));
    }
    let amax = amax.map(|(finite, nan, infinite)| Amax { finite, nan, infinite });
    let done = with_values!(values, values => {
        let recipe = with_amax(values, &recipe.0, amax);
        work(py, || microscale::quantize_into_parts(values, shape, &recipe, options, codes_out, scales_out))?
    })?;
    let (global_scale, report) = done.map_err(|error| of_tensors(py, error))?;
    let direction = global_scale.map(|global_scale| microscale::Words::word(global_scale.direction()));
    Ok((global_scale.map(GlobalScale::value), direction, counts(report)))
}

/// A vector of f32 without gaps.
fn columns<'a>(py: Python<'_>, importance: &'a Array) -> PyResult<&'a [f32]> {
    let shape = importance.rows(py)?;
    if importance.kind() != Kind::F32 || importance.dims().len() != 1 || shape.cols != shape.row_stride {
        return Err(type_error(
            "importance must be a contiguous vector of float32, a number for each column",
        ));
    }
    Ok(importance.values())
}

/// Dequantizes to an array of the same number of elements.
#[pyfunction]
pub(crate) fn dequantize(py: Python<'_>, tensor: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>) -> PyResult<()> {
    let tensor = Operand::of(tensor)?;
    let view = tensor.view(py)?;
    let mut out = array_of(out, "out")?;
    require_elements(py, &out, view.rows(), view.cols())?;
    let row_stride = view.cols();
    let done = with_output!(py, out, &[&tensor.codes, &tensor.scales], values => {
        work(py, || microscale::dequantize_into(view, values, row_stride))
    })??;
    done.map_err(|error| of_tensors(py, error))
}

/// Checks that an output has the number of elements of a matrix.
pub(crate) fn require_elements(py: Python<'_>, out: &Array, rows: usize, cols: usize) -> PyResult<()> {
    let found = out.dims().iter().fold(1usize, |all, n| all.saturating_mul(*n));
    let expected = rows.saturating_mul(cols);
    if found != expected {
        return Err(error(
            py,
            format!("out has {found} elements and must have {expected}, {rows} rows of {cols}"),
        ));
    }
    Ok(())
}

/// Makes sure that a bias has the activations' dtype, a number for each row of the weights, and no
/// gaps.
pub(crate) fn require_bias(py: Python<'_>, bias: &Array, kind: Kind, shape: &[usize]) -> PyResult<()> {
    bias.require(py, kind)?;
    let found = bias.dims();
    if found != shape {
        return Err(error(py, format!("bias has shape {found:?} and must have {shape:?}; reshape it")));
    }
    Ok(())
}

/// Adds a bias to each row of results, with a rounding of its own.
pub(crate) fn add_bias<R: Activation, T: Activation>(results: &mut [R], bias: &[T]) {
    for (result, bias) in results.iter_mut().zip(bias) {
        *result = R::from_f32(result.to_f32() + bias.to_f32());
    }
}

/// The largest finite magnitude, and whether there are NaN and infinities.
#[pyfunction]
pub(crate) fn amax(py: Python<'_>, values: &Bound<'_, PyAny>) -> PyResult<(f32, bool, bool)> {
    let values = array_of(values, "x")?;
    let shape = values.matrix(py)?;
    let found = with_values!(values, values => work(py, || microscale::amax(values, shape))?)?;
    let found = found.map_err(|error| of_tensors(py, error))?;
    Ok((found.finite, found.nan, found.infinite))
}

/// Writes the scales of a quantized matrix in a layout.
#[pyfunction]
pub(crate) fn scales_in(
    py: Python<'_>,
    tensor: &Bound<'_, PyAny>,
    layout: &str,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let layout: ScaleLayout = word(py, layout)?;
    let tensor = Operand::of(tensor)?;
    let view = tensor.view(py)?;
    let mut out = array_of(out, "out")?;
    let out: &mut [u8] = out.output(py, Kind::Bytes, &[&tensor.codes, &tensor.scales])?;
    let scales = work(py, || view.scales_in(layout))?;
    if scales.len() != out.len() {
        return Err(error(py, format!("out has {} bytes and must have {}", out.len(), scales.len())));
    }
    out.copy_from_slice(&scales);
    Ok(())
}

/// Multiplies quantized matrices with quantized vectors.
#[pyfunction]
pub(crate) fn gemv(
    py: Python<'_>,
    matrix: &Bound<'_, PyAny>,
    vectors: &Bound<'_, PyAny>,
    batch: usize,
    vector_stride: usize,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (matrix, vectors) = (Operand::of(matrix)?, Operand::of(vectors)?);
    let (matrix_view, vector_view) = (matrix.view(py)?, vectors.view(py)?);
    let mut out = array_of(out, "out")?;
    let batch = Batch::of(batch).with_vector_stride(vector_stride);
    let inputs = [&matrix.codes, &matrix.scales, &vectors.codes, &vectors.scales];
    let done = with_output!(py, out, &inputs, values => {
        work(py, || multiply_quantized(matrix_view, vector_view, batch, values))
    })??;
    done.map_err(|error| of_tensors(py, error))
}

/// Multiplies quantized weights with activations, which it may round first, adds a bias, and
/// combines pairs of results by a gate.
#[pyfunction]
#[pyo3(signature = (weights, x, out, bias, activations, round_weights, gate))]
#[expect(clippy::too_many_arguments, reason = "inputs and outputs of one call in Python")]
pub(crate) fn linear(
    py: Python<'_>,
    weights: &Bound<'_, PyAny>,
    x: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    bias: Option<&Bound<'_, PyAny>>,
    activations: Option<&str>,
    round_weights: bool,
    gate: Option<&str>,
) -> PyResult<()> {
    let rounding = Rounding::of(py, activations, round_weights)?;
    let weights = Operand::of(weights)?;
    let view = weights.view(py)?;
    let activations = Activations::by(x, array_of)?;
    activations.require(py, rounding)?;
    let tokens = activations.rows(py, view.cols())?;
    let mut out = array_of(out, "out")?;
    let gate = gate_of(py, gate)?;
    require_elements(py, &out, tokens, results(py, view.rows(), gate)?)?;
    let kind = activations.kind(out.kind());
    let bias = bias.map(|bias| array_of(bias, "bias")).transpose()?;
    if let Some(bias) = &bias {
        require_bias(py, bias, kind, &[view.rows()])?;
    }
    let inputs: Vec<_> =
        [&weights.codes, &weights.scales].into_iter().chain(activations.arrays()).chain(&bias).collect();
    /// The product for a dtype.
    macro_rules! multiply {
        ($T:ty) => {{
            let out: &mut [$T] = out.output(py, kind, &inputs)?;
            let bias = bias.as_ref().map(Array::values::<$T>);
            let input = activations.input::<$T>(py, rounding, round_weights)?;
            work(py, || {
                let Some(gate) = gate else {
                    input.multiply(view, tokens, out)?;
                    if let Some(bias) = bias {
                        out.chunks_exact_mut(bias.len().max(1)).for_each(|row| add_bias(row, bias));
                    }
                    return Ok(());
                };
                let mut sums = vec![0f32; tokens * view.rows()];
                input.widened().multiply(view, tokens, &mut sums)?;
                if let Some(bias) = bias {
                    sums.chunks_exact_mut(bias.len().max(1)).for_each(|row| add_bias(row, bias));
                }
                combine(gate, &sums, out);
                Ok(())
            })?
        }};
    }
    let done = match kind {
        Kind::F32 => multiply!(f32),
        Kind::F16 => multiply!(f16),
        Kind::Bf16 => multiply!(bf16),
        Kind::Bytes | Kind::Indices | Kind::Longs => return Err(activations.no_values(&out)),
    };
    done.map_err(|error| of_tensors(py, error))
}

/// Figures of the difference between an array and its quantized form.
#[pyfunction]
pub(crate) fn compare_quantized(
    py: Python<'_>,
    values: &Bound<'_, PyAny>,
    tensor: &Bound<'_, PyAny>,
) -> PyResult<Figures> {
    let values = array_of(values, "original")?;
    let shape = values.rows(py)?;
    let tensor = Operand::of(tensor)?;
    let view = tensor.view(py)?;
    let stats = with_values!(values, values => work(py, || ErrorStats::of_quantized(values, shape, view))?)?;
    stats.map(figures).map_err(|error| of_tensors(py, error))
}

/// Figures of the difference between two arrays of one shape.
#[pyfunction]
pub(crate) fn compare(
    py: Python<'_>,
    original: &Bound<'_, PyAny>,
    other: &Bound<'_, PyAny>,
) -> PyResult<Figures> {
    let (original, other) = (array_of(original, "original")?, array_of(other, "other")?);
    if original.dims() != other.dims() {
        let (first, second) = (original.dims(), other.dims());
        return Err(error(
            py,
            format!("original has shape {first:?} and other {second:?}; they must be the same"),
        ));
    }
    for array in [&original, &other] {
        let shape = array.rows(py)?;
        if shape.rows > 1 && shape.row_stride != shape.cols {
            return Err(error(py, "arrays to compare must be contiguous; pass contiguous copies of them"));
        }
    }
    let stats = with_values!(original, first => with_values!(other, second => {
        work(py, || ErrorStats::between(first, second))?
    }))??;
    Ok(figures(stats))
}
