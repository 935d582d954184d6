//! A matrix where a device works on it, for several operations on the same values.

use std::path::Path;

use super::Device;
#[cfg(feature = "cuda")]
use crate::gpu::LoadedOnGpu;
use crate::{Amax, Element, ErrorStats, Quantized, QuantizedTensor, Recipe, Result, Shape, cpu};

/// Where values are in a file.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "the CPU reads the map"))]
pub(crate) struct Origin<'a> {
    pub(crate) file: &'a Path,
    /// In bytes.
    pub(crate) offset: u64,
}

/// A matrix that a device can work on: where it is in host memory, or copied to a GPU once.
pub(crate) enum Loaded<'a, T: Element> {
    Cpu(&'a [T], Shape),
    #[cfg(feature = "cuda")]
    Gpu(Box<LoadedOnGpu<'a, T>>),
}

impl Device {
    /// Brings a matrix to where the device works. If the values are a mapped file's, `_origin` says where they are in it, and a device with
    /// memory of its own has them read from there: in pieces, which costs less than having the system map their pages.
    ///
    /// # Errors
    /// Those of [`cpu::quantize`] about shapes, [`crate::Error::Gpu`], and that reading fails.
    pub(crate) fn load<'a, T: Element>(
        &'a self,
        values: &'a [T],
        shape: Shape,
        _origin: Option<Origin<'_>>,
    ) -> Result<Loaded<'a, T>> {
        shape.check("the input", values.len())?;
        match self {
            Self::Cpu => Ok(Loaded::Cpu(values, shape)),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => {
                let loaded = LoadedOnGpu::new(gpus.first(), values, shape, _origin)?;
                Ok(Loaded::Gpu(Box::new(loaded)))
            }
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
