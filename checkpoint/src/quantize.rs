//! Quantizing a checkpoint: carrying out a [`Plan`].
//!
//! | file | contents |
//! |---|---|
//! | `matrix`, `source` | a tensor as the matrix that is quantized; that matrix where a device works on it |
//! | `chooser` | the global scale of each tensor: which layers share one, and which number it is |
//! | `summary` | the outcome, for every tensor and in total |
//! | `details` | distributions and worst blocks, for reports |

pub(crate) mod chooser;
pub(crate) mod details;
pub(crate) mod matrix;
pub(crate) mod source;
pub(crate) mod summary;

use std::ops::{ControlFlow, Range};
use std::sync::Mutex;
use std::time::Instant;

use half::bf16;
use microscale::device::{Device, Part, QuantizedOnDevice};
use microscale::{QuantizedTensor, Recipe, Report, Search, check_search};

use crate::checkpoint_formats::hadamard;
use crate::checkpoint_formats::storage::Storage;
use crate::checkpoint_formats::tiles::Tiles;
use crate::error::plan::{PlanError, instead};
use crate::error::{Error, Result};
use crate::gguf::metadata::FileType;
use crate::pipeline::{Worker, lock};
use crate::plan::tensor_recipe::TensorRecipe;
use crate::plan::{CopyPlan, Plan, QuantizePlan, TensorPlan};
use crate::quantize::chooser::Chooser;
use crate::quantize::details::{BandDetails, Details};
use crate::quantize::matrix::Matrix;
use crate::quantize::source::Source;
use crate::quantize::summary::{Outcome, Plain, Summary, TensorSummary};
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::input::Input;
use crate::read::tensor::Tensor;
use crate::read::values::with_values;
use crate::reason::Reason;
use crate::write::busy::Busy;
use crate::write::copy::copy;
use crate::write::job::Job;
use crate::write::narrowed::check;
use crate::write::others::Skipped;
use crate::write::sink::Sink;
use crate::write::values::{write_q8_0, write_values};
use crate::write::work::Rewrite;

/// The execution of a plan, tensor by tensor.
pub(crate) struct Quantizer<'a> {
    plan: &'a Plan<'a>,
    chooser: Chooser<'a>,
    /// Details of the tensors that are done.
    details: Mutex<Details>,
}

/// The outcome of a tensor.
pub(crate) struct QuantizedJob {
    pub(crate) summary: TensorSummary,
    /// Blocks whose scales were compared with all others.
    checked_blocks: u64,
    /// The time spans during which it was quantized.
    busy: Vec<Busy>,
}

/// The outcome of writing a band.
#[derive(Default)]
struct WrittenBand {
    bytes: u64,
    checked_blocks: u64,
    details: Option<BandDetails>,
    /// The block scales in linear order, if all of a tensor's are written together.
    scales: Option<Vec<u8>>,
}

impl<'a> Quantizer<'a> {
    /// # Errors
    /// [`PlanError::NothingToQuantize`](crate::PlanError::NothingToQuantize).
    pub(crate) fn new(plan: &'a Plan<'a>) -> Result<Self> {
        if plan.count_quantized() == 0 {
            let copied = plan.jobs.iter().filter_map(|job| Some((job.tensor.elements(), job.plan.copied()?)));
            let reason = Reason::of_largest(copied);
            let path = plan.checkpoint().path.clone();
            return Err(Error::Plan(PlanError::NothingToQuantize {
                path,
                advice: instead(reason.as_deref()),
            }));
        }
        Ok(Self { plan, chooser: Chooser::new(plan), details: Mutex::default() })
    }

    /// Summarizes the work since `start`.
    pub(crate) fn summary(
        &self,
        device: &Device,
        done: Vec<QuantizedJob>,
        skipped: Vec<Skipped>,
        start: Instant,
    ) -> Summary {
        let checked_blocks = done.iter().map(|done| done.checked_blocks).sum();
        let quantize_seconds = Busy::seconds(done.iter().flat_map(|done| done.busy.iter().copied()));
        Summary {
            recipes: self.plan.recipes(),
            device: device.to_string(),
            tensors: done.into_iter().map(|done| done.summary).collect(),
            skipped,
            seconds: start.elapsed().as_secs_f64(),
            quantize_seconds,
            checked_blocks: self.plan.check_search.then_some(checked_blocks),
            part: None,
            details: std::mem::take(&mut *lock(&self.details)),
        }
    }

