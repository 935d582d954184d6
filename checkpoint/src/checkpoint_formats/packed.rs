//! Reading quantized tensors: which stored tensors belong together, and what they are.
//!
//! Names, dtypes and shapes tell, by the tables of the [conventions](CheckpointFormat), and not the
//! config.json, which a single file lacks.

pub(crate) mod bands;

use std::borrow::Cow;

use microscale::formats::nvfp4::Direction;
use microscale::{Device, Element, Format, GlobalScale, QuantizedTensor, QuantizedView, ScaleLayout, Words};

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::scaled::scaled;
use crate::checkpoint_formats::storage::{Storage, StoredGlobal};
use crate::checkpoint_formats::table::{FORMATS, rescaled, stored};
use crate::checkpoint_formats::{comfyui, scaled};
use crate::dtype::FileDtype;
use crate::error::{Error, Result};
use crate::job::Position;
use crate::names::weight::WEIGHT;
use crate::read::checkpoint::Checkpoint;
use crate::read::layer_texts;
use crate::read::scaling::Scaling;
use crate::read::tensor::{Tensor, elements};

/// A tensor by the name that the model knows it by.
#[derive(Clone, Debug)]
pub enum Logical<'a> {
    /// Stored as it is, or as codes under scales.
    Plain(Tensor<'a>),
    /// Stored as codes and scales.
    Packed(Box<Packed<'a>>),
}

/// A quantized tensor in a file.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Packed<'a> {
    /// The name that the model knows.
    pub name: &'a str,
    /// The format.
    pub format: Format,
    /// The sizes of the model's parameter.
    pub shape: Vec<usize>,
    /// The codes; in GGUF files with their scales, in ggml's blocks.
    pub codes: Tensor<'a>,
    /// The block scales, if they are a tensor of their own.
    pub scales: Option<Tensor<'a>>,
    /// The global scale, if the format has one and it is stored: as it is stored and as a number.
    pub global_scale: Option<(Tensor<'a>, GlobalScale)>,
    /// The global scale that the layer's inputs are quantized with, if they are.
    pub input_scale: Option<(Tensor<'a>, GlobalScale)>,
    /// ComfyUI's text about the layer, if there is one.
    pub(crate) says: Option<Tensor<'a>>,
    pub(crate) storage: &'static Storage,
}

impl<'a> Logical<'a> {
    /// The name that the model knows.
    pub fn name(&self) -> &'a str {
        match self {
            Self::Plain(tensor) => tensor.name,
            Self::Packed(packed) => packed.name,
        }
    }

    /// The sizes before packing.
    pub fn shape(&self) -> &[usize] {
        match self {
            Self::Plain(tensor) => tensor.shape,
            Self::Packed(packed) => &packed.shape,
        }
    }

    /// All stored tensors that it consists of.
    pub(crate) fn all_stored(&self) -> impl Iterator<Item = &Tensor<'a>> {
        let scales = match self {
            Self::Plain(_) => None,
            Self::Packed(packed) => Some(packed.scale_tensors()),
        };
        std::iter::once(self.stored()).chain(scales.into_iter().flatten())
    }

    /// The tensor whose file and place stand for it: itself, or the codes.
    pub fn stored(&self) -> &Tensor<'a> {
        match self {
            Self::Plain(tensor) => tensor,
            Self::Packed(packed) => &packed.codes,
        }
    }
}

impl<'a> Packed<'a> {
    /// The convention that it is stored by.
    pub fn convention(&self) -> CheckpointFormat {
        self.storage.convention
    }

    /// Reads codes and scales: the matrix that is stored, whose rows the blocks run along.
    ///
    /// # Errors
    /// [`Error::Tensor`] if their sizes are beyond what can be addressed, or if a scale of NVFP4 has its sign
    /// bit set.
    pub fn read(&self) -> Result<QuantizedTensor> {
        let blocks = self.blocks_in(0..elements(&self.shape) as usize);
        Ok(self.matrix([&blocks.codes, &blocks.scales], 0, self.stored_size())?.to_tensor())
    }

