//! Quantizing activations in device memory.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use microscale_kernels_abi::activations::COLUMN_LIMIT;

use crate::activations::{ActivationFormat, ActivationParts, ActivationRecipe, Fp8Scale};
use crate::element::{Dtype, Element};
use crate::error::{ActivationFault, Error, Result};
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::gpu::memory::activations::{
    DeviceActivationExperts, DeviceActivations, DeviceQuantizedActivations, DeviceScales,
};
use crate::gpu::memory::view::{DeviceView, DeviceViewMut};
use crate::gpu::runtime::kernels::Kernels;
use crate::shape::Shape;

impl Gpu {
    /// Quantizes activations in device memory, after a row operation.
    ///
    /// Gives the bytes of [`quantize_activations`](crate::quantize_activations()), padding of
    /// scales included. `T` is f16 or bf16. Enqueues one kernel and returns; for FP8 with a scale
    /// per tensor a store and two kernels. Allocates nothing and does not wait. Of experts, rows
    /// that do not exist keep their codes.
    ///
    /// # Errors
    /// As for [`quantize_activations`](crate::quantize_activations()),
    /// [`ActivationFault::Dtype`] for f32, [`ActivationFault::Limit`] for more than 2³¹ rows or
    /// columns, [`Error::Length`] if an output is too short, and [`Error::Gpu`].
    pub fn quantize_activations_on<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: DeviceActivations<'_, T>,
        recipe: &ActivationRecipe,
        out: DeviceQuantizedActivations<'_>,
    ) -> Result<()> {
        input.shape.check("the activations", input.values.len())?;
        let size = check(&input, recipe, &out)?;
        enqueue(&self.kernels, stream, input, recipe, size, out)
    }
}

/// Enqueues the kernels of a quantization that [`check`] has checked, with the size that it
/// returned.
///
/// # Errors
/// The errors of [`Gpu::quantize_activations_on`].
pub(in crate::gpu) fn enqueue<T: Element>(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    input: DeviceActivations<'_, T>,
    recipe: &ActivationRecipe,
    size: Option<[usize; 2]>,
    mut out: DeviceQuantizedActivations<'_>,
) -> Result<()> {
    if recipe.format == ActivationFormat::Fp8(Fp8Scale::PerTensor) {
        launch::least_tensor_scale(stream, &mut out.f32_scales)?;
    }
    let Some(size) = size else { return Ok(()) };
    launch::quantize_activations(kernels, stream, input, recipe, size, out)
}

/// Checks activations, but for the length of their values, and outputs. Returns the rows of scales
/// without padding, of an expert for masked experts, and the columns; `None` if there is nothing to
/// quantize.
///
/// # Errors
/// The errors of [`Gpu::quantize_activations_on`].
pub(in crate::gpu) fn check<T: Element>(
    input: &DeviceActivations<'_, T>,
    recipe: &ActivationRecipe,
    out: &DeviceQuantizedActivations<'_>,
) -> Result<Option<[usize; 2]>> {
    let fault = |fault| Err(Error::Activations(fault));
    if T::DTYPE == Dtype::F32 {
        return fault(ActivationFault::Dtype);
    }
    let shape = input.shape;
    let columns = recipe.check(&ActivationParts {
        shape,
        residual: input.residual.as_ref().map(DeviceViewMut::len),
        weights: input.weights.as_ref().map(DeviceView::len),
        scales: match &input.scales {
            DeviceScales::None => 0,
            DeviceScales::Host(_) => 1,
            DeviceScales::Device(scales) => scales.len(),
        },
        experts: input.experts.as_ref().map(DeviceActivationExperts::count),
    })?;
    if let DeviceScales::Host(scale) = input.scales {
        recipe.check_scale(0, scale)?;
    }
    let what = |what| fault(ActivationFault::Experts { what });
    let (rows, masked) = match &input.experts {
        None => (shape.rows, 1),
        Some(DeviceActivationExperts::Sorted { offsets, scale_offsets, scale_rows }) => {
            if offsets.is_empty() || offsets.len() != scale_offsets.len() {
                return what("two lists of the same length, with an entry for each expert and one more");
            }
            (*scale_rows, 1)
        }
        Some(DeviceActivationExperts::Masked { counts }) => {
            if counts.is_empty() || !shape.rows.is_multiple_of(counts.len()) {
                return what("a count for each expert, and rows that they divide");
            }
            (shape.rows / counts.len(), counts.len())
        }
    };
    const ROW_LIMIT: u64 = 1 << 31;
    let padded = recipe.layout.padded_rows(rows).saturating_mul(masked);
    for (what, found, limit) in
        [("rows", shape.rows.max(padded), ROW_LIMIT), ("columns", columns, COLUMN_LIMIT)]
    {
        if found as u64 >= limit {
            return fault(ActivationFault::Limit { what, found, limit });
        }
    }
    let lengths = recipe.lengths(shape.rows, padded, columns);
    let Some([codes, scales, f32_scales]) = lengths else {
        return Err(Error::TooLarge { rows: shape.rows, cols: columns, row_stride: columns });
    };
    Shape::new(1, codes).check("the codes", out.codes.len())?;
    Shape::new(1, scales).check("the scales", out.scales.len())?;
    Shape::new(1, f32_scales).check("the f32 scales", out.f32_scales.len())?;
    Ok((columns > 0 && padded > 0).then_some([rows, columns]))
}
