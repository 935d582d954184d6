//! A matrix that was copied to a GPU, for several operations.

use std::cell::RefCell;
use std::mem::offset_of;

use cudarc::driver::CudaSlice;
use microscale_kernels_abi::ErrorSums;

use super::tensor::{DeviceAmax, DeviceReport, DeviceTensor};
use super::{Gpu, doing, launch};
use crate::amax::Amax;
use crate::device::Origin;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::quality::ErrorStats;
use crate::recipe::{NonFinite, Recipe};
use crate::tensor::{Quantized, QuantizedShape, QuantizedTensor, Shape};

/// A matrix in device memory, and what it was quantized to.
pub(crate) struct LoadedOnGpu<'a, T: Element> {
    gpu: &'a Gpu,
    shape: Shape,
    /// `None` of an empty matrix.
    input: Option<CudaSlice<T>>,
    /// What it was quantized to last.
    quantized: RefCell<Option<DeviceTensor>>,
}

impl<'a, T: Element> LoadedOnGpu<'a, T> {
    /// Copies a matrix to the GPU, from the file that it is mapped from if that is known. The caller has checked that the values hold the
    /// shape.
    pub(crate) fn new(gpu: &'a Gpu, values: &[T], shape: Shape, origin: Option<Origin<'_>>) -> Result<Self> {
        let span = shape.span()?;
        if shape.is_empty() {
            return Ok(Self { gpu, shape, input: None, quantized: RefCell::default() });
        }
        // SAFETY: what is not set yet is written by the copy, which the stream does first.
        let mut input = unsafe { gpu.stream.alloc(span) }.map_err(doing("allocating the input"))?;
        gpu.with_staging(|staging| staging.copy_to_device(&gpu.stream, &values[..span], origin, &mut input))?;
        Ok(Self { gpu, shape, input: Some(input), quantized: RefCell::default() })
    }

    /// The largest magnitude.
    pub(crate) fn amax(&self) -> Result<Amax> {
        let mut amax = DeviceAmax::zeros(&self.gpu.stream)?;
        if let Some(input) = &self.input {
            self.gpu.amax_on(&self.gpu.stream, input, self.shape, &mut amax)?;
        }
        amax.read(&self.gpu.stream)
    }

    /// Quantizes, weighting errors by column in the search for scales.
    pub(crate) fn quantize(&self, recipe: &Recipe, importance: Option<&[f32]>) -> Result<Quantized> {
        let (gpu, shape, stream) = (self.gpu, self.shape, &self.gpu.stream);
        crate::recipe::check_importance(importance, shape)?;
        let mut tensor = DeviceTensor::zeros(stream, QuantizedShape::of(recipe, shape))?;
        let mut report = DeviceReport::zeros(stream)?;
        if let Some(input) = &self.input {
            let importance = importance.map(|weights| stream.clone_htod(weights)).transpose();
            let importance = importance.map_err(doing("copying weights to it"))?;
            gpu.quantize_weighted_on(
                stream,
                input,
                shape,
                recipe,
                importance.as_ref(),
                &mut tensor,
                &mut report,
            )?;
        }
        let report = report.read(stream, shape, recipe.format())?;
        match report.first_non_finite {
            Some(first) if recipe.non_finite == NonFinite::Error => Err(Error::NonFinite { first, report }),
            _ => {
                let host = gpu.with_staging(|staging| tensor.to_host_through(stream, staging))?;
                self.quantized.replace(Some(tensor));
                Ok(Quantized { tensor: host, report })
            }
        }
    }

    /// What was lost to a tensor.
    ///
    /// # Errors
    /// Those of [`ErrorStats::of_quantized`], and [`Error::Gpu`].
    pub(crate) fn errors(&self, tensor: &QuantizedTensor) -> Result<ErrorStats> {
        self.quantized.replace(Some(DeviceTensor::from_host(&self.gpu.stream, tensor)?));
        self.errors_of_last(tensor)
    }

    /// What was lost to the tensor that [`Self::quantize`] has returned last, or to the same under another global scale.
    pub(crate) fn errors_of_last(&self, tensor: &QuantizedTensor) -> Result<ErrorStats> {
        let (gpu, shape, stream) = (self.gpu, self.shape, &self.gpu.stream);
        tensor.shape().require(QuantizedShape { rows: shape.rows, cols: shape.cols, ..tensor.shape() })?;
        let Some(input) = &self.input else { return Ok(ErrorStats::default()) };
        let mut quantized = self.quantized.borrow_mut();
        let quantized = match &mut *quantized {
            Some(there) if there.shape() == tensor.shape() => there,
            other => other.insert(DeviceTensor::from_host(stream, tensor)?),
        };
        quantized.set_global_scale(stream, tensor.global_scale())?;
        // SAFETY: what is not set yet is written by the kernel, which the stream does first; likewise below.
        let back = unsafe { stream.alloc::<f32>(shape.rows * shape.cols) };
        let mut back = back.map_err(doing("allocating values"))?;
        gpu.dequantize_on(stream, quantized, &mut back, shape.cols)?;
        let (parts, words) = (launch::error_parts(shape), size_of::<ErrorSums>() / size_of::<u64>());
        // SAFETY: as above.
        let sums = unsafe { stream.alloc::<u64>(shape.rows * parts * words) };
        let mut sums = sums.map_err(doing("allocating sums"))?;
        launch::errors(&gpu.module, stream, input, shape, &back, &mut sums)?;
        let sums = stream.clone_dtoh(&sums).map_err(doing("copying sums back"))?;
        stream.synchronize().map_err(doing("copying sums back"))?;
        let sums = sums.as_chunks().0.iter().map(|words| sums_of(*words));
        let sums: Vec<_> = sums.collect();
        Ok(ErrorStats::of_parts(&sums, parts, (shape.rows * shape.cols) as u64))
    }
}

/// The sums that a kernel wrote, word by word.
fn sums_of([signal, noise, approximation, product, max_abs, non_finite]: [u64; 6]) -> ErrorSums {
    let [signal, noise, approximation, product, max_abs] =
        [signal, noise, approximation, product, max_abs].map(f64::from_bits);
    ErrorSums { signal, noise, approximation, product, max_abs, non_finite }
}

const _: () = {
    // `sums_of` takes them apart by position.
    assert!(size_of::<ErrorSums>() == 48);
    assert!(offset_of!(ErrorSums, signal) == 0);
    assert!(offset_of!(ErrorSums, noise) == 8);
    assert!(offset_of!(ErrorSums, approximation) == 16);
    assert!(offset_of!(ErrorSums, product) == 24);
    assert!(offset_of!(ErrorSums, max_abs) == 32);
    assert!(offset_of!(ErrorSums, non_finite) == 40);
};
