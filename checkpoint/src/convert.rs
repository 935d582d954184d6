//! Converting a quantized checkpoint to another checkpoint format, or exactly to another format, without quantizing again.

pub(crate) mod casts;
pub(crate) mod done;
pub(crate) mod fp8_block;
pub(crate) mod requantized;
pub(crate) mod rounding;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::Instant;

use microscale::cast::to_mxfp8;
use microscale::{Device, Format, GlobalScale, ScaleLayout};

use crate::checkpoint_format::{CheckpointFormat, Written};
use crate::checkpoint_formats::group::Group;
use crate::checkpoint_formats::ignored::ignored;
use crate::checkpoint_formats::ownership::logical;
use crate::checkpoint_formats::packed::{Logical, Packed};
use crate::checkpoint_formats::storage::{Storage, StoredGlobal};
use crate::convert::casts::{Cast, cast_alike, casts};
use crate::convert::done::{BF16, Done, in_bf16};
use crate::convert::fp8_block::Fp8Blocks;
use crate::convert::requantized::Requantized;
use crate::convert::rounding::{Rounding, rounding};
use crate::error::format::FormatError;
use crate::error::output::OutputError;
use crate::error::{Error, Result};
use crate::gguf::metadata::FileType;
use crate::names::weight::is_expert;
use crate::plan::loaders::EXPERTS;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::tensor::{Tensor, elements};
use crate::reason::Reason;
use crate::sums::Sums;
use crate::write::others::Skipped;
use crate::write::outline::{Outline, unquantized};
use crate::write::progress::OnProgress;
use crate::write::rewrite::rewrite;
use crate::write::work::Rewrite;
use crate::write::writer::Sink;

/// The outcome of converting a checkpoint.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Converted {
    /// The convention of the output.
    pub to: CheckpointFormat,
    /// Sums over the quantized tensors.
    pub converted: Sums,
    /// The tensors among them that were cast to another format, exactly.
    pub cast: u64,
    /// The tensors that no cast keeps as they are, if [`Checkpoint::requantize`] lets their values be rounded.
    pub requantized: Vec<Requantized>,
    /// Sums over codes of eight bits under scales: their values are written in bf16.
    pub in_bf16: Sums,
    /// Sums over the tensors that were copied.
    pub copied: Sums,
    /// The tensors whose values are not the same to the bit.
    pub rounded: Vec<Rounding>,
    /// Layers whose inputs have a global scale that was rounded.
    pub rounded_inputs: Vec<String>,
    /// Layers whose inputs have a global scale that the output has no place for.
    pub dropped_inputs: Vec<String>,
    /// The quantization of the cache of keys and values that the input declares, if the output does not.
    pub dropped_cache: Option<String>,
    /// Loaders that read the output wrongly, without an error; and what helps.
    pub misread_by: Vec<String>,
    /// Other entries of the directory that were not copied.
    pub skipped: Vec<Skipped>,
    /// Time for everything, reading and writing included.
    pub seconds: f64,
}

