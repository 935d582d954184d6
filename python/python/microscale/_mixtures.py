"""Mixtures of experts in PyTorch: the operator, and the module that takes the place of
transformers' experts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from microscale import _experts, _microscale
from microscale._errors import Error
from microscale._operators import autocast, block_of, quantized_weights, require_activations, require_columns
from microscale._types import LayerFormat, RoundedActivations
from microscale._states import refusal, require_described

#: Words of an expert's global scale: on GPUs a slot, whose first one it is.
_WORDS = getattr(_microscale, "SLOT_WORDS", 1)


def _weights(codes: Tensor, scales: Tensor, global_scales: Tensor, format: str, direction: str, cols: int) -> Any:
    """Experts of an operator's arguments."""
    numbers: Any = None
    if global_scales.numel():
        if not codes.is_cuda:
            numbers = (global_scales if global_scales.dim() == 1 else global_scales[:, 0]).tolist()
        elif global_scales.dim() == 2:
            numbers = global_scales
        else:
            numbers = global_scales.new_zeros((codes.shape[0], _WORDS))
            numbers[:, 0] = global_scales
    shape = (*codes.shape[:-1], cols)
    return _experts.Experts._of(codes, scales, numbers, None if numbers is None else direction, format, shape)


@torch.library.custom_op("microscale::linear_experts", mutates_args=())
def _linear_experts(
    x: Tensor,
    experts: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scales: Tensor,
    format: str,
    direction: str,
    bias: Tensor | None = None,
    activations: str | None = None,
    round_weights: bool = False,
) -> Tensor:
    """`x` `[tokens, K]` or `[tokens, k, K]`, float32, float16 or bfloat16, times the weights `[E,
    M, K]` of the experts `[tokens, k]`, plus their bias `[E, M]`: `[tokens, k, M]`. `global_scales`
    is float32 `[E]` or a slot for each, `[E, words]`; `[0]` if there are none. `activations` and
    `round_weights` are as for :func:`microscale.linear`."""
    rounded = cast("RoundedActivations | None", activations)
    weights = _weights(codes, scales, global_scales, format, direction, x.shape[-1])
    # As of `microscale::linear`: nothing may be kept of what calls an operator.
    workspace = None
    if x.is_cuda and experts.numel():
        workspace = _experts.experts_workspace(weights, experts.numel(), x.dtype, rounded)
    result: Tensor = _experts.linear_experts(
        x.contiguous(), weights, experts, bias=bias, workspace=workspace, activations=rounded, round_weights=round_weights
    )
    return result


@_linear_experts.register_fake
def _(
    x: Tensor,
    experts: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scales: Tensor,
    format: str,
    direction: str,
    bias: Tensor | None = None,
    activations: str | None = None,
    round_weights: bool = False,
) -> Tensor:
    require_activations(format, activations, round_weights)
    return x.new_empty((*experts.shape, codes.shape[1]))


