//! Activations of a product: an array of values, or quantized ones.

use std::borrow::Cow;

#[cfg(feature = "cuda")]
use microscale::gpu::{DeviceView, Fp4Activations};
use microscale::{
    Activation, ExpertRows, Fp4Rows, Fp8Options, Fp8Rows, QuantizedView, Result, gemm_experts,
    gemm_experts_fp4, gemm_experts_fp8, gemm_experts_int8, gemm_fp4, gemm_weights, gemm_weights_fp8,
    gemm_weights_int8,
};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::array::{Array, Kind};
use crate::errors::error;
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::operand::Operand;
use crate::rounding::Rounding;

/// Columns of a group, which share a scale.
const GROUP: usize = microscale::formats::activations::GROUP;

/// Activations of a product.
pub(crate) enum Activations {
    /// Float32, float16 or bfloat16.
    Values(Array),
    /// A `Quantized`, its shape, and global scales by row, if there are such.
    Quantized(Box<Operand>, Vec<usize>, Option<Array>),
    /// A `QuantizedActivations` in FP8.
    Fp8(Fp8),
}

/// E4M3 codes `[..., K]`, and the float32 scales that multiply them: `[..., 1]`, or per 128 columns
/// `[..., K / 128]`, rounded up.
pub(crate) struct Fp8 {
    codes: Array,
    scales: Array,
    per_group: bool,
}

/// The activations of a product on a CPU.
pub(crate) struct Input<'a, T: Activation> {
    /// Of quantized activations there are none.
    values: Cow<'a, [T]>,
    rounding: Rounding,
    quantized: Option<QuantizedInput<'a>>,
}

#[derive(Clone, Copy)]
enum QuantizedInput<'a> {
    Fp4(Fp4Rows<'a>),
    Fp8 { codes: &'a [u8], scales: &'a [f32], options: Fp8Options },
}

impl<'a, T: Activation> Input<'a, T> {
    /// Multiplies weights with them.
    pub(crate) fn multiply(&self, weights: QuantizedView<'_>, tokens: usize, out: &mut [T]) -> Result<()> {
        let values = &self.values[..];
        match (self.quantized, self.rounding) {
            (Some(QuantizedInput::Fp4(x)), _) => gemm_fp4(x, weights, out),
            (Some(QuantizedInput::Fp8 { codes, scales, options }), _) => {
                gemm_weights_fp8(weights, Fp8Rows::Quantized { codes, scales }, tokens, options, out)
            }
            (None, Rounding::Fp8(options)) => {
                gemm_weights_fp8(weights, Fp8Rows::Values(values), tokens, options, out)
            }
            (None, Rounding::Int8) => gemm_weights_int8(weights, values, tokens, out),
            (None, Rounding::Exact | Rounding::Mxfp4Fast) => gemm_weights(weights, values, tokens, out),
        }
    }

    /// Multiplies the weights of the experts that are chosen with them.
    pub(crate) fn multiply_experts(
        &self,
        experts: Vec<QuantizedView<'_>>,
        chosen: &[u32],
        top_k: usize,
        rows: ExpertRows,
        out: &mut [T],
    ) -> Result<()> {
        let values = &self.values[..];
        match (self.quantized, self.rounding) {
            (Some(QuantizedInput::Fp4(x)), _) => gemm_experts_fp4(experts, x, chosen, top_k, rows, out),
            (Some(QuantizedInput::Fp8 { codes, scales, options }), _) => {
                let x = Fp8Rows::Quantized { codes, scales };
                gemm_experts_fp8(experts, x, chosen, top_k, rows, options, out)
            }
            (None, Rounding::Fp8(options)) => {
                gemm_experts_fp8(experts, Fp8Rows::Values(values), chosen, top_k, rows, options, out)
            }
            (None, Rounding::Int8) => gemm_experts_int8(experts, values, chosen, top_k, rows, out),
            (None, Rounding::Exact | Rounding::Mxfp4Fast) => {
                gemm_experts(experts, values, chosen, top_k, rows, out)
            }
        }
    }

