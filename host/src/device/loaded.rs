//! A matrix where a device works on it, for several operations on the same values.

use super::Device;
#[cfg(feature = "cuda")]
use crate::gpu::LoadedOnGpu;
use crate::{Amax, Element, ErrorStats, Quantized, QuantizedTensor, Recipe, Result, Shape, cpu};

/// A matrix that a device can work on: where it is in host memory, or copied to a GPU once.
pub(crate) enum Loaded<'a, T: Element> {
    Cpu(&'a [T], Shape),
    #[cfg(feature = "cuda")]
    Gpu(LoadedOnGpu<'a, T>),
}

impl Device {
    /// Brings a matrix to where the device works.
    ///
    /// # Errors
    /// Those of [`cpu::quantize`] about shapes, and [`crate::Error::Gpu`].
    pub(crate) fn load<'a, T: Element>(&'a self, values: &'a [T], shape: Shape) -> Result<Loaded<'a, T>> {
        shape.check("the input", values.len())?;
        match self {
            Self::Cpu => Ok(Loaded::Cpu(values, shape)),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => Ok(Loaded::Gpu(LoadedOnGpu::new(gpus.first(), values, shape)?)),
        }
    }
}

impl<T: Element> Loaded<'_, T> {
    /// The largest magnitude.
    pub(crate) fn amax(&self) -> Result<Amax> {
        match self {
            Self::Cpu(values, shape) => cpu::amax(values, *shape),
            #[cfg(feature = "cuda")]
            Self::Gpu(loaded) => loaded.amax(),
        }
    }

    /// Quantizes, weighting errors by column in the search for scales.
    pub(crate) fn quantize(&self, recipe: &Recipe, importance: Option<&[f32]>) -> Result<Quantized> {
        match (self, importance) {
            (Self::Cpu(values, shape), None) => cpu::quantize(values, *shape, recipe),
            (Self::Cpu(values, shape), Some(importance)) => {
                cpu::quantize_weighted(values, *shape, recipe, importance)
            }
            #[cfg(feature = "cuda")]
            (Self::Gpu(loaded), _) => loaded.quantize(recipe, importance),
        }
    }

    /// What was lost to the tensor that [`Self::quantize`] has returned last, or to the same under another global scale.
    pub(crate) fn errors_of_last(&self, tensor: &QuantizedTensor) -> Result<ErrorStats> {
        match self {
            Self::Cpu(values, shape) => ErrorStats::of_quantized(values, *shape, tensor),
            #[cfg(feature = "cuda")]
            Self::Gpu(loaded) => loaded.errors_of_last(tensor),
        }
    }
}
