"""Quantized arrays: quantizing, dequantizing, layouts and losses."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Literal, cast

from microscale import _arrays, _gpu, _microscale
from microscale._errors import Error
from microscale._figures import Amax, DeviceAmax, Loss, Report
from microscale._types import (
    Array,
    ArrayLike,
    Direction,
    DtypeLike,
    Format,
    GlobalScale,
    NonFinite,
    Numerics,
    ScaleLayout,
    ScaleRule,
    Search,
    Ties,
)
if TYPE_CHECKING:
    import torch

#: Elements in a byte of codes, by format.
_PACKED = {"mxfp8-e4m3": 1, "mxfp8-e5m2": 1}
#: The dtypes that codes and scales are views of, by format.
_TYPED = {
    "mxfp4": ("float4_e2m1fn_x2", "float8_e8m0fnu"),
    "nvfp4": ("float4_e2m1fn_x2", "float8_e4m3fn"),
    "mxfp8-e4m3": ("float8_e4m3fn", "float8_e8m0fnu"),
    "mxfp8-e5m2": ("float8_e5m2", "float8_e8m0fnu"),
}


#: Elements of float32 that a global scale on a GPU has.
_SLOT_WORDS = getattr(_microscale, "SLOT_WORDS", 0)


class Quantized:
    """A quantized array: codes, scales and a global scale, with their format and layout.

    Attributes:
        codes: uint8, `[..., code bytes]`. Two 4-bit codes share a byte, the lower index in the low
            nibble. A row that is not a whole number of blocks ends in a block padded with zeros.
        scales: uint8, one per block: `[..., blocks]` in the layout `linear`. In the layout
            `swizzled` `[rows, blocks]`, padded to multiples of 128 and 4: the 128x4 tiles of
            cuBLASLt and CUTLASS.
        direction: direction of the global scale, `divisor` or `multiplier`; None without one.
        format: `mxfp4`, `nvfp4`, `mxfp8-e4m3` or `mxfp8-e5m2`.
        shape: the shape of the array that was quantized.
        layout: layout of the scales, `linear` or `swizzled`.
        report: counts of values that could not be represented. None for arrays that were quantized
            elsewhere, and on GPUs unless you pass `report=True`.
    """

    codes: Array
    scales: Array
    _global: Any
    direction: Direction | None
    format: Format
    shape: tuple[int, ...]
    layout: ScaleLayout
    report: Report | None
    _found: Any

    __slots__ = ("codes", "scales", "_global", "direction", "format", "shape", "layout", "report", "_found", "__weakref__")

    def __init__(
        self,
        codes: ArrayLike,
        scales: ArrayLike,
        *,
        format: Format,
        shape: tuple[int, ...] | None = None,
        global_scale: GlobalScale | None = None,
        layout: ScaleLayout = "linear",
        report: Report | None = None,
    ) -> None:
        """Makes a quantized array of codes and scales, which are not copied.

        Args:
            codes: uint8, `torch.float4_e2m1fn_x2`, or another float of one byte.
            scales: uint8, or a float of one byte.
            format: the format.
            shape: the shape of the array. By default, the shape of the codes with a column for each
                element.
            global_scale: for NVFP4, a number or a float32 array of one element, with its direction.
                An array is not read if it and the codes are on a GPU.
            layout: the layout of the scales.
            report: the report of :func:`quantize`.
        """
        number, direction = _split(global_scale)
        self.codes = _arrays.readable(codes, "codes")
        self.scales = _arrays.readable(scales, "scales")
        if number is None:
            self._global = None
        elif not _gpu.holds(self.codes):
            self._global = float(number)
        elif _gpu.holds(number):
            self._global = _arrays.readable(number, "global_scale").reshape(-1)
        else:
            self._global = _gpu.word(self.codes, float(number))
        self.direction = direction
        self.format = format
        self.layout = layout
        if shape is None:
            found = _arrays.shape_of(self.codes)
            if not found:
                raise Error("codes have no dimensions; they must have one or more")
            *leading, columns = found
            shape = (*leading, columns * _PACKED.get(format, 2))
        self.shape = tuple(int(n) for n in shape)
        self.report = report
        self._found = None

    @classmethod
    def _of(
        cls,
        codes: Array,
        scales: Array,
        number: Any,
        direction: str | None,
        format: str,
        shape: tuple[int, ...],
        layout: str,
        report: Report | None,
    ) -> Quantized:
        """Makes a quantized array without checks. `number` is the value of the global scale."""
        self = cls.__new__(cls)
        self.codes, self.scales, self._global = codes, scales, number
        self.direction = cast("Direction | None", direction)
        self.format, self.layout = cast(Format, format), cast(ScaleLayout, layout)
        self.shape, self.report = shape, report
        # Addresses of tensors on a GPU. The extension module looks them up once.
        self._found = None
        return self

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        names = (name for name in self.__slots__ if name not in ("_found", "__weakref__"))
        return None, {"_found": None, **{name: getattr(self, name) for name in names}}

    @property
    def global_scale(self) -> GlobalScale | None:
        """The global scale of NVFP4 with its direction; None without one.

        Its value is a float, or a float32 array `[1]` if the codes are in the memory of a GPU.
        """
        number = self._global
        if number is None or self.direction is None:
            return None
        return GlobalScale(number if type(number) is float else number[:1], self.direction)

    def cpu(self) -> Quantized:
        """Returns a copy in the memory of the CPU. Waits for the GPU."""
        if not _gpu.holds(self.codes):
            return self
        number = None if self._global is None else _gpu.numbers(self._global)[0]
        codes, scales = _gpu.to_host(self.codes), _gpu.to_host(self.scales)
        return self._of(codes, scales, number, self.direction, self.format, self.shape, self.layout, self.report)

    def to(self, device: torch.device | str | int) -> Quantized:
        """Returns a copy on another device of PyTorch."""
        if not _arrays.is_torch(self.codes):
            raise TypeError(f"codes are of type {type(self.codes).__name__}; only tensors of PyTorch go to another device by this")
        codes, number = self.codes.to(device), self._global
        if isinstance(number, float) and codes.is_cuda:
            number = _gpu.word(codes, number)
        elif number is not None and not isinstance(number, float):
            number = number.to(device) if codes.is_cuda else number[0].item()
        scales = self.scales.to(device)
        return self._of(codes, scales, number, self.direction, self.format, self.shape, self.layout, self.report)

    @property
    def rows(self) -> int:
        """Number of rows: the product of all dimensions except the last."""
        rows = 1
        for n in self.shape[:-1]:
            rows *= n
        return rows

    @property
    def cols(self) -> int:
        """Elements per row, without padding."""
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and global scale together."""
        codes, scales = _arrays.shape_of(self.codes), _arrays.shape_of(self.scales)
        return prod(codes) + prod(scales) + (4 if self._global is not None else 0)

    @property
    def typed(self) -> tuple[Array, Array]:
        """Codes and scales as views of PyTorch's dtypes: `float4_e2m1fn_x2`, `float8_e4m3fn`,
        `float8_e8m0fnu`. For numpy, ml_dtypes has the dtypes of scales, and 4-bit codes stay
        bytes."""
        codes, scales = _TYPED[self.format]
        if codes.endswith("_x2") and not _arrays.is_torch(self.codes):
            return self.codes, _arrays.typed(self.scales, scales)
        return _arrays.typed(self.codes, codes), _arrays.typed(self.scales, scales)

    def dequantize(self, dtype: DtypeLike = "float32", *, out: Array = None) -> Array:
        """Returns the values. See :func:`microscale.dequantize`."""
        return dequantize(self, dtype, out=out)

    def __repr__(self) -> str:
        shape = "x".join(str(n) for n in self.shape)
        number = self._global
        scale = "" if number is None else f", {self.direction} {number:g}" if isinstance(number, float) else f", {self.direction}"
        return f"Quantized({shape} in {self.format}, {self.layout} scales{scale}, {self.nbytes} bytes)"


