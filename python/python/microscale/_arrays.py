"""Arrays of other libraries: outputs in the library of the input, which is never imported here."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from microscale import _gpu, _microscale
from microscale._errors import Error
from microscale._types import Array

#: The floats of one byte, or of two values a byte, that PyTorch has for codes and scales.
_TORCH_BYTES = ("float4_e2m1fn_x2", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
_VALUES = ("float32", "float16", "bfloat16")


def torch_of(x: Array) -> Any:
    """PyTorch, if `x` is a tensor of it. It is looked for only if it was imported."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def is_torch(x: Array) -> bool:
    """Whether `x` is a tensor of PyTorch."""
    return torch_of(x) is not None


@cache
def _torch_bytes() -> frozenset[Any]:
    """PyTorch's dtypes that are read as bytes."""
    import torch

    return frozenset(getattr(torch, name) for name in _TORCH_BYTES if hasattr(torch, name))


def torch_values(x: Array, what: str) -> Array:
    """:func:`values` for a tensor of PyTorch."""
    if hasattr(x, "dequantized"):
        # A layer's quantized weights, which have no memory with their values.
        x = x.dequantized()
    if not (x.is_cuda or x.is_cpu):
        raise TypeError(f"{what} is a tensor on {x.device}, whose memory is not read; pass {what}.cpu()")
    torch = sys.modules["torch"]
    if x.layout is not torch.strided:
        raise TypeError(f"{what} is a sparse tensor; pass {what}.to_dense()")
    return x


def torch_readable(x: Array, what: str) -> Array:
    """:func:`readable` for a tensor of PyTorch."""
    x = torch_values(x, what)
    return x.view(sys.modules["torch"].uint8) if x.dtype in _torch_bytes() else x


@cache
def seed(device: int, dtype: str) -> Any:
    """A tensor of PyTorch without elements on the device of this number, -1 for the CPU, of a dtype
    by name. Its `new_empty(4, 32)` takes half the time that other tensors take with a tuple and a
    dtype."""
    torch = sys.modules["torch"]
    made = torch.empty((0,), dtype=getattr(torch, dtype), device="cpu" if device < 0 else device)
    try:
        plain = type(made) is torch.Tensor and made.data_ptr() == 0
    except RuntimeError:
        plain = False
    if not plain:
        # The seed is kept for later calls, which a fake tensor would break.
        raise TypeError(
            "a mode or a transform of PyTorch makes fake or wrapped tensors here; call microscale outside of it, or its operators, "
            "torch.ops.microscale"
        )
    return made


@cache
def new_outputs(device: int) -> tuple[Any, Any]:
    """Functions that make tensors of PyTorch on the device of this number: of bytes, and of
    float32."""
    return seed(device, "uint8").new_empty, seed(device, "float32").new_empty


def readable(x: Array, what: str) -> Array:
    """An object over the same memory that the extension module can read: values, codes or
    scales."""
    return torch_readable(x, what) if is_torch(x) else _foreign(x, what)


def values(x: Array, what: str) -> Array:
    """:func:`readable` for values. A float of one byte keeps its dtype, so that the error can name
    it."""
    return torch_values(x, what) if is_torch(x) else _foreign(x, what)


def output(x: Array, what: str) -> Array:
    """:func:`values` for an array to write to. Call :func:`changed` once it was written."""
    if (torch := torch_of(x)) is not None and x.requires_grad and torch.is_grad_enabled():
        raise Error(
            f"{what} requires grad, and autograd does not see what is written to it; pass {what}.detach(), or write under torch.no_grad()"
        )
    written = values(x, what)
    if torch is not None and written is not x:
        raise Error(f"{what} is the weight of a quantized layer, which is read-only; pass a tensor of its shape and dtype")
    return written


def changed(*arrays: Array) -> None:
    """Reports to autograd that tensors were written to. A backward pass that saved one of them
    raises an error then."""
    for x in arrays:
        if (torch := torch_of(x)) is not None and not x.is_inference():
            torch.autograd.graph.increment_version(x)


