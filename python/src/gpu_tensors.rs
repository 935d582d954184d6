//! Operations on arrays in the memory of GPUs, by the names of those on a CPU's with `gpu_` before
//! them. They enqueue on the caller's stream and return: none waits, but [`gpu_quantize`] where it
//! is asked for counts.

use half::{bf16, f16};
use microscale::gpu::{
    DeviceAmax, DeviceEpilogue, DeviceQuantizeOptions, DeviceReport, DeviceResults, DeviceTensorViewMut,
    Fp8Activations, GemmWorkspace, GemmWorkspaceMut, Gpu,
};
use microscale::{Batch, Dtype, Error, NonFinite, QuantizedShape, ScaleLayout, Words};
use pyo3::intern;
use pyo3::prelude::*;

use crate::array::{Array, Kind, with_type};
use crate::errors::{error, of_tensors};
use crate::gate::{gate_of, results};
use crate::gpu::{Work, bytes_mut, capture, view, view_mut, words, words_mut};
use crate::inputs::{Activations, DeviceInput};
use crate::interface::{array_anywhere, new_output};
use crate::operand::Operand;
use crate::output::{GivenResults, Output};
use crate::recipe::{Recipe, word};
use crate::rounding::Rounding;
use crate::tensors::{Counts, counts, require_bias, require_elements};

/// Words of 32 bits of a global scale's slot and of an amax, for who allocates them.
pub(crate) const SLOT_WORDS: usize = DeviceTensorViewMut::GLOBAL_SLOT_WORDS;
pub(crate) const AMAX_WORDS: usize = DeviceAmax::WORDS;
/// Bytes of a workspace that are zeros before its first product.
pub(crate) const COUNTER_BYTES: usize = GemmWorkspaceMut::COUNTER_BYTES;

/// An array that work on a stream may use.
fn on_stream(object: &Bound<'_, PyAny>, what: &'static str, stream: usize) -> PyResult<Array> {
    array_anywhere(object, what, Some(stream))
}

/// A quantized matrix that work on a stream may use. The object caches the addresses of PyTorch's
/// tensors, as long as it has the same tensors at the same addresses.
fn operand<'py>(object: &Bound<'py, PyAny>, stream: usize) -> PyResult<Bound<'py, Found>> {
    let py = object.py();
    let name = intern!(py, "_found");
    let kept = object.getattr(name)?;
    if let Ok(kept) = kept.cast_into_exact::<Found>()
        && kept.get().0.is_still(object)?
    {
        return Ok(kept);
    }
    let operand = Operand::by(object, |part, what| on_stream(part, what, stream))?;
    let keeps = operand.is_of_torch(py)?;
    let found = Bound::new(py, Found(operand))?;
    if keeps {
        object.setattr(name, &found)?;
    }
    Ok(found)
}

/// A quantized matrix that was found in an object of Python.
#[pyclass(frozen, module = "microscale._microscale")]
pub(crate) struct Found(Operand);

