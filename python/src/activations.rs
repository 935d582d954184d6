//! Quantizing activations: Python's `quantize_activations`.

#[cfg(feature = "cuda")]
use half::{bf16, f16};
use microscale::formats::activations::RmsNorm;
use microscale::formats::nvfp4::Direction;
use microscale::formats::{Gate, ScaleRule};
use microscale::{
    ActivationExperts, ActivationFormat, ActivationInput, ActivationLayout, ActivationScale, Element,
    Fp8Scale, Glu, GluOrder, QuantizedActivations, RowOperation,
};
use pyo3::prelude::*;

use crate::array::{Array, Kind, with_type};
use crate::errors::{error, of_tensors};
use crate::interface::array_of;
use crate::recipe::optional;
use crate::workers::work;

/// The words of each choice.
pub(crate) const FORMATS: [&str; 4] = ["fp8", "mxfp8", "mxfp4", "nvfp4"];
pub(crate) const OPERATIONS: [&str; 6] =
    ["none", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "swiglu_oai", "rms_norm"];
pub(crate) const NORMS: [&str; 3] = ["llama", "gemma", "flashinfer"];
pub(crate) const LAYOUTS: [&str; 3] = ["linear", "128x4", "8x4"];

/// How activations are quantized, made of words.
#[pyclass(frozen, module = "microscale._microscale")]
pub(crate) struct ActivationRecipe(microscale::ActivationRecipe);

/// The error for an unknown word of a parameter.
fn unknown(py: Python<'_>, what: &str, found: &str, words: &[&str]) -> PyErr {
    error(py, format!("{what} is {found:?}; pass one of {}", words.join(", ")))
}

#[pymethods]
impl ActivationRecipe {
    /// `scale` is `token`, `group128` or `given` for FP8, and `token`, `divisor` or `multiplier`
    /// for NVFP4.
    #[new]
    #[pyo3(signature = (format, operation, norm, eps, scale, scale_rule, power_of_two, layout))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords of one call in Python")]
    fn new(
        py: Python<'_>,
        format: &str,
        operation: &str,
        norm: &str,
        eps: f64,
        scale: Option<&str>,
        scale_rule: Option<&str>,
        power_of_two: bool,
        layout: &str,
    ) -> PyResult<Self> {
        let epsilon = eps as f32;
        if !(epsilon.is_normal() && epsilon > 0.0) {
            return Err(error(py, format!("eps is {eps}; pass a positive normal number of float32")));
        }
        let norm = match norm {
            "llama" => RmsNorm::llama(epsilon),
            "gemma" => RmsNorm::gemma(epsilon),
            "flashinfer" => RmsNorm::flashinfer(epsilon),
            found => return Err(unknown(py, "norm", found, &NORMS)),
        };
        let operation = match operation {
            "none" => RowOperation::None,
            "silu_and_mul" => RowOperation::Glu(Glu::SILU, GluOrder::Halves),
            "gelu_and_mul" => RowOperation::Glu(Glu::Gelu, GluOrder::Halves),
            "gelu_tanh_and_mul" => RowOperation::Glu(Glu::GeluTanh, GluOrder::Halves),
            "swiglu_oai" => RowOperation::Glu(Glu::Sigmoid(Gate::GPT_OSS), GluOrder::Interleaved),
            "rms_norm" => RowOperation::RmsNorm(norm),
            found => return Err(unknown(py, "operation", found, &OPERATIONS)),
        };
        let layout = match layout {
            "linear" => ActivationLayout::Linear,
            "128x4" => ActivationLayout::Swizzled128x4,
            "8x4" => ActivationLayout::Swizzled8x4,
            found => return Err(unknown(py, "layout", found, &LAYOUTS)),
        };
        let rule = optional::<ScaleRule>(py, scale_rule)?;
        let microscaled = || rule.unwrap_or_default();
        let of_format = match (format, scale) {
            ("fp8", Some("given")) => ActivationFormat::Fp8(Fp8Scale::Given),
            ("fp8", None | Some("token")) => ActivationFormat::Fp8(Fp8Scale::PerToken),
            ("fp8", Some("tensor")) => ActivationFormat::Fp8(Fp8Scale::PerTensor),
            ("fp8", Some("group128")) => ActivationFormat::Fp8(Fp8Scale::PerGroup { power_of_two }),
            ("mxfp8", None) => ActivationFormat::Mxfp8(microscaled()),
            ("mxfp4", None) => ActivationFormat::Mxfp4(microscaled()),
            ("nvfp4", None | Some("token")) => ActivationFormat::Nvfp4(ActivationScale::PerToken),
            ("nvfp4", Some("divisor")) => ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Divisor)),
            ("nvfp4", Some("multiplier")) => {
                ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Multiplier))
            }
            (found, scale) if FORMATS.contains(&found) => {
                let choices = match found {
                    "fp8" => "a number, an array, \"token\", \"tensor\" or \"group128\"",
                    "nvfp4" => "a GlobalScale or \"token\"",
                    _ => "none, because its block scales are all that it has",
                };
                let scale = scale.unwrap_or("missing");
                return Err(error(py, format!("scale is {scale:?} and {found} takes {choices}")));
            }
            (found, _) => return Err(unknown(py, "format", found, &FORMATS)),
        };
        let is_mx = matches!(of_format, ActivationFormat::Mxfp8(_) | ActivationFormat::Mxfp4(_));
        if rule.is_some() && !is_mx {
            return Err(error(py, format!("{format} has no scale_rule to choose; leave it out")));
        }
        if power_of_two && !matches!(of_format, ActivationFormat::Fp8(Fp8Scale::PerGroup { .. })) {
            return Err(error(py, "power_of_two belongs to fp8 with scale=\"group128\"; leave it out"));
        }
        if layout != ActivationLayout::Linear && matches!(of_format, ActivationFormat::Fp8(_)) {
            return Err(error(py, "fp8 has no block scales to swizzle; pass layout=\"linear\""));
        }
        Ok(Self(microscale::ActivationRecipe { operation, format: of_format, layout }))
    }

    /// The sizes for an input of `cols` columns: columns of the output, bytes of a row's codes and
    /// block scales with padding, f32 scales of a row, and rows of a tile of scales.
    fn parts(&self, py: Python<'_>, cols: usize) -> PyResult<(usize, usize, usize, usize, usize)> {
        let columns = self.columns(py, cols)?;
        let tile = self.tile();
        let [codes, scales, f32_scales] = self.lengths(py, 1, tile, columns)?;
        Ok((columns, codes, scales / tile, f32_scales, tile))
    }
}

