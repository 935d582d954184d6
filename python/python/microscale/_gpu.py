"""Arrays in the memory of GPUs: the streams of their libraries, new arrays, and workspaces of
products."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from microscale import _microscale
from microscale._types import Array

#: Devices of DLPack that are GPUs of NVIDIA: their memory, and memory that moves.
_DLPACK_GPUS = (2, 13)
#: The legacy default stream, by the number that it has in DLPack and in the interface of arrays.
_LEGACY = 1


def _torch(x: Array) -> Any:
    """PyTorch, if `x` is a tensor of it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def _cupy(x: Array) -> Any:
    """CuPy, if `x` is an array of it."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(x, cupy.ndarray) else None


def holds(x: Array) -> bool:
    """Whether `x` is in the memory of a GPU."""
    if _torch(x) is not None:
        result: bool = x.is_cuda
        return result
    if hasattr(x, "__array_interface__"):
        return False
    if hasattr(x, "__cuda_array_interface__"):
        return True
    return hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] in _DLPACK_GPUS


#: Whether the package was built for GPUs.
_BUILT = hasattr(_microscale, "gpu_quantize")


def require() -> None:
    """Raises an error unless the package was built for GPUs."""
    if not _BUILT:
        raise RuntimeError("this package was built without its feature `cuda`; build it with that, or move arrays to the CPU")


@cache
def torch_stream(torch: Any) -> Any:
    """A function that gives PyTorch's current stream of a device by number, as fast as there is."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda number: torch.cuda.current_stream(number).cuda_stream)


def stream(x: Array) -> int:
    """The stream that work which writes `x` belongs on: the current one of its library, or that
    which it names."""
    if (torch := _torch(x)) is not None:
        result: int = torch_stream(torch)(x.get_device())
        return result
    if (cupy := _cupy(x)) is not None:
        with x.device:
            result = cupy.cuda.get_current_stream().ptr
            return result
    own = getattr(x, "__cuda_array_interface__", {}).get("stream")
    return _LEGACY if own is None else own


def number(x: Array) -> int:
    """The number of the GPU that a tensor of PyTorch or an array of CuPy is on."""
    result: int = x.get_device() if _torch(x) is not None else x.device.id
    return result


def _new(like: Array, shape: tuple[int, ...], dtype: str, kind: str) -> Array:
    """An array from the library that `like` is from, on its GPU, by that library's function
    `kind`."""
    if (torch := _torch(like)) is not None:
        return getattr(like, "new_" + kind)(shape, dtype=getattr(torch, dtype))
    if (cupy := _cupy(like)) is not None:
        if dtype == "bfloat16":
            raise TypeError("CuPy has no bfloat16; choose float32 or float16, or pass `out`")
        with like.device:
            return getattr(cupy, kind)(shape, dtype=dtype)
    raise TypeError(
        f"a result for a {type(like).__name__} would be in the memory of a library that is not known here; pass `out`, or the same "
        "memory as a tensor of PyTorch or an array of CuPy, by their from_dlpack or asarray"
    )