    /// The same activations, for results in f32.
    pub(crate) fn widened(self) -> Input<'a, f32> {
        let Self { values, rounding, quantized } = self;
        Input { values: values.iter().map(|x| x.to_f32()).collect(), rounding, quantized }
    }
}

/// Quantized activations in the memory of a GPU.
#[cfg(feature = "cuda")]
pub(crate) enum DeviceInput<'a> {
    Fp4(Fp4Activations<'a>),
    Fp8 { codes: DeviceView<'a, u8>, scales: DeviceView<'a, f32>, options: Fp8Options },
}

impl Activations {
    /// Takes them from the object, by a function that finds arrays.
    pub(crate) fn by(
        object: &Bound<'_, PyAny>,
        array_of: impl Fn(&Bound<'_, PyAny>, &'static str) -> PyResult<Array>,
    ) -> PyResult<Self> {
        let py = object.py();
        if object.is_instance_of::<PyTuple>() && object.hasattr(intern!(py, "token_scales"))? {
            let rows = object.getattr(intern!(py, "rows"))?;
            let shape = rows.getattr(intern!(py, "shape"))?.extract()?;
            let scales = array_of(&object.getattr(intern!(py, "token_scales"))?, "token_scales")?;
            scales.require(py, Kind::F32)?;
            let operand = Operand::by(&rows, array_of)?;
            let (found, expected) = (scales.span(), operand.shape.rows);
            if found != expected {
                return Err(error(
                    py,
                    format!("token_scales have {found} elements and must have {expected}"),
                ));
            }
            return Ok(Self::Quantized(operand.into(), shape, Some(scales)));
        }
        if object.is_instance_of::<PyTuple>() {
            let codes = array_of(&object.getattr(intern!(py, "codes"))?, "codes")?;
            let scales = array_of(&object.getattr(intern!(py, "f32_scales"))?, "f32_scales")?;
            return Fp8::of(py, codes, scales).map(Self::Fp8);
        }
        if !object.hasattr(intern!(py, "_global"))? {
            return Ok(Self::Values(array_of(object, "activations")?));
        }
        let shape = object.getattr(intern!(py, "shape"))?.extract()?;
        Ok(Self::Quantized(Operand::by(object, array_of)?.into(), shape, None))
    }

    /// The shape.
    pub(crate) fn dims(&self) -> &[usize] {
        match self {
            Self::Values(values) => values.dims(),
            Self::Quantized(_, shape, _) => shape,
            Self::Fp8(Fp8 { codes, .. }) => codes.dims(),
        }
    }

    /// The rows, which have `cols` columns and no gaps.
    pub(crate) fn rows(&self, py: Python<'_>, cols: usize) -> PyResult<usize> {
        match self {
            Self::Values(values) | Self::Fp8(Fp8 { codes: values, .. }) => activation_rows(py, values, cols),
            // The product checks the columns.
            Self::Quantized(operand, ..) => Ok(operand.shape.rows),
        }
    }

    /// The kind of the results, which values and results share.
    pub(crate) fn kind(&self, out: Kind) -> Kind {
        match self {
            Self::Values(values) => values.kind(),
            Self::Quantized(..) | Self::Fp8(_) => out,
        }
    }