    /// Writes a tensor that is not quantized.
    fn copy<'env>(
        &'env self,
        job: &Job<'env, TensorPlan>,
        plan: &CopyPlan,
        worker: &Worker<'_, 'env>,
        sink: &Sink,
    ) -> Result<QuantizedJob> {
        let CopyPlan { reason, non_finite } = plan;
        let (tensor, input) = (&job.tensor, Input::new(self.checkpoint(), job.tensor, job.position));
        let (bytes_after, report) = match (reason, tensor.scaling) {
            (Reason::InQ8_0(_), _) => (write_q8_0(&input, worker, sink)?, Report::default()),
            (_, Some(_)) => write_values::<bf16>(&input, *non_finite, worker, sink)?,
            (_, None) => (copy(&input, worker, sink)?.bytes_after, Report::default()),
        };
        check::<bf16>(tensor, tensor.name, &report, *non_finite, true)?;
        let outcome = Outcome::Copied(reason.clone());
        let summary = TensorSummary { report, ..TensorSummary::new(tensor, bytes_after, outcome) };
        Ok(QuantizedJob { summary, checked_blocks: 0, busy: Vec::new() })
    }

    /// Quantizes a tensor, writes it, and measures its loss, after a search also the loss without
    /// it.
    fn quantize<'env>(
        &'env self,
        source: &Source<'_, 'env>,
        sources: &[Source<'_, 'env>],
        worker: &Worker<'_, 'env>,
        sink: &Sink,
    ) -> Result<QuantizedJob> {
        let plan = source.plan;
        let (job, used) = (&self.plan.jobs[source.job], self.plan.recipe_of(plan));
        let (tensor, storage) = (&job.tensor, used.storage);
        let from = Instant::now();
        let chosen = self.chooser.recipes_for(source, sources, worker)?;
        let mut busy = vec![Busy { from, until: Instant::now() }];
        let mut tiles = storage.tiles(tensor.shape);
        let gathers_scales = tiles.is_some();
        let (mut checked_blocks, mut details) = (0, None::<BandDetails>);
        let (recipe, into) = (chosen.recipe, sink.clone());
        let write = move |rows, quantized| {
            self.write_band(job, plan, &recipe, rows, quantized, gathers_scales, &into)
        };
        let mut written = 0;
        let stored = source.store(chosen.recipe, true, worker, write, |band: WrittenBand| {
            written += band.bytes;
            checked_blocks += band.checked_blocks;
            if let Some((tiles, scales)) = tiles.as_mut().zip(band.scales) {
                tiles.extend(&scales);
            }
            if let Some(of_band) = band.details {
                match &mut details {
                    None => details = Some(of_band),
                    Some(earlier) => earlier.add(of_band, self.plan.worst_blocks.unwrap_or(0)),
                }
            }
            Ok(())
        })?;
        busy.extend(stored.busy);
        written += write_others(job, plan, used, stored.global_scale, tiles, sink)?;
        let plain = match (used.recipe.search, &plan.hessians) {
            (Search::None, None) => None,
            _ => Some(source.store(chosen.plain, false, worker, |_, _| Ok(()), Ok)?),
        };
        source.release();
        let plain = plain.map(|plain| {
            Box::new(Plain { errors: plain.errors, output: plain.output, global_scale: plain.global_scale })
        });
        let outcome = Outcome::Quantized {
            format: used.format(),
            report: stored.report.map_position(|at| matrix::position(tensor, storage, at)),
            errors: stored.errors,
            output_error: stored.output.map(|output| output.error),
            global_scale: stored.global_scale,
            seconds: Busy::seconds(busy.iter().copied()),
            plain,
        };
        if let Some((details, most)) = details.zip(self.plan.worst_blocks) {
            lock(&self.details).add(source.job, tensor.name, details, most);
        }
        let recipe = self.plan.number_of(plan);
        let summary = TensorSummary { recipe, ..TensorSummary::new(tensor, written, outcome) };
        Ok(QuantizedJob { summary, checked_blocks, busy })
    }

    /// Writes codes and scales of some rows, and collects the details that are wanted.
    #[expect(clippy::too_many_arguments, reason = "a band's facts, from the closure that threads share")]
    fn write_band(
        &self,
        job: &Job<'_, TensorPlan>,
        plan: &QuantizePlan,
        recipe: &Recipe,
        rows: Range<usize>,
        quantized: QuantizedOnDevice,
        gathers_scales: bool,
        sink: &Sink,
    ) -> Result<WrittenBand> {
        let (tensor, used) = (&job.tensor, self.plan.recipe_of(plan));
        let storage = used.storage;
        let check_search = self.plan.check_search && recipe.search == Search::Full;
        let as_stored = storage.is_linear() && !check_search && self.plan.worst_blocks.is_none();
        if let Some(bytes) = as_stored.then(|| write_from_device(tensor, storage, &quantized, sink)).flatten()
        {
            return Ok(WrittenBand { bytes: bytes?, ..WrittenBand::default() });
        }
        let quantized = quantized.into_host().map_err(|error| matrix::error(tensor, storage, error))?;
        let mut written = WrittenBand::default();
        if check_search {
            written.checked_blocks = check_scales(tensor, plan, used, recipe, rows.clone(), &quantized)?;
        }
        if let Some(most) = self.plan.worst_blocks {
            written.details = Some(BandDetails::of(tensor, used, rows.clone(), &quantized, most)?);
        }
        let blocks = (quantized.rows() * quantized.blocks_per_row()) as u64;
        let before = (rows.start * quantized.blocks_per_row()) as u64;
        storage.check_scales(tensor, quantized.scales(), before as usize)?;
        let mut parts = storage.block_parts(quantized, &mut None);
        if gathers_scales {
            written.scales = parts.pop();
        }
        for (output, data) in parts.into_iter().enumerate() {
            // All blocks of a part have the same number of bytes.
            let each = (data.len() as u64).checked_div(blocks).unwrap_or(0);
            written.bytes += data.len() as u64;
            sink.put(output, before * each, data)?;
        }
        Ok(written)
    }
}

