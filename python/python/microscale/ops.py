"""PyTorch operators that quantize activations and KV caches, under names of vLLM and FlashInfer.

    codes, scales = microscale.ops.silu_and_mul_nvfp4_quant(gate_up, global_scale)
    y = torch.ops.microscale.scaled_fp4_quant(x, global_scale)          # the same operators

They have the arguments and results of these libraries' functions, work on CPUs and NVIDIA GPUs, and
stay in one graph under `torch.compile`. :func:`quantize_activations` has every choice of
:func:`microscale.quantize_activations`, and the others compute the same: results of the operation
are rounded to the dtype of the input, scales are exact, and NaN propagates. Each operator says how
the other library's arithmetic differs from that. A function that writes to an output argument there
returns it here. In `torch.ops`, arguments that are changed have no defaults, nor have those before
them. On GPUs inputs are float16 or bfloat16.

Unless an operator says otherwise, a global scale is a divisor, float32 `[1]`: 2688 / amax, where
2688 = 448 * 6.
"""

from __future__ import annotations

from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from microscale import _activations
from microscale._activations import padded
from microscale._errors import Error
from microscale._kv import append_kv, gather_kv, nvfp4_kv_dequantize, nvfp4_kv_quantize, reshape_and_cache_flash
from microscale._registration import SHAPES_ONLY, operator
from microscale._types import ActivationFormat, ActivationLayout, Direction, GlobalScale, Norm, RowOperation, ScaleRule

__all__ = [
    "add_rmsnorm_fp4quant",
    "append_kv",
    "fused_add_rms_norm_static_fp8_quant",
    "gather_kv",
    "mxfp4_quantize",
    "mxfp8_quantize",
    "nvfp4_kv_dequantize",
    "nvfp4_kv_quantize",
    "nvfp4_quantize",
    "per_token_group_quant_fp8",
    "quantize_activations",
    "quantize_activations_into",
    "reshape_and_cache_flash",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_static_fp8_quant",
    "rmsnorm_fp4quant",
    "scaled_fp4_experts_quant",
    "scaled_fp4_grouped_quantize",
    "scaled_fp4_quant",
    "scaled_fp8_quant",
    "silu_and_mul_nvfp4_quant",
    "silu_and_mul_nvfp4_quantize",
    "silu_and_mul_quant",
    "silu_and_mul_scaled_fp4_experts_quant",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
]

#: Columns per block scale, by format.
_BLOCK = {"fp8": 1, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
#: Rows of a tile of block scales, by layout.
_TILE = {"linear": 1, "128x4": 128, "8x4": 8}
#: Operations that combine pairs of columns.
_GATES = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "swiglu_oai")
#: Sources of computed scales.
_COMPUTED = ("token", "tensor", "group128")
#: FlashInfer's `SfLayout`.
_LAYOUTS: tuple[ActivationLayout, ...] = ("128x4", "8x4", "linear")


