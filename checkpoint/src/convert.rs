//! Converting a quantized checkpoint to another checkpoint format, or exactly to another format,
//! without quantizing again.

pub(crate) mod casts;
pub(crate) mod done;
pub(crate) mod fp8_block;
pub(crate) mod inputs;
pub(crate) mod requantized;
pub(crate) mod request;
pub(crate) mod rounding;

use std::path::Path;
use std::time::Instant;

use microscale::cast::to_mxfp8;
use microscale::{Device, Format, GlobalScale, ScaleLayout};

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::group::Group;
use crate::checkpoint_formats::ignored::ignored;
use crate::checkpoint_formats::inputs::declared_inputs;
use crate::checkpoint_formats::ownership::logical_positions;
use crate::checkpoint_formats::packed::{Logical, Packed};
use crate::checkpoint_formats::storage::Storage;
use crate::checkpoint_formats::transforms::{check_kept, transforms};
use crate::convert::casts::{Cast, cast_alike, casts};
use crate::convert::done::{BF16, ConvertedTensor, in_bf16};
use crate::convert::fp8_block::{cast_to_blocks, check_blocks, check_exact, is_block_fp8, outlines, restate};
use crate::convert::inputs::{input_scale, unscaled_inputs};
use crate::convert::requantized::{BandDifference, Requantized, requantize_band};
use crate::convert::request::Convert;
use crate::convert::rounding::{Rounding, rescaled_difference, rounding};
use crate::error::Result;
use crate::error::format::FormatError;
use crate::gguf::metadata::FileType;
use crate::names::weight::is_expert;
use crate::pipeline::Worker;
use crate::plan::loaders::EXPERTS;
use crate::progress::OnProgress;
use crate::read::bands::band_for;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::input::Input;
use crate::read::position::Position;
use crate::read::tensor::elements;
use crate::reason::Reason;
use crate::sums::Sums;
use crate::write::copy::copy;
use crate::write::job::{Job, check_output_names};
use crate::write::others::Skipped;
use crate::write::outline::{Outline, unquantized};
use crate::write::rewrite::rewrite;
use crate::write::sink::Sink;
use crate::write::work::Rewrite;

/// The outcome of converting a checkpoint.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Converted {
    /// The checkpoint format of the output.
    pub to: CheckpointFormat,
    /// Sums over the quantized tensors.
    pub converted: Sums,
    /// The tensors among them that were cast to another format, exactly.
    pub cast: u64,
    /// Tensors without an exact cast, whose values were rounded as [`Convert::requantize`] allows.
    pub requantized: Vec<Requantized>,
    /// Sums over codes of eight bits under scales: their values are written in bf16.
    pub in_bf16: Sums,
    /// Sums over the tensors that were copied.
    pub copied: Sums,
    /// The tensors whose values are not the same to the bit.
    pub rounded: Vec<Rounding>,
    /// Layers whose inputs have a global scale that was rounded.
    pub rounded_inputs: Vec<String>,
    /// Layers whose inputs have scales that the output has no place for.
    pub dropped_inputs: Vec<String>,
    /// Layers without a scale of their inputs, which the output's config says are quantized.
    pub unscaled_inputs: Vec<String>,
    /// The quantization of inputs that the input's config declares, if the output's does not.
    pub dropped_activations: Option<String>,
    /// The quantization of the cache of keys and values that the input declares, if the output does
    /// not.
    pub dropped_cache: Option<String>,
    /// Loaders that read the output wrongly, without an error; and what helps.
    pub misread_by: Vec<String>,
    /// Other entries of the directory that were not copied.
    pub skipped: Vec<Skipped>,
    /// Time for everything, reading and writing included.
    pub seconds: f64,
}