@lru_cache(maxsize=256)
def _recipe(
    format: str,
    numerics: str | None,
    scale_rule: str | None,
    ties: str | None,
    search: str | None,
    global_scale: float | str | None,
    layout: str,
    non_finite: str,
) -> _microscale.Recipe:
    """Returns the recipe for these words. Programs use few, so recipes are cached."""
    return _microscale.Recipe(format, numerics, scale_rule, ties, search, global_scale, layout, non_finite)


def _split(given: GlobalScale | None) -> tuple[Any, Direction | None]:
    """Returns the value and the direction of a global scale."""
    if given is None:
        return None, None
    if not isinstance(given, GlobalScale):
        raise TypeError(f"global_scale is of type {type(given).__name__}; pass a GlobalScale, which has a direction")
    if given.direction not in ("divisor", "multiplier"):
        raise Error(f"the direction of a global scale is {given.direction!r}; pass 'divisor' or 'multiplier'")
    return given.value, given.direction


def _number(value: Any) -> float | str:
    """Returns a global scale as a number, or the word `none`."""
    if isinstance(value, (float, str)):
        return value
    if _gpu.holds(value):
        raise TypeError(
            "global_scale is in the memory of a GPU, which reading it would wait for; pass `amax`, or a number"
        )
    return float(value)


