"""Mixtures of experts in PyTorch: the operator, and the module that takes the place of transformers' experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from microscale import _experts, _microscale
from microscale._errors import Error

#: Elements of a block, by format.
_BLOCK = {"nvfp4": 16, "mxfp4": 32}
#: Words of an expert's global scale: on GPUs a slot, whose first one it is.
_WORDS = getattr(_microscale, "SLOT_WORDS", 1)


def block_of(format: str) -> int:
    """Elements of a block of a format that layers may be in."""
    if format not in _BLOCK:
        raise Error(f"layers are quantized to nvfp4 or mxfp4, not to {format}; choose one of them")
    return _BLOCK[format]


#: Dtypes that a state may have for codes, and for scales by format.
_CODES = ("uint8", "int8", "float4_e2m1fn_x2")
_SCALES = {"nvfp4": ("uint8", "float8_e4m3fn"), "mxfp4": ("uint8", "float8_e8m0fnu")}


def refusal(name: str, given: Tensor, format: str) -> str | None:
    """The message for a tensor of a state whose dtype its part cannot have, `name` ending in the part; None if it can.

    Codes and scales are bytes, which a conversion of numbers would change. Global scales and biases are numbers."""
    found, part = str(given.dtype).removeprefix("torch."), name.rpartition(".")[2]
    if part in ("weight_packed", "weight_scale"):
        dtypes = _CODES if part == "weight_packed" else _SCALES[format]
        if found not in dtypes:
            return f"{name} is {found} and must be {' or '.join(dtypes)}; pass the bytes as they were saved"
    elif not given.is_floating_point():
        return f"{name} is {found} and must be float32; pass the numbers, not their bytes"
    return None


def _weights(codes: Tensor, scales: Tensor, global_scales: Tensor, format: str, direction: str, cols: int) -> Any:
    """Experts of an operator's arguments."""
    weights = _experts.Experts.__new__(_experts.Experts)
    weights.codes, weights.scales, weights.format = codes, scales, format
    weights.shape = (*codes.shape[:-1], cols)
    weights._numbers, weights.direction = None, None
    if global_scales.numel():
        weights.direction = direction
        if not codes.is_cuda:
            numbers = global_scales if global_scales.dim() == 1 else global_scales[:, 0]
            weights._numbers = numbers.tolist()
        elif global_scales.dim() == 2:
            weights._numbers = global_scales
        else:
            weights._numbers = global_scales.new_zeros((codes.shape[0], _WORDS))
            weights._numbers[:, 0] = global_scales
    return weights


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
) -> Tensor:
    """`x` `[tokens, K]` or `[tokens, k, K]`, float32, float16 or bfloat16, times the weights `[E, M, K]` of the experts `[tokens, k]`, plus their bias `[E, M]`: `[tokens, k, M]`. `global_scales` is float32 `[E]` or a slot for each, `[E, words]`; `[0]` if
    there are none."""
    weights = _weights(codes, scales, global_scales, format, direction, x.shape[-1])
    # As of `microscale::linear`: nothing may be kept of what calls an operator.
    workspace = _experts.experts_workspace(weights, experts.numel(), x.dtype) if x.is_cuda and experts.numel() else None
    return _experts.linear_experts(weights, x.contiguous(), experts, bias=bias, workspace=workspace)


@_linear_experts.register_fake
def _(x, experts, codes, scales, global_scales, format, direction, bias=None):
    return x.new_empty((*experts.shape, codes.shape[1]))


