//! Operations on device memory: they enqueue on a stream, allocate nothing and do not wait.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use microscale_formats::ScaleLayout;

use crate::element::Element;
use crate::error::{Error, Result};
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::gpu::memory::tensor::DeviceAmax;
use crate::gpu::memory::tensor_view::DeviceTensorView;
use crate::gpu::memory::tensor_view_mut::DeviceTensorViewMut;
use crate::gpu::memory::view::{DeviceView, DeviceViewMut};
use crate::gpu::ops::quantize_options::DeviceQuantizeOptions;
use crate::recipe::Recipe;
use crate::scheme::{Global, Scheme};
use crate::shape::{QuantizedShape, Shape};

impl Gpu {
    /// Quantizes a matrix in device memory.
    ///
    /// Enqueues one kernel and returns; a few kernels if a global scale must be computed or
    /// swizzled scales have padding. Allocates nothing and does not wait.
    ///
    /// With [`NonFinite::Error`](crate::NonFinite::Error) the kernel cannot refuse: blocks with
    /// non-finite values become NaN, and the report counts them.
    ///
    /// # Errors
    /// As for [`crate::quantize`] about shapes and lengths, [`Error::Importance`] unless there is
    /// one number per column, [`Error::Length`] if an amax has fewer words than
    /// [`DeviceAmax::WORDS`], [`Error::NoGlobalSlot`] if an NVFP4 output has no memory for a global
    /// scale, and [`Error::Gpu`].
    pub fn quantize_on<'v, 'o, T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        values: impl Into<DeviceView<'v, T>>,
        shape: Shape,
        recipe: &Recipe,
        options: DeviceQuantizeOptions<'_>,
        out: impl Into<DeviceTensorViewMut<'o>>,
    ) -> Result<()> {
        let (values, mut out) = (values.into(), out.into());
        shape.check("the input", values.len())?;
        out.shape().require(QuantizedShape::of(recipe, shape))?;
        recipe.check()?;
        if let Some(importance) = options.importance.filter(|importance| importance.len() != shape.cols) {
            let (found, columns) = (importance.len(), shape.cols);
            return Err(Error::Importance { found, columns, wrong: None });
        }
        out.clear_padding(stream)?;
        if let Scheme::Nvfp4(arithmetic, global) = recipe.scheme {
            let absent = global == Global::Absent || shape.is_empty();
            out.set_direction((!absent).then_some(arithmetic.direction));
            if global == Global::FromAmax {
                let slot = out.slot_mut()?;
                if let Some((direction, value)) = options.global_scale {
                    if direction != arithmetic.direction {
                        let expected = arithmetic.direction;
                        return Err(Error::GlobalScaleDirection { given: direction, expected });
                    }
                    Shape::new(1, 1).check("the global scale", value.len())?;
                    slot.copy_from(stream, "the global scale", value, 1)?;
                } else if let Some(amax) = options.amax {
                    Shape::new(1, DeviceAmax::WORDS).check("the amax", amax.len())?;
                    slot.copy_from(stream, "the amax", amax, DeviceAmax::WORDS)?;
                } else {
                    slot.clear(stream, "the amax")?;
                    launch::amax(&self.kernels, stream, values, shape, slot)?;
                }
                launch::plan::<T>(&self.kernels, stream, recipe, slot, options.global_scale.is_some())?;
            }
        }
        launch::quantize(&self.kernels, stream, values, shape, recipe, options, out)
    }

    /// Updates `amax` with the largest magnitude of a matrix in device memory.
    ///
    /// `amax` is a [`DeviceAmax`] or [`DeviceAmax::WORDS`] words. Enqueues one kernel and returns.
    /// Allocates nothing and does not wait.
    ///
    /// # Errors
    /// As for [`crate::amax`], [`Error::Length`] if `amax` has fewer than [`DeviceAmax::WORDS`]
    /// words, and [`Error::Gpu`].
    pub fn amax_on<'v, 'o, T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        values: impl Into<DeviceView<'v, T>>,
        shape: Shape,
        amax: impl Into<DeviceViewMut<'o, u32>>,
    ) -> Result<()> {
        let (values, mut amax) = (values.into(), amax.into());
        shape.check("the input", values.len())?;
        Shape::new(1, DeviceAmax::WORDS).check("the amax", amax.len())?;
        launch::amax(&self.kernels, stream, values, shape, &mut amax)
    }

    /// Copies a tensor in device memory to one with the same or another scale layout.
    ///
    /// Enqueues and returns. Allocates nothing and does not wait.
    ///
    /// # Errors
    /// [`Error::QuantizedShape`] if more than the scale layout differs, and [`Error::Gpu`].
    pub fn convert_layout_on<'s, 't>(
        &self,
        stream: &Arc<CudaStream>,
        source: impl Into<DeviceTensorView<'s>>,
        target: impl Into<DeviceTensorViewMut<'t>>,
    ) -> Result<()> {
        let (source, mut target) = (source.into(), target.into());
        let (from, to) = (source.shape().scale_layout, target.shape().scale_layout);
        target.shape().require(source.shape().with_scale_layout(to))?;
        target.copy_from(stream, source)?;
        if from == to {
            return Ok(());
        }
        launch::convert_scales(&self.kernels, stream, source, to, target.scales_mut())
    }

    /// Writes the block scales of a tensor in device memory in `layout`, including padding.
    ///
    /// The codes stay where they are; otherwise as [`Self::convert_layout_on`]. Allocates nothing
    /// and does not wait.
    ///
    /// # Errors
    /// [`Error::Length`] if `scales` has fewer bytes than the shape needs in that layout, and
    /// [`Error::Gpu`].
    pub fn convert_scales_on<'s, 'o>(
        &self,
        stream: &Arc<CudaStream>,
        source: impl Into<DeviceTensorView<'s>>,
        layout: ScaleLayout,
        scales: impl Into<DeviceViewMut<'o, u8>>,
    ) -> Result<()> {
        let (source, mut scales) = (source.into(), scales.into());
        let (_, bytes) = source.shape().with_scale_layout(layout).bytes()?;
        Shape::new(1, bytes).check("the scales", scales.len())?;
        if layout == source.shape().scale_layout {
            return scales.copy_from(stream, "the scales", source.scales(), bytes);
        }
        launch::convert_scales(&self.kernels, stream, source, layout, &mut scales)
    }

    /// Dequantizes in device memory, to rows `row_stride` elements apart.
    ///
    /// Enqueues one kernel and returns. Allocates nothing and does not wait.
    ///
    /// # Errors
    /// As for [`crate::dequantize_into`], and [`Error::Gpu`].
    pub fn dequantize_on<'t, 'o, T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        tensor: impl Into<DeviceTensorView<'t>>,
        out: impl Into<DeviceViewMut<'o, T>>,
        row_stride: usize,
    ) -> Result<()> {
        let (tensor, out) = (tensor.into(), out.into());
        let shape = Shape::new(tensor.rows(), tensor.cols()).with_row_stride(row_stride);
        shape.check("the output", out.len())?;
        launch::dequantize(&self.kernels, stream, tensor, out, shape)
    }
}
