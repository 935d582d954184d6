//! Dequantizing a checkpoint: quantized tensors become values again, under the names that the model
//! knows. All other tensors are copied.

mod experts;
mod outcome;

use std::path::Path;
use std::time::Instant;

use bytemuck::Pod;
use half::{bf16, f16};
use microscale::{Device, Dtype, Element, NonFinite, Report};

use crate::checkpoint_formats::ownership::logical_positions;
use crate::checkpoint_formats::packed::{Logical, Packed};
use crate::checkpoint_formats::transforms::transforms;
use crate::checkpoint_formats::undone::check_undone;
use crate::dtype::FileDtype;
use crate::error::format::FormatError;
use crate::error::output::OutputError;
use crate::error::{Error, Result};
use crate::gguf::metadata::FileType;
use crate::names::architectures::Experts;
use crate::pipeline::Worker;
use crate::progress::OnProgress;
use crate::read::bands::{self, band, band_for};
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::input::Input;
use crate::read::position::Position;
use crate::read::tensor::elements;
use crate::read::values::file_dtype;
use crate::sums::Sums;
use crate::write::busy::Busy;
use crate::write::copy::copy;
use crate::write::job::Job;
use crate::write::narrowed::{check, replace};
use crate::write::others::Skipped;
use crate::write::outline::{Outline, unchanged};
use crate::write::rewrite::rewrite;
use crate::write::sink::Sink;
use crate::write::values::write_values;
use crate::write::work::Rewrite;
use experts::{Joined, JoinedExperts, join};
use outcome::DequantizedTensor;

/// The outcome of dequantizing a checkpoint.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Dequantized {
    /// The dtype of the values.
    pub dtype: Dtype,
    /// The device that it was done on.
    pub device: String,
    /// Sums over the tensors that were dequantized.
    pub dequantized: Sums,
    /// Sums over the tensors that were copied.
    pub copied: Sums,
    /// Blocks whose scale is NaN, and so all their values.
    pub nan_scales: u64,
    /// Counts of values that are NaN, or beyond the dtype's largest number.
    pub report: Report,
    /// Other entries of the directory that were not copied.
    pub skipped: Vec<Skipped>,
    /// Seconds during which at least one tensor was being dequantized.
    pub compute_seconds: f64,
    /// Time for everything, reading and writing included.
    pub seconds: f64,
}

/// Writing a checkpoint with its quantized tensors as values again, under the names that the model
/// knows. All other tensors are copied.
#[derive(Clone, Copy, Debug, Default)]
pub struct Dequantize {
    /// The dtype of the values; without one the dtype that config.json names, or else BF16.
    pub dtype: Option<Dtype>,
    /// What becomes of values beyond the dtype's largest number: [`NonFinite::Error`] refuses them,
    /// [`NonFinite::Propagate`] writes infinities, and [`NonFinite::Saturate`] the largest number.
    /// NaN of the checkpoint itself stays NaN, and only [`NonFinite::Saturate`] writes 0.
    pub non_finite: NonFinite,
}