def _quantize(
    x: Tensor,
    format: ActivationFormat,
    *,
    operation: RowOperation = "none",
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Norm = "llama",
    eps: float = 1e-6,
    scale: Any = None,
    scale_rule: ScaleRule | None = None,
    power_of_two: bool = False,
    layout: ActivationLayout = "linear",
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes activations in whole blocks, or returns tensors of the same shapes in a fake kernel.
    Absent parts have no elements."""
    columns, block = _columns(x, operation), _BLOCK[format]
    if columns % block:
        raise Error(f"rows of {columns} are not whole blocks of {block}; pad them, or call quantize_activations")
    if SHAPES_ONLY.get():
        per_row = scale if isinstance(scale, str) else None
        return _shapes(x, columns, format, per_row, layout, None)
    options: dict[str, Any] = {} if operation != "rms_norm" else {"norm": norm, "eps": eps, "weight": weight, "residual": residual}
    options |= {"scale_rule": scale_rule, "power_of_two": power_of_two}
    return _quantized(x, format, operation=operation, scale=scale, layout=layout, **options)


def _quantized(x: Tensor, format: ActivationFormat, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes activations. Absent results are tensors without elements."""
    x = x.detach() if x.stride(-1) == 1 else x.detach().contiguous()
    codes, scales, f32_scales = _activations.quantize_activations(x, format, **options)
    if scales is None:
        scales = x.new_empty((0,), dtype=torch.uint8)
    if f32_scales is None:
        f32_scales = x.new_empty((0,), dtype=torch.float32)
    return codes, scales, f32_scales


def _columns(x: Tensor, operation: str) -> int:
    """Returns the number of columns that an operation results in."""
    _require_columns(x)
    columns = x.shape[-1]
    if operation not in _GATES:
        return columns
    if columns % 2:
        raise Error(f"the input has {columns} columns and a gate combines pairs; pass 2 * K columns")
    return columns // 2


def _shapes(
    x: Tensor, columns: int, format: str, per_row: str | None, layout: str, rows_of_scales: tuple[int, ...] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tensors of the shapes of :func:`_quantized`.

    `per_row` is the source of float32 scales if they are computed. `rows_of_scales` are the
    leading dimensions of block scales of experts.
    """
    leading, block, tile = x.shape[:-1], _BLOCK[format], _TILE[layout]
    blocks = (columns + block - 1) // block
    code_bytes = blocks * block // 2 if format in ("nvfp4", "mxfp4") else blocks * block
    if rows_of_scales is None:
        rows_of_scales = leading if tile == 1 else (padded(prod(leading), tile),)
    scales_shape = (*rows_of_scales, blocks if tile == 1 else padded(blocks, 4)) if format != "fp8" else (0,)
    f32_shape = {
        None: (0,),
        "tensor": (1,),
        "token": (*leading, 1),
        "group128": (*leading, (columns + 127) // 128),
    }[per_row]
    return (
        x.new_empty((*leading, code_bytes), dtype=torch.uint8),
        x.new_empty(scales_shape, dtype=torch.uint8),
        x.new_empty(f32_shape, dtype=torch.float32),
    )


def _require_columns(x: Tensor) -> None:
    """Raises an error for a scalar."""
    if x.dim() == 0:
        raise Error("the input has no dimensions; it must have one or more")


def _matrix(x: Tensor) -> Tensor:
    """Returns an input `[..., C]` as a matrix."""
    _require_columns(x)
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _sf_layout(layout: int) -> ActivationLayout:
    """Returns the layout for a value of FlashInfer's `SfLayout`."""
    if layout not in (0, 1, 2):
        raise Error(f"sfLayout is {layout}; pass 0 for 128x4, 1 for 8x4 or 2 for linear, as in FlashInfer's SfLayout")
    return _LAYOUTS[layout]


def _require_fp8(dtype: torch.dtype) -> None:
    """Raises an error for another dtype of codes than FP8's."""
    if dtype is not torch.float8_e4m3fn:
        raise Error(f"codes are {dtype}; pass torch.float8_e4m3fn")


@operator(mutates_args=("residual",))
def quantize_activations(
    x: Tensor,
    format: str = "nvfp4",
    operation: str = "none",
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    norm: str = "llama",
    eps: float = 1e-6,
    scale: Tensor | None = None,
    scale_source: str = "token",
    scale_rule: str | None = None,
    power_of_two: bool = False,
    layout: str = "linear",
    offsets: Tensor | None = None,
    scale_offsets: Tensor | None = None,
    scale_rows: int | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes activations, as :func:`microscale.quantize_activations` with the same arguments.

        codes, scales, f32_scales = microscale.ops.quantize_activations(torch.ones(3, 64), operation="swiglu_oai")
        assert codes.shape == (3, 16) and scales.shape == (3, 2) and f32_scales.shape == (3, 1)

    Args:
        x: `[..., C]`.
        format: `fp8`, `mxfp8`, `mxfp4` or `nvfp4`.
        operation: the operation on a row.
        weight: `[K]`, weights of RMSNorm.
        residual: of the shape and dtype of `x`. Becomes the sum.
        norm: whose RMSNorm.
        eps: added to the mean of squares.
        scale: float32 `[1]` or `[experts]`, the given scale.
        scale_source: `token`, `tensor` or `group128` without `scale`. With it the meaning of its values:
            `given` for FP8, `divisor` or `multiplier` for NVFP4. MX formats ignore this.
        scale_rule: the rule of MX formats.
        power_of_two: for `group128`.
        layout: the layout of block scales.
        offsets: int32 `[experts + 1]`, first rows of experts.
        scale_offsets: int32 `[experts + 1]`, first rows of experts' block scales.
        scale_rows: rows of block scales, for `offsets`.
        counts: int32 `[experts]`, rows of experts that exist.

    Returns:
        Codes, uint8; block scales, uint8; and float32 scales. Absent ones are `[0]`.
    """
    _require_source(format, scale, scale_source, layout)
    if SHAPES_ONLY.get():
        per_row = scale_source if scale is None and format in ("fp8", "nvfp4") else None
        rows_of_scales: tuple[int, ...] | None = None
        if counts is not None and x.dim() == 3:
            rows_of_scales = x.shape[0], padded(x.shape[1], _TILE[layout])
        elif offsets is not None:
            most = _activations.sorted_scale_rows(x.shape[0], offsets.shape[0] - 1, _TILE[layout])
            rows_of_scales = (most if scale_rows is None else scale_rows,)
        return _shapes(x, _columns(x, operation), format, per_row, layout, rows_of_scales)
    return _quantized(
        x,
        cast(ActivationFormat, format),
        operation=operation,
        weight=weight,
        residual=residual,
        norm=norm,
        eps=eps,
        scale=_given(format, scale, scale_source),
        scale_rule=scale_rule,
        power_of_two=power_of_two,
        layout=layout,
        offsets=offsets,
        scale_offsets=scale_offsets,
        scale_rows=scale_rows,
        counts=counts,
    )


def _require_source(format: str, scale: Tensor | None, scale_source: str, layout: str) -> None:
    """Raises an error for words that are not known, and for a scale that contradicts its source."""
    if format not in _BLOCK or layout not in _TILE:
        raise Error(f"format is {format!r} and layout {layout!r}; pass one of {', '.join(_BLOCK)}, and one of {', '.join(_TILE)}")
    if (scale is None) != (scale_source in _COMPUTED):
        found, choices = "missing" if scale is None else "given", ", ".join(map(repr, _COMPUTED))
        raise Error(f"scale_source is {scale_source!r} and scale is {found}; pass one of {choices} exactly without a scale")


def _given(format: str, scale: Tensor | None, scale_source: str) -> Any:
    """Returns the scale for :func:`microscale.quantize_activations`."""
    if scale is None:
        return None if format in ("mxfp8", "mxfp4") else scale_source
    return scale if scale_source == "given" else GlobalScale(scale, cast(Direction, scale_source))


@operator(mutates_args=("codes", "scales", "f32_scales", "residual"))
def quantize_activations_into(
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None = None,
    f32_scales: Tensor | None = None,
    format: str = "nvfp4",
    operation: str = "none",
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    norm: str = "llama",
    eps: float = 1e-6,
    scale: Tensor | None = None,
    scale_source: str = "token",
    scale_rule: str | None = None,
    power_of_two: bool = False,
    layout: str = "linear",
    offsets: Tensor | None = None,
    scale_offsets: Tensor | None = None,
    scale_rows: int | None = None,
    counts: Tensor | None = None,
) -> None:
    """Computes :func:`quantize_activations` into tensors that you have, as vLLM's operators with
    output arguments and FlashInfer's functions with `out` do.

        codes, scales = torch.empty(3, 32, dtype=torch.uint8), torch.empty(128, 4, dtype=torch.float8_e4m3fn)
        microscale.ops.quantize_activations_into(
            torch.ones(3, 64), codes, scales, scale=torch.tensor([2688.0]), scale_source="divisor", layout="128x4"
        )
        assert (codes == 0x77).all()

    Args:
        x: as for :func:`quantize_activations`, and so are the arguments after `f32_scales`.
        codes: uint8, or a float of one byte, of the shape of the result there; contiguous.
        scales: block scales, the same; None for FP8.
        f32_scales: float32 scales, the same; None if a scale is given, and for MX formats.
    """
    _require_source(format, scale, scale_source, layout)
    if SHAPES_ONLY.get():
        return
    x = x.detach() if x.stride(-1) == 1 else x.detach().contiguous()
    _activations.quantize_activations(
        x,
        cast(ActivationFormat, format),
        operation=cast(RowOperation, operation),
        weight=weight,
        residual=residual,
        norm=cast(Norm, norm),
        eps=eps,
        scale=_given(format, scale, scale_source),
        scale_rule=cast("ScaleRule | None", scale_rule),
        power_of_two=power_of_two,
        layout=cast(ActivationLayout, layout),
        offsets=offsets,
        scale_offsets=scale_offsets,
        scale_rows=scale_rows,
        counts=counts,
        out=(codes, scales, f32_scales),
    )


@operator()
def scaled_fp4_quant(
    input: Tensor, input_global_scale: Tensor, is_sf_swizzled_layout: bool = True
) -> tuple[Tensor, Tensor]:
    """Quantizes to NVFP4, as vLLM's `scaled_fp4_quant`.

    vLLM multiplies by approximate reciprocals, so that values near a tie may be rounded otherwise.

        codes, scales = microscale.ops.scaled_fp4_quant(torch.ones(3, 64), torch.tensor([2688.0]))
        assert codes.shape == (3, 32) and scales.shape == (128, 4)

    Args:
        input: `[..., K]`, where K is a multiple of 16. Leading dimensions are flattened to M.
        input_global_scale: float32 `[1]`, a divisor.
        is_sf_swizzled_layout: whether scales are in the layout `128x4` instead of `linear`.

    Returns:
        Codes, uint8 `[M, K / 2]`, and scales, float8_e4m3fn, `[M, K / 16]`, swizzled with both
        padded to multiples of 128 and 4.
    """
    layout: ActivationLayout = "128x4" if is_sf_swizzled_layout else "linear"
    codes, scales, _ = _quantize(_matrix(input), "nvfp4", scale=GlobalScale(input_global_scale, "divisor"), layout=layout)
    return codes, scales.view(torch.float8_e4m3fn)


@operator()
def silu_and_mul_nvfp4_quant(input: Tensor, input_global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Computes SiLU times `up` and quantizes to NVFP4, as vLLM's `silu_and_mul_nvfp4_quant`.

    vLLM computes SiLU with an approximate exponential and quotient, and quantizes by approximate
    reciprocals.

        codes, scales = microscale.ops.silu_and_mul_nvfp4_quant(torch.ones(3, 128), torch.tensor([2688.0]))
        assert codes.shape == (3, 32) and scales.shape == (128, 4)

    Args:
        input: `[..., 2 * K]`: K gates and K values of `up`, where K is a multiple of 16.
        input_global_scale: float32 `[1]`, a divisor.

    Returns:
        Codes, uint8 `[M, K / 2]`, and scales in the layout `128x4`, float8_e4m3fn, `[M, K / 16]`
        padded to multiples of 128 and 4.
    """
    scale = GlobalScale(input_global_scale, "divisor")
    codes, scales, _ = _quantize(_matrix(input), "nvfp4", operation="silu_and_mul", scale=scale, layout="128x4")
    return codes, scales.view(torch.float8_e4m3fn)


def _by_offsets(
    input_tensor: Tensor, global_scale: Tensor, offsets: Tensor, scale_offsets: Tensor, operation: RowOperation
) -> tuple[Tensor, Tensor]:
    """Quantizes rows that are sorted by expert to NVFP4 in the layout `128x4`."""
    codes, scales, _ = quantize_activations(
        input_tensor,
        operation=operation,
        scale=global_scale,
        scale_source="divisor",
        layout="128x4",
        offsets=offsets,
        scale_offsets=scale_offsets,
    )
    return codes, scales.view(torch.float8_e4m3fn)


@operator()
def scaled_fp4_experts_quant(
    input_tensor: Tensor, input_global_scale: Tensor, expert_offsets: Tensor, blockscale_offsets: Tensor, topk: int
) -> tuple[Tensor, Tensor]:
    """Quantizes rows that are sorted by expert to NVFP4, as vLLM's `scaled_fp4_experts_quant`.

    vLLM multiplies by approximate reciprocals, and allocates more rows of scales.

        offsets, starts = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([0, 128, 256], dtype=torch.int32)
        codes, scales = microscale.ops.scaled_fp4_experts_quant(torch.ones(3, 64), torch.tensor([2688.0, 336.0]), offsets, starts, 1)
        assert codes.shape == (3, 32) and scales.shape[1] == 4

    Args:
        input_tensor: `[rows, K]`, where K is a multiple of 16.
        input_global_scale: float32 `[experts]`, divisors.
        expert_offsets: int32 `[experts + 1]`, first rows of experts.
        blockscale_offsets: int32 `[experts + 1]`, first rows of experts' scales, multiples of 128.
        topk: the experts of a token. Not needed here.

    Returns:
        Codes, uint8 `[rows, K / 2]`, and scales in the layout `128x4`, float8_e4m3fn, `[scale rows,
        K / 16]`, padded to a multiple of 4. There are enough rows for all experts.
    """
    return _by_offsets(input_tensor, input_global_scale, expert_offsets, blockscale_offsets, "none")


@operator()
def silu_and_mul_scaled_fp4_experts_quant(
    input_tensor: Tensor, input_global_scale: Tensor, expert_offsets: Tensor, blockscale_offsets: Tensor, topk: int
) -> tuple[Tensor, Tensor]:
    """Computes SiLU times `up`, and :func:`scaled_fp4_experts_quant` of it, as vLLM's
    `silu_and_mul_scaled_fp4_experts_quant`.

        offsets, starts = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([0, 128, 256], dtype=torch.int32)
        codes, scales = microscale.ops.silu_and_mul_scaled_fp4_experts_quant(
            torch.ones(3, 128), torch.tensor([2688.0, 336.0]), offsets, starts, 1
        )
        assert codes.shape == (3, 32) and scales.shape[1] == 4

    Args:
        input_tensor: `[rows, 2 * K]`: K gates and K values of `up`, where K is a multiple of 16.
        input_global_scale: as for :func:`scaled_fp4_experts_quant`.
        expert_offsets: as for :func:`scaled_fp4_experts_quant`.
        blockscale_offsets: as for :func:`scaled_fp4_experts_quant`.
        topk: as for :func:`scaled_fp4_experts_quant`.

    Returns:
        As :func:`scaled_fp4_experts_quant`.
    """
    return _by_offsets(input_tensor, input_global_scale, expert_offsets, blockscale_offsets, "silu_and_mul")


def _by_counts(a: Tensor, mask: Tensor, global_scale: Tensor, operation: RowOperation) -> tuple[Tensor, Tensor]:
    """Quantizes batches of experts' rows to NVFP4, with the dimensions that FlashInfer's products
    take."""
    scale = global_scale.expand(a.shape[0]).contiguous() if global_scale.numel() == 1 else global_scale
    codes, scales, _ = quantize_activations(
        a, operation=operation, scale=scale, scale_source="divisor", layout="128x4", counts=mask
    )
    experts, rows, blocks = scales.shape
    tiles = scales.view(torch.float8_e4m3fn).view(experts, rows // 128, blocks // 4, 32, 4, 4)
    return codes.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)


@operator()
def scaled_fp4_grouped_quantize(a: Tensor, mask: Tensor, a_global_sf: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes batches of experts' rows to NVFP4, as FlashInfer's `scaled_fp4_grouped_quantize`.

    FlashInfer multiplies by approximate reciprocals.

        mask = torch.tensor([3, 1], dtype=torch.int32)
        codes, scales = microscale.ops.scaled_fp4_grouped_quantize(torch.ones(2, 5, 64), mask, torch.tensor([2688.0, 336.0]))
        assert codes.shape == (5, 32, 2) and scales.shape == (32, 4, 1, 4, 1, 2)

    Args:
        a: `[experts, rows, K]`, where K is a multiple of 16.
        mask: int32 `[experts]`, the rows of each expert that exist.
        a_global_sf: float32 `[experts]` or `[1]`, divisors.

    Returns:
        Codes, uint8 `[rows, K / 2, experts]`, and scales, float8_e4m3fn `[32, 4, row tiles, 4,
        column tiles, experts]`: views of memory that begins with the expert. Codes of rows that do
        not exist have any values.
    """
    return _by_counts(a, mask, a_global_sf, "none")


@operator()
def silu_and_mul_scaled_nvfp4_experts_quantize(a: Tensor, mask: Tensor, a_global_sf: Tensor) -> tuple[Tensor, Tensor]:
    """Computes SiLU times `up`, and :func:`scaled_fp4_grouped_quantize` of it, as FlashInfer's
    `silu_and_mul_scaled_nvfp4_experts_quantize`.

        mask = torch.tensor([3, 1], dtype=torch.int32)
        codes, scales = microscale.ops.silu_and_mul_scaled_nvfp4_experts_quantize(torch.ones(2, 5, 128), mask, torch.tensor([2688.0]))
        assert codes.shape == (5, 32, 2) and scales.shape == (32, 4, 1, 4, 1, 2)

    Args:
        a: `[experts, rows, 2 * K]`: K gates and K values of `up`, where K is a multiple of 16.
        mask: as for :func:`scaled_fp4_grouped_quantize`.
        a_global_sf: as for :func:`scaled_fp4_grouped_quantize`.

    Returns:
        As :func:`scaled_fp4_grouped_quantize`.
    """
    return _by_counts(a, mask, a_global_sf, "silu_and_mul")


@operator()
def scaled_fp8_quant(
    input: Tensor,
    scale: Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantizes to FP8 under a given scale, a scale per tensor or a scale per row, as vLLM's
    `scaled_fp8_quant`.

    vLLM multiplies by 1 / scale instead of dividing, except per row. Its kernel has no least scale
    per tensor: zeros get NaN codes.

        codes, scale = microscale.ops.scaled_fp8_quant(torch.full((3, 64), 7.0))
        assert codes.shape == (3, 64) and scale == 7 / 448

    Args:
        input: `[M, K]`.
        scale: float32 `[1]`, which multiplies codes. By default it is computed from amax.
        num_token_padding: the least number of rows of the result. Rows of padding have any values.
        scale_ub: None: there is no upper bound of scales here.
        use_per_token_if_dynamic: whether each row has a computed scale of its own.

    Returns:
        Codes, float8_e4m3fn `[max(M, num_token_padding), K]`, and float32 scales: a copy of the
        given one, `[1]` for the tensor, or a column with one per row of the codes.
    """
    if scale_ub is not None:
        raise Error("scale_ub is not supported; leave it out")
    if input.dim() != 2:
        raise Error(f"the input has {input.dim()} dimensions and must have two; reshape it")
    rows = max(input.shape[0], num_token_padding or 0)
    codes = input.new_empty((rows, input.shape[1]), dtype=torch.float8_e4m3fn)
    per_token = scale is None and use_per_token_if_dynamic
    shape = scale.shape if scale is not None else (rows, 1) if per_token else (1,)
    scales = input.new_empty(shape, dtype=torch.float32) if scale is None else scale.clone()
    if SHAPES_ONLY.get():
        return codes, scales
    computed = scales[: input.shape[0]] if per_token else scales
    _activations.quantize_activations(
        input.detach() if input.stride(-1) == 1 else input.detach().contiguous(),
        "fp8",
        scale="token" if per_token else "tensor" if scale is None else scale.detach().reshape(-1),
        out=(codes[: input.shape[0]].view(torch.uint8), None, computed if scale is None else None),
    )
    return codes, scales


@operator()
def silu_and_mul_quant(input: Tensor, scale: Tensor) -> Tensor:
    """Computes SiLU times `up` and quantizes to FP8, as vLLM's `silu_and_mul_quant`.

    vLLM rounds SiLU to the dtype of the input before it multiplies by `up`, and multiplies by 1 /
    scale instead of dividing.

        assert microscale.ops.silu_and_mul_quant(torch.ones(3, 128), torch.tensor([0.5])).shape == (3, 64)

    Args:
        input: `[..., 2 * K]`: K gates and K values of `up`.
        scale: float32 `[1]`, which multiplies codes.

    Returns:
        Codes, float8_e4m3fn `[..., K]`.
    """
    codes, _, _ = _quantize(input, "fp8", operation="silu_and_mul", scale=scale)
    return codes.view(torch.float8_e4m3fn)


@operator()
def rms_norm_static_fp8_quant(input: Tensor, weight: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    """Computes RMSNorm and quantizes to FP8, as vLLM's `rms_norm_static_fp8_quant`.

    vLLM multiplies by 1 / scale instead of dividing, and sums squares in another order.

        codes = microscale.ops.rms_norm_static_fp8_quant(torch.ones(3, 64), torch.ones(64), torch.tensor([0.5]), 1e-6)
        assert codes.shape == (3, 64)

    Args:
        input: `[..., K]`.
        weight: `[K]` of the dtype of the input.
        scale: float32 `[1]`, which multiplies codes.
        epsilon: added to the mean of squares.

    Returns:
        Codes, float8_e4m3fn `[..., K]`.
    """
    codes, _, _ = _quantize(input, "fp8", operation="rms_norm", weight=weight, eps=epsilon, scale=scale)
    return codes.view(torch.float8_e4m3fn)


@operator(mutates_args=("residual",))
def fused_add_rms_norm_static_fp8_quant(
    input: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> Tensor:
    """Adds the input to the residual in place, computes RMSNorm of the sum and quantizes to FP8, as
    vLLM's `fused_add_rms_norm_static_fp8_quant`.

    vLLM multiplies by 1 / scale instead of dividing, and sums squares in another order.

        x, residual = torch.ones(3, 64), torch.ones(3, 64)
        microscale.ops.fused_add_rms_norm_static_fp8_quant(x, residual, torch.ones(64), torch.tensor([0.5]), 1e-6)
        assert torch.equal(residual, x + 1)

    Args:
        input: `[..., K]`.
        residual: of the shape and dtype of the input, contiguous. Becomes the sum.
        weight: `[K]` of the dtype of the input.
        scale: float32 `[1]`, which multiplies codes.
        epsilon: added to the mean of squares.

    Returns:
        Codes, float8_e4m3fn `[..., K]`.
    """
    codes, _, _ = _quantize(input, "fp8", operation="rms_norm", weight=weight, residual=residual, eps=epsilon, scale=scale)
    return codes.view(torch.float8_e4m3fn)


@operator(mutates_args=("residual",))
def rms_norm_dynamic_per_token_quant(
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype = torch.float8_e4m3fn,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes RMSNorm and quantizes to FP8 with a scale per row, as vLLM's
    `rms_norm_dynamic_per_token_quant`.

    vLLM normalizes the sum with the residual before it is rounded, and sums squares in another
    order.

        codes, scales = microscale.ops.rms_norm_dynamic_per_token_quant(torch.ones(3, 64), torch.ones(64), 1e-6)
        assert codes.shape == (3, 64) and scales.shape == (3, 1)

    Args:
        input: `[..., K]`.
        weight: `[K]` of the dtype of the input.
        epsilon: added to the mean of squares.
        quant_dtype: float8_e4m3fn.
        scale_ub: None: there is no upper bound of scales here.
        residual: of the shape and dtype of the input, contiguous. Added first; becomes the sum.

    Returns:
        Codes, float8_e4m3fn `[..., K]`, and scales, float32 `[M, 1]`, which multiply codes.
    """
    _require_fp8(quant_dtype)
    if scale_ub is not None:
        raise Error("scale_ub is not supported; leave it out")
    codes, _, scales = _quantize(
        input, "fp8", operation="rms_norm", weight=weight, residual=residual, eps=epsilon, scale="token"
    )
    return codes.view(torch.float8_e4m3fn), scales.view(-1, 1)


@operator()
def per_token_group_quant_fp8(
    x: Tensor, group_size: int = 128, eps: float = 1e-10, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantizes to FP8 with a scale per 128 columns of a row, as vLLM's `per_token_group_quant_fp8`.

    vLLM divides by 448 and by scales approximately in some of its kernels.

        codes, scales = microscale.ops.per_token_group_quant_fp8(torch.ones(3, 256), 128)
        assert codes.shape == (3, 256) and scales.shape == (3, 2)

    Args:
        x: `[..., K]`, where K is a multiple of 128.
        group_size: 128.
        eps: 1e-10, the smallest amax.
        use_ue8m0: whether scales are rounded up to powers of two.

    Returns:
        Codes, float8_e4m3fn `[..., K]`, and scales, float32 `[..., K / 128]`, which multiply codes.
    """
    if group_size != 128 or eps != 1e-10:
        raise Error(f"group_size is {group_size} and eps {eps}; pass 128 and 1e-10")
    if x.dim() and x.shape[-1] % 128:
        raise Error(f"rows of {x.shape[-1]} are not whole groups of 128; pad them, or call quantize_activations")
    codes, _, scales = _quantize(x, "fp8", scale="group128", power_of_two=use_ue8m0)
    return codes.view(torch.float8_e4m3fn), scales


@operator()
def nvfp4_quantize(a: Tensor, a_global_sf: Tensor, sfLayout: int = 0) -> tuple[Tensor, Tensor]:
    """Quantizes to NVFP4, as FlashInfer's `nvfp4_quantize`.

    FlashInfer multiplies by approximate reciprocals, so that values near a tie may be rounded
    otherwise. There is no shuffling of weights here. For its per-token scales call
    :func:`quantize_activations` with `scale_source="token"`.

        codes, scales = microscale.ops.nvfp4_quantize(torch.ones(3, 64), torch.tensor([2688.0]), 1)
        assert codes.shape == (3, 32) and scales.shape == (8, 4)

    Args:
        a: `[M, K]`, where K is a multiple of 16.
        a_global_sf: float32 `[1]`, a divisor.
        sfLayout: a value of FlashInfer's `SfLayout`: 0 for `128x4`, 1 for `8x4`, 2 for `linear`.

    Returns:
        Codes, uint8 `[M, K / 2]`, and E4M3 scales, uint8 `[M, K / 16]`, padded as the layout needs.
    """
    layout = _sf_layout(sfLayout)
    codes, scales, _ = _quantize(_matrix(a), "nvfp4", scale=GlobalScale(a_global_sf, "divisor"), layout=layout)
    return codes, scales


@operator()
def silu_and_mul_nvfp4_quantize(
    input: Tensor,
    global_scale: Tensor,
    sf_vec_size: int = 16,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes SiLU times `up` and quantizes to NVFP4, as FlashInfer's
    `silu_and_mul_nvfp4_quantize`.

    FlashInfer computes SiLU approximately, and quantizes by approximate reciprocals.

        codes, scales = microscale.ops.silu_and_mul_nvfp4_quantize(torch.ones(3, 128), torch.tensor([2688.0]))
        assert codes.shape == (3, 32) and scales.shape == (128, 4)

    Args:
        input: `[..., 2 * K]`: K gates and K values of `up`, where K is a multiple of 16.
        global_scale: float32 `[1]`, a divisor.
        sf_vec_size: 16.
        is_sf_swizzled_layout: whether scales are in tiles instead of `linear`.
        is_sf_8x4_layout: whether tiles are `8x4` instead of `128x4`.

    Returns:
        Codes, uint8 `[M, K / 2]`, and E4M3 scales, uint8 `[M, K / 16]`, padded as the layout needs.
    """
    if sf_vec_size != 16:
        raise Error(f"sf_vec_size is {sf_vec_size}; pass 16")
    layout: ActivationLayout = "linear" if not is_sf_swizzled_layout else "8x4" if is_sf_8x4_layout else "128x4"
    scale = GlobalScale(global_scale, "divisor")
    codes, scales, _ = _quantize(_matrix(input), "nvfp4", operation="silu_and_mul", scale=scale, layout=layout)
    return codes, scales


@operator()
def mxfp4_quantize(a: Tensor, *, sfLayout: int = 0) -> tuple[Tensor, Tensor]:
    """Quantizes to MXFP4 with the scale rule `rceil`, as FlashInfer's `mxfp4_quantize`.

    FlashInfer multiplies amax by an approximate 1 / 6: an amax just above 6 times a power of two may
    get half the scale.

        codes, scales = microscale.ops.mxfp4_quantize(torch.ones(3, 64), sfLayout=2)
        assert codes.shape == (3, 32) and scales.shape == (3, 2)

    Args:
        a: `[M, K]`, where K is a multiple of 32.
        sfLayout: a value of FlashInfer's `SfLayout`: 0 for `128x4`, 1 for `8x4`, 2 for `linear`.

    Returns:
        Codes, uint8 `[M, K / 2]`, and E8M0 scales, uint8 `[M, K / 32]`, padded as the layout needs.
    """
    codes, scales, _ = _quantize(_matrix(a), "mxfp4", scale_rule="rceil", layout=_sf_layout(sfLayout))
    return codes, scales


@operator()
def mxfp8_quantize(
    input: Tensor, is_sf_swizzled_layout: bool = True, alignment: int = 32
) -> tuple[Tensor, Tensor]:
    """Quantizes to MXFP8 with the scale rule `rceil`, as FlashInfer's `mxfp8_quantize`.

    FlashInfer multiplies amax by an approximate 1 / 448: an amax just above 448 times a power of two
    may get half the scale.

        codes, scales = microscale.ops.mxfp8_quantize(torch.ones(3, 64))
        assert codes.shape == (3, 64) and scales.shape == (128 * 4,)

    Args:
        input: `[..., K]`, where K is a multiple of 32.
        is_sf_swizzled_layout: whether scales are in the layout `128x4` instead of `linear`.
        alignment: 32.

    Returns:
        Codes, float8_e4m3fn `[..., K]`, and E8M0 scales, uint8, flat: `[M * K / 32]`, swizzled with
        M padded to a multiple of 128 and K / 32 to one of 4.
    """
    if alignment != 32:
        raise Error(f"alignment is {alignment}; pass 32")
    layout: ActivationLayout = "128x4" if is_sf_swizzled_layout else "linear"
    codes, scales, _ = _quantize(input, "mxfp8", scale_rule="rceil", layout=layout)
    return codes.view(torch.float8_e4m3fn), scales.view(-1)


def _norm_fp4(
    input: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    global_scale: Tensor | None,
    eps: float,
    block_size: int,
    is_sf_swizzled_layout: bool,
) -> tuple[Tensor, Tensor]:
    """Computes FlashInfer's RMSNorm and quantizes to NVFP4 or MXFP4, by the size of blocks."""
    layout: ActivationLayout = "128x4" if is_sf_swizzled_layout else "linear"
    if block_size == 16:
        format: ActivationFormat = "nvfp4"
        scale = GlobalScale(1.0 if global_scale is None else global_scale, "divisor")
    elif block_size == 32:
        if global_scale is not None:
            raise Error("global_scale belongs to block_size=16; leave it out for MXFP4")
        format, scale = "mxfp4", None
    else:
        raise Error(f"block_size is {block_size}; pass 16 for NVFP4 or 32 for MXFP4")
    codes, scales, _ = _quantize(
        input,
        format,
        operation="rms_norm",
        weight=weight,
        residual=residual,
        norm="flashinfer",
        eps=eps,
        scale=scale,
        scale_rule="rceil" if format == "mxfp4" else None,
        layout=layout,
    )
    scales = scales.view(-1) if is_sf_swizzled_layout else scales
    return codes, scales.view(torch.float8_e4m3fn) if format == "nvfp4" else scales


@operator()
def rmsnorm_fp4quant(
    input: Tensor,
    weight: Tensor,
    global_scale: Tensor | None = None,
    *,
    eps: float = 1e-6,
    block_size: int = 16,
    is_sf_swizzled_layout: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes RMSNorm and quantizes to NVFP4 or MXFP4, as FlashInfer's `rmsnorm_fp4quant`.

    FlashInfer rounds the product of input and weight to the dtype of the input, multiplies by an
    approximate 1 / RMS, and does not round the result.

        codes, scales = microscale.ops.rmsnorm_fp4quant(torch.ones(3, 64), torch.ones(64))
        assert codes.shape == (3, 32) and scales.shape == (3, 4)

    Args:
        input: `[..., K]`, where K is a multiple of the block size.
        weight: `[K]` of the dtype of the input.
        global_scale: float32 `[1]`, a divisor, for NVFP4; by default 1. FlashInfer's kernels and
            tests take 2688 / amax too, although its documentation speaks of the reciprocal.
        eps: added to the mean of squares.
        block_size: 16 for NVFP4 or 32 for MXFP4 with the scale rule `rceil`.
        is_sf_swizzled_layout: whether scales are in the layout `128x4` instead of `linear`.

    Returns:
        Codes, uint8 `[..., K / 2]`, and scales `[..., K / block_size]`, swizzled flat with padding:
        float8_e4m3fn for NVFP4, and E8M0 as uint8 for MXFP4.
    """
    return _norm_fp4(input, weight, None, global_scale, eps, block_size, is_sf_swizzled_layout)


@operator(mutates_args=("residual",))
def add_rmsnorm_fp4quant(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    global_scale: Tensor | None = None,
    *,
    eps: float = 1e-6,
    block_size: int = 16,
    is_sf_swizzled_layout: bool = False,
) -> tuple[Tensor, Tensor]:
    """Adds the input to the residual in place, and computes :func:`rmsnorm_fp4quant` of the sum, as
    FlashInfer's `add_rmsnorm_fp4quant`.

    FlashInfer also takes the RMS of the sum before it is rounded.

        x, residual = torch.ones(3, 64), torch.ones(3, 64)
        codes, scales = microscale.ops.add_rmsnorm_fp4quant(x, residual, torch.ones(64))
        assert torch.equal(residual, x + 1) and codes.shape == (3, 32)

    Args:
        input: `[..., K]`, where K is a multiple of the block size.
        residual: of the shape and dtype of the input, contiguous. Becomes the sum.
        weight: `[K]` of the dtype of the input.
        global_scale: as for :func:`rmsnorm_fp4quant`.
        eps: added to the mean of squares.
        block_size: 16 for NVFP4 or 32 for MXFP4 with the scale rule `rceil`.
        is_sf_swizzled_layout: whether scales are in the layout `128x4` instead of `linear`.

    Returns:
        As :func:`rmsnorm_fp4quant`.
    """
    return _norm_fp4(input, weight, residual, global_scale, eps, block_size, is_sf_swizzled_layout)
