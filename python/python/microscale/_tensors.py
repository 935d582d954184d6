"""Quantizing arrays, and what is done with the result."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from microscale import _arrays, _microscale


class Report(NamedTuple):
    """Counts of what could not be kept when an array was quantized."""

    nan: int
    """NaN in the input."""
    infinite: int
    """Infinities in the input."""
    clipped_blocks: int
    """Blocks whose largest magnitude is above the largest element times the scale."""
    flushed_blocks: int
    """Blocks that were not zero and became zeros."""
    saturated_scales: int
    """Blocks whose scale left the range of the scale format and was clamped."""
    rescaled_blocks: int
    """Blocks that a search gave another scale than the convention's."""
    tried_scales: int
    """Scales whose error a search computed."""
    first_non_finite: tuple[int, int] | None
    """Row and column of the first NaN or infinity."""


class Amax(NamedTuple):
    """The largest magnitude of an array."""

    finite: float
    """The largest magnitude among finite values; 0 if there are none."""
    nan: bool
    """There is a NaN."""
    infinite: bool
    """There is an infinity."""


class Loss(NamedTuple):
    """How far an array is from the original. Pairs with NaN or an infinity are counted and left out."""

    values: int
    """Pairs compared."""
    left_out: int
    """Pairs left out."""
    relative_squared_error: float
    """Sum of squared differences over the sum of squares of the original."""
    sqnr_db: float
    """Signal to quantization noise, in dB."""
    max_abs_error: float
    """The largest difference."""
    cosine: float
    """The cosine of the angle between the two."""


#: Elements in a byte of codes, by format.
_PACKED = {"mxfp8-e4m3": 1, "mxfp8-e5m2": 1}
#: The dtypes that codes and scales are views of, by format.
_TYPED = {
    "mxfp4": ("float4_e2m1fn_x2", "float8_e8m0fnu"),
    "nvfp4": ("float4_e2m1fn_x2", "float8_e4m3fn"),
    "mxfp8-e4m3": ("float8_e4m3fn", "float8_e8m0fnu"),
    "mxfp8-e5m2": ("float8_e5m2", "float8_e8m0fnu"),
}


class Quantized:
    """A quantized array: codes, scales, and what gives them meaning.

    Attributes:
        codes: uint8, `[..., code bytes]`: of 4 bits, two codes a byte, the lower index in the low nibble. A row that is no
            whole number of blocks ends in a block that is padded with zeros.
        scales: uint8, one a block: `[..., blocks]` in the layout `linear`; `[rows to 128, blocks to 4]` in the layout
            `swizzled`, the 128x4 tiles of cuBLASLt and CUTLASS, whatever the array's dimensions.
        global_scale: NVFP4's, a float; None if there is none.
        direction: whether the global scale is a `divisor` or a `multiplier`; None if there is none.
        format: `mxfp4`, `nvfp4`, `mxfp8-e4m3` or `mxfp8-e5m2`.
        shape: the shape of the array that was quantized.
        layout: of the scales, `linear` or `swizzled`.
        report: what could not be kept; None if it was not quantized here.
    """

    __slots__ = ("codes", "scales", "global_scale", "direction", "format", "shape", "layout", "report", "__weakref__")

    def __init__(
        self,
        codes: Any,
        scales: Any,
        *,
        format: str,
        shape: tuple[int, ...] | None = None,
        global_scale: float | None = None,
        direction: str | None = None,
        layout: str = "linear",
        report: Report | None = None,
    ) -> None:
        """Puts together what was quantized here or elsewhere. Nothing is copied.

        Args:
            codes: uint8, or `torch.float4_e2m1fn_x2` or another float of one byte.
            scales: uint8, or a float of one byte.
            format: the format.
            shape: the shape of the array; by default that of the codes with as many columns as they have elements.
            global_scale: NVFP4's.
            direction: `divisor` (compressed-tensors, Transformer Engine) or `multiplier` (torchao, ModelOpt).
            layout: of the scales.
            report: what could not be kept.
        """
        if (global_scale is None) != (direction is None):
            raise ValueError(
                "a global scale and its direction go together; pass direction='divisor' or direction='multiplier' with it"
            )
        self.codes = _arrays.readable(codes, "codes")
        self.scales = _arrays.readable(scales, "scales")
        self.global_scale = None if global_scale is None else float(global_scale)
        self.direction = direction
        self.format = format
        self.layout = layout
        if shape is None:
            *leading, columns = self.codes.shape
            shape = (*leading, columns * _PACKED.get(format, 2))
        self.shape = tuple(int(n) for n in shape)
        self.report = report

    @property
    def rows(self) -> int:
        """Rows: the product of all dimensions but the last."""
        rows = 1
        for n in self.shape[:-1]:
            rows *= n
        return rows

    @property
    def cols(self) -> int:
        """Elements in a row, padding not counted."""
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and global scale together."""
        count = 1
        for n in self.codes.shape:
            count *= n
        scales = 1
        for n in self.scales.shape:
            scales *= n
        return count + scales + (4 if self.global_scale is not None else 0)

    @property
    def typed(self) -> tuple[Any, Any]:
        """Codes and scales as views of the dtypes that PyTorch has for them: `float4_e2m1fn_x2`, `float8_e4m3fn`,
        `float8_e8m0fnu`. numpy has the scales' dtypes from ml_dtypes, and codes of 4 bits stay bytes."""
        codes, scales = _TYPED[self.format]
        if codes.endswith("_x2") and not _arrays.is_torch(self.codes):
            return self.codes, _arrays.typed(self.scales, scales)
        return _arrays.typed(self.codes, codes), _arrays.typed(self.scales, scales)

    def dequantize(self, dtype: Any = "float32", *, out: Any = None) -> Any:
        """The values again. See :func:`microscale.dequantize`."""
        return dequantize(self, dtype, out=out)

    def __repr__(self) -> str:
        shape = "x".join(str(n) for n in self.shape)
        scale = "" if self.global_scale is None else f", {self.direction} {self.global_scale:g}"
        return f"Quantized({shape} in {self.format}, {self.layout} scales{scale}, {self.nbytes} bytes)"