/// Two lists as one.
fn both<'a>(arrays: &[&'a Array], others: &[&'a Array]) -> Vec<&'a Array> {
    [arrays, others].concat()
}

/// Quantizes the rows of an array to codes and scales, and in NVFP4 a slot, whose first element
/// becomes the global scale. Returns the direction of the global scale, and counts if they are
/// asked for, which waits for the stream. The outputs are `new` if the package made them of PyTorch
/// for this call.
#[pyfunction]
#[pyo3(signature = (values, recipe, importance, amax, codes, scales, slot, new, count, stream))]
#[expect(clippy::too_many_arguments, reason = "inputs and outputs of one call in Python")]
pub(crate) fn gpu_quantize(
    py: Python<'_>,
    values: &Bound<'_, PyAny>,
    recipe: &Recipe,
    importance: Option<&Bound<'_, PyAny>>,
    amax: Option<&Bound<'_, PyAny>>,
    codes: &Bound<'_, PyAny>,
    scales: &Bound<'_, PyAny>,
    slot: Option<&Bound<'_, PyAny>>,
    new: bool,
    count: bool,
    stream: usize,
) -> PyResult<(Option<&'static str>, Option<Counts>)> {
    let optional = |object: Option<&Bound<'_, PyAny>>, what| {
        object.map(|object| on_stream(object, what, stream)).transpose()
    };
    let values = on_stream(values, "x", stream)?;
    let (importance, amax) = (optional(importance, "importance")?, optional(amax, "amax")?);
    let ([mut codes, mut scales], mut slot) = if new {
        let of_slot = (Kind::F32, SLOT_WORDS);
        let slot = slot.map(|slot| new_output(slot, "global_scale", of_slot, values.place()));
        (recipe.new_outputs(&values, [codes, scales])?, slot.transpose()?)
    } else {
        let parts = [on_stream(codes, "codes", stream)?, on_stream(scales, "scales", stream)?];
        (parts, optional(slot, "global_scale")?)
    };
    let shape = values.rows(py)?;
    let inputs: Vec<_> = [&values].into_iter().chain(&importance).chain(&amax).collect();
    codes.require_output(py, Kind::Bytes, &inputs)?;
    scales.require_output(py, Kind::Bytes, &both(&inputs, &[&codes]))?;
    if let Some(slot) = &slot {
        slot.require_output(py, Kind::F32, &both(&inputs, &[&codes, &scales]))?;
    }
    for input in importance.iter().chain(&amax) {
        input.require(py, Kind::F32)?;
    }
    let arrays: Vec<_> = both(&inputs, &[&codes, &scales]).into_iter().chain(&slot).collect();
    let work = Work::with(py, &arrays, stream)?;
    if count {
        work.require_waiting(py)?;
    }

    let of_tensors = |why| of_tensors(py, why);
    let recipe = &recipe.0;
    let mut options = DeviceQuantizeOptions::new();
    if let Some(importance) = &importance {
        options = options.importance(view::<f32>(importance));
    }
    if let Some(amax) = &amax {
        options = options.amax(words(amax));
    }
    let quantized =
        QuantizedShape::new(recipe.format(), shape.rows, shape.cols).with_scale_layout(recipe.scale_layout);
    let mut out = DeviceTensorViewMut::from_parts(quantized, bytes_mut(&mut codes), bytes_mut(&mut scales))
        .map_err(of_tensors)?;
    if let Some(slot) = &mut slot {
        out = out.with_global_slot(words_mut(slot)).map_err(of_tensors)?;
    }
    let report = with_type!(values, T => {
        let input = view::<T>(&values);
        work.enqueue(py, |gpu, stream| {
            if !count {
                return gpu.quantize_on(stream, input, shape, recipe, options, &mut out).map(|()| None);
            }
            let mut report = DeviceReport::zeros(stream)?;
            gpu.quantize_on(stream, input, shape, recipe, options.report(&mut report), &mut out)?;
            report.read(stream, shape, recipe.format()).map(Some)
        })
    })?;
    if let Some(report) = report
        && let (NonFinite::Error, Some(first)) = (recipe.non_finite, report.first_non_finite)
    {
        return Err(of_tensors(Error::NonFinite { first, report }));
    }
    Ok((out.direction().map(Words::word), report.map(counts)))
}

/// Dequantizes to an array of the same number of elements.
#[pyfunction]
pub(crate) fn gpu_dequantize(
    py: Python<'_>,
    tensor: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    stream: usize,
) -> PyResult<()> {
    let (tensor, mut out) = (operand(tensor, stream)?, on_stream(out, "out", stream)?);
    let tensor = &tensor.get().0;
    let arrays: Vec<_> = tensor.arrays().collect();
    require_elements(py, &out, tensor.shape.rows, tensor.shape.cols)?;
    out.require_output(py, out.kind(), &arrays)?;
    let work = Work::with(py, &both(&arrays, &[&out]), stream)?;
    let from = tensor.device_view(py)?;
    with_type!(out, T => {
        let to = view_mut::<T>(&mut out);
        work.enqueue(py, |gpu, stream| gpu.dequantize_on(stream, from, to, from.cols()))
    })
}

