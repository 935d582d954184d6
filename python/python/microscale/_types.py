"""Types of arguments and results."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Union

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

#: Formats that arrays, layers and checkpoints can have.
Format = Literal["mxfp4", "nvfp4", "mxfp8-e4m3", "mxfp8-e5m2"]
#: Formats of layers and of experts.
LayerFormat = Literal["mxfp4", "nvfp4"]
#: Formats that values can only be compared with.
ComparedFormat = Literal["mxfp4-e3m0", "nf4"]
#: The library whose arithmetic is followed.
Numerics = Literal["ocp", "torchao", "compressed-tensors", "modelopt", "transformer-engine", "ggml"]
#: Numerics of formats that values can only be compared with.
ComparedNumerics = Literal["bitsandbytes"]
ScaleRule = Literal["floor", "ceil", "even", "rceil"]
Ties = Literal["even", "away", "zero"]
Search = Literal["none", "four-six", "window", "full"]
ScaleLayout = Literal["linear", "swizzled"]
NonFinite = Literal["error", "propagate", "saturate"]
Direction = Literal["divisor", "multiplier"]
#: How a product rounds activations: to INT8 on CPUs, to FP8 (E4M3) with a scale per row or per 128
#: columns, or to the format of the weights.
RoundedActivations = Literal["int8", "fp8", "fp8-group128", "fp8-fast", "mxfp4", "nvfp4", "mxfp4-fast"]
#: Formats of quantized activations.
ActivationFormat = Literal["fp8", "mxfp8", "mxfp4", "nvfp4"]
#: The operation on a row of activations before it is quantized.
RowOperation = Literal["none", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "swiglu_oai", "rms_norm"]
#: The library or model whose RMSNorm is followed.
Norm = Literal["llama", "gemma", "flashinfer"]
#: Layouts of the block scales of activations. `128x4` is `swizzled` of a ScaleLayout.
ActivationLayout = Literal["linear", "128x4", "8x4"]
#: How a product combines pairs of results.
Gate = Literal["silu_and_mul", "swiglu_oai"]
#: The order of vectors in a page of a KV cache: `[page_size, heads, ...]` or `[heads, page_size, ...]`.
KvLayout = Literal["NHD", "HND"]
#: The dtype of values that `dequantize` writes to a checkpoint.
CheckpointDtype = Literal["f32", "f16", "bf16"]
#: Storage of tensors that stay unquantized in GGUF.
Kept = Literal["unchanged", "q8_0"]
#: The order of columns in GPTQ: blocks or columns with the largest inputs first, or as they are.
GptqOrder = Literal["blocks", "columns", "natural"]
#: Formats that `evaluate` rounds activations to.
InputFormat = ActivationFormat
#: Choices of `plan` for a tensor.
PlannedFormat = Literal["mxfp4", "nvfp4", "mxfp8-e4m3", "unquantized"]
#: Checkpoint formats that `quantize` writes.
CheckpointFormat = Literal["compressed-tensors", "modelopt", "gpt-oss", "gguf", "comfyui"]
#: Checkpoint formats that `convert` writes.
ConvertedFormat = Literal["compressed-tensors", "modelopt", "gpt-oss", "gguf", "fp8-block", "comfyui"]

Path = Union[str, "os.PathLike[str]"]
#: Called before each tensor with its name, the bytes done, and all bytes; of `evaluate` and
#: `calibrate`, before each layer with `layer N`, and batches. An exception in it stops the operation.
Progress = Callable[[str, int, int], object]


class SupportsArrayInterface(Protocol):
    """An array of numpy, or an array with the same interface."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


class SupportsCudaArrayInterface(Protocol):
    """An array in the memory of a GPU, such as an array of CuPy."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class SupportsDLPack(Protocol):
    """A tensor with the methods of DLPack, such as an array of JAX."""

    def __dlpack__(self, *, stream: Any = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


#: An array of values, codes or scales that functions read.
ArrayLike = Union["Tensor", SupportsArrayInterface, SupportsCudaArrayInterface, SupportsDLPack, memoryview]
#: A dtype of values: its name, or a dtype of numpy or PyTorch.
DtypeLike = Union[Literal["float32", "float16", "bfloat16"], "np.dtype[Any]", type, "torch.dtype"]
#: An array that functions return: of the library that the input is from, which types cannot name.
Array = Any


class GlobalScale(NamedTuple):
    """The global scale of an NVFP4 tensor. It knows its direction.

    A divisor (compressed-tensors, Transformer Engine) divides the values, and a multiplier
    (torchao, ModelOpt) multiplies them: a value is `element * scale * factor`.
    """

    value: float | Array
    """A number, or float32 `[1]` in the memory of a GPU."""
    direction: Direction
    """`divisor` or `multiplier`."""

    @property
    def factor(self) -> float | Array:
        """The factor that dequantizing multiplies with: the value of a multiplier, and the
        reciprocal for a divisor."""
        return self.value if self.direction == "multiplier" else 1 / self.value
