//! Reading quantized tensors: which stored tensors belong together, and what they are.
//!
//! Names and shapes are those of [`compressed_tensors`](super::compressed_tensors). The format follows from dtypes and shapes,
//! not from the config.json, which a single file lacks.

use safetensors::Dtype as FileDtype;

use super::compressed_tensors::{GLOBAL_SCALE, PACKED, SCALE, codes_shape, scales_shape};
use super::error::{Error, Result};
use super::read::{Checkpoint, Tensor};
use crate::formats::nvfp4::Direction;
use crate::recipe::Words;
use crate::{Format, GlobalScale, QuantizedShape, QuantizedTensor};

/// A tensor by the name that the model knows it by.
#[derive(Clone, Debug)]
pub enum Logical<'a> {
    /// Stored as it is.
    Plain(Tensor<'a>),
    /// Stored as codes and scales.
    Packed(Packed<'a>),
}

/// A quantized tensor in a file.
#[derive(Clone, Debug)]
pub struct Packed<'a> {
    /// The name that the model knows.
    pub name: &'a str,
    /// The format.
    pub format: Format,
    /// The sizes before packing.
    pub shape: Vec<usize>,
    /// The codes.
    pub codes: Tensor<'a>,
    /// The block scales.
    pub scales: Tensor<'a>,
    /// The global scale, if the format has one, as it is stored and as a number.
    pub global_scale: Option<(Tensor<'a>, GlobalScale)>,
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

    /// The tensor whose file and place stand for it: itself, or the codes.
    pub fn stored(&self) -> &Tensor<'a> {
        match self {
            Self::Plain(tensor) => tensor,
            Self::Packed(packed) => &packed.codes,
        }
    }
}

impl<'a> Packed<'a> {
    /// Reads codes and scales.
    ///
    /// # Errors
    /// [`Error::Tensor`] if their sizes are beyond what can be addressed, or if a scale of NVFP4 has its sign bit set.
    pub fn read(&self) -> Result<QuantizedTensor> {
        let (rows, cols) = Tensor { shape: &self.shape, ..self.codes }.matrix();
        let (codes, scales) = (self.codes.data.to_vec(), self.scales.data.to_vec());
        let tensor = QuantizedTensor::from_parts(QuantizedShape::new(self.format, rows, cols), codes, scales);
        let with_global_scale = tensor.and_then(|tensor| match self.global_scale {
            None => Ok(tensor),
            Some((_, global_scale)) => tensor.with_global_scale(global_scale),
        });
        with_global_scale.map_err(|source| self.error(source))
    }

    /// Gives an error this tensor's name.
    pub fn error(&self, source: crate::Error) -> Error {
        Error::tensor(self.codes.file, self.name, source)
    }

    /// The stored tensors beside the codes.
    pub fn scale_tensors(&self) -> impl Iterator<Item = &Tensor<'a>> {
        std::iter::once(&self.scales).chain(self.global_scale.iter().map(|(tensor, _)| tensor))
    }

    /// Bytes of everything that is stored.
    pub fn bytes(&self) -> usize {
        self.codes.data.len() + self.scale_tensors().map(|tensor| tensor.data.len()).sum::<usize>()
    }
}

/// Every tensor of a checkpoint by the name that the model knows, codes and scales taken together.
///
/// # Errors
/// [`Error::Packed`] for codes without scales, for shapes that do not fit, and for other formats; [`Error::Tensor`] for a
/// number that cannot be a global scale.
pub fn logical(checkpoint: &Checkpoint) -> Result<Vec<Logical<'_>>> {
    checkpoint.tensors().filter_map(|tensor| resolve(checkpoint, tensor).transpose()).collect()
}

/// What a stored tensor stands for; `None` for scales, which their codes stand for.
pub(super) fn resolve<'a>(checkpoint: &'a Checkpoint, tensor: Tensor<'a>) -> Result<Option<Logical<'a>>> {
    if let Some(packed) = of_codes(checkpoint, tensor) {
        return packed.map(|packed| Some(Logical::Packed(packed)));
    }
    let owners = [GLOBAL_SCALE, SCALE].into_iter().filter_map(|suffix| tensor.name.strip_suffix(suffix));
    for owner in owners.flat_map(|name| [format!("{name}{PACKED}"), name.into()]) {
        if let Some(Ok(packed)) = checkpoint.tensor(&owner).and_then(|codes| of_codes(checkpoint, codes))
            && packed.scale_tensors().any(|scales| scales.name == tensor.name)
        {
            return Ok(None);
        }
    }
    Ok(Some(Logical::Plain(tensor)))
}

