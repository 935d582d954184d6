//! The checkpoint formats, by their names. `checkpoint_formats` defines each.

use microscale::formats::words;

/// A checkpoint format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CheckpointFormat {
    /// compressed-tensors', which vLLM and transformers load.
    #[default]
    CompressedTensors,
    /// NVIDIA ModelOpt's, for NVFP4, which TensorRT-LLM, vLLM and SGLang load.
    Modelopt,
    /// The convention of OpenAI's gpt-oss models, for their experts in MXFP4.
    GptOss,
    /// ggml's, in GGUF files, which llama.cpp loads.
    Gguf,
    /// DeepSeek-V4's, for experts in MXFP4 beside block FP8. It is read and not written.
    DeepSeek,
    /// FP8 under a scale for each 128×128, as DeepSeek-V3 and Qwen3-FP8 are published. [`convert`](crate::convert()) writes it, from what
    /// is exact in it.
    Fp8Block,
    /// AMD Quark's, for MXFP4. It is read and not written.
    Quark,
    /// ComfyUI's, for NVFP4 and MXFP8 of diffusion models.
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
