//! Quantized tensors in files: finding the parts of each, and reading them.
//!
//! Parts are found by names, dtypes and shapes, as in the table of [checkpoint
//! formats](CheckpointFormat). The config is not consulted, because a single file has none.

pub(crate) mod bands;

use std::borrow::Cow;

use microscale::formats::nvfp4::Direction;
use microscale::{
    Device, Element, Format, GlobalScale, HadamardWidth, QuantizedTensor, QuantizedView, Words,
};

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::part_name::INPUTS;
use crate::checkpoint_formats::storage::{Storage, StoredGlobal};
use crate::checkpoint_formats::table::{FORMATS, rescaled, stored};
use crate::dtype::FileDtype;
use crate::error::{Error, Result};
use crate::read::bands::band_for;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::scale_grid::{CodeKind, ScaleGrid};
use crate::read::tensor::{Tensor, elements};

/// A tensor under the name that the model knows.
#[derive(Clone, Debug)]
pub enum Logical<'a> {
    /// Unquantized, or FP8 or INT8 under scales.
    Plain(Tensor<'a>),
    /// Quantized: codes and block scales.
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
    /// The shape of the model's parameter.
    pub shape: Vec<usize>,
    /// The codes. In GGUF files, ggml's blocks of codes and scales.
    pub codes: Tensor<'a>,
    /// The block scales, if they are a separate tensor.
    pub scales: Option<Tensor<'a>>,
    /// The global scale, if one is stored: the tensor and its number.
    pub global_scale: Option<(Tensor<'a>, GlobalScale)>,
    /// The global scale of the layer's inputs, if they are quantized to the same format.
    pub input_scale: Option<(Tensor<'a>, GlobalScale)>,
    /// The transform of the layer's inputs. Codes and scales are of the transformed parameter W·H, and
    /// engines multiply inputs by H. [`Self::values`] undoes it; [`Self::read`] and [`Self::view`] do
    /// not.
    pub hadamard: Option<HadamardWidth>,
    /// Further parts about the layer's inputs, such as the scale of FP8 inputs. Outputs leave them
    /// out.
    pub(crate) other_inputs: Vec<Tensor<'a>>,
    /// The tensor that names the layer's format, if there is one.
    pub(crate) marker: Option<Tensor<'a>>,
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

    /// The shape before packing.
    pub fn shape(&self) -> &[usize] {
        match self {
            Self::Plain(tensor) => tensor.shape,
            Self::Packed(packed) => &packed.shape,
        }
    }

    /// Returns all stored tensors that it consists of.
    pub(crate) fn all_stored(&self) -> impl Iterator<Item = &Tensor<'a>> {
        let scales = match self {
            Self::Plain(_) => None,
            Self::Packed(packed) => Some(packed.scale_tensors()),
        };
        std::iter::once(self.stored()).chain(scales.into_iter().flatten())
    }

    /// Returns the stored tensor that it is listed under: itself, or the codes.
    pub fn stored(&self) -> &Tensor<'a> {
        match self {
            Self::Plain(tensor) => tensor,
            Self::Packed(packed) => &packed.codes,
        }
    }
}

impl<'a> Packed<'a> {
    /// The checkpoint format of its parts.
    pub fn checkpoint_format(&self) -> CheckpointFormat {
        self.storage.checkpoint_format
    }

    /// Reads codes and scales as the stored matrix, with blocks along its rows.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the size overflows, or if an NVFP4 scale has its sign bit set.
    pub fn read(&self) -> Result<QuantizedTensor> {
        let blocks = self.blocks_in(0..elements(&self.shape) as usize);
        Ok(self.matrix([&blocks.codes, &blocks.scales], 0, self.stored_size())?.to_tensor())
    }

    /// [`Self::read`] without a copy: the bytes in the mapped file.
    ///
    /// Returns `None` if blocks contain their scales, as in GGUF files, or if codes or scales have
    /// another order, as in ComfyUI's files.
    ///
    /// ```no_run
    /// use std::path::Path;
    ///
    /// use microscale::{Device, Shape};
    /// use microscale_checkpoint::Checkpoint;
    ///
    /// let checkpoint = Checkpoint::open(Path::new("OUT"))?;
    /// let packed = checkpoint.quantized("model.layers.0.mlp.down_proj.weight")?;
    /// let weights = packed.view()?.ok_or("needs a copy: call `read`")?;
    /// let x = vec![1f32; weights.cols()];
    /// let y = Device::Cpu.linear(&x, Shape::new(1, weights.cols()), weights)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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