    /// [`Self::read`] without a copy: the bytes in the mapped file, for as long as the checkpoint is open. `None`
    /// where blocks hold codes and scales together, as in GGUF, or in another order, as in ComfyUI's.
    ///
    /// # Errors
    /// The errors of [`Self::read`].
    pub fn view(&self) -> Result<Option<QuantizedView<'a>>> {
        let blocks = self.blocks_in(0..elements(&self.shape) as usize);
        match (blocks.codes, blocks.scales) {
            (Cow::Borrowed(codes), Cow::Borrowed(scales)) => {
                self.matrix([codes, scales], 0, self.stored_size()).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Rows and columns of the matrix that is stored.
    fn stored_size(&self) -> [usize; 2] {
        let stored = self.storage.stored_shape(&self.shape);
        let (rows, cols) = Tensor { shape: &stored, ..self.codes }.matrix();
        [rows, cols]
    }

    /// The tensor as codes under scales of blocks of a row, which have values wherever values are asked for: MXFP8, and MXFP4 in
    /// linear order.
    pub(crate) fn scaled(&self, checkpoint: &'a Checkpoint) -> Option<Tensor<'a>> {
        let bits = match self.format {
            Format::Mxfp8E4m3 => 8,
            Format::Mxfp4 => 4,
            _ => return None,
        };
        let apart = self.shape.len() > 1 && !self.storage.transposed && self.storage.blocks.is_none();
        let Tensor { name, dtype, data, file, .. } = self.scales.filter(|_| apart)?;
        let layout = self.storage.comfy.map_or(ScaleLayout::Linear, |_| ScaleLayout::Swizzled);
        let block = [1, self.format.block()];
        let scaling = Scaling { name, dtype, data, file, block, shared: false, bits, layout };
        let shape = checkpoint.keep_shape(&self.codes, &self.shape)?;
        Some(Tensor { name: self.name, shape, scaling: Some(scaling), ..self.codes })
    }

    /// Blocks.
    pub fn blocks(&self) -> u64 {
        elements(&self.shape) / self.format.block() as u64
    }

    /// The values of the model's parameter.
    ///
    /// # Errors
    /// Those of [`Self::read`], and [`Error::Tensor`] if the device fails.
    pub fn values<T: Element>(&self, device: &Device) -> Result<Vec<T>> {
        let mut values = Vec::with_capacity(elements(&self.shape) as usize);
        for band in self.bands()? {
            values.extend(self.values_in::<T>(band, device)?);
        }
        Ok(values)
    }

    /// Gives an error this tensor's name.
    pub fn error(&self, source: microscale::Error) -> Error {
        Error::tensor(self.codes.file, self.name, source)
    }

    /// The stored tensors beside the codes.
    pub fn scale_tensors(&self) -> impl Iterator<Item = &Tensor<'a>> {
        let global_scales = self.global_scale.iter().chain(&self.input_scale);
        self.scales.iter().chain(global_scales.map(|(tensor, _)| tensor)).chain(&self.says)
    }

    /// Bytes of everything that is stored.
    pub fn bytes(&self) -> usize {
        self.codes.data.len() + self.scale_tensors().map(|tensor| tensor.data.len()).sum::<usize>()
    }
}

/// Every tensor of a checkpoint by the name that the model knows, codes and scales taken together.
///
/// # Errors
/// [`FormatError::Packed`](crate::FormatError::Packed) for codes without scales, for shapes that do
/// not fit, and for other formats; [`Error::Tensor`] for a number that cannot be a global scale.
pub fn logical(checkpoint: &Checkpoint) -> Result<Vec<Logical<'_>>> {
    checkpoint.tensors().filter_map(|tensor| resolve(checkpoint, tensor).transpose()).collect()
}

/// Every tensor of a checkpoint as [`logical`] has it, with the position of its codes or of itself.
///
/// # Errors
/// The errors of [`logical`].
pub(crate) fn logical_positions(checkpoint: &Checkpoint) -> Result<Vec<(Position, Logical<'_>)>> {
    let resolved = checkpoint.positions().filter_map(|(position, tensor)| {
        let tensor = resolve(checkpoint, tensor).transpose()?;
        Some(tensor.map(|tensor| (position, tensor)))
    });
    resolved.collect()
}

/// The tensor of the model that a stored tensor holds; `None` for scales, which belong to their codes.
pub(crate) fn resolve<'a>(checkpoint: &'a Checkpoint, tensor: Tensor<'a>) -> Result<Option<Logical<'a>>> {
    if let Some(packed) = of_codes(checkpoint, tensor) {
        return packed.map(|packed| Some(Logical::Packed(packed.into())));
    }
    if let Some(scaled) = scaled(checkpoint, tensor)? {
        return Ok(Some(Logical::Plain(scaled)));
    }
    for owner in stored().flat_map(|storage| storage.owners_of(tensor.name)) {
        let codes = checkpoint.tensor(&owner);
        if let Some(Ok(packed)) = codes.and_then(|codes| of_codes(checkpoint, codes))
            && packed.scale_tensors().any(|scales| scales.name == tensor.name)
        {
            return Ok(None);
        }
    }
    for owner in scaled::owners_of(tensor.name) {
        let codes = checkpoint.tensor(&owner);
        if let Some(codes) = codes.filter(|codes| of_codes(checkpoint, *codes).is_none())
            && matches!(scaled(checkpoint, codes), Ok(Some(_)))
        {
            return Ok(None);
        }
    }
    Ok(Some(Logical::Plain(tensor)))
}

impl Storage {
    /// The names of the codes that a tensor of this name may be the scales of.
    fn owners_of(&self, name: &str) -> impl Iterator<Item = String> {
        let scales = name.strip_suffix(self.scales_suffix).filter(|_| self.blocks.is_none());
        let scales = scales.map(|start| format!("{start}{}", if self.scales_beside { WEIGHT } else { "" }));
        let globals = self.global_scale.iter().chain(&self.input_scale);
        let tensors = scales.into_iter().chain(globals.filter_map(|global| global.owner_of(name)));
        let says = self.comfy.and_then(|_| layer_texts::owner_of(name));
        tensors.map(|tensor| format!("{tensor}{}", self.codes_suffix)).chain(says)
    }