impl ActivationRecipe {
    /// Columns of the output.
    fn columns(&self, py: Python<'_>, cols: usize) -> PyResult<usize> {
        match self.0.operation {
            RowOperation::Glu(..) if !cols.is_multiple_of(2) => {
                Err(error(py, format!("x has {cols} columns and a gate combines pairs; pass 2 * K columns")))
            }
            RowOperation::Glu(..) => Ok(cols / 2),
            RowOperation::None | RowOperation::RmsNorm(_) => Ok(cols),
        }
    }

    /// Rows of a tile of scales; 1 without tiles.
    fn tile(&self) -> usize {
        match self.0.format {
            ActivationFormat::Fp8(_) => 1,
            _ => self.0.layout.tile_rows(),
        }
    }

    /// The recipe of the library.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_library(&self) -> microscale::ActivationRecipe {
        self.0
    }

    fn lengths(
        &self,
        py: Python<'_>,
        rows: usize,
        scale_rows: usize,
        columns: usize,
    ) -> PyResult<[usize; 3]> {
        let lengths = self.0.lengths(rows, scale_rows, columns);
        lengths.ok_or_else(|| error(py, "x is too large: its codes are more than memory can hold"))
    }
}

/// The rows of experts: `(offsets, scale_offsets, rows of scales)` or `(counts,)`.
#[derive(FromPyObject)]
pub(crate) enum GivenExperts<'py> {
    Sorted(Bound<'py, PyAny>, Bound<'py, PyAny>, usize),
    Masked((Bound<'py, PyAny>,)),
}

/// The arrays of a call, before they are checked.
struct Arrays {
    values: Array,
    residual: Option<Array>,
    weight: Option<Array>,
    scale: Option<Scale>,
    experts: Option<Experts>,
    codes: Array,
    scales: Option<Array>,
    f32_scales: Option<Array>,
}

/// A given scale.
pub(crate) enum Scale {
    Number(f32),
    Array(Array),
}

impl Scale {
    /// The array, if it is one.
    pub(crate) fn array(&self) -> Option<&Array> {
        match self {
            Self::Number(_) => None,
            Self::Array(array) => Some(array),
        }
    }
}

enum Experts {
    Sorted { offsets: Array, scale_offsets: Array, scale_rows: usize },
    Masked { counts: Array },
}

/// The objects of a call.
struct Objects<'a, 'py> {
    values: &'a Bound<'py, PyAny>,
    residual: Option<&'a Bound<'py, PyAny>>,
    weight: Option<&'a Bound<'py, PyAny>>,
    number: Option<f32>,
    scale: Option<&'a Bound<'py, PyAny>>,
    experts: Option<GivenExperts<'py>>,
    codes: &'a Bound<'py, PyAny>,
    scales: Option<&'a Bound<'py, PyAny>>,
    f32_scales: Option<&'a Bound<'py, PyAny>>,
}

impl Objects<'_, '_> {
    /// Finds the arrays, by a function.
    fn find(self, array_of: impl Fn(&Bound<'_, PyAny>, &'static str) -> PyResult<Array>) -> PyResult<Arrays> {
        let maybe =
            |object: Option<&Bound<'_, PyAny>>, what| object.map(|object| array_of(object, what)).transpose();
        Ok(Arrays {
            values: array_of(self.values, "x")?,
            residual: maybe(self.residual, "residual")?,
            weight: maybe(self.weight, "weight")?,
            scale: match self.number {
                Some(number) => Some(Scale::Number(number)),
                None => maybe(self.scale, "scale")?.map(Scale::Array),
            },
            experts: match self.experts {
                None => None,
                Some(GivenExperts::Masked((counts,))) => {
                    Some(Experts::Masked { counts: array_of(&counts, "counts")? })
                }
                Some(GivenExperts::Sorted(offsets, scale_offsets, scale_rows)) => Some(Experts::Sorted {
                    offsets: array_of(&offsets, "offsets")?,
                    scale_offsets: array_of(&scale_offsets, "scale_offsets")?,
                    scale_rows,
                }),
            },
            codes: array_of(self.codes, "codes")?,
            scales: maybe(self.scales, "scales")?,
            f32_scales: maybe(self.f32_scales, "f32_scales")?,
        })
    }
}

impl Arrays {
    /// Arrays that are only read.
    fn inputs(&self) -> Vec<&Array> {
        let scale = self.scale.as_ref().and_then(Scale::array);
        let lists = match &self.experts {
            None => [None, None],
            Some(Experts::Masked { counts }) => [Some(counts), None],
            Some(Experts::Sorted { offsets, scale_offsets, .. }) => [Some(offsets), Some(scale_offsets)],
        };
        [&self.values]
            .into_iter()
            .chain(&self.weight)
            .chain(scale)
            .chain(lists.into_iter().flatten())
            .collect()
    }

    /// The number of experts; 1 without any.
    fn expert_count(&self) -> usize {
        match &self.experts {
            None => 1,
            Some(Experts::Masked { counts }) => counts.span(),
            Some(Experts::Sorted { offsets, .. }) => offsets.span().saturating_sub(1),
        }
    }

    /// Checks shapes, dtypes and memory, and returns the shape of the values.
    fn check(&self, py: Python<'_>, recipe: &ActivationRecipe) -> PyResult<microscale::Shape> {
        let shape = self.values.rows(py)?;
        let kind = self.values.kind();
        if matches!(kind, Kind::Bytes | Kind::Indices | Kind::Longs) {
            return Err(self.values.no_values());
        }
        let columns = recipe.columns(py, shape.cols)?;
        let is_norm = matches!(recipe.0.operation, RowOperation::RmsNorm(_));
        for (what, array) in [("residual", &self.residual), ("weight", &self.weight)] {
            if array.is_some() && !is_norm {
                return Err(error(
                    py,
                    format!("{what} belongs to operation=\"rms_norm\"; choose that, or leave it out"),
                ));
            }
        }
        if let Some(weight) = &self.weight {
            weight.require(py, kind)?;
            require_shape(py, "weight", weight, &[columns])?;
        }
        if let Some(Scale::Array(scale)) = &self.scale {
            scale.require(py, Kind::F32)?;
            let (found, expected) = (scale.span(), self.expert_count());
            if found != expected {
                return Err(error(py, format!("scale has {found} elements and must have {expected}")));
            }
        }
        let scale_rows = match &self.experts {
            None => shape.rows,
            Some(Experts::Masked { counts }) => {
                counts.require(py, Kind::Indices)?;
                let experts = counts.span();
                let found = self.values.dims();
                let &[of_experts, rows, _] = found else {
                    return Err(error(
                        py,
                        format!("x has shape {found:?} and counts need [experts, rows, columns]"),
                    ));
                };
                if counts.dims().len() != 1 || of_experts != experts || experts == 0 {
                    let counts = counts.dims();
                    return Err(error(
                        py,
                        format!("counts have shape {counts:?} and must have [{of_experts}], at least [1]"),
                    ));
                }
                rows.checked_next_multiple_of(recipe.tile()).unwrap_or(usize::MAX).saturating_mul(experts)
            }
            Some(Experts::Sorted { offsets, scale_offsets, scale_rows }) => {
                offsets.require(py, Kind::Indices)?;
                scale_offsets.require(py, Kind::Indices)?;
                if offsets.dims().len() != 1 || offsets.span() < 2 {
                    let found = offsets.dims();
                    return Err(error(
                        py,
                        format!("offsets have shape {found:?}; pass [experts + 1], at least [2]"),
                    ));
                }
                require_shape(py, "scale_offsets", scale_offsets, offsets.dims())?;
                *scale_rows
            }
        };
        let lengths = recipe.lengths(py, shape.rows, scale_rows, columns)?;
        let mut others = self.inputs();
        if let Some(residual) = &self.residual {
            residual.require_output(py, kind, &others)?;
            require_shape(py, "residual", residual, self.values.dims())?;
            others.push(residual);
        }
        let outputs = [Some(&self.codes), self.scales.as_ref(), self.f32_scales.as_ref()];
        require_outputs(py, outputs, lengths, &others)?;
        Ok(shape)
    }
}

/// Checks the lengths and the memory of codes, block scales and f32 scales, which share none with
/// `others`.
pub(crate) fn require_outputs(
    py: Python<'_>,
    outputs: [Option<&Array>; 3],
    lengths: [usize; 3],
    others: &[&Array],
) -> PyResult<()> {
    let mut others = others.to_vec();
    let parts = [("codes", Kind::Bytes), ("scales", Kind::Bytes), ("f32_scales", Kind::F32)];
    for (((what, kind), output), expected) in parts.into_iter().zip(outputs).zip(lengths) {
        let found = output.map_or(0, Array::span);
        if found != expected {
            return Err(error(py, format!("{what} have {found} elements and must have {expected}")));
        }
        if let Some(output) = output {
            output.require_output(py, kind, &others)?;
            others.push(output);
        }
    }
    Ok(())
}

/// Makes sure that an array has a shape.
fn require_shape(py: Python<'_>, what: &str, array: &Array, shape: &[usize]) -> PyResult<()> {
    let found = array.dims();
    if found == shape {
        return Ok(());
    }
    Err(error(py, format!("{what} has shape {found:?} and must have {shape:?}; reshape it")))
}

/// Quantizes rows of activations to codes, block scales and f32 scales, as far as the recipe has
/// them. Residuals become the sums.
#[pyfunction]
#[pyo3(signature = (values, recipe, residual, weight, number, scale, experts, codes, scales, f32_scales))]
#[expect(clippy::too_many_arguments, reason = "inputs and outputs of one call in Python")]
pub(crate) fn quantize_activations<'py>(
    py: Python<'py>,
    values: &Bound<'py, PyAny>,
    recipe: &ActivationRecipe,
    residual: Option<&Bound<'py, PyAny>>,
    weight: Option<&Bound<'py, PyAny>>,
    number: Option<f32>,
    scale: Option<&Bound<'py, PyAny>>,
    experts: Option<GivenExperts<'py>>,
    codes: &Bound<'py, PyAny>,
    scales: Option<&Bound<'py, PyAny>>,
    f32_scales: Option<&Bound<'py, PyAny>>,
) -> PyResult<()> {
    let objects = Objects { values, residual, weight, number, scale, experts, codes, scales, f32_scales };
    let arrays = objects.find(array_of)?;
    let shape = arrays.check(py, recipe)?;
    with_type!(arrays.values, T => on_cpu::<T>(py, arrays, shape, &recipe.0))
}