impl Convert {
    /// Writes the converted checkpoint to `out`. A few tensors are in memory at a time. A failure
    /// removes everything that was written.
    ///
    /// # Errors
    /// [`FormatError::NothingPacked`](crate::FormatError::NothingPacked);
    /// [`FormatError::NotStored`](crate::FormatError::NotStored),
    /// [`FormatError::NotConverted`](crate::FormatError::NotConverted) and
    /// [`FormatError::NotHeld`](crate::FormatError::NotHeld) for tensors that the checkpoint format
    /// cannot hold without quantizing again;
    /// [`FormatError::NotExact`](crate::FormatError::NotExact),
    /// [`FormatError::NotExactBlocks`](crate::FormatError::NotExactBlocks) and
    /// [`FormatError::Scaled`](crate::FormatError::Scaled) for casts that are not exact;
    /// [`FormatError::Transformed`](crate::FormatError::Transformed) for transforms that only
    /// compressed-tensors' config keeps;
    /// [`OutputError::NameTaken`](crate::OutputError::NameTaken),
    /// [`FormatError::Packed`](crate::FormatError::Packed), and everything about writing.
    pub fn run(
        &self,
        checkpoint: &Checkpoint,
        out: &Path,
        device: &Device,
        progress: &mut OnProgress<'_>,
    ) -> Result<Converted> {
        let (start, to) = (Instant::now(), self.to);
        checkpoint.check_container(to)?;
        check_kept(checkpoint, to)?;
        let work = Converter::new(checkpoint, self)?;
        let (tensors, skipped) = rewrite(checkpoint, out, &work, device, progress)?;
        let (cast, misread_by) = (work.casts(), work.misread_by());
        let mut converted = Converted {
            to,
            converted: Sums::default(),
            cast: 0,
            requantized: Vec::new(),
            in_bf16: Sums::default(),
            copied: Sums::default(),
            rounded: Vec::new(),
            rounded_inputs: Vec::new(),
            dropped_inputs: Vec::new(),
            unscaled_inputs: unscaled_inputs(work.packed().map(|(packed, storage, _)| (packed, storage))),
            dropped_activations: declared_inputs(checkpoint).filter(|_| !work.has_input_scales()),
            dropped_cache: Description::dropped_cache(checkpoint, to),
            misread_by,
            skipped,
            seconds: start.elapsed().as_secs_f64(),
        };
        for done in tensors {
            converted.converted = converted.converted.with(done.converted);
            converted.in_bf16 = converted.in_bf16.with(done.in_bf16);
            converted.copied = converted.copied.with(done.copied);
            converted.rounded.extend(done.rounded);
            converted.requantized.extend(done.requantized);
            converted.rounded_inputs.extend(done.rounded_input);
            converted.dropped_inputs.extend(done.dropped_input);
        }
        // Values of codes under scales are not among the casts.
        let rounded = converted.requantized.iter().filter(|requantized| requantized.to != BF16);
        converted.cast = cast - rounded.count() as u64;
        Ok(converted)
    }
}

/// What becomes of a tensor.
pub(crate) enum ConvertPlan<'a> {
    /// The tensor is quantized.
    Packed { packed: Box<Packed<'a>>, storage: &'static Storage, cast: Option<Cast> },
    /// The values of a quantized tensor are cast to block FP8.
    BlockFp8(Box<Packed<'a>>),
    /// The tensor is block FP8 already. Its scales are written as F32.
    Restate,
    /// The values of 8-bit codes under scales are written in bf16.
    Scaled,
    /// The tensor is copied.
    Copy,
}

struct Converter<'a> {
    checkpoint: &'a Checkpoint,
    to: CheckpointFormat,
    requantize: bool,
    jobs: Vec<Job<'a, ConvertPlan<'a>>>,
}

