"""The weights of a quantized layer as a tensor, for code that reads `layer.weight`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from microscale._errors import Error

#: Functions that need no values.
_FACTS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad", "grad_fn")),
    *(Tensor.size, Tensor.stride, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__),
    *(Tensor.element_size, Tensor.get_device, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous),
    *(torch.is_floating_point, torch.is_complex, torch.numel, Tensor.__hash__),
}
#: Functions whose result shares the tensor's memory, as in `weight.data.copy_()`.
_SELF = {getattr(Tensor, "data").__get__, Tensor.detach, torch.detach}
#: Functions that set whether a tensor requires grad. These weights never do.
_REQUIRE_GRAD = {Tensor.requires_grad_, getattr(Tensor, "requires_grad").__set__}
#: Functions that return the address of a tensor's memory.
_MEMORY = {Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage}


class DequantizedWeight(Tensor):
    """The weights `[M, K]` of a quantized layer, dequantized by every function that reads values.

    Shape, dtype and device need no values. The tensor is read-only and has no memory.
    """

    _layer: Any
    #: Keeps transformers' initialization functions from writing to it.
    _is_hf_initialized = True

    @staticmethod
    def __new__(cls, layer: Any) -> DequantizedWeight:
        shape, device = (layer.out_features, layer.in_features), layer.weight_packed.device
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=layer.weight_dtype, device=device)
        self._layer = layer
        return self

    def dequantized(self) -> Tensor:
        """Returns the values, in new memory."""
        result: Tensor = self._layer.dequantize(self.dtype)
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _SELF:
            return args[0]
        if func in _REQUIRE_GRAD and not (args[1:] or tuple(kwargs.values()) or (True,))[0]:
            return args[0]
        if func in _MEMORY:
            raise RuntimeError("quantized weights have no memory with values; pass layer.dequantize(dtype)")
        if _writes(func, args, kwargs):
            raise _read_only()
        return func(*_read(args), **_read(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func._schema.is_mutable and isinstance(args[0], cls):
            raise _read_only()
        return func(*_read(args), **_read(kwargs or {}))


def _read(arguments: Any) -> Any:
    """Returns arguments with weights replaced by their values."""
    return tree_map_only(DequantizedWeight, DequantizedWeight.dequantized, arguments)


def _writes(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether a function writes to weights, by its name, such as `copy_` and `__iadd__`."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _ASSIGNMENTS
    own = (*args[:1], *(kwargs.get(name) for name in ("self", "input", "tensor"))) if in_place else ()
    out = kwargs.get("out")
    return any(isinstance(x, DequantizedWeight) for x in (*own, *(out if isinstance(out, (tuple, list)) else (out,))))


#: Methods that write without a trailing underscore in their name.
_ASSIGNMENTS = {"__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__", "__ifloordiv__"}
_ASSIGNMENTS |= {"__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}


def _read_only() -> Error:
    return Error(
        "the weights of a quantized layer are read-only; load a state with load_state_dict, or replace the layer with "
        "QuantizedLinear.from_linear(layer) of a layer with other weights"
    )
