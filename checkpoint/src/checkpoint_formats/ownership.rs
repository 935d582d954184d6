//! The tensors of a model in a checkpoint, and the tensor that each stored tensor is part of.

use std::collections::HashMap;

use microscale::Format;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::hadamard::Hadamards;
use crate::checkpoint_formats::packed::{Logical, Packed, packed};
use crate::checkpoint_formats::quark::other_scales;
use crate::checkpoint_formats::strays::Strays;
use crate::checkpoint_formats::table::stored;
use crate::checkpoint_formats::transforms::transforms;
use crate::checkpoint_formats::w8_sources::{parts, under_scales};
use crate::dtype::FileDtype;
use crate::error::format::FormatError;
use crate::error::{Error, Result};
use crate::read::checkpoint::Checkpoint;
use crate::read::position::Position;
use crate::read::tensor::Tensor;

/// The model's tensors, found in one pass over the stored tensors.
pub(crate) struct Ownership<'a> {
    /// Each stored tensor with its position, and the model's tensor whose codes it has, if it has
    /// codes.
    codes: Vec<(Position, Tensor<'a>, Result<Option<Logical<'a>>>)>,
    /// The name of the codes that each part of a tensor belongs to, by the name of the part.
    owners: HashMap<&'a str, &'a str>,
    strays: Strays<'a>,
}

impl<'a> Ownership<'a> {
    pub(crate) fn of(checkpoint: &'a Checkpoint) -> Self {
        let (mut codes, mut owners, mut coded) = (Vec::new(), HashMap::new(), Vec::new());
        let facts = ConfigFacts::of(checkpoint);
        for (position, stored) in checkpoint.positions() {
            let found = find(checkpoint, stored, &facts);
            match &found {
                Ok(Some(Logical::Packed(packed))) => {
                    owners.extend(packed.scale_tensors().map(|part| (part.name, stored.name)));
                }
                Ok(Some(Logical::Plain(_))) => {
                    owners.extend(parts(checkpoint, stored.name).map(|part| (part.name, stored.name)));
                }
                Ok(None) | Err(_) => {}
            }
            if matches!(found, Ok(Some(_))) && !coded.contains(&stored.dtype) {
                coded.push(stored.dtype);
            }
            codes.push((position, stored, found));
        }
        Self { codes, owners, strays: Strays::of(checkpoint, coded) }
    }

    /// Returns each stored tensor, in the order of the files, with the model's tensor that it
    /// stands for. This is `None` for parts of other tensors, and an error for stray parts.
    pub(crate) fn tensors(self) -> impl Iterator<Item = StoredLogical<'a>> {
        let Self { codes, owners, strays } = self;
        codes.into_iter().map(move |(position, stored, found)| {
            let plain = || strays.error(&stored).map_or(Ok(Logical::Plain(stored)), Err);
            let other = || (!owners.contains_key(stored.name)).then(plain);
            StoredLogical { position, stored, logical: found.transpose().or_else(other) }
        })
    }
}

/// A stored tensor, and the model's tensor that it stands for.
pub(crate) struct StoredLogical<'a> {
    pub(crate) position: Position,
    pub(crate) stored: Tensor<'a>,
    /// `None` for parts of other tensors.
    pub(crate) logical: Option<Result<Logical<'a>>>,
}

/// Facts of a config about quantized tensors, beyond their names and dtypes.
struct ConfigFacts<'a> {
    /// The reason why Quark's scales cannot be read, if there is one.
    other_scales: Option<String>,
    hadamards: Option<Hadamards<'a>>,
}

impl<'a> ConfigFacts<'a> {
    fn of(checkpoint: &'a Checkpoint) -> Self {
        let hadamards = transforms(checkpoint).and_then(|transforms| transforms.hadamards());
        Self { other_scales: other_scales(checkpoint), hadamards }
    }
}

/// Returns the model's tensor whose codes a stored tensor has, or `None` for other tensors.
fn find<'a>(
    checkpoint: &'a Checkpoint,
    stored: Tensor<'a>,
    facts: &ConfigFacts<'_>,
) -> Result<Option<Logical<'a>>> {
    let Some(packed) = packed(checkpoint, stored) else {
        return Ok(under_scales(checkpoint, stored)?.map(Logical::Plain));
    };
    let mut packed = packed?;
    if let Some(hadamards) = &facts.hadamards {
        let columns = packed.shape.last().copied().unwrap_or(0);
        let width = hadamards.width_of(checkpoint.naming, packed.name);
        // `undone` reports widths that do not fit.
        packed.hadamard = width.filter(|width| columns.is_multiple_of(width.columns()));
    }
    let is_quark = packed.checkpoint_format() == CheckpointFormat::Quark && packed.format == Format::Mxfp4;
    match facts.other_scales.as_ref().filter(|_| is_quark) {
        Some(why) => Err(stored.unreadable(why.clone())),
        None => Ok(Some(Logical::Packed(packed.into()))),
    }
}

