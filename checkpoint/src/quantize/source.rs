//! The matrix of a tensor where a device can work on it, whatever its dtype: brought there once for all that
//! is to be done with it; or band by band, if the device works in the host's memory.

use std::borrow::Cow;
use std::ops::Range;
use std::time::Instant;

use microscale::device::{Device, Loaded, Origin, QuantizedThere};
use microscale::{Element, ErrorStats, GlobalScale, NonFinite, Position, QuantizeOptions, Recipe, Report};

use crate::checkpoint_formats::storage::Storage;
use crate::error::Result;
use crate::plan::importance::Columns;
use crate::quantize::matrix;
use crate::quantize::matrix::Matrix;
use crate::read::bands::row_bands;
use crate::read::memory::afford;
use crate::read::tensor::Tensor;
use crate::read::values::with_values;
use crate::write::busy::Busy;

/// A tensor's matrix, ready to be worked on.
pub(crate) struct Source<'s> {
    tensor: Tensor<'s>,
    storage: &'static Storage,
    device: &'s Device,
    /// The rows of each band.
    bands: Vec<Range<usize>>,
    /// All rows, as a single band, where the device has a memory of its own.
    there: Option<Box<dyn Band + 's>>,
}

/// The facts of a tensor that was quantized to what a file holds.
pub(crate) struct Stored {
    pub(crate) report: Report,
    /// The loss of what the file holds.
    pub(crate) errors: ErrorStats,
    /// The global scale in the convention's direction.
    pub(crate) global_scale: Option<GlobalScale>,
    /// The times in which it was quantized, without those in which it was measured.
    pub(crate) busy: Vec<Busy>,
}

/// Rows of a matrix where the device works.
trait Band {
    /// The amax, as far as the policy about NaN and infinities lets it count.
    ///
    /// # Errors
    /// The errors of quantizing, if the policy refuses what there is.
    fn amax(&self, recipe: &Recipe) -> microscale::Result<f32>;

    /// Quantizes to what a file holds, and adds report and loss to those of the rows before.
    ///
    /// # Errors
    /// Those of quantizing.
    fn store(
        &self,
        storage: &Storage,
        recipe: &Recipe,
        importance: Option<&[f32]>,
        stored: &mut Stored,
    ) -> microscale::Result<QuantizedThere>;
}