    /// Returns rows and columns of the stored matrix.
    fn stored_size(&self) -> [usize; 2] {
        let stored = self.storage.stored_shape(&self.shape);
        let (rows, cols) = Tensor { shape: &stored, ..self.codes }.matrix();
        [rows, cols]
    }

    /// Returns the tensor as codes under a grid of scales, which is input of quantizing.
    ///
    /// Returns `None` for NVFP4, and if scales are no separate tensor or blocks do not run along
    /// the rows of the model's parameter.
    pub(crate) fn scaled(&self, checkpoint: &'a Checkpoint) -> Option<Tensor<'a>> {
        let codes = match self.format {
            Format::Mxfp8E4m3 => CodeKind::E4m3,
            Format::Mxfp4 => CodeKind::E2m1(self.storage.nibble_order),
            _ => return None,
        };
        let apart = self.shape.len() > 1 && !self.storage.transposed && self.storage.blocks.is_none();
        let scales = self.scales.filter(|_| apart)?;
        let (block, layout) = ([1, self.format.block()], self.storage.scale_layout);
        let grid = ScaleGrid { layout, ..scales.scale_grid(block, codes) };
        let shape = checkpoint.keep_shape(&self.codes, &self.shape)?;
        Some(Tensor { name: self.name, shape, scaling: Some(grid), ..self.codes })
    }

    /// The number of blocks.
    pub fn blocks(&self) -> u64 {
        elements(&self.shape) / self.format.block() as u64
    }

    /// The values of the model's parameter, in its own basis.
    ///
    /// # Errors
    /// The errors of [`Self::read`], and [`Error::Tensor`] if the device fails.
    pub fn values<T: Element>(&self, device: &Device) -> Result<Vec<T>> {
        let mut values = Vec::with_capacity(elements(&self.shape) as usize);
        for band in self.bands(band_for(device))? {
            values.extend(self.values_in::<T>(band, device)?);
        }
        Ok(values)
    }

    /// Adds this tensor's name to an error.
    pub fn error(&self, source: microscale::Error) -> Error {
        Error::tensor(self.codes.file, self.name, source)
    }

    /// Returns all stored tensors except the codes.
    pub fn scale_tensors(&self) -> impl Iterator<Item = &Tensor<'a>> {
        let global_scales = self.global_scale.iter().chain(&self.input_scale).map(|(tensor, _)| tensor);
        self.scales.iter().chain(global_scales).chain(&self.marker).chain(&self.other_inputs)
    }

    /// The bytes of all stored tensors.
    pub fn bytes(&self) -> usize {
        self.codes.data.len() + self.scale_tensors().map(|tensor| tensor.data.len()).sum::<usize>()
    }
}

impl Storage {
    /// Returns whether codes and scales of these dtypes are stored so. E8M0 is also declared as U8.
    fn has_dtypes(&self, codes: FileDtype, scales: FileDtype) -> bool {
        let bytes = |dtype| if dtype == FileDtype::F8_E8M0 { FileDtype::U8 } else { dtype };
        let raw = self.raw_scales && scales == FileDtype::U8;
        self.codes == codes && (raw || bytes(self.scales) == bytes(scales))
    }
}

/// Returns the quantized tensor with these codes, or `None` if a stored tensor is no codes.
///
/// # Errors
/// The errors of [`logical`](crate::logical).
pub(crate) fn packed<'a>(checkpoint: &'a Checkpoint, codes: Tensor<'a>) -> Option<Result<Packed<'a>>> {
    let (mut claimed, mut candidates) = (None, Vec::new());
    let word = checkpoint.layer_word(codes.name).map(|layer| &*layer.word);
    let has_word = |storage: &&Storage| storage.marker.map(|marker| marker.word) == word;
    for storage in stored().filter(has_word) {
        let Some(name) = codes.name.strip_suffix(storage.codes_suffix) else { continue };
        let has_dtype = storage.codes == codes.dtype;
        if storage.blocks.is_some() {
            if has_dtype {
                return Some(assemble(checkpoint, name, codes, None, storage));
            }
            continue;
        }
        // Without a suffix of their own, tensors of other dtypes are no codes.
        let is_claim = !storage.codes_suffix.is_empty();
        if !is_claim && !has_dtype {
            continue;
        }
        let scales = storage.scales_name.of(name).and_then(|scales| checkpoint.tensor(&scales));
        match scales {
            Some(scales) if storage.has_dtypes(codes.dtype, scales.dtype) => {
                candidates.push(Candidate { name, scales, storage });
            }
            _ if !is_claim => {}
            Some(scales) => claimed = Some(format!("{} with scales of {}", codes.dtype, scales.dtype)),
            None if has_dtype => {
                let missing = format!("its scales, {name}{}, are missing", storage.scales_name.suffix());
                return Some(Err(codes.without(missing)));
            }
            None => {}
        }
    }
    if let Some(Candidate { name, scales, storage }) = likeliest(checkpoint, &codes, candidates) {
        return Some(assemble(checkpoint, name, codes, Some(scales), storage));
    }
    let known = FORMATS.iter().find_map(|spec| (spec.unreadable)(checkpoint, &codes));
    let claimed = claimed.map(|dtypes| format!("{dtypes} is no format that can be read"));
    Some(Err(codes.unreadable(known.or(claimed)?)))
}

