//! Quantizing a checkpoint: carrying out a [`Plan`].
//!
//! | file | what it knows |
//! |---|---|
//! | `matrix`, `source` | a tensor as the matrix that is quantized; that matrix where a device works on it |
//! | `chooser` | the global scale of each tensor: which layers share one, and which number it is |
//! | `summary` | what happened, for every tensor and in total |
//! | `details` | a closer look, for those who ask: distributions, worst blocks |

pub(crate) mod chooser;
pub(crate) mod details;
pub(crate) mod matrix;
pub(crate) mod source;
pub(crate) mod summary;

use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use half::bf16;
use microscale::device::{Device, Part, QuantizedThere};
use microscale::{GlobalScale, NonFinite, QuantizedTensor, Recipe, Report, Search, check_search};

use crate::checkpoint_formats::tiles::Tiles;
use crate::error::plan::PlanError;
use crate::error::{Error, Result};
use crate::gguf::metadata::FileType;
use crate::names::fused::Fused;
use crate::plan::{Plan, Planned};
use crate::quantize::chooser::{Chooser, Sources};
use crate::quantize::details::{Details, Look};
use crate::quantize::matrix::Matrix;
use crate::quantize::source::{Source, Stored};
use crate::quantize::summary::{Outcome, Plain, Summary, TensorSummary};
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::tensor::Tensor;
use crate::read::values::with_values;
use crate::reason::Reason;
use crate::write::busy::Busy;
use crate::write::narrowed::check;
use crate::write::others::Skipped;
use crate::write::outline::{Outline, kept};
use crate::write::progress::OnProgress;
use crate::write::rewrite::rewrite;
use crate::write::values::{write_q8_0, write_values};
use crate::write::work::Rewrite;
use crate::write::writer::Sink;

/// Carries out a plan: writes the quantized checkpoint to `out`, a file or a directory like the input.
///
/// A few tensors are in memory at a time. Output is written under a temporary name next to `out` and renamed
/// at the end, so that a failure or an interruption leaves nothing behind. The same bytes come from every
/// device, or several.
///
/// # Errors
/// [`PlanError::NothingToQuantize`](crate::PlanError::NothingToQuantize), [`Error::Tensor`] (among them
/// non-finite values, if the recipe refuses them), and everything about writing.
pub fn quantize(
    plan: &Plan<'_>,
    out: &Path,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<Summary> {
    let start = Instant::now();
    let work = Quantizer::new(plan)?;
    let (tensors, skipped) = rewrite(plan.checkpoint(), out, &work, device, progress)?;
    Ok(work.summary(device, tensors, skipped, start))
}

/// The execution of a plan, tensor by tensor.
pub(crate) struct Quantizer<'a> {
    plan: &'a Plan<'a>,
    chooser: Chooser<'a>,
    /// A closer look at the tensors that are done.
    details: Mutex<Details>,
}

/// The outcome of a tensor.
#[derive(Default)]
pub(crate) struct Done {
    /// Nothing is said of scales that are read with their codes.
    pub(crate) summary: Option<TensorSummary>,
    /// Blocks whose scales were compared with all others.
    checked_blocks: u64,
    /// The times in which it was quantized, if it was.
    busy: Vec<Busy>,
}

impl<'a> Quantizer<'a> {
    /// # Errors
    /// [`PlanError::NothingToQuantize`](crate::PlanError::NothingToQuantize).
    pub(crate) fn new(plan: &'a Plan<'a>) -> Result<Self> {
        if plan.quantized() == 0 {
            return Err(Error::Plan(PlanError::NothingToQuantize { path: plan.checkpoint().path.clone() }));
        }
        Ok(Self { plan, chooser: Chooser::new(plan), details: Mutex::default() })
    }

    /// Summarizes the work since `start`.
    pub(crate) fn summary(
        &self,
        device: &Device,
        done: Vec<Done>,
        skipped: Vec<Skipped>,
        start: Instant,
    ) -> Summary {
        let checked_blocks = done.iter().map(|done| done.checked_blocks).sum();
        let quantize_seconds = Busy::seconds(done.iter().flat_map(|done| done.busy.iter().copied()));
        Summary {
            recipes: self.plan.recipes(),
            device: device.to_string(),
            tensors: done.into_iter().filter_map(|done| done.summary).collect(),
            skipped,
            seconds: start.elapsed().as_secs_f64(),
            quantize_seconds,
            checked_blocks: self.plan.check_search.then_some(checked_blocks),
            details: std::mem::take(&mut *self.details()),
        }
    }

    fn details(&self) -> MutexGuard<'_, Details> {
        // A panic of a worker ends the whole operation.
        self.details.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn copy(tensor: &Tensor<'_>, reason: &Reason, non_finite: NonFinite, sink: &Sink<'_>) -> Result<Done> {
        let (bytes_after, report) = match (reason, tensor.scaling) {
            (Reason::InQ8_0(_), _) => (write_q8_0(tensor, sink)?, Report::default()),
            (_, Some(_)) => write_values::<bf16>(tensor, non_finite, sink)?,
            (_, None) => (sink.copy(tensor)?.bytes_after, Report::default()),
        };
        check::<bf16>(tensor, tensor.name, &report, non_finite, true)?;
        let outcome = Outcome::Copied(reason.clone());
        let summary = Some(TensorSummary { report, ..TensorSummary::new(tensor, bytes_after, outcome) });
        Ok(Done { summary, ..Done::default() })
    }

