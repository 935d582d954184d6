//! Devices with a common interface: the CPU, a GPU or several. All give the same bytes.

mod loaded;
mod weights;

use std::fmt;
use std::str::FromStr;

pub use loaded::{Loaded, QuantizedOnDevice};
pub use weights::LoadedWeights;

#[cfg(feature = "cuda")]
use crate::gpu::{self, Gpu, Gpus};
pub use crate::origin::Origin;
pub use crate::tensor::Part;
use crate::{
    Activation, Amax, Element, Error, GptqFactor, GptqQuantized, GptqScales, QuantizeOptions, Quantized,
    QuantizedView, Recipe, Result, Shape, cpu,
};
use microscale_formats::Words;

/// A requested device: `auto`, `cpu`, `cuda:N` or `cuda:all`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceChoice {
    /// The first usable GPU, or else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU with this number, as the driver counts.
    Cuda(usize),
    /// Every GPU of the machine.
    CudaAll,
}

/// The error of `FromStr` for [`DeviceChoice`].
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} is not a device; there are auto, cpu, cuda, cuda:N (cuda:0, cuda:1, …) and cuda:all")]
pub struct UnknownDevice {
    word: String,
}

microscale_formats::debug_is_message!(UnknownDevice);

/// A device that is ready to use.
///
/// ```
/// use microscale::{Device, DeviceChoice, Recipe, Shape};
///
/// let device = Device::choose(DeviceChoice::Auto)?; // a GPU or else the CPU
/// let weights: Vec<f32> = (0..6 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
/// let quantized = device.quantize(&weights, Shape::new(6, 64), &Recipe::default())?.tensor;
///
/// // The products of 9 tokens and 6 rows of weights.
/// let x: Vec<f32> = (0..9 * 64).map(|i| (i as f32 * 0.11).cos()).collect();
/// let y = device.linear(&x, Shape::new(9, 64), &quantized)?;
/// assert_eq!(y.len(), 9 * 6);
/// # Ok::<(), microscale::Error>(())
/// ```
#[derive(Debug)]
pub enum Device {
    /// The CPU, with rayon's threads.
    Cpu,
    /// One or more GPUs. Checkpoints use all of them, and an operation on one tensor uses the
    /// first.
    #[cfg(feature = "cuda")]
    Gpus(Gpus),
}

impl Device {
    /// Prepares a device.
    ///
    /// # Errors
    /// [`Error::NoGpu`] and [`Error::Gpu`] if GPUs were requested and one of them cannot be used.
    /// `Auto` never fails.
    pub fn choose(choice: DeviceChoice) -> Result<Self> {
        match choice {
            DeviceChoice::Cpu => Ok(Self::Cpu),
            DeviceChoice::Cuda(ordinal) => Self::gpu(ordinal),
            DeviceChoice::CudaAll => Self::all_gpus(),
            DeviceChoice::Auto => Ok(Self::auto().0),
        }
    }

    /// Returns the first usable GPU, or the CPU and the reason why there is no GPU.
    pub fn auto() -> (Self, Option<Error>) {
        match Self::first_gpu() {
            Ok(gpu) => (gpu, None),
            Err(error) => (Self::Cpu, Some(error)),
        }
    }

    /// Returns the first usable GPU.
    ///
    /// # Errors
    /// The reason why there is none.
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

    /// Returns the first usable GPU.
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

    /// Returns whether the device copies values to memory of its own.
    ///
    /// In that case, run several operations on one copy ([`Self::load`]).
    pub fn has_memory(&self) -> bool {
        !matches!(self, Self::Cpu)
    }

    /// Returns devices that can work in parallel on tensors of at most `largest` bytes: one per
    /// thread of the CPU, several streams per GPU.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "the CPU's memory is not counted"))]
    pub fn workers(&self, largest: usize) -> Result<Vec<Self>> {
        match self {
            Self::Cpu => Ok((0..rayon::current_num_threads()).map(|_| Self::Cpu).collect()),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => {
                Ok(gpus.workers(largest)?.into_iter().map(|gpu| Self::Gpus(gpu.into())).collect())
            }
        }
    }

    /// Makes a matrix available to the device, so that several operations need one copy.
    ///
    /// If the values come from a mapped file, pass their position as `origin`. A device with memory
    /// of its own then reads the file in pieces, which is faster than page faults of the map.
    ///
    /// # Errors
    /// The errors of [`cpu::quantize`] about shapes, [`Error::Gpu`], and read errors.
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
    /// The errors of [`cpu::quantize`], and [`Error::Gpu`].
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

    /// Quantizes a layer's weights in host memory by GPTQ. See [`cpu::quantize_gptq`].
    ///
    /// `shape` is of the weights `[outputs, columns]`, and `factor` of the layer's inputs.
    ///
    /// ```
    /// use microscale::{Device, Format, GptqFactor, GptqOptions, GptqScales, Recipe, Shape};
    ///
    /// let device = Device::Cpu;
    /// let identity: Vec<f32> = (0..32 * 32).map(|i| f32::from(u8::from(i % 33 == 0))).collect();
    /// let factor = GptqFactor::new(&identity, 32, Format::Mxfp4, GptqOptions::new())?;
    /// let (weights, recipe) = ([1f32; 4 * 32], Recipe::default());
    /// let shape = Shape::new(4, 32);
    /// let gptq = device.quantize_gptq(&weights, shape, &recipe, &factor, GptqScales::InLoop)?;
    /// assert_eq!(gptq.output_error, 0.0);
    /// # Ok::<(), microscale::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`cpu::quantize_gptq`], [`crate::GptqFault::GpuMemory`], and [`Error::Gpu`].
    pub fn quantize_gptq<T: Element>(
        &self,
        values: &[T],
        shape: Shape,
        recipe: &Recipe,
        factor: &GptqFactor,
        scales: GptqScales,
    ) -> Result<GptqQuantized> {
        match self {
            Self::Cpu => cpu::quantize_gptq(values, shape, recipe, factor, scales),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => gpus.first().quantize_gptq(values, shape, recipe, factor, scales),
        }
    }

