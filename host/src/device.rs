//! Where work is done: the CPU or one GPU, behind one face. Both give the same bytes.

use std::fmt;
use std::str::FromStr;

#[cfg(feature = "cuda")]
use crate::gpu::{self, Gpu};
use crate::recipe::Words;
use crate::{Amax, Element, Error, Quantized, QuantizedTensor, Recipe, Result, Shape, cpu};

/// A device that was asked for: `auto`, `cpu` or `cuda:N`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// The first GPU that can be used, or else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this number, as the driver counts.
    Cuda(usize),
}

/// A device that is ready.
pub enum Device {
    /// The CPU, with rayon's threads.
    Cpu,
    /// A GPU.
    #[cfg(feature = "cuda")]
    Gpu(Gpu),
}

impl Device {
    /// Makes the device ready.
    ///
    /// # Errors
    /// [`Error::NoGpu`] and [`Error::Gpu`] if a GPU was asked for by number. `Auto` never fails.
    pub fn choose(choice: DeviceChoice) -> Result<Self> {
        match choice {
            DeviceChoice::Cpu => Ok(Self::Cpu),
            DeviceChoice::Cuda(ordinal) => Self::gpu(ordinal),
            DeviceChoice::Auto => Ok(Self::auto().0),
        }
    }

    /// The first GPU that can be used, or else the CPU and why there is no GPU.
    pub fn auto() -> (Self, Option<Error>) {
        match Self::first_gpu() {
            Ok(gpu) => (gpu, None),
            Err(error) => (Self::Cpu, Some(error)),
        }
    }

    /// The first GPU that can be used.
    ///
    /// # Errors
    /// Why there is none.
    #[cfg(feature = "cuda")]
    pub fn first_gpu() -> Result<Self> {
        let devices = gpu::devices()?;
        let mut refused = Error::NoGpu("the driver lists none".into());
        for info in devices {
            match Self::gpu(info.ordinal) {
                Ok(gpu) => return Ok(gpu),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    #[cfg(feature = "cuda")]
    fn gpu(ordinal: usize) -> Result<Self> {
        Gpu::new(ordinal).map(Self::Gpu)
    }

    /// The first GPU that can be used.
    ///
    /// # Errors
    /// Always: this build has no GPU support.
    #[cfg(not(feature = "cuda"))]
    pub fn first_gpu() -> Result<Self> {
        Self::gpu(0)
    }

    #[cfg(not(feature = "cuda"))]
    fn gpu(_: usize) -> Result<Self> {
        Err(Error::NoGpu("this build leaves GPUs out; build with the feature \"cuda\"".into()))
    }

    /// Quantizes values in host memory. See [`cpu::quantize`].
    ///
    /// # Errors
    /// Those of [`cpu::quantize`], and [`Error::Gpu`].
    pub fn quantize<T: Element>(&self, values: &[T], shape: Shape, recipe: &Recipe) -> Result<Quantized> {
        match self {
            Self::Cpu => cpu::quantize(values, shape, recipe),
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => gpu.quantize(values, shape, recipe),
        }
    }

    /// [`Self::quantize`], weighting errors by column in the search for scales; without weights all are 1. See
    /// [`cpu::quantize_weighted`].
    ///
    /// # Errors
    /// Those of [`cpu::quantize_weighted`], and [`Error::Gpu`].
    pub fn quantize_weighted<T: Element>(
        &self,
        values: &[T],
        shape: Shape,
        recipe: &Recipe,
        importance: Option<&[f32]>,
    ) -> Result<Quantized> {
        match (self, importance) {
            (Self::Cpu, None) => cpu::quantize(values, shape, recipe),
            (Self::Cpu, Some(importance)) => cpu::quantize_weighted(values, shape, recipe, importance),
            #[cfg(feature = "cuda")]
            (Self::Gpu(gpu), _) => gpu.quantize_weighted(values, shape, recipe, importance),
        }
    }

    /// The largest magnitude of values in host memory. See [`cpu::amax`].
    ///
    /// # Errors
    /// Those of [`cpu::amax`], and [`Error::Gpu`].
    pub fn amax<T: Element>(&self, values: &[T], shape: Shape) -> Result<Amax> {
        match self {
            Self::Cpu => cpu::amax(values, shape),
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => gpu.amax(values, shape),
        }
    }

    /// Dequantizes to host memory. See [`cpu::dequantize`].
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn dequantize<T: Element>(&self, tensor: &QuantizedTensor) -> Result<Vec<T>> {
        match self {
            Self::Cpu => Ok(cpu::dequantize(tensor)),
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => gpu.dequantize(tensor),
        }
    }
}

/// Says which device it is: `CPU, 2 threads, avx512` or `cuda:0, NVIDIA H200, sm_90 PTX`.
impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => {
                let threads = rayon::current_num_threads();
                let plural = if threads == 1 { "" } else { "s" };
                write!(f, "CPU, {threads} thread{plural}, {}", cpu::Isa::best().word())
            }
            #[cfg(feature = "cuda")]
            Self::Gpu(gpu) => {
                let info = gpu.info();
                write!(f, "cuda:{}, {}, {} PTX", info.ordinal, info.name, info.target.unwrap_or("no"))
            }
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let ordinal = word.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
        match (word, ordinal) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            (_, Some(ordinal)) => Ok(Self::Cuda(ordinal)),
            _ => Err(format!("{word:?} is not a device; there are auto, cpu and cuda:N (cuda:0, cuda:1, …)")),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_by_words() {
        for choice in [DeviceChoice::Auto, DeviceChoice::Cpu, DeviceChoice::Cuda(3)] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        for wrong in ["", "gpu", "cuda", "cuda:", "cuda:-1", "cuda:x", "CPU"] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong:?}");
        }
    }
}
