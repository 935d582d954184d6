//! Conventions of files: what a quantized tensor becomes in a file, and which config goes with it.
//!
//! A convention is a table of [`Storage`], one for each format that it has, and a few rules, in a file of its own. This
//! is about files and not about arithmetic: codes and scales of any [`Convention`](microscale::Convention) are stored so, to
//! the byte. Only a global scale may change, by a rounding: [`Storage::stored_global_scale`].

use std::borrow::Cow;

use microscale::formats::ScaleLayout;
use microscale::formats::nvfp4::Direction;
use microscale::{Format, GlobalScale, QuantizedTensor, Recipe, Words};

use crate::description::Description;
use crate::dtype::FileDtype;
use crate::error::{Error, Result};
use crate::gguf::{self, Blocks};
use crate::read::Tensor;
use crate::selection::Reason;
use crate::write::Outline;
use crate::{compressed_tensors, gpt_oss, modelopt};

/// A convention of files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FileConvention {
    /// compressed-tensors', which vLLM and transformers load.
    #[default]
    CompressedTensors,
    /// NVIDIA ModelOpt's, for NVFP4, which TensorRT-LLM, vLLM and SGLang load.
    Modelopt,
    /// That of OpenAI's gpt-oss models, for their experts in MXFP4.
    GptOss,
    /// ggml's, in GGUF files, which llama.cpp loads.
    Gguf,
}

impl Words for FileConvention {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("compressed-tensors", Self::CompressedTensors),
        ("modelopt", Self::Modelopt),
        ("gpt-oss", Self::GptOss),
        ("gguf", Self::Gguf),
    ];
}

/// How a convention stores tensors of a format: what a tensor X becomes.
#[derive(Debug)]
pub(crate) struct Storage {
    pub(crate) convention: FileConvention,
    pub(crate) format: Format,
    /// What follows the tensor's name.
    pub(crate) codes_suffix: &'static str,
    pub(crate) codes: FileDtype,
    pub(crate) scales_suffix: &'static str,
    pub(crate) scales: FileDtype,
    pub(crate) global_scale: Option<StoredGlobal>,
    /// Of the activations that a layer's input is quantized with, if it is: what takes the place of the layer's `.weight`.
    pub(crate) input_scale: Option<StoredGlobal>,
    /// Blocks that hold codes and scales together, which are one tensor then.
    pub(crate) blocks: Option<Blocks>,
    /// Whether blocks are a dimension of their own.
    pub(crate) blocks_apart: bool,
    /// Whether the model's parameter is the transpose of what is stored, in its last two dimensions.
    pub(crate) transposed: bool,
}

/// How a convention stores a global scale: one F32.
#[derive(Debug)]
pub(crate) struct StoredGlobal {
    /// What follows the tensor's name, or takes the place of its [`WEIGHT`].
    pub(crate) suffix: &'static str,
    beside: bool,
    /// Whether a tensor without one has 1.
    pub(crate) optional: bool,
    pub(crate) direction: Direction,
    numbers: Numbers,
}

/// How often a global scale is stored.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Numbers {
    /// Once, without dimensions.
    Scalar,
    /// Once, with one dimension.
    One,
    /// Once for each expert of a layer whose tensor has three dimensions, and once for others; with one dimension.
    EachExpert,
}

/// What the name of a layer's weights ends with.
pub(crate) const WEIGHT: &str = ".weight";

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

/// Every way of storing, of all conventions.
pub(crate) fn stored() -> impl Iterator<Item = &'static Storage> {
    [compressed_tensors::STORED, modelopt::STORED, gpt_oss::STORED, gguf::STORED].into_iter().flatten()
}

impl FileConvention {
    /// The formats that it has.
    pub fn formats(self) -> impl Iterator<Item = Format> {
        stored().filter(move |stored| stored.convention == self).map(|stored| stored.format)
    }

    /// Says in the JSON files of a checkpoint how its layers are stored, the largest group first, and which linear
    /// layers are not quantized.
    pub(crate) fn describe(self, groups: &[Group], ignore: &[String], description: &mut Description) {
        let Some(first) = groups.first() else { return };
        match self {
            Self::CompressedTensors => compressed_tensors::describe(groups, description, ignore),
            // Both have one format only.
            Self::Modelopt => modelopt::describe(first.storage, description, ignore),
            Self::GptOss => gpt_oss::describe(description, ignore),
            // Its file says it.
            Self::Gguf => {}
        }
    }

