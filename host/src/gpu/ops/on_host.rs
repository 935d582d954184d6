//! Operations on host memory: copy to the GPU, run, copy the result back, and wait for it.

use microscale_formats::ScaleLayout;

use crate::amax::Amax;
use crate::element::Element;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::gpu::handle::Gpu;
use crate::gpu::memory::tensor::DeviceTensor;
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
}