    /// Returns whether this is the storage of codes and scales of these dtypes. Both dtypes of bytes stand
    /// for E8M0.
    fn has_dtypes(&self, codes: FileDtype, scales: FileDtype) -> bool {
        let bytes = |dtype| if dtype == FileDtype::F8_E8M0 { FileDtype::U8 } else { dtype };
        // ComfyUI takes bytes for scales of any eight bits.
        let any = self.comfy.is_some() && scales == FileDtype::U8;
        self.codes == codes && (any || bytes(self.scales) == bytes(scales))
    }
}

/// The quantized tensor whose codes these are; `None` if they are no codes.
fn of_codes<'a>(checkpoint: &'a Checkpoint, codes: Tensor<'a>) -> Option<Result<Packed<'a>>> {
    let mut claimed = None;
    let said = comfyui::said(checkpoint, codes.name).map(|(word, _)| word);
    let is_said = |storage: &&Storage| storage.comfy.map(|comfy| comfy.word) == said.as_deref();
    for storage in stored().filter(is_said) {
        let Some(name) = codes.name.strip_suffix(storage.codes_suffix) else { continue };
        if storage.blocks.is_some() {
            if storage.codes == codes.dtype {
                return Some(packed(checkpoint, name, codes, None, storage));
            }
            continue;
        }
        let scales = storage.scales_name(name).and_then(|scales| checkpoint.tensor(&scales));
        match scales {
            Some(scales) if storage.has_dtypes(codes.dtype, scales.dtype) => {
                return Some(packed(checkpoint, name, codes, Some(scales), storage));
            }
            // A suffix of its own says that these are codes. Without one, they may be anything.
            _ if storage.codes_suffix.is_empty() => {}
            Some(scales) => claimed = Some(format!("{} with scales of {}", codes.dtype, scales.dtype)),
            None if codes.dtype == storage.codes => {
                let missing = format!("its scales, {name}{}, are missing", storage.scales_suffix);
                return Some(Err(codes.without(missing)));
            }
            None => {}
        }
    }
    let known = FORMATS.iter().find_map(|convention| (convention.unreadable)(checkpoint, &codes));
    let claimed = claimed.map(|dtypes| format!("{dtypes} is no format that can be read"));
    Some(Err(codes.unreadable(known.or(claimed)?)))
}

/// Puts a quantized tensor together, and checks that its parts fit.
fn packed<'a>(
    checkpoint: &'a Checkpoint,
    name: &'a str,
    codes: Tensor<'a>,
    scales: Option<Tensor<'a>>,
    storage: &'static Storage,
) -> Result<Packed<'a>> {
    if let Some(why) = rescaled(checkpoint, name) {
        return Err(codes.unreadable(why));
    }
    let format = storage.format;
    let scales_shape = scales.map(|scales| scales.shape);
    let Some(shape) = storage.model_shape(codes.shape, scales_shape) else {
        let (codes_shape, scales_shape) = (codes.shape, scales_shape.unwrap_or_default());
        let (word, block) = (format.word(), format.block());
        let why = format!(
            "codes of shape {codes_shape:?} and scales of shape {scales_shape:?} are not {word} blocks of {block}"
        );
        return Err(codes.unreadable(why));
    };
    let of = |global: &StoredGlobal| -> Option<Result<(Tensor<'a>, GlobalScale)>> {
        let name = global.name_for(name)?;
        let Some(stored) = checkpoint.tensor(&name) else {
            let missing = || codes.without(format!("its global scale, {name}, is missing"));
            return (!global.optional).then(|| Err(missing()));
        };
        let one = if global.shape_for(&shape) == stored.shape { one_of_equals(stored) } else { stored };
        Some(self::global_scale(&one, global.direction).map(|scale| (stored, scale)))
    };
    let global_scale = storage.global_scale.as_ref().and_then(of);
    let input_scale = storage
        .input_scale
        .as_ref()
        .filter(|input| input.name_for(name).is_some_and(|name| checkpoint.tensor(&name).is_some()));
    let input_scale = input_scale.and_then(of);
    let (global_scale, input_scale) = (global_scale.transpose()?, input_scale.transpose()?);
    let says = storage.comfy.and_then(|_| checkpoint.tensor(&layer_texts::says_name(name)?));
    Ok(Packed { says, name, format, shape, codes, scales, global_scale, input_scale, storage })
}