    /// The activations of a product on a CPU.
    pub(crate) fn input<T: Activation>(
        &self,
        py: Python<'_>,
        rounding: Rounding,
        round_weights: bool,
    ) -> PyResult<Input<'_, T>> {
        let (values, quantized) = match self {
            Self::Values(values) => (values.values::<T>(), None),
            Self::Quantized(operand, _, scales) => {
                let rows = Fp4Rows::from(operand.view(py)?);
                let scales = scales.as_ref().map(Array::values::<f32>);
                let rows = scales.map_or(rows, |scales| rows.token_scales(scales));
                (&[][..], Some(QuantizedInput::Fp4(rows)))
            }
            Self::Fp8(Fp8 { codes, scales, per_group }) => {
                let options = Fp8Options { per_group: *per_group, round_weights, ..Fp8Options::default() };
                let (codes, scales) = (codes.bytes(py)?, scales.values::<f32>());
                (&[][..], Some(QuantizedInput::Fp8 { codes, scales, options }))
            }
        };
        Ok(Input { values: values.into(), rounding, quantized })
    }

    /// Quantized activations in the memory of a GPU. `None` for values.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_gpu(&self, py: Python<'_>, round_weights: bool) -> PyResult<Option<DeviceInput<'_>>> {
        Ok(match self {
            Self::Values(_) => None,
            Self::Quantized(operand, _, scales) => {
                let rows = Fp4Activations::from(operand.device_view(py)?);
                let scales = scales.as_ref().map(gpu::view::<f32>);
                Some(DeviceInput::Fp4(scales.map_or(rows, |scales| rows.token_scales(scales))))
            }
            Self::Fp8(Fp8 { codes, scales, per_group }) => Some(DeviceInput::Fp8 {
                codes: gpu::bytes(py, codes)?,
                scales: gpu::view::<f32>(scales),
                options: Fp8Options { per_group: *per_group, round_weights, ..Fp8Options::default() },
            }),
        })
    }

    /// Whether rows have a global scale each.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_per_token(&self) -> bool {
        matches!(self, Self::Quantized(_, _, Some(_)))
    }

    /// The error for results, or activations, that are not numbers.
    pub(crate) fn no_values(&self, out: &Array) -> PyErr {
        match self {
            Self::Values(values) => values.no_values(),
            Self::Quantized(..) | Self::Fp8(_) => out.no_values(),
        }
    }

    /// Codes, scales and global scale, or the values.
    pub(crate) fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Values(values) => vec![values],
            Self::Quantized(operand, _, scales) => operand.arrays().chain(scales).collect(),
            Self::Fp8(Fp8 { codes, scales, .. }) => vec![codes, scales],
        }
    }

    /// Raises an error if quantized activations would be rounded, or values would have to be in
    /// MXFP4.
    pub(crate) fn require(&self, py: Python<'_>, rounding: Rounding) -> PyResult<()> {
        match (self, rounding) {
            (Self::Values(_), Rounding::Mxfp4Fast) => {
                Err(error(py, "activations are not in MXFP4; quantize them, or call microscale.linear"))
            }
            (Self::Values(_), _) | (_, Rounding::Exact) | (Self::Quantized(..), Rounding::Mxfp4Fast) => {
                Ok(())
            }
            (Self::Quantized(..) | Self::Fp8(_), _) => {
                Err(error(py, "quantized activations are not rounded; leave activations out"))
            }
        }
    }
}

impl Fp8 {
    /// Codes and scales. The number of scales per row tells whether groups have one each.
    fn of(py: Python<'_>, codes: Array, scales: Array) -> PyResult<Self> {
        codes.require(py, Kind::Bytes)?;
        scales.require(py, Kind::F32)?;
        let (of_codes, of_scales) = (codes.dims(), scales.dims());
        let Some((cols, leading)) = of_codes.split_last() else {
            return Err(error(py, "codes have no dimensions; they must have one or more"));
        };
        let groups = cols.div_ceil(GROUP);
        let per_row = match of_scales.split_last() {
            Some((per_row, rows)) if rows == leading && (*per_row == 1 || *per_row == groups) => *per_row,
            _ => {
                return Err(error(
                    py,
                    format!(
                        "f32_scales have shape {of_scales:?} and codes {of_codes:?}; pass a scale per row, {leading:?} and 1, or \
                         {groups} per row, one for 128 columns each"
                    ),
                ));
            }
        };
        Ok(Self { per_group: per_row > 1, codes, scales })
    }
}

/// The rows of activations with `cols` columns, without gaps.
fn activation_rows(py: Python<'_>, activations: &Array, cols: usize) -> PyResult<usize> {
    let shape = activations.rows(py)?;
    if shape.cols != cols {
        let found = shape.cols;
        return Err(error(
            py,
            format!("activations have {found} columns and the weights {cols}; they must have as many"),
        ));
    }
    if shape.row_stride != shape.cols {
        return Err(error(py, "activations must be contiguous; pass a contiguous copy of them"));
    }
    Ok(shape.rows)
}