/// Writes the checkpoint by another convention: the same codes and block scales, under its names and in its
/// order, with its config.
///
/// A global scale may have to be inverted, which rounds it. So every tensor is dequantized before and after,
/// and each whose values are not the same to the bit is told of. Given a format, tensors of other ones are cast to it if their values
/// stay the same to the bit: from MXFP4 to NVFP4, layers that serving engines fuse under one global scale, and from both to MXFP8 with E4M3.
/// [`CheckpointFormat::Fp8Block`] needs no format: all tensors are cast to FP8 under a scale for each 128×128, as exactly.
///
/// What is not exact is refused, or after [`Checkpoint::requantize`] rounded and told of: tensors are what
/// [`quantize`](crate::quantize()) makes of their f32 values by default, parts of a fused layer together; blocks of 128×128 what transformers makes of
/// them; and codes of eight bits under scales, which otherwise become bf16 if that is exact, are rounded to it. As in [`quantize`](crate::quantize()), a few
/// tensors are in memory at a time and a failure leaves nothing behind.
///
/// # Errors
/// [`FormatError::NothingPacked`](crate::FormatError::NothingPacked);
/// [`FormatError::NotStored`](crate::FormatError::NotStored) and
/// [`FormatError::NotConverted`](crate::FormatError::NotConverted) and
/// [`FormatError::NotHeld`](crate::FormatError::NotHeld) for what the convention cannot
/// hold without quantizing again; [`FormatError::NotExact`](crate::FormatError::NotExact) for what the
/// format cannot; [`FormatError::Scaled`](crate::FormatError::Scaled), [`FormatError::NotExactBlocks`](crate::FormatError::NotExactBlocks); [`OutputError::NameTaken`](crate::OutputError::NameTaken),
/// [`FormatError::Packed`](crate::FormatError::Packed), and everything about writing.
pub fn convert(
    checkpoint: &Checkpoint,
    to: CheckpointFormat,
    format: Option<Format>,
    out: &Path,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<Converted> {
    let start = Instant::now();
    checkpoint.check_container(to)?;
    let logical = logical(checkpoint)?;
    let (tensors, skipped, cast, misread_by);
    if to.written() == Written::ByConvert {
        let work = Fp8Blocks::new(checkpoint, &logical, format)?;
        (tensors, skipped) = rewrite(checkpoint, out, &work, device, progress)?;
        (cast, misread_by) = (work.tensors(), Vec::new());
    } else {
        let work = Converter::new(checkpoint, &logical, to, format)?;
        (tensors, skipped) = rewrite(checkpoint, out, &work, device, progress)?;
        (cast, misread_by) = (work.casts.len() as u64, work.misread_by());
    }
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

struct Converter<'a> {
    checkpoint: &'a Checkpoint,
    to: CheckpointFormat,
    /// The quantized tensors, by the name of the codes.
    packed: HashMap<&'a str, (&'a Packed<'a>, &'static Storage)>,
    /// The tensors of codes of eight bits under scales, by their names.
    scaled: HashMap<&'a str, Tensor<'a>>,
    /// The names of scales, which are written with their codes.
    scales: HashSet<&'a str>,
    /// The casts of tensors to another format, by the name of the codes.
    casts: HashMap<&'a str, Cast>,
}

