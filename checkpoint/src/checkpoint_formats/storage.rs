//! Storage of a format by a checkpoint format: the tensors that a quantized tensor becomes.

use std::borrow::Cow;

use microscale::formats::nvfp4::Direction;
use microscale::{Format, GlobalScale, QuantizedTensor};

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::tiles::{Tiles, swap_halves, tiled};
use crate::dtype::FileDtype;
use crate::error::format::FormatError;
use crate::error::{Error, Result};
use crate::gguf::blocks::Blocks;
use crate::names::weight::WEIGHT;
use crate::read::layer_texts::{says, says_name};
use crate::read::tensor::Tensor;
use crate::reason::Reason;
use crate::write::outline::Outline;

/// The storage of a format's tensors by a convention: the parts that a tensor X becomes.
#[derive(Debug)]
pub(crate) struct Storage {
    pub(crate) convention: CheckpointFormat,
    pub(crate) format: Format,
    /// Suffix of the tensor's name.
    pub(crate) codes_suffix: &'static str,
    pub(crate) codes: FileDtype,
    pub(crate) scales_suffix: &'static str,
    /// True if that takes the place of the tensor's `.weight`.
    pub(crate) scales_beside: bool,
    pub(crate) scales: FileDtype,
    pub(crate) global_scale: Option<StoredGlobal>,
    /// The scale that a layer's input is quantized with, if it is; its suffix takes the place of the layer's
    /// `.weight`.
    pub(crate) input_scale: Option<StoredGlobal>,
    /// Blocks that hold codes and scales together, which are one tensor then.
    pub(crate) blocks: Option<Blocks>,
    /// True if blocks are a dimension of their own.
    pub(crate) blocks_apart: bool,
    /// True if the model's parameter is the transpose of the stored tensor, in its last two dimensions.
    pub(crate) transposed: bool,
    /// The ends of the names of parameters that hold all experts of a layer, if these alone are stored so.
    pub(crate) experts: Option<&'static [&'static str]>,
    /// What is ComfyUI's alone, if it is of that.
    pub(crate) comfy: Option<Comfy>,
}

/// What ComfyUI's files have that no others do: a word for each layer's format, scales in tiles of 128×4, and matrices alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comfy {
    /// The word for the format.
    pub(crate) word: &'static str,
    /// The number that rows must be a multiple of.
    pub(crate) rows: usize,
    /// True if a byte has the first of two codes in its high half.
    pub(crate) high_first: bool,
}

/// The storage of a global scale: one F32.
#[derive(Debug)]
pub(crate) struct StoredGlobal {
    /// Suffix of the tensor's name, or of the name without [`WEIGHT`].
    pub(crate) suffix: &'static str,
    beside: bool,
    /// True if a tensor without a global scale has 1.
    pub(crate) optional: bool,
    pub(crate) direction: Direction,
    numbers: Numbers,
}

/// The number of times that a global scale is stored.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Numbers {
    /// Once, without dimensions.
    Scalar,
    /// Once, with one dimension.
    One,
    /// Once for each expert of a layer whose tensor has three dimensions, and once for others; with one
    /// dimension.
    EachExpert,
}

impl StoredGlobal {
    /// One whose name begins with the tensor's.
    pub(crate) const fn after(suffix: &'static str, direction: Direction, numbers: Numbers) -> Self {
        Self { suffix, beside: false, optional: false, direction, numbers }
    }

    /// One whose name has something else in place of [`WEIGHT`].
    pub(crate) const fn beside(suffix: &'static str, direction: Direction, numbers: Numbers) -> Self {
        Self { suffix, beside: true, optional: false, direction, numbers }
    }

    /// The same, where 1 need not be stored.
    pub(crate) const fn or_one(self) -> Self {
        Self { optional: true, ..self }
    }

    /// Its name, by that of the tensor; `None` if the tensor is no layer's weight and should be.
    pub(crate) fn name_for(&self, tensor: &str) -> Option<String> {
        let start = if self.beside { tensor.strip_suffix(WEIGHT)? } else { tensor };
        Some(format!("{start}{}", self.suffix))
    }

    /// Its shape, by that of the tensor: as many numbers, all the same.
    pub(crate) fn shape_for(&self, tensor: &[usize]) -> Vec<usize> {
        match (self.numbers, tensor) {
            (Numbers::Scalar, _) => Vec::new(),
            (Numbers::EachExpert, [experts, _, _]) => vec![*experts],
            (Numbers::One | Numbers::EachExpert, _) => vec![1],
        }
    }

    /// The tensor that it becomes; `None` where it has no name.
    pub(crate) fn outline(&self, tensor: &str, shape: &[usize]) -> Option<Outline> {
        Some(Outline { name: self.name_for(tensor)?, dtype: FileDtype::F32, shape: self.shape_for(shape) })
    }

