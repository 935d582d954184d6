"""Quantizing arrays, and what is done with the result."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

from microscale import _arrays, _gpu, _microscale
from microscale._figures import Amax, DeviceAmax, Loss, Report


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
    """A quantized array: codes, scales, and what gives them meaning.

    Attributes:
        codes: uint8, `[..., code bytes]`: of 4 bits, two codes a byte, the lower index in the low nibble. A row that is no
            whole number of blocks ends in a block that is padded with zeros.
        scales: uint8, one a block: `[..., blocks]` in the layout `linear`; `[rows to 128, blocks to 4]` in the layout
            `swizzled`, the 128x4 tiles of cuBLASLt and CUTLASS, whatever the array's dimensions.
        global_scale: NVFP4's, a float, or a float32 array `[1]` where codes are in the memory of a GPU; None if there is none.
        direction: whether the global scale is a `divisor` or a `multiplier`; None if there is none.
        format: `mxfp4`, `nvfp4`, `mxfp8-e4m3` or `mxfp8-e5m2`.
        shape: the shape of the array that was quantized.
        layout: of the scales, `linear` or `swizzled`.
        report: what could not be kept; None if it was not quantized here, or not asked for on a GPU.
    """

    __slots__ = ("codes", "scales", "_global", "direction", "format", "shape", "layout", "report", "_found", "__weakref__")

    def __init__(
        self,
        codes: Any,
        scales: Any,
        *,
        format: str,
        shape: tuple[int, ...] | None = None,
        global_scale: Any = None,
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
            global_scale: NVFP4's, a number or a float32 array of one, which is not read if it and the codes are on a GPU.
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
        if global_scale is None:
            self._global = None
        elif not _gpu.holds(self.codes):
            self._global = float(global_scale)
        elif _gpu.holds(global_scale):
            self._global = _arrays.readable(global_scale, "global_scale").reshape(-1)
        else:
            self._global = _gpu.word(self.codes, float(global_scale))
        self.direction = direction
        self.format = format
        self.layout = layout
        if shape is None:
            found = _arrays.shape_of(self.codes)
            if not found:
                raise _microscale_error("codes have no dimensions; they must have one or more")
            *leading, columns = found
            shape = (*leading, columns * _PACKED.get(format, 2))
        self.shape = tuple(int(n) for n in shape)
        self.report = report
        self._found = None

    @classmethod
    def _of(cls, codes: Any, scales: Any, number: Any, direction: Any, format: str, shape: Any, layout: str, report: Any) -> Quantized:
        """What was quantized here, put together without looking at it."""
        self = cls.__new__(cls)
        self.codes, self.scales, self._global, self.direction = codes, scales, number, direction
        self.format, self.shape, self.layout, self.report = format, shape, layout, report
        # What the extension module found in tensors of a GPU, which it looks for but once.
        self._found = None
        return self

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        names = (name for name in self.__slots__ if name not in ("_found", "__weakref__"))
        return None, {"_found": None, **{name: getattr(self, name) for name in names}}

    @property
    def global_scale(self) -> Any:
        number = self._global
        return number if number is None or type(number) is float else number[:1]

    def cpu(self) -> Quantized:
        """The same in the memory of the CPU. Waits for the GPU."""
        if not _gpu.holds(self.codes):
            return self
        number = None if self._global is None else _gpu.numbers(self._global)[0]
        codes, scales = _gpu.to_host(self.codes), _gpu.to_host(self.scales)
        return self._of(codes, scales, number, self.direction, self.format, self.shape, self.layout, self.report)

    def to(self, device: Any) -> Quantized:
        """The same on another device of PyTorch."""
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
        codes, scales = _arrays.shape_of(self.codes), _arrays.shape_of(self.scales)
        return prod(codes) + prod(scales) + (4 if self._global is not None else 0)

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
    """A recipe of these words. Programs use few, and each is looked up but once."""
    return _microscale.Recipe(format, numerics, scale_rule, ties, search, global_scale, layout, non_finite)


def _number(value: Any) -> float | str | None:
    """A global scale as a number, if it is an array of one element."""
    if value is None or isinstance(value, (float, str)):
        return value
    if _gpu.holds(value):
        raise TypeError(
            "global_scale is in the memory of a GPU, which would be waited for; pass the amax that it is computed from as `amax`, or "
            "float(global_scale)"
        )
    return float(value)


def quantize(
    x: Any,
    format: str = "nvfp4",
    *,
    numerics: str | None = None,
    scale_rule: str | None = None,
    ties: str | None = None,
    search: str | None = None,
    importance: Any = None,
    global_scale: float | str | None = None,
    amax: Amax | DeviceAmax | None = None,
    layout: str = "linear",
    non_finite: str | None = None,
    report: bool | None = None,
    out: Quantized | None = None,
) -> Quantized:
    """Quantizes an array along its last axis.

    The input is read where it lies, with any positive strides, and is not copied; nothing may write to it meanwhile, for other
    threads of Python run. To quantize along another axis, pass a view with that axis last, such as `x.T`.

    On a GPU the work is enqueued on the current stream of the array's library, and nothing waits for it but where that is said: it
    can be captured in a CUDA graph. Rows may lie apart there; the elements of a row may not.

    Args:
        x: `[..., K]`, float32, float16 or bfloat16: an array of numpy or CuPy, a tensor of PyTorch on a CPU or an NVIDIA GPU, or an
            object with `__dlpack__`, `__cuda_array_interface__` or the buffer protocol.
        format: `nvfp4`, `mxfp4`, `mxfp8-e4m3` or `mxfp8-e5m2`.
        numerics: whose arithmetic: `ocp`, `torchao`, `compressed-tensors`, `modelopt`, `transformer-engine` or `ggml`. By
            default `ocp` for the MX formats and `compressed-tensors` for NVFP4.
        scale_rule: `floor`, `ceil`, `even` or `rceil` instead of the numerics', for the MX formats.
        ties: `even`, `away` or `zero` instead of the numerics', for MXFP4.
        search: `four-six`, `window` or `full`: block scales by the squared error that they make.
        importance: float32 `[K]`, weights of the errors in a search.
        global_scale: NVFP4's, in the numerics' direction, or `"none"`. By default it is computed from the array.
        amax: what :func:`amax` found, for NVFP4's global scale to be computed from in place of the array's own: on a GPU a
            `DeviceAmax`, and on a CPU an `Amax`.
        layout: of the scales, `linear` or `swizzled`.
        non_finite: `error`, `propagate` or `saturate`. By default `error` on a CPU; `propagate` on a GPU, where a block with a NaN
            or an infinity becomes NaN, and `error` waits for the GPU.
        report: whether to count what could not be kept. A CPU always does; on a GPU that has to be asked for, and waits.
        out: a result of the same shape, format and layout to write over.

    Returns:
        Codes and scales in the library that `x` is from, or else numpy's.

    Raises:
        Error: a choice or a shape that cannot be. NonFiniteError: NaN or an infinity. TypeError: an array that is not read.
    """
    # Whose array it is, is looked for but once: small tensors are not to wait for that.
    torch = _arrays.torch_of(x)
    if torch is None:
        values = _arrays.values(x, "x")
        there = _gpu.holds(values)
    else:
        values = _arrays.torch_values(x, "x")
        there = x.is_cuda
    if non_finite is None:
        non_finite = "propagate" if there else "error"
    if global_scale is not None:
        global_scale = _number(global_scale)
    recipe = _recipe(format, numerics, scale_rule, ties, search, global_scale, layout, non_finite)
    shape = _arrays.shape_of(values)
    if not shape:
        raise _microscale_error("x has no dimensions; it must have one or more")
    # Tensors that are made here need not be looked at again.
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
            raise _microscale_error(
                f"out is {out.shape} in {out.format} with {out.layout} scales and must be {shape} in {format} with {layout} ones"
            )
        codes, scales = out.codes, out.scales
    if importance is not None:
        importance = _arrays.readable(importance, "importance")
    if amax is not None:
        if format != "nvfp4" or global_scale is not None:
            raise _microscale_error("an amax is for nvfp4 whose global scale is computed; leave amax or global_scale out")
        if type(amax) is not (DeviceAmax if there else Amax):
            place = "a GPU" if there else "the CPU"
            raise TypeError(f"amax is {amax!r}, and x in the memory of {place}; pass what microscale.amax returns for an array there")
        if not there:
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
        if amax is not None:
            amax = amax.words
        count = bool(report) or non_finite == "error"
        if new:
            stream = _gpu.torch_stream(torch)(x.get_device())
        else:
            stream = _gpu.stream(codes if out is None or _gpu.holds(codes) else values)
        try:
            direction, counts = _microscale.gpu_quantize(
                values, recipe, importance, amax, codes, scales, number, new, count, stream
            )
        finally:
            if out is not None:
                _arrays.changed(codes, scales, number)
        if direction is None:
            number = None
    else:
        try:
            number, direction, counts = _microscale.quantize(values, recipe, importance, amax, codes, scales, new)
        finally:
            # An error about values may come after the first of them were written.
            if out is not None:
                _arrays.changed(codes, scales)
    counted = None if counts is None else Report._make(counts)
    if out is None:
        return Quantized._of(codes, scales, number, direction, format, shape, layout, counted)
    out._global, out.direction, out.report = number, direction, counted
    return out


#: The largest number of float32.
_LARGEST = float.fromhex("0x1.fffffep+127")


def _require_amax(amax: Amax, what: str) -> None:
    """Raises an error unless the magnitude is one that an array of float32 can have."""
    if not 0 <= amax.finite <= _LARGEST:
        raise _microscale_error(
            f"{what}.finite is {amax.finite} and must be a finite float32 of 0 or more; pass what microscale.amax returns, which "
            "reports NaN and infinities apart"
        )


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


def amax(x: Any, *, out: Amax | DeviceAmax | None = None) -> Amax | DeviceAmax:
    """The largest magnitude of an array `[..., K]`, of which NVFP4's global scale is made.

    Args:
        x: float32, float16 or bfloat16.
        out: an amax to add to: several layers that share a global scale make one, which :func:`quantize` takes. A `DeviceAmax` is
            written to; of an `Amax`, which stays as it is, the sum is returned.

    Returns:
        `Amax`, or for an array in the memory of a GPU a `DeviceAmax`, which stays there: nothing waits.
    """
    values = _arrays.values(x, "x")
    if not _gpu.holds(values):
        found = Amax(*_microscale.amax(values))
        if out is None:
            return found
        if type(out) is not Amax:
            raise TypeError("x is in the memory of the CPU and out of a GPU; move x there, or pass an Amax")
        _require_amax(out, "out")
        return Amax(max(found.finite, out.finite), found.nan or out.nan, found.infinite or out.infinite)
    _gpu.require()
    made = out is None
    if not made and type(out) is not DeviceAmax:
        raise TypeError(f"x is in the memory of a GPU and out is of type {type(out).__name__}; leave it out, or pass a DeviceAmax")
    if made:
        out = DeviceAmax(_gpu.zeros(x, (_microscale.AMAX_WORDS,), "float32"))
    words = _arrays.output(out.words, "out.words")
    _microscale.gpu_amax(values, words, _gpu.stream(words))
    if not made:
        _arrays.changed(words)
    return out


def swizzle(q: Quantized, layout: str = "swizzled") -> Quantized:
    """The same array with its scales in another layout, and the same codes and global scale, which are shared.

    Args:
        q: the quantized array.
        layout: `swizzled`, the 128x4 tiles of cuBLASLt and CUTLASS, padded with zeros; or `linear`, the way back.
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


def compare(original: Any, other: Any) -> Loss:
    """How far an array, or what it was quantized to, is from the original. The CPU compares: what is in the memory of a GPU is copied
    to the CPU's first, which waits for the GPU.

    Args:
        original: `[..., K]`, with contiguous rows.
        other: a :class:`Quantized` of the same shape, or a contiguous array of the same shape and any dtype of values.
    """
    original = _on_host(_arrays.values(original, "original"))
    if isinstance(other, Quantized):
        return Loss(*_microscale.compare_quantized(original, other.cpu()))
    return Loss(*_microscale.compare(original, _on_host(_arrays.values(other, "other"))))


def _on_host(x: Any) -> Any:
    """An array in the memory of the CPU: itself, or a copy of one in a GPU's."""
    return _gpu.to_host(x) if _gpu.holds(x) else x
