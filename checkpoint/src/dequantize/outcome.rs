//! The outcome of dequantizing one tensor.

use microscale::Report;

use crate::sums::Sums;
use crate::write::busy::Busy;

/// The outcome of one tensor.
#[derive(Default)]
pub(super) struct DequantizedTensor {
    pub(super) dequantized: Sums,
    pub(super) copied: Sums,
    pub(super) nan_scales: u64,
    pub(super) report: Report,
    pub(super) busy: Vec<Busy>,
}
