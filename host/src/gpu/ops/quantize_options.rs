//! Options for quantizing in device memory.

use microscale_formats::nvfp4::Direction;

use crate::gpu::memory::tensor::DeviceReport;
use crate::gpu::memory::view::DeviceView;

/// Options for quantizing one matrix in device memory.
///
/// By default all errors have the same weight and nothing is reported.
#[derive(Debug, Default)]
pub struct DeviceQuantizeOptions<'a> {
    /// The importance of each column's errors, as in [`crate::QuantizeOptions::importance`].
    ///
    /// The numbers are not checked: if one is negative or not finite, the choice of scales is
    /// unspecified.
    pub importance: Option<DeviceView<'a, f32>>,
    /// The amax to compute the global scale from, for [`crate::Global::FromAmax`].
    ///
    /// It can cover several layers that share a global scale. Without one, the matrix' own amax is
    /// searched.
    pub amax: Option<DeviceView<'a, u32>>,
    /// The finished global scale, for [`crate::Global::FromAmax`]. It overrides any amax.
    ///
    /// Its direction must match the numerics. The number is not checked: if
    /// [`crate::GlobalScale::in_range`] would refuse it, codes and scales are unspecified.
    pub global_scale: Option<(Direction, DeviceView<'a, f32>)>,
    /// The report to add counts to. Without one, values that are not representable go unreported.
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

    /// Uses an amax in device memory instead of the matrix' own.
    ///
    /// The amax is a [`DeviceAmax`](crate::gpu::DeviceAmax) or
    /// [`DeviceAmax::WORDS`](crate::gpu::DeviceAmax::WORDS) words.
    /// [`Gpu::amax_on`](crate::gpu::Gpu::amax_on) of each layer that shares a global scale makes
    /// it, without waiting.
    #[must_use]
    pub fn amax(self, amax: impl Into<DeviceView<'a, u32>>) -> Self {
        Self { amax: Some(amax.into()), ..self }
    }

    /// Uses a global scale in device memory, in this direction.
    ///
    /// The scale can come from a checkpoint or a calibration, and the host need not know it. The
    /// numerics' direction is [`crate::formats::nvfp4::Arithmetic::direction`].
    #[must_use]
    pub fn global_scale(self, direction: Direction, value: impl Into<DeviceView<'a, f32>>) -> Self {
        Self { global_scale: Some((direction, value.into())), ..self }
    }

    /// Adds counts of values that are not representable to a report.
    #[must_use]
    pub fn report(self, report: &'a mut DeviceReport) -> Self {
        Self { report: Some(report), ..self }
    }
}