/// Adds the largest magnitude of an array to an amax.
#[pyfunction]
pub(crate) fn gpu_amax(
    py: Python<'_>,
    values: &Bound<'_, PyAny>,
    amax: &Bound<'_, PyAny>,
    stream: usize,
) -> PyResult<()> {
    let (values, mut amax) = (on_stream(values, "x", stream)?, on_stream(amax, "out", stream)?);
    let shape = values.rows(py)?;
    amax.require_output(py, Kind::F32, &[&values])?;
    let work = Work::with(py, &[&values, &amax], stream)?;
    with_type!(values, T => {
        let (from, to) = (view::<T>(&values), words_mut(&mut amax));
        work.enqueue(py, |gpu, stream| gpu.amax_on(stream, from, shape, to))
    })
}

/// Writes the scales of a quantized matrix in a layout.
#[pyfunction]
pub(crate) fn gpu_scales_in(
    py: Python<'_>,
    tensor: &Bound<'_, PyAny>,
    layout: &str,
    out: &Bound<'_, PyAny>,
    stream: usize,
) -> PyResult<()> {
    let layout: ScaleLayout = word(py, layout)?;
    let (tensor, mut out) = (operand(tensor, stream)?, on_stream(out, "out", stream)?);
    let tensor = &tensor.get().0;
    let arrays: Vec<_> = tensor.arrays().collect();
    out.require_output(py, Kind::Bytes, &arrays)?;
    let work = Work::with(py, &both(&arrays, &[&out]), stream)?;
    let from = tensor.device_view(py)?;
    let to = bytes_mut(&mut out);
    work.enqueue(py, |gpu, stream| gpu.convert_scales_on(stream, from, layout, to))
}

/// Multiplies quantized matrices with quantized vectors.
#[pyfunction]
pub(crate) fn gpu_gemv(
    py: Python<'_>,
    matrix: &Bound<'_, PyAny>,
    vectors: &Bound<'_, PyAny>,
    batch: usize,
    vector_stride: usize,
    out: &Bound<'_, PyAny>,
    stream: usize,
) -> PyResult<()> {
    let (matrix, vectors) = (operand(matrix, stream)?, operand(vectors, stream)?);
    let (matrix, vectors) = (&matrix.get().0, &vectors.get().0);
    let mut out = on_stream(out, "out", stream)?;
    let arrays: Vec<_> = matrix.arrays().chain(vectors.arrays()).collect();
    out.require_output(py, out.kind(), &arrays)?;
    let work = Work::with(py, &both(&arrays, &[&out]), stream)?;
    let batch = Batch::of(batch).with_vector_stride(vector_stride);
    let (matrix, vectors) = (matrix.device_view(py)?, vectors.device_view(py)?);
    with_type!(out, T => {
        let to = view_mut::<T>(&mut out);
        work.enqueue(py, |gpu, stream| gpu.gemv_on(stream, matrix, vectors, batch, to))
    })
}

/// A dtype that workspaces are made for: f32, if activations are `wide`.
pub(crate) fn dtype_of(wide: bool) -> Dtype {
    if wide { Dtype::F32 } else { Dtype::Bf16 }
}

/// Bytes of the workspace that [`gpu_linear`] needs on a GPU for weights of a shape and activations
/// in 16 bits or, `wide`, in float32; 0 if it needs none.
#[pyfunction]
pub(crate) fn gpu_workspace_bytes(
    py: Python<'_>,
    weights: &Bound<'_, PyAny>,
    tokens: usize,
    wide: bool,
    stream: usize,
) -> PyResult<usize> {
    workspace_bytes(py, weights, stream, |gpu, shape| gpu.gemm_workspace_bytes(shape, tokens, dtype_of(wide)))
}