    /// Its bytes.
    pub(crate) fn bytes(&self, scale: GlobalScale, shape: &[usize]) -> Vec<u8> {
        scale.value().to_le_bytes().repeat(self.shape_for(shape).iter().product())
    }

    /// The name of the tensor that it is for, by its own.
    pub(crate) fn owner_of(&self, name: &str) -> Option<String> {
        let start = name.strip_suffix(self.suffix)?;
        Some(if self.beside { format!("{start}{WEIGHT}") } else { start.into() })
    }
}

impl Storage {
    /// Codes and scales, each with its suffix, and nothing else.
    pub(crate) const fn plain(
        convention: CheckpointFormat,
        format: Format,
        (codes_suffix, codes): (&'static str, FileDtype),
        (scales_suffix, scales): (&'static str, FileDtype),
    ) -> Self {
        Self {
            convention,
            format,
            codes_suffix,
            codes,
            scales_suffix,
            scales_beside: false,
            scales,
            global_scale: None,
            input_scale: None,
            blocks: None,
            blocks_apart: false,
            transposed: false,
            experts: None,
            comfy: None,
        }
    }

    /// The name of the block scales, by that of the tensor; `None` if the tensor is no layer's weight and should be.
    pub(crate) fn scales_name(&self, tensor: &str) -> Option<String> {
        let start = if self.scales_beside { tensor.strip_suffix(WEIGHT)? } else { tensor };
        Some(format!("{start}{}", self.scales_suffix))
    }

    /// The reason why a tensor is not for this convention.
    pub(crate) fn cannot_hold(&self, name: &str, shape: &[usize]) -> Option<Reason> {
        let is_among = |ends: &[&str]| shape.len() == 3 && ends.iter().any(|end| name.ends_with(end));
        if self.experts.is_some_and(|ends| !is_among(ends)) {
            return Some(Reason::NotAnExpert);
        }
        let nameless = self.global_scale.as_ref().is_some_and(|global| global.name_for(name).is_none());
        if nameless || self.comfy.is_some() && says_name(name).is_none() {
            return Some(Reason::NotAWeight);
        }
        if let Some(comfy) = self.comfy {
            match *shape {
                [rows, _] if rows % comfy.rows != 0 => {
                    return Some(Reason::Rows { rows, multiple: comfy.rows });
                }
                [_, _] => {}
                _ => return Some(Reason::Dimensions(shape.len())),
            }
        }
        let (cols, block) = (self.stored_shape(shape).last().copied().unwrap_or(1), self.row_block());
        (cols % block != 0).then_some(Reason::Columns { cols, block })
    }

    /// The number that the length of rows must be a multiple of.
    pub(crate) fn row_block(&self) -> usize {
        self.blocks.map_or(self.format.block(), Blocks::elements)
    }

    /// The sizes of a model's parameter as it is stored, before packing; and the other way round.
    pub(crate) fn stored_shape<'s>(&self, shape: &'s [usize]) -> Cow<'s, [usize]> {
        match (self.transposed, shape.len()) {
            (true, rank @ 2..) => {
                let mut shape = shape.to_vec();
                shape.swap(rank - 2, rank - 1);
                shape.into()
            }
            _ => shape.into(),
        }
    }

    /// The shape of a tensor's codes in a file, given the sizes of the model's parameter.
    pub(crate) fn codes_shape(&self, shape: &[usize]) -> Vec<usize> {
        if self.blocks.is_some() {
            return self.stored_shape(shape).into_owned();
        }
        let mut shape = self.blocks_shape(shape);
        if let Some(blocks) = shape.last_mut() {
            let bytes = self.format.block_bytes();
            if self.blocks_apart {
                shape.push(bytes);
            } else {
                *blocks *= bytes;
            }
        }
        shape
    }

