"""Products with quantized matrices."""

from __future__ import annotations

from math import prod
from microscale import _arrays, _gpu, _microscale
from microscale._errors import Error
from microscale._tensors import Quantized
from microscale._types import ActivationPrecision, Array, ArrayLike, DtypeLike, Fp8Activations


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
    x: ArrayLike,
    weights: Quantized,
    *,
    bias: ArrayLike | None = None,
    out: Array = None,
    workspace: Array = None,
    precision: ActivationPrecision = "exact",
    activations: Fp8Activations | None = None,
    round_weights: bool = False,
) -> Array:
    """Multiplies activations with quantized weights, as a linear layer does: `x @ weights.T +
    bias`.

    Args:
        x: activations `[..., K]`, float32, float16 or bfloat16; contiguous. They are not rounded
            unless `precision` or `activations` says so. Weights are decoded once for many rows.
        weights: `[M, K]` in NVFP4 or MXFP4, with linear scales.
        bias: `[M]` of the dtype of `x`. On a GPU it is added before the only rounding, on a CPU
            after one.
        out: a contiguous array of the dtype of `x` to write to.
        workspace: on a GPU, memory for more rows than eight, for float32 or for FP8, from
            :func:`workspace`. By default there is one for each stream, and one for each stream in a graph that is
            captured, whose first product on it clears the semaphores there.
        precision: `exact`, or `int8` on a CPU, which rounds 32 activations at a time to integers of
            8 bits with one float32 scale. That is about twice as fast as float32 and loses up to
            amax / 254 per activation. Rows of `x` with NaN or infinities give NaN.
        activations: `fp8` rounds activations to E4M3 with a float32 scale per row, as
            `quantize_activations(x, "fp8")` does, and `fp8-group128` with one per 128 columns. Not
            together with `precision`. GPUs need compute capability 9.0, and `x` in 16 bits there.
            On a CPU it is slow, with the bits of Hopper's tensor cores.
        round_weights: allows NVFP4 weights with `activations`: each weight times its block scale is
            rounded to E4M3, with a relative error of at most 2**-4. MXFP4 weights lose nothing.

    Returns:
        `out`, or an array `[..., M]` of the dtype of `x`.

    Raises:
        Error: for shapes that do not match, and for NVFP4 weights with `activations` unless
            `round_weights` is set.
        NotImplementedError: on a GPU without FP8 products.
    """
    readable = _arrays.values(x, "x")
    shape = _arrays.shape_of(readable)
    if out is None:
        name = _arrays.value_dtype(_arrays.dtype_name(readable))
        there = _arrays.empty(x, (*shape[:-1], weights.shape[0]), name)
    else:
        there = _arrays.output(out, "out")
    if bias is not None:
        bias = _arrays.values(bias, "bias")
    if _gpu.holds(there):
        _gpu.require()
        require_exact(precision)
        stream = _gpu.stream(there)
        tokens, wide = prod(shape[:-1]), _arrays.is_wide(there)
        if workspace is not None and not workspace.shape[0]:
            workspace = None
        elif workspace is None and (tokens > _FEW or wide or activations) and _gpu.holds(weights.codes):
            workspace = _gpu.workspace(weights, tokens, stream, wide, activations is not None)
        _microscale.gpu_linear(weights, readable, there, bias, workspace, activations, round_weights, stream)
    else:
        _microscale.linear(weights, readable, there, bias, precision, activations, round_weights)
    if out is None:
        return there
    _arrays.changed(out)
    return out


def require_exact(precision: ActivationPrecision) -> None:
    """Raises an error for a precision of activations that GPUs lack."""
    if precision != "exact":
        raise Error(f"GPUs do not multiply with activations in {precision}; use precision='exact', or arrays of the CPU")


#: Rows of activations in 16 bits that never need a workspace.
_FEW = 8


def workspace(
    weights: Quantized, rows: int, dtype: DtypeLike = "bfloat16", activations: Fp8Activations | None = None
) -> Array:
    """Allocates the workspace of :func:`linear` on a GPU, uint8: for products of weights of this
    shape with up to `rows` rows of activations of a dtype. One for float32 serves all dtypes, and
    one with `activations` serves products in FP8, with any scales. It begins with semaphores, which are zeros before and after each product; the other bytes may have any
    values. It serves one product after the other, on one stream."""
    if not _gpu.holds(weights.codes):
        raise Error("weights are in the memory of the CPU, where products need no workspace")
    _gpu.require()
    wide = _arrays.value_dtype(dtype) == "float32"
    needed = _gpu.workspace_bytes(weights, rows, _gpu.stream(weights.codes), wide, activations is not None)
    return _gpu.new_workspace(weights.codes, needed)
