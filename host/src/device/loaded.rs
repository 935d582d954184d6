//! A matrix that a device can access, for several operations on the same values.

use std::fmt;
use std::ops::ControlFlow;

#[cfg(feature = "cuda")]
use crate::gpu::{Gpu, LoadedOnGpu, QuantizedOnGpu};
#[cfg(feature = "cuda")]
use crate::origin::Origin;
use crate::tensor::Part;
use crate::{
    Amax, Element, ErrorStats, GlobalScale, GptqFactor, GptqScales, OutputLoss, QuantizeOptions, Quantized,
    QuantizedTensor, Recipe, Report, Result, Shape, cpu,
};

/// A matrix that a device can access: in host memory, or copied to a GPU once.
///
/// [`crate::Device::load`] makes it.
pub struct Loaded<'a, T: Element>(LoadedOn<'a, T>);

enum LoadedOn<'a, T: Element> {
    Cpu(&'a [T], Shape),
    #[cfg(feature = "cuda")]
    Gpu(Box<LoadedOnGpu<'a, T>>),
}

/// Shows shape, dtype and device, but not the values.
impl<T: Element> fmt::Debug for Loaded<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            LoadedOn::Cpu(_, shape) => {
                let mut loaded = f.debug_struct("LoadedOnCpu");
                loaded.field("shape", shape).field("dtype", &T::DTYPE).finish_non_exhaustive()
            }
            #[cfg(feature = "cuda")]
            LoadedOn::Gpu(loaded) => loaded.fmt(f),
        }
    }
}

/// A quantized matrix in the device's memory. [`Loaded::quantize`] makes it.
#[derive(Debug)]
pub struct QuantizedOnDevice(QuantizedOn);

#[derive(Debug)]
enum QuantizedOn {
    Cpu(Quantized),
    #[cfg(feature = "cuda")]
    Gpu(Box<QuantizedOnGpu>),
}

impl<'a, T: Element> Loaded<'a, T> {
    /// Wraps host memory that was checked to hold the shape.
    pub(super) fn on_cpu(values: &'a [T], shape: Shape) -> Self {
        Self(LoadedOn::Cpu(values, shape))
    }

    /// Copies host memory to a GPU.
    #[cfg(feature = "cuda")]
    pub(super) fn on_gpu(
        gpu: &'a Gpu,
        values: &[T],
        shape: Shape,
        origin: Option<Origin<'_>>,
    ) -> Result<Self> {
        Ok(Self(LoadedOn::Gpu(Box::new(LoadedOnGpu::new(gpu, values, shape, origin)?))))
    }
}