@lru_cache(maxsize=256)
def _recipe(
    format: str,
    convention: str | None,
    scale_rule: str | None,
    search: str | None,
    global_scale: float | str | None,
    layout: str,
    non_finite: str,
) -> _microscale.Recipe:
    """A recipe of these words. Programs use few, and each is looked up but once."""
    return _microscale.Recipe(format, convention, scale_rule, search, global_scale, layout, non_finite)


def _number(value: Any) -> float | str | None:
    """A global scale as a number, if it is an array of one element."""
    return value if value is None or isinstance(value, str) else float(value)


def quantize(
    x: Any,
    format: str = "nvfp4",
    *,
    convention: str | None = None,
    scale_rule: str | None = None,
    search: str | None = None,
    importance: Any = None,
    global_scale: float | str | None = None,
    layout: str = "linear",
    non_finite: str = "error",
    out: Quantized | None = None,
) -> Quantized:
    """Quantizes an array along its last axis.

    The input is read where it lies, with any positive strides, and is not copied; nothing may write to it meanwhile, for other
    threads of Python run. To quantize along another axis, pass a view with that axis last, such as `x.T`.

    Args:
        x: `[..., K]`, float32, float16 or bfloat16: an array of numpy, a tensor of PyTorch on a CPU, or an object with
            `__dlpack__` or the buffer protocol.
        format: `nvfp4`, `mxfp4`, `mxfp8-e4m3` or `mxfp8-e5m2`.
        convention: whose arithmetic: `ocp`, `torchao`, `compressed-tensors`, `modelopt`, `transformer-engine` or `ggml`. By
            default `ocp` for the MX formats and `compressed-tensors` for NVFP4.
        scale_rule: `floor`, `ceil`, `even` or `rceil` instead of the convention's, for the MX formats.
        search: `four-six`, `window` or `full`: block scales by the squared error that they make.
        importance: float32 `[K]`, weights of the errors in a search.
        global_scale: NVFP4's, in the convention's direction, or `"none"`. By default it is computed from the array.
        layout: of the scales, `linear` or `swizzled`.
        non_finite: `error`, `propagate` or `saturate`.
        out: a result of the same shape, format and layout to write over.

    Returns:
        Codes and scales in the library that `x` is from, or else numpy's.

    Raises:
        Error: a choice or a shape that cannot be. NonFiniteError: NaN or an infinity. TypeError: an array that is not read.
    """
    values = _arrays.readable(x, "x")
    recipe = _recipe(format, convention, scale_rule, search, _number(global_scale), layout, non_finite)
    *leading, cols = values.shape if values.shape else (None,)
    if cols is None:
        raise _microscale_error("x has no dimensions; it must have one or more")
    rows = 1
    for n in leading:
        rows *= n
    row_bytes, scale_rows, scale_cols = recipe.parts(rows, cols)
    shape = (*leading, cols)
    if out is None:
        codes = _arrays.empty(x, (*leading, row_bytes), "uint8")
        scales_shape = (*leading, scale_cols) if layout == "linear" else (scale_rows, scale_cols)
        scales = _arrays.empty(x, scales_shape, "uint8")
    else:
        if (out.format, out.layout, out.shape) != (format, layout, shape):
            raise _microscale_error(
                f"out is {out.shape} in {out.format} with {out.layout} scales and must be {shape} in {format} with {layout} ones"
            )
        codes, scales = out.codes, out.scales
    if importance is not None:
        importance = _arrays.readable(importance, "importance")
    number, direction, counts = _microscale.quantize(values, recipe, importance, codes, scales)
    report = Report(*counts)
    if out is None:
        return Quantized(
            codes, scales, format=format, shape=shape, global_scale=number, direction=direction, layout=layout, report=report
        )
    out.global_scale, out.direction, out.report = number, direction, report
    return out


