"""Quantizing activations: the input of a product, after a gate or RMSNorm."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

from microscale import _arrays, _gpu, _microscale
from microscale._errors import Error
from microscale._types import (
    ActivationFormat,
    ActivationLayout,
    Array,
    ArrayLike,
    GlobalScale,
    Norm,
    RowOperation,
    ScaleRule,
)


class QuantizedActivations(NamedTuple):
    """Codes and scales of :func:`quantize_activations`, in the library of the input.

    For an input `[..., C]`, K is C, or C / 2 after a gate. For experts in `counts` the leading
    dimensions are `[experts, rows]`.
    """

    codes: Array
    """uint8: `[..., K]` for FP8, otherwise `[..., code bytes]`. Two 4-bit codes share a byte, the
    lower index in the low nibble. A row that is not a whole number of blocks ends in a block padded
    with zeros."""
    scales: Array
    """Block scales, uint8: E8M0 for MX formats, and E4M3 for NVFP4. None for FP8.

    `[..., blocks]` in the layout `linear`. In `128x4` and `8x4` `[rows, blocks]`, padded with zeros
    to multiples of 128 or 8 and of 4; the tiles are in this memory one after the other. Experts in
    `counts` have `[experts, rows, blocks]`, and experts in `offsets` `[scale_rows, blocks]`."""
    f32_scales: Array
    """Computed scales, float32, which multiply codes. `[..., 1]` for `token`, `[1]` for `tensor`, and
    `[..., ceil(K / 128)]` for `group128`. None otherwise."""


class ResultFormat(NamedTuple):
    """How :func:`linear` and :func:`linear_experts` quantize their results, for the next layer.

    The fields are arguments of :func:`quantize_activations`, which gives the same bytes for
    unquantized results.
    """

    format: ActivationFormat = "nvfp4"
    """`fp8`, `mxfp8`, `mxfp4` or `nvfp4`."""
    scale: float | ArrayLike | GlobalScale | Literal["token", "group128"] | None = None
    """For NVFP4 a :class:`GlobalScale` or `token`; for FP8 a number, float32 `[1]`, `token` or
    `group128`. By default `token`."""
    scale_rule: ScaleRule | None = None
    """The rule of MX formats."""
    power_of_two: bool = False
    """Rounds the scales of `group128` up to powers of two."""
    layout: ActivationLayout = "linear"
    """The layout of block scales: `linear`, or tiles of `128x4` or `8x4`."""


@lru_cache(maxsize=256)
def _recipe(
    format: str,
    operation: str,
    norm: str,
    eps: float,
    scale: str | None,
    scale_rule: str | None,
    power_of_two: bool,
    layout: str,
) -> _microscale.ActivationRecipe:
    """Returns the recipe for these words. Programs use few, so recipes are cached."""
    return _microscale.ActivationRecipe(format, operation, norm, eps, scale, scale_rule, power_of_two, layout)


def _given(scale: Any, format: str) -> tuple[str | None, Any]:
    """Returns the word of a scale for a recipe, and its value if it is given."""
    if scale is None or isinstance(scale, str):
        if scale in ("given", "divisor", "multiplier"):
            raise Error(f"scale is {scale!r}; pass a number or a GlobalScale")
        return scale, None
    if isinstance(scale, GlobalScale):
        if format != "nvfp4":
            raise Error(f"scale is a GlobalScale, which nvfp4 has, and the format is {format}; pass a number or an array")
        if scale.direction not in ("divisor", "multiplier"):
            raise Error(f"the direction of scale is {scale.direction!r}; pass 'divisor' or 'multiplier'")
        return scale.direction, scale.value
    if format == "nvfp4":
        raise TypeError(f"scale is of type {type(scale).__name__}; pass a GlobalScale, which has a direction, or 'token'")
    return "given", scale


def _scale_of(value: Any, like: Array, there: bool, experts: int | None) -> tuple[float | None, Array]:
    """Returns a given scale as a number, or as an array float32 `[1]` or `[experts]` where `like`
    is."""
    if value is None:
        return None, None
    if isinstance(value, (int, float)):
        if there and experts is not None:
            array = _gpu.empty(like, (experts,), "float32")
            array.fill_(value) if _arrays.is_torch(array) else array.fill(value)
            return None, array
        return float(value), None
    found = _arrays.values(value, "scale")
    on_gpu = _gpu.holds(found)
    count = prod(_arrays.shape_of(found))
    if not on_gpu and (there or not _arrays.shape_of(found)) and count == 1:
        return _scale_of(float(value), like, there, experts)
    if on_gpu != there:
        place = "a GPU" if there else "the CPU"
        raise TypeError(f"scale is not in the memory of {place}, where x is; move it there, or pass a number")
    return None, found


def quantize_activations(
    x: ArrayLike,
    format: ActivationFormat = "nvfp4",
    *,
    operation: RowOperation = "none",
    weight: ArrayLike | None = None,
    residual: Array = None,
    norm: Norm = "llama",
    eps: float = 1e-6,
    scale: float | ArrayLike | GlobalScale | Literal["token", "tensor", "group128"] | None = None,
    scale_rule: ScaleRule | None = None,
    power_of_two: bool = False,
    layout: ActivationLayout = "linear",
    offsets: ArrayLike | None = None,
    scale_offsets: ArrayLike | None = None,
    scale_rows: int | None = None,
    counts: ArrayLike | None = None,
    out: QuantizedActivations | tuple[Array, Array, Array] | None = None,
) -> QuantizedActivations:
    """Computes an operation on each row, and quantizes the results: the input of a quantized
    product.

    Results of the operation are rounded to the dtype of `x` first. So one call gives the same bytes
    as two functions, one after the other. NaN and infinities make NaN blocks, or NaN codes in FP8.

    On a GPU the work is one kernel on the current stream of the library of `x`, and two for a scale
    per tensor. Nothing waits, so that a CUDA graph can capture the call.

        gate_up = numpy.ones((4, 256), numpy.float32)
        codes, scales, _ = microscale.quantize_activations(
            gate_up, "nvfp4", operation="silu_and_mul", scale=GlobalScale(2688.0, "divisor")
        )
        assert codes.shape == (4, 64) and scales.shape == (4, 8)

    Args:
        x: `[..., C]`, float32, float16 or bfloat16; on a GPU one of the 16-bit dtypes. Rows may be
            apart, but the elements of a row must be contiguous.
        format: `fp8` (E4M3 under float32 scales), `mxfp8` (E4M3), `mxfp4` with ties to even, or
            `nvfp4` with the numerics `transformer-engine`.
        operation: `none`; `silu_and_mul`, `gelu_and_mul` (exact GELU, PyTorch's default) or
            `gelu_tanh_and_mul`, where `x` has K gates followed by K values of `up`; `swiglu_oai`,
            the gate of gpt-oss with its limits, where gates and `up` alternate; or `rms_norm`.
        weight: `[K]` of the dtype of `x`, the weights of RMSNorm. By default ones.
        residual: of the shape and dtype of `x`, contiguous. RMSNorm takes the sum of `x` and this,
            rounded, which replaces it.
        norm: whose RMSNorm. `llama` rounds before it multiplies by the weight, as transformers and
            vLLM do. `flashinfer` rounds the result only. `gemma` does too, and adds 1 to weights.
        eps: added to the mean of squares.
        scale: for FP8 a number or float32 `[1]` that multiplies codes, `token` for a scale per row,
            `tensor` for one of all rows, which experts do not take, or `group128` for one per 128
            columns of a row. For NVFP4 a :class:`GlobalScale` of a
            number or float32 `[1]`, or `token` for one per row. By default `token`. Arrays have
            `[experts]` scales if there are experts. Values of arrays on a GPU are not checked.
        scale_rule: `floor`, `ceil`, `even` or `rceil` for MX formats. By default `floor`, and
            NVIDIA's libraries use `rceil`.
        power_of_two: rounds the scales of `group128` up to powers of two.
        layout: the layout of block scales: `linear`, or tiles of `128x4` or `8x4`.
        offsets: int32 `[experts + 1]`, if rows are sorted by expert: the first row of each, and the
            number of rows at the end. `x` is a matrix `[rows, C]` then.
        scale_offsets: int32 `[experts + 1]`, the same for rows of block scales. Experts start at
            multiples of 128 or 8 in layouts with tiles. By default the `offsets`, for the layout
            `linear`.
        scale_rows: rows of block scales in the result, for `offsets`. By default the most that the
            experts can need. The rows after the last expert's are zeros.
        counts: int32 `[experts]`, if `x` is `[experts, rows, C]`: the rows of each expert that
            exist. Codes and float32 scales of the others have any values.
        out: arrays to write to, of the shapes of the result, with None for absent parts.

    Returns:
        The codes, block scales and float32 scales.

    Raises:
        Error: a choice, a shape or a scale that is not possible.
        TypeError: an array that cannot be read, or of another dtype or device.
    """
    values = _arrays.values(x, "x")
    there = _gpu.holds(values)
    shape = _arrays.shape_of(values)
    if not shape:
        raise Error("x has no dimensions; it must have one or more")
    source, value = _given(scale, format)
    recipe = _recipe(format, operation, norm, float(eps), source, scale_rule, bool(power_of_two), layout)
    columns, code_bytes, scale_bytes, f32_per_row, tile = recipe.parts(shape[-1])
    experts, number_of_experts, scales_shape = _experts(
        shape, tile, offsets, scale_offsets, scale_rows, counts, layout != "linear"
    )
    scales_shape = (*scales_shape, scale_bytes)
    f32_shape = (1,) if source == "tensor" else (*shape[:-1], f32_per_row)
    number, scale_array = _scale_of(value, values, there, number_of_experts)
    if weight is not None:
        weight = _arrays.values(weight, "weight")
    if residual is not None:
        residual = _arrays.output(residual, "residual")
    shapes = (
        (*shape[:-1], code_bytes),
        scales_shape if format != "fp8" else None,
        f32_shape if f32_per_row else None,
    )
    codes, scales, f32_scales = _outputs(x, shapes, out)
    arguments = values, recipe, residual, weight, number, scale_array, experts, codes, scales, f32_scales
    try:
        if there:
            _gpu.require()
            _microscale.gpu_quantize_activations(*arguments, _gpu.stream(codes if _gpu.holds(codes) else values))
        else:
            _microscale.quantize_activations(*arguments)
    finally:
        if residual is not None:
            _arrays.changed(residual)
        if out is not None:
            _arrays.changed(*(part for part in out if part is not None))
    return QuantizedActivations(codes, scales, f32_scales) if out is None else QuantizedActivations(*out)


def _outputs(like: Array, shapes: tuple[tuple[int, ...] | None, ...], out: Any) -> tuple[Array, Array, Array]:
    """Returns codes, block scales and float32 scales of these shapes: `out`, or new arrays in the
    library of `like`. Parts without a shape are None."""
    if out is None:
        codes, scales, f32_scales = (
            None if shape is None else _arrays.empty(like, shape, dtype)
            for shape, dtype in zip(shapes, ("uint8", "uint8", "float32"))
        )
        return codes, scales, f32_scales
    if len(out) != 3:
        raise Error(f"out has {len(out)} parts; pass codes, scales and f32_scales, and None for absent ones")
    codes, scales, f32_scales = (
        None if part is None else _arrays.readable(_arrays.output(part, name), name)
        for part, name in zip(out, QuantizedActivations._fields)
    )
    found = zip(QuantizedActivations._fields, (codes, scales, f32_scales), shapes)
    _require_shapes(*((f"out.{name}", part, shape) for name, part, shape in found))
    return codes, scales, f32_scales


def result_format(given: ResultFormat | str | None) -> ResultFormat | None:
    """Returns the format of results for an argument, which may be its word."""
    if given is None or isinstance(given, ResultFormat):
        return given
    return ResultFormat(given)  # type: ignore[arg-type]


def results_on_gpu(
    like: Array, shape: tuple[int, ...], dtype: str, results: ResultFormat, out: Any
) -> tuple[_microscale.ActivationRecipe, str, float | None, Array, Array, Array, Array]:
    """Returns the arguments of the extension module for results of a shape and a dtype that are
    quantized on a GPU. The last three are codes, block scales and float32 scales."""
    format, scale, scale_rule, power_of_two, layout = results
    source, value = _given(scale, format)
    recipe = _recipe(format, "none", "llama", 1e-6, source, scale_rule, bool(power_of_two), layout)
    _, code_bytes, scale_bytes, f32_per_row, tile = recipe.parts(shape[-1])
    rows = shape[:-1] if layout == "linear" else (padded(prod(shape[:-1]), tile),)
    shapes = (
        (*shape[:-1], code_bytes),
        (*rows, scale_bytes) if format != "fp8" else None,
        (*shape[:-1], f32_per_row) if f32_per_row else None,
    )
    number, scale_array = _scale_of(value, like, True, None)
    return recipe, dtype, number, scale_array, *_outputs(like, shapes, out)


def _experts(
    shape: tuple[int, ...],
    tile: int,
    offsets: Any,
    scale_offsets: Any,
    scale_rows: int | None,
    counts: Any,
    swizzled: bool,
) -> tuple[tuple[Any, ...] | None, int | None, tuple[int, ...]]:
    """Returns the experts for the extension module, their number, and the leading dimensions of
    block scales."""
    if offsets is None:
        if scale_offsets is not None or scale_rows is not None:
            raise Error("scale_offsets and scale_rows belong to offsets; pass offsets, or leave them out")
        if counts is None:
            return None, None, (padded(prod(shape[:-1]), tile),) if swizzled else shape[:-1]
        if len(shape) != 3:
            raise Error(f"x has shape {shape} and counts need [experts, rows, columns]; reshape it")
        return (_arrays.values(counts, "counts"),), shape[0], (shape[0], padded(shape[1], tile))
    if counts is not None:
        raise Error("counts and offsets exclude each other; pass offsets if rows are sorted by expert")
    if len(shape) != 2:
        raise Error(f"x has shape {shape} and offsets need [rows, columns]; reshape it")
    offsets = _arrays.values(offsets, "offsets")
    if scale_offsets is None:
        if tile != 1:
            raise Error(f"scale_offsets are missing; pass the first row of scales of each expert, multiples of {tile}")
        scale_offsets = offsets
    scale_offsets = _arrays.values(scale_offsets, "scale_offsets")
    number = max(prod(_arrays.shape_of(offsets)) - 1, 0)
    if scale_rows is None:
        scale_rows = sorted_scale_rows(shape[0], number, tile)
    elif scale_rows < 0 or scale_rows % tile:
        raise Error(f"scale_rows is {scale_rows} and must be a multiple of {tile}")
    return (offsets, scale_offsets, int(scale_rows)), number, (int(scale_rows),)


def padded(count: int, multiple: int) -> int:
    """Rounds up to a multiple."""
    return (count + multiple - 1) // multiple * multiple


def sorted_scale_rows(rows: int, experts: int, tile: int) -> int:
    """Returns the most rows of scales that experts with `rows` rows together need."""
    return padded(rows + experts * (tile - 1), tile)


def _require_shapes(*parts: tuple[str, Array, tuple[int, ...] | None]) -> None:
    """Raises an error unless outputs have their shapes, and absent ones are None."""
    for name, array, expected in parts:
        found = None if array is None else _arrays.shape_of(array)
        if found != expected:
            raise Error(f"{name} has shape {found} and must have {expected}")
