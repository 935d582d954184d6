//! The kernels that are measured and not used: the ladder's baselines and the empty one.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use microscale_formats::{ScaleLayout, words};
use microscale_kernels_abi::Ladder;

use super::arguments::kernel_dtype;
use super::handle::Gpu;
use super::launch;
use super::memory::DeviceView;
use super::tensor_view_mut::DeviceTensorViewMut;
use crate::element::Element;
use crate::error::Result;
use crate::recipe::Recipe;
use crate::shape::{QuantizedShape, Shape};

/// A quantizer to MXFP4 that is kept as a baseline. It ignores the recipe's ties, −0 and non-finite policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Baseline {
    /// A thread handles a block by itself.
    ThreadABlock,
    /// A warp handles a block, a lane an element.
    WarpABlock,
}

words!(Baseline, "baseline" {
    Self::ThreadABlock = "thread_a_block",
    Self::WarpABlock = "warp_a_block",
});

impl Gpu {
    /// Quantizes with a baseline, as [`Gpu::quantize_on`] does but without a report.
    ///
    /// # Errors
    /// Those of [`Gpu::quantize_on`].
    #[doc(hidden)]
    pub fn quantize_baseline_on<'v, 'o, T: Element>(
        &self,
        baseline: Baseline,
        stream: &Arc<CudaStream>,
        values: impl Into<DeviceView<'v, T>>,
        shape: Shape,
        recipe: &Recipe,
        out: impl Into<DeviceTensorViewMut<'o>>,
    ) -> Result<()> {
        let (values, out) = (values.into(), out.into());
        shape.check("the input", values.len())?;
        let linear = Recipe { scale_layout: ScaleLayout::Linear, ..*recipe };
        out.shape().require(QuantizedShape::of(&linear, shape))?;
        let dtype = kernel_dtype(T::DTYPE);
        let kernel = match baseline {
            Baseline::ThreadABlock => Ladder::ThreadABlock(dtype),
            Baseline::WarpABlock => Ladder::WarpABlock(dtype),
        };
        launch::quantize_baseline(&self.kernels, stream, kernel, values, shape, recipe, out)
    }

    /// Enqueues a kernel that does nothing: what a launch costs.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    #[doc(hidden)]
    pub fn empty_on(&self, stream: &Arc<CudaStream>) -> Result<()> {
        launch::empty(&self.kernels, stream)
    }
}