def empty(like: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """An array without values on the GPU that `like` is on."""
    return _new(like, shape, dtype, "empty")


def zeros(like: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """An array of zeros on the GPU that `like` is on."""
    return _new(like, shape, dtype, "zeros")


def stack(parts: list[Any]) -> Array:
    """Arrays of CuPy of one shape as one."""
    cupy = _cupy(parts[0])
    with parts[0].device:
        return cupy.stack(parts)


def word(like: Array, value: float) -> Array:
    """A number as a float32 array `[1]` on the GPU that `like` is on. Nothing is copied from the
    host."""
    array = empty(like, (1,), "float32")
    if _torch(array) is not None:
        return array.fill_(value)
    array.fill(value)
    return array


def numbers(x: Array) -> list[float]:
    """The numbers of an array. Waits for them."""
    result: list[float] = x.tolist() if _torch(x) is not None else x.get().tolist()
    return result


def to_host(x: Array) -> Array:
    """A copy of an array in the memory of the CPU. Waits for it."""
    if _torch(x) is not None:
        return x.cpu()
    if _cupy(x) is not None:
        return x.get()
    raise TypeError(
        f"a {type(x).__name__} is in the memory of a GPU, from where it is not copied; pass the same memory as a tensor of PyTorch or an "
        "array of CuPy, by their from_dlpack or asarray"
    )


#: Sizes of workspaces in bytes, by format, shape and tokens.
_BYTES: dict[tuple[Any, ...], int] = {}
_Workspaces = dict[tuple[int, int], tuple[int | None, Any]]
#: A workspace for each stream of a GPU: products on a stream use it one after the other.
_WORKSPACES: _Workspaces = {}
#: The last capture on each stream of a GPU, and the workspace in its graph.
_CAPTURED: _Workspaces = {}


def rounded_to(activations: str | None) -> str | None:
    """The width that activations are rounded to, `fp8` or `fp4`; None for exact ones, and for INT8,
    which products on GPUs refuse."""
    return None if activations in (None, "int8") else "fp8" if activations.startswith("fp8") else "fp4"


def workspace_bytes(weights: Array, tokens: int, stream: int, wide: bool = False, rounded: str | None = None) -> int:
    """Bytes of a workspace for weights and `tokens` rows of activations, `wide` ones in float32, or
    `rounded` to `fp8`, `fp4` or `fp4_token`; 0 for products without a workspace."""
    if rounded:
        key = (weights.format, weights.shape, tokens, rounded)
        return _bytes(key, weights, "gpu_rounded_workspace_bytes", tokens, rounded, stream)
    return _bytes((weights.format, weights.shape, tokens, wide), weights, "gpu_workspace_bytes", tokens, wide, stream)


def experts_workspace_bytes(
    weights: Array, pairs: int, stream: int, wide: bool = False, rounded: str | None = None
) -> int:
    """Bytes of a workspace for experts' weights and `pairs` pairs of a token and an expert, with
    `wide` activations in float32, or `rounded` to `fp8`, `fp4` or `fp4_token`."""
    if rounded:
        key = (weights.format, weights.shape, pairs, rounded)
        return _bytes(key, weights, "gpu_experts_rounded_workspace_bytes", pairs, rounded, stream)
    return _bytes((weights.format, weights.shape, pairs, wide), weights, "gpu_experts_workspace_bytes", pairs, wide, stream)


def _bytes(key: tuple[Any, ...], weights: Array, ask: str, *arguments: Any) -> int:
    """Returns the size that the extension module gives for weights on their GPU, and caches it."""
    key = (number(weights.codes), *key)
    found = _BYTES.get(key)
    if found is None:
        if len(_BYTES) >= 4096:
            _BYTES.clear()
        found = _BYTES[key] = getattr(_microscale, ask)(weights, *arguments)
    return found


def new_workspace(like: Array, needed: int) -> Array:
    """A workspace of `needed` bytes on the GPU that `like` is on. Its semaphores are cleared,
    and the other bytes have any values."""
    memory = empty(like, (needed,), "uint8")
    if _torch(memory) is not None:
        memory[: _microscale.COUNTER_BYTES].zero_()
    else:
        memory[: _microscale.COUNTER_BYTES].fill(0)
    return memory


def workspace(
    weights: Array, tokens: int, stream: int, wide: bool = False, rounded: str | None = None, results: int = 0
) -> Array:
    """A workspace for a product on a stream, as :func:`workspace_bytes` and :func:`kept` have it,
    with room for `results` results per token that are quantized; None if none is needed."""
    needed = workspace_bytes(weights, tokens, stream, wide, rounded)
    if results:
        needed = _microscale.gpu_bytes_with_results(needed, tokens, results)
    return kept(weights.codes, needed, stream) if needed else None


def experts_workspace(
    weights: Array, pairs: int, stream: int, wide: bool = False, rounded: str | None = None
) -> Array:
    """A workspace for a product of experts' weights on a stream."""
    return kept(weights.codes, experts_workspace_bytes(weights, pairs, stream, wide, rounded), stream)


def kept(codes: Array, needed: int, stream: int) -> Array:
    """Returns a workspace of `needed` bytes on the GPU of the codes, kept for later products on the
    stream. Each capture has workspaces of its own, for graphs may be replayed on any stream: the
    graph's pool has their memory as long as the graph lives, and the tensor is held so that nothing
    else in the capture gets it."""
    place = (number(codes), stream)
    capture = _microscale.gpu_capture(*place)
    if capture is not None and _torch(codes) is None:
        raise TypeError("only PyTorch keeps memory for as long as a graph lives; make a workspace before the capture, and pass it")
    workspaces = _WORKSPACES if capture is None else _CAPTURED
    found = workspaces.get(place)
    if found is None or found[0] != capture or found[1].shape[0] < needed:
        found = workspaces[place] = capture, new_workspace(codes, needed)
    return found[1]
