//! Defects that the doctor finds, and where it found them.

use std::path::PathBuf;

use microscale::formats::words;

use crate::checkpoint_formats::packed::Packed;
use crate::plan::loaders::TRANSFORM;
use crate::read::tensor::Tensor;

/// A defect of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Defect {
    /// Codes and scales do not fit together, or one of them is missing.
    Unreadable,
    /// Block scales that are NaN.
    NanScales,
    /// NVFP4 scales with the sign bit set.
    SignedScales,
    /// Many blocks that contain only zeros.
    ZeroBlocks,
    /// Many blocks that were probably clipped.
    SaturatedBlocks,
    /// The same scale in all blocks.
    EqualScales,
    /// Blocks whose scale makes weights larger than any model's.
    EnormousBlocks,
    /// A global scale that was probably stored inverted.
    InvertedGlobalScale,
    /// Layers that serving engines fuse, with different global scales.
    UnequalGlobalScales,
    /// A global scale of an expert, which transformers ignores.
    ExpertGlobalScale,
    /// A global scale that llama.cpp does not know or does not apply.
    UnreadGlobalScale,
    /// A missing input scale: the config says that inputs are quantized, or other layers have one.
    InputScale,
    /// The two nibbles of each byte are swapped.
    NibbleOrder,
    /// Values that differ from the original's.
    OtherValues,
    /// A dtype or shape that loaders misread.
    Misread,
    /// A quantized tensor that loaders take only unquantized, or the other way round.
    Selection,
    /// An architecture that transformers does not load quantized in every mode.
    Loading,
    /// A transform of activations, which transformers leaves out.
    Transform,
    /// The config and the tensors disagree.
    Config,
    /// A tensor is missing that the config or the other layers call for.
    Missing,
    /// NaN or infinities among values.
    NonFinite,
    /// A tensor of zeros.
    ZeroTensor,
    /// A scale of the KV cache that is missing or not a positive number.
    CacheScale,
    /// The index and the shards disagree.
    Index,
}

words!(Defect, "defect" {
    Self::Unreadable = "unreadable",
    Self::NanScales = "nan-scales",
    Self::SignedScales = "signed-scales",
    Self::ZeroBlocks = "zero-blocks",
    Self::SaturatedBlocks = "saturated-blocks",
    Self::EqualScales = "equal-scales",
    Self::EnormousBlocks = "enormous-blocks",
    Self::InvertedGlobalScale = "inverted-global-scale",
    Self::UnequalGlobalScales = "unequal-global-scales",
    Self::ExpertGlobalScale = "expert-global-scale",
    Self::UnreadGlobalScale = "unread-global-scale",
    Self::InputScale = "input-scale",
    Self::NibbleOrder = "nibble-order",
    Self::OtherValues = "other-values",
    Self::Misread = "misread",
    Self::Selection = "selection",
    Self::Loading = "loading",
    Self::Transform = "transform",
    Self::Config = "config",
    Self::Missing = "missing",
    Self::NonFinite = "non-finite",
    Self::ZeroTensor = "zero-tensor",
    Self::CacheScale = "cache-scale",
    Self::Index = "index",
});

