"""PyTorch operators for tensors and linear layers. The operator for experts is in `_mixtures`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from microscale import _microscale, _products, _tensors
from microscale._errors import Error
from microscale._types import Format, GlobalScale, RoundedActivations

#: Elements of a block, by format.
_BLOCK = {"nvfp4": 16, "mxfp4": 32}


def block_of(format: str) -> int:
    """Returns the elements of a block in a format of layers, or raises an error."""
    if format not in _BLOCK:
        raise Error(f"layers are quantized to nvfp4 or mxfp4, not to {format}; choose one of them")
    return _BLOCK[format]


def require_activations(format: str, activations: str | None, round_weights: bool, given: bool = False) -> None:
    """Raises an error for weights or words that a product with rounded activations does not take,
    and for a `given` global scale of activations that have none."""
    if activations is not None:
        _microscale.require_activations(format, activations, round_weights)
    _products.require_global_scale(activations, given)


def require_columns(x: Tensor, cols: int) -> None:
    """Raises an error unless activations are `[..., cols]`."""
    if x.dim() == 0 or x.shape[-1] != cols:
        raise Error(f"activations have shape {list(x.shape)} and the weights {cols} columns; pass activations [..., {cols}]")


def autocast(x: Tensor) -> Tensor:
    """Casts activations to the dtype of autocast, where it is on. As in PyTorch, float64 stays."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device) or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def quantized_weights(weight: Tensor, format: str, options: dict[str, Any]) -> _tensors.Quantized:
    """Quantizes weights `[M, K]`. For weights on the device meta, so are the codes and scales."""
    if not weight.is_meta:
        return _tensors.quantize(weight, cast(Format, format), **options)
    # One row gives the sizes, and checks the recipe.
    row = _tensors.quantize(torch.zeros((1, weight.shape[1]), dtype=weight.dtype), cast(Format, format), **options)
    codes, scales = (part.new_empty((weight.shape[0], *part.shape[1:]), device="meta") for part in (row.codes, row.scales))
    shape = (weight.shape[0], weight.shape[1])
    return _tensors.Quantized._of(codes, scales, row._global, row.direction, format, shape, row.layout, None)


def word(q: _tensors.Quantized) -> Tensor:
    """Returns a global scale as a tensor of one element, or of none."""
    number = None if q.global_scale is None else q.global_scale.value
    if isinstance(number, Tensor):
        return number
    return torch.tensor([] if number is None else [number], dtype=torch.float32, device=q.codes.device)


def quantized(codes: Tensor, scales: Tensor, global_scale: Tensor, format: str, direction: str, cols: int) -> _tensors.Quantized:
    """Makes weights of an operator's arguments."""
    number: Any = None
    if global_scale.numel():
        number = global_scale if codes.is_cuda else global_scale.item()
    return _tensors.Quantized._of(
        codes, scales, number, None if number is None else direction, format, (*codes.shape[:-1], cols), "linear", None
    )