def quantize(
    x: ArrayLike,
    format: Format = "mxfp4",
    *,
    numerics: Numerics | None = None,
    scale_rule: ScaleRule | None = None,
    ties: Ties | None = None,
    search: Search | None = None,
    importance: ArrayLike | None = None,
    global_scale: float | GlobalScale | Literal["none"] | None = None,
    amax: Amax | DeviceAmax | None = None,
    layout: ScaleLayout = "linear",
    non_finite: NonFinite | None = None,
    report: bool | None = None,
    out: Quantized | None = None,
) -> Quantized:
    """Quantizes an array along its last axis.

    The input is read in place, with any positive strides, and not copied. Do not write to it from
    other threads meanwhile: they run while the function works. To quantize along another axis, pass
    a view with that axis last, such as `x.T`.

    On a GPU the work is enqueued on the current stream of the array's library. Nothing waits unless
    an argument below says that it does, so that a CUDA graph can capture the call. Rows may be
    apart there, but the elements of a row must be contiguous.

    Args:
        x: `[..., K]`, float32, float16 or bfloat16: an array of numpy or CuPy, a tensor of PyTorch
            on a CPU or an NVIDIA GPU, or an object with `__dlpack__`, `__cuda_array_interface__` or
            the buffer protocol.
        format: `mxfp4`, `nvfp4`, `mxfp8-e4m3` or `mxfp8-e5m2`. MXFP4 needs no global scale, and
            NVFP4 loses less.
        numerics: the library whose arithmetic is followed: `ocp`, `torchao`, `compressed-tensors`,
            `modelopt`, `transformer-engine` or `ggml`. By default `ocp` for the MX formats and
            `compressed-tensors` for NVFP4.
        scale_rule: `floor`, `ceil`, `even` or `rceil` instead of the numerics' rule, for MX
            formats.
        ties: `even`, `away` or `zero` instead of the numerics' rule, for MXFP4.
        search: `four-six`, `window` or `full` chooses block scales by their squared error.
        importance: float32 `[K]`, weights of the errors in a search.
        global_scale: the global scale of NVFP4: a number in the direction of the numerics, a
            :class:`GlobalScale` of that direction, or `"none"`. By default it is computed from `x`.
        amax: the result of :func:`amax`, to compute NVFP4's global scale from instead of `x`. On a
            GPU it is a `DeviceAmax`, and on a CPU an `Amax`.
        layout: the layout of the scales, `linear` or `swizzled`.
        non_finite: `error`, `propagate` or `saturate`. The default is `error` on a CPU. On a GPU it
            is `propagate`, which makes a block with NaN or an infinity NaN, and `error` waits for
            the GPU.
        report: whether to count values that could not be represented. A CPU always counts; on a GPU
            pass True, which waits for the GPU.
        out: a result of the same shape, format and layout to overwrite.

    Returns:
        Codes and scales in the library of `x` if that is PyTorch or CuPy, and of numpy otherwise.

    Raises:
        Error: a choice or a shape that is not possible.
        NonFiniteError: NaN or an infinity with `non_finite="error"`.
        TypeError: an array that cannot be read.
    """
    # The library of the array is looked up once, as lookups take a while for small tensors.
    torch = _arrays.torch_of(x)
    if torch is None:
        values = _arrays.values(x, "x")
        there = _gpu.holds(values)
    else:
        values = _arrays.torch_values(x, "x")
        there = values.is_cuda
    if non_finite is None:
        non_finite = "propagate" if there else "error"
    value: float | str | None = None
    if global_scale is not None:
        given = global_scale if isinstance(global_scale, GlobalScale) else None
        value = _number(global_scale if given is None else given.value)
    recipe = _recipe(format, numerics, scale_rule, ties, search, value, layout, non_finite)
    if global_scale is not None and given is not None and given.direction != recipe.direction:
        raise Error(
            f"global_scale is a {given.direction} and the numerics take a {recipe.direction}; choose other numerics, or pass the "
            "reciprocal"
        )
    shape = _arrays.shape_of(values)
    if not shape:
        raise Error("x has no dimensions; it must have one or more")
    # New tensors need no checks.
    new = torch is not None and out is None
    if out is None:
        leading = shape[:-1]
        row_bytes, scale_rows, scale_cols = recipe.parts(prod(leading), shape[-1])
        scales_shape = (*leading, scale_cols) if layout == "linear" else (scale_rows, scale_cols)
        if torch is None:
            codes = _arrays.empty(x, (*leading, row_bytes), "uint8")
            scales = _arrays.empty(x, scales_shape, "uint8")
        else:
            new_bytes, new_words = _arrays.new_outputs(values.get_device())
            codes, scales = new_bytes(*leading, row_bytes), new_bytes(*scales_shape)
    else:
        if (out.format, out.layout, out.shape) != (format, layout, shape):
            raise Error(
                f"out is {out.shape} in {out.format} with {out.layout} scales and must be {shape} in {format} with {layout} ones"
            )
        codes, scales = out.codes, out.scales
    if importance is not None:
        importance = _arrays.readable(importance, "importance")
    if amax is not None:
        if format != "nvfp4" or global_scale is not None:
            raise Error("an amax is for nvfp4 whose global scale is computed; leave amax or global_scale out")
        if type(amax) is not (DeviceAmax if there else Amax):
            place = "a GPU" if there else "the CPU"
            raise TypeError(f"amax is {amax!r}, and x in the memory of {place}; pass the result of microscale.amax for an array there")
        if isinstance(amax, Amax):
            _require_amax(amax, "amax")
    if there:
        _gpu.require()
        number = None
        if format == "nvfp4":
            number = None if out is None else out._global
            if number is None or type(number) is float or number.shape[0] < _SLOT_WORDS:
                if torch is None or out is not None:
                    number = _arrays.empty(codes, (_SLOT_WORDS,), "float32")
                else:
                    number = new_words(_SLOT_WORDS)
        words = amax.words if isinstance(amax, DeviceAmax) else None
        count = bool(report) or non_finite == "error"
        if new:
            stream = _gpu.torch_stream(torch)(values.get_device())
        else:
            stream = _gpu.stream(codes if out is None or _gpu.holds(codes) else values)
        try:
            direction, counts = _microscale.gpu_quantize(
                values, recipe, importance, words, codes, scales, number, new, count, stream
            )
        finally:
            if out is not None:
                _arrays.changed(codes, scales, number)
        if direction is None:
            number = None
    else:
        try:
            known = amax if isinstance(amax, Amax) else None
            number, direction, counts = _microscale.quantize(values, recipe, importance, known, codes, scales, new)
        finally:
            # An error about values may come after the first of them were written.
            if out is not None:
                _arrays.changed(codes, scales)
    counted = None if counts is None else Report._make(counts)
    if out is None:
        return Quantized._of(codes, scales, number, direction, format, shape, layout, counted)
    out._global, out.direction, out.report = number, cast("Direction | None", direction), counted
    return out


