//! A matrix that is on a GPU for several operations, and its quantized form.

use std::fmt;
use std::mem::offset_of;
use std::ops::ControlFlow;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use microscale_formats::errors::ErrorSums;

use crate::amax::Amax;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::formats::nvfp4::GlobalScale;
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::gpu::memory::staging::Staging;
use crate::gpu::memory::tensor::{DeviceAmax, DeviceReport, DeviceTensor};
use crate::gpu::memory::view::DeviceView;
use crate::gpu::ops::quantize_options::DeviceQuantizeOptions;
use crate::gpu::runtime::driver::doing;
use crate::loss::ErrorStats;
use crate::options::{Importance, QuantizeOptions};
use crate::origin::Origin;
use crate::recipe::{Recipe, check_importance};
use crate::report::Report;
use crate::shape::{QuantizedShape, Shape};
use crate::tensor::{Part, QuantizedTensor};

/// A matrix in device memory.
pub(crate) struct LoadedOnGpu<'a, T: Element> {
    gpu: &'a Gpu,
    shape: Shape,
    /// `None` for an empty matrix.
    input: Option<CudaSlice<T>>,
}

/// A quantized matrix in device memory.
pub(crate) struct QuantizedOnGpu {
    stream: Arc<CudaStream>,
    staging: Arc<Staging>,
    pub(crate) tensor: DeviceTensor,
    /// Counts of values that were not representable.
    pub(crate) report: Report,
    /// The global scale.
    pub(crate) global_scale: Option<GlobalScale>,
}

/// Shows the shape and dtype only: the values are in device memory.
impl<T: Element> fmt::Debug for LoadedOnGpu<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut loaded = f.debug_struct("LoadedOnGpu");
        loaded.field("gpu", self.gpu).field("shape", &self.shape).field("dtype", &T::DTYPE);
        loaded.finish_non_exhaustive()
    }
}

impl fmt::Debug for QuantizedOnGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut quantized = f.debug_struct("QuantizedOnGpu");
        quantized.field("tensor", &self.tensor).field("report", &self.report);
        quantized.field("global_scale", &self.global_scale).finish_non_exhaustive()
    }
}

impl<'a, T: Element> LoadedOnGpu<'a, T> {
    /// Copies a matrix to the GPU, from the file that it is mapped from if `origin` names it.
    ///
    /// The caller has checked that the values hold the shape.
    pub(crate) fn new(gpu: &'a Gpu, values: &[T], shape: Shape, origin: Option<Origin<'_>>) -> Result<Self> {
        let span = shape.span()?;
        if shape.is_empty() {
            return Ok(Self { gpu, shape, input: None });
        }
        // SAFETY: `copy_to_device` writes all `span` values first, and later work on the stream
        // follows it.
        let mut input = unsafe { gpu.stream.alloc(span) }.map_err(doing("allocating the input"))?;
        gpu.staging.copy_to_device(&gpu.stream, &values[..span], origin, &mut input)?;
        Ok(Self { gpu, shape, input: Some(input) })
    }