class QuantizedExperts(nn.Module):
    """The experts of a mixture as transformers has them (gpt-oss, Qwen3-MoE, Mixtral, DeepSeek,
    ...), their weights in NVFP4 or MXFP4.

    It has the same inputs and output: tokens `[tokens, K]`, the experts of each `[tokens, k]` and
    their weights `[tokens, k]`; the sum over a token's experts. Activations are float32, float16 or
    bfloat16, and are not rounded without an `activation_format`. There are no gradients through it.

    Under autocast the products are in the dtype of autocast, and the result has the dtype of the
    tokens.

    Its state has compressed-tensors' names, of a linear layer for each expert:
    `0.gate_proj.weight_packed`, `0.up_proj.weight_scale`, `0.down_proj.weight_global_scale`, ...,
    and `bias` where there is one. `state_dict()` copies these tensors, as safetensors refuses views
    that share memory, so it needs the experts' memory once more.

    Attributes:
        format: `nvfp4` or `mxfp4`.
        activation_format: as of :class:`QuantizedLinear`, for the inputs of both products. An
            NVFP4 global scale is computed from all tokens of each input.
        round_weights: whether NVFP4 weights may be rounded to FP8 for such activations.
    """

    gate_up_proj_packed: Tensor
    gate_up_proj_scale: Tensor
    gate_up_proj_slots: Tensor
    down_proj_packed: Tensor
    down_proj_scale: Tensor
    down_proj_slots: Tensor

    def __init__(
        self,
        module: nn.Module,
        gate_up: _experts.Experts,
        down: _experts.Experts,
        activation_format: RoundedActivations | None = None,
        round_weights: bool = False,
    ) -> None:
        """Takes weights `[E, 2 * I, K]` and `[E, K, I]`, and all else of the module that they were
        quantized from.

        Raises:
            Error: for weights that the module does not take, and for NVFP4 weights with activations
                in FP8 unless `round_weights` is set.
        """
        super().__init__()
        for name, value in vars(module).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        for name, child in module.named_children():
            self.add_module(name, child)
        self.format = gate_up.format
        require_activations(self.format, activation_format, round_weights)
        self.activation_format, self.round_weights = activation_format, round_weights
        gate = module._gate if isinstance(module, QuantizedExperts) else getattr(type(module), "_apply_gate")
        self._gate: Callable[[nn.Module, Tensor], Tensor] = gate
        for name, weights in (("gate_up_proj", gate_up), ("down_proj", down)):
            if weights.direction == "multiplier":
                raise Error(
                    "the state of a layer has compressed-tensors' names, whose global scale is a divisor; choose the numerics "
                    "compressed-tensors or transformer-engine"
                )
            if weights.format != self.format or weights.shape[2] % block_of(self.format):
                raise Error(f"weights must be of one format and of whole blocks; they are {gate_up!r} and {down!r}")
            self.register_buffer(f"{name}_packed", weights.codes, persistent=False)
            self.register_buffer(f"{name}_scale", weights.scales, persistent=False)
            slots = weights.codes.new_zeros((len(weights), _WORDS), dtype=torch.float32)
            # Loaders of NVFP4 expect a global scale: 1 for weights without one.
            slots[:, 0] = 1 if weights.direction is None else weights.global_scales
            self.register_buffer(f"{name}_slots", slots if self.format == "nvfp4" else slots[:0, 0], persistent=False)
            bias = getattr(module, f"{name}_bias", None)
            self.register_parameter(f"{name}_bias", None if bias is None else nn.Parameter(bias.detach(), bias.requires_grad))

    @staticmethod
    def replaces(module: nn.Module, format: str) -> bool:
        """Whether a module is experts whose weights are of whole blocks and whose forward pass is
        known here."""
        found = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
        parameters = [p for p in found if isinstance(p, nn.Parameter) and p.dim() == 3]
        return (
            len(parameters) == 2
            and callable(getattr(module, "_apply_gate", None))
            and not getattr(module, "has_post_expert_norm", False)
            and all(p.shape[1 if _is_transposed(module) else 2] % block_of(format) == 0 for p in parameters)
        )

    @classmethod
    def from_experts(
        cls,
        module: nn.Module,
        format: LayerFormat = "mxfp4",
        *,
        activation_format: RoundedActivations | None = None,
        round_weights: bool = False,
        **options: Any,
    ) -> QuantizedExperts:
        """Quantizes the weights of experts on their device, the device meta included.

        The module gets `activation_format` and `round_weights`. `options` are options of
        :func:`microscale.quantize`. By default NaN and infinities are an error.
        """
        options = {"non_finite": "error", **options}
        require_activations(format, activation_format, round_weights)

        def quantized(weights: Tensor) -> _experts.Experts:
            weights = weights.detach()
            rows = weights.transpose(1, 2) if _is_transposed(module) else weights
            if rows.is_meta:
                return _experts.together([quantized_weights(part, format, options) for part in rows], format)
            # GPUs read rows whose elements follow each other.
            parts = [part.contiguous() if part.is_cuda else part for part in rows]
            return _experts.quantize_experts(parts, format, **options)

        gate_up, down = (quantized(getattr(module, name)) for name in ("gate_up_proj", "down_proj"))
        return cls(module, gate_up, down, activation_format, round_weights)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedExperts:
        """Moves the experts. `model.to(torch.bfloat16)` casts their biases, and never their global
        scales."""
        before = {name: getattr(self, name) for name in ("gate_up_proj_slots", "down_proj_slots")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, slots in before.items():
            after = getattr(self, name)
            if after.dtype != slots.dtype:
                setattr(self, name, slots.to(after.device))
        return self

    def _product(self, name: str, x: Tensor, experts: Tensor) -> Tensor:
        bias = getattr(self, f"{name}_bias")
        if bias is not None:
            bias = bias.detach().to(x.dtype)
        parts = [getattr(self, f"{name}_{part}") for part in ("packed", "scale", "slots")]
        if torch.compiler.is_compiling() or not x.is_cuda or torch._C._len_torch_dispatch_stack():
            result: Tensor = torch.ops.microscale.linear_experts(
                x, experts, *parts, self.format, "divisor", bias, self.activation_format, self.round_weights
            )
            return result
        codes, scales, slots = parts
        weights = _weights(codes, scales, slots, self.format, "divisor", x.shape[-1])
        result = _experts.linear_experts(
            x.contiguous(), weights, experts, bias=bias, activations=self.activation_format, round_weights=self.round_weights
        )
        return result

    def dequantize(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights `[E, M, K]` of `gate_up_proj` or `down_proj`; transposed ones are not
        transposed back."""
        codes, scales, slots = (getattr(self, f"{name}_{part}") for part in ("packed", "scale", "slots"))
        result: Tensor = _weights(codes, scales, slots, self.format, "divisor", 2 * codes.shape[-1]).dequantize(dtype)
        return result

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[tokens, K]` to `[tokens, K]`."""
        require_columns(hidden_states, 2 * self.gate_up_proj_packed.shape[2])
        x = autocast(hidden_states.detach())
        experts = _experts.torch_indices(top_k_index, self.gate_up_proj_packed.shape[0])
        y = self._gate(self, self._product("gate_up_proj", x, experts))
        y = self._product("down_proj", y.to(x.dtype), experts)
        return (y * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    def _count(self) -> int:
        """Returns the number of experts."""
        return self.down_proj_packed.shape[0]

    def _linears(self) -> Iterator[tuple[str, str, slice]]:
        """The linear layers of an expert: their names, the weights that they are rows of, and which
        rows."""
        half = self.gate_up_proj_packed.shape[1] // 2
        if getattr(self, "is_concatenated", True):
            rows = slice(None, half), slice(half, None)
        else:
            rows = slice(0, None, 2), slice(1, None, 2)
        yield "gate_proj", "gate_up_proj", rows[0]
        yield "up_proj", "gate_up_proj", rows[1]
        yield "down_proj", "down_proj", slice(None)

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the state by name, over the memory of the module's."""
        scale_dtype = torch.float8_e4m3fn if self.format == "nvfp4" else torch.uint8
        for expert in range(self._count()):
            for linear, name, rows in self._linears():
                place = f"{expert}.{linear}."
                yield place + "weight_packed", getattr(self, f"{name}_packed")[expert, rows]
                yield place + "weight_scale", getattr(self, f"{name}_scale").view(scale_dtype)[expert, rows]
                if self.format == "nvfp4":
                    yield place + "weight_global_scale", getattr(self, f"{name}_slots")[expert, :1]
                if getattr(self, f"{name}_bias") is not None:
                    yield place + "bias", getattr(self, f"{name}_bias")[expert, rows]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        require_described()
        for name, tensor in self._state():
            destination[prefix + name] = tensor if keep_vars else tensor.detach().clone(memory_format=torch.contiguous_format)

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
        assign = local_metadata.get("assign_to_params_buffers", False)
        found = {name: given for name, _ in self._state() if isinstance(given := state_dict.get(prefix + name), Tensor)}
        if assign and found:
            self._make_room(found)
        elif found and self.down_proj_packed.is_meta:
            warnings.warn(f"{prefix[:-1]} is on the device meta, where loading a state does nothing; pass assign=True", stacklevel=2)
        own = dict(self._state())
        for part, tensor in own.items():
            name, given = prefix + part, found.get(part)
            if given is None:
                missing_keys.append(name)
            elif given.shape != tensor.shape:
                error_msgs.append(f"{name} has shape {tuple(given.shape)} and must have {tuple(tensor.shape)}")
            elif refused := refusal(name, given, self.format):
                error_msgs.append(refused)
            elif given.is_meta and not tensor.is_meta:
                error_msgs.append(f"{name} is on the device meta, without values; load it on another device")
            elif tensor.element_size() == 1:
                tensor.view(torch.uint8).copy_(given.view(torch.uint8))
            else:
                with torch.no_grad():
                    tensor.copy_(given)
            other = found.get(part.replace(".up_proj.", ".gate_proj."))
            if part.endswith("up_proj.weight_global_scale") and given is not None and other is not None and not _same(given, other):
                error_msgs.append(f"{name} is not that of gate_proj, with which it is multiplied at once; quantize both with one")
        if strict:
            below = (name for name in state_dict if name.startswith(prefix) and name[len(prefix) :] not in own)
            unexpected_keys += [name for name in below if name[len(prefix) :].split(".")[0] not in self._modules]

    def _make_room(self, state: dict[str, Tensor]) -> None:
        """Moves the tensors to the device of a state to assign, and biases to its dtype."""
        device = next(iter(state.values())).device
        bias = next((tensor.dtype for name, tensor in state.items() if name.endswith(".bias")), None)
        for name in ("gate_up_proj", "down_proj"):
            for part in ("packed", "scale", "slots"):
                setattr(self, f"{name}_{part}", _moved(getattr(self, f"{name}_{part}"), device))
            own = getattr(self, f"{name}_bias")
            if own is not None:
                setattr(self, f"{name}_bias", nn.Parameter(_moved(own.detach(), device, bias), own.requires_grad))

    def extra_repr(self) -> str:
        count, rows, _ = self.down_proj_packed.shape
        rounded = "" if self.activation_format is None else f", activations={self.activation_format}"
        return f"{count} experts, hidden={rows}, intermediate={self.gate_up_proj_packed.shape[1] // 2}, {self.format}{rounded}"


def _is_transposed(module: nn.Module) -> bool:
    """Whether weights are `[E, K, M]`."""
    return bool(getattr(module, "is_transposed", False))


def _moved(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies a tensor to a device. From the device meta there are no values, so it gets zeros."""
    return torch.zeros_like(x, device=device, dtype=dtype) if x.is_meta else x.to(device, dtype, copy=True)


def _same(number: Tensor, other: Tensor) -> bool:
    """Returns whether two global scales are the same. On the device meta they may be."""
    return number.is_meta or other.is_meta or number.equal(other.to(number.device))