#: The largest number of float32.
_LARGEST = float.fromhex("0x1.fffffep+127")


def _require_amax(amax: Amax, what: str) -> None:
    """Raises an error unless the magnitude is one that an array of float32 can have."""
    if not 0 <= amax.finite <= _LARGEST:
        raise Error(
            f"{what}.finite is {amax.finite} and must be a finite float32 of 0 or more; pass the result of microscale.amax, which "
            "reports NaN and infinities separately"
        )


def dequantize(q: Quantized, dtype: DtypeLike = "float32", *, out: Array = None) -> Array:
    """Returns the values of a quantized array: each element times its scale, rounded once to the
    dtype.

    Args:
        q: the quantized array.
        dtype: `float32`, `float16` or `bfloat16`, by name or as a dtype of numpy or PyTorch. For
            numpy, ml_dtypes has bfloat16.
        out: a contiguous array of the same number of elements to write to. Its dtype replaces
            `dtype`.

    Returns:
        `out`, or an array of shape `q.shape` in the library of the codes.
    """
    if out is None:
        there = _arrays.empty(q.codes, q.shape, _arrays.value_dtype(dtype))
    else:
        there = _arrays.output(out, "out")
    if _gpu.holds(there):
        _gpu.require()
        _microscale.gpu_dequantize(q, there, _gpu.stream(there))
    else:
        _microscale.dequantize(q, there)
    if out is None:
        return there
    _arrays.changed(out)
    return out


