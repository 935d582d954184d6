//! Dequantizing a checkpoint: the way back.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::Instant;

use super::description::Description;
use super::error::{Error, Result};
use super::gguf::FileType;
use super::others::Skipped;
use super::packed::{Logical, Packed, logical};
use super::read::{Checkpoint, Tensor};
use super::rewrite::{OnProgress, Rewrite, rewrite, unchanged};
use super::summary::Sums;
use super::values::file_dtype;
use super::write::{Outline, Sink};
use crate::device::Device;
use crate::{Dtype, Element};

/// What happened to a checkpoint that was dequantized.
#[derive(Clone, Debug)]
pub struct Dequantized {
    /// The dtype of the values.
    pub dtype: Dtype,
    /// On what.
    pub device: String,
    /// Sums over the tensors that were dequantized.
    pub dequantized: Sums,
    /// Sums over the tensors that were copied.
    pub copied: Sums,
    /// Blocks whose scale is NaN, and so all their values.
    pub nan_scales: u64,
    /// What else was in the directory and not copied.
    pub skipped: Vec<Skipped>,
    /// Time to dequantize.
    pub compute_seconds: f64,
    /// Time for everything, reading and writing included.
    pub seconds: f64,
}

/// Writes the checkpoint with its quantized tensors as values of `dtype` again, under the names that the model knows.
///
/// Without a dtype it is the one that the config.json names, or else BF16. As in [`quantize`](super::quantize), one
/// tensor is in memory at a time and a failure leaves nothing behind.
///
/// # Errors
/// [`Error::NothingPacked`], [`Error::Packed`], [`Error::NameTaken`], [`Error::Tensor`], and everything about
/// writing.
pub fn dequantize(
    checkpoint: &Checkpoint,
    out: &Path,
    dtype: Option<Dtype>,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<Dequantized> {
    let start = Instant::now();
    let logical = logical(checkpoint)?;
    let mut packed = HashMap::new();
    for tensor in &logical {
        if let Logical::Packed(tensor) = tensor {
            if let Some(taken) =
                checkpoint.tensor(tensor.name).filter(|taken| taken.name != tensor.codes.name)
            {
                let (codes, name) = (tensor.codes, taken.name.into());
                return Err(Error::NameTaken { file: codes.file.into(), tensor: codes.name.into(), name });
            }
            packed.insert(tensor.codes.name, &**tensor);
        }
    }
    if packed.is_empty() {
        return Err(Error::NothingPacked { doing: "dequantize", path: checkpoint.path.clone() });
    }
    let scales =
        packed.values().flat_map(|packed| packed.scale_tensors()).map(|scales| scales.name).collect();
    let dtype = dtype.or_else(|| configured_dtype(checkpoint)).unwrap_or(Dtype::Bf16);
    let done = Dequantized {
        dtype,
        device: device.to_string(),
        dequantized: Sums::default(),
        copied: Sums::default(),
        nan_scales: 0,
        skipped: Vec::new(),
        compute_seconds: 0.0,
        seconds: 0.0,
    };
    let mut work = Dequantizer { device, packed, scales, done };
    let skipped = rewrite(checkpoint, out, &mut work, progress)?;
    Ok(Dequantized { skipped, seconds: start.elapsed().as_secs_f64(), ..work.done })
}

/// The dtype that a config.json says the model's weights have.
fn configured_dtype(checkpoint: &Checkpoint) -> Option<Dtype> {
    let config = &checkpoint.config.as_ref()?.json;
    let name = config.get("dtype").or_else(|| config.get("torch_dtype"))?.as_str()?;
    match name.strip_prefix("torch.").unwrap_or(name) {
        "float32" => Some(Dtype::F32),
        "float16" => Some(Dtype::F16),
        "bfloat16" => Some(Dtype::Bf16),
        _ => None,
    }
}

struct Dequantizer<'a> {
    device: &'a Device,
    /// By the name of the codes.
    packed: HashMap<&'a str, &'a Packed<'a>>,
    /// The names of the scales, block scales and global ones.
    scales: HashSet<&'a str>,
    done: Dequantized,
}

impl Dequantizer<'_> {
    /// Dequantizes a tensor and writes its values.
    fn values<'t, T: Element>(&mut self, packed: &Packed<'_>, sink: &mut Sink<'t>) -> Result<()> {
        let start = Instant::now();
        let values: Vec<T> = packed.values(self.device)?;
        self.done.compute_seconds += start.elapsed().as_secs_f64();
        let (_, scales) = packed.parts();
        let nan_scales = scales.iter().filter(|scale| packed.format.is_nan_scale(**scale));
        self.done.nan_scales += nan_scales.count() as u64;
        let bytes = size_of_val(&values[..]) as u64;
        self.done.dequantized.add(values.len() as u64, packed.bytes() as u64, bytes);
        sink.write(packed.name, Bytes(values))
    }
}

/// The bytes of values.
struct Bytes<T>(Vec<T>);

impl<T: Element> AsRef<[u8]> for Bytes<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

impl Rewrite for Dequantizer<'_> {
    fn outlines(&self, tensor: &Tensor<'_>) -> Vec<Outline> {
        match self.packed.get(tensor.name) {
            Some(packed) => {
                let dtype = file_dtype(self.done.dtype);
                vec![Outline { name: packed.name.into(), dtype, shape: packed.shape.clone() }]
            }
            None if self.scales.contains(tensor.name) => Vec::new(),
            None => vec![unchanged(tensor)],
        }
    }

    fn write<'t>(&mut self, tensor: &Tensor<'t>, sink: &mut Sink<'t>) -> Result<()> {
        if let Some(packed) = self.packed.get(tensor.name).copied() {
            return match self.done.dtype {
                Dtype::F32 => self.values::<f32>(packed, sink),
                Dtype::F16 => self.values::<half::f16>(packed, sink),
                Dtype::Bf16 => self.values::<half::bf16>(packed, sink),
            };
        }
        if !self.scales.contains(tensor.name) {
            sink.copy(tensor, &mut self.done.copied)?;
        }
        Ok(())
    }

    fn file_type(&self) -> Option<FileType> {
        Some(match self.done.dtype {
            Dtype::F32 => FileType::F32,
            Dtype::F16 => FileType::F16,
            Dtype::Bf16 => FileType::Bf16,
        })
    }

    fn describe(&self, description: &mut Description) {
        description.remove();
    }
}
