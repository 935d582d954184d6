//! What quantizing in device memory takes beside the recipe.

use super::memory::DeviceView;
use super::tensor::DeviceReport;

/// Options for quantizing one matrix in device memory. By default all errors count alike and nothing is
/// reported.
#[derive(Debug, Default)]
pub struct DeviceQuantizeOptions<'a> {
    /// The importance of each column's errors, as of [`crate::QuantizeOptions::importance`]. Numbers in device
    /// memory are not looked at: if one is negative or not finite, the choice of scales means nothing.
    pub importance: Option<DeviceView<'a, f32>>,
    /// A report to add counts to. Without one, nobody learns of values that could not be kept.
    pub report: Option<&'a mut DeviceReport>,
}

impl<'a> DeviceQuantizeOptions<'a> {
    /// The default options.
    pub const fn new() -> Self {
        Self { importance: None, report: None }
    }

    /// Weights errors by column in the search for scales.
    #[must_use]
    pub fn importance(self, columns: impl Into<DeviceView<'a, f32>>) -> Self {
        Self { importance: Some(columns.into()), ..self }
    }

    /// Adds counts of what could not be kept to a report.
    #[must_use]
    pub fn report(self, report: &'a mut DeviceReport) -> Self {
        Self { report: Some(report), ..self }
    }
}
