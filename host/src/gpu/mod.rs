//! Quantizing and dequantizing on NVIDIA GPUs, with the PTX that this library embeds.
//!
//! Nothing but the driver is needed, and it is looked for when a GPU is first asked for. [`Gpu`] owns a context, a stream
//! and the loaded module. Its host-slice operations ([`Gpu::quantize`], [`Gpu::dequantize`]) move data and wait; the
//! device-buffer operations ([`Gpu::quantize_on`], [`Gpu::dequantize_on`], [`Gpu::amax_on`],
//! [`Gpu::convert_layout_on`]) only enqueue on a stream, so that a caller can overlap them and capture them in a CUDA graph.
//!
//! Buffers and streams are cudarc's, re-exported here as [`cudarc`]. By default cudarc orders uses of a buffer on several
//! streams by events, which a graph capture does not allow; a caller who captures turns that off first
//! (`CudaContext::disable_event_tracking`) and orders streams itself.

mod bench_kernels;
mod device;
mod gemv;
mod gemv_choices;
mod gemv_weights;
mod gpus;
mod launch;
mod loaded;
mod module;
mod staging;
mod tensor;

pub use bench_kernels::Baseline;
pub use cudarc;
pub use device::{GpuInfo, devices};
pub use gemv::GemvKernel;
#[doc(hidden)]
pub use gemv_choices::{GemvChoices, GemvWeightsChoices, Tuned};
pub use gemv_weights::GemvWeightsKernel;
pub use gpus::Gpus;
pub(crate) use loaded::{LoadedOnGpu, QuantizedOnGpu};
pub use tensor::{DeviceAmax, DeviceReport, DeviceTensor};

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut};

use crate::amax::Amax;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::loss::ErrorStats;
use crate::recipe::{Global, Recipe, Scheme};
use crate::tensor::{Quantized, QuantizedShape, QuantizedTensor, Shape};
use microscale_formats::ScaleLayout;
use module::Module;
use staging::Staging;

/// One GPU, ready to work: its context, a stream and the kernels.
pub struct Gpu {
    info: GpuInfo,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    module: Arc<Module>,
    staging: Arc<Staging>,
}

impl Gpu {
    /// Opens GPU number `ordinal` and loads the PTX that its compute capability gets.
    ///
    /// # Errors
    /// [`Error::NoGpu`] without a driver, without such a GPU, or if it is older than compute capability 8.0;
    /// [`Error::Gpu`] if the driver refuses.
    pub fn new(ordinal: usize) -> Result<Self> {
        let context = device::open(ordinal)?;
        let info = GpuInfo::of(&context)?;
        let stream = context.new_stream().map_err(doing("creating a stream"))?;
        let module = Arc::new(Module::load(&context, &info)?);
        let staging = Arc::new(Staging::new(&context));
        Ok(Self { info, context, stream, module, staging })
    }

    /// The same GPU with another stream, for another thread.
    pub(crate) fn worker(&self) -> Result<Self> {
        let stream = self.context.new_stream().map_err(doing("creating a stream"))?;
        let (info, context, module) = (self.info.clone(), self.context.clone(), self.module.clone());
        let staging = Arc::new(Staging::new(&context));
        Ok(Self { info, context, stream, module, staging })
    }

    /// What this GPU is.
    pub fn info(&self) -> &GpuInfo {
        &self.info
    }

    /// The CUDA context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The stream that the host-slice operations use.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Quantizes host memory: copies it over, quantizes, copies the result back, and waits for it.
    ///
    /// # Errors
    /// Those of [`crate::quantize`], and [`Error::Gpu`].
    pub fn quantize<T: Element>(&self, values: &[T], shape: Shape, recipe: &Recipe) -> Result<Quantized> {
        self.quantize_weighted(values, shape, recipe, None)
    }

