//! The results of a product on a GPU: an array, or codes and scales.

use microscale::Element;
use microscale::gpu::{DeviceResults, QuantizedResults};
use pyo3::prelude::*;

use crate::activations::{ActivationRecipe, Scale, device_output, device_scale, require_outputs};
use crate::array::{Array, Kind};
use crate::errors::error;
use crate::gpu::view_mut;
use crate::tensors::require_elements;

/// Quantized results, as Python passes them: recipe, dtype of the results before, given scale as a
/// number and as an array, codes, block scales, f32 scales.
pub(crate) type GivenResults<'py> = (
    PyRef<'py, ActivationRecipe>,
    String,
    Option<f32>,
    Option<Bound<'py, PyAny>>,
    Bound<'py, PyAny>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
);

/// The results of a product.
pub(crate) enum Output {
    Values(Array),
    Quantized(Box<Quantized>),
}

/// Quantized results.
pub(crate) struct Quantized {
    recipe: microscale::ActivationRecipe,
    /// The kind of the results before.
    kind: Kind,
    scale: Option<Scale>,
    codes: Array,
    scales: Option<Array>,
    f32_scales: Option<Array>,
}

impl Output {
    /// Takes them from the objects, by a function that finds arrays.
    pub(crate) fn find(
        py: Python<'_>,
        values: Option<&Bound<'_, PyAny>>,
        quantized: Option<GivenResults<'_>>,
        array_of: impl Fn(&Bound<'_, PyAny>, &'static str) -> PyResult<Array>,
    ) -> PyResult<Self> {
        let (recipe, dtype, number, scale, codes, scales, f32_scales) = match (values, quantized) {
            (Some(values), None) => return array_of(values, "out").map(Self::Values),
            (None, Some(quantized)) => quantized,
            _ => return Err(error(py, "results are values or quantized; pass memory for one of them")),
        };
        let kind = match dtype.as_str() {
            "float32" => Kind::F32,
            "float16" => Kind::F16,
            _ => Kind::Bf16,
        };
        let maybe =
            |object: Option<Bound<'_, PyAny>>, what| object.map(|object| array_of(&object, what)).transpose();
        let scale = match number {
            Some(number) => Some(Scale::Number(number)),
            None => maybe(scale, "scale")?.map(Scale::Array),
        };
        Ok(Self::Quantized(Box::new(Quantized {
            recipe: recipe.of_library(),
            kind,
            scale,
            codes: array_of(&codes, "codes")?,
            scales: maybe(scales, "scales")?,
            f32_scales: maybe(f32_scales, "f32_scales")?,
        })))
    }

    /// The kind of the results, before they are quantized.
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::Values(values) => values.kind(),
            Self::Quantized(quantized) => quantized.kind,
        }
    }

    /// The recipe of quantized results.
    pub(crate) fn recipe(&self) -> Option<microscale::ActivationRecipe> {
        match self {
            Self::Values(_) => None,
            Self::Quantized(quantized) => Some(quantized.recipe),
        }
    }

    /// An array of the results.
    pub(crate) fn first(&self) -> &Array {
        match self {
            Self::Values(values) => values,
            Self::Quantized(quantized) => &quantized.codes,
        }
    }

    /// Arrays that are only read: a given scale.
    pub(crate) fn inputs(&self) -> Option<&Array> {
        match self {
            Self::Quantized(quantized) => quantized.scale.as_ref().and_then(Scale::array),
            Self::Values(_) => None,
        }
    }

    /// Arrays that are written.
    pub(crate) fn outputs(&self) -> Vec<&Array> {
        match self {
            Self::Values(values) => vec![values],
            Self::Quantized(quantized) => {
                let Quantized { codes, scales, f32_scales, .. } = &**quantized;
                [codes].into_iter().chain(scales).chain(f32_scales).collect()
            }
        }
    }

    /// Checks the arrays of `[rows, columns]` results of a kind, which share no memory with others.
    pub(crate) fn check(
        &self,
        py: Python<'_>,
        [rows, columns]: [usize; 2],
        kind: Kind,
        others: &[&Array],
    ) -> PyResult<()> {
        match self {
            Self::Values(values) => {
                require_elements(py, values, rows, columns)?;
                values.require_output(py, kind, others)
            }
            Self::Quantized(quantized) => {
                let Quantized { recipe, scale, codes, scales, f32_scales, .. } = &**quantized;
                if let Some(scale) = scale.as_ref().and_then(Scale::array) {
                    scale.require(py, Kind::F32)?;
                    if scale.span() != 1 {
                        return Err(error(
                            py,
                            format!("scale has {} elements and must have 1", scale.span()),
                        ));
                    }
                }
                let lengths = recipe.lengths(rows, rows, columns);
                let lengths = lengths.ok_or_else(|| error(py, "results are more than memory can hold"))?;
                require_outputs(py, [Some(codes), scales.as_ref(), f32_scales.as_ref()], lengths, others)
            }
        }
    }

    /// The results in the memory of a GPU. [`Self::check`] comes first.
    pub(crate) fn on_gpu<O: Element>(&mut self) -> DeviceResults<'_, O> {
        match self {
            Self::Values(values) => view_mut::<O>(values).into(),
            Self::Quantized(quantized) => {
                let Quantized { scale, codes, scales, f32_scales, .. } = &mut **quantized;
                let out = device_output(codes, scales.as_mut(), f32_scales.as_mut());
                QuantizedResults::new(out, device_scale(scale.as_ref())).into()
            }
        }
    }
}