    /// Returns the largest magnitude of values in host memory. See [`cpu::amax`].
    ///
    /// # Errors
    /// The errors of [`cpu::amax`], and [`Error::Gpu`].
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

    /// Multiplies activations by quantized weights, in host memory. Returns y = x·Wᵀ.
    ///
    /// `activations` is `[N, K]` for N tokens, given by `shape`, and may have gaps between rows.
    /// `weights` is `[M, K]` in MXFP4 or NVFP4, with linear scales. The result is `[N, M]` without
    /// gaps. N may be any number.
    ///
    /// ```
    /// use microscale::{Device, Recipe, Shape};
    ///
    /// let device = Device::Cpu;
    /// let identity: Vec<f32> = (0..32 * 32).map(|i| f32::from(u8::from(i % 33 == 0))).collect();
    /// let weights = device.quantize(&identity, Shape::new(32, 32), &Recipe::default())?.tensor;
    /// let x: Vec<f32> = (0..3 * 32).map(|i| i as f32).collect();
    /// assert_eq!(device.linear(&x, Shape::new(3, 32), &weights)?, x);
    /// # Ok::<(), microscale::Error>(())
    /// ```
    ///
    /// # Which product to call
    ///
    /// - To multiply the same weights again, call [`Self::load_weights`] once and
    ///   [`LoadedWeights::linear`] for each product. A GPU then gets only one copy of the weights.
    /// - To write to memory that you allocated, call [`LoadedWeights::linear_into`], or on a CPU
    ///   [`cpu::gemm_weights`], which this function calls.
    /// - To round activations to INT8, which is faster on CPUs, call
    ///   [`LoadedWeights::with_activations`] or [`cpu::gemm_weights_int8`].
    /// - To get the same bits on every CPU, call [`cpu::gemv_weights`]. It takes any number of
    ///   tokens too, but is made for up to eight.
    #[cfg_attr(feature = "cuda", doc = "- To keep activations in GPU memory, or to fuse a bias, a gate or a")]
    #[cfg_attr(
        feature = "cuda",
        doc = "  residual, plan a product with [`Gpu::linear`](crate::gpu::Gpu::linear)."
    )]
    /// - For the experts of a mixture, call [`cpu::gemm_experts`] or [`cpu::gemm_experts_int8`].
    ///
    /// # Bits
    ///
    /// Results are within the error bounds of [`microscale_formats::weights`] on every device, but
    /// the last bits differ between devices.
    ///
    /// # Errors
    /// [`Error::Operands`] if the weights are in another format, have swizzled scales or have
    /// another number of columns than `shape`. [`Error::Length`] if `activations` has fewer
    /// elements than `shape`. [`Error::Gpu`].
    pub fn linear<'a, T: Activation>(
        &self,
        activations: &[T],
        shape: Shape,
        weights: impl Into<QuantizedView<'a>>,
    ) -> Result<Vec<T>> {
        self.load_weights(weights.into())?.linear(activations, shape)
    }

    /// Makes quantized weights available to the device, so that many products need one copy.
    ///
    /// The CPU borrows them. `weights` is `[M, K]` in MXFP4 or NVFP4, with linear scales.
    ///
    /// ```
    /// use microscale::{Device, DeviceChoice, Recipe, Shape};
    ///
    /// let device = Device::choose(DeviceChoice::Auto)?;
    /// let values = [1f32; 4 * 32];
    /// let quantized = device.quantize(&values, Shape::new(4, 32), &Recipe::default())?.tensor;
    /// let weights = device.load_weights(&quantized)?;
    /// for token in 0..3 {
    ///     let x = [token as f32; 32];
    ///     assert_eq!(weights.linear(&x, Shape::new(1, 32))?, [token as f32 * 32.0; 4]);
    /// }
    /// # Ok::<(), microscale::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Operands`] if the weights are in another format or have swizzled scales, and
    /// [`Error::Gpu`].
    pub fn load_weights<'a>(&'a self, weights: impl Into<QuantizedView<'a>>) -> Result<LoadedWeights<'a>> {
        match self {
            Self::Cpu => LoadedWeights::on_cpu(weights.into()),
            #[cfg(feature = "cuda")]
            Self::Gpus(gpus) => LoadedWeights::on_gpu(gpus.first(), weights.into()),
        }
    }
}

/// Formats the device as `CPU, 2 threads, avx512` or `cuda:0, NVIDIA H200, sm_90 PTX`.
///
/// Several GPUs are listed in the same way.
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
            ("cuda", _) => Ok(Self::Cuda(0)),
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
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:ALL", "CPU"] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong:?}");
        }
    }
}