def amax(x: ArrayLike, *, out: Amax | DeviceAmax | None = None) -> Amax | DeviceAmax:
    """Returns the largest magnitude of an array `[..., K]`, the source of NVFP4's global scale.

    Args:
        x: float32, float16 or bfloat16.
        out: an amax to include. Layers that share a global scale share an amax, which
            :func:`quantize` takes. A `DeviceAmax` is updated; an `Amax` is not changed.

    Returns:
        An `Amax`. For an array in the memory of a GPU a `DeviceAmax`, which stays there: nothing waits.
    """
    values = _arrays.values(x, "x")
    if not _gpu.holds(values):
        found = Amax(*_microscale.amax(values))
        if out is None:
            return found
        if type(out) is not Amax:
            raise TypeError("x is in the memory of the CPU and out is on a GPU; move x there, or pass an Amax")
        _require_amax(out, "out")
        return Amax(max(found.finite, out.finite), found.nan or out.nan, found.infinite or out.infinite)
    _gpu.require()
    if out is not None and not isinstance(out, DeviceAmax):
        raise TypeError(f"x is in the memory of a GPU and out is of type {type(out).__name__}; leave it out, or pass a DeviceAmax")
    made = DeviceAmax(_gpu.zeros(x, (_microscale.AMAX_WORDS,), "float32")) if out is None else out
    words = _arrays.output(made.words, "out.words")
    _microscale.gpu_amax(values, words, _gpu.stream(words))
    if out is not None:
        _arrays.changed(words)
    return made


def swizzle(q: Quantized, layout: ScaleLayout = "swizzled") -> Quantized:
    """Returns the array with its scales in another layout. Codes and global scale are shared.

    Args:
        q: the quantized array.
        layout: `swizzled` for the 128x4 tiles of cuBLASLt and CUTLASS, padded with zeros, or
            `linear`.
    """
    if layout == q.layout:
        return q
    _, rows, cols = _recipe(q.format, None, None, None, None, None, layout, "error").parts(q.rows, q.cols)
    shape = (rows, cols) if layout == "swizzled" else (*q.shape[:-1], cols)
    scales = _arrays.empty(q.scales, shape, "uint8")
    if _gpu.holds(scales):
        _gpu.require()
        _microscale.gpu_scales_in(q, layout, scales, _gpu.stream(scales))
    else:
        _microscale.scales_in(q, layout, scales)
    return Quantized._of(q.codes, scales, q._global, q.direction, q.format, q.shape, layout, q.report)


def compare(original: ArrayLike, other: Quantized | ArrayLike) -> Loss:
    """Measures the error of an array, quantized or not, compared with the original.

    The CPU compares. Arrays in the memory of a GPU are copied to the CPU first, which waits.

    Args:
        original: `[..., K]`, with contiguous rows.
        other: a :class:`Quantized` of the same shape, or a contiguous array of the same shape and
            any dtype of values.
    """
    original = _on_host(_arrays.values(original, "original"))
    if isinstance(other, Quantized):
        return Loss(*_microscale.compare_quantized(original, other.cpu()))
    return Loss(*_microscale.compare(original, _on_host(_arrays.values(other, "other"))))


def _on_host(x: Any) -> Any:
    """Returns the array, or a copy in the memory of the CPU."""
    return _gpu.to_host(x) if _gpu.holds(x) else x
