//! The matrix of a tensor where a device works on it: a GPU has all of it in its memory, the CPU's
//! threads read bands of it.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use microscale::device::{Device, Loaded, Origin, QuantizedOnDevice};
use microscale::{
    Dtype, Element, ErrorStats, GlobalScale, GptqFactor, GptqScales, HadamardWidth, NonFinite, OutputLoss,
    QuantizeOptions, Recipe, Report,
};

use crate::checkpoint_formats::storage::Storage;
use crate::error::Result;
use crate::pipeline::Worker;
use crate::plan::hessians::{Hessians, TensorHessians};
use crate::plan::importance::Columns;
use crate::plan::tensor_recipe::TensorRecipe;
use crate::plan::{Plan, QuantizePlan};
use crate::quantize::matrix;
use crate::quantize::matrix::{Matrix, below};
use crate::read::bands::{band_for, row_bands};
use crate::read::input::Input;
use crate::read::memory::afford;
use crate::read::values::with_values;
use crate::write::busy::Busy;
use crate::write::job::Job;

/// A tensor's matrix, ready to be worked on. `'s` is the lifetime of a copy on the device.
pub(crate) struct Source<'s, 'env> {
    /// The number of the tensor's job.
    pub(crate) job: usize,
    pub(crate) plan: &'env QuantizePlan,
    input: Input<'env>,
    storage: &'static Storage,
    hadamard: Option<HadamardWidth>,
    device: &'env Device,
    /// The rows of each band.
    bands: Arc<[Range<usize>]>,
    importance: Option<Arc<Columns>>,
    /// For GPTQ.
    hessians: Option<(&'env Hessians, Arc<TensorHessians>)>,
    /// All rows, as a single band, where the device has a memory of its own.
    loaded: Option<Box<dyn Band + 's>>,
}

/// The facts of a quantized tensor.
#[derive(Default)]
pub(crate) struct StoredFacts {
    pub(crate) report: Report,
    /// The loss of the stored values.
    pub(crate) errors: ErrorStats,
    /// With Hessians, the error in the layer's outputs. GPTQ leaves the energy 0.
    pub(crate) output: Option<OutputLoss>,
    /// The global scale in the direction of the numerics.
    pub(crate) global_scale: Option<GlobalScale>,
    /// The time spans during which bands were quantized, without measuring the loss.
    pub(crate) busy: Vec<Busy>,
}

/// The facts of a band.
struct BandFacts {
    report: Report,
    /// Partial sums of the loss.
    errors: Vec<ErrorStats>,
    output: Option<OutputLoss>,
    global_scale: Option<GlobalScale>,
    busy: Busy,
}

/// What decides about errors.
#[derive(Clone, Copy)]
enum Weighting<'a> {
    /// Nothing: plain scales, or a search by the squared error.
    Equal,
    /// The importance of columns.
    Columns(&'a [f32]),
    /// The error in the layer's outputs, by GPTQ.
    Gptq(&'a GptqFactor, GptqScales),
    /// Nothing, but the error in the layer's outputs is measured.
    Measured(&'a GptqFactor),
}

/// Rows of a matrix where the device works.
trait Band {
    /// The amax, as far as the policy about NaN and infinities lets it count.
    ///
    /// # Errors
    /// The errors of quantizing, if the policy refuses values that are there.
    fn amax(&self, recipe: &Recipe) -> microscale::Result<f32>;

    /// Quantizes to the stored form, and measures the loss.
    ///
    /// # Errors
    /// The errors of quantizing.
    fn store(
        &self,
        storage: &Storage,
        recipe: &Recipe,
        weighting: Weighting<'_>,
    ) -> microscale::Result<(QuantizedOnDevice, BandFacts)>;
}

/// The outcome of a band: NaN and infinities that the policy refuses are counted in all bands.
type Counted<R> = std::result::Result<R, (microscale::Position, Report)>;

/// The CPU, for threads that help with the bands of another.
static CPU: Device = Device::Cpu;

impl<'s, 'env> Source<'s, 'env> {
    /// The matrix that a device copies to its own memory. `None` if the device works in the host's
    /// memory, and where the rows of each expert have their own importance or Hessian: the device
    /// then gets the rows of one expert at a time.
    ///
    /// # Errors
    /// The errors of [`Matrix::of`].
    pub(crate) fn matrix(
        plans: &'env Plan<'_>,
        plan: &QuantizePlan,
        job: usize,
        device: &Device,
    ) -> Result<Option<Matrix<'env>>> {
        let of_importance = plan.importance.as_ref().and_then(|columns| columns.rows_each());
        let by_expert = of_importance.or(plan.hessians.as_ref().and_then(|hessians| hessians.rows_each()));
        if !device.has_memory() || by_expert.is_some() {
            return Ok(None);
        }
        let TensorRecipe { storage, hadamard, .. } = *plans.recipe_of(plan);
        let tensor = &plans.jobs[job].tensor;
        let (rows, cols) = matrix::size(tensor, storage);
        if storage.transposed || hadamard.is_some() {
            afford(tensor, tensor.name, rows.saturating_mul(cols))?;
        }
        Matrix::of(tensor, storage, 0..rows).map(|matrix| Some(matrix.transformed(hadamard)))
    }

    /// Brings a tensor's [`Self::matrix`] to the device, if there is one.
    ///
    /// # Errors
    /// The errors of [`Device::load`], and [`Error::Memory`](crate::Error::Memory).
    pub(crate) fn new(
        plans: &'env Plan<'_>,
        plan: &'env QuantizePlan,
        job: usize,
        device: &'env Device,
        matrix: Option<&'s Matrix<'_>>,
    ) -> Result<Self>
    where
        'env: 's,
    {
        let TensorRecipe { storage, hadamard, .. } = *plans.recipe_of(plan);
        let checkpoint = plans.checkpoint();
        let Job { tensor, position, .. } = plans.jobs[job];
        let (rows, cols) = matrix::size(&tensor, storage);
        let origin = checkpoint.origin(position);
        let loaded = matrix.map(|matrix| matrix.load(device, origin)).transpose();
        let loaded = loaded.map_err(|error| matrix::error(&tensor, storage, error))?;
        let importance = plan.importance.clone();
        let hessians = plans.hessians.as_ref().zip(plan.hessians.clone());
        let by_expert = hessians.as_ref().and_then(|(_, hessians)| hessians.rows_each());
        let rows_each = importance.as_ref().and_then(|columns| columns.rows_each()).or(by_expert);
        let bands: Arc<[_]> = match loaded {
            Some(_) => std::iter::once(0..rows).collect(),
            None => row_bands(rows, cols, rows_each, band_for(device)).collect(),
        };
        if loaded.is_none() {
            let largest = bands.iter().map(Range::len).max();
            afford(&tensor, tensor.name, largest.unwrap_or(0).saturating_mul(cols))?;
        }
        let input = match device.has_memory() {
            true => Input::mapped(tensor),
            false => Input::new(checkpoint, tensor, position),
        };
        Ok(Self { job, plan, input, storage, hadamard, device, bands, importance, hessians, loaded })
    }

    /// The dtype of the values that are quantized: f32 under a transform.
    pub(crate) fn dtype(&self) -> Option<Dtype> {
        if self.hadamard.is_some() { Some(Dtype::F32) } else { self.input.tensor.values_dtype() }
    }

    /// Returns whether there are several bands, so that a global scale must be found before the
    /// first one is quantized.
    pub(crate) fn in_bands(&self) -> bool {
        self.bands.len() > 1
    }

    /// The amax, as far as the policy about NaN and infinities lets it count.
    ///
    /// # Errors
    /// The errors of quantizing, if the policy refuses values that are there.
    pub(crate) fn amax(&self, recipe: Recipe, worker: &Worker<'_, 'env>) -> Result<f32> {
        let mut most = 0.0f32;
        self.each_band(
            worker,
            move |_, band, _| band.amax(&recipe),
            |amax: f32, _| Ok(amax),
            |amax| {
                most = most.max(amax);
                Ok(())
            },
        )?;
        Ok(most)
    }

    /// Quantizes to the stored form, by importance if the tensor has some and `weighted` is set,
    /// and measures the loss. Each band is handed on with its rows; `fold` gets what `hand_on`
    /// returns, in the order of the bands.
    ///
    /// # Errors
    /// The errors of quantizing, of `hand_on` and of `fold`.
    pub(crate) fn store<H: Send + 'env>(
        &self,
        recipe: Recipe,
        weighted: bool,
        worker: &Worker<'_, 'env>,
        hand_on: impl Fn(Range<usize>, QuantizedOnDevice) -> Result<H> + Send + Sync + 'env,
        mut fold: impl FnMut(H) -> Result<()>,
    ) -> Result<StoredFacts> {
        let mut stored = StoredFacts::default();
        let storage = self.storage;
        let hessians = self.hessians.clone();
        self.each_band(
            worker,
            move |rows, band, importance| {
                let factor = match &hessians {
                    Some((all, hessians)) => all.factor(hessians, rows.start)?,
                    None => None,
                };
                let weighting = match (&factor, &hessians, importance) {
                    (Some(factor), Some((all, _)), _) if weighted => Weighting::Gptq(factor, all.gptq.scales),
                    (Some(factor), ..) => Weighting::Measured(factor),
                    (None, _, Some(importance)) if weighted => Weighting::Columns(importance),
                    _ => Weighting::Equal,
                };
                band.store(storage, &recipe, weighting)
            },
            move |(quantized, mut facts): (_, BandFacts), rows| {
                facts.report = facts.report.map_position(|at| below(at, rows.start));
                Ok((facts, hand_on(rows, quantized)?))
            },
            |(facts, handed_on)| {
                stored.report += facts.report;
                stored.errors = stored.errors.and_parts(&facts.errors);
                if let Some(OutputLoss { error, energy }) = facts.output {
                    let sum = stored.output.get_or_insert_default();
                    *sum = OutputLoss { error: sum.error + error, energy: sum.energy + energy };
                }
                stored.global_scale = facts.global_scale;
                stored.busy.push(facts.busy);
                fold(handed_on)
            },
        )?;
        Ok(stored)
    }

    /// Drops the factors of the Hessians unless other tensors need them.
    pub(crate) fn release(&self) {
        if let Some((all, hessians)) = &self.hessians {
            all.release(hessians);
        }
    }

    /// Calls `work` with each band and its importance, `then` with what that returns and the rows,
    /// and `fold` with the results in the order of the bands. NaN and infinities that are refused
    /// are counted in all bands.
    fn each_band<Q, R: Send + 'env>(
        &self,
        worker: &Worker<'_, 'env>,
        work: impl Fn(Range<usize>, &dyn Band, Option<&[f32]>) -> microscale::Result<Q> + Send + Sync + 'env,
        then: impl Fn(Q, Range<usize>) -> Result<R> + Send + Sync + 'env,
        mut fold: impl FnMut(R) -> Result<()>,
    ) -> Result<()> {
        let mut refused: Option<(microscale::Position, Report)> = None;
        let mut folded = |result: Counted<R>| match result {
            Ok(result) => fold(result),
            Err((first, report)) => {
                refused.get_or_insert((first, Report::default())).1 += report;
                Ok(())
            }
        };
        let (tensor, storage, hadamard) = (self.input.tensor, self.storage, self.hadamard);
        let finish = move |result: microscale::Result<Q>, rows: Range<usize>| -> Result<Counted<R>> {
            match result.map_err(|error| error.map_position(|at| below(at, rows.start))) {
                Ok(result) => then(result, rows).map(Ok),
                Err(microscale::Error::NonFinite { first, report }) => Ok(Err((first, report))),
                Err(error) => Err(matrix::error(&tensor, storage, error)),
            }
        };
        let importance = self.importance.clone();
        match &self.loaded {
            Some(band) => {
                worker.go_on()?;
                let rows = self.bands[0].clone();
                let columns = importance.as_ref().map(|columns| columns.of(&rows));
                folded(finish(work(rows.clone(), &**band, columns), rows)?)?;
            }
            None => {
                let (input, bands) = (self.input.clone(), self.bands.clone());
                let device = if self.device.has_memory() { self.device } else { &CPU };
                let band = move |number: usize| {
                    let rows = bands[number].clone();
                    let columns = importance.as_ref().map(|columns| columns.of(&rows));
                    let result = Matrix::with_rows(&input, storage, rows.clone(), |matrix| {
                        let matrix = matrix.transformed(hadamard);
                        matrix.load(device, None).and_then(|band| work(rows.clone(), &*band, columns))
                    });
                    finish(result?, rows)
                };
                worker.each_band(self.bands.len(), band, folded)?;
            }
        }
        match refused {
            None => Ok(()),
            Some((first, report)) => {
                Err(matrix::error(&tensor, storage, microscale::Error::NonFinite { first, report }))
            }
        }
    }
}