impl Checkpoint {
    /// Returns one quantized tensor by the name that the model knows, such as
    /// `model.layers.0.mlp.down_proj.weight`.
    ///
    /// Works for every checkpoint format. Only the parts of this tensor are looked at, so you can
    /// call it for each layer. To walk all tensors, call [`logical`].
    ///
    /// ```no_run
    /// use std::path::Path;
    ///
    /// use microscale::{Device, Shape};
    /// use microscale_checkpoint::Checkpoint;
    ///
    /// let checkpoint = Checkpoint::open(Path::new("OUT"))?;
    /// let packed = checkpoint.quantized("model.layers.0.mlp.down_proj.weight")?;
    /// let x = vec![1f32; packed.shape[1]];
    /// let y = Device::Cpu.linear(&x, Shape::new(1, packed.shape[1]), &packed.read()?)?;
    /// assert_eq!(y.len(), packed.shape[0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FormatError::NoTensor`] if there is no such tensor, [`FormatError::PartOf`] for the name of
    /// a part, and [`FormatError::NotQuantized`] for a tensor without blocks. The errors of
    /// [`logical`] about this tensor.
    pub fn quantized(&self, name: &str) -> Result<Packed<'_>> {
        let facts = ConfigFacts::of(self);
        let mut suffixes: Vec<_> = stored().map(|storage| storage.codes_suffix).collect();
        suffixes.sort_unstable();
        suffixes.dedup();
        for suffix in suffixes {
            let Some(codes) = self.tensor(&format!("{name}{suffix}")) else { continue };
            match find(self, codes, &facts)? {
                Some(Logical::Packed(packed)) if packed.name == name => return Ok(*packed),
                _ => {}
            }
        }
        Err(Error::Format(self.not_quantized(name)))
    }

    /// Returns the reason why no quantized tensor has a name.
    fn not_quantized(&self, name: &str) -> FormatError {
        let (path, tensor) = (self.path().to_path_buf(), name.to_string());
        let tensors = Ownership::of(self);
        let owner = tensors.owners.get(name).copied().or_else(|| self.tensor(name).map(|found| found.name));
        let mut names = tensors.codes.iter().filter_map(|(_, stored, found)| match found {
            Ok(Some(Logical::Packed(packed))) => Some((stored.name, packed.name)),
            _ => None,
        });
        if let Some(owner) = owner {
            if let Some((_, whole)) = names.find(|(codes, _)| *codes == owner) {
                return FormatError::PartOf { path, tensor, whole: whole.into() };
            }
            let stored = self.tensor(name);
            let (dtype, shape) =
                stored.map_or((FileDtype::U8, Vec::new()), |stored| (stored.dtype, stored.shape.to_vec()));
            return FormatError::NotQuantized { path, tensor, dtype, shape };
        }
        let similar =
            names.map(|(_, whole)| whole).find(|whole| whole.contains(name) || name.contains(whole));
        FormatError::NoTensor { path, tensor, similar: similar.map(String::from) }
    }
}

/// Every tensor of a checkpoint by the name that the model knows, with codes and scales combined.
///
/// # Errors
/// [`FormatError::Packed`](crate::FormatError::Packed) for codes without scales and scales without
/// codes, for shapes that do not fit, and for unknown formats.
/// [`Error::Tensor`](crate::Error::Tensor) for a number that cannot be a global scale.
pub fn logical(checkpoint: &Checkpoint) -> Result<Vec<Logical<'_>>> {
    Ownership::of(checkpoint).tensors().filter_map(|tensor| tensor.logical).collect()
}

/// Returns every tensor as [`logical`] does, with the position of its codes or of itself.
///
/// # Errors
/// The errors of [`logical`].
pub(crate) fn logical_positions(checkpoint: &Checkpoint) -> Result<Vec<(Position, Logical<'_>)>> {
    let tensors = Ownership::of(checkpoint).tensors();
    tensors.filter_map(|tensor| Some(tensor.logical?.map(|logical| (tensor.position, logical)))).collect()
}
