//! Defects that the doctor finds, and where it found them.

use std::path::PathBuf;

use microscale::formats::words;

use crate::checkpoint_formats::packed::Packed;
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
    /// The config and the tensors disagree.
    Config,
}

words!(Defect, "defect" {
    Self::Unreadable = "unreadable",
    Self::NanScales = "nan-scales",
    Self::SignedScales = "signed-scales",
    Self::ZeroBlocks = "zero-blocks",
    Self::SaturatedBlocks = "saturated-blocks",
    Self::InvertedGlobalScale = "inverted-global-scale",
    Self::UnequalGlobalScales = "unequal-global-scales",
    Self::ExpertGlobalScale = "expert-global-scale",
    Self::UnreadGlobalScale = "unread-global-scale",
    Self::InputScale = "input-scale",
    Self::NibbleOrder = "nibble-order",
    Self::OtherValues = "other-values",
    Self::Misread = "misread",
    Self::Config = "config",
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
            Self::Config => "loaders refuse the checkpoint, or misread its tensors",
        }
    }

    /// How to repair it.
    pub const fn fix(self) -> &'static str {
        match self {
            Self::Unreadable => "complete the checkpoint, or download it again",
            Self::NanScales => "quantize the tensor again, from an original without NaN and infinities",
            Self::SignedScales => {
                "read it with the software of its own format, or quantize the original to NVFP4"
            }
            Self::ZeroBlocks => {
                "compare with the original (doctor --against ORIGINAL); if it has weights there, quantize again"
            }
            Self::SaturatedBlocks => {
                "quantize again, with the global scale computed from the largest magnitude, or a scale rule that rounds up"
            }
            Self::InvertedGlobalScale => {
                "store its inverse: compressed-tensors' names hold a divisor, ModelOpt's a multiplier"
            }
            Self::UnequalGlobalScales => {
                "quantize these layers again, under one global scale (microscale quantize does)"
            }
            Self::ExpertGlobalScale => {
                "load it with vLLM, or quantize experts without a global scale (--global-scale none, or global_scale in a rule)"
            }
            Self::UnreadGlobalScale => {
                "quantize again: microscale gives such layers no global scale, and with --global-scale none no layer has one"
            }
            Self::InputScale => {
                "quantize again with --input-scale, from a calibration; or have the config say that only weights are quantized \
                 (W4A16_NVFP4 in ModelOpt's, no input_activations in compressed-tensors')"
            }
            Self::NibbleOrder => {
                "swap the halves of each byte of the codes, or quantize again (torchao 0.15 and later)"
            }
            Self::OtherValues => {
                "make sure that --against names the checkpoint that was quantized; if so, quantize again"
            }
            Self::Misread => "write the tensor as its convention has it (microscale convert does)",
            Self::Config => "correct config.json, or write both anew with microscale convert",
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