def _microscale_error(message: str) -> Exception:
    from microscale._errors import Error

    return Error(message)


def dequantize(q: Quantized, dtype: Any = "float32", *, out: Any = None) -> Any:
    """The values of a quantized array: each element times its scale, rounded once to the dtype.

    Args:
        q: the quantized array.
        dtype: `float32`, `float16` or `bfloat16`, by name or as a dtype of numpy or PyTorch. numpy has bfloat16 from ml_dtypes.
        out: a contiguous array of as many elements to write to; its dtype counts then.

    Returns:
        `out`, or an array of the quantized one's shape in the library that its codes are from.
    """
    if out is None:
        out = _arrays.empty(q.codes, q.shape, _arrays.value_dtype(dtype))
    _microscale.dequantize(q, _arrays.readable(out, "out"))
    return out


def amax(x: Any) -> Amax:
    """The largest magnitude of an array `[..., K]`, of which NVFP4's global scale is made."""
    return Amax(*_microscale.amax(_arrays.readable(x, "x")))


def swizzle(q: Quantized, layout: str = "swizzled") -> Quantized:
    """The same array with its scales in another layout, and the same codes, which are shared.

    Args:
        q: the quantized array.
        layout: `swizzled`, the 128x4 tiles of cuBLASLt and CUTLASS, padded with zeros; or `linear`, the way back.
    """
    if layout == q.layout:
        return q
    _, rows, cols = _recipe(q.format, None, None, None, None, layout, "error").parts(q.rows, q.cols)
    shape = (rows, cols) if layout == "swizzled" else (*q.shape[:-1], cols)
    scales = _arrays.empty(q.scales, shape, "uint8")
    _microscale.scales_in(q, layout, scales)
    return Quantized(
        q.codes,
        scales,
        format=q.format,
        shape=q.shape,
        global_scale=q.global_scale,
        direction=q.direction,
        layout=layout,
        report=q.report,
    )


def gemv(
    matrix: Quantized,
    vector: Quantized,
    *,
    batch: int = 1,
    vector_stride: int = 1,
    dtype: Any = "float32",
    out: Any = None,
) -> Any:
    """Quantized matrices times quantized vectors, both in NVFP4 or both in MXFP4, with linear scales. Sums are exact in all but
    extreme cases and rounded once to the dtype.

    Args:
        matrix: `[batch * M, K]`.
        vector: `[vectors, K]`; that of batch l is row `l * vector_stride`.
        batch: matrices, and as many vectors.
        vector_stride: rows from one vector to the next.
        dtype: of the result.
        out: a contiguous array of batch * M elements to write to; its dtype counts then.

    Returns:
        `out`, or an array `[M]`, or `[batch, M]` if there are several.
    """
    if out is None:
        rows = matrix.rows // max(batch, 1)
        shape = (rows,) if batch == 1 else (batch, rows)
        out = _arrays.empty(matrix.codes, shape, _arrays.value_dtype(dtype))
    _microscale.gemv(matrix, vector, batch, vector_stride, _arrays.readable(out, "out"))
    return out


def linear(weights: Quantized, activations: Any, *, out: Any = None) -> Any:
    """Quantized weights times activations that are not quantized: what a linear layer without a bias computes.

    Args:
        weights: `[M, K]` in NVFP4 or MXFP4, with linear scales.
        activations: `[..., K]`, float16 or bfloat16, contiguous. Up to eight rows share one reading of the weights.
        out: a contiguous array of the activations' dtype to write to.

    Returns:
        `out`, or an array `[..., M]` of the activations' dtype.
    """
    readable = _arrays.readable(activations, "activations")
    if out is None:
        name = _arrays.dtype_name(readable)
        if name not in ("float16", "bfloat16"):
            raise TypeError(f"activations are {name} and must be float16 or bfloat16; convert them first")
        out = _arrays.empty(activations, (*readable.shape[:-1], weights.rows), name)
    _microscale.linear(weights, readable, _arrays.readable(out, "out"))
    return out


def compare(original: Any, other: Any) -> Loss:
    """How far an array, or what it was quantized to, is from the original.

    Args:
        original: `[..., K]`, with contiguous rows.
        other: a :class:`Quantized` of the same shape, or a contiguous array of the same shape and any dtype of values.
    """
    original = _arrays.readable(original, "original")
    if isinstance(other, Quantized):
        return Loss(*_microscale.compare_quantized(original, other))
    return Loss(*_microscale.compare(original, _arrays.readable(other, "other")))
