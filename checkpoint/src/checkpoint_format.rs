//! The names of checkpoint formats. `checkpoint_formats` describes each.

use microscale::formats::words;

/// A checkpoint format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CheckpointFormat {
    /// compressed-tensors, loaded by vLLM and transformers.
    #[default]
    CompressedTensors,
    /// NVIDIA ModelOpt's format for NVFP4, loaded by TensorRT-LLM, vLLM and SGLang.
    Modelopt,
    /// The format of OpenAI's gpt-oss models, for their experts in MXFP4.
    GptOss,
    /// ggml's format in GGUF files, loaded by llama.cpp.
    Gguf,
    /// DeepSeek-V4's format, with experts in MXFP4 and other layers in block FP8. Read-only.
    DeepSeek,
    /// FP8 with a scale per 128×128 block, as DeepSeek-V3 and Qwen3-FP8 are published. Only
    /// [`Convert`](crate::Convert) writes it, from values that are exact in it.
    Fp8Block,
    /// AMD Quark's format for MXFP4. Read-only.
    Quark,
    /// ComfyUI's format for NVFP4 and MXFP8 of diffusion models.
    Comfyui,
}

words!(CheckpointFormat, "checkpoint format" {
    Self::CompressedTensors = "compressed-tensors",
    Self::Modelopt = "modelopt",
    Self::GptOss = "gpt-oss",
    Self::Gguf = "gguf",
    Self::DeepSeek = "deepseek",
    Self::Fp8Block = "fp8-block",
    Self::Quark = "quark",
    Self::Comfyui = "comfyui",
});

/// The commands that write a checkpoint format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Written {
    /// [`Quantize`](crate::Quantize) and [`Convert`](crate::Convert) write it.
    Yes,
    /// Only [`Convert`](crate::Convert) writes it.
    ByConvert,
    /// None: it is read-only.
    No,
}