impl<'a> Converter<'a> {
    fn new(checkpoint: &'a Checkpoint, request: &Convert) -> Result<Self> {
        let Convert { to, format, requantize } = *request;
        let to_blocks = to == CheckpointFormat::Fp8Block;
        if let Some(format) = format.filter(|_| to_blocks) {
            return Err(FormatError::OwnFormat { checkpoint_format: to, format }.into());
        }
        let tensors = logical_positions(checkpoint)?;
        check_packed(checkpoint, &tensors)?;
        let mut jobs = Vec::new();
        for (position, tensor) in tensors {
            let (tensor, plan) = match tensor {
                Logical::Plain(tensor) => match &tensor.scaling {
                    None => (tensor, ConvertPlan::Copy),
                    Some(_) if to_blocks && is_block_fp8(&tensor) => (tensor, ConvertPlan::Restate),
                    Some(scaling) => {
                        if !requantize && !scaling.is_exact_in_bf16() {
                            let (file, name, dtype) = (tensor.file.into(), tensor.name.into(), tensor.dtype);
                            return Err(FormatError::Scaled { file, tensor: name, dtype, to }.into());
                        }
                        (tensor, ConvertPlan::Scaled)
                    }
                },
                Logical::Packed(packed) if to_blocks => {
                    check_blocks(&packed)?;
                    (packed.codes, ConvertPlan::BlockFp8(packed))
                }
                Logical::Packed(packed) => {
                    let storage = storage_for(&packed, to, format)?;
                    (packed.codes, ConvertPlan::Packed { packed, storage, cast: None })
                }
            };
            jobs.push(Job { tensor, plan, position, outputs: Vec::new() });
        }
        let is_packed = |plan| matches!(plan, &ConvertPlan::Packed { .. } | &ConvertPlan::BlockFp8(_));
        if !jobs.iter().any(|job| is_packed(&job.plan)) {
            let path = checkpoint.path.clone();
            let advice = Description::method(checkpoint).map(|_| Description::instead_of_unread(checkpoint));
            return Err(FormatError::NothingPacked { doing: "convert", path, advice }.into());
        }
        if let Some(format) = format {
            let others: Vec<_> = jobs.iter().filter_map(|job| other_format(&job.plan, format)).collect();
            let mut casts = casts(&others, format, requantize)?.into_iter();
            for job in &mut jobs {
                let is_other = other_format(&job.plan, format).is_some();
                if let ConvertPlan::Packed { cast, .. } = &mut job.plan
                    && is_other
                {
                    *cast = casts.next();
                }
            }
        }
        for job in &mut jobs {
            job.outputs = match &job.plan {
                ConvertPlan::Packed { packed, storage, cast } => {
                    let global = global_scale(packed, *cast).is_some();
                    let mut outputs = storage.outlines(packed.name, &packed.shape, global);
                    outputs.extend(input_scale(packed, storage).map(|(outline, ..)| outline));
                    outputs
                }
                ConvertPlan::BlockFp8(packed) => outlines(packed.name, &packed.shape).into(),
                ConvertPlan::Restate => outlines(job.tensor.name, job.tensor.shape).into(),
                ConvertPlan::Scaled | ConvertPlan::Copy => vec![unquantized(&job.tensor)],
            };
        }
        check_output_names(&jobs)?;
        for job in jobs.iter().filter(|_| !requantize) {
            if let ConvertPlan::BlockFp8(packed) = &job.plan {
                check_exact(packed)?;
            }
        }
        Ok(Self { checkpoint, to, requantize, jobs })
    }

    /// The quantized tensors with their storage and casts.
    fn packed(&self) -> impl Iterator<Item = (&Packed<'a>, &'static Storage, Option<Cast>)> {
        self.jobs.iter().filter_map(|job| match &job.plan {
            ConvertPlan::Packed { packed, storage, cast } => Some((&**packed, *storage, *cast)),
            _ => None,
        })
    }

    /// The number of tensors that are cast.
    fn casts(&self) -> u64 {
        let is_cast =
            |plan| matches!(plan, &ConvertPlan::Packed { cast: Some(_), .. } | &ConvertPlan::BlockFp8(_));
        self.jobs.iter().filter(|job| is_cast(&job.plan)).count() as u64
    }

    /// Whether any layer of the output has a scale of its inputs, so that the config says that they
    /// are quantized.
    fn has_input_scales(&self) -> bool {
        self.packed().any(|(packed, storage, _)| input_scale(packed, storage).is_some())
    }

    /// Loaders that read the output wrongly without an error.
    fn misread_by(&self) -> Vec<String> {
        let misread = |(packed, _, cast): (&Packed<'_>, _, Option<Cast>)| {
            let scale = global_scale(packed, cast);
            is_expert(packed.name) && scale.is_some_and(|scale| scale.value() != 1.0)
        };
        let ours = self.to == CheckpointFormat::CompressedTensors;
        (ours && self.packed().any(misread)).then(|| EXPERTS.into()).into_iter().collect()
    }
}

