//! The results of a product on a GPU: values, or quantized for the next layer.

use std::fmt;

use cudarc::driver::{CudaSlice, CudaViewMut};

use crate::activations::{ActivationRecipe, RowOperation};
use crate::element::Dtype;
use crate::error::{Error, OperandFault, Result};
use crate::gpu::memory::activations::{DeviceActivationExperts, DeviceQuantizedActivations, DeviceScales};
use crate::gpu::memory::view::DeviceViewMut;

/// Memory for the results of a product.
///
/// References to cudarc's buffers and a [`DeviceViewMut`] convert to values, and
/// [`QuantizedResults`] to quantized results.
pub enum DeviceResults<'a, O> {
    /// Values: `[N, M]`, or under a gate `[N, M / 2]`, without gaps.
    Values(DeviceViewMut<'a, O>),
    /// Quantized results, of a plan after
    /// [`Linear::quantize_results`](crate::gpu::Linear::quantize_results).
    Quantized(QuantizedResults<'a>),
}

/// Memory for quantized results, and the scales that are given.
#[derive(Debug)]
pub struct QuantizedResults<'a> {
    /// Codes and scales, with the lengths of
    /// [`ActivationRecipe::lengths`](crate::ActivationRecipe::lengths).
    pub out: DeviceQuantizedActivations<'a>,
    /// Given scales: none, one, or one per expert.
    pub scales: DeviceScales<'a>,
    /// Rows by expert, if each expert has a given scale or tiles of scales of its own. Results are
    /// sorted by expert then. `None` quantizes the rows of one matrix.
    pub experts: Option<DeviceActivationExperts<'a>>,
}

impl<'a> QuantizedResults<'a> {
    /// Rows of one matrix, under given scales.
    pub const fn new(out: DeviceQuantizedActivations<'a>, scales: DeviceScales<'a>) -> Self {
        Self { out, scales, experts: None }
    }
}

/// Shows the kind of the results.
impl<O> fmt::Debug for DeviceResults<'_, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Values(values) => f.debug_struct("Values").field("len", &values.len()).finish(),
            Self::Quantized(results) => f.debug_tuple("Quantized").field(results).finish(),
        }
    }
}

/// Conversions of memory for values.
macro_rules! values_from {
    ($($memory:ty),+) => {$(
        impl<'a, O> From<$memory> for DeviceResults<'a, O> {
            fn from(memory: $memory) -> Self {
                Self::Values(memory.into())
            }
        }
    )+};
}

values_from! {
    DeviceViewMut<'a, O>, &'a mut DeviceViewMut<'_, O>, &'a mut CudaSlice<O>, CudaViewMut<'a, O>,
    &'a mut CudaViewMut<'_, O>
}

impl<'a, O> From<QuantizedResults<'a>> for DeviceResults<'a, O> {
    fn from(results: QuantizedResults<'a>) -> Self {
        Self::Quantized(results)
    }
}

/// Checks that results of a dtype are quantized by a recipe.
///
/// # Errors
/// [`OperandFault::Results`] for results in f32, and for a recipe with an operation.
pub(in crate::gpu) fn check_results(recipe: &ActivationRecipe, dtype: Dtype) -> Result<()> {
    if dtype == Dtype::F32 {
        return fault(
            "results are rounded to f16 or bf16 before they are quantized; choose one of these dtypes",
        );
    }
    if recipe.operation != RowOperation::None {
        return fault(
            "results are quantized without a row operation; leave it out of the recipe, and pass a gate in the epilogue",
        );
    }
    Ok(())
}

/// An [`OperandFault::Results`].
pub(in crate::gpu) fn fault<T>(what: &'static str) -> Result<T> {
    Err(Error::Operands(OperandFault::Results { what }))
}
