"""PyTorch as it expects it: operators that `torch.compile` goes through, and linear layers with quantized weights.

    microscale.torch.quantize_(model, "nvfp4")
    model(tokens)                       # on a CPU or a GPU
    model.state_dict()                  # weight_packed, weight_scale, weight_global_scale: compressed-tensors' names

The operators are `torch.ops.microscale.quantize`, `dequantize`, `linear` and `linear_experts`, for tensors on CPUs and NVIDIA GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from microscale import _gpu, _microscale, _products, _tensors
from microscale._errors import Error
from microscale._mixtures import QuantizedExperts
from microscale._mixtures import block_of as _block
from microscale._mixtures import refusal as _refusal

def _word(q: _tensors.Quantized) -> Tensor:
    """A global scale as a tensor: of one element, or of none."""
    number = q.global_scale
    if isinstance(number, Tensor):
        return number
    return torch.tensor([] if number is None else [number], dtype=torch.float32, device=q.codes.device)


def _quantized(codes: Tensor, scales: Tensor, global_scale: Tensor, format: str, direction: str, cols: int) -> Any:
    number: Any = None
    if global_scale.numel():
        number = global_scale if codes.is_cuda else global_scale.item()
    direction = direction if number is not None else None
    return _tensors.Quantized._of(
        codes, scales, number, direction, format, (*codes.shape[:-1], cols), "linear", None
    )


@torch.library.custom_op("microscale::quantize", mutates_args=())
def _quantize(
    x: Tensor, format: str, convention: str | None, search: str | None, non_finite: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 `[..., code bytes]`, scales uint8 `[..., blocks]` and the global scale float32 `[1]`, or `[0]` if there is none,
    of `x` `[..., K]` in NVFP4 or MXFP4."""
    _block(format)
    q = _tensors.quantize(x, format, convention=convention, search=search, non_finite=non_finite)
    return q.codes, q.scales, _word(q)