@torch.library.custom_op("microscale::quantize", mutates_args=())
def _quantize(
    x: Tensor, format: str, numerics: str | None, search: str | None, non_finite: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes `x` `[..., K]` to NVFP4 or MXFP4.

    Returns codes uint8 `[..., code bytes]`, scales uint8 `[..., blocks]` and the global scale
    float32 `[1]`, or `[0]` if there is none.
    """
    block_of(format)
    # The schema of an operator has strings.
    options: dict[str, Any] = {"numerics": numerics, "search": search, "non_finite": non_finite}
    q = _tensors.quantize(x, cast(Format, format), **options)
    return q.codes, q.scales, word(q)


@_quantize.register_fake
def _(
    x: Tensor, format: str, numerics: str | None, search: str | None, non_finite: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    block = block_of(format)
    blocks = (x.shape[-1] + block - 1) // block
    codes = torch.empty((*x.shape[:-1], blocks * block // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((*x.shape[:-1], blocks), dtype=torch.uint8, device=x.device)
    return codes, scales, torch.empty((1 if format == "nvfp4" else 0,), dtype=torch.float32, device=x.device)


@torch.library.custom_op("microscale::dequantize", mutates_args=())
def _dequantize(
    codes: Tensor, scales: Tensor, global_scale: Tensor, format: str, direction: str, cols: int, dtype: torch.dtype
) -> Tensor:
    """Dequantizes codes and scales to `[..., cols]`.

    The global scale has the direction `divisor` or `multiplier`.
    """
    result: Tensor = quantized(codes, scales, global_scale, format, direction, cols).dequantize(dtype)
    return result


@_dequantize.register_fake
def _(
    codes: Tensor, scales: Tensor, global_scale: Tensor, format: str, direction: str, cols: int, dtype: torch.dtype
) -> Tensor:
    return torch.empty((*codes.shape[:-1], cols), dtype=dtype, device=codes.device)


@torch.library.custom_op("microscale::linear", mutates_args=())
def _linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    format: str,
    direction: str,
    bias: Tensor | None = None,
    activations: str | None = None,
    round_weights: bool = False,
    input_global_scale: Tensor | None = None,
) -> Tensor:
    """Multiplies `x` `[..., K]` with weights `[M, K]` and adds a bias `[M]`: `[..., M]`.

    `x` is float32, float16 or bfloat16, and the bias has its dtype. `activations` and
    `round_weights` have the meaning that they have in :func:`microscale.linear`.
    `input_global_scale` is a divisor, float32 `[1]`. Gradients pass the rounding unchanged.
    """
    rounded = cast("RoundedActivations | None", activations)
    weights = quantized(codes, scales, global_scale, format, direction, x.shape[-1])
    workspace = None
    if x.is_cuda:
        # Callers such as compiled graphs have memory pools of their own: no workspace of theirs may
        # be kept for later.
        workspace = _products.workspace(weights, x.shape[:-1].numel(), x.dtype, rounded)
    result: Tensor = _products.linear(
        x.contiguous(),
        weights,
        bias=bias,
        workspace=workspace,
        activations=rounded,
        round_weights=round_weights,
        input_global_scale=None if input_global_scale is None else GlobalScale(input_global_scale, "divisor"),
    )
    return result


@_linear.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    format: str,
    direction: str,
    bias: Tensor | None = None,
    activations: str | None = None,
    round_weights: bool = False,
    input_global_scale: Tensor | None = None,
) -> Tensor:
    # The library's checks, for the compiler: the graph around the operator relies on the shapes.
    require_activations(format, activations, round_weights, input_global_scale is not None)
    cols, block = codes.shape[-1] * 2, block_of(format)
    if x.dim() == 0 or not cols - block < x.shape[-1] <= cols:
        require_columns(x, cols)
    if bias is not None and (bias.shape != codes.shape[:1] or bias.dtype != x.dtype):
        raise Error(f"bias is {bias.dtype} {list(bias.shape)} and must be {x.dtype} {list(codes.shape[:1])}")
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def _linear_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *parts, ctx.format, ctx.direction, _bias, _activations, _round_weights, _input = inputs
    ctx.cols = x.shape[-1]
    ctx.save_for_backward(*parts)


def _linear_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    of_x = of_bias = None
    if ctx.needs_input_grad[0]:
        weights = torch.ops.microscale.dequantize(
            *ctx.saved_tensors, ctx.format, ctx.direction, ctx.cols, gradient.dtype
        )
        of_x = gradient @ weights
    # Without a bias there is no input for one.
    if True in ctx.needs_input_grad[6:7]:
        # For 1-D gradients there is no dimension to sum over, and `sum(())` would take all.
        of_bias = gradient.sum(tuple(range(gradient.dim() - 1))) if gradient.dim() > 1 else gradient.clone()
    return of_x, None, None, None, None, None, of_bias, None, None, None


torch.library.register_autograd("microscale::linear", _linear_backward, setup_context=_linear_context)