def _foreign(x: Array, what: str) -> Array:
    """:func:`readable` for objects of other libraries than PyTorch."""
    if hasattr(x, "__array_interface__") or hasattr(x, "__cuda_array_interface__") or hasattr(x, "__dlpack__"):
        return x
    if isinstance(x, (list, tuple)):
        raise TypeError(f"{what} is a {type(x).__name__}; pass numpy.asarray({what}, dtype=numpy.float32)")
    try:
        view = memoryview(x)
    except TypeError:
        raise TypeError(
            f"{what} is of type {type(x).__name__}; pass an array of numpy, a tensor of PyTorch, or another object that has "
            "__dlpack__, __cuda_array_interface__ or the buffer protocol"
        ) from None
    return _numpy(what).asarray(view)


def _numpy(what: str) -> Any:
    try:
        import numpy
    except ImportError:
        raise ImportError(
            f"{what} has only the buffer protocol, which is read through numpy; install numpy, or pass a tensor of PyTorch"
        ) from None
    return numpy


def empty(like: Array, shape: tuple[int, ...], dtype: str, kind: str = "empty") -> Array:
    """An array without values, where `like` is: from its library if that is PyTorch or CuPy, or
    else from numpy. `dtype` is a name: `uint8`, `float32`, ..."""
    if is_torch(like):
        return getattr(seed(like.get_device(), dtype), "new_" + kind)(*shape)
    if _gpu.holds(like):
        return getattr(_gpu, kind)(like, shape, dtype)
    try:
        import numpy
    except ImportError:
        raise ImportError("the result would be an array of numpy, which is not installed; install it, or pass `out`") from None
    return getattr(numpy, kind)(shape, dtype=numpy_dtype(dtype))


def zeros(like: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """An array of zeros where `like` is, as :func:`empty` makes them."""
    return empty(like, shape, dtype, "zeros")


def numpy_dtype(name: str) -> Any:
    """Returns numpy's dtype of this name. ml_dtypes has the dtypes that numpy lacks."""
    import numpy

    if name in ("uint8", "float32", "float16"):
        return numpy.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(f"numpy has no {name}; install ml_dtypes, which has it, or choose float32 or float16") from None
    return numpy.dtype(getattr(ml_dtypes, name))


def value_dtype(dtype: Any) -> str:
    """The name of a dtype of values, given as a name, a dtype of numpy or PyTorch, or a scalar
    type."""
    if isinstance(dtype, str):
        name = dtype
    elif hasattr(dtype, "name"):
        name = dtype.name
    else:
        name = getattr(dtype, "__name__", str(dtype))
    name = name.removeprefix("torch.")
    if name not in _VALUES:
        raise TypeError(f"dtype is {name}; choose float32, float16 or bfloat16")
    return name


def shape_of(x: Array) -> tuple[int, ...]:
    """The shape of an array. An object without `shape` gives it through its protocol."""
    return tuple(x.shape) if hasattr(x, "shape") else _microscale.described(x)[0]


def dtype_name(x: Array) -> str:
    """The name of an array's dtype: `float32` of numpy's and of PyTorch's. An object without
    `dtype` gives it through its protocol."""
    return str(x.dtype).removeprefix("torch.") if hasattr(x, "dtype") else _microscale.described(x)[1]


def is_wide(x: Array) -> bool:
    """Whether an array is in float32."""
    return x.element_size() == 4 if is_torch(x) else dtype_name(x) == "float32"


def typed(x: Array, name: str) -> Array:
    """Bytes as a view of the dtype of this name, from PyTorch or ml_dtypes."""
    if is_torch(x):
        import torch

        dtype = getattr(torch, name, None)
        if dtype is None:
            raise TypeError(f"this PyTorch has no {name}; use a newer one, or the bytes as they are")
        return x.view(dtype)
    if not hasattr(x, "view"):
        raise TypeError(f"a {type(x).__name__} has no views of another dtype; use the bytes as they are, or pass arrays of numpy")
    return x.view(numpy_dtype(name))
