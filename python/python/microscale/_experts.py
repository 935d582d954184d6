"""Experts of a mixture: their quantized weights, and products with the weights of the experts of
each token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, cast

from microscale import _arrays, _gpu, _microscale, _tensors
from microscale._activations import QuantizedActivations, ResultFormat, quantize_activations, result_format
from microscale._errors import Error
from microscale._products import operand_of, results_of
from microscale._types import (
    ActivationFormat,
    Array,
    ArrayLike,
    Direction,
    DtypeLike,
    Gate,
    GlobalScale,
    LayerFormat,
    RoundedActivations,
)

if TYPE_CHECKING:
    import torch


class Experts:
    """The quantized weights of a mixture's experts: matrices `[M, K]` of one shape.

    They are in MXFP4, or in NVFP4 with a global scale for each expert.

    Attributes:
        codes: uint8, `[E, M, code bytes]`, as in a :class:`Quantized`.
        scales: uint8, `[E, M, blocks]`, in the layout `linear`.
        direction: direction of the global scales, `divisor` or `multiplier`; None without them.
        format: `mxfp4` or `nvfp4`.
        shape: `(E, M, K)`.
    """

    __slots__ = ("codes", "scales", "_numbers", "direction", "format", "shape", "__weakref__")

    def __init__(
        self,
        codes: ArrayLike,
        scales: ArrayLike,
        *,
        format: LayerFormat,
        global_scales: ArrayLike | Sequence[float] | None = None,
        direction: Direction | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """Makes experts of codes and scales, which are not copied.

        Args:
            codes: uint8 or `torch.float4_e2m1fn_x2`, `[E, M, K / 2]`.
            scales: uint8 or a float of one byte, `[E, M, blocks]`.
            format: `nvfp4` or `mxfp4`.
            global_scales: for NVFP4, float32 `[E]`: an array where the codes are, or numbers.
            direction: `divisor` (compressed-tensors, Transformer Engine) or `multiplier` (torchao,
                ModelOpt).
            shape: `(E, M, K)`. By default the shape of the codes, with twice their columns.
        """
        if (global_scales is None) != (direction is None):
            raise ValueError("global scales and their direction go together; pass direction='divisor' or direction='multiplier' with them")
        if format not in ("nvfp4", "mxfp4"):
            raise Error(f"weights of experts are in nvfp4 or mxfp4, not in {format}; choose one of them")
        self.codes = _arrays.readable(codes, "codes")
        self.scales = _arrays.readable(scales, "scales")
        found = _arrays.shape_of(self.codes)
        if len(found) != 3:
            raise Error(f"codes have shape {found}; pass [experts, rows, code bytes]")
        count, rows, code_bytes = found
        self.shape = (int(count), int(rows), 2 * int(code_bytes)) if shape is None else shape
        self.format, self.direction = format, direction
        self._numbers: Any = None
        if global_scales is None:
            return
        if not _gpu.holds(self.codes):
            numbers: Any = global_scales.tolist() if hasattr(global_scales, "tolist") else global_scales
            self._numbers = [float(number) for number in numbers]
        else:
            if not _gpu.holds(global_scales):
                raise TypeError("codes are in the memory of a GPU and global_scales are not; move them there")
            # A slot each, whose first word is the global scale.
            self._numbers = _gpu.zeros(self.codes, (self.shape[0], _microscale.SLOT_WORDS), "float32")
            self._numbers[:, 0] = _arrays.readable(global_scales, "global_scales").reshape(-1)
        if len(self._numbers) != self.shape[0]:
            raise Error(f"there are {len(self._numbers)} global scales of {self.shape[0]} experts; pass one for each")

    @classmethod
    def _of(
        cls, codes: Array, scales: Array, numbers: Any, direction: str | None, format: str, shape: tuple[int, ...]
    ) -> Experts:
        """Makes experts of tensors that were quantized here, without checks.

        `numbers` are global scales: a list, or on a GPU a slot each.
        """
        self = cls.__new__(cls)
        self.codes, self.scales, self._numbers, self.shape = codes, scales, numbers, shape
        self.direction, self.format = cast("Direction | None", direction), cast(LayerFormat, format)
        return self

    @property
    def global_scales(self) -> Array:
        """The global scales of NVFP4, float32 `[E]`, where the codes are; None without them."""
        numbers = self._numbers
        if numbers is None:
            return None
        if not isinstance(numbers, list):
            return numbers[:, 0]
        if (torch := _arrays.torch_of(self.codes)) is not None:
            return torch.tensor(numbers, dtype=torch.float32)
        import numpy

        return numpy.array(numbers, numpy.float32)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int) -> _tensors.Quantized:
        """Returns the weights of an expert, over the same memory."""
        expert = range(self.shape[0])[expert]
        numbers = self._numbers
        number = None if numbers is None else numbers[expert]
        return _tensors.Quantized._of(
            self.codes[expert], self.scales[expert], number, self.direction, self.format, self.shape[1:], "linear", None
        )

    def dequantize(self, dtype: DtypeLike = "float32") -> Array:
        """Returns the values `[E, M, K]` of all experts."""
        out = _arrays.empty(self.codes, self.shape, _arrays.value_dtype(dtype))
        for expert in range(len(self)):
            self[expert].dequantize(out=out[expert])
        return out

    def cpu(self) -> Experts:
        """Returns a copy in the memory of the CPU. Waits for the GPU."""
        if not _gpu.holds(self.codes):
            return self
        numbers = None if self._numbers is None else _gpu.numbers(self._numbers[:, 0])
        codes, scales = _gpu.to_host(self.codes), _gpu.to_host(self.scales)
        return Experts(
            codes, scales, format=self.format, global_scales=numbers, direction=self.direction, shape=self.shape
        )

    def to(self, device: torch.device | str | int) -> Experts:
        """Returns a copy on another device of PyTorch."""
        if not _arrays.is_torch(self.codes):
            raise TypeError(f"codes are of type {type(self.codes).__name__}; only tensors of PyTorch go to another device by this")
        numbers = self.global_scales
        return Experts(
            self.codes.to(device),
            self.scales.to(device),
            format=self.format,
            global_scales=None if numbers is None else numbers.to(device),
            direction=self.direction,
            shape=self.shape,
        )

    def __repr__(self) -> str:
        count, rows, cols = self.shape
        scales = "" if self.direction is None else f", a {self.direction} each"
        return f"Experts({count} of {rows}x{cols} in {self.format}{scales})"


def _stacked(parts: list[Any]) -> Array:
    """Stacks arrays of one shape, in their library."""
    if (torch := _arrays.torch_of(parts[0])) is not None:
        return torch.stack(parts)
    if _gpu.holds(parts[0]):
        return _gpu.stack(parts)
    import numpy

    return numpy.stack(parts)


def quantize_experts(x: ArrayLike | Sequence[ArrayLike], format: LayerFormat = "mxfp4", **options: Any) -> Experts:
    """Quantizes the weights of experts, each with a global scale of its own.

    Args:
        x: `[E, M, K]`, or E arrays `[M, K]` of one shape.
        format: `mxfp4` or `nvfp4`.
        options: options of :func:`quantize`, except `layout` and `out`. All experts share an
            `importance`, a `global_scale` and an `amax`.
    """
    if options.keys() & {"layout", "out"}:
        raise TypeError("weights of experts have linear scales and are new; leave layout and out out")
    if not hasattr(x, "__len__"):
        raise TypeError(f"x is a {type(x).__name__} without a length; pass an array of numpy, a tensor of PyTorch, or a list of arrays")
    parts: Any = x
    return together([_tensors.quantize(parts[expert], format, **options) for expert in range(len(parts))], format)


def together(parts: list[_tensors.Quantized], format: str) -> Experts:
    """Stacks the weights of experts that were quantized one by one."""
    if not parts:
        raise Error("there are no experts; pass one or more")
    first = parts[0]
    if any(part.shape != first.shape for part in parts) or len(first.shape) != 2:
        raise Error(f"experts have shapes {[part.shape for part in parts]}; pass matrices of one shape")
    codes, scales = (_stacked([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
    numbers = None if first.direction is None else [part._global for part in parts]
    if numbers is not None and _gpu.holds(first.codes):
        # The slots as they are: nothing waits.
        numbers = _stacked(numbers)
    return Experts._of(codes, scales, numbers, first.direction, format, (len(parts), *first.shape))


def linear_experts(
    x: ArrayLike | _tensors.Quantized | QuantizedActivations,
    weights: Experts,
    experts: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    out: Array = None,
    workspace: Array = None,
    activations: RoundedActivations | None = None,
    round_weights: bool = False,
    input_global_scale: GlobalScale | None = None,
    gate: Gate | None = None,
    dtype: DtypeLike | None = None,
    token_scales: ArrayLike | None = None,
    quantize_results: ResultFormat | ActivationFormat | None = None,
) -> Array:
    """Multiplies each token with the weights of its experts, as a linear layer of a mixture does.

    The caller multiplies with the weights of the routing. An expert's weights are decoded once for
    all of its tokens, and experts without tokens cost nothing. On a GPU, the pairs of tokens and
    experts are sorted there. Nothing waits, and CUDA graphs can capture the whole product.

    Args:
        x: activations `[tokens, K]`, or `[tokens, k, K]` with a row for each expert of a token;
            contiguous, float32, float16 or bfloat16. They are rounded only if
            `activations` is given. Or a :class:`Quantized` or :class:`QuantizedActivations` of such
            a shape, as for :func:`linear`.
        weights: of E experts, `[E, M, K]`.
        experts: integers `[tokens, k]`, the experts of each token; int32 is taken as it is, other
            integers are converted. Numbers below 0 and from E on leave their pair out. Floats and
            booleans are refused.
        bias: `[E, M]` of the dtype of `x`. On a GPU it is added before the only rounding.
        out: a contiguous array `[tokens, k, M]` of the dtype of `x` to write to. Pairs that are
            left out keep their values.
        workspace: on a GPU, memory from :func:`experts_workspace`. By default the same as for
            :func:`linear`.
        activations: as for :func:`linear`: `int8`, `fp8`, `fp8-group128`, `mxfp4` or `nvfp4`.
            `fp8-fast` is `fp8` here, and `mxfp4-fast` is `mxfp4`.
        round_weights: as for :func:`linear`.
        input_global_scale: as for :func:`linear`, one for all experts.
        gate: as for :func:`linear`.
        dtype: as for :func:`linear`.
        token_scales: as for :func:`linear`.
        quantize_results: as for :func:`linear`, in a call of its own after the product.

    Returns:
        `out`, or an array `[tokens, k, M]`, with zeros for pairs that are left out; `[tokens, k,
        M / 2]` after a gate. :class:`QuantizedActivations` of that with `quantize_results`.

    Raises:
        Error: for shapes and formats that do not match, and for NVFP4 weights with FP8
            `activations` unless `round_weights` is set. On a GPU, FP8 also needs experts of whole words of scales.
        NotImplementedError: on a GPU without FP8 products.
    """
    if (results := result_format(quantize_results)) is not None:
        products = linear_experts(
            x,
            weights,
            experts,
            bias=bias,
            workspace=workspace,
            activations=activations,
            round_weights=round_weights,
            input_global_scale=input_global_scale,
            gate=gate,
            dtype=dtype,
            token_scales=token_scales,
        )
        return quantize_activations(products, out=out, **results._asdict())
    operand = operand_of(x, weights.format, activations, round_weights, input_global_scale, dtype, token_scales)
    experts = _indices(experts, weights.shape[0])
    chosen = _arrays.shape_of(experts)
    pairs = prod(chosen)
    if out is None:
        there = _arrays.zeros(operand.like, (*chosen, results_of(weights.shape[1], gate)), operand.dtype)
    else:
        there = _arrays.output(out, "out")
    if bias is not None:
        bias = _arrays.values(bias, "bias")
    if not pairs:
        return there if out is None else out
    if _gpu.holds(there):
        _gpu.require()
        if not _gpu.holds(weights.codes):
            raise Error("weights are in the memory of the CPU and out is on a GPU; move them to one device")
        stream = _gpu.stream(there)
        if workspace is None:
            workspace = _gpu.experts_workspace(weights, pairs, stream, _arrays.is_wide(there), operand.rounded)
        _microscale.gpu_linear_experts(
            weights, operand.rows, experts, there, bias, workspace, operand.activations, round_weights, gate, stream
        )
    else:
        _microscale.linear_experts(weights, operand.rows, experts, there, bias, operand.activations, round_weights, gate)
    if out is None:
        return there
    _arrays.changed(out)
    return out


def _indices(experts: Array, count: int) -> Array:
    """Converts the numbers of `count` experts to a contiguous int32 array.

    Numbers out of range stay out of range, whatever their size.
    """
    if _arrays.is_torch(experts):
        return torch_indices(experts, count)
    if hasattr(experts, "astype"):
        kind = experts.dtype.kind
        if kind not in "iu":
            raise _no_numbers(experts)
        if experts.dtype.itemsize > 4:
            experts = experts.clip(0 if kind == "u" else -1, count)
        return experts if str(experts.dtype) in ("int32", "uint32") else experts.astype("int32")
    if hasattr(experts, "__dlpack__") and _arrays.dtype_name(experts) == "int32":
        return experts
    raise _no_numbers(experts)


def torch_indices(experts: Array, count: int) -> Array:
    """:func:`_indices` for a tensor of PyTorch."""
    torch = sys.modules["torch"]
    if experts.is_floating_point() or experts.is_complex() or experts.dtype is torch.bool:
        raise _no_numbers(experts)
    if experts.dtype is torch.int64:
        experts = experts.clamp(-1, count)
    elif experts.dtype in (torch.uint32, torch.uint64):
        # Numbers from 2**63 on become negative, which is out of range too.
        experts = experts.to(torch.int64).clamp(-1, count)
    return experts.to(torch.int32).contiguous()


def _no_numbers(experts: Array) -> TypeError:
    found = f"an array of {experts.dtype}" if hasattr(experts, "dtype") else f"of type {type(experts).__name__}"
    return TypeError(f"experts are {found}; pass an array of int32, [tokens, k]")


def experts_workspace(
    weights: Experts,
    pairs: int,
    dtype: DtypeLike = "bfloat16",
    activations: RoundedActivations | None = None,
    *,
    token_scales: bool = False,
) -> Array:
    """Allocates the workspace of :func:`linear_experts` on a GPU, for up to `pairs` pairs of a
    token and an expert and activations of a dtype, or rounded as `activations` says. With
    `token_scales` it serves activations in 4 bits with a global scale per row. :func:`workspace`
    says how to use it."""
    if not _gpu.holds(weights.codes):
        raise Error("weights are in the memory of the CPU, where products need no workspace")
    _gpu.require()
    wide = _arrays.value_dtype(dtype) == "float32"
    rounded = "fp4_token" if token_scales else _gpu.rounded_to(activations)
    needed = _gpu.experts_workspace_bytes(weights, pairs, _gpu.stream(weights.codes), wide, rounded)
    return _gpu.new_workspace(weights.codes, needed)