impl Defect {
    /// The effect on the model.
    pub const fn effect(self) -> &'static str {
        match self {
            Self::Unreadable => "loaders refuse the tensor, or read it wrongly",
            Self::NanScales => "all weights of such a block are NaN, and every output that depends on them",
            Self::SignedScales => {
                "the scales are of another format (IF4 marks blocks by the sign bit); read as NVFP4, such blocks are negated"
            }
            Self::ZeroBlocks => {
                "these weights add nothing; unless the original has them so, what they knew is lost"
            }
            Self::SaturatedBlocks => "the largest weights were cut off; the layer's outputs shrink",
            Self::EqualScales => {
                "the scales were probably overwritten: blocks differ in their largest weight"
            }
            Self::EnormousBlocks => {
                "weights of such a block exceed 2688, more than any model has: outputs overflow"
            }
            Self::InvertedGlobalScale => {
                "all weights of the tensor are wrong by one enormous factor; outputs overflow or vanish"
            }
            Self::UnequalGlobalScales => {
                "engines that fuse the layers take one of the global scales for all: the weights of the others are wrong by a factor"
            }
            Self::ExpertGlobalScale => {
                "transformers makes the weights of experts thousands of times too large, without an error; vLLM reads them right"
            }
            Self::UnreadGlobalScale => {
                "llama.cpp refuses the file, or computes with weights that are wrong by that factor"
            }
            Self::InputScale => {
                "vLLM takes what memory holds for the scale of the inputs: outputs are NaN or wrong, of all experts if one has none"
            }
            Self::NibbleOrder => {
                "neighbouring weights are swapped in pairs; the model computes nonsense, without any error"
            }
            Self::OtherValues => "the weights differ from the original's",
            Self::Misread => "loaders compute other weights from it, without any error",
            Self::Selection => "engines refuse the model, or run it with random weights in this layer",
            Self::Loading => "the model does not load, or has random weights in some layers",
            Self::Transform => TRANSFORM,
            Self::Config => "loaders refuse the checkpoint, or misread its tensors",
            Self::Missing => "loaders refuse the checkpoint, or fill the tensor with random numbers",
            Self::NonFinite => "every output that depends on these values is NaN or infinite",
            Self::ZeroTensor => {
                "the model computes the same for every input, or nothing where this tensor is used"
            }
            Self::CacheScale => {
                "engines take 1 for a missing scale, which cuts off large keys and values, and compute NaN or zeros with a wrong one"
            }
            Self::Index => "loaders that read shards whole load another tensor than the index names",
        }
    }

    /// How to repair it.
    pub const fn fix(self) -> &'static str {
        match self {
            Self::Unreadable => {
                "if files or tensors are missing or damaged, download them again; otherwise start from the original checkpoint"
            }
            Self::NanScales => "quantize the original again, without NaN and infinities in it",
            Self::SignedScales => {
                "read it with the software of its own format, or quantize the original to NVFP4"
            }
            Self::ZeroBlocks => {
                "compare with the original (doctor --against ORIGINAL); if it has weights there, quantize again"
            }
            Self::SaturatedBlocks => {
                "quantize the original again, with the global scale computed from the largest magnitude, or a scale rule that rounds up"
            }
            Self::EqualScales => "download the file again, or quantize the original again",
            Self::EnormousBlocks => {
                "download the file again, or quantize the tensor again, from an original without NaN and infinities"
            }
            Self::InvertedGlobalScale => {
                "store its inverse: compressed-tensors' names hold a divisor, ModelOpt's a multiplier"
            }
            Self::UnequalGlobalScales => {
                "quantize the original checkpoint again: microscale quantize gives these layers one global scale; this one can only be \
                 dequantized first, which keeps its rounding"
            }
            Self::ExpertGlobalScale => {
                "load it with vLLM, or quantize the original again, its experts without a global scale (--global-scale none, or \
                 global_scale = \"none\" in a recipe's rule)"
            }
            Self::UnreadGlobalScale => {
                "quantize the original again: microscale quantize stores such layers unquantized, and with --global-scale none all of them \
                 without a global scale"
            }
            Self::InputScale => {
                "quantize the original again with --input-scale, from a calibration; or have the config say that only weights are quantized \
                 (W4A16_NVFP4 in ModelOpt's, no input_activations in compressed-tensors')"
            }
            Self::NibbleOrder => {
                "swap the halves of each byte of the codes, or quantize the original again (torchao 0.15 and later)"
            }
            Self::OtherValues => {
                "make sure that --against names the checkpoint that was quantized; if so, quantize that again, or download the file again"
            }
            Self::Misread => "write the tensor as its checkpoint format has it (microscale convert does)",
            Self::Transform => {
                "load it with vLLM, or quantize the original without a transform of activations"
            }
            Self::Selection => "quantize the original again: microscale chooses tensors that engines run",
            Self::Loading => "load it as the finding says",
            Self::Config => {
                "correct the config, or take a checkpoint that agrees with it; for quantized tensors that it reads, microscale convert \
                 writes the config anew"
            }
            Self::Missing => "complete the checkpoint, download it again, or quantize the original again",
            Self::NonFinite => {
                "download the file again; if the original has the same values, it is damaged too"
            }
            Self::ZeroTensor => {
                "compare with the original (doctor --against ORIGINAL); if it has values there, quantize or download again"
            }
            Self::CacheScale => {
                "calibrate the cache again, or have the config say that it is not quantized (kv_cache_scheme, kv_cache_quant_algo: null)"
            }
            Self::Index => {
                "list the tensor in the index, or remove it from the shard; any command that writes does both"
            }
        }
    }
}

/// A defect and where it is.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Finding {
    /// The defect.
    pub defect: Defect,
    /// The tensor; `None` if the defect concerns the file or the whole checkpoint.
    pub tensor: Option<String>,
    /// The file.
    pub file: PathBuf,
    /// Details in words, with the position in the tensor.
    pub what: String,
}

impl Finding {
    pub(super) fn of(defect: Defect, tensor: &Tensor<'_>, what: String) -> Self {
        Self { defect, tensor: Some(tensor.name.into()), file: tensor.file.into(), what }
    }

    pub(super) fn in_packed(defect: Defect, packed: &Packed<'_>, what: String) -> Self {
        Self { defect, tensor: Some(packed.name.into()), file: packed.codes.file.into(), what }
    }
}