impl Dequantize {
    /// Writes the checkpoint to `out`. A few tensors are in memory at a time. A failure removes
    /// everything that was written.
    ///
    /// # Errors
    /// [`FormatError::NothingPacked`](crate::FormatError::NothingPacked),
    /// [`FormatError::Packed`](crate::FormatError::Packed),
    /// [`FormatError::NotFinite`](crate::FormatError::NotFinite),
    /// [`FormatError::Transformed`](crate::FormatError::Transformed),
    /// [`OutputError::NameTaken`](crate::OutputError::NameTaken), [`Error::Tensor`], and everything
    /// about writing.
    pub fn run(
        &self,
        checkpoint: &Checkpoint,
        out: &Path,
        device: &Device,
        progress: &mut OnProgress<'_>,
    ) -> Result<Dequantized> {
        let start = Instant::now();
        check_undone(checkpoint, "dequantizing")?;
        let non_finite = self.non_finite;
        let dtype = self.dtype.or_else(|| configured_dtype(checkpoint)).unwrap_or(Dtype::Bf16);
        let mut tensors = logical_positions(checkpoint)?;
        // The values are of the model's own parameters, without the parameters of transforms.
        if let Some(transforms) = transforms(checkpoint) {
            tensors.retain(|(_, tensor)| !transforms.has_parameter(tensor.name()));
        }
        let joined = match checkpoint.naming.experts() {
            Experts::ApartIfQuantized => join(&mut tensors, file_dtype(dtype)),
            _ => Vec::new(),
        };
        let mut jobs: Vec<_> = joined.into_iter().map(job_of_experts).collect();
        for tensor in tensors {
            jobs.push(job(checkpoint, tensor, file_dtype(dtype))?);
        }
        jobs.sort_by_key(|job| job.position);
        if jobs.iter().all(|job| matches!(job.plan, DequantizePlan::Copy)) {
            return Err(Error::Format(FormatError::NothingPacked {
                doing: "dequantize",
                path: checkpoint.path.clone(),
                advice: Description::method(checkpoint).map(|_| Description::instead_of_unread(checkpoint)),
            }));
        }
        let work = Dequantizer { checkpoint, dtype, non_finite, jobs };
        let (tensors, skipped) = rewrite(checkpoint, out, &work, device, progress)?;
        let mut dequantized = Dequantized {
            dtype,
            device: device.to_string(),
            dequantized: Sums::default(),
            copied: Sums::default(),
            nan_scales: 0,
            report: Report::default(),
            skipped,
            compute_seconds: Busy::seconds(tensors.iter().flat_map(|done| done.busy.iter().copied())),
            seconds: start.elapsed().as_secs_f64(),
        };
        for done in tensors {
            dequantized.dequantized = dequantized.dequantized.with(done.dequantized);
            dequantized.copied = dequantized.copied.with(done.copied);
            dequantized.nan_scales += done.nan_scales;
            dequantized.report += done.report;
        }
        Ok(dequantized)
    }
}

/// The dtype that a config.json says the model's weights have.
fn configured_dtype(checkpoint: &Checkpoint) -> Option<Dtype> {
    let config = &checkpoint.config.as_ref()?.object.json;
    let name = config.get("dtype").or_else(|| config.get("torch_dtype"))?.as_str()?;
    match name.strip_prefix("torch.").unwrap_or(name) {
        "float32" => Some(Dtype::F32),
        "float16" => Some(Dtype::F16),
        "bfloat16" => Some(Dtype::Bf16),
        _ => None,
    }
}

/// What becomes of a tensor.
enum DequantizePlan<'a> {
    /// The values of 4-bit or 8-bit blocks are written.
    Packed(Box<Packed<'a>>),
    /// The values of all experts of a layer are written as one tensor.
    Experts(JoinedExperts<'a>),
    /// The values of 8-bit codes under scales are written.
    Scaled,
    /// The tensor is copied.
    Copy,
}

/// The job of a joined tensor.
fn job_of_experts(joined: Joined<'_>) -> Job<'_, DequantizePlan<'_>> {
    let Joined { tensor, position, output, experts } = joined;
    Job { tensor, plan: DequantizePlan::Experts(experts), position, outputs: vec![output] }
}

/// The job of a tensor.
fn job<'a>(
    checkpoint: &'a Checkpoint,
    (position, tensor): (Position, Logical<'a>),
    dtype: FileDtype,
) -> Result<Job<'a, DequantizePlan<'a>>> {
    Ok(match tensor {
        Logical::Packed(packed) => {
            let taken = checkpoint.tensor(packed.name).filter(|taken| taken.name != packed.codes.name);
            if let Some(taken) = taken {
                let (file, tensor) = (packed.codes.file.into(), packed.codes.name.into());
                return Err(Error::Output(OutputError::NameTaken { file, tensor, name: taken.name.into() }));
            }
            let output = Outline { name: packed.name.into(), dtype, shape: packed.shape.clone() };
            let (tensor, plan) = (packed.codes, DequantizePlan::Packed(packed));
            Job { tensor, plan, position, outputs: vec![output] }
        }
        Logical::Plain(tensor) if tensor.scaling.is_some() => {
            let outputs = vec![Outline { dtype, ..unchanged(&tensor) }];
            Job { tensor, plan: DequantizePlan::Scaled, position, outputs }
        }
        Logical::Plain(tensor) => {
            Job { tensor, plan: DequantizePlan::Copy, position, outputs: vec![unchanged(&tensor)] }
        }
    })
}

struct Dequantizer<'a> {
    checkpoint: &'a Checkpoint,
    dtype: Dtype,
    non_finite: NonFinite,
    jobs: Vec<Job<'a, DequantizePlan<'a>>>,
}