/// [`quantize_activations`] for a dtype, after the checks.
fn on_cpu<T: Element>(
    py: Python<'_>,
    arrays: Arrays,
    shape: microscale::Shape,
    recipe: &microscale::ActivationRecipe,
) -> PyResult<()> {
    let experts = arrays.expert_count();
    let Arrays { values, mut residual, weight, scale, experts: lists, mut codes, scales, f32_scales } =
        arrays;
    let kind = values.kind();
    let residual = residual.as_mut().map(|residual| residual.output::<T>(py, kind, &[])).transpose()?;
    let numbers;
    let given = match &scale {
        None => &[][..],
        Some(Scale::Array(scale)) => scale.values::<f32>(),
        Some(Scale::Number(number)) => {
            numbers = vec![*number; experts];
            &numbers
        }
    };
    let experts = match &lists {
        None => None,
        Some(Experts::Masked { counts }) => Some(ActivationExperts::Masked { counts: counts.indices(py)? }),
        Some(Experts::Sorted { offsets, scale_offsets, scale_rows }) => {
            let scale_offsets = scale_offsets.indices(py)?;
            let end = scale_offsets.last().copied().unwrap_or(0);
            if end as usize > *scale_rows {
                return Err(error(
                    py,
                    format!(
                        "scale_offsets end at {end} and there are {scale_rows} rows of scales; pass scale_rows={end}"
                    ),
                ));
            }
            Some(ActivationExperts::Sorted { offsets: offsets.indices(py)?, scale_offsets })
        }
    };
    let weights = weight.as_ref().map(Array::values::<T>);
    let input =
        ActivationInput { values: values.values::<T>(), shape, residual, weights, scales: given, experts };
    let codes: &mut [u8] = codes.output(py, Kind::Bytes, &[])?;
    let (mut scales, mut f32_scales) = (scales, f32_scales);
    let scales: &mut [u8] = match &mut scales {
        None => &mut [],
        Some(scales) => scales.output(py, Kind::Bytes, &[])?,
    };
    let f32_scales: &mut [f32] = match &mut f32_scales {
        None => &mut [],
        Some(scales) => scales.output(py, Kind::F32, &[])?,
    };
    let done = work(py, || {
        let quantized = microscale::quantize_activations(input, recipe)?;
        let QuantizedActivations { codes: of_codes, scales: of_scales, f32_scales: of_f32 } = quantized;
        copy(&of_codes, codes);
        // Rows of scales after the last expert's.
        copy(&of_scales, scales);
        copy(&of_f32, f32_scales);
        Ok(())
    })?;
    done.map_err(|why| of_tensors(py, why))
}

