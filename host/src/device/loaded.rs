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

/// What a matrix was quantized to, where the device works.
pub(crate) enum QuantizedThere {
    Cpu(Quantized),
    #[cfg(feature = "cuda")]
    Gpu(Box<QuantizedOnGpu>),
}

/// Parts of a quantized tensor.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    /// The packed codes.
    Codes,
    /// The block scales, in the order of their layout.
    Scales,
}

impl Device {
    /// Brings a matrix to where the device works. If the values are a mapped file's, `origin` says where they are in
    /// it, and a device with memory of its own has them read from there: in pieces, which costs less than having the
    /// system map their pages.
    ///
    /// # Errors
    /// Those of [`cpu::quantize`] about shapes, [`crate::Error::Gpu`], and that reading fails.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "the CPU reads the map"))]
    pub(crate) fn load<'a, T: Element>(
        &'a self,
        values: &'a [T],
        shape: Shape,
        origin: Option<Origin<'_>>,
    ) -> Result<Loaded<'a, T>> {
        shape.check("the input", values.len())?;
        match self {
            Self::Cpu => Ok(Loaded::Cpu(values, shape)),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => {
                let loaded = LoadedOnGpu::new(gpus.first(), values, shape, origin)?;
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
    pub(crate) fn quantize(&self, recipe: &Recipe, importance: Option<&[f32]>) -> Result<QuantizedThere> {
        match self {
            Self::Cpu(values, shape) => {
                let quantized = match importance {
                    None => cpu::quantize(values, *shape, recipe),
                    Some(importance) => cpu::quantize_weighted(values, *shape, recipe, importance),
                };
                Ok(QuantizedThere::Cpu(quantized?))
            }
            #[cfg(feature = "cuda")]
            Self::Gpu(loaded) => Ok(QuantizedThere::Gpu(Box::new(loaded.quantize(recipe, importance)?))),
        }
    }

    /// What was lost to what [`Self::quantize`] gave.
    pub(crate) fn errors(&self, quantized: &QuantizedThere) -> Result<ErrorStats> {
        match (self, quantized) {
            (Self::Cpu(values, shape), QuantizedThere::Cpu(quantized)) => {
                ErrorStats::of_quantized(values, *shape, &quantized.tensor)
            }
            #[cfg(feature = "cuda")]
            (Self::Gpu(loaded), QuantizedThere::Gpu(quantized)) => loaded.errors(&quantized.tensor),
            #[cfg(feature = "cuda")]
            _ => unreachable!("what a matrix is quantized to is where the matrix is"),
        }
    }
}

impl QuantizedThere {
    /// What could not be kept.
    pub(crate) fn report(&self) -> Report {
        match self {
            Self::Cpu(quantized) => quantized.report,
            #[cfg(feature = "cuda")]
            Self::Gpu(quantized) => quantized.report,
        }
    }

    /// The global scale.
    pub(crate) fn global_scale(&self) -> Option<GlobalScale> {
        match self {
            Self::Cpu(quantized) => quantized.tensor.global_scale(),
            #[cfg(feature = "cuda")]
            Self::Gpu(quantized) => quantized.global_scale,
        }
    }

    /// The same blocks under another global scale.
    pub(crate) fn with_global_scale(self, given: GlobalScale) -> Result<Self> {
        Ok(match self {
            Self::Cpu(Quantized { tensor, report }) => {
                Self::Cpu(Quantized { tensor: tensor.with_global_scale(given)?, report })
            }
            #[cfg(feature = "cuda")]
            Self::Gpu(mut quantized) => {
                quantized.set_global_scale(given)?;
                Self::Gpu(quantized)
            }
        })
    }

    /// All of it in host memory.
    pub(crate) fn into_host(self) -> Result<QuantizedTensor> {
        match self {
            Self::Cpu(quantized) => Ok(quantized.tensor),
            #[cfg(feature = "cuda")]
            Self::Gpu(quantized) => quantized.to_host(),
        }
    }

    /// Hands a part on, piece by piece; ends when that breaks. A GPU's pieces are in pinned memory, and never in another.
    pub(crate) fn each_piece(
        &self,
        part: Part,
        hand_on: &mut dyn FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        match self {
            Self::Cpu(quantized) => {
                let whole = match part {
                    Part::Codes => quantized.tensor.codes(),
                    Part::Scales => quantized.tensor.scales(),
                };
                let _ = hand_on(whole);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Self::Gpu(quantized) => quantized.each_piece(part, hand_on),
        }
    }
}