impl<'a> Converter<'a> {
    fn new(
        checkpoint: &'a Checkpoint,
        logical: &'a [Logical<'a>],
        to: CheckpointFormat,
        format: Option<Format>,
    ) -> Result<Self> {
        let (mut packed, mut scaled) = (HashMap::new(), HashMap::new());
        for tensor in logical {
            if let Logical::Plain(tensor) = tensor
                && let Some(scaling) = &tensor.scaling
            {
                if !checkpoint.requantize && !scaling.is_exact_in_bf16() {
                    let (file, tensor, dtype) = (tensor.file.into(), tensor.name.into(), tensor.dtype);
                    return Err(Error::Format(FormatError::Scaled { file, tensor, dtype, to }));
                }
                scaled.insert(tensor.name, *tensor);
            }
            if let Logical::Packed(tensor) = tensor {
                let storage = Storage::of_format(to, format.unwrap_or(tensor.format))?;
                // Shapes are not recovered from padded scales.
                if storage.scale_layout == ScaleLayout::Swizzled
                    && let Some(reason) = storage.cannot_hold(tensor.name, &tensor.shape)
                {
                    let (file, tensor) = (tensor.codes.file.into(), tensor.name.into());
                    return Err(Error::Format(FormatError::NotHeld { file, tensor, to, reason }));
                }
                // What is quantized again must be of whole blocks.
                if format.is_some_and(|format| format != tensor.format)
                    && let Some(reason @ Reason::Columns { .. }) =
                        storage.cannot_hold(tensor.name, &tensor.shape)
                {
                    let (file, tensor) = (tensor.codes.file.into(), tensor.name.into());
                    return Err(Error::Format(FormatError::NotHeld { file, tensor, to, reason }));
                }
                if storage.transposed != tensor.storage.transposed {
                    let (file, tensor) = (tensor.codes.file.into(), tensor.name.into());
                    return Err(Error::Format(FormatError::NotConverted { file, tensor, to }));
                }
                packed.insert(tensor.codes.name, (&**tensor, storage));
            }
        }
        if packed.is_empty() {
            return Err(Error::Format(FormatError::NothingPacked {
                doing: "convert",
                path: checkpoint.path.clone(),
            }));
        }
        // Scales belong to their codes, and are no tensors of their own.
        let left: HashSet<_> = logical.iter().map(|tensor| tensor.stored().name).collect();
        let scales = checkpoint.tensors().map(|tensor| tensor.name);
        let scales = scales.filter(|name| !left.contains(name)).collect();
        // In the order of the checkpoint, so that the first error is always the same.
        let others = checkpoint.tensors().filter_map(|tensor| Some(packed.get(tensor.name)?.0));
        let others = others.filter(|packed| format.is_some_and(|format| format != packed.format));
        let casts = match format {
            Some(format) => casts(&others.collect::<Vec<_>>(), format, checkpoint.requantize)?,
            None => HashMap::new(),
        };
        let converter = Self { checkpoint, to, packed, scaled, scales, casts };
        converter.check_names()?;
        Ok(converter)
    }

    /// Loaders that read the output wrongly, without an error.
    fn misread_by(&self) -> Vec<String> {
        let misread = |(packed, _): &(&Packed<'_>, _)| {
            let scale = self.global_scale(packed);
            is_expert(packed.name) && scale.is_some_and(|scale| scale.value() != 1.0)
        };
        let ours = self.to == CheckpointFormat::CompressedTensors;
        (ours && self.packed.values().any(misread)).then(|| EXPERTS.into()).into_iter().collect()
    }

    /// Every tensor of the output must have a name of its own.
    fn check_names(&self) -> Result<()> {
        let mut taken = HashSet::new();
        for tensor in self.checkpoint.tensors() {
            for Outline { name, .. } in self.outlines(&tensor) {
                if !taken.insert(name.clone()) {
                    let (file, tensor) = (tensor.file.into(), tensor.name.into());
                    return Err(Error::Output(OutputError::NameTaken { file, tensor, name }));
                }
            }
        }
        Ok(())
    }

    /// The scale of a layer's inputs as it will be stored: how, and what.
    fn input_scale(
        packed: &Packed<'_>,
        storage: &'static Storage,
    ) -> Option<(Outline, &'static StoredGlobal, GlobalScale)> {
        let ((_, scale), input) = packed.input_scale.zip(storage.input_scale.as_ref())?;
        Some((input.outline(packed.name, &packed.shape)?, input, scale.toward(input.direction)))
    }

    /// The global scale of a tensor after its cast, if it has one.
    fn global_scale(&self, packed: &Packed<'_>) -> Option<GlobalScale> {
        match self.casts.get(packed.codes.name) {
            Some(cast) => cast.global_scale(),
            None => packed.global_scale.map(|(_, scale)| scale),
        }
    }

    /// Compares a quantized tensor's values before and after, and writes it, both band by band.
    fn convert(
        &self,
        packed: &Packed<'_>,
        storage: &'static Storage,
        device: &Device,
        sink: &Sink<'_>,
    ) -> Result<Done> {
        let before = self.global_scale(packed);
        let outlines = storage.outlines(packed.name, &packed.shape, before.is_some());
        let mut rounding = rounding(packed, storage);
        let cast = self.casts.get(packed.codes.name).copied();
        let mut requantized = matches!(cast, Some(Cast::Again(..)))
            .then(|| Requantized::new(packed.name, packed.format, storage.format));
        let mut tiles = storage.tiles(&packed.shape);
        for band in packed.bands()? {
            let first = band.start;
            let tensor = packed.row(&packed.blocks_in(band))?.to_tensor();
            let tensor = match (cast, &mut requantized) {
                (Some(Cast::ToNvfp4(cast)), _) => {
                    cast_alike(packed, &tensor, device, |band| cast.cast(band))?
                }
                (Some(Cast::ToMxfp8), _) => cast_alike(packed, &tensor, device, |band| to_mxfp8(band))?,
                (Some(Cast::Again(recipe, scale)), Some(told)) => {
                    told.band(packed, storage, (&recipe, scale), (first, &tensor), device)?
                }
                _ => tensor,
            };
            if let Some(rounding) = &mut rounding {
                rounding.add(packed, &tensor, device)?;
            }
            for (outline, data) in outlines.iter().zip(storage.block_parts(tensor, &mut tiles)) {
                sink.append(&outline.name, &data)?;
            }
        }
        for (name, data) in storage.other_parts(packed.name, &packed.shape, before, tiles) {
            sink.write(&name, &data)?;
        }
        let mut bytes_after = outlines.iter().map(Outline::bytes).sum();
        let rounded = rounding.filter(|rounding| rounding.differing != 0);
        let mut done = Done { rounded, requantized, ..Done::default() };
        if let Some((outline, input, after)) = Self::input_scale(packed, storage) {
            bytes_after += outline.bytes();
            sink.write(&outline.name, &input.bytes(after, &packed.shape))?;
            let rounded =
                packed.input_scale.is_some_and(|(_, before)| after.toward(before.direction()) != before);
            done.rounded_input = rounded.then(|| packed.name.into());
        } else if packed.input_scale.is_some() {
            done.dropped_input = Some(packed.name.into());
        }
        done.converted.add(elements(&packed.shape), packed.bytes() as u64, bytes_after);
        Ok(done)
    }
}

