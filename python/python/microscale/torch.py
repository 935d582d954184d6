"""PyTorch: layers with quantized weights, operators for `torch.compile`, and torchao's tensors.

    microscale.torch.quantize_(model, "mxfp4")
    model(tokens)                       # on a CPU or a GPU
    model.state_dict()                  # weight_packed, weight_scale, weight_global_scale: names of compressed-tensors
    model.save_pretrained(folder)       # a model of transformers
    microscale.torch.load_quantized(other, folder)

The operators are `torch.ops.microscale.quantize`, `dequantize`, `linear` and `linear_experts`, for
tensors on CPUs and NVIDIA GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microscale import _tensors
from microscale._errors import Error
from microscale._linear import QuantizedLinear
from microscale._load import load_quantized
from microscale._mixtures import QuantizedExperts
from microscale._operators import word
from microscale._replace import quantize_

__all__ = ["QuantizedExperts", "QuantizedLinear", "load_quantized", "quantize_", "to_torchao"]


def to_torchao(q: _tensors.Quantized, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Tensor:
    """Returns a quantized array as torchao's tensor over the same memory.

    This is an `NVFP4Tensor`, or an `MXTensor` for MXFP4 and MXFP8.

    Args:
        q: `[..., M, K]` of whole blocks, of PyTorch. A global scale must be a multiplier, as of the
            numerics torchao and modelopt. Scales may be linear or swizzled, as `torch._scaled_mm`
            takes them.
        dtype: the dtype of the values.
        options: options of torchao's class, such as `act_quant_kwargs` or `kernel_preference`.
    """
    nvfp4 = q.format == "nvfp4"
    if q.direction == "divisor":
        raise Error("torchao's global scale is a multiplier and this is a divisor; choose the numerics torchao or modelopt")
    block = 16 if nvfp4 else 32
    if len(q.shape) < 2 or q.cols % block:
        raise Error(f"torchao's tensors are matrices of whole blocks of {block}, and this is {q!r}")
    codes, scales = q.codes, q.typed[1]
    if q.layout == "swizzled":
        if q.rows != q.shape[-2] and q.shape[-2] % 128:
            raise Error("matrices share tiles of swizzled scales unless they have a multiple of 128 rows; use linear scales")
        # torchao's shape of the same bytes: 32 rows of 16 a tile.
        scales = scales.view(*q.shape[:-2], (q.shape[-2] + 127) // 128 * 32, -1)
    layout = {"is_swizzled_scales": q.layout == "swizzled"}
    if nvfp4:
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

        number = None if q.direction is None else word(q).reshape(())
        result: Tensor = NVFP4Tensor(codes, scales, block, dtype, per_tensor_scale=number, **layout, **options)
        return result
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common import KernelPreference

    element = torch.float4_e2m1fn_x2 if q.format == "mxfp4" else q.typed[0].dtype
    codes = codes if q.format == "mxfp4" else q.typed[0]
    options = {"kernel_preference": KernelPreference.EMULATED, "act_quant_kwargs": None, **options}
    result = MXTensor(codes, scales, element, block, dtype, **layout, **options)
    return result