    /// Makes sure that files can hold what a recipe gives.
    ///
    /// # Errors
    /// [`Error::NotStored`] for a format that the convention lacks, [`Error::ScaleLayout`] for scales that are not linear.
    pub fn check(self, recipe: &Recipe) -> Result<()> {
        Storage::of(self, recipe).map(|_| ())
    }
}

impl Storage {
    /// How the result of a recipe is stored.
    ///
    /// # Errors
    /// Those of [`FileConvention::check`].
    pub(crate) fn of(convention: FileConvention, recipe: &Recipe) -> Result<&'static Self> {
        if recipe.scale_layout != ScaleLayout::Linear {
            return Err(Error::ScaleLayout { layout: recipe.scale_layout });
        }
        Self::of_format(convention, recipe.format())
    }

    /// How a format is stored.
    ///
    /// # Errors
    /// [`Error::NotStored`].
    pub(crate) fn of_format(convention: FileConvention, format: Format) -> Result<&'static Self> {
        let found = stored().find(|stored| (stored.convention, stored.format) == (convention, format));
        found.ok_or(Error::NotStored { convention, format })
    }

    /// Why a tensor is not for this convention.
    pub(crate) fn cannot_hold(&self, name: &str, shape: &[usize]) -> Option<Reason> {
        if self.convention == FileConvention::GptOss && !gpt_oss::is_expert(name, shape) {
            return Some(Reason::NotAnExpert);
        }
        let nameless = self.global_scale.as_ref().is_some_and(|global| global.name_for(name).is_none());
        if nameless {
            return Some(Reason::NotAWeight);
        }
        let (cols, block) = (self.stored_shape(shape).last().copied().unwrap_or(1), self.row_block());
        (cols % block != 0).then_some(Reason::Columns { cols, block })
    }

    /// What the length of rows must be a multiple of.
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
        let mut shape = self.scales_shape(shape);
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
        let mut shape = self.stored_shape(shape).into_owned();
        if let Some(cols) = shape.last_mut() {
            *cols /= self.format.block();
        }
        shape
    }

    /// The sizes of the model's parameter, given its codes' and scales'; `None` if those do not fit each other.
    pub(crate) fn model_shape(&self, codes: &[usize], scales: Option<&[usize]>) -> Option<Vec<usize>> {
        let Some(scales) = scales else { return Some(self.stored_shape(codes).into_owned()) };
        let mut stored = scales.to_vec();
        let cols = stored.last_mut()?;
        *cols = cols.checked_mul(self.format.block())?;
        let shape = self.stored_shape(&stored).into_owned();
        (self.codes_shape(&shape) == codes).then_some(shape)
    }

    /// The tensors that take one's place: codes, block scales and, if the format has one, the global scale.
    pub(crate) fn outlines(&self, name: &str, shape: &[usize]) -> Vec<Outline> {
        let outline = |suffix, dtype, shape| Outline { name: format!("{name}{suffix}"), dtype, shape };
        let mut outlines = vec![outline(self.codes_suffix, self.codes, self.codes_shape(shape))];
        if self.blocks.is_none() {
            outlines.push(outline(self.scales_suffix, self.scales, self.scales_shape(shape)));
        }
        outlines.extend(self.global_scale.as_ref().and_then(|global| global.outline(name, shape)));
        outlines
    }

    /// Makes sure that files can hold a tensor's block scales.
    ///
    /// # Errors
    /// [`Error::Unheld`].
    pub(crate) fn check_scales(&self, tensor: &Tensor<'_>, scales: &[u8]) -> Result<()> {
        let unheld = self.blocks.and_then(|blocks| blocks.first_unheld(scales));
        let Some(block) = unheld else { return Ok(()) };
        let (file, byte, convention) = (tensor.file.into(), scales[block], self.convention);
        Err(Error::Unheld { file, tensor: tensor.name.into(), block, byte, convention })
    }

    /// The bytes of the tensors that [`Self::outlines`] announces, in its order.
    pub(crate) fn parts(&self, tensor: QuantizedTensor, shape: &[usize]) -> Vec<Vec<u8>> {
        let global = self.global_part(tensor.global_scale(), shape);
        let (codes, scales) = tensor.into_parts();
        let mut parts = match self.blocks {
            None => vec![codes, scales],
            Some(blocks) => vec![blocks.pack(&codes, &scales)],
        };
        parts.extend(global);
        parts
    }

    /// The last of them, the global scale, if there is one.
    pub(crate) fn global_part(&self, global: Option<GlobalScale>, shape: &[usize]) -> Option<Vec<u8>> {
        let stored = self.global_scale.as_ref().zip(self.stored_global_scale(global));
        stored.map(|(stored, global)| stored.bytes(global, shape))
    }

    /// What a file holds for a global scale, in the convention's direction.
    ///
    /// The inverse of one of the other direction is rounded to f32, so the values that loaders make of the file may
    /// differ from the original's in the last place. A tensor without a global scale gets 1, because loaders want one,
    /// and that changes nothing.
    pub(crate) fn stored_global_scale(&self, global_scale: Option<GlobalScale>) -> Option<GlobalScale> {
        let direction = self.global_scale.as_ref()?.direction;
        Some(global_scale.unwrap_or(GlobalScale::of(direction, 1.0)).toward(direction))
    }
}