/// A storage whose names and dtypes a tensor of codes and its scales have.
struct Candidate<'a> {
    name: &'a str,
    scales: Tensor<'a>,
    storage: &'static Storage,
}

/// Returns the candidate whose shapes fit, preferably of the config's method, and then with a scale
/// of the inputs. Several formats share names and dtypes.
fn likeliest<'a>(
    checkpoint: &Checkpoint,
    codes: &Tensor<'_>,
    mut candidates: Vec<Candidate<'a>>,
) -> Option<Candidate<'a>> {
    if candidates.len() > 1 {
        let method = Description::method(checkpoint).map(|(method, _)| method);
        // The sort is stable, so the table decides about equals.
        candidates.sort_by_key(|Candidate { name, scales, storage }| {
            let fits = storage.model_shape(codes.shape, Some(scales.shape)).is_some();
            let is_method = |method: &String| storage.checkpoint_format.is_method(method);
            let input_scale = storage.input_scale.as_ref().and_then(|input| input.name_for(name));
            let has_inputs = input_scale.is_some_and(|name| checkpoint.tensor(&name).is_some());
            (!fits, !method.as_ref().is_some_and(is_method), !has_inputs)
        });
    }
    candidates.into_iter().next()
}

/// Assembles a quantized tensor, and checks that its parts fit.
fn assemble<'a>(
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
    if let Some(scale) = scale_of_scales(checkpoint, name).filter(|_| storage.global_scale.is_none()) {
        let (scale, word) = (scale.name, storage.format.word());
        return Err(codes.unreadable(format!(
            "its scales have one of their own, {scale}, and those of {word} have none; this is not understood, so \
             quantize the original again"
        )));
    }
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
    let marker = storage.marker.and_then(|marker| checkpoint.tensor(&marker.name.of(name)?));
    let input_name = input_scale.as_ref().map(|(tensor, _)| tensor.name);
    let inputs = INPUTS.iter().filter(|_| storage.blocks.is_none());
    let inputs = inputs.filter_map(|part| checkpoint.tensor(&part.of(name)?));
    let other_inputs = inputs.filter(|part| Some(part.name) != input_name).collect();
    Ok(Packed {
        marker,
        name,
        format,
        shape,
        codes,
        scales,
        global_scale,
        input_scale,
        hadamard: None,
        other_inputs,
        storage,
    })
}

/// Returns the scale of the scales of a tensor, by the names of all libraries.
fn scale_of_scales<'a>(checkpoint: &'a Checkpoint, name: &str) -> Option<Tensor<'a>> {
    let global_scales =
        stored().filter(|storage| storage.blocks.is_none()).filter_map(|storage| storage.global_scale);
    global_scales.filter_map(|global| global.name_for(name)).find_map(|name| checkpoint.tensor(&name))
}

/// Reduces equal numbers to one number. The experts of a layer repeat their global scale.
fn one_of_equals(tensor: Tensor<'_>) -> Tensor<'_> {
    match tensor.data.as_chunks::<4>().0 {
        [first, rest @ ..] if tensor.shape.len() == 1 && rest.iter().all(|number| number == first) => {
            Tensor { data: first, shape: &[1], ..tensor }
        }
        _ => tensor,
    }
}

/// Returns the global scale in a tensor.
///
/// # Errors
/// [`FormatError::Packed`](crate::FormatError::Packed) unless it is one F32, and [`Error::Tensor`]
/// if the number cannot be a global scale.
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