/// Checks that not all quantized tensors are FP8 or INT8 under scales.
///
/// # Errors
/// [`FormatError::OnlyScaled`].
fn check_packed(checkpoint: &Checkpoint, tensors: &[(Position, Logical<'_>)]) -> Result<()> {
    if tensors.iter().any(|(_, tensor)| matches!(tensor, Logical::Packed(_))) {
        return Ok(());
    }
    let mut scaled =
        tensors.iter().map(|(_, tensor)| tensor.stored()).filter(|tensor| tensor.scaling.is_some());
    let Some(first) = scaled.next() else { return Ok(()) };
    let (path, tensors, dtype) = (checkpoint.path.clone(), 1 + scaled.count(), first.dtype);
    Err(FormatError::OnlyScaled { path, tensors, dtype }.into())
}

/// The storage of a quantized tensor in a checkpoint format.
fn storage_for(
    packed: &Packed<'_>,
    to: CheckpointFormat,
    format: Option<Format>,
) -> Result<&'static Storage> {
    let storage = Storage::of_format(to, format.unwrap_or(packed.format))?;
    let (file, tensor) = (packed.codes.file.into(), packed.name.into());
    let reason = storage.cannot_hold(packed.name, &packed.shape);
    // Shapes are not recovered from padded scales.
    if let Some(reason) = reason.clone().filter(|_| storage.scale_layout == ScaleLayout::Swizzled) {
        return Err(FormatError::NotHeld { file, tensor, to, reason }.into());
    }
    // A tensor that is quantized again must be of whole blocks.
    if let Some(reason @ Reason::Columns { .. }) = reason
        && format.is_some_and(|format| format != packed.format)
    {
        return Err(FormatError::NotHeld { file, tensor, to, reason }.into());
    }
    if storage.transposed != packed.storage.transposed {
        return Err(FormatError::NotConverted { file, tensor, to }.into());
    }
    Ok(storage)
}

/// The quantized tensor of a plan, if it has another format.
fn other_format<'p, 'a>(plan: &'p ConvertPlan<'a>, format: Format) -> Option<&'p Packed<'a>> {
    match plan {
        ConvertPlan::Packed { packed, .. } if packed.format != format => Some(packed),
        _ => None,
    }
}

/// The global scale of a tensor after its cast, if it has one.
fn global_scale(packed: &Packed<'_>, cast: Option<Cast>) -> Option<GlobalScale> {
    match cast {
        Some(cast) => cast.global_scale(),
        None => packed.global_scale.map(|(_, scale)| scale),
    }
}

/// The outcome of a band.
#[derive(Default)]
struct ConvertedBand {
    rounded: Option<BandDifference>,
    requantized: Option<BandDifference>,
    /// The block scales in linear order, if all of a tensor's are written together.
    scales: Option<Vec<u8>>,
}

/// Compares a quantized tensor's values before and after, and writes it, both band by band.
fn convert_packed<'env>(
    outputs: &[Outline],
    packed: &'env Packed<'env>,
    storage: &'static Storage,
    cast: Option<Cast>,
    worker: &Worker<'_, 'env>,
    sink: &Sink,
) -> Result<ConvertedTensor> {
    let before = global_scale(packed, cast);
    let mut rounding = rounding(packed, storage);
    let after = rounding.as_ref().map(|rounding| rounding.after);
    let mut requantized = matches!(cast, Some(Cast::Again(..)))
        .then(|| Requantized::new(packed.name, packed.format, storage.format));
    let mut tiles = storage.tiles(&packed.shape);
    let (bands, device, into) = (packed.bands(band_for(worker.device))?, worker.device, sink.clone());
    let (last, gathers_scales) = (bands.len(), tiles.is_some());
    let convert = move |number: usize| {
        let band = bands.get(number).cloned().unwrap_or_default();
        let first = band.start;
        let mut tensor = packed.row(&packed.blocks_in(band))?.to_tensor();
        let mut done = ConvertedBand::default();
        match cast {
            None => {}
            Some(Cast::ToNvfp4(cast)) => {
                tensor = cast_alike(packed, &tensor, device, |band| cast.cast(band))?;
            }
            Some(Cast::ToMxfp8) => tensor = cast_alike(packed, &tensor, device, |band| to_mxfp8(band))?,
            Some(Cast::Again(recipe, scale)) => {
                let difference;
                (tensor, difference) =
                    requantize_band(packed, storage, (&recipe, scale), (first, &tensor), device)?;
                done.requantized = Some(difference);
            }
        }
        if let Some(after) = after {
            done.rounded = Some(rescaled_difference(packed, &tensor, after, device)?);
        }
        let blocks = (tensor.rows() * tensor.blocks_per_row()) as u64;
        let before = (first / tensor.format().block()) as u64;
        let mut parts = storage.block_parts(tensor, &mut None);
        if gathers_scales {
            done.scales = parts.pop();
        }
        for (output, data) in parts.into_iter().enumerate() {
            // All blocks of a part have the same number of bytes.
            let each = (data.len() as u64).checked_div(blocks).unwrap_or(0);
            into.put(output, before * each, data)?;
        }
        Ok(done)
    };
    worker.each_band(last, convert, |band| {
        if let Some((rounding, difference)) = rounding.as_mut().zip(band.rounded) {
            rounding.add(&difference);
        }
        if let Some((requantized, difference)) = requantized.as_mut().zip(band.requantized) {
            requantized.add(&difference);
        }
        if let Some((tiles, scales)) = tiles.as_mut().zip(band.scales) {
            tiles.extend(&scales);
        }
        Ok(())
    })?;
    let mut others = storage.other_parts(packed.name, &packed.shape, before, tiles);
    let rounded = rounding.filter(|rounding| rounding.differing != 0);
    let mut done = ConvertedTensor { rounded, requantized, ..Default::default() };
    let kept = input_scale(packed, storage);
    let is_dropped = packed.input_scale.is_some() && kept.is_none() || !packed.other_inputs.is_empty();
    done.dropped_input = is_dropped.then(|| packed.name.into());
    if let Some((outline, input, after)) = kept {
        others.push((outline.name, input.bytes(after, &packed.shape)));
        let rounded =
            packed.input_scale.is_some_and(|(_, before)| after.toward(before.direction()) != before);
        done.rounded_input = rounded.then(|| packed.name.into());
    }
    for (name, data) in others {
        if let Some(output) = outputs.iter().position(|output| output.name == name) {
            sink.put(output, 0, data)?;
        }
    }
    let bytes_after = outputs.iter().map(Outline::bytes).sum();
    done.converted.add(elements(&packed.shape), packed.bytes() as u64, bytes_after);
    Ok(done)
}