/// The layers of a checkpoint that are stored in one way.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) storage: &'static Storage,
    /// Their names, as configs have them.
    pub(crate) layers: Vec<String>,
}

impl Group {
    /// The groups of weights, given by names, storages and elements: the group with the most elements first.
    pub(crate) fn of<'n>(weights: impl Iterator<Item = (&'n str, &'static Storage, u64)>) -> Vec<Self> {
        let mut groups: Vec<(Self, u64)> = Vec::new();
        for (name, storage, elements) in weights {
            let known = groups.iter().position(|(group, _)| group.storage.format == storage.format);
            let at = known.unwrap_or(groups.len());
            if known.is_none() {
                groups.push((Self { storage, layers: Vec::new() }, 0));
            }
            groups[at].0.layers.push(module(name).into());
            groups[at].1 += elements;
        }
        groups.sort_by_key(|(_, elements)| std::cmp::Reverse(*elements));
        groups.iter_mut().for_each(|(group, _)| group.layers.sort());
        groups.into_iter().map(|(group, _)| group).collect()
    }
}

/// A layer's name, by that of its weight.
pub(crate) fn module(weight: &str) -> &str {
    weight.strip_suffix(WEIGHT).unwrap_or(weight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use microscale::Convention;

    const E4M3: FileDtype = FileDtype::F8_E4M3;
    const U8: FileDtype = FileDtype::U8;

    /// Name, dtype and shape.
    type Part<'a> = (&'a str, FileDtype, &'a [usize]);

    fn stored_as(convention: FileConvention, format: Format, name: &str, shape: &[usize]) -> Vec<Outline> {
        Storage::of_format(convention, format).unwrap().outlines(name, shape)
    }

    #[test]
    fn names_dtypes_and_shapes_of_the_conventions() {
        let ct = FileConvention::CompressedTensors;
        let expected: [(_, _, _, &[usize], &[Part<'_>]); 5] = [
            (
                ct,
                Format::Mxfp4,
                "a.weight",
                &[8, 96],
                &[("a.weight_packed", U8, &[8, 48]), ("a.weight_scale", U8, &[8, 3])],
            ),
            (
                ct,
                Format::Nvfp4,
                "experts.down",
                &[2, 8, 48],
                &[
                    ("experts.down_packed", U8, &[2, 8, 24]),
                    ("experts.down_scale", E4M3, &[2, 8, 3]),
                    ("experts.down_global_scale", FileDtype::F32, &[1]),
                ],
            ),
            (
                ct,
                Format::Mxfp8E4m3,
                "a.weight",
                &[8, 96],
                &[("a.weight", E4M3, &[8, 96]), ("a.weight_scale", U8, &[8, 3])],
            ),
            (
                FileConvention::Modelopt,
                Format::Nvfp4,
                "a.weight",
                &[8, 96],
                &[
                    ("a.weight", U8, &[8, 48]),
                    ("a.weight_scale", E4M3, &[8, 6]),
                    ("a.weight_scale_2", FileDtype::F32, &[]),
                ],
            ),
            (
                FileConvention::GptOss,
                Format::Mxfp4,
                "mlp.experts.down_proj",
                &[4, 96, 5],
                &[
                    ("mlp.experts.down_proj_blocks", U8, &[4, 5, 3, 16]),
                    ("mlp.experts.down_proj_scales", U8, &[4, 5, 3]),
                ],
            ),
        ];
        for (convention, format, name, shape, expected) in expected {
            let outlines = stored_as(convention, format, name, shape);
            let found: Vec<_> = outlines
                .iter()
                .map(|outline| (outline.name.as_str(), outline.dtype, &outline.shape[..]))
                .collect();
            assert_eq!(found, expected);
            let storage = Storage::of_format(convention, format).unwrap();
            let model_shape = storage.model_shape(&outlines[0].shape, Some(&outlines[1].shape));
            assert_eq!(model_shape.as_deref(), Some(shape));
            assert_eq!(storage.model_shape(&outlines[0].shape, Some(&[8, 2])), None);
        }
    }

    #[test]
    fn what_cannot_be_stored_is_said() {
        let storage = |convention, format| Storage::of_format(convention, format).unwrap();
        let ct = |format| storage(FileConvention::CompressedTensors, format);
        assert_eq!(ct(Format::Mxfp4).cannot_hold("a", &[8, 96]), None);
        assert_eq!(ct(Format::Nvfp4).cannot_hold("a", &[8, 48]), None);
        let columns = |cols, block| Some(Reason::Columns { cols, block });
        assert_eq!(ct(Format::Mxfp4).cannot_hold("a", &[8, 48]), columns(48, 32));
        let experts = storage(FileConvention::GptOss, Format::Mxfp4);
        assert_eq!(experts.cannot_hold("a.experts.down_proj", &[4, 96, 5]), None);
        assert_eq!(experts.cannot_hold("a.experts.down_proj", &[4, 48, 32]), columns(48, 32));
        assert_eq!(experts.cannot_hold("a.experts.down_proj_bias", &[4, 96]), Some(Reason::NotAnExpert));
        let e5m2 = Recipe::of(Format::Mxfp8E5m2, Convention::Ocp).unwrap();
        for convention in FileConvention::WORDS.iter().map(|(_, convention)| *convention) {
            let refused = convention.check(&e5m2).unwrap_err();
            assert!(matches!(refused, Error::NotStored { format: Format::Mxfp8E5m2, .. }), "{refused}");
        }
        let swizzled = Recipe { scale_layout: ScaleLayout::Swizzled, ..Recipe::default() };
        let refused = FileConvention::CompressedTensors.check(&swizzled);
        assert!(matches!(refused, Err(Error::ScaleLayout { .. })));
        let refused = FileConvention::Modelopt.check(&Recipe::default()).unwrap_err().to_string();
        assert!(
            refused.contains("its formats (nvfp4)") && refused.contains("compressed-tensors, gpt-oss"),
            "{refused}"
        );
    }

    #[test]
    fn every_global_scale_can_be_stored() {
        use GlobalScale::{Divisor, Multiplier};
        let stored = |convention, scale| {
            Storage::of_format(convention, Format::Nvfp4).unwrap().stored_global_scale(scale).unwrap()
        };
        let (ct, modelopt) = (FileConvention::CompressedTensors, FileConvention::Modelopt);
        assert_eq!((stored(ct, None), stored(modelopt, None)), (Divisor(1.0), Multiplier(1.0)));
        assert_eq!(stored(ct, Some(Divisor(3.0))), Divisor(3.0));
        assert_eq!(stored(ct, Some(Multiplier(0.25))), Divisor(4.0));
        assert_eq!(stored(modelopt, Some(Divisor(4.0))), Multiplier(0.25));
        for value in [f32::MIN_POSITIVE, f32::MAX / 448.0] {
            let scale = Multiplier(value);
            assert!(scale.in_range() && stored(ct, Some(scale)).in_range(), "{scale:?}");
        }
    }
}
