"""The linear layer with quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from microscale import _gpu, _microscale, _products, _tensors
from microscale._errors import Error
from microscale._operators import autocast, block_of, quantized, quantized_weights, require_activations, require_columns, word
from microscale._types import GlobalScale, LayerFormat, RoundedActivations
from microscale._states import refusal, require_described
from microscale._weight import DequantizedWeight

#: Dtypes that weights are dequantized to in one rounding.
_VALUES = (torch.float32, torch.float16, torch.bfloat16)


def _is_plain(x: Tensor) -> bool:
    """Returns whether the library may be called without the operator, which takes longer.

    Compilers, gradients, modes and subclasses of tensors need the operator.
    """
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and not (x.requires_grad and torch.is_grad_enabled())
        and not x.is_meta
        and not torch._C._len_torch_dispatch_stack()
    )


def _divisor(given: GlobalScale | None, device: torch.device) -> Tensor | None:
    """Returns a global scale as a divisor, float32 `[1]` on a device."""
    if given is None:
        return None
    value = given.value if given.direction == "divisor" else 1 / given.value
    return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(1)


class QuantizedLinear(nn.Module):
    """A linear layer with weights in NVFP4 or MXFP4. Gradients reach its input and its bias.

    Its state has compressed-tensors' names: `weight_packed` uint8 `[M, K / 2]`, `weight_scale`
    `[M, K / block]` (float8_e4m3fn for NVFP4, uint8 for MXFP4), `weight_global_scale` float32 `[1]`
    (NVFP4, a divisor; 1 for weights without one), and `bias`.

    Activations are float32, float16 or bfloat16, and are rounded only if `activation_format` is
    given. On a GPU the bias is added before the only rounding. Under autocast the layer casts
    activations to the dtype of autocast and gives a result in it, as `nn.Linear` does.

    Attributes:
        format: `nvfp4` or `mxfp4`.
        in_features: K.
        out_features: M.
        weight_dtype: the dtype of `weight`. `to(dtype)`, `half()` and the like change it.
        activation_format: `fp8`, `fp8-group128` or `fp8-fast` for activations that are rounded to
            FP8, `mxfp4`, `mxfp4-fast` or `nvfp4` for activations in the format of the weights,
            `int8` on CPUs; None for exact activations. It is not part of the state.
        round_weights: whether NVFP4 weights may be rounded to FP8 for such activations.
        input_global_scale: float32 `[1]`, a divisor, for activations in NVFP4 whose global scale is
            given; part of the state then. None for others.
    """

    weight_packed: Tensor
    weight_scale: Tensor
    weight_global_scale: Tensor | None
    weight_dtype: torch.dtype
    bias: nn.Parameter | None
    input_global_scale: Tensor | None

    def __init__(
        self,
        weights: _tensors.Quantized,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        activation_format: RoundedActivations | None = None,
        round_weights: bool = False,
        input_global_scale: GlobalScale | None = None,
    ) -> None:
        """Makes a layer of quantized tensors, which are not copied.

        Args:
            weights: `[M, K]`, of PyTorch, with linear scales.
            bias: `[M]`.
            dtype: of `weight`; by default the bias' dtype, or else PyTorch's default.
            activation_format: how the layer rounds activations, as `activations` of
                :func:`microscale.linear`: to E4M3 with a scale per row (`fp8`), per 128 columns
                (`fp8-group128`) or per row with fast accumulation (`fp8-fast`), to the format of
                the weights (`mxfp4`, `mxfp4-fast`, `nvfp4`), or on CPUs to `int8`.
            round_weights: allows NVFP4 weights with activations in FP8, which rounds them.
            input_global_scale: for activations in NVFP4, their global scale. By default it is
                computed from each input.

        Raises:
            Error: for weights that the layer does not take, and for NVFP4 weights with activations
                in FP8 unless `round_weights` is set.
        """
        super().__init__()
        block = block_of(weights.format)
        if weights.direction == "multiplier":
            raise Error(
                "the state of a layer has compressed-tensors' names, whose global scale is a divisor; choose the numerics "
                "compressed-tensors or transformer-engine"
            )
        if weights.layout != "linear" or weights.cols % block or len(weights.shape) != 2:
            raise Error(f"weights must be a matrix with linear scales and whole blocks of {block}; they are {weights!r}")
        require_activations(weights.format, activation_format, round_weights, input_global_scale is not None)
        self.activation_format, self.round_weights = activation_format, round_weights
        self.format = weights.format
        self.out_features, self.in_features = weights.shape
        if bias is not None and bias.shape != (self.out_features,):
            raise Error(f"bias has shape {tuple(bias.shape)} and must have ({self.out_features},), a number for each row of the weights")
        self.weight_dtype = dtype or (torch.get_default_dtype() if bias is None else bias.dtype)
        scales = weights.scales.view(torch.float8_e4m3fn) if self.format == "nvfp4" else weights.scales
        self.register_buffer("weight_packed", weights.codes)
        self.register_buffer("weight_scale", scales)
        # A clone: on a GPU, the words after the global scale belong to kernels.
        number = word(weights).clone() if weights.direction is not None else weights.codes.new_ones((1,), dtype=torch.float32)
        self.register_buffer("weight_global_scale", number if self.format == "nvfp4" else None)
        self.register_buffer("input_global_scale", _divisor(input_global_scale, weights.codes.device))
        requires_grad = bias is not None and (bias.requires_grad or not isinstance(bias, nn.Parameter))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad)
        self._ready: tuple[Any, ...] = ()

    @classmethod
    def from_linear(
        cls,
        layer: nn.Linear,
        format: LayerFormat = "mxfp4",
        *,
        activation_format: RoundedActivations | None = None,
        round_weights: bool = False,
        input_global_scale: GlobalScale | None = None,
        **options: Any,
    ) -> QuantizedLinear:
        """Quantizes the weights of a layer on their device, the device meta included.

        The layer gets `activation_format`, `round_weights` and `input_global_scale`.
        `options` are options of :func:`microscale.quantize`. By default NaN and infinities are an
        error on GPUs too, which waits for the GPU.
        """
        options = {"non_finite": "error", **options}
        require_activations(format, activation_format, round_weights, input_global_scale is not None)
        weights = quantized_weights(layer.weight.detach(), format, options)
        return cls(weights, layer.bias, layer.weight.dtype, activation_format, round_weights, input_global_scale)

    @property
    def weight(self) -> Tensor:
        """The weights `[M, K]` in `weight_dtype`, read-only, for code that reads `layer.weight`.

        Shape, dtype and device cost nothing. Every function that reads values dequantizes all of
        them into new memory of the size of the unquantized weights, `2 * M * K` bytes in bfloat16.
        Calling the layer needs no such memory.
        """
        if torch.compiler.is_compiling():
            return self.dequantize(self.weight_dtype)
        return DequantizedWeight(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(
                "the weight of a QuantizedLinear is read-only; load a state with load_state_dict, or replace the layer with "
                "QuantizedLinear.from_linear(layer) of a layer with other weights"
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        # PyTorch 2.15 writes pickles with float8_e4m3fn that it cannot read.
        buffers = {**self._buffers, "weight_scale": self.weight_scale.view(torch.uint8)}
        return {**self.__dict__, "_buffers": buffers, "_ready": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.format == "nvfp4":
            self.weight_scale = self.weight_scale.view(torch.float8_e4m3fn)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Moves and casts the layer. A dtype is for its bias and `weight`: scales keep theirs."""
        scales = {name: getattr(self, name) for name in ("weight_scale", "weight_global_scale", "input_global_scale")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in scales.items():
            after = getattr(self, name)
            if after is not None and after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        self.weight_dtype = fn(torch.empty((1,), dtype=self.weight_dtype, device=self.weight_packed.device)).dtype
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        require_described()
        super()._save_to_state_dict(destination, prefix, keep_vars)

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
        for part in ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", "bias"):
            name, own = prefix + part, getattr(self, part)
            given = state_dict.get(name)
            if own is None or not isinstance(given, Tensor):
                continue
            if refused := refusal(name, given, self.format):
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
        """Returns the weights, on a GPU the same object until a tensor is replaced."""
        if not self.weight_packed.is_cuda:
            # On a CPU the global scale is read each time, as a state may have been loaded.
            return quantized(*self._parts(), self.format, "divisor", self.in_features)
        buffers: dict[str, Any] = self._buffers
        now = (buffers["weight_packed"], buffers["weight_scale"], buffers["weight_global_scale"])
        ready = self._ready
        if ready and ready[0] is now[0] and ready[1] is now[1] and ready[2] is now[2] and ready[3] == now[1].data_ptr():
            result: _tensors.Quantized = ready[4]
            return result
        weights = quantized(*self._parts(), self.format, "divisor", self.in_features)
        self._ready = (*now, now[1].data_ptr(), weights)
        return weights

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weights `[M, K]` in a dtype."""
        read = dtype if dtype in _VALUES else torch.float32
        weights = torch.ops.microscale.dequantize(*self._parts(), self.format, "divisor", self.in_features, read)
        result: Tensor = weights.to(dtype)
        return result

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weights = self._weights()
        if not x.is_cuda or self.activation_format in _products.FP4:
            given = self.input_global_scale
            result: Tensor = _products.linear(
                x,
                weights,
                bias=bias,
                activations=self.activation_format,
                round_weights=self.round_weights,
                input_global_scale=None if given is None else GlobalScale(given, "divisor"),
            )
            return result
        _gpu.require()
        # As `linear` does, without finding out which library has the array.
        leading, wide = x.shape[:-1], x.dtype == torch.float32
        y, tokens = x.new_empty(*leading, self.out_features), leading.numel()
        stream = _gpu.stream(y)
        workspace = None
        fp8 = self.activation_format
        if tokens > _products._FEW or wide or fp8:
            workspace = _gpu.workspace(weights, tokens, stream, wide, _gpu.rounded_to(fp8))
        _microscale.gpu_linear(weights, x, y, None, bias, workspace, fp8, self.round_weights, None, stream)
        return y

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies `[..., K]` with the weights: `[..., M]`."""
        require_columns(x, self.in_features)
        x = autocast(x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if not _is_plain(x):
            result: Tensor = torch.ops.microscale.linear(
                x,
                *self._parts(),
                self.format,
                "divisor",
                bias,
                self.activation_format,
                self.round_weights,
                self.input_global_scale,
            )
            return result
        if bias is not None and bias.requires_grad and torch.is_grad_enabled():
            # Only the bias has a gradient.
            if bias.shape != (self.out_features,):
                raise Error(f"bias has shape {tuple(bias.shape)} and must have ({self.out_features},), a number for each row of the weights")
            return self._product(x.contiguous(), None).add_(bias)
        return self._product(x.contiguous(), bias)

    def extra_repr(self) -> str:
        rounded = "" if self.activation_format is None else f", activations={self.activation_format}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.format}{rounded}"
        )