/// Dequantizes a tensor and writes its values, band by band.
fn write_packed<'env, T: Element + Pod>(
    packed: &'env Packed<'env>,
    non_finite: NonFinite,
    worker: &Worker<'_, 'env>,
    sink: &Sink,
) -> Result<DequantizedTensor> {
    let mut done = DequantizedTensor::default();
    let (count, cols) = (elements(&packed.shape), packed.shape.last().copied().unwrap_or(1));
    let bands = packed.bands(band_for(worker.device))?;
    let (last, device, sink) = (bands.len(), worker.device, sink.clone());
    let write = move |number: usize| {
        let band = bands.get(number).cloned().unwrap_or_default();
        let (from, first) = (Instant::now(), band.start);
        let mut values: Vec<T> = packed.values_in(band, device)?;
        let report = replace(&mut values, first, cols, non_finite);
        let busy = Busy { from, until: Instant::now() };
        sink.put(0, (first * size_of::<T>()) as u64, bytemuck::cast_slice(&values).to_vec())?;
        Ok((report, busy))
    };
    worker.each_band(last, write, |(report, busy)| {
        done.report += report;
        done.busy.push(busy);
        Ok(())
    })?;
    check::<T>(&packed.codes, packed.name, &done.report, non_finite, false)?;
    let nan_scales = move |number: usize| {
        let blocks = packed.blocks_in(band(count as usize, number));
        Ok(blocks.scales.iter().filter(|scale| packed.format.is_nan_scale(**scale)).count() as u64)
    };
    worker.each_band(bands::count(count as usize), nan_scales, |of_band| {
        done.nan_scales += of_band;
        Ok(())
    })?;
    done.dequantized.add(count, packed.bytes() as u64, count * size_of::<T>() as u64);
    Ok(done)
}

impl Dequantizer<'_> {
    /// Writes the values of a tensor in a dtype, or the tensor as it is.
    fn write_as<'env, T: Element + Pod>(
        &'env self,
        job: &'env Job<'env, DequantizePlan<'env>>,
        worker: &Worker<'_, 'env>,
        sink: &Sink,
    ) -> Result<DequantizedTensor> {
        let mut done = DequantizedTensor::default();
        let input = || Input::new(self.checkpoint, job.tensor, job.position);
        match &job.plan {
            DequantizePlan::Packed(packed) => {
                return write_packed::<T>(packed, self.non_finite, worker, sink);
            }
            DequantizePlan::Experts(experts) => return experts.write::<T>(self.non_finite, worker, sink),
            DequantizePlan::Scaled => {
                let (from, tensor) = (Instant::now(), &job.tensor);
                let (bytes_after, report) = write_values::<T>(&input(), self.non_finite, worker, sink)?;
                check::<T>(tensor, tensor.name, &report, self.non_finite, false)?;
                done.report = report;
                done.busy.push(Busy { from, until: Instant::now() });
                done.dequantized.add(tensor.elements(), tensor.bytes() as u64, bytes_after);
            }
            DequantizePlan::Copy => done.copied = copy(&input(), worker, sink)?,
        }
        Ok(done)
    }
}

impl<'a> Rewrite for Dequantizer<'a> {
    type Plan = DequantizePlan<'a>;
    type Outcome = DequantizedTensor;

    fn checkpoint(&self) -> &Checkpoint {
        self.checkpoint
    }

    fn jobs(&self) -> &[Job<'_, DequantizePlan<'a>>] {
        &self.jobs
    }

    fn write<'env>(
        &'env self,
        unit: &[usize],
        worker: &Worker<'_, 'env>,
        sinks: &[Sink],
    ) -> Result<Vec<DequantizedTensor>> {
        let done = unit.iter().zip(sinks).map(|(job, sink)| match self.dtype {
            Dtype::F32 => self.write_as::<f32>(&self.jobs[*job], worker, sink),
            Dtype::F16 => self.write_as::<f16>(&self.jobs[*job], worker, sink),
            Dtype::Bf16 => self.write_as::<bf16>(&self.jobs[*job], worker, sink),
        });
        done.collect()
    }

    fn file_type(&self) -> Option<FileType> {
        Some(match self.dtype {
            Dtype::F32 => FileType::F32,
            Dtype::F16 => FileType::F16,
            Dtype::Bf16 => FileType::Bf16,
        })
    }

    fn describe(&self, description: &mut Description) {
        description.remove();
    }
}