/// Copies to the start of an output that is at least as long, and clears the rest.
fn copy<T: Copy + Default>(from: &[T], to: &mut [T]) {
    let (start, rest) = to.split_at_mut(from.len().min(to.len()));
    start.copy_from_slice(&from[..start.len()]);
    rest.fill(T::default());
}

#[cfg(feature = "cuda")]
pub(crate) use on_gpu::{device_output, device_scale, gpu_quantize_activations};

#[cfg(feature = "cuda")]
mod on_gpu {
    use microscale::gpu::{
        DeviceActivationExperts, DeviceActivations, DeviceQuantizedActivations, DeviceScales, DeviceView,
        DeviceViewMut,
    };

    use super::*;
    use crate::errors::type_error;
    use crate::gpu::{Work, bytes_mut, empty_mut, indices, view, view_mut};
    use crate::interface::array_anywhere;

    /// [`quantize_activations`](super::quantize_activations) on a GPU. Enqueues on the stream and
    /// returns.
    #[pyfunction]
    #[pyo3(signature = (values, recipe, residual, weight, number, scale, experts, codes, scales, f32_scales, stream))]
    #[expect(clippy::too_many_arguments, reason = "inputs and outputs of one call in Python")]
    pub(crate) fn gpu_quantize_activations<'py>(
        py: Python<'py>,
        values: &Bound<'py, PyAny>,
        recipe: &ActivationRecipe,
        residual: Option<&Bound<'py, PyAny>>,
        weight: Option<&Bound<'py, PyAny>>,
        number: Option<f32>,
        scale: Option<&Bound<'py, PyAny>>,
        experts: Option<GivenExperts<'py>>,
        codes: &Bound<'py, PyAny>,
        scales: Option<&Bound<'py, PyAny>>,
        f32_scales: Option<&Bound<'py, PyAny>>,
        stream: usize,
    ) -> PyResult<()> {
        let objects = Objects { values, residual, weight, number, scale, experts, codes, scales, f32_scales };
        let arrays = objects.find(|object, what| array_anywhere(object, what, Some(stream)))?;
        let shape = arrays.check(py, recipe)?;
        match arrays.values.kind() {
            Kind::F16 => enqueue::<f16>(py, arrays, shape, recipe, stream),
            Kind::Bf16 => enqueue::<bf16>(py, arrays, shape, recipe, stream),
            _ => Err(type_error(format!(
                "x is {} and GPUs quantize activations in float16 or bfloat16; cast it, or use the CPU",
                arrays.values.name()
            ))),
        }
    }

    /// Codes, block scales and f32 scales in the memory of a GPU. [`require_outputs`] comes first.
    pub(crate) fn device_output<'a>(
        codes: &'a mut Array,
        scales: Option<&'a mut Array>,
        f32_scales: Option<&'a mut Array>,
    ) -> DeviceQuantizedActivations<'a> {
        let address = codes.address();
        DeviceQuantizedActivations {
            codes: bytes_mut(codes),
            scales: scales.map_or_else(|| empty_mut(address), bytes_mut),
            f32_scales: match f32_scales {
                Some(scales) => view_mut::<f32>(scales),
                // SAFETY: the view has no elements.
                None => unsafe { DeviceViewMut::from_raw_parts(address, 0) },
            },
        }
    }

    /// A given scale for a GPU.
    pub(crate) fn device_scale(scale: Option<&Scale>) -> DeviceScales<'_> {
        match scale {
            None => DeviceScales::None,
            Some(Scale::Number(number)) => DeviceScales::Host(*number),
            Some(Scale::Array(scale)) => DeviceScales::Device(view::<f32>(scale)),
        }
    }

    /// [`gpu_quantize_activations`] for a dtype, after the checks.
    fn enqueue<T: Element>(
        py: Python<'_>,
        mut arrays: Arrays,
        shape: microscale::Shape,
        recipe: &ActivationRecipe,
        stream: usize,
    ) -> PyResult<()> {
        let all = arrays.inputs().into_iter().chain(&arrays.residual).chain([&arrays.codes]);
        let all: Vec<_> = all.chain(&arrays.scales).chain(&arrays.f32_scales).collect();
        let work = Work::with(py, &all, stream)?;
        let recipe = &recipe.0;
        let out = device_output(&mut arrays.codes, arrays.scales.as_mut(), arrays.f32_scales.as_mut());
        let input: DeviceActivations<'_, T> = DeviceActivations {
            values: view::<T>(&arrays.values),
            shape,
            residual: arrays.residual.as_mut().map(view_mut::<T>),
            weights: arrays.weight.as_ref().map(view::<T>),
            scales: device_scale(arrays.scale.as_ref()),
            experts: arrays.experts.as_ref().map(|experts| match experts {
                Experts::Masked { counts } => DeviceActivationExperts::Masked { counts: indices(counts) },
                Experts::Sorted { offsets, scale_offsets, scale_rows } => {
                    let (offsets, scale_offsets): (DeviceView<'_, u32>, _) =
                        (indices(offsets), indices(scale_offsets));
                    DeviceActivationExperts::Sorted { offsets, scale_offsets, scale_rows: *scale_rows }
                }
            }),
        };
        work.enqueue(py, |gpu, stream| gpu.quantize_activations_on(stream, input, recipe, out))
    }
}
