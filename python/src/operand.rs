//! Quantized matrices in arrays: Python's `microscale.Quantized`.

use microscale::formats::nvfp4::Direction;
#[cfg(feature = "cuda")]
use microscale::gpu::DeviceTensorView;
use microscale::{Format, GlobalScale, QuantizedShape, QuantizedView, ScaleLayout};
use pyo3::intern;
use pyo3::prelude::*;
#[cfg(feature = "cuda")]
use pyo3::types::PyString;
use pyo3::types::{PyFloat, PyFloatMethods, PyTuple};

use crate::array::Array;
#[cfg(feature = "cuda")]
use crate::array::Kind;
use crate::errors::{error, of_tensors};
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::interface::array_of;
#[cfg(feature = "cuda")]
use crate::interface::is_torch;
use crate::recipe::word;

/// The parts of a `Quantized`.
pub(crate) struct Operand {
    pub(crate) codes: Array,
    pub(crate) scales: Array,
    pub(crate) shape: QuantizedShape,
    global_scale: Option<(Direction, Global)>,
    /// The words of the object: format, layout, direction and shape.
    #[cfg(feature = "cuda")]
    words: [Py<PyAny>; 4],
}

/// What an object says about its arrays.
#[cfg(feature = "cuda")]
fn words_of<'py>(object: &Bound<'py, PyAny>) -> PyResult<[Bound<'py, PyAny>; 4]> {
    let py = object.py();
    Ok([
        object.getattr(intern!(py, "format"))?,
        object.getattr(intern!(py, "layout"))?,
        object.getattr(intern!(py, "direction"))?,
        object.getattr(intern!(py, "shape"))?,
    ])
}

/// A global scale.
enum Global {
    Number(f32),
    /// In the memory of a GPU: the first element.
    #[cfg(feature = "cuda")]
    There(Array),
}

impl Operand {
    /// Takes those in the memory of CPUs from the object.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::by(object, array_of)
    }

    /// Takes them from the object, by a function that finds arrays.
    pub(crate) fn by(
        object: &Bound<'_, PyAny>,
        array_of: impl Fn(&Bound<'_, PyAny>, &'static str) -> PyResult<Array>,
    ) -> PyResult<Self> {
        let py = object.py();
        let format: Format = word(py, object.getattr(intern!(py, "format"))?.extract()?)?;
        let scale_layout: ScaleLayout = word(py, object.getattr(intern!(py, "layout"))?.extract()?)?;
        let dims = object.getattr(intern!(py, "shape"))?.cast_into::<PyTuple>()?;
        let dims: Vec<usize> = dims.extract()?;
        let (cols, leading) =
            dims.split_last().ok_or_else(|| error(py, "a quantized array has one dimension or more"))?;
        let rows = leading.iter().product();
        let codes = array_of(&object.getattr(intern!(py, "codes"))?, "codes")?;
        let scales = array_of(&object.getattr(intern!(py, "scales"))?, "scales")?;
        let global = object.getattr(intern!(py, "_global"))?;
        let global_scale = if global.is_none() {
            None
        } else {
            let direction: Direction = word(py, object.getattr(intern!(py, "direction"))?.extract()?)?;
            let global = match global.cast_exact::<PyFloat>() {
                Ok(number) => Global::Number(number.value() as f32),
                #[cfg(feature = "cuda")]
                Err(_) => Global::There(array_of(&global, "global_scale")?),
                #[cfg(not(feature = "cuda"))]
                Err(_) => return Err(error(py, "a global scale is a number in a build without GPUs")),
            };
            Some((direction, global))
        };
        let shape = QuantizedShape::new(format, rows, *cols).with_scale_layout(scale_layout);
        Ok(Self {
            codes,
            scales,
            shape,
            global_scale,
            #[cfg(feature = "cuda")]
            words: words_of(object)?.map(Bound::unbind),
        })
    }

    /// Whether the object still has the same words, and the same tensors of PyTorch at the same
    /// addresses.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_still(&self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = object.py();
        if words_of(object)?.iter().zip(&self.words).any(|(now, then)| !now.is(then)) {
            return Ok(false);
        }
        let is_still = |name: &Bound<'_, PyString>, array: &Array| -> PyResult<bool> {
            let now = object.getattr(name)?;
            Ok(array.object().is_some_and(|then| now.is(then))
                && now.call_method0(intern!(py, "data_ptr"))?.extract::<u64>()? == array.address())
        };
        Ok(is_still(intern!(py, "codes"), &self.codes)?
            && is_still(intern!(py, "scales"), &self.scales)?
            && match &self.global_scale {
                None => object.getattr(intern!(py, "_global"))?.is_none(),
                Some((_, Global::There(global))) => is_still(intern!(py, "_global"), global)?,
                Some((_, Global::Number(_))) => false,
            })
    }

    /// Whether all arrays are tensors of PyTorch.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_of_torch(&self, py: Python<'_>) -> PyResult<bool> {
        for array in self.arrays() {
            match array.object() {
                Some(object) if is_torch(object.bind(py))? => (),
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// The matrix where it lies. Codes and scales are found to have their bytes.
    pub(crate) fn view(&self, py: Python<'_>) -> PyResult<QuantizedView<'_>> {
        let of_tensors = |error| of_tensors(py, error);
        let (codes, scales) = (self.codes.bytes(py)?, self.scales.bytes(py)?);
        let view = QuantizedView::from_parts(self.shape, codes, scales).map_err(of_tensors)?;
        match &self.global_scale {
            None => Ok(view),
            Some((direction, Global::Number(number))) => {
                view.with_global_scale(GlobalScale::of(*direction, *number)).map_err(of_tensors)
            }
            #[cfg(feature = "cuda")]
            Some((_, Global::There(_))) => {
                Err(error(py, "a global scale is a number where codes are in the CPU's memory"))
            }
        }
    }

    /// Codes, scales and the global scale, as far as they are in arrays.
    pub(crate) fn arrays(&self) -> impl Iterator<Item = &Array> {
        let global = match &self.global_scale {
            #[cfg(feature = "cuda")]
            Some((_, Global::There(global))) => Some(global),
            _ => None,
        };
        [&self.codes, &self.scales].into_iter().chain(global)
    }

    /// The matrix in the memory of a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_view(&self, py: Python<'_>) -> PyResult<DeviceTensorView<'_>> {
        let of_tensors = |error| of_tensors(py, error);
        let (codes, scales) = (gpu::bytes(py, &self.codes)?, gpu::bytes(py, &self.scales)?);
        let view = DeviceTensorView::from_parts(self.shape, codes, scales).map_err(of_tensors)?;
        match &self.global_scale {
            None => Ok(view),
            Some((direction, Global::There(global))) => {
                global.require(py, Kind::F32)?;
                view.with_global_scale(*direction, gpu::view::<f32>(global)).map_err(of_tensors)
            }
            Some((_, Global::Number(_))) => {
                Err(error(py, "a global scale is in the memory of a GPU where codes are there"))
            }
        }
    }
}