impl<'a> Rewrite for Converter<'a> {
    type Plan = ConvertPlan<'a>;
    type Outcome = ConvertedTensor;

    fn checkpoint(&self) -> &Checkpoint {
        self.checkpoint
    }

    fn jobs(&self) -> &[Job<'_, ConvertPlan<'a>>] {
        &self.jobs
    }

    fn write<'env>(
        &'env self,
        unit: &[usize],
        worker: &Worker<'_, 'env>,
        sinks: &[Sink],
    ) -> Result<Vec<ConvertedTensor>> {
        let done = unit.iter().zip(sinks).map(|(number, sink)| {
            let job = &self.jobs[*number];
            let input = || Input::new(self.checkpoint, job.tensor, job.position);
            match &job.plan {
                ConvertPlan::Packed { packed, storage, cast } => {
                    convert_packed(&job.outputs, packed, storage, *cast, worker, sink)
                }
                ConvertPlan::BlockFp8(packed) => cast_to_blocks(packed, self.requantize, worker, sink),
                ConvertPlan::Restate => restate(&input(), worker, sink),
                ConvertPlan::Scaled => in_bf16(&input(), self.requantize, worker, sink),
                ConvertPlan::Copy => {
                    Ok(ConvertedTensor { copied: copy(&input(), worker, sink)?, ..Default::default() })
                }
            }
        });
        done.collect()
    }

    fn file_type(&self) -> Option<FileType> {
        None
    }

    fn describe(&self, description: &mut Description) {
        description.take_cache();
        description.remove();
        description.transforms = transforms(self.checkpoint).and_then(|found| found.config().cloned());
        description.activations = self.has_input_scales();
        let is_left = |plan| matches!(plan, &ConvertPlan::Scaled | &ConvertPlan::Copy);
        let left = self.jobs.iter().filter(|job| is_left(&job.plan));
        let ignore = ignored(self.checkpoint, left.map(|job| job.tensor));
        let groups =
            self.packed().map(|(packed, storage, _)| (packed.name, storage, elements(&packed.shape)));
        let groups = Group::of(groups, self.checkpoint.naming);
        self.to.describe(&groups, &ignore, description);
    }
}