impl<'s> Source<'s> {
    /// The matrix that a device copies to its own memory; `None` if it works in the host's, and where errors are weighted by
    /// rows, `rows_each` of which are then brought to it at a time.
    ///
    /// # Errors
    /// The errors of [`Matrix::of`].
    pub(crate) fn matrix<'a>(
        tensor: &Tensor<'a>,
        storage: &Storage,
        device: &Device,
        rows_each: Option<usize>,
    ) -> Result<Option<Matrix<'a>>> {
        if !device.has_memory() || rows_each.is_some() {
            return Ok(None);
        }
        let (rows, cols) = matrix::size(tensor, storage);
        if storage.transposed {
            afford(tensor, tensor.name, rows.saturating_mul(cols))?;
        }
        Matrix::of(tensor, storage, 0..rows).map(Some)
    }

    /// Brings a tensor's [`Self::matrix`] to the device, if there is one; `origin` is the tensor's. Errors are weighted alike in
    /// `rows_each` rows, or in all.
    ///
    /// # Errors
    /// The errors of [`Device::load`], and [`Error::Memory`](crate::Error::Memory).
    pub(crate) fn new(
        tensor: Tensor<'s>,
        storage: &'static Storage,
        device: &'s Device,
        matrix: Option<&'s Matrix<'_>>,
        origin: Option<Origin<'_>>,
        rows_each: Option<usize>,
    ) -> Result<Self> {
        let (rows, cols) = matrix::size(&tensor, storage);
        let there = matrix.map(|matrix| matrix.load(device, origin)).transpose();
        let there = there.map_err(|error| matrix::error(&tensor, storage, error))?;
        let bands: Vec<_> = match there {
            Some(_) => std::iter::once(0..rows).collect(),
            None => row_bands(rows, cols, rows_each).collect(),
        };
        if there.is_none() {
            let largest = bands.iter().map(Range::len).max();
            afford(&tensor, tensor.name, largest.unwrap_or(0).saturating_mul(cols))?;
        }
        Ok(Self { tensor, storage, device, bands, there })
    }

    /// Returns whether there are several bands, so that a global scale must be found before the first one is
    /// quantized.
    pub(crate) fn in_bands(&self) -> bool {
        self.bands.len() > 1
    }

    /// The amax, as far as the policy about NaN and infinities lets it count.
    ///
    /// # Errors
    /// The errors of quantizing, if the policy refuses what there is.
    pub(crate) fn amax(&self, recipe: &Recipe) -> Result<f32> {
        let mut most = 0.0f32;
        self.each_band(|_, band| {
            most = most.max(band.amax(recipe)?);
            Ok(Ok(()))
        })?;
        Ok(most)
    }

    /// Quantizes to what a file holds, measures the loss of that, and hands each band on with its rows.
    ///
    /// # Errors
    /// The errors of quantizing, and of `hand_on`.
    pub(crate) fn store(
        &self,
        recipe: &Recipe,
        importance: Option<Columns<'_>>,
        mut hand_on: impl FnMut(Range<usize>, QuantizedThere) -> Result<()>,
    ) -> Result<Stored> {
        let errors = ErrorStats::default();
        let mut stored = Stored { report: Report::default(), errors, global_scale: None, busy: Vec::new() };
        self.each_band(|rows, band| {
            let importance = importance.map(|columns| columns.of(&rows));
            let quantized = band.store(self.storage, recipe, importance, &mut stored)?;
            Ok(hand_on(rows, quantized))
        })?;
        Ok(stored)
    }

    /// Does something with each band. NaN and infinities that are refused are counted in all of them.
    fn each_band(
        &self,
        mut what: impl FnMut(Range<usize>, &dyn Band) -> microscale::Result<Result<()>>,
    ) -> Result<()> {
        let failed = |error| Err(matrix::error(&self.tensor, self.storage, error));
        let mut refused: Option<(Position, Report)> = None;
        for rows in &self.bands {
            let done = match &self.there {
                Some(band) => what(rows.clone(), &**band),
                None => {
                    let matrix = Matrix::of(&self.tensor, self.storage, rows.clone())?;
                    matrix.load(self.device, None).and_then(|band| what(rows.clone(), &*band))
                }
            };
            match done {
                Ok(done) => done?,
                Err(microscale::Error::NonFinite { first, report }) => {
                    let first = Position { row: first.row + rows.start, ..first };
                    refused.get_or_insert((first, Report::default())).1 += report;
                }
                Err(error) => return failed(error),
            }
        }
        match refused {
            None => Ok(()),
            Some((first, report)) => failed(microscale::Error::NonFinite { first, report }),
        }
    }
}

impl Matrix<'_> {
    /// Brings the matrix to a device; `origin` is the tensor's.
    ///
    /// # Errors
    /// Those of [`Device::load`].
    fn load<'s>(
        &'s self,
        device: &'s Device,
        origin: Option<Origin<'_>>,
    ) -> microscale::Result<Box<dyn Band + 's>> {
        // Values that are no view of the file, because they are transposed or were not aligned there, are
        // read already.
        let origin =
            origin.filter(|_| with_values!(&self.values, values => matches!(values, Cow::Borrowed(_))));
        with_values!(&self.values, values => Ok(Box::new(device.load(values, self.shape, origin)?)))
    }
}

impl<T: Element> Band for Loaded<'_, T> {
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
        stored: &mut Stored,
    ) -> microscale::Result<QuantizedThere> {
        let from = Instant::now();
        let options = QuantizeOptions::new();
        let options = importance.map_or(options, |importance| options.importance(importance));
        let result = self.quantize(recipe, options)?;
        stored.busy.push(Busy { from, until: Instant::now() });
        stored.report += result.report();
        stored.global_scale = result.global_scale();
        let result = match storage.stored_global_scale(stored.global_scale) {
            Some(global_scale) => result.with_global_scale(global_scale)?,
            None => result,
        };
        stored.errors = self.errors(&result, stored.errors)?;
        Ok(result)
    }
}
