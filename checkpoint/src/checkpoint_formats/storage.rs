//! Storage of a format in a checkpoint format: the stored tensors that a quantized tensor becomes.

use std::borrow::Cow;

use microscale::formats::nvfp4::Direction;
use microscale::{Format, GlobalScale, QuantizedTensor, ScaleLayout};
use serde_json::json;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::part_name::PartName;
use crate::checkpoint_formats::tiles::{Tiles, tiled};
use crate::dtype::FileDtype;
use crate::error::format::FormatError;
use crate::error::{Error, Result};
use crate::gguf::blocks::Blocks;
use crate::read::nibble_order::{NibbleOrder, swap_nibbles};
use crate::read::tensor::Tensor;
use crate::reason::Reason;
use crate::write::outline::Outline;

/// Storage of a format's tensors in a checkpoint format: facts about the parts of a tensor `X`.
///
/// The facts are independent of each other. [`Self::plain`] has defaults for most of them.
#[derive(Debug)]
pub(crate) struct Storage {
    pub(crate) checkpoint_format: CheckpointFormat,
    pub(crate) format: Format,
    /// Suffix of the codes' name, after the tensor's name.
    pub(crate) codes_suffix: &'static str,
    pub(crate) codes: FileDtype,
    pub(crate) nibble_order: NibbleOrder,
    pub(crate) scales_name: PartName,
    pub(crate) scales: FileDtype,
    /// True if files may also declare the block scales as U8.
    pub(crate) raw_scales: bool,
    /// Order of the block scales. Only matrices have swizzled scales.
    pub(crate) scale_layout: ScaleLayout,
    /// Number of consecutive blocks that share a stored scale. It is 1 in all written storages.
    pub(crate) blocks_per_scale: usize,
    /// Number that the rows of a matrix must be a multiple of.
    pub(crate) row_multiple: usize,
    pub(crate) global_scale: Option<StoredGlobal>,
    /// The global scale of the layer's inputs, if they are quantized too.
    pub(crate) input_scale: Option<StoredGlobal>,
    /// A tensor that names the format of the layer.
    pub(crate) marker: Option<Marker>,
    /// Blocks of codes and scales in a single tensor.
    pub(crate) blocks: Option<Blocks>,
    /// True if the codes have a dimension for the bytes of a block.
    pub(crate) blocks_apart: bool,
    /// True if the model's parameter is the transpose of the stored tensor, in its last two
    /// dimensions.
    pub(crate) transposed: bool,
    /// Suffixes of the parameters with all experts of a layer, if only these are stored so.
    pub(crate) experts: Option<&'static [&'static str]>,
}

/// A tensor that names the format of a layer, as JSON in U8.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Marker {
    pub(crate) name: PartName,
    /// The word for the format.
    pub(crate) word: &'static str,
}

impl Marker {
    /// Returns the bytes of the tensor.
    fn bytes(self) -> Vec<u8> {
        json!({ "format": self.word }).to_string().into_bytes()
    }
}

/// Storage of a global scale, in F32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredGlobal {
    pub(crate) name: PartName,
    /// True if a missing global scale is 1.
    pub(crate) optional: bool,
    pub(crate) direction: Direction,
    repeat: Repeat,
}

/// How often a global scale is repeated in its tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Repeat {
    /// Once, in a tensor without dimensions.
    Scalar,
    /// Once, in a tensor of one dimension.
    One,
    /// Once per expert for tensors of three dimensions, otherwise once; in one dimension.
    EachExpert,
}

impl StoredGlobal {
    pub(crate) const fn new(name: PartName, direction: Direction, repeat: Repeat) -> Self {
        Self { name, optional: false, direction, repeat }
    }

    /// Returns the same storage, except that a global scale of 1 need not be stored.
    pub(crate) const fn or_one(self) -> Self {
        Self { optional: true, ..self }
    }

    /// Returns the name of the stored tensor; `None` as for [`PartName::of`].
    pub(crate) fn name_for(&self, tensor: &str) -> Option<String> {
        self.name.of(tensor)
    }

    /// Returns the shape of the stored tensor. All its numbers are the same.
    pub(crate) fn shape_for(&self, tensor: &[usize]) -> Vec<usize> {
        match (self.repeat, tensor) {
            (Repeat::Scalar, _) => Vec::new(),
            (Repeat::EachExpert, [experts, _, _]) => vec![*experts],
            (Repeat::One | Repeat::EachExpert, _) => vec![1],
        }
    }