    /// The shape of a tensor's block scales in a file, given the sizes of the model's parameter.
    pub(crate) fn scales_shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut shape = self.blocks_shape(shape);
        if let ([rows, blocks], true) = (&mut shape[..], self.comfy.is_some()) {
            [*rows, *blocks] = tiled(*rows, *blocks);
        }
        shape
    }

    /// The numbers of a tensor's blocks along each dimension that is stored, given the sizes of the model's parameter.
    pub(crate) fn blocks_shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut shape = self.stored_shape(shape).into_owned();
        if let Some(cols) = shape.last_mut() {
            *cols /= self.format.block();
        }
        shape
    }

    /// The sizes of the model's parameter, given its codes' and scales'; `None` if those do not fit each
    /// other.
    pub(crate) fn model_shape(&self, codes: &[usize], scales: Option<&[usize]>) -> Option<Vec<usize>> {
        let Some(scales) = scales else { return Some(self.stored_shape(codes).into_owned()) };
        let mut stored = if self.comfy.is_some() { codes.to_vec() } else { scales.to_vec() };
        let cols = stored.last_mut()?;
        let blocks = if self.comfy.is_some() { *cols / self.format.block_bytes() } else { *cols };
        *cols = blocks.checked_mul(self.format.block())?;
        let shape = self.stored_shape(&stored).into_owned();
        (self.codes_shape(&shape) == codes && self.scales_shape(&shape) == scales).then_some(shape)
    }

    /// The tensors that take one's place: codes, block scales and, if the format has one, the global scale,
    /// which need not be there if it is 1 (`global` is false) and the convention says so; and ComfyUI's word for the format.
    pub(crate) fn outlines(&self, name: &str, shape: &[usize], global: bool) -> Vec<Outline> {
        let outline = |suffix, dtype, shape| Outline { name: format!("{name}{suffix}"), dtype, shape };
        let mut outlines = vec![outline(self.codes_suffix, self.codes, self.codes_shape(shape))];
        if self.blocks.is_none() {
            outlines.push(outline(self.scales_suffix, self.scales, self.scales_shape(shape)));
        }
        let stored = self.global_scale.as_ref().filter(|stored| global || !stored.optional);
        outlines.extend(stored.and_then(|stored| stored.outline(name, shape)));
        let said = self.comfy.and_then(|comfy| Some((says_name(name)?, says(comfy.word).len())));
        outlines.extend(said.map(|(name, bytes)| Outline { name, dtype: FileDtype::U8, shape: vec![bytes] }));
        outlines
    }

    /// Makes sure that files can hold block scales of a tensor, of which the first is the one of the number
    /// `before`.
    ///
    /// # Errors
    /// [`FormatError::Unheld`](crate::FormatError::Unheld).
    pub(crate) fn check_scales(&self, tensor: &Tensor<'_>, scales: &[u8], before: usize) -> Result<()> {
        let unheld = self.blocks.and_then(|blocks| blocks.first_unheld(scales));
        let Some(block) = unheld else { return Ok(()) };
        let (file, byte, convention) = (tensor.file.into(), scales[block], self.convention);
        Err(Error::Format(FormatError::Unheld {
            file,
            tensor: tensor.name.into(),
            block: before + block,
            byte,
            convention,
        }))
    }

    /// Returns whether bytes are stored as they are made: codes and scales in two tensors, in linear order.
    pub(crate) fn is_linear(&self) -> bool {
        self.blocks.is_none() && self.comfy.is_none()
    }

    /// The bytes of the next blocks in the tensors that [`Self::outlines`] announces, in its order, without those that
    /// [`Self::other_parts`] has. Scales in tiles are kept there.
    pub(crate) fn block_parts(&self, tensor: QuantizedTensor, tiles: &mut Option<Tiles>) -> Vec<Vec<u8>> {
        let (mut codes, scales) = tensor.into_parts();
        if let Some(blocks) = self.blocks {
            return vec![blocks.pack(&codes, &scales)];
        }
        if self.comfy.is_some_and(|comfy| comfy.high_first) {
            swap_halves(&mut codes);
        }
        match tiles {
            None => vec![codes, scales],
            Some(tiles) => {
                tiles.extend(&scales);
                vec![codes]
            }
        }
    }

    /// Tiles for all scales of a tensor, if they are stored so.
    pub(crate) fn tiles(&self, shape: &[usize]) -> Option<Tiles> {
        match self.blocks_shape(shape)[..] {
            [rows, blocks] if self.comfy.is_some() => Some(Tiles::new(rows, blocks)),
            _ => None,
        }
    }

    /// The tensors that are written once all blocks are, by their names: scales in tiles, the global scale, and ComfyUI's word.
    pub(crate) fn other_parts(
        &self,
        name: &str,
        shape: &[usize],
        global: Option<GlobalScale>,
        tiles: Option<Tiles>,
    ) -> Vec<(String, Vec<u8>)> {
        let needed = self.global_scale.as_ref().filter(|stored| global.is_some() || !stored.optional);
        let global = needed.zip(self.stored_global_scale(global));
        let global =
            global.and_then(|(stored, scale)| Some((stored.name_for(name)?, stored.bytes(scale, shape))));
        let tiles = self.scales_name(name).zip(tiles.map(Tiles::into_bytes));
        let said = self.comfy.and_then(|comfy| Some((says_name(name)?, says(comfy.word))));
        tiles.into_iter().chain(global).chain(said).collect()
    }

    /// The global scale that a file holds, in the convention's direction.
    ///
    /// The inverse of one of the other direction is rounded to f32, so the values that loaders make of the
    /// file may differ from the original's in the last place. A tensor without a global scale gets 1, because
    /// loaders want one, and that changes nothing.
    pub(crate) fn stored_global_scale(&self, global_scale: Option<GlobalScale>) -> Option<GlobalScale> {
        let direction = self.global_scale.as_ref()?.direction;
        Some(global_scale.unwrap_or(GlobalScale::of(direction, 1.0)).toward(direction))
    }
}
