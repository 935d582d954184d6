//! The matrix of a tensor where a device can work on it, whatever its dtype: brought there once for all that
//! is to be done with it.

use std::borrow::Cow;
use std::time::Instant;

use microscale::device::{Device, Loaded, Origin, QuantizedThere};
use microscale::{Element, ErrorStats, GlobalScale, NonFinite, QuantizeOptions, Recipe, Report};

use crate::conventions::storage::Storage;
use crate::quantize::matrix::Matrix;
use crate::read::values::with_values;

/// The quantized form of a tensor that a file is to hold, and its report.
pub(crate) struct Stored {
    /// The quantized tensor, where the device works.
    pub(crate) result: QuantizedThere,
    pub(crate) report: Report,
    /// The loss of what the file holds.
    pub(crate) errors: ErrorStats,
    /// The global scale in the convention's direction.
    pub(crate) global_scale: Option<GlobalScale>,
    /// When it was quantized, and not measured yet.
    pub(crate) quantized: Instant,
}

/// A matrix that is ready to be worked on.
pub(crate) trait Source {
    /// The amax, as far as the policy about NaN and infinities lets it count.
    ///
    /// # Errors
    /// Those of quantizing, if the policy refuses what there is.
    fn amax(&self, recipe: &Recipe) -> microscale::Result<f32>;

    /// Quantizes to what a file holds, and measures the loss of that.
    ///
    /// # Errors
    /// Those of quantizing.
    fn store(
        &self,
        storage: &Storage,
        recipe: &Recipe,
        importance: Option<&[f32]>,
    ) -> microscale::Result<Stored>;
}

impl Matrix<'_> {
    /// Brings the matrix to a device; `origin` is the tensor's.
    ///
    /// # Errors
    /// Those of [`Device::load`].
    pub(crate) fn load<'s>(
        &'s self,
        device: &'s Device,
        origin: Option<Origin<'_>>,
    ) -> microscale::Result<Box<dyn Source + 's>> {
        // Values that are no view of the file, because they are transposed or were not aligned there, are
        // read already.
        let origin =
            origin.filter(|_| with_values!(&self.values, values => matches!(values, Cow::Borrowed(_))));
        with_values!(&self.values, values => Ok(Box::new(device.load(values, self.shape, origin)?)))
    }
}

impl<T: Element> Source for Loaded<'_, T> {
    fn amax(&self, recipe: &Recipe) -> microscale::Result<f32> {
        let amax = Loaded::amax(self)?;
        if recipe.non_finite == NonFinite::Error && (amax.nan || amax.infinite) {
            // Fails, and knows the place.
            self.quantize(recipe, QuantizeOptions::new())?;
        }
        Ok(amax.under::<T>(recipe.non_finite))
    }

    fn store(
        &self,
        storage: &Storage,
        recipe: &Recipe,
        importance: Option<&[f32]>,
    ) -> microscale::Result<Stored> {
        let options = QuantizeOptions::new();
        let options = importance.map_or(options, |importance| options.importance(importance));
        let result = self.quantize(recipe, options)?;
        let (quantized, report, global_scale) = (Instant::now(), result.report(), result.global_scale());
        let result = match storage.stored_global_scale(global_scale) {
            Some(stored) => result.with_global_scale(stored)?,
            None => result,
        };
        let errors = self.errors(&result)?;
        Ok(Stored { result, report, errors, global_scale, quantized })
    }
}