@_quantize.register_fake
def _(x, format, convention, search, non_finite):
    block = _block(format)
    blocks = (x.shape[-1] + block - 1) // block
    codes = torch.empty((*x.shape[:-1], blocks * block // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((*x.shape[:-1], blocks), dtype=torch.uint8, device=x.device)
    return codes, scales, torch.empty((1 if format == "nvfp4" else 0,), dtype=torch.float32, device=x.device)


@torch.library.custom_op("microscale::dequantize", mutates_args=())
def _dequantize(
    codes: Tensor, scales: Tensor, global_scale: Tensor, format: str, direction: str, cols: int, dtype: torch.dtype
) -> Tensor:
    """The values `[..., cols]` of codes and scales. `direction` is that of the global scale, `divisor` or `multiplier`."""
    return _quantized(codes, scales, global_scale, format, direction, cols).dequantize(dtype)


@_dequantize.register_fake
def _(codes, scales, global_scale, format, direction, cols, dtype):
    return torch.empty((*codes.shape[:-1], cols), dtype=dtype, device=codes.device)


@torch.library.custom_op("microscale::linear", mutates_args=())
def _linear(
    x: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor, format: str, direction: str, bias: Tensor | None = None
) -> Tensor:
    """`x` `[..., K]`, float32, float16 or bfloat16, times weights `[M, K]`, plus a bias `[M]` of its dtype: `[..., M]`."""
    weights = _quantized(codes, scales, global_scale, format, direction, x.shape[-1])
    workspace = None
    if x.is_cuda:
        # What calls an operator may have memory pools of its own, as compiled graphs do: nothing of theirs may be kept.
        workspace = _products.workspace(weights, x.shape[:-1].numel(), x.dtype)
    return _products.linear(weights, x.contiguous(), bias=bias, workspace=workspace)


@_linear.register_fake
def _(x, codes, scales, global_scale, format, direction, bias=None):
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def _linear_context(ctx, inputs, output):
    x, *parts, ctx.format, ctx.direction, _ = inputs
    ctx.cols = x.shape[-1]
    ctx.save_for_backward(*parts)


def _linear_backward(ctx, gradient):
    of_x = of_bias = None
    if ctx.needs_input_grad[0]:
        weights = torch.ops.microscale.dequantize(
            *ctx.saved_tensors, ctx.format, ctx.direction, ctx.cols, gradient.dtype
        )
        of_x = gradient @ weights
    # A bias that was left out is none of the inputs.
    if ctx.needs_input_grad[6:] == (True,):
        of_bias = gradient.sum(tuple(range(gradient.dim() - 1)))
    return of_x, None, None, None, None, None, of_bias


torch.library.register_autograd("microscale::linear", _linear_backward, setup_context=_linear_context)


def _is_plain(x: Tensor) -> bool:
    """Whether nobody but the library has to see what is done with a tensor: no compiler, no gradients, no mode, no subclass. An operator
    takes longer to call than the library."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and not (x.requires_grad and torch.is_grad_enabled())
        and not torch._C._len_torch_dispatch_stack()
    )


class QuantizedLinear(nn.Module):
    """A linear layer whose weights are in NVFP4 or MXFP4. Gradients go through it to its input, and its weights stay.

    Its state has compressed-tensors' names: `weight_packed` uint8 `[M, K / 2]`, `weight_scale` `[M, K / block]` (float8_e4m3fn for
    NVFP4, uint8 for MXFP4), `weight_global_scale` float32 `[1]` (NVFP4, a divisor), and `bias`.

    Activations are multiplied with the weights as they are, in float32, float16 or bfloat16. On a GPU the bias is added before the only
    rounding.
    """

    def __init__(self, weights: _tensors.Quantized, bias: Tensor | None = None) -> None:
        """Takes the tensors of `weights` `[M, K]`, quantized from a tensor of PyTorch with linear scales."""
        super().__init__()
        block = _block(weights.format)
        if weights.direction == "multiplier":
            raise Error(
                "the state of a layer has compressed-tensors' names, whose global scale is a divisor; choose the convention "
                "compressed-tensors or transformer-engine"
            )
        if weights.layout != "linear" or weights.cols % block or len(weights.shape) != 2:
            raise Error(f"weights must be a matrix with linear scales and whole blocks of {block}; they are {weights!r}")
        self.format = weights.format
        self.out_features, self.in_features = weights.shape
        if bias is not None and bias.shape != (self.out_features,):
            raise Error(f"bias has shape {tuple(bias.shape)} and must have ({self.out_features},), a number for each row of the weights")
        scales = weights.scales.view(torch.float8_e4m3fn) if self.format == "nvfp4" else weights.scales
        self.register_buffer("weight_packed", weights.codes)
        self.register_buffer("weight_scale", scales)
        # A clone: the global scale of a GPU has its kernels' notes behind it.
        self.register_buffer("weight_global_scale", None if weights.direction is None else _word(weights).clone())
        self.bias = None if bias is None else nn.Parameter(bias.detach())
        self._ready: tuple[Any, ...] = ()

    @classmethod
    def from_linear(cls, layer: nn.Linear, format: str = "nvfp4", **options: Any) -> QuantizedLinear:
        """Quantizes the weights of a layer, where they are. `options` are those of :func:`microscale.quantize`. On a GPU too, NaN and
        infinities are an error by default, which waits."""
        options = {"non_finite": "error", **options}
        return cls(_tensors.quantize(layer.weight, format, **options), layer.bias)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": ()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Moves the layer. `model.to(torch.bfloat16)` is about its bias: scales stay what they are."""
        scales = {name: getattr(self, name) for name in ("weight_scale", "weight_global_scale")}
        super()._apply(fn, recurse)
        for name, before in scales.items():
            after = getattr(self, name)
            if after is not None and after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for part in ("weight_packed", "weight_scale", "weight_global_scale", "bias"):
            name, own = prefix + part, getattr(self, part)
            given = state_dict.get(name)
            if own is None or not isinstance(given, Tensor):
                continue
            if refused := _refusal(name, given, self.format):
                error_msgs.append(refused)
                # Nothing is loaded, for a copy would convert it.
                return
            if part in ("weight_packed", "weight_scale"):
                state_dict[name] = given.view(own.dtype)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        number = self.weight_global_scale
        none = number if number is not None else self.weight_packed.new_empty((0,), dtype=torch.float32)
        return self.weight_packed, self.weight_scale.view(torch.uint8), none

    def _weights(self) -> _tensors.Quantized:
        """The weights as they are now, put together anew only if a tensor was replaced."""
        if not self._buffers["weight_packed"].is_cuda:
            # The number of a CPU's is read each time, for a state may have been loaded meanwhile.
            return _quantized(*self._parts(), self.format, "divisor", self.in_features)
        buffers = self._buffers
        now = (buffers["weight_packed"], buffers["weight_scale"], buffers["weight_global_scale"])
        ready = self._ready
        if ready and ready[0] is now[0] and ready[1] is now[1] and ready[2] is now[2] and ready[3] == now[1].data_ptr():
            return ready[4]
        weights = _quantized(*self._parts(), self.format, "divisor", self.in_features)
        self._ready = (*now, now[1].data_ptr(), weights)
        return weights

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights `[M, K]` in a dtype."""
        return torch.ops.microscale.dequantize(*self._parts(), self.format, "divisor", self.in_features, dtype)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weights = self._weights()
        if not x.is_cuda:
            return _products.linear(weights, x, bias=bias)
        _gpu.require()
        # As `linear` does, without looking whose array it is.
        leading, wide = x.shape[:-1], x.dtype == torch.float32
        y, tokens = x.new_empty(*leading, self.out_features), leading.numel()
        stream = _gpu.stream(y)
        workspace = None
        if tokens > _products._FEW or wide:
            workspace = _gpu.workspace(weights, tokens, stream, wide)
        _microscale.gpu_linear(weights, x, y, bias, workspace, stream)
        return y

    def forward(self, x: Tensor) -> Tensor:
        """`[..., K]` to `[..., M]`."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if not _is_plain(x):
            return torch.ops.microscale.linear(x, *self._parts(), self.format, "divisor", bias)
        if bias is not None and bias.requires_grad and torch.is_grad_enabled():
            # The gradient of the bias, where nothing else has one.
            if bias.shape != (self.out_features,):
                raise Error(f"bias has shape {tuple(bias.shape)} and must have ({self.out_features},), a number for each row of the weights")
            return self._product(x.contiguous(), None).add_(bias)
        return self._product(x.contiguous(), bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {self.format}"


def quantize_(
    model: nn.Module,
    recipe: str | Mapping[str, Any] = "nvfp4",
    *,
    exclude: Iterable[str] = ("lm_head", "*.lm_head"),
    filter: Callable[[str, nn.Module], bool] | None = None,
) -> list[str]:
    """Puts a :class:`QuantizedLinear` in the place of each `nn.Linear` of a model, and a :class:`QuantizedExperts` in that of the experts of
    transformers' mixtures, in place.

    Layers whose rows are no whole number of blocks are left alone. Each layer and each expert has a global scale of its own; for
    checkpoints that engines serve, where fused layers share one, use :func:`microscale.quantize_checkpoint`.

    Args:
        model: the model, on CPUs or NVIDIA GPUs.
        recipe: a format, or a mapping with `format` and other options of :func:`microscale.quantize`.
        exclude: patterns of layers to leave alone.
        filter: if given, whether to quantize a layer or experts, by the name and the module.

    Returns:
        The names of the modules that were quantized.
    """
    options = {"format": recipe} if isinstance(recipe, str) else dict(recipe)
    format, patterns = options.get("format", "nvfp4"), tuple(exclude)
    block = _block(format)
    modules = [
        (name, module, QuantizedExperts.from_experts if experts else QuantizedLinear.from_linear)
        for name, module in model.named_modules()
        if ((experts := QuantizedExperts.replaces(module, format)) or (type(module) is nn.Linear and module.in_features % block == 0))
        and not any(fnmatchcase(name, pattern) for pattern in patterns)
        and (filter is None or filter(name, module))
    ]
    for name, module, quantized in modules:
        if not name:
            raise Error("the model is a layer itself; use QuantizedLinear.from_linear or QuantizedExperts.from_experts")
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, quantized(module, **options))
    return [name for name, _, _ in modules]


def to_torchao(q: _tensors.Quantized, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Tensor:
    """What was quantized, as torchao's own tensor over the same memory: `NVFP4Tensor`, or `MXTensor` of MXFP4 and MXFP8.

    Args:
        q: `[..., M, K]` of whole blocks, from tensors of PyTorch, by any convention whose global scale is a multiplier (torchao,
            ModelOpt) or that has none. Scales may be linear or swizzled, as `torch._scaled_mm` takes them.
        dtype: of the tensor that it stands for.
        options: of torchao's class: `act_quant_kwargs`, `kernel_preference`, `use_triton_kernel`, ...
    """
    nvfp4 = q.format == "nvfp4"
    if q.direction == "divisor":
        raise Error("torchao's global scale is a multiplier and this is a divisor; choose the convention torchao or modelopt")
    block = 16 if nvfp4 else 32
    if len(q.shape) < 2 or q.cols % block:
        raise Error(f"torchao's tensors are matrices of whole blocks of {block}, and this is {q!r}")
    codes, scales = q.codes, q.typed[1]
    if q.layout == "swizzled":
        if q.rows != q.shape[-2] and q.shape[-2] % 128:
            raise Error("matrices share tiles of swizzled scales unless they have a multiple of 128 rows; use linear scales")
        # torchao's shape of the same bytes: 32 rows of 16 a tile.
        scales = scales.view(*q.shape[:-2], (q.shape[-2] + 127) // 128 * 32, -1)
    layout = {"is_swizzled_scales": q.layout == "swizzled"}
    if nvfp4:
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

        number = None if q.direction is None else _word(q).reshape(())
        return NVFP4Tensor(codes, scales, block, dtype, per_tensor_scale=number, **layout, **options)
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common import KernelPreference

    element = torch.float4_e2m1fn_x2 if q.format == "mxfp4" else q.typed[0].dtype
    codes = codes if q.format == "mxfp4" else q.typed[0]
    options = {"kernel_preference": KernelPreference.EMULATED, "act_quant_kwargs": None, **options}
    return MXTensor(codes, scales, element, block, dtype, **layout, **options)