/// The quantized tensor whose codes these are; `None` if they are no codes.
fn of_codes<'a>(checkpoint: &'a Checkpoint, codes: Tensor<'a>) -> Option<Result<Packed<'a>>> {
    let is_e8m0 = |scales: &Tensor<'_>| matches!(scales.dtype, FileDtype::U8 | FileDtype::F8_E8M0);
    let scales_of = |name| checkpoint.tensor(&format!("{name}{SCALE}"));
    if let Some(name) = codes.name.strip_suffix(PACKED) {
        let scales = scales_of(name);
        if scales.is_none() && codes.dtype != FileDtype::U8 {
            return None;
        }
        return Some(packed(checkpoint, name, codes, scales));
    }
    // Scales of other dtypes belong to other ways of storing 8-bit floats, which are left as they are.
    let scales = scales_of(codes.name).filter(is_e8m0);
    let is_mxfp8 = codes.dtype == FileDtype::F8_E4M3 && scales.is_some();
    is_mxfp8.then(|| packed(checkpoint, codes.name, codes, scales))
}

/// Puts a quantized tensor together, and checks that its parts fit.
fn packed<'a>(
    checkpoint: &'a Checkpoint,
    name: &'a str,
    codes: Tensor<'a>,
    scales: Option<Tensor<'a>>,
) -> Result<Packed<'a>> {
    let error = |why| Error::Packed { file: codes.file.into(), tensor: codes.name.into(), why };
    let missing = |what| error(format!("its {what} missing; complete the checkpoint"));
    let scales = scales.ok_or_else(|| missing(format!("scales, {name}{SCALE}, are")))?;
    let format = match (codes.dtype, scales.dtype) {
        (FileDtype::U8, FileDtype::U8 | FileDtype::F8_E8M0) => Format::Mxfp4,
        (FileDtype::U8, FileDtype::F8_E4M3) => Format::Nvfp4,
        (FileDtype::F8_E4M3, FileDtype::U8 | FileDtype::F8_E8M0) => Format::Mxfp8E4m3,
        (codes, scales) => {
            return Err(error(format!("{codes} with scales of {scales} is no format that can be read")));
        }
    };
    let mut shape = codes.shape.to_vec();
    if let Some(last) = shape.last_mut() {
        *last = last.saturating_mul(8 / format.bits());
    }
    let fits = shape.last().is_some_and(|cols| cols % format.block() == 0);
    if !fits || codes_shape(&shape, format) != codes.shape || scales_shape(&shape, format) != scales.shape {
        let (codes, scales) = (codes.shape, scales.shape);
        let (word, block) = (format.word(), format.block());
        return Err(error(format!(
            "codes of shape {codes:?} and scales of shape {scales:?} are not {word} blocks of {block}"
        )));
    }
    let global_scale = (format == Format::Nvfp4).then(|| {
        let stored = checkpoint.tensor(&format!("{name}{GLOBAL_SCALE}"));
        let stored = stored.ok_or_else(|| missing(format!("global scale, {name}{GLOBAL_SCALE}, is")))?;
        Ok((stored, global_scale(&stored, Direction::Divisor)?))
    });
    Ok(Packed { name, format, shape, codes, scales, global_scale: global_scale.transpose()? })
}

/// The global scale that a tensor holds.
///
/// # Errors
/// [`Error::Packed`] unless it is one F32, [`Error::Tensor`] if the number cannot be a global scale.
pub(super) fn global_scale(tensor: &Tensor<'_>, direction: Direction) -> Result<GlobalScale> {
    let value = (tensor.dtype == FileDtype::F32).then(|| tensor.data.try_into().ok()).flatten();
    let value = value.map(f32::from_le_bytes).ok_or_else(|| Error::Packed {
        file: tensor.file.into(),
        tensor: tensor.name.into(),
        why: format!("a global scale is one F32, and this is {} of shape {:?}", tensor.dtype, tensor.shape),
    })?;
    let given = GlobalScale::of(direction, value);
    if given.in_range() {
        Ok(given)
    } else {
        Err(Error::tensor(tensor.file, tensor.name, crate::Error::GlobalScale { given }))
    }
}