    /// A stored tensor as it is read, if it is to be quantized.
    fn to_quantize(&self, tensor: &Tensor<'_>) -> Option<&Tensor<'a>> {
        let planned = self.plan.planned(tensor.name).filter(|planned| planned.reason.is_none());
        planned.map(|planned| &planned.tensor)
    }

    /// Quantizes a tensor to what a file holds, measures the loss of that, and of plain scales if others were
    /// searched, and writes it.
    fn quantize(
        &self,
        tensor: &Tensor<'_>,
        sources: &Sources<'_>,
        device: &Device,
        sink: &Sink<'_>,
    ) -> Result<Done> {
        let treatment = self.plan.of(tensor.name);
        let Some(source) = sources.get(tensor.name) else {
            unreachable!("every tensor to quantize is on the device")
        };
        let from = Instant::now();
        let chosen = self.chooser.recipes_for(tensor, sources, device)?;
        let mut busy = vec![Busy { from, until: Instant::now() }];
        let mut written = Written { tiles: treatment.storage.tiles(tensor.shape), ..Written::default() };
        let stored = source.store(&chosen.recipe, self.plan.importance_of(tensor), |rows, quantized| {
            self.write_band(tensor, &chosen.recipe, rows, quantized, sink, &mut written)
        })?;
        busy.extend(stored.busy);
        let bytes_after = written.bytes
            + self.write_others(tensor, stored.global_scale, written.tiles, sink)?
            + self.write_input_scale(tensor, sink)?;
        let plain = match treatment.recipe.search {
            Search::None => None,
            _ => Some(source.store(&chosen.plain, None, |_, _| sink.go_on())?),
        };
        let plain = plain.map(|Stored { errors, global_scale, .. }| Plain { errors, global_scale });
        let outcome = Outcome::Quantized {
            format: treatment.format(),
            report: stored.report,
            errors: stored.errors,
            global_scale: stored.global_scale,
            seconds: Busy::seconds(busy.iter().copied()),
            plain,
        };
        if let Some((look, most)) = written.look.zip(self.plan.worst_blocks) {
            self.details().add(self.plan.place_of(tensor.name), tensor.name, look, most);
        }
        let recipe = self.plan.number_of(tensor.name);
        let summary = TensorSummary { recipe, ..TensorSummary::new(tensor, bytes_after, outcome) };
        Ok(Done { summary: Some(summary), checked_blocks: written.checked_blocks, busy })
    }

    /// Writes codes and scales of some rows, and looks at them as closely as is wanted.
    fn write_band(
        &self,
        tensor: &Tensor<'_>,
        recipe: &Recipe,
        rows: Range<usize>,
        quantized: QuantizedThere,
        sink: &Sink<'_>,
        written: &mut Written,
    ) -> Result<()> {
        let (plan, storage) = (self.plan, self.plan.of(tensor.name).storage);
        let check_search = plan.check_search && recipe.search == Search::Full;
        if !check_search && plan.worst_blocks.is_none() && storage.is_linear() {
            written.bytes += self.write_pieces(tensor, &quantized, sink)?;
            return Ok(());
        }
        let quantized = quantized.into_host().map_err(|error| matrix::error(tensor, storage, error))?;
        if check_search {
            written.checked_blocks += self.check(tensor, recipe, rows.clone(), &quantized)?;
        }
        if let Some(most) = plan.worst_blocks {
            let look = Look::of(tensor, storage, rows.clone(), &quantized, most)?;
            match &mut written.look {
                None => written.look = Some(look),
                Some(earlier) => earlier.add(look, most),
            }
        }
        storage.check_scales(tensor, quantized.scales(), rows.start * quantized.blocks_per_row())?;
        for (outline, data) in
            self.outlines(tensor).iter().zip(storage.block_parts(quantized, &mut written.tiles))
        {
            written.bytes += data.len() as u64;
            sink.append(&outline.name, &data)?;
        }
        Ok(())
    }

    /// Writes codes and scales from where the device works, without another copy of them: they are tensors of
    /// their own.
    fn write_pieces(&self, tensor: &Tensor<'_>, quantized: &QuantizedThere, sink: &Sink<'_>) -> Result<u64> {
        let storage = self.plan.of(tensor.name).storage;
        let mut bytes = 0;
        for (outline, part) in self.outlines(tensor).iter().zip([Part::Codes, Part::Scales]) {
            let mut written = Ok(());
            let copied = quantized.each_piece(part, &mut |piece| {
                bytes += piece.len() as u64;
                written = sink.append(&outline.name, piece);
                if written.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            });
            copied.map_err(|error| matrix::error(tensor, storage, error))?;
            written?;
        }
        Ok(bytes)
    }

    /// Writes what is written once all blocks are, and returns its bytes.
    fn write_others(
        &self,
        tensor: &Tensor<'_>,
        scale: Option<GlobalScale>,
        tiles: Option<Tiles>,
        sink: &Sink<'_>,
    ) -> Result<u64> {
        let storage = self.plan.of(tensor.name).storage;
        let mut bytes = 0;
        for (name, data) in storage.other_parts(tensor.name, tensor.shape, scale, tiles) {
            bytes += data.len() as u64;
            sink.write(&name, &data)?;
        }
        Ok(bytes)
    }

    /// Writes the scale of the layer's inputs, if one was given, and returns its bytes.
    fn write_input_scale(&self, tensor: &Tensor<'_>, sink: &Sink<'_>) -> Result<u64> {
        let outline = self.plan.input_outline(tensor).zip(self.plan.input_scale_of(tensor.name));
        let stored = self.plan.of(tensor.name).storage.stored_input(tensor.name);
        let Some(((outline, scale), stored)) = outline.zip(stored) else { return Ok(0) };
        sink.write(&outline.name, &stored.bytes(scale, tensor.shape))?;
        Ok(outline.bytes())
    }

    /// Compares the scales that were chosen for some rows with all others.
    fn check(
        &self,
        tensor: &Tensor<'_>,
        recipe: &Recipe,
        rows: Range<usize>,
        quantized: &QuantizedTensor,
    ) -> Result<u64> {
        let importance = self.plan.importance_of(tensor).map(|columns| columns.of(&rows));
        let storage = self.plan.of(tensor.name).storage;
        let Matrix { values, shape } = Matrix::of(tensor, storage, rows)?;
        let checked = with_values!(&values, slice => {
            check_search(slice, shape, recipe, importance, quantized)
        });
        checked.map_err(|source| matrix::error(tensor, storage, source))
    }
}

/// The sums over the bands of a tensor that are written.
#[derive(Default)]
struct Written {
    bytes: u64,
    checked_blocks: u64,
    look: Option<Look>,
    /// All scales, where they are written as a whole.
    tiles: Option<Tiles>,
}

impl Rewrite for Quantizer<'_> {
    type Done = Done;