    /// [`Self::quantize`], weighting errors by column in the search for scales, as [`crate::quantize_weighted`] does.
    ///
    /// # Errors
    /// Those of [`crate::quantize_weighted`], and [`Error::Gpu`].
    pub fn quantize_weighted<T: Element>(
        &self,
        values: &[T],
        shape: Shape,
        recipe: &Recipe,
        importance: Option<&[f32]>,
    ) -> Result<Quantized> {
        shape.check("the input", values.len())?;
        let loaded = LoadedOnGpu::new(self, values, shape, None)?;
        let quantized = loaded.quantize(recipe, importance)?;
        Ok(Quantized { tensor: quantized.to_host()?, report: quantized.report })
    }

    /// The values of a quantized tensor in host memory, as [`crate::dequantize`] gives them.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn dequantize<T: Element>(&self, tensor: &QuantizedTensor) -> Result<Vec<T>> {
        let elements = tensor.rows() * tensor.cols();
        if elements == 0 {
            return Ok(Vec::new());
        }
        let tensor = DeviceTensor::from_host(&self.stream, tensor)?;
        let mut out = self.stream.alloc_zeros::<T>(elements).map_err(doing("allocating the output"))?;
        self.dequantize_on(&self.stream, &tensor, &mut out, tensor.cols())?;
        self.stream.clone_dtoh(&out).map_err(doing("copying the output back"))
    }

    /// Quantizes a matrix in device memory: enqueues one kernel, or a few where a global scale is to be computed or
    /// swizzled scales have padding, and returns.
    /// Allocates nothing and does not wait.
    ///
    /// Counts are added to `report`. Under [`NonFinite::Error`](crate::NonFinite::Error) the kernel cannot refuse:
    /// blocks with non-finite values become NaN, and the caller finds them in the report when it reads it.
    ///
    /// # Errors
    /// Those of [`crate::quantize`] about shapes and lengths, and [`Error::Gpu`].
    pub fn quantize_on<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        values: &impl DevicePtr<T>,
        shape: Shape,
        recipe: &Recipe,
        out: &mut DeviceTensor,
        report: &mut DeviceReport,
    ) -> Result<()> {
        self.quantize_weighted_on(stream, values, shape, recipe, None, out, report)
    }

    /// [`Self::quantize_on`], weighting errors by column in the search for scales, as [`crate::quantize_weighted`]
    /// does. Weights in device memory are not looked at: if one is negative or not finite, which scales are
    /// chosen means nothing.
    ///
    /// # Errors
    /// Those of [`Self::quantize_on`], and [`Error::Importance`] if there are not as many weights as columns.
    #[expect(
        clippy::too_many_arguments,
        reason = "one more than `quantize_on`, whose arguments are all different"
    )]
    pub fn quantize_weighted_on<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        values: &impl DevicePtr<T>,
        shape: Shape,
        recipe: &Recipe,
        importance: Option<&CudaSlice<f32>>,
        out: &mut DeviceTensor,
        report: &mut DeviceReport,
    ) -> Result<()> {
        shape.check("the input", values.len())?;
        out.shape().require(QuantizedShape::of(recipe, shape))?;
        recipe.check()?;
        if let Some(importance) = importance.filter(|weights| weights.len() != shape.cols) {
            let (weights, columns) = (importance.len(), shape.cols);
            return Err(Error::Importance { weights, columns, wrong: None });
        }
        if out.has_padded_scales() {
            let (_, scales, _) = out.parts_mut();
            stream.memset_zeros(scales).map_err(doing("clearing padding"))?;
        }
        if let Scheme::Nvfp4(arithmetic, global) = recipe.scheme {
            let absent = global == Global::Absent || shape.is_empty();
            out.set_direction((!absent).then_some(arithmetic.direction));
            if global == Global::FromAmax {
                let (_, _, slot) = out.parts_mut();
                stream.memset_zeros(slot).map_err(doing("clearing an amax"))?;
                launch::amax(&self.module, stream, values, shape, slot)?;
                launch::plan::<T>(&self.module, stream, recipe, slot)?;
            }
        }
        launch::quantize(&self.module, stream, values, shape, recipe, importance, out, report)
    }

    /// The largest magnitude of host memory, as [`crate::amax`] gives it.
    ///
    /// # Errors
    /// Those of [`crate::amax`], and [`Error::Gpu`].
    pub fn amax<T: Element>(&self, values: &[T], shape: Shape) -> Result<Amax> {
        shape.check("the input", values.len())?;
        LoadedOnGpu::new(self, values, shape, None)?.amax()
    }

    /// What a matrix in host memory has lost, quantized to `tensor`: as [`ErrorStats::of_quantized`], to the bit.
    ///
    /// # Errors
    /// Those of [`ErrorStats::of_quantized`], and [`Error::Gpu`].
    pub fn errors<T: Element>(
        &self,
        values: &[T],
        shape: Shape,
        tensor: &QuantizedTensor,
    ) -> Result<ErrorStats> {
        shape.check("the input", values.len())?;
        let loaded = LoadedOnGpu::new(self, values, shape, None)?;
        loaded.errors(&DeviceTensor::from_host(&self.stream, tensor)?)
    }

    /// Adds the largest magnitude of a matrix in device memory to `amax`: enqueues one kernel and returns. Allocates
    /// nothing and does not wait.
    ///
    /// # Errors
    /// Those of [`crate::amax`], and [`Error::Gpu`].
    pub fn amax_on<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        values: &impl DevicePtr<T>,
        shape: Shape,
        amax: &mut DeviceAmax,
    ) -> Result<()> {
        shape.check("the input", values.len())?;
        launch::amax(&self.module, stream, values, shape, amax.slot_mut())
    }

    /// The same tensor with its scales in another layout, as [`QuantizedTensor::convert_layout`] gives it.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn convert_layout(&self, tensor: &QuantizedTensor, layout: ScaleLayout) -> Result<QuantizedTensor> {
        let source = DeviceTensor::from_host(&self.stream, tensor)?;
        let mut target = DeviceTensor::zeros(&self.stream, tensor.shape().with_scale_layout(layout))?;
        self.convert_layout_on(&self.stream, &source, &mut target)?;
        target.to_host(&self.stream)
    }

    /// Copies a tensor in device memory to one whose scales are in another layout, or in the same: enqueues and
    /// returns. Allocates nothing and does not wait.
    ///
    /// # Errors
    /// [`Error::QuantizedShape`] if more than the scale layout differs, and [`Error::Gpu`].
    pub fn convert_layout_on(
        &self,
        stream: &Arc<CudaStream>,
        source: &DeviceTensor,
        target: &mut DeviceTensor,
    ) -> Result<()> {
        let (from, to) = (source.shape().scale_layout, target.shape().scale_layout);
        target.shape().require(source.shape().with_scale_layout(to))?;
        let copying = doing("copying a quantized tensor");
        target.set_direction(source.direction());
        let (codes, scales, global) = target.parts_mut();
        stream.memcpy_dtod(source.codes(), codes).map_err(&copying)?;
        stream.memcpy_dtod(source.global_slot(), global).map_err(&copying)?;
        if from == to {
            return stream.memcpy_dtod(source.scales(), scales).map_err(&copying);
        }
        launch::convert_scales(&self.module, stream, source.scales(), scales, to, source.shape())
    }

    /// Dequantizes in device memory, to rows that lie `row_stride` elements apart: enqueues one kernel and returns.
    /// Allocates nothing and does not wait.
    ///
    /// # Errors
    /// Those of [`crate::dequantize_into`], and [`Error::Gpu`].
    pub fn dequantize_on<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        tensor: &DeviceTensor,
        out: &mut impl DevicePtrMut<T>,
        row_stride: usize,
    ) -> Result<()> {
        let shape = Shape::new(tensor.rows(), tensor.cols()).with_row_stride(row_stride);
        shape.check("the output", out.len())?;
        launch::dequantize(&self.module, stream, tensor, out, shape)
    }
}

/// Turns a driver's error into ours, saying what was being done.
fn doing(doing: &'static str) -> impl Fn(cudarc::driver::DriverError) -> Error {
    move |error| Error::Gpu { doing, message: format!("{error:?}") }
}