/// Bytes of the workspace that [`gpu_linear`] needs on a GPU for weights of a shape and activations
/// in `fp8`, or in their format: `fp4`, or `fp4_token` with a global scale per row. 0 if the GPU
/// has no kernel for FP8.
#[pyfunction]
pub(crate) fn gpu_rounded_workspace_bytes(
    py: Python<'_>,
    weights: &Bound<'_, PyAny>,
    tokens: usize,
    rounded: &str,
    stream: usize,
) -> PyResult<usize> {
    workspace_bytes(py, weights, stream, |gpu, shape| match rounded {
        "fp8" => gpu.fp8_workspace_bytes(shape, tokens),
        _ => gpu.fp4_workspace_bytes(shape, tokens, rounded == "fp4_token"),
    })
}

/// Bytes of a workspace on the GPU of the weights, for their shape.
fn workspace_bytes(
    py: Python<'_>,
    weights: &Bound<'_, PyAny>,
    stream: usize,
    of: impl FnOnce(&Gpu, QuantizedShape) -> microscale::Result<usize>,
) -> PyResult<usize> {
    let weights = operand(weights, stream)?;
    let weights = &weights.get().0;
    let work = Work::with(py, &weights.arrays().collect::<Vec<_>>(), stream)?;
    of(work.gpu, weights.shape).map_err(|why| of_tensors(py, why))
}

/// The number of the capture on a stream of GPU number `device`, or `None`.
#[pyfunction]
pub(crate) fn gpu_capture(py: Python<'_>, device: usize, stream: usize) -> PyResult<Option<u64>> {
    capture(device, stream).map_err(|why| of_tensors(py, why))
}

/// Bytes of a workspace of `bytes` bytes with room for `[rows, results]` results that are
/// quantized.
#[pyfunction]
pub(crate) fn gpu_bytes_with_results(bytes: usize, rows: usize, results: usize) -> usize {
    GemmWorkspace::bytes_with_results(bytes, rows, results)
}

