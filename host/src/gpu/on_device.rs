//! Operations on device memory: they enqueue on a stream and return. They allocate nothing and do not wait.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use super::driver::doing;
use super::handle::Gpu;
use super::launch;
use super::quantize_options::DeviceQuantizeOptions;
use super::tensor::{DeviceAmax, DeviceTensor};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::recipe::Recipe;
use crate::scheme::{Global, Scheme};
use crate::shape::{QuantizedShape, Shape};

impl Gpu {
    /// Quantizes a matrix in device memory: enqueues one kernel, or a few where a global scale is to be
    /// computed or swizzled scales have padding, and returns. Allocates nothing and does not wait.
    ///
    /// Under [`NonFinite::Error`](crate::NonFinite::Error) the kernel cannot refuse: blocks with non-finite
    /// values become NaN, and the caller finds them in the report when it reads it.
    ///
    /// # Errors
    /// The errors of [`crate::quantize`] about shapes and lengths, [`Error::Importance`] if there are not as many
    /// numbers as columns, and [`Error::Gpu`].
    pub fn quantize_on<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        values: &impl DevicePtr<T>,
        shape: Shape,
        recipe: &Recipe,
        options: DeviceQuantizeOptions<'_>,
        out: &mut DeviceTensor,
    ) -> Result<()> {
        shape.check("the input", values.len())?;
        out.shape().require(QuantizedShape::of(recipe, shape))?;
        recipe.check()?;
        if let Some(importance) = options.importance.filter(|importance| importance.len() != shape.cols) {
            let (found, columns) = (importance.len(), shape.cols);
            return Err(Error::Importance { found, columns, wrong: None });
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
                launch::amax(&self.kernels, stream, values, shape, slot)?;
                launch::plan::<T>(&self.kernels, stream, recipe, slot)?;
            }
        }
        launch::quantize(&self.kernels, stream, values, shape, recipe, options, out)
    }

    /// Adds the largest magnitude of a matrix in device memory to `amax`: enqueues one kernel and returns.
    /// Allocates nothing and does not wait.
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
        launch::amax(&self.kernels, stream, values, shape, amax.slot_mut())
    }

    /// Copies a tensor in device memory to one whose scales are in another layout, or in the same: enqueues
    /// and returns. Allocates nothing and does not wait.
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
        launch::convert_scales(&self.kernels, stream, source.scales(), scales, to, source.shape())
    }

    /// Dequantizes in device memory, to rows that lie `row_stride` elements apart: enqueues one kernel and
    /// returns. Allocates nothing and does not wait.
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
        launch::dequantize(&self.kernels, stream, tensor, out, shape)
    }
}
