//! Activations in device memory: the rows to quantize, and the output.

use crate::gpu::memory::view::{DeviceView, DeviceViewMut};
use crate::shape::Shape;

/// Rows in device memory to quantize: [`ActivationInput`](crate::ActivationInput) of a GPU.
#[derive(Debug)]
pub struct DeviceActivations<'a, T> {
    /// The values.
    pub values: DeviceView<'a, T>,
    /// Their shape: rows of K columns, or of 2·K for a gate.
    pub shape: Shape,
    /// Added before RMSNorm. The sum, rounded to T, replaces it. Rows without gaps.
    pub residual: Option<DeviceViewMut<'a, T>>,
    /// RMSNorm's weights, one per column. None stands for ones.
    pub weights: Option<DeviceView<'a, T>>,
    /// Given scales: none, one, or one per expert.
    pub scales: DeviceScales<'a>,
    /// Rows by expert, or `None` for a single matrix.
    pub experts: Option<DeviceActivationExperts<'a>>,
}

/// Given scales, on the host or in device memory.
///
/// The kernel does not check scales in device memory.
#[derive(Clone, Copy, Debug)]
pub enum DeviceScales<'a> {
    /// None.
    None,
    /// A scale on the host.
    Host(f32),
    /// A scale in device memory, or one per expert.
    Device(DeviceView<'a, f32>),
}

/// Rows by expert, whose numbers only the GPU knows.
#[derive(Clone, Copy, Debug)]
pub enum DeviceActivationExperts<'a> {
    /// Rows sorted by expert: as [`ActivationExperts::Sorted`](crate::ActivationExperts::Sorted),
    /// with `[experts + 1]` offsets each. Rows after the last expert's are not quantized.
    Sorted {
        /// Each expert's first row, and the number of rows at the end.
        offsets: DeviceView<'a, u32>,
        /// The same for rows of scales.
        scale_offsets: DeviceView<'a, u32>,
        /// Rows of scales that the output has room for. Those without values become zeros.
        scale_rows: usize,
    },
    /// `[experts, rows, columns]`, where each expert's first rows exist.
    Masked {
        /// Each expert's number of rows that exist: `[experts]`.
        counts: DeviceView<'a, u32>,
    },
}

/// The parts of [`QuantizedActivations`](crate::QuantizedActivations) in device memory.
///
/// [`ActivationRecipe::lengths`](crate::ActivationRecipe::lengths) has their lengths. Codes start
/// on 16 bytes.
#[derive(Debug)]
pub struct DeviceQuantizedActivations<'a> {
    /// Codes.
    pub codes: DeviceViewMut<'a, u8>,
    /// Block scales, with padding. Empty for FP8.
    pub scales: DeviceViewMut<'a, u8>,
    /// Computed scales that multiply codes.
    pub f32_scales: DeviceViewMut<'a, f32>,
}

impl<'a, T> DeviceActivations<'a, T> {
    /// Rows of one matrix, without residual, weights or given scales.
    pub fn new(values: impl Into<DeviceView<'a, T>>, shape: Shape) -> Self {
        let values = values.into();
        Self { values, shape, residual: None, weights: None, scales: DeviceScales::None, experts: None }
    }
}

impl DeviceActivationExperts<'_> {
    /// The number of experts.
    pub(in crate::gpu) fn count(&self) -> usize {
        match self {
            Self::Sorted { offsets, .. } => offsets.len().saturating_sub(1),
            Self::Masked { counts } => counts.len(),
        }
    }
}