impl Rewrite for Converter<'_> {
    type Done = Done;

    fn checkpoint(&self) -> &Checkpoint {
        self.checkpoint
    }

    fn outlines(&self, tensor: &Tensor<'_>) -> Vec<Outline> {
        match self.packed.get(tensor.name) {
            Some((packed, storage)) => {
                let global_scale = self.global_scale(packed);
                let mut outlines = storage.outlines(packed.name, &packed.shape, global_scale.is_some());
                outlines.extend(Self::input_scale(packed, storage).map(|(outline, ..)| outline));
                outlines
            }
            None if self.scales.contains(tensor.name) => Vec::new(),
            None => vec![unquantized(self.scaled.get(tensor.name).unwrap_or(tensor))],
        }
    }

    fn write(&self, tensors: &[Tensor<'_>], device: &Device, sink: &Sink<'_>) -> Result<Vec<Done>> {
        let done = tensors.iter().map(|tensor| {
            if let Some((packed, storage)) = self.packed.get(tensor.name).copied() {
                return self.convert(packed, storage, device, sink);
            }
            if let Some(scaled) = self.scaled.get(tensor.name) {
                return in_bf16(scaled, self.checkpoint.requantize, sink);
            }
            let with_codes = self.scales.contains(tensor.name);
            let copied = if with_codes { Sums::default() } else { sink.copy(tensor)? };
            Ok(Done { copied, ..Done::default() })
        });
        done.collect()
    }

    fn file_type(&self) -> Option<FileType> {
        None
    }

    fn describe(&self, description: &mut Description) {
        description.take_cache();
        description.remove();
        description.activations = self.packed.values().any(|(packed, _)| packed.input_scale.is_some());
        let copied = self
            .checkpoint
            .tensors()
            .filter(|tensor| !self.packed.contains_key(tensor.name) && !self.scales.contains(tensor.name))
            .map(|tensor| self.scaled.get(tensor.name).copied().unwrap_or(tensor));
        let ignore = ignored(self.checkpoint, copied);
        let packed = self.checkpoint.tensors().filter_map(|codes| self.packed.get(codes.name));
        let groups = packed.map(|(packed, storage)| (packed.name, *storage, elements(&packed.shape)));
        let groups = Group::of(groups, self.checkpoint.naming);
        self.to.describe(&groups, &ignore, description);
    }
}
