//! The kernels that are measured and not used: the ladder's baselines and the empty one.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr};
use microscale_formats::ScaleLayout;

use super::{DeviceTensor, Gpu, launch};
use crate::element::Element;
use crate::error::Result;
use crate::recipe::{Recipe, Words};
use crate::tensor::{QuantizedShape, Shape};

/// A quantizer to MXFP4 that is kept as a baseline. It ignores the recipe's ties, −0 and non-finite policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Baseline {
    /// A thread handles a block by itself.
    ThreadABlock,
    /// A warp handles a block, a lane an element.
    WarpABlock,
}

impl Words for Baseline {
    const WORDS: &'static [(&'static str, Self)] =
        &[("thread_a_block", Self::ThreadABlock), ("warp_a_block", Self::WarpABlock)];
}

impl Gpu {
    /// Quantizes with a baseline, as [`Gpu::quantize_on`] does but without a report.
    ///
    /// # Errors
    /// Those of [`Gpu::quantize_on`].
    pub fn quantize_baseline_on<T: Element>(
        &self,
        baseline: Baseline,
        stream: &Arc<CudaStream>,
        values: &impl DevicePtr<T>,
        shape: Shape,
        recipe: &Recipe,
        out: &mut DeviceTensor,
    ) -> Result<()> {
        shape.check("the input", values.len())?;
        let linear = Recipe { scale_layout: ScaleLayout::Linear, ..*recipe };
        out.shape().require(QuantizedShape::of(&linear, shape))?;
        launch::quantize_baseline(&self.module, stream, baseline.word(), values, shape, recipe, out)
    }

    /// Enqueues a kernel that does nothing: what a launch costs.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn empty_on(&self, stream: &Arc<CudaStream>) -> Result<()> {
        launch::empty(&self.module, stream)
    }
}