    /// Returns the outline of the stored tensor, or `None` if it has no name.
    pub(crate) fn outline(&self, tensor: &str, shape: &[usize]) -> Option<Outline> {
        Some(Outline { name: self.name_for(tensor)?, dtype: FileDtype::F32, shape: self.shape_for(shape) })
    }

    /// Returns the bytes of the stored tensor.
    pub(crate) fn bytes(&self, scale: GlobalScale, shape: &[usize]) -> Vec<u8> {
        scale.value().to_le_bytes().repeat(self.shape_for(shape).iter().product())
    }
}

impl Storage {
    /// Codes and scales, in linear order and nothing else.
    pub(crate) const fn plain(
        checkpoint_format: CheckpointFormat,
        format: Format,
        (codes_suffix, codes): (&'static str, FileDtype),
        (scales_name, scales): (PartName, FileDtype),
    ) -> Self {
        Self {
            checkpoint_format,
            format,
            codes_suffix,
            codes,
            nibble_order: NibbleOrder::LowFirst,
            scales_name,
            scales,
            raw_scales: false,
            scale_layout: ScaleLayout::Linear,
            blocks_per_scale: 1,
            row_multiple: 1,
            global_scale: None,
            input_scale: None,
            marker: None,
            blocks: None,
            blocks_apart: false,
            transposed: false,
            experts: None,
        }
    }

    /// Returns the reason why a tensor cannot be stored so.
    pub(crate) fn cannot_hold(&self, name: &str, shape: &[usize]) -> Option<Reason> {
        let is_among = |ends: &[&str]| shape.len() == 3 && ends.iter().any(|end| name.ends_with(end));
        if self.experts.is_some_and(|ends| !is_among(ends)) {
            return Some(Reason::NotAnExpert);
        }
        let global_scale = self.global_scale.map(|global| global.name);
        let names = [Some(self.scales_name), global_scale, self.marker.map(|marker| marker.name)];
        if names.into_iter().flatten().any(|part| part.of(name).is_none()) {
            return Some(Reason::NotAWeight);
        }
        if self.scale_layout == ScaleLayout::Swizzled && shape.len() != 2 {
            return Some(Reason::Dimensions(shape.len()));
        }
        if let [.., rows, _] = *shape
            && rows % self.row_multiple != 0
        {
            return Some(Reason::Rows { rows, multiple: self.row_multiple });
        }
        let (cols, block) = (self.stored_shape(shape).last().copied().unwrap_or(1), self.row_block());
        (cols % block != 0).then_some(Reason::Columns { cols, block })
    }

    /// Returns the number that the length of rows must be a multiple of.
    pub(crate) fn row_block(&self) -> usize {
        self.blocks.map_or(self.format.block(), Blocks::elements)
    }

    /// Converts the shape of a model's parameter to its stored shape before packing, and back.
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

    /// Returns the shape of the stored codes, by the shape of the model's parameter.
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

    /// Returns the shape of the stored block scales, by the shape of the model's parameter.
    pub(crate) fn scales_shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut shape = self.blocks_shape(shape);
        if let Some(blocks) = shape.last_mut() {
            *blocks /= self.blocks_per_scale;
        }
        if let ([rows, blocks], ScaleLayout::Swizzled) = (&mut shape[..], self.scale_layout) {
            [*rows, *blocks] = tiled(*rows, *blocks);
        }
        shape
    }

