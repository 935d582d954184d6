//! Operations on host memory: copy to the GPU, run, copy the result back, and wait for it.

use microscale_formats::ScaleLayout;

use crate::amax::Amax;
use crate::element::Element;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::gemv::{Activation, check_weights};
use crate::gpu::handle::Gpu;
use crate::gpu::memory::tensor::DeviceTensor;
use crate::gpu::memory::workspace::GemmWorkspace;
use crate::gpu::ops::loaded::LoadedOnGpu;
use crate::gpu::runtime::driver::doing;
use crate::loss::ErrorStats;
use crate::options::QuantizeOptions;
use crate::recipe::Recipe;
use crate::shape::Shape;
use crate::tensor::{Quantized, QuantizedTensor};
use crate::view::QuantizedView;

impl Gpu {
    /// Quantizes host memory: copies it to the GPU, quantizes, copies the result back, and waits.
    ///
    /// # Errors
    /// As for [`crate::quantize`], and [`Error::Gpu`].
    pub fn quantize<T: Element>(&self, values: &[T], shape: Shape, recipe: &Recipe) -> Result<Quantized> {
        self.quantize_with(values, shape, recipe, QuantizeOptions::new())
    }

    /// [`Self::quantize`] with options.
    ///
    /// # Errors
    /// As for [`crate::quantize_with`], and [`Error::Gpu`].
    pub fn quantize_with<T: Element>(
        &self,
        values: &[T],
        shape: Shape,
        recipe: &Recipe,
        options: QuantizeOptions<'_>,
    ) -> Result<Quantized> {
        shape.check("the input", values.len())?;
        let loaded = LoadedOnGpu::new(self, values, shape, None)?;
        let quantized = loaded.quantize(recipe, options)?;
        Ok(Quantized { tensor: quantized.to_host()?, report: quantized.report })
    }

    /// The values of a quantized tensor in host memory, as [`crate::dequantize`] returns them.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn dequantize<'a, T: Element>(&self, tensor: impl Into<QuantizedView<'a>>) -> Result<Vec<T>> {
        let tensor = tensor.into();
        let elements = tensor.rows() * tensor.cols();
        if elements == 0 {
            return Ok(Vec::new());
        }
        let tensor = DeviceTensor::from_host(&self.stream, tensor)?;
        let mut out = self.stream.alloc_zeros::<T>(elements).map_err(doing("allocating the output"))?;
        self.dequantize_on(&self.stream, &tensor, &mut out, tensor.cols())?;
        self.stream.clone_dtoh(&out).map_err(doing("copying the output back"))
    }

    /// The largest magnitude in host memory, as [`crate::amax`] returns it.
    ///
    /// # Errors
    /// As for [`crate::amax`], and [`Error::Gpu`].
    pub fn amax<T: Element>(&self, values: &[T], shape: Shape) -> Result<Amax> {
        shape.check("the input", values.len())?;
        LoadedOnGpu::new(self, values, shape, None)?.amax()
    }

    /// The loss of a matrix in host memory that was quantized to `tensor`.
    ///
    /// Equals [`ErrorStats::of_quantized`] to the bit.
    ///
    /// # Errors
    /// As for [`ErrorStats::of_quantized`], and [`Error::Gpu`].
    pub fn errors<'a, T: Element>(
        &self,
        values: &[T],
        shape: Shape,
        tensor: impl Into<QuantizedView<'a>>,
    ) -> Result<ErrorStats> {
        shape.check("the input", values.len())?;
        let loaded = LoadedOnGpu::new(self, values, shape, None)?;
        loaded.errors(&DeviceTensor::from_host(&self.stream, tensor)?)
    }

    /// The tensor with another scale layout, as [`QuantizedTensor::convert_layout`] returns it.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn convert_layout<'a>(
        &self,
        tensor: impl Into<QuantizedView<'a>>,
        layout: ScaleLayout,
    ) -> Result<QuantizedTensor> {
        let tensor = tensor.into();
        let source = DeviceTensor::from_host(&self.stream, tensor)?;
        let mut target = DeviceTensor::zeros(&self.stream, tensor.shape().with_scale_layout(layout))?;
        self.convert_layout_on(&self.stream, &source, &mut target)?;
        target.to_host(&self.stream)
    }

    /// Multiplies host memory: copies the operands over, multiplies, copies the results back, and
    /// waits. `activations` is `[N, K]` for N tokens, `out` `[N, M]`.
    ///
    /// Weights are copied by every call. To copy them once, use
    /// [`Device::load_weights`](crate::Device::load_weights), or [`Self::linear`] with a
    /// [`DeviceTensor`].
    ///
    /// # Errors
    /// The errors of [`Plan::run`](crate::gpu::Plan::run).
    pub fn gemm_weights<'a, T: Activation>(
        &self,
        weights: impl Into<QuantizedView<'a>>,
        activations: &[T],
        tokens: usize,
        out: &mut [T],
    ) -> Result<()> {
        let weights = weights.into();
        check_weights(weights.shape(), activations.len(), tokens, out.len())?;
        if Shape::new(tokens, weights.rows()).is_empty() {
            return Ok(());
        }
        self.gemm_on_host(&DeviceTensor::from_host(&self.stream, weights)?, activations, tokens, out)
    }

    /// [`Self::gemm_weights`] with weights in device memory.
    pub(crate) fn gemm_on_host<T: Activation>(
        &self,
        weights: &DeviceTensor,
        activations: &[T],
        tokens: usize,
        out: &mut [T],
    ) -> Result<()> {
        let shape = weights.shape();
        let rows = check_weights(shape, activations.len(), tokens, out.len())?;
        let results = Shape::new(tokens, rows).elements();
        if results == 0 {
            return Ok(());
        }
        // There are no empty buffers.
        let nothing = [T::default()];
        let activations = if shape.cols == 0 { &nothing } else { &activations[..tokens * shape.cols] };
        let activations =
            self.stream.clone_htod(activations).map_err(doing("copying the activations over"))?;
        let mut there = self.stream.alloc_zeros::<T>(results).map_err(doing("allocating the output"))?;
        let plan = self.linear::<T, T>(weights).plan(tokens)?;
        let mut workspace = GemmWorkspace::new(&self.stream, plan.workspace_bytes())?;
        plan.run(&self.stream, &activations, &mut workspace, &mut there)?;
        self.stream.memcpy_dtoh(&there, &mut out[..results]).map_err(doing("copying the output back"))
    }
}
