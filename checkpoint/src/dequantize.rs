//! Dequantizing a checkpoint: quantized tensors become values again, under the names that the model knows.
//! All other tensors are copied.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::Instant;

use bytemuck::Pod;
use half::{bf16, f16};
use microscale::{Device, Dtype, Element, NonFinite, Report};

use crate::checkpoint_formats::ownership::logical;
use crate::checkpoint_formats::packed::{Logical, Packed};
use crate::error::format::FormatError;
use crate::error::output::OutputError;
use crate::error::{Error, Result};
use crate::gguf::metadata::FileType;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::tensor::{Tensor, elements};
use crate::read::values::file_dtype;
use crate::sums::Sums;
use crate::write::busy::Busy;
use crate::write::narrowed::{check, replace};
use crate::write::others::Skipped;
use crate::write::outline::{Outline, unchanged};
use crate::write::progress::OnProgress;
use crate::write::rewrite::rewrite;
use crate::write::values::write_values;
use crate::write::work::Rewrite;
use crate::write::writer::Sink;

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
    /// Time in which anything was being dequantized.
    pub compute_seconds: f64,
    /// Time for everything, reading and writing included.
    pub seconds: f64,
}

/// Writes the checkpoint with its quantized tensors as values of `dtype` again, under the names that the
/// model knows.
///
/// Without a dtype it is the one that the config.json names, or else BF16. Values beyond the dtype's largest number are refused by
/// [`NonFinite::Error`], written as infinities by [`NonFinite::Propagate`], and as the largest number by [`NonFinite::Saturate`]. A
/// NaN is of the checkpoint itself: it stays NaN, and only [`NonFinite::Saturate`] writes 0. As in [`quantize`](crate::quantize()), a
/// few tensors are in memory at a time, and after a failure there is no output.
///
/// # Errors
/// [`FormatError::NothingPacked`](crate::FormatError::NothingPacked),
/// [`FormatError::Packed`](crate::FormatError::Packed),
/// [`FormatError::NotFinite`](crate::FormatError::NotFinite),
/// [`OutputError::NameTaken`](crate::OutputError::NameTaken), [`Error::Tensor`], and everything about
/// writing.
pub fn dequantize(
    checkpoint: &Checkpoint,
    out: &Path,
    dtype: Option<Dtype>,
    non_finite: NonFinite,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<Dequantized> {
    let start = Instant::now();
    let logical = logical(checkpoint)?;
    let (mut packed, mut scaled) = (HashMap::new(), HashMap::new());
    for tensor in &logical {
        if let Logical::Plain(tensor) = tensor
            && tensor.scaling.is_some()
        {
            scaled.insert(tensor.name, tensor);
        }
        if let Logical::Packed(tensor) = tensor {
            if let Some(taken) =
                checkpoint.tensor(tensor.name).filter(|taken| taken.name != tensor.codes.name)
            {
                let (codes, name) = (tensor.codes, taken.name.into());
                return Err(Error::Output(OutputError::NameTaken {
                    file: codes.file.into(),
                    tensor: codes.name.into(),
                    name,
                }));
            }
            packed.insert(tensor.codes.name, &**tensor);
        }
    }
    if packed.is_empty() && scaled.is_empty() {
        return Err(Error::Format(FormatError::NothingPacked {
            doing: "dequantize",
            path: checkpoint.path.clone(),
        }));
    }
    // Scales belong to their codes, and are no tensors of their own.
    let left: HashSet<_> = logical.iter().map(|tensor| tensor.stored().name).collect();
    let scales = checkpoint.tensors().map(|tensor| tensor.name).filter(|name| !left.contains(name)).collect();
    let dtype = dtype.or_else(|| configured_dtype(checkpoint)).unwrap_or(Dtype::Bf16);
    let work = Dequantizer { checkpoint, dtype, non_finite, packed, scaled, scales };
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

struct Dequantizer<'a> {
    checkpoint: &'a Checkpoint,
    dtype: Dtype,
    non_finite: NonFinite,
    /// The quantized tensors, by the name of the codes.
    packed: HashMap<&'a str, &'a Packed<'a>>,
    /// The tensors of codes under scales.
    scaled: HashMap<&'a str, &'a Tensor<'a>>,
    /// The names of the scales, block scales and global ones.
    scales: HashSet<&'a str>,
}

/// The outcome of one tensor of a file.
#[derive(Default)]
struct Done {
    dequantized: Sums,
    copied: Sums,
    nan_scales: u64,
    report: Report,
    busy: Vec<Busy>,
}

/// Dequantizes a tensor and writes its values, band by band.
fn write_packed<T: Element>(
    packed: &Packed<'_>,
    non_finite: NonFinite,
    device: &Device,
    sink: &Sink<'_>,
) -> Result<Done> {
    let mut done = Done::default();
    let (mut written, cols) = (0, packed.shape.last().copied().unwrap_or(1));
    for band in packed.bands()? {
        let (from, first) = (Instant::now(), band.start);
        let mut values: Vec<T> = packed.values_in(band, device)?;
        done.report += replace(&mut values, first, cols, non_finite);
        done.busy.push(Busy { from, until: Instant::now() });
        let values: &[u8] = bytemuck::cast_slice(&values);
        written += values.len() as u64;
        sink.append(packed.name, values)?;
    }
    check::<T>(&packed.codes, packed.name, &done.report, non_finite, false)?;
    for blocks in packed.each_blocks() {
        let nan_scales = blocks.scales.iter().filter(|scale| packed.format.is_nan_scale(**scale));
        done.nan_scales += nan_scales.count() as u64;
    }
    done.dequantized.add(elements(&packed.shape), packed.bytes() as u64, written);
    Ok(done)
}

impl Dequantizer<'_> {
    /// Writes the values of a tensor in a dtype, or the tensor as it is.
    fn write_as<T: Element + Pod>(
        &self,
        tensor: &Tensor<'_>,
        device: &Device,
        sink: &Sink<'_>,
    ) -> Result<Done> {
        let mut done = Done::default();
        if let Some(packed) = self.packed.get(tensor.name) {
            return write_packed::<T>(packed, self.non_finite, device, sink);
        } else if let Some(scaled) = self.scaled.get(tensor.name) {
            let from = Instant::now();
            let (bytes_after, report) = write_values::<T>(scaled, self.non_finite, sink)?;
            check::<T>(scaled, scaled.name, &report, self.non_finite, false)?;
            done.report = report;
            done.busy.push(Busy { from, until: Instant::now() });
            done.dequantized.add(scaled.elements(), scaled.bytes() as u64, bytes_after);
        } else if !self.scales.contains(tensor.name) {
            done.copied = sink.copy(tensor)?;
        }
        Ok(done)
    }
}

impl Rewrite for Dequantizer<'_> {
    type Done = Done;

    fn checkpoint(&self) -> &Checkpoint {
        self.checkpoint
    }

    fn outlines(&self, tensor: &Tensor<'_>) -> Vec<Outline> {
        let dtype = file_dtype(self.dtype);
        match self.packed.get(tensor.name) {
            Some(packed) => vec![Outline { name: packed.name.into(), dtype, shape: packed.shape.clone() }],
            None if self.scaled.contains_key(tensor.name) => vec![Outline { dtype, ..unchanged(tensor) }],
            None if self.scales.contains(tensor.name) => Vec::new(),
            None => vec![unchanged(tensor)],
        }
    }

    fn write(&self, tensors: &[Tensor<'_>], device: &Device, sink: &Sink<'_>) -> Result<Vec<Done>> {
        let done = tensors.iter().map(|tensor| match self.dtype {
            Dtype::F32 => self.write_as::<f32>(tensor, device, sink),
            Dtype::F16 => self.write_as::<f16>(tensor, device, sink),
            Dtype::Bf16 => self.write_as::<bf16>(tensor, device, sink),
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