    /// Returns the number of blocks along each stored dimension, by the shape of the model's
    /// parameter.
    pub(crate) fn blocks_shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut shape = self.stored_shape(shape).into_owned();
        if let Some(cols) = shape.last_mut() {
            *cols /= self.format.block();
        }
        shape
    }

    /// Returns the number of elements that share a stored scale.
    pub(crate) fn elements_per_scale(&self) -> usize {
        self.format.block() * self.blocks_per_scale
    }

    /// Returns the shape of the model's parameter, by the shapes of its codes and scales, or `None`
    /// if these do not fit each other.
    pub(crate) fn model_shape(&self, codes: &[usize], scales: Option<&[usize]>) -> Option<Vec<usize>> {
        let Some(scales) = scales else { return Some(self.stored_shape(codes).into_owned()) };
        // Swizzled scales are padded, so that only the codes tell the number of blocks.
        let (mut stored, bytes, elements) = match self.scale_layout {
            ScaleLayout::Linear => (scales.to_vec(), 1, self.elements_per_scale()),
            ScaleLayout::Swizzled => (codes.to_vec(), self.format.block_bytes(), self.format.block()),
        };
        let cols = stored.last_mut()?;
        *cols = (*cols / bytes).checked_mul(elements)?;
        let shape = self.stored_shape(&stored).into_owned();
        (self.codes_shape(&shape) == codes && self.scales_shape(&shape) == scales).then_some(shape)
    }

    /// Returns the outlines of a tensor's parts: codes, block scales, global scale and marker.
    ///
    /// `global` is false if the global scale is 1, which some formats do not store.
    pub(crate) fn outlines(&self, name: &str, shape: &[usize], global: bool) -> Vec<Outline> {
        let outline = |name, dtype, shape| Outline { name, dtype, shape };
        let codes_name = format!("{name}{}", self.codes_suffix);
        let mut outlines = vec![outline(codes_name, self.codes, self.codes_shape(shape))];
        let scales_name = self.scales_name.of(name).filter(|_| self.blocks.is_none());
        outlines.extend(scales_name.map(|name| outline(name, self.scales, self.scales_shape(shape))));
        let stored = self.global_scale.as_ref().filter(|stored| global || !stored.optional);
        outlines.extend(stored.and_then(|stored| stored.outline(name, shape)));
        let marker = self.marker.and_then(|marker| Some((marker.name.of(name)?, marker.bytes().len())));
        outlines.extend(marker.map(|(name, bytes)| outline(name, FileDtype::U8, vec![bytes])));
        outlines
    }

    /// Checks that files can hold block scales of a tensor. `before` is the index of the first one.
    ///
    /// # Errors
    /// [`FormatError::Unheld`](crate::FormatError::Unheld).
    pub(crate) fn check_scales(&self, tensor: &Tensor<'_>, scales: &[u8], before: usize) -> Result<()> {
        let unheld = self.blocks.and_then(|blocks| blocks.first_unheld(scales));
        let Some(block) = unheld else { return Ok(()) };
        let (file, byte, checkpoint_format) = (tensor.file.into(), scales[block], self.checkpoint_format);
        Err(Error::Format(FormatError::Unheld {
            file,
            tensor: tensor.name.into(),
            block: before + block,
            byte,
            checkpoint_format,
        }))
    }

    /// Returns whether bytes are stored as they are computed: codes and linear scales in two
    /// tensors.
    pub(crate) fn is_linear(&self) -> bool {
        let in_order = self.nibble_order == NibbleOrder::LowFirst && self.scale_layout == ScaleLayout::Linear;
        in_order && self.blocks.is_none()
    }

    /// Returns the bytes of the next blocks for the first [`Self::outlines`], in the same order.
    ///
    /// [`Self::other_parts`] returns the remaining parts. Swizzled scales are collected in `tiles`.
    pub(crate) fn block_parts(&self, tensor: QuantizedTensor, tiles: &mut Option<Tiles>) -> Vec<Vec<u8>> {
        let (mut codes, scales) = tensor.into_parts();
        if let Some(blocks) = self.blocks {
            return vec![blocks.pack(&codes, &scales)];
        }
        if self.nibble_order == NibbleOrder::HighFirst {
            swap_nibbles(&mut codes);
        }
        match tiles {
            None => vec![codes, scales],
            Some(tiles) => {
                tiles.extend(&scales);
                vec![codes]
            }
        }
    }

    /// Returns tiles for all scales of a tensor, if they are stored swizzled.
    pub(crate) fn tiles(&self, shape: &[usize]) -> Option<Tiles> {
        match (&self.blocks_shape(shape)[..], self.scale_layout) {
            (&[rows, blocks], ScaleLayout::Swizzled) => Some(Tiles::new(rows, blocks)),
            _ => None,
        }
    }

    /// Returns the names and bytes of the parts that are written after all blocks: swizzled scales,
    /// the global scale and the marker.
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
        let tiles = self.scales_name.of(name).zip(tiles.map(Tiles::into_bytes));
        let marker = self.marker.and_then(|marker| Some((marker.name.of(name)?, marker.bytes())));
        tiles.into_iter().chain(global).chain(marker).collect()
    }

    /// Returns the global scale that a file holds, in the direction of the checkpoint format.
    ///
    /// The inverse of a scale of the other direction is rounded to f32, so the values that loaders
    /// compute may differ from the original in the last bit. A tensor without a global scale gets
    /// 1, because loaders require one. That changes no value.
    pub(crate) fn stored_global_scale(&self, global_scale: Option<GlobalScale>) -> Option<GlobalScale> {
        let direction = self.global_scale.as_ref()?.direction;
        Some(global_scale.unwrap_or(GlobalScale::of(direction, 1.0)).toward(direction))
    }
}