impl<T: Element> Loaded<'_, T> {
    /// Returns the largest magnitude.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn amax(&self) -> Result<Amax> {
        match &self.0 {
            LoadedOn::Cpu(values, shape) => cpu::amax(values, *shape),
            #[cfg(feature = "cuda")]
            LoadedOn::Gpu(loaded) => loaded.amax(),
        }
    }

    /// Quantizes the matrix.
    ///
    /// # Errors
    /// The errors of [`cpu::quantize_with`], and [`crate::Error::Gpu`].
    pub fn quantize(&self, recipe: &Recipe, options: QuantizeOptions<'_>) -> Result<QuantizedOnDevice> {
        Ok(QuantizedOnDevice(match &self.0 {
            LoadedOn::Cpu(values, shape) => {
                QuantizedOn::Cpu(cpu::quantize_with(values, *shape, recipe, options)?)
            }
            #[cfg(feature = "cuda")]
            LoadedOn::Gpu(loaded) => QuantizedOn::Gpu(Box::new(loaded.quantize(recipe, options)?)),
        }))
    }

    /// Quantizes the matrix by GPTQ, and returns the error in the layer's outputs, as
    /// in [`GptqQuantized::output_error`](crate::GptqQuantized::output_error).
    ///
    /// # Errors
    /// The errors of [`cpu::quantize_gptq`], [`crate::GptqFault::GpuMemory`], and
    /// [`crate::Error::Gpu`].
    pub fn quantize_gptq(
        &self,
        recipe: &Recipe,
        factor: &GptqFactor,
        scales: GptqScales,
    ) -> Result<(QuantizedOnDevice, f64)> {
        match &self.0 {
            LoadedOn::Cpu(values, shape) => {
                let quantized = cpu::quantize_gptq(values, *shape, recipe, factor, scales)?;
                let error = quantized.output_error;
                Ok((QuantizedOnDevice(QuantizedOn::Cpu(quantized.into())), error))
            }
            #[cfg(feature = "cuda")]
            LoadedOn::Gpu(loaded) => {
                let (quantized, error) = loaded.quantize_gptq(recipe, factor, scales)?;
                Ok((QuantizedOnDevice(QuantizedOn::Gpu(Box::new(quantized))), error))
            }
        }
    }

    /// Returns the error of a result of [`Self::quantize`] or [`Self::quantize_gptq`] in the
    /// outputs of its layer.
    ///
    /// # Errors
    /// The errors of [`GptqFactor::output_loss`], [`crate::GptqFault::GpuMemory`], and
    /// [`crate::Error::Gpu`].
    pub fn output_loss(&self, quantized: &QuantizedOnDevice, factor: &GptqFactor) -> Result<OutputLoss> {
        match (&self.0, &quantized.0) {
            (LoadedOn::Cpu(values, shape), QuantizedOn::Cpu(quantized)) => {
                factor.output_loss(values, *shape, &quantized.tensor)
            }
            #[cfg(feature = "cuda")]
            (LoadedOn::Gpu(loaded), QuantizedOn::Gpu(quantized)) => {
                loaded.output_loss(&quantized.tensor, factor)
            }
            #[cfg(feature = "cuda")]
            _ => unreachable!("what a matrix is quantized to is where the matrix is"),
        }
    }

    /// Returns the partial sums of the loss of a result of [`Self::quantize`].
    ///
    /// [`ErrorStats::and_parts`] adds them to the loss of the preceding rows.
    ///
    /// # Errors
    /// The errors of [`ErrorStats::of_quantized`], and [`crate::Error::Gpu`].
    pub fn errors(&self, quantized: &QuantizedOnDevice) -> Result<Vec<ErrorStats>> {
        match (&self.0, &quantized.0) {
            (LoadedOn::Cpu(values, shape), QuantizedOn::Cpu(quantized)) => {
                ErrorStats::parts_of_quantized(values, *shape, &quantized.tensor)
            }
            #[cfg(feature = "cuda")]
            (LoadedOn::Gpu(loaded), QuantizedOn::Gpu(quantized)) => {
                Ok(vec![loaded.errors(&quantized.tensor)?])
            }
            #[cfg(feature = "cuda")]
            _ => unreachable!("what a matrix is quantized to is where the matrix is"),
        }
    }
}

impl QuantizedOnDevice {
    /// Returns the counts of lossy events.
    pub fn report(&self) -> Report {
        match &self.0 {
            QuantizedOn::Cpu(quantized) => quantized.report,
            #[cfg(feature = "cuda")]
            QuantizedOn::Gpu(quantized) => quantized.report,
        }
    }

    /// Returns the global scale.
    pub fn global_scale(&self) -> Option<GlobalScale> {
        match &self.0 {
            QuantizedOn::Cpu(quantized) => quantized.tensor.global_scale(),
            #[cfg(feature = "cuda")]
            QuantizedOn::Gpu(quantized) => quantized.global_scale,
        }
    }

    /// Replaces the global scale of the same blocks.
    ///
    /// # Errors
    /// The errors of [`QuantizedTensor::with_global_scale`], and [`crate::Error::Gpu`].
    pub fn with_global_scale(self, given: GlobalScale) -> Result<Self> {
        Ok(Self(match self.0 {
            QuantizedOn::Cpu(Quantized { tensor, report }) => {
                QuantizedOn::Cpu(Quantized { tensor: tensor.with_global_scale(given)?, report })
            }
            #[cfg(feature = "cuda")]
            QuantizedOn::Gpu(mut quantized) => {
                quantized.set_global_scale(given)?;
                QuantizedOn::Gpu(quantized)
            }
        }))
    }

    /// Copies the tensor to host memory.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn into_host(self) -> Result<QuantizedTensor> {
        match self.0 {
            QuantizedOn::Cpu(quantized) => Ok(quantized.tensor),
            #[cfg(feature = "cuda")]
            QuantizedOn::Gpu(quantized) => quantized.to_host(),
        }
    }

    /// Returns whether the tensor is in the memory of a device.
    pub fn is_on_gpu(&self) -> bool {
        !matches!(self.0, QuantizedOn::Cpu(_))
    }

    /// Passes a part to `hand_on` piece by piece, until it breaks.
    ///
    /// A GPU's pieces are in pinned memory and are never copied elsewhere.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn each_piece(&self, part: Part, hand_on: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> Result<()> {
        match &self.0 {
            QuantizedOn::Cpu(quantized) => {
                let whole = match part {
                    Part::Codes => quantized.tensor.codes(),
                    Part::Scales => quantized.tensor.scales(),
                };
                let _ = hand_on(whole);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            QuantizedOn::Gpu(quantized) => quantized.each_piece(part, hand_on),
        }
    }
}