    fn checkpoint(&self) -> &Checkpoint {
        self.plan.checkpoint()
    }

    fn outlines(&self, tensor: &Tensor<'_>) -> Vec<Outline> {
        match self.plan.planned(tensor.name) {
            None => Vec::new(),
            Some(Planned { reason: None, tensor, .. }) => {
                let outlines = self.plan.of(tensor.name).outlines(tensor).into_iter();
                outlines.chain(self.plan.input_outline(tensor)).collect()
            }
            Some(Planned { tensor, reason: Some(reason), .. }) => vec![kept(tensor, reason)],
        }
    }

    fn bytes(&self, tensor: &Tensor<'_>) -> usize {
        let values = self.to_quantize(tensor).and_then(|tensor| {
            Some((tensor.elements() as usize).saturating_mul(tensor.values_dtype()?.bytes()))
        });
        values.unwrap_or(tensor.data.len())
    }

    fn layer(&self, tensor: &Tensor<'_>) -> Option<Fused> {
        self.to_quantize(tensor).and_then(|tensor| self.chooser.layer(tensor))
    }

    fn write(&self, tensors: &[Tensor<'_>], device: &Device, sink: &Sink<'_>) -> Result<Vec<Done>> {
        let storage_of = |tensor: &Tensor<'_>| self.plan.of(tensor.name).storage;
        let quantized = tensors.iter().filter_map(|tensor| self.to_quantize(tensor));
        let matrices = quantized.map(|tensor| {
            let rows_each = self.plan.rows_each(tensor);
            Ok((tensor, Source::matrix(tensor, storage_of(tensor), device, rows_each)?))
        });
        let matrices = matrices.collect::<Result<Vec<_>>>()?;
        let sources = matrices.iter().map(|(tensor, matrix)| {
            let (storage, origin) = (storage_of(tensor), self.plan.checkpoint().origin(tensor));
            let rows_each = self.plan.rows_each(tensor);
            Ok((tensor.name, Source::new(**tensor, storage, device, matrix.as_ref(), origin, rows_each)?))
        });
        let sources = sources.collect::<Result<Sources<'_>>>()?;
        let done = tensors.iter().map(|tensor| match self.plan.planned(tensor.name) {
            None => Ok(Done::default()),
            Some(Planned { tensor, reason: Some(reason), non_finite, .. }) => {
                Self::copy(tensor, reason, *non_finite, sink)
            }
            Some(Planned { tensor, .. }) => self.quantize(tensor, &sources, device, sink),
        });
        done.collect()
    }

    fn file_type(&self) -> Option<FileType> {
        Some(self.plan.file_type())
    }

    fn describe(&self, description: &mut Description) {
        self.plan.describe(description);
    }
}