impl Matrix<'_> {
    /// Brings the matrix to a device; `origin` is the tensor's.
    ///
    /// # Errors
    /// The errors of [`Device::load`].
    fn load<'s>(
        &'s self,
        device: &'s Device,
        origin: Option<Origin<'_>>,
    ) -> microscale::Result<Box<dyn Band + 's>> {
        // Values that are not a view of the file, because they are transposed or unaligned there,
        // are in memory already.
        let origin =
            origin.filter(|_| with_values!(&self.values, values => matches!(values, Cow::Borrowed(_))));
        with_values!(&self.values, values => Ok(Box::new(device.load(values, self.shape, origin)?)))
    }
}

impl<T: Element> Band for Loaded<'_, T> {
    fn amax(&self, recipe: &Recipe) -> microscale::Result<f32> {
        let amax = Loaded::amax(self)?;
        if recipe.non_finite == NonFinite::Error && (amax.nan || amax.infinite) {
            // This fails, and the error has the position.
            self.quantize(recipe, QuantizeOptions::new())?;
        }
        Ok(amax.under::<T>(recipe.non_finite))
    }

    fn store(
        &self,
        storage: &Storage,
        recipe: &Recipe,
        weighting: Weighting<'_>,
    ) -> microscale::Result<(QuantizedOnDevice, BandFacts)> {
        let from = Instant::now();
        let options = QuantizeOptions::new();
        let (result, output) = match weighting {
            Weighting::Equal => (self.quantize(recipe, options)?, None),
            Weighting::Columns(columns) => (self.quantize(recipe, options.importance(columns))?, None),
            Weighting::Gptq(factor, scales) => {
                let (result, error) = self.quantize_gptq(recipe, factor, scales)?;
                (result, Some(OutputLoss { error, energy: 0.0 }))
            }
            Weighting::Measured(factor) => {
                let result = self.quantize(recipe, options)?;
                let output = self.output_loss(&result, factor)?;
                (result, Some(output))
            }
        };
        let busy = Busy { from, until: Instant::now() };
        let (report, global_scale) = (result.report(), result.global_scale());
        let result = match storage.stored_global_scale(global_scale) {
            Some(global_scale) => result.with_global_scale(global_scale)?,
            None => result,
        };
        let errors = self.errors(&result)?;
        Ok((result, BandFacts { report, errors, output, global_scale, busy }))
    }
}
