//! GPTQ's options and results. The functions are in `cpu` and `gpu`.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Result;
use crate::tensor::{Quantized, QuantizedTensor};

/// The default of [`GptqOptions::damping`].
pub const GPTQ_DAMPING: f64 = 0.01;

/// GPTQ's order of columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GptqOrder {
    /// Columns with large inputs first.
    ///
    /// Blocks are sorted by the sum of their diagonal entries of the Hessian, descending, and
    /// columns within a block by their entry. Blocks stay whole, because scales belong to blocks.
    /// The output has the original order.
    #[default]
    Activation,
    /// Columns with large inputs first, one by one, for static scales only.
    ActivationColumns,
    /// Columns from first to last.
    Natural,
}

/// The source of block scales in GPTQ. [`Recipe::search`](crate::Recipe::search) applies to both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GptqScales {
    /// Each scale is chosen when its block is quantized, for the block's updated weights.
    ///
    /// A search compares scales by their error in the layer's output, given that all later columns
    /// compensate for it as well as they can.
    #[default]
    InLoop,
    /// The scales of plain quantization with the same recipe, chosen before the loop.
    Static,
}

/// Options of [`GptqFactor::new`](crate::GptqFactor::new).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct GptqOptions {
    /// Added to the Hessian's diagonal, as a part of the mean diagonal entry of active columns.
    pub damping: f64,
    /// The order of columns.
    pub order: GptqOrder,
}

impl GptqOptions {
    /// Returns the defaults: 1 % damping, activation order.
    pub const fn new() -> Self {
        Self { damping: GPTQ_DAMPING, order: GptqOrder::Activation }
    }

    /// Sets the damping.
    #[must_use]
    pub const fn damping(self, damping: f64) -> Self {
        Self { damping, ..self }
    }

    /// Sets the order of columns.
    #[must_use]
    pub const fn order(self, order: GptqOrder) -> Self {
        Self { order, ..self }
    }
}

impl Default for GptqOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// A matrix that GPTQ quantized.
#[derive(Clone, Debug, PartialEq)]
pub struct GptqQuantized {
    /// Codes and scales.
    pub tensor: QuantizedTensor,
    /// Counts of lossy events, of the updated blocks.
    pub report: crate::Report,
    /// tr(R·H·Rᵀ) of the damped Hessian H, in its unit, where R is the dequantized matrix minus the
    /// original.
    ///
    /// It is the sum of all errors of the loop, which are f32, in f64.
    pub output_error: f64,
}

impl From<GptqQuantized> for Quantized {
    fn from(GptqQuantized { tensor, report, .. }: GptqQuantized) -> Self {
        Self { tensor, report }
    }
}

/// The error of a quantized matrix in the outputs of its layer.
///
/// Both numbers are for the damped Hessian, in its unit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OutputLoss {
    /// tr(R·H·Rᵀ), where R is the dequantized matrix minus the original.
    pub error: f64,
    /// tr(W·H·Wᵀ) of the original matrix W.
    pub energy: f64,
}

impl OutputLoss {
    /// Returns error over energy, or 0 if there is no error.
    pub fn relative(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.energy }
    }
}

/// Copies of a factor in the memories of devices, of any type.
#[derive(Default)]
pub(crate) struct Copies(Mutex<Vec<Arc<dyn Any + Send + Sync>>>);

impl fmt::Debug for Copies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copies").finish_non_exhaustive()
    }
}

impl Copies {
    /// Returns the copy of this type that `is_wanted`, made by `make` if there is none. Threads
    /// that want the same copy wait for it.
    ///
    /// # Errors
    /// The errors of `make`.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "GPUs have copies"))]
    pub(crate) fn get_or_make<T: Any + Send + Sync>(
        &self,
        is_wanted: impl Fn(&T) -> bool,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<Arc<T>> {
        // A thread that panicked left no copy.
        let mut copies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_type = copies.iter().filter_map(|copy| copy.clone().downcast::<T>().ok());
        if let Some(copy) = of_type.into_iter().find(|copy| is_wanted(copy)) {
            return Ok(copy);
        }
        let made = Arc::new(make()?);
        copies.push(made.clone());
        Ok(made)
    }
}
