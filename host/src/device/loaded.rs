//! A matrix where a device works on it, for several operations on the same values.

use std::ops::ControlFlow;
use std::path::Path;

use super::Device;
#[cfg(feature = "cuda")]
use crate::gpu::{LoadedOnGpu, QuantizedOnGpu};
use crate::{
    Amax, Element, ErrorStats, GlobalScale, Quantized, QuantizedTensor, Recipe, Report, Result, Shape, cpu,
};

/// Where values are in a file.
#[derive(Clone, Copy, Debug)]
pub struct Origin<'a> {
    /// The file.
    pub file: &'a Path,
    /// The place of the first value, in bytes.
    pub offset: u64,
}

/// A matrix that a device can work on: where it is in host memory, or copied to a GPU once. [`Device::load`] makes it.
pub struct Loaded<'a, T: Element>(LoadedOn<'a, T>);

enum LoadedOn<'a, T: Element> {
    Cpu(&'a [T], Shape),
    #[cfg(feature = "cuda")]
    Gpu(Box<LoadedOnGpu<'a, T>>),
}

/// What a matrix was quantized to, where the device works. [`Loaded::quantize`] makes it.
pub struct QuantizedThere(QuantizedOn);

enum QuantizedOn {
    Cpu(Quantized),
    #[cfg(feature = "cuda")]
    Gpu(Box<QuantizedOnGpu>),
}

/// Parts of a quantized tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The packed codes.
    Codes,
    /// The block scales, in the order of their layout.
    Scales,
}

impl Device {
    /// Brings a matrix to where the device works, so that several operations cost one copy. If the values are a mapped
    /// file's, `origin` says where they are in it, and a device with memory of its own has them read from there: in pieces,
    /// which costs less than having the system map their pages.
    ///
    /// # Errors
    /// Those of [`cpu::quantize`] about shapes, [`crate::Error::Gpu`], and that reading fails.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "the CPU reads the map"))]
    pub fn load<'a, T: Element>(
        &'a self,
        values: &'a [T],
        shape: Shape,
        origin: Option<Origin<'_>>,
    ) -> Result<Loaded<'a, T>> {
        shape.check("the input", values.len())?;
        match self {
            Self::Cpu => Ok(Loaded(LoadedOn::Cpu(values, shape))),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => {
                let loaded = LoadedOnGpu::new(gpus.first(), values, shape, origin)?;
                Ok(Loaded(LoadedOn::Gpu(Box::new(loaded))))
            }
        }
    }
}

impl<T: Element> Loaded<'_, T> {
    /// The largest magnitude.
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

    /// Quantizes, weighting errors by column in the search for scales.
    ///
    /// # Errors
    /// Those of [`cpu::quantize_weighted`], and [`crate::Error::Gpu`].
    pub fn quantize(&self, recipe: &Recipe, importance: Option<&[f32]>) -> Result<QuantizedThere> {
        match &self.0 {
            LoadedOn::Cpu(values, shape) => {
                let quantized = match importance {
                    None => cpu::quantize(values, *shape, recipe),
                    Some(importance) => cpu::quantize_weighted(values, *shape, recipe, importance),
                };
                Ok(QuantizedThere(QuantizedOn::Cpu(quantized?)))
            }
            #[cfg(feature = "cuda")]
            LoadedOn::Gpu(loaded) => {
                Ok(QuantizedThere(QuantizedOn::Gpu(Box::new(loaded.quantize(recipe, importance)?))))
            }
        }
    }

    /// What was lost to what [`Self::quantize`] gave.
    ///
    /// # Errors
    /// Those of [`ErrorStats::of_quantized`], and [`crate::Error::Gpu`].
    pub fn errors(&self, quantized: &QuantizedThere) -> Result<ErrorStats> {
        match (&self.0, &quantized.0) {
            (LoadedOn::Cpu(values, shape), QuantizedOn::Cpu(quantized)) => {
                ErrorStats::of_quantized(values, *shape, &quantized.tensor)
            }
            #[cfg(feature = "cuda")]
            (LoadedOn::Gpu(loaded), QuantizedOn::Gpu(quantized)) => loaded.errors(&quantized.tensor),
            #[cfg(feature = "cuda")]
            _ => unreachable!("what a matrix is quantized to is where the matrix is"),
        }
    }
}

impl QuantizedThere {
    /// What could not be kept.
    pub fn report(&self) -> Report {
        match &self.0 {
            QuantizedOn::Cpu(quantized) => quantized.report,
            #[cfg(feature = "cuda")]
            QuantizedOn::Gpu(quantized) => quantized.report,
        }
    }

    /// The global scale.
    pub fn global_scale(&self) -> Option<GlobalScale> {
        match &self.0 {
            QuantizedOn::Cpu(quantized) => quantized.tensor.global_scale(),
            #[cfg(feature = "cuda")]
            QuantizedOn::Gpu(quantized) => quantized.global_scale,
        }
    }

    /// The same blocks under another global scale.
    ///
    /// # Errors
    /// Those of [`QuantizedTensor::with_global_scale`], and [`crate::Error::Gpu`].
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

    /// All of it in host memory.
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

    /// Hands a part on, piece by piece; ends when that breaks. A GPU's pieces are in pinned memory, and never in another.
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