class QuantizedExperts(nn.Module):
    """The experts of a mixture as transformers has them (gpt-oss, Qwen3-MoE, Mixtral, DeepSeek, ...), their weights in NVFP4 or MXFP4.

    It takes and gives what they do: tokens `[tokens, K]`, the experts of each `[tokens, k]` and their weights `[tokens, k]`; the sum over a
    token's experts. Activations are float32, float16 or bfloat16. There are no gradients through it.

    Its state has compressed-tensors' names, of a linear layer for each expert: `0.gate_proj.weight_packed`, `0.up_proj.weight_scale`,
    `0.down_proj.weight_global_scale`, ..., and `bias` where there is one.
    """

    def __init__(self, module: nn.Module, gate_up: _experts.Experts, down: _experts.Experts) -> None:
        """Takes weights `[E, 2 * I, K]` and `[E, K, I]`, and all else of the module that they were quantized from."""
        super().__init__()
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        for name, child in module.named_children():
            self.add_module(name, child)
        self.format = gate_up.format
        self._gate: Callable[[nn.Module, Tensor], Tensor] = type(module)._apply_gate
        for name, weights in (("gate_up_proj", gate_up), ("down_proj", down)):
            if weights.direction == "multiplier":
                raise Error(
                    "the state of a layer has compressed-tensors' names, whose global scale is a divisor; choose the convention "
                    "compressed-tensors or transformer-engine"
                )
            if weights.format != self.format or weights.shape[2] % block_of(self.format):
                raise Error(f"weights must be of one format and of whole blocks; they are {gate_up!r} and {down!r}")
            self.register_buffer(f"{name}_packed", weights.codes, persistent=False)
            self.register_buffer(f"{name}_scale", weights.scales, persistent=False)
            slots = weights.codes.new_zeros((len(weights), _WORDS), dtype=torch.float32)
            if weights.direction is not None:
                slots[:, 0] = weights.global_scales
            self.register_buffer(f"{name}_slots", slots if weights.direction is not None else slots[:0, 0], persistent=False)
            bias = getattr(module, f"{name}_bias", None)
            self.register_parameter(f"{name}_bias", None if bias is None else nn.Parameter(bias.detach(), bias.requires_grad))

    @staticmethod
    def replaces(module: nn.Module, format: str) -> bool:
        """Whether a module is experts whose weights are of whole blocks and whose forward pass is known here."""
        parameters = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
        return (
            all(isinstance(p, nn.Parameter) and p.dim() == 3 for p in parameters)
            and callable(getattr(module, "_apply_gate", None))
            and not getattr(module, "has_post_expert_norm", False)
            and all(p.shape[1 if _is_transposed(module) else 2] % block_of(format) == 0 for p in parameters)
        )

    @classmethod
    def from_experts(cls, module: nn.Module, format: str = "nvfp4", **options: Any) -> QuantizedExperts:
        """Quantizes the weights of experts, where they are. `options` are those of :func:`microscale.quantize`. NaN and infinities are an
        error by default."""
        options = {"non_finite": "error", **options}

        def quantized(weights: Tensor) -> _experts.Experts:
            weights = weights.detach()
            rows = weights.transpose(1, 2) if _is_transposed(module) else weights
            # GPUs read rows whose elements follow each other.
            parts = [part.contiguous() if part.is_cuda else part for part in rows]
            return _experts.quantize_experts(parts, format, **options)

        return cls(module, quantized(module.gate_up_proj), quantized(module.down_proj))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedExperts:
        """Moves the experts. `model.to(torch.bfloat16)` is about their biases: global scales stay what they are."""
        before = {name: getattr(self, name) for name in ("gate_up_proj_slots", "down_proj_slots")}
        super()._apply(fn, recurse)
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
            return torch.ops.microscale.linear_experts(x, experts, *parts, self.format, "divisor", bias)
        weights = _weights(*parts, self.format, "divisor", x.shape[-1])
        return _experts.linear_experts(weights, x.contiguous(), experts, bias=bias)

    def dequantize(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights `[E, M, K]` of `gate_up_proj` or `down_proj`; transposed ones are not transposed back."""
        codes, scales, slots = (getattr(self, f"{name}_{part}") for part in ("packed", "scale", "slots"))
        return _weights(codes, scales, slots, self.format, "divisor", 2 * codes.shape[-1]).dequantize(dtype)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[tokens, K]` to `[tokens, K]`."""
        x = hidden_states.detach()
        experts = top_k_index.to(torch.int32)
        y = self._gate(self, self._product("gate_up_proj", x, experts))
        y = self._product("down_proj", y.to(x.dtype), experts)
        return (y * top_k_weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _linears(self) -> Iterator[tuple[str, str, slice]]:
        """The linear layers of an expert: their names, the weights that they are rows of, and which rows."""
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
        for expert in range(self.down_proj_packed.shape[0]):
            for linear, name, rows in self._linears():
                place = f"{expert}.{linear}."
                yield place + "weight_packed", getattr(self, f"{name}_packed")[expert, rows]
                yield place + "weight_scale", getattr(self, f"{name}_scale").view(scale_dtype)[expert, rows]
                if self.format == "nvfp4" and getattr(self, f"{name}_slots").numel():
                    yield place + "weight_global_scale", getattr(self, f"{name}_slots")[expert, :1]
                if getattr(self, f"{name}_bias") is not None:
                    yield place + "bias", getattr(self, f"{name}_bias")[expert, rows]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, tensor in self._state():
            destination[prefix + name] = tensor if keep_vars else tensor.detach()

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
        own = {prefix + name: tensor for name, tensor in self._state()}
        for name, tensor in own.items():
            given = state_dict.get(name)
            if given is None:
                missing_keys.append(name)
            elif given.shape != tensor.shape:
                error_msgs.append(f"{name} has shape {tuple(given.shape)} and must have {tuple(tensor.shape)}")
            elif refused := refusal(name, given, self.format):
                error_msgs.append(refused)
            else:
                with torch.no_grad():
                    tensor.view(torch.uint8).copy_(given.view(torch.uint8)) if tensor.element_size() == 1 else tensor.copy_(given)
            other = state_dict.get(name.replace(".up_proj.", ".gate_proj."))
            if name.endswith("up_proj.weight_global_scale") and given is not None and other is not None and not given.equal(other):
                error_msgs.append(f"{name} is not that of gate_proj, with which it is multiplied at once; quantize both with one")
        if strict:
            below = (name for name in state_dict if name.startswith(prefix) and name not in own)
            unexpected_keys += [name for name in below if name[len(prefix) :].split(".")[0] not in self._modules]

    def extra_repr(self) -> str:
        count, rows, _ = self.down_proj_packed.shape
        return f"{count} experts, hidden={rows}, intermediate={self.gate_up_proj_packed.shape[1] // 2}, {self.format}"


def _is_transposed(module: nn.Module) -> bool:
    """Whether weights are `[E, K, M]`."""
    return bool(getattr(module, "is_transposed", False))
