//! What quantizing in device memory takes beside the recipe.

use microscale_formats::nvfp4::Direction;

use crate::gpu::memory::tensor::DeviceReport;
use crate::gpu::memory::view::DeviceView;

/// Options for quantizing one matrix in device memory. By default all errors count alike and nothing is
/// reported.
#[derive(Debug, Default)]
pub struct DeviceQuantizeOptions<'a> {
    /// The importance of each column's errors, as of [`crate::QuantizeOptions::importance`]. Numbers in device
    /// memory are not looked at: if one is negative or not finite, the choice of scales means nothing.
    pub importance: Option<DeviceView<'a, f32>>,
    /// The amax from which a global scale is computed, if the recipe has it computed ([`crate::Global::FromAmax`]):
    /// that of several layers, for instance, which share a global scale. Without one, the matrix' own is searched.
    pub amax: Option<DeviceView<'a, u32>>,
    /// The global scale, finished, if the recipe has it computed: it takes the place of any amax. Its direction must be the convention's.
    /// The number in device memory is not looked at: if it is none that [`crate::GlobalScale::in_range`] accepts, codes and scales mean
    /// nothing.
    pub global_scale: Option<(Direction, DeviceView<'a, f32>)>,
    /// A report to add counts to. Without one, nobody learns of values that could not be kept.
    pub report: Option<&'a mut DeviceReport>,
}

impl<'a> DeviceQuantizeOptions<'a> {
    /// The default options.
    pub const fn new() -> Self {
        Self { importance: None, amax: None, global_scale: None, report: None }
    }

    /// Weights errors by column in the search for scales.
    #[must_use]
    pub fn importance(self, columns: impl Into<DeviceView<'a, f32>>) -> Self {
        Self { importance: Some(columns.into()), ..self }
    }

    /// Takes an amax that is in device memory, a [`DeviceAmax`](super::DeviceAmax) or as many words, in place of the matrix'
    /// own: [`super::Gpu::amax_on`] of each layer that shares a global scale makes one, and nobody waits for it.
    #[must_use]
    pub fn amax(self, amax: impl Into<DeviceView<'a, u32>>) -> Self {
        Self { amax: Some(amax.into()), ..self }
    }

    /// Quantizes under a global scale that is in device memory, written down in this direction: one of a checkpoint, or of a calibration,
    /// that no host has seen. The convention's direction is [`crate::formats::nvfp4::Arithmetic::direction`].
    #[must_use]
    pub fn global_scale(self, direction: Direction, value: impl Into<DeviceView<'a, f32>>) -> Self {
        Self { global_scale: Some((direction, value.into())), ..self }
    }

    /// Adds counts of what could not be kept to a report.
    #[must_use]
    pub fn report(self, report: &'a mut DeviceReport) -> Self {
        Self { report: Some(report), ..self }
    }
}