/// The first of numbers that are the same, as one number: the global scales of a layer's experts.
fn one_of_equals(tensor: Tensor<'_>) -> Tensor<'_> {
    match tensor.data.as_chunks::<4>().0 {
        [first, rest @ ..] if tensor.shape.len() == 1 && rest.iter().all(|number| number == first) => {
            Tensor { data: first, shape: &[1], ..tensor }
        }
        _ => tensor,
    }
}

/// The global scale that a tensor holds.
///
/// # Errors
/// [`FormatError::Packed`](crate::FormatError::Packed) unless it is one F32, [`Error::Tensor`] if the
/// number cannot be a global scale.
pub(crate) fn global_scale(tensor: &Tensor<'_>, direction: Direction) -> Result<GlobalScale> {
    let value = (tensor.dtype == FileDtype::F32).then(|| tensor.data.try_into().ok()).flatten();
    let value = value.map(f32::from_le_bytes).ok_or_else(|| {
        let (dtype, shape) = (tensor.dtype, tensor.shape);
        tensor.unreadable(format!("a global scale is one F32, and this is {dtype} of shape {shape:?}"))
    })?;
    let given = GlobalScale::of(direction, value);
    if given.in_range() {
        Ok(given)
    } else {
        Err(Error::tensor(tensor.file, tensor.name, microscale::Error::GlobalScale { given }))
    }
}