/// Writes all codes and scales of a tensor from the pinned memory of a device, without another
/// copy. Returns `None` if the device has no memory of its own.
fn write_from_device(
    tensor: &Tensor<'_>,
    storage: &Storage,
    quantized: &QuantizedOnDevice,
    sink: &Sink,
) -> Option<Result<u64>> {
    if !quantized.is_on_gpu() {
        return None;
    }
    let mut bytes = 0;
    for (output, part) in [Part::Codes, Part::Scales].into_iter().enumerate() {
        let (mut written, mut offset) = (Ok(()), 0);
        let copied = quantized.each_piece(part, &mut |piece| {
            written = sink.write(output, offset, piece);
            offset += piece.len() as u64;
            if written.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        if let Err(error) = copied.map_err(|error| matrix::error(tensor, storage, error)).and(written) {
            return Some(Err(error));
        }
        bytes += offset;
    }
    Some(Ok(bytes))
}

/// Writes the outputs that follow once all blocks are known, and returns their bytes: scales in
/// tiles, the global scale, markers, and the scale and the transform of the layer's inputs.
fn write_others(
    job: &Job<'_, TensorPlan>,
    plan: &QuantizePlan,
    used: &TensorRecipe,
    scale: Option<microscale::GlobalScale>,
    tiles: Option<Tiles>,
    sink: &Sink,
) -> Result<u64> {
    let (tensor, storage) = (&job.tensor, used.storage);
    let mut others = storage.other_parts(tensor.name, tensor.shape, scale, tiles);
    if let Some((scale, stored)) = plan.input_scale.zip(storage.stored_input(tensor.name)) {
        let name = stored.name_for(tensor.name);
        others.extend(name.map(|name| (name, stored.bytes(scale, tensor.shape))));
    }
    others.extend(
        used.hadamard.map(|width| (hadamard::outline(tensor.name, width).name, hadamard::matrix(width))),
    );
    let mut bytes = 0;
    for (name, data) in others {
        let Some(output) = job.outputs.iter().position(|output| output.name == name) else { continue };
        bytes += data.len() as u64;
        sink.put(output, 0, data)?;
    }
    Ok(bytes)
}

/// Compares the scales that were chosen for some rows with all others. Returns the number of
/// blocks.
fn check_scales(
    tensor: &Tensor<'_>,
    plan: &QuantizePlan,
    used: &TensorRecipe,
    recipe: &Recipe,
    rows: Range<usize>,
    quantized: &QuantizedTensor,
) -> Result<u64> {
    let importance = plan.importance.as_ref().map(|columns| columns.of(&rows));
    let storage = used.storage;
    let Matrix { values, shape } = Matrix::of(tensor, storage, rows.clone())?.transformed(used.hadamard);
    let checked = with_values!(&values, slice => {
        check_search(slice, shape, recipe, importance, quantized)
    });
    checked.map_err(|source| matrix::error(tensor, storage, source))
}

impl<'a> Rewrite for Quantizer<'a> {
    type Plan = TensorPlan;
    type Outcome = QuantizedJob;

    fn checkpoint(&self) -> &Checkpoint {
        self.plan.checkpoint()
    }

    fn jobs(&self) -> &[Job<'_, TensorPlan>] {
        &self.plan.jobs
    }

    fn device_bytes(&self, job: &Job<'_, TensorPlan>) -> usize {
        let tensor = &job.tensor;
        let values = job.plan.quantize().and(tensor.values_dtype());
        let elements = tensor.elements() as usize;
        let bytes = values.map(|dtype| elements.saturating_mul(dtype.bytes()));
        // A device takes a multiple of this. GPTQ has three matrices in f32, and a factor of 2·K²
        // bytes for K columns.
        let of_gptq = job.plan.quantize().and_then(|plan| plan.hessians.as_ref()).map_or(0, |_| {
            let (_, cols) = tensor.matrix();
            elements.saturating_mul(3).saturating_add(cols.saturating_mul(cols) / 2)
        });
        bytes.unwrap_or(tensor.data.len()).saturating_add(of_gptq)
    }

    fn layer(&self, job: &Job<'_, TensorPlan>) -> Option<usize> {
        job.plan.quantize()?.layer
    }

    fn write<'env>(
        &'env self,
        unit: &[usize],
        worker: &Worker<'_, 'env>,
        sinks: &[Sink],
    ) -> Result<Vec<QuantizedJob>> {
        let jobs = &self.plan.jobs;
        // Only quantized tensors are in layers, so a copied one is a unit of its own.
        if let ([number], [sink]) = (unit, sinks)
            && let TensorPlan::Copy(plan) = &jobs[*number].plan
        {
            return Ok(vec![self.copy(&jobs[*number], plan, worker, sink)?]);
        }
        let quantized = unit.iter().filter_map(|number| Some((*number, jobs[*number].plan.quantize()?)));
        let matrices = quantized.map(|(number, plan)| {
            Ok((number, plan, Source::matrix(self.plan, plan, number, worker.device)?))
        });
        let matrices = matrices.collect::<Result<Vec<_>>>()?;
        let sources = matrices.iter().map(|(number, plan, matrix)| {
            Source::new(self.plan, plan, *number, worker.device, matrix.as_ref())
        });
        let sources = sources.collect::<Result<Vec<_>>>()?;
        let done = sources.iter().zip(sinks);
        done.map(|(source, sink)| self.quantize(source, &sources, worker, sink)).collect()
    }

    fn file_type(&self) -> Option<FileType> {
        Some(self.plan.file_type())
    }

    fn describe(&self, description: &mut Description) {
        self.plan.describe(description);
    }
}
