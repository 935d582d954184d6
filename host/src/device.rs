//! Devices: the CPU, a GPU or several, behind one face. All give the same bytes.

mod loaded;

use std::fmt;
use std::str::FromStr;

pub use loaded::{Loaded, QuantizedThere};

#[cfg(feature = "cuda")]
use crate::gpu::{self, Gpu, Gpus};
pub use crate::origin::Origin;
pub use crate::tensor::Part;
use crate::{Amax, Element, Error, QuantizeOptions, Quantized, QuantizedView, Recipe, Result, Shape, cpu};
use microscale_formats::Words;

/// A device that was asked for: `auto`, `cpu`, `cuda:N` or `cuda:all`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceChoice {
    /// The first GPU that can be used, or else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this number, as the driver counts.
    Cuda(usize),
    /// Every GPU of the machine.
    CudaAll,
}

/// The error of `FromStr` for [`DeviceChoice`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} is not a device; there are auto, cpu, cuda:N (cuda:0, cuda:1, …) and cuda:all")]
pub struct UnknownDevice {
    word: String,
}

/// A device that is ready.
#[derive(Debug)]
pub enum Device {
    /// The CPU, with rayon's threads.
    Cpu,
    /// A GPU, or several. Checkpoints use all of them; an operation on one tensor uses the first.
    #[cfg(feature = "cuda")]
    Gpus(Gpus),
}

/// Workers of a checkpoint operation on the CPU: while one writes, the other computes.
const CPU_WORKERS: usize = 2;

impl Device {
    /// Makes the device ready.
    ///
    /// # Errors
    /// [`Error::NoGpu`] and [`Error::Gpu`] if a GPU was asked for, and one of them cannot be used. `Auto`
    /// never fails.
    pub fn choose(choice: DeviceChoice) -> Result<Self> {
        match choice {
            DeviceChoice::Cpu => Ok(Self::Cpu),
            DeviceChoice::Cuda(ordinal) => Self::gpu(ordinal),
            DeviceChoice::CudaAll => Self::all_gpus(),
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
        Ok(Self::Gpus(Gpu::new(ordinal)?.into()))
    }

    #[cfg(feature = "cuda")]
    fn all_gpus() -> Result<Self> {
        Gpus::all().map(Self::Gpus)
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

    #[cfg(not(feature = "cuda"))]
    fn all_gpus() -> Result<Self> {
        Self::gpu(0)
    }

    /// Returns whether values are copied to where the device works, so that it is worth while to do several
    /// things with them there.
    pub fn has_memory(&self) -> bool {
        !matches!(self, Self::Cpu)
    }

    /// Devices that can work at once, each by itself, on tensors of at most so many bytes.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "the CPU's memory is not counted"))]
    pub fn workers(&self, largest: usize) -> Result<Vec<Self>> {
        match self {
            Self::Cpu => Ok((0..CPU_WORKERS).map(|_| Self::Cpu).collect()),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => {
                Ok(gpus.workers(largest)?.into_iter().map(|gpu| Self::Gpus(gpu.into())).collect())
            }
        }
    }

    /// Brings a matrix to where the device works, so that several operations cost one copy. If the values are
    /// a mapped file's, `origin` says where they are in it, and a device with memory of its own has them read
    /// from there: in pieces, which costs less than having the system map their pages.
    ///
    /// # Errors
    /// Those of [`cpu::quantize`] about shapes, [`Error::Gpu`], and that reading fails.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "the CPU reads the map"))]
    pub fn load<'a, T: Element>(
        &'a self,
        values: &'a [T],
        shape: Shape,
        origin: Option<Origin<'_>>,
    ) -> Result<Loaded<'a, T>> {
        shape.check("the input", values.len())?;
        match self {
            Self::Cpu => Ok(Loaded::on_cpu(values, shape)),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => Loaded::on_gpu(gpus.first(), values, shape, origin),
        }
    }

    /// Quantizes values in host memory. See [`cpu::quantize`].
    ///
    /// # Errors
    /// Those of [`cpu::quantize`], and [`Error::Gpu`].
    pub fn quantize<T: Element>(&self, values: &[T], shape: Shape, recipe: &Recipe) -> Result<Quantized> {
        self.quantize_with(values, shape, recipe, QuantizeOptions::new())
    }

    /// [`Self::quantize`] with options. See [`cpu::quantize_with`].
    ///
    /// # Errors
    /// The errors of [`cpu::quantize_with`], and [`Error::Gpu`].
    pub fn quantize_with<T: Element>(
        &self,
        values: &[T],
        shape: Shape,
        recipe: &Recipe,
        options: QuantizeOptions<'_>,
    ) -> Result<Quantized> {
        let quantized = self.load(values, shape, None)?.quantize(recipe, options)?;
        let report = quantized.report();
        Ok(Quantized { tensor: quantized.into_host()?, report })
    }

    /// The largest magnitude of values in host memory. See [`cpu::amax`].
    ///
    /// # Errors
    /// Those of [`cpu::amax`], and [`Error::Gpu`].
    pub fn amax<T: Element>(&self, values: &[T], shape: Shape) -> Result<Amax> {
        self.load(values, shape, None)?.amax()
    }

    /// Dequantizes to host memory. See [`cpu::dequantize`].
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn dequantize<'a, T: Element>(&self, tensor: impl Into<QuantizedView<'a>>) -> Result<Vec<T>> {
        match self {
            Self::Cpu => Ok(cpu::dequantize(tensor)),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => gpus.first().dequantize(tensor),
        }
    }
}

/// Says which device it is: `CPU, 2 threads, avx512` or `cuda:0, NVIDIA H200, sm_90 PTX`, and likewise for
/// each of several.
impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => {
                let threads = rayon::current_num_threads();
                let plural = if threads == 1 { "" } else { "s" };
                write!(f, "CPU, {threads} thread{plural}, {}", cpu::Isa::best().word())
            }
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => {
                for (place, gpu) in gpus.iter().enumerate() {
                    let (info, between) = (gpu.info(), if place == 0 { "" } else { "; " });
                    let target = info.target.unwrap_or("no");
                    write!(f, "{between}cuda:{}, {}, {target} PTX", info.ordinal, info.name)?;
                }
                Ok(())
            }
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = UnknownDevice;

    fn from_str(word: &str) -> Result<Self, UnknownDevice> {
        let ordinal = word.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
        match (word, ordinal) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda:all", _) => Ok(Self::CudaAll),
            (_, Some(ordinal)) => Ok(Self::Cuda(ordinal)),
            _ => Err(UnknownDevice { word: word.into() }),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::CudaAll => f.write_str("cuda:all"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_by_words() {
        for choice in [DeviceChoice::Auto, DeviceChoice::Cpu, DeviceChoice::Cuda(3), DeviceChoice::CudaAll] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        for wrong in ["", "gpu", "cuda", "cuda:", "cuda:-1", "cuda:x", "cuda:ALL", "CPU"] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong:?}");
        }
    }
}