    /// The GPU.
    pub(in crate::gpu) fn gpu(&self) -> &'a Gpu {
        self.gpu
    }

    /// The shape.
    pub(in crate::gpu) fn shape(&self) -> Shape {
        self.shape
    }

    /// The values, or `None` for an empty matrix.
    pub(in crate::gpu) fn input(&self) -> Option<&CudaSlice<T>> {
        self.input.as_ref()
    }

    /// The largest magnitude.
    pub(crate) fn amax(&self) -> Result<Amax> {
        let mut amax = DeviceAmax::zeros(&self.gpu.stream)?;
        if let Some(input) = &self.input {
            self.gpu.amax_on(&self.gpu.stream, input, self.shape, &mut amax)?;
        }
        amax.read(&self.gpu.stream)
    }

    /// Quantizes.
    pub(crate) fn quantize(&self, recipe: &Recipe, options: QuantizeOptions<'_>) -> Result<QuantizedOnGpu> {
        let (gpu, shape, stream) = (self.gpu, self.shape, &self.gpu.stream);
        let importance = match options.importance {
            Importance::Equal => None,
            Importance::Columns(importance) => {
                check_importance(importance, shape.cols)?;
                Some(importance)
            }
            Importance::Hessians(_) => return Err(Error::HessianOnGpu),
        };
        let mut tensor = DeviceTensor::zeros(stream, QuantizedShape::of(recipe, shape))?;
        let mut report = DeviceReport::zeros(stream)?;
        if let Some(input) = &self.input {
            let importance = importance.map(|importance| stream.clone_htod(importance)).transpose();
            let importance = importance.map_err(doing("copying importance to it"))?;
            let importance = importance.as_ref().map(DeviceView::from);
            let options = DeviceQuantizeOptions { importance, ..Default::default() }.report(&mut report);
            gpu.quantize_on(stream, input, shape, recipe, options, &mut tensor)?;
        }
        let report = recipe.accept(report.read(stream, shape, recipe.format())?)?;
        let global_scale = tensor.read_global(stream)?;
        let (stream, staging) = (stream.clone(), gpu.staging.clone());
        Ok(QuantizedOnGpu { stream, staging, tensor, report, global_scale })
    }

    /// The loss of a tensor that this matrix was quantized to.
    ///
    /// # Errors
    /// As for [`ErrorStats::of_quantized`], and [`Error::Gpu`].
    pub(crate) fn errors(&self, tensor: &DeviceTensor) -> Result<ErrorStats> {
        let Self { gpu, shape, input } = self;
        let expected = QuantizedShape { rows: shape.rows, cols: shape.cols, ..tensor.shape() };
        tensor.shape().require(expected)?;
        let (stream, Some(input)) = (&gpu.stream, input) else { return Ok(ErrorStats::default()) };
        // SAFETY: the dequantize kernel writes all `rows * cols` values before later work on the
        // stream reads them.
        let back = unsafe { stream.alloc::<f32>(shape.rows * shape.cols) };
        let mut back = back.map_err(doing("allocating values"))?;
        gpu.dequantize_on(stream, tensor, &mut back, shape.cols)?;
        let (parts, words) = (launch::error_parts(*shape), size_of::<ErrorSums>() / size_of::<u64>());
        // SAFETY: the errors kernel writes all `rows * parts * words` words before the copy below
        // reads them.
        let sums = unsafe { stream.alloc::<u64>(shape.rows * parts * words) };
        let mut sums = sums.map_err(doing("allocating sums"))?;
        launch::errors(&gpu.kernels, stream, input, *shape, &back, &mut sums)?;
        let sums = stream.clone_dtoh(&sums).map_err(doing("copying sums back"))?;
        stream.synchronize().map_err(doing("copying sums back"))?;
        let sums = sums.as_chunks().0.iter().map(|words| sums_of(*words));
        let sums: Vec<_> = sums.collect();
        Ok(ErrorStats::of_parts(&sums, parts, (shape.rows * shape.cols) as u64))
    }
}

impl QuantizedOnGpu {
    /// A tensor of a GPU, without a global scale.
    pub(in crate::gpu) fn new(gpu: &Gpu, tensor: DeviceTensor, report: Report) -> Self {
        let (stream, staging) = (gpu.stream.clone(), gpu.staging.clone());
        Self { stream, staging, tensor, report, global_scale: None }
    }

    /// The same blocks with another global scale.
    pub(crate) fn set_global_scale(&mut self, given: GlobalScale) -> Result<()> {
        self.global_scale = Some(given);
        self.tensor.set_global_scale(&self.stream, self.global_scale)
    }

    /// Copies the tensor to host memory.
    pub(crate) fn to_host(&self) -> Result<QuantizedTensor> {
        self.tensor.to_host_through(&self.stream, &self.staging)
    }

    /// Passes on the packed codes or the block scales, piece by piece.
    ///
    /// Scales come in the order of their layout. Ends early if `hand_on` breaks.
    pub(crate) fn each_piece(
        &self,
        part: Part,
        hand_on: &mut dyn FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        let (codes, scales) = self.tensor.shape().bytes()?;
        let (source, bytes) = match part {
            Part::Codes => (self.tensor.codes(), codes),
            Part::Scales => (self.tensor.scales(), scales),
        };
        self.staging.each_piece(&self.stream, source, bytes, hand_on)
    }
}

/// Decodes the sums that a kernel wrote, field by field.
fn sums_of([signal, noise, approximation, product, max_abs, non_finite]: [u64; 6]) -> ErrorSums {
    let [signal, noise, approximation, product, max_abs] =
        [signal, noise, approximation, product, max_abs].map(f64::from_bits);
    ErrorSums { signal, noise, approximation, product, max_abs, non_finite }
}

const _: () = {
    // `sums_of` takes the fields by position.
    assert!(size_of::<ErrorSums>() == 48);
    assert!(offset_of!(ErrorSums, signal) == 0);
    assert!(offset_of!(ErrorSums, noise) == 8);
    assert!(offset_of!(ErrorSums, approximation) == 16);
    assert!(offset_of!(ErrorSums, product) == 24);
    assert!(offset_of!(ErrorSums, max_abs) == 32);
    assert!(offset_of!(ErrorSums, non_finite) == 40);
};
