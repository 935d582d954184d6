//! Quantized matrices in arrays: Python's `microscale.Quantized`.

use microscale::formats::nvfp4::Direction;
use microscale::{Format, GlobalScale, QuantizedShape, QuantizedView, ScaleLayout};
use pyo3::intern;
use pyo3::prelude::*;

use crate::array::Array;
use crate::errors::of_tensors;
use crate::interface::array_of;
use crate::recipe::word;

/// The parts of a `Quantized`.
pub(crate) struct Operand {
    pub(crate) codes: Array,
    pub(crate) scales: Array,
    pub(crate) shape: QuantizedShape,
    global_scale: Option<GlobalScale>,
}

impl Operand {
    /// Takes them from the object.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let format: Format = word(py, object.getattr(intern!(py, "format"))?.extract()?)?;
        let scale_layout: ScaleLayout = word(py, object.getattr(intern!(py, "layout"))?.extract()?)?;
        let (rows, cols) = (
            object.getattr(intern!(py, "rows"))?.extract()?,
            object.getattr(intern!(py, "cols"))?.extract()?,
        );
        let number: Option<f32> = object.getattr(intern!(py, "global_scale"))?.extract()?;
        let global_scale = match number {
            None => None,
            Some(number) => {
                let direction: Direction = word(py, object.getattr(intern!(py, "direction"))?.extract()?)?;
                Some(GlobalScale::of(direction, number))
            }
        };
        let shape = QuantizedShape::new(format, rows, cols).with_scale_layout(scale_layout);
        let codes = array_of(&object.getattr(intern!(py, "codes"))?, "codes")?;
        let scales = array_of(&object.getattr(intern!(py, "scales"))?, "scales")?;
        Ok(Self { codes, scales, shape, global_scale })
    }

    /// The matrix where it lies. Codes and scales are found to have their bytes.
    pub(crate) fn view(&self, py: Python<'_>) -> PyResult<QuantizedView<'_>> {
        let of_tensors = |error| of_tensors(py, error);
        let (codes, scales) = (self.codes.bytes(py)?, self.scales.bytes(py)?);
        let view = QuantizedView::from_parts(self.shape, codes, scales).map_err(of_tensors)?;
        match self.global_scale {
            None => Ok(view),
            Some(global_scale) => view.with_global_scale(global_scale).map_err(of_tensors),
        }
    }
}