/// Multiplies quantized weights with activations, and adds a bias before the only rounding. The
/// workspace begins with semaphores, which are zeros. Results are stored to `out`, or `quantized`:
/// a recipe, the dtype of results before that, a given scale as a number or an array, codes,
/// block scales and f32 scales.
#[pyfunction]
#[pyo3(signature = (weights, x, out, quantized, bias, workspace, activations, round_weights, gate, stream))]
#[expect(clippy::too_many_arguments, reason = "inputs and outputs of one call in Python")]
pub(crate) fn gpu_linear(
    py: Python<'_>,
    weights: &Bound<'_, PyAny>,
    x: &Bound<'_, PyAny>,
    out: Option<&Bound<'_, PyAny>>,
    quantized: Option<GivenResults<'_>>,
    bias: Option<&Bound<'_, PyAny>>,
    workspace: Option<&Bound<'_, PyAny>>,
    activations: Option<&str>,
    round_weights: bool,
    gate: Option<&str>,
    stream: usize,
) -> PyResult<()> {
    let rounding = Rounding::of(py, activations, round_weights)?;
    let fp8 = rounding.on_gpu(py)?;
    let weights = operand(weights, stream)?;
    let activations = Activations::by(x, |part, what| on_stream(part, what, stream))?;
    activations.require(py, rounding)?;
    let weights = &weights.get().0;
    let bias = bias.map(|bias| on_stream(bias, "bias", stream)).transpose()?;
    let mut out = Output::find(py, out, quantized, |part, what| on_stream(part, what, stream))?;
    let mut workspace = workspace.map(|space| on_stream(space, "workspace", stream)).transpose()?;
    let tokens = activations.rows(py, weights.shape.cols)?;
    let gate = gate_of(py, gate)?;
    let columns = results(py, weights.shape.rows, gate)?;
    let kind = activations.kind(out.kind());
    if let Some(bias) = &bias {
        require_bias(py, bias, kind, &[weights.shape.rows])?;
    }
    let arrays: Vec<_> = activations.arrays().into_iter().chain(weights.arrays()).chain(&bias).collect();
    let arrays: Vec<_> = arrays.into_iter().chain(out.inputs()).collect();
    out.check(py, [tokens, columns], kind, &arrays)?;
    let all: Vec<_> = arrays.iter().copied().chain(out.outputs()).collect();
    if let Some(workspace) = &workspace {
        workspace.require_output(py, Kind::Bytes, &all)?;
    }
    let all: Vec<_> = all.into_iter().chain(&workspace).collect();
    let work = Work::with(py, &all, stream)?;
    let from = weights.device_view(py)?;
    let space = match &mut workspace {
        // The plan refuses it if it needs a workspace.
        None => GemmWorkspaceMut::none(),
        Some(workspace) => {
            let bytes = workspace.span();
            // SAFETY: `bytes` bytes are there, which share no memory with the operands. The caller
            // promises zeros in the semaphores. The stream orders the products that use the
            // workspace.
            let space = unsafe { GemmWorkspaceMut::from_raw_parts(workspace.address(), bytes) };
            space.map_err(|why| of_tensors(py, why))?
        }
    };
    let (recipe, per_token) = (out.recipe(), activations.is_per_token());
    if let Some(x) = activations.on_gpu(py, round_weights)? {
        /// The product for a dtype of bias and one of results.
        macro_rules! multiply {
            ($T:ty, $O:ty) => {{
                let bias = bias.as_ref().map(view::<$T>);
                let steps = DeviceEpilogue { bias, gate, ..DeviceEpilogue::default() };
                let to: DeviceResults<'_, $O> = out.on_gpu();
                work.enqueue(py, |gpu, stream| match x {
                    DeviceInput::Fp4(x) => {
                        let linear = gpu.linear_fp4::<$T, $O>(from).epilogue(steps);
                        let linear = if per_token { linear.global_scale_per_token() } else { linear };
                        let fast = rounding == Rounding::Mxfp4Fast;
                        let linear = if fast { linear.fast_accumulation() } else { linear };
                        linear.quantize_results(recipe).plan(tokens)?.run(stream, x, space, to)
                    }
                    DeviceInput::Fp8 { codes, scales, options } => {
                        let linear = gpu.linear_fp8::<$T, $O>(from).epilogue(steps).options(options);
                        let x = Fp8Activations::Quantized { codes, scales };
                        linear.quantize_results(recipe).plan(tokens)?.run(stream, x, space, to)
                    }
                })
            }};
        }
        return match kind {
            Kind::F32 if bias.is_some() => Err(no_wide_bias(py)),
            Kind::F32 => multiply!(bf16, f32),
            Kind::F16 => multiply!(f16, f16),
            Kind::Bf16 => multiply!(bf16, bf16),
            Kind::Bytes | Kind::Indices | Kind::Longs => Err(out.first().no_values()),
        };
    }
    /// The product for a dtype.
    macro_rules! multiply {
        ($T:ty) => {{
            let Activations::Values(x) = &activations else { unreachable!("returned above") };
            let x = view::<$T>(x);
            let bias = bias.as_ref().map(view::<$T>);
            let steps = DeviceEpilogue { bias, gate, ..DeviceEpilogue::default() };
            let to: DeviceResults<'_, $T> = out.on_gpu();
            work.enqueue(py, |gpu, stream| match fp8 {
                None => {
                    let linear = gpu.linear(from).epilogue(steps).quantize_results(recipe);
                    linear.plan(tokens)?.run(stream, x, space, to)
                }
                Some(options) => {
                    let linear = gpu.linear_fp8(from).epilogue(steps).options(options);
                    let plan = linear.quantize_results(recipe).plan(tokens)?;
                    plan.run(stream, Fp8Activations::Values(x), space, to)
                }
            })
        }};
    }
    match kind {
        Kind::F32 => multiply!(f32),
        Kind::F16 => multiply!(f16),
        Kind::Bf16 => multiply!(bf16),
        Kind::Bytes | Kind::Indices | Kind::Longs => Err(activations.no_values(out.first())),
    }
}

/// The error for a bias in float32 of quantized operands, which kernels do not read.
pub(crate) fn no_wide_bias(py: Python<'_>) -> PyErr {
    error(py, "GPUs add a bias to products of quantized activations in 16 bits; choose a dtype of 16 bits")
}
