"""Products with quantized matrices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from microscale import _arrays, _gpu, _microscale
from microscale._activations import (
    QuantizedActivations,
    ResultFormat,
    quantize_activations,
    result_format,
    results_on_gpu,
)
from microscale._errors import Error
from microscale._tensors import Quantized, quantize
from microscale._types import ActivationFormat, Array, ArrayLike, DtypeLike, Gate, GlobalScale, RoundedActivations


def gemv(
    matrix: Quantized,
    vector: Quantized,
    *,
    batch: int = 1,
    vector_stride: int = 1,
    dtype: DtypeLike = "float32",
    out: Array = None,
) -> Array:
    """Multiplies quantized matrices with quantized vectors.

    Both are in NVFP4 or both in MXFP4, with linear scales. Sums are exact in all but extreme cases,
    and rounded once to the dtype.

    Args:
        matrix: `[batch * M, K]`.
        vector: `[vectors, K]`. Batch `l` takes row `l * vector_stride`.
        batch: the number of matrices, and of vectors.
        vector_stride: rows from one vector to the next.
        dtype: of the result.
        out: a contiguous array of batch * M elements to write to; its dtype counts then.

    Returns:
        `out`, or an array `[M]`, or `[batch, M]` if there are several.
    """
    if out is None:
        rows = matrix.rows // max(batch, 1)
        shape = (rows,) if batch == 1 else (batch, rows)
        there = _arrays.empty(matrix.codes, shape, _arrays.value_dtype(dtype))
    else:
        there = _arrays.output(out, "out")
    if _gpu.holds(there):
        _gpu.require()
        _microscale.gpu_gemv(matrix, vector, batch, vector_stride, there, _gpu.stream(there))
    else:
        _microscale.gemv(matrix, vector, batch, vector_stride, there)
    if out is None:
        return there
    _arrays.changed(out)
    return out


def linear(
    x: ArrayLike | Quantized | QuantizedActivations,
    weights: Quantized,
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
    """Multiplies activations with quantized weights, as a linear layer does: `x @ weights.T +
    bias`.

    Args:
        x: activations `[..., K]`, float32, float16 or bfloat16; contiguous. They are rounded
            only if `activations` is given. Weights are decoded once for many rows. Or
            a :class:`Quantized` in the format of the weights, with linear or swizzled scales: both
            operands have 4 bits then. Or :class:`QuantizedActivations` in FP8: E4M3 codes
            `[..., K]` and `f32_scales` per row, per 128 columns, or one for all.
        weights: `[M, K]` in NVFP4 or MXFP4, with linear scales.
        bias: `[M]` of the dtype of `x`. On a GPU it is added before the only rounding, on a CPU
            after one.
        out: a contiguous array of the dtype of `x` to write to.
        workspace: on a GPU, memory for more rows than eight, for float32, FP8 or 4 bits, from
            :func:`workspace`. By default there is one for each stream, and one for each stream in a graph that is
            captured, whose first product on it clears the semaphores there.
        activations: by default exact. `int8`, on a CPU, rounds 32 activations at a time to integers
            of 8 bits with one float32 scale. That is about twice as fast as float32 and loses up to
            amax / 254 per activation. Rows of `x` with NaN or infinities give NaN. `fp8` rounds
            activations to E4M3 with a float32 scale per row, as `quantize_activations(x, "fp8")`
            does, and `fp8-group128` with one per 128 columns. `fp8-fast` is `fp8` with fast
            accumulation on GPUs: tensor cores add all of K, with 13 fraction bits. GPUs need
            compute capability 9.0, and `x` in 16 bits there. On a CPU FP8 is slow, with the bits of
            Hopper's tensor cores for sums of 128 columns.
            `mxfp4` and `nvfp4` quantize them to the format of the weights. CPUs and Blackwell GPUs
            multiply the codes; other GPUs decode the activations. `mxfp4-fast` is `mxfp4` with fast
            accumulation on GPUs of compute capability 9.0, where many rows are faster in FP8; it
            may also be given for an `x` in MXFP4.
        round_weights: allows NVFP4 weights with FP8 `activations`: each weight times its block scale is
            rounded to E4M3, with a relative error of at most 2**-4. MXFP4 weights lose nothing.
        input_global_scale: for `activations="nvfp4"`, the global scale of the activations. By
            default it is computed from all of `x`, so that rows depend on each other.
        gate: combines the results of each even row of weights, a gate, with the results of the odd
            row after it, `up`: `silu_and_mul`, or `swiglu_oai` of gpt-oss. Sums, bias and gate are
            computed in float32 and rounded once. Rows of gate and up alternate:
            `torch.stack([gate, up], 1).flatten(0, 1)`.
        dtype: of the result for a quantized `x`, by default float32. For others it is the dtype of `x`.
        token_scales: for a :class:`Quantized` `x` in NVFP4, float32 `[..., 1]`: a global scale for
            each row instead of one for all, a multiplier, as `f32_scales` of
            `quantize_activations(x, "nvfp4", scale="token")` is.
        quantize_results: quantizes the results for the next layer, with the bytes that
            :func:`quantize_activations` gives for the results without this: a
            :class:`ResultFormat`, or a format for its defaults. On a GPU, results are rounded to
            the dtype in 16 bits before that, and lie in the workspace only. `out` is
            :class:`QuantizedActivations` then.

    Returns:
        `out`, or an array `[..., M]` of the dtype of `x`; `[..., M / 2]` after a gate.
        :class:`QuantizedActivations` of that with `quantize_results`.

    Raises:
        Error: for shapes and formats that do not match, and for NVFP4 weights with FP8
            `activations` unless `round_weights` is set.
        NotImplementedError: on a GPU without FP8 products.
    """
    operand = operand_of(x, weights.format, activations, round_weights, input_global_scale, dtype, token_scales)
    rows, rounded = operand.rows, operand.rounded
    leading = operand.shape[:-1]
    results = result_format(quantize_results)
    if results is not None:
        return _quantized_results(operand, weights, results, bias, out, workspace, round_weights, gate)
    if out is None:
        there = _arrays.empty(operand.like, (*leading, results_of(weights.shape[0], gate)), operand.dtype)
    else:
        there = _arrays.output(out, "out")
    if bias is not None:
        bias = _arrays.values(bias, "bias")
    if _gpu.holds(there):
        _gpu.require()
        stream = _gpu.stream(there)
        tokens, wide = prod(leading), _arrays.is_wide(there)
        if workspace is not None and not workspace.shape[0]:
            workspace = None
        elif workspace is None and (tokens > _FEW or wide or rounded) and _gpu.holds(weights.codes):
            workspace = _gpu.workspace(weights, tokens, stream, wide, rounded)
        _microscale.gpu_linear(
            weights, rows, there, None, bias, workspace, operand.activations, round_weights, gate, stream
        )
    else:
        _microscale.linear(weights, rows, there, bias, operand.activations, round_weights, gate)
    if out is None:
        return there
    _arrays.changed(out)
    return out


def linear_groups(
    x: Sequence[ArrayLike | Quantized | QuantizedActivations],
    weights: Sequence[Quantized],
    *,
    bias: Sequence[ArrayLike | None] | None = None,
    out: Sequence[Array] | None = None,
    **options: Any,
) -> list[Array]:
    """Multiplies the activations of groups with their weights, as a grouped GEMM whose groups differ
    in tokens, M and K.

    Each group has a product of its own, as by :func:`linear`; on a GPU they use one workspace after
    the other, and each launch overlaps the end of the one before it. Groups of one shape take less
    time in :func:`linear_experts`, which has one launch.

    Args:
        x: the activations of each group, as for :func:`linear`.
        weights: the weights of each group, `[M, K]`.
        bias: a bias of each group, or None.
        out: an array of each group to write to.
        options: the other options of :func:`linear`, the same for all groups.

    Returns:
        The results of each group.

    Raises:
        Error: for lists of different lengths, and as for :func:`linear`. The groups before that are
            multiplied.
    """
    groups = len(weights)
    for name, given in (("x", x), ("bias", bias), ("out", out)):
        if given is not None and len(given) != groups:
            raise Error(f"there are {groups} weights and {len(given)} of {name}; pass one for each group")
    biases = bias or [None] * groups
    outs = out or [None] * groups
    return [linear(*group[:2], bias=group[2], out=group[3], **options) for group in zip(x, weights, biases, outs)]


def _quantized_results(
    operand: Operand,
    weights: Quantized,
    results: ResultFormat,
    bias: ArrayLike | None,
    out: Array,
    workspace: Array,
    round_weights: bool,
    gate: Gate | None,
) -> QuantizedActivations:
    """Multiplies, and quantizes the results."""
    shape = (*operand.shape[:-1], results_of(weights.shape[0], gate))
    if bias is not None:
        bias = _arrays.values(bias, "bias")
    if not _gpu.holds(operand.like):
        there = _arrays.empty(operand.like, shape, operand.dtype)
        _microscale.linear(weights, operand.rows, there, bias, operand.activations, round_weights, gate)
        return quantize_activations(there, out=out, **results._asdict())
    _gpu.require()
    quantized = results_on_gpu(operand.like, shape, operand.dtype, results, out)
    parts = quantized[4:]
    stream, tokens = _gpu.stream(parts[0]), prod(shape[:-1])
    if workspace is None and _gpu.holds(weights.codes):
        wide = operand.dtype == "float32"
        workspace = _gpu.workspace(weights, tokens, stream, wide, operand.rounded, results=shape[-1])
    _microscale.gpu_linear(
        weights, operand.rows, None, quantized, bias, workspace, operand.activations, round_weights, gate, stream
    )
    if out is None:
        return QuantizedActivations(*parts)
    _arrays.changed(*(part for part in out if part is not None))
    return QuantizedActivations(*out)


def results_of(rows: int, gate: str | None) -> int:
    """Returns the results of rows of weights. A gate combines pairs."""
    return rows if gate is None else rows // 2


#: Activations that are quantized to 4 bits: the words for them.
FP4 = ("mxfp4", "nvfp4", "mxfp4-fast")


class ScaledRows(NamedTuple):
    """Activations in NVFP4 with a global scale for each row, for the extension module."""

    rows: Quantized
    token_scales: Array


class Operand(NamedTuple):
    """The activations of a product."""

    like: Array
    """An array of their library."""
    rows: Array
    """Values, or quantized activations, for the extension module."""
    shape: tuple[int, ...]
    dtype: str
    """Of the results."""
    activations: RoundedActivations | None
    """The INT8 or FP8 that the product rounds values to, or `mxfp4-fast`."""
    rounded: str | None
    """As of :func:`_gpu.rounded_to`."""


def operand_of(
    x: ArrayLike | Quantized | QuantizedActivations,
    format: str,
    activations: RoundedActivations | None,
    round_weights: bool,
    input_global_scale: GlobalScale | None,
    dtype: DtypeLike | None,
    token_scales: ArrayLike | None = None,
) -> Operand:
    """Returns the activations of a product with weights of a format. They are quantized here if they
    shall have 4 bits."""
    fast: RoundedActivations | None = "mxfp4-fast" if activations == "mxfp4-fast" else None
    if isinstance(x, (Quantized, QuantizedActivations)):
        is_mxfp4 = isinstance(x, Quantized) and x.format == "mxfp4"
        if (activations is not None and not (fast and is_mxfp4)) or input_global_scale is not None:
            raise Error("x is quantized already; leave activations and input_global_scale out")
        name = _arrays.value_dtype(dtype or "float32")
        if isinstance(x, Quantized) and token_scales is not None:
            scaled = ScaledRows(x, _arrays.values(token_scales, "token_scales"))
            return Operand(x.codes, scaled, x.shape, name, None, "fp4_token")
        if token_scales is not None:
            raise Error("x is in FP8 and its f32_scales have a scale per row already; leave token_scales out")
        if isinstance(x, Quantized):
            return Operand(x.codes, x, x.shape, name, fast, "fp4")
        rows = _fp8_rows(x)
        return Operand(rows.codes, rows, _arrays.shape_of(rows.codes), name, None, "fp8")
    if token_scales is not None:
        raise Error("token_scales belong to a Quantized x in nvfp4; quantize x with scale='token', or leave them out")
    readable = _arrays.values(x, "x")
    name = _arrays.value_dtype(_arrays.dtype_name(readable))
    if dtype is not None and _arrays.value_dtype(dtype) != name:
        raise Error(f"x is {name}, and so are the results; leave dtype out, or cast x")
    require_global_scale(activations, input_global_scale is not None)
    if activations not in FP4:
        return Operand(x, readable, _arrays.shape_of(readable), name, activations, _gpu.rounded_to(activations))
    _microscale.require_activations(format, activations, round_weights)
    quantized = quantized_rows(x, "mxfp4" if fast else activations, input_global_scale)
    return Operand(x, quantized, quantized.shape, name, fast, "fp4")


def _fp8_rows(x: QuantizedActivations) -> QuantizedActivations:
    """Returns activations in FP8 whose codes and scales the extension module reads. One scale for
    all of them is repeated for each row."""
    if x.scales is not None:
        raise Error("x has block scales; pass a Quantized of its codes and scales")
    if x.f32_scales is None:
        raise Error("x has no f32_scales; pass QuantizedActivations(codes, None, scales)")
    name = _arrays.dtype_name(x.codes)
    if name not in ("uint8", "float8_e4m3fn"):
        raise TypeError(f"codes are {name}; pass uint8 or float8_e4m3fn")
    codes, scales = _arrays.readable(x.codes, "codes"), _arrays.values(x.f32_scales, "f32_scales")
    leading = _arrays.shape_of(codes)[:-1]
    if prod(_arrays.shape_of(scales)) == 1 and _arrays.shape_of(scales) != (*leading, 1):
        scales, one = _arrays.zeros(codes, (*leading, 1), "float32"), scales
        scales[...] = one.reshape(())
    return QuantizedActivations(codes, None, scales)


def require_global_scale(activations: str | None, given: bool) -> None:
    """Raises an error if a global scale is given to activations that have none."""
    if given and activations != "nvfp4":
        raise Error(f"activations in {activations or 'their own dtype'} have no global scale; leave input_global_scale out")


def quantized_rows(x: ArrayLike, format: str, global_scale: GlobalScale | None) -> Quantized:
    """Quantizes activations to MXFP4 or NVFP4. Without a global scale, NVFP4's is computed from all
    of `x`. NaN and infinities make NaN blocks."""
    if format == "nvfp4" and global_scale is None:
        return quantize(x, "nvfp4", non_finite="propagate")
    if format == "mxfp4":
        codes, scales, _ = quantize_activations(x, "mxfp4")
        return Quantized(codes, scales, format="mxfp4", shape=_arrays.shape_of(_arrays.values(x, "x")))
    codes, scales, _ = quantize_activations(x, "nvfp4", scale=global_scale)
    shape = _arrays.shape_of(_arrays.values(x, "x"))
    return Quantized(codes, scales, format="nvfp4", shape=shape, global_scale=global_scale)


#: Rows of activations in 16 bits that never need a workspace.
_FEW = 8


def workspace(
    weights: Quantized,
    rows: int,
    dtype: DtypeLike = "bfloat16",
    activations: RoundedActivations | None = None,
    *,
    token_scales: bool = False,
    quantize_results: bool = False,
) -> Array:
    """Allocates the workspace of :func:`linear` on a GPU, uint8: for products of weights of this
    shape with up to `rows` rows of activations of a dtype.

    One for float32 serves all dtypes, and one with `activations` serves products with activations
    in FP8 or in 4 bits. With `token_scales` it serves activations in 4 bits with a global scale per
    row, and with `quantize_results` results that are quantized. It begins with semaphores, which
    are zeros before and after each product; the other bytes may have any values. It serves one
    product after the other, on one stream."""
    if not _gpu.holds(weights.codes):
        raise Error("weights are in the memory of the CPU, where products need no workspace")
    _gpu.require()
    wide = _arrays.value_dtype(dtype) == "float32"
    rounded = "fp4_token" if token_scales else _gpu.rounded_to(activations)
    needed = _gpu.workspace_bytes(weights, rows, _gpu.stream(weights.codes), wide, rounded)
    if quantize_results:
        needed = _microscale.gpu_bytes_with_results(needed, rows, weights.shape[0])
    return _gpu.new_workspace(weights.codes, needed)
