"""Loading quantized checkpoints into models of PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from microscale import _experts
from microscale._errors import Error
from microscale._linear import QuantizedLinear
from microscale._mixtures import QuantizedExperts
from microscale._replace import adopt, is_linear, names_of, put
from microscale._states import transformers_facts
from microscale._stored import Stored, Weight
from microscale._types import GlobalScale, LayerFormat, RoundedActivations

#: The name of a tensor of one expert in the state of :class:`QuantizedExperts`.
_EXPERT = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")
#: The linear layers of an expert, by the parameter that stacks them.
_LINEARS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
#: Reads a part of a weight, such as its codes.
_Read = Callable[[Weight], Tensor]


def load_quantized(
    model: nn.Module,
    path: Any,
    *,
    device: Any = None,
    activation_format: RoundedActivations | None = None,
    round_weights: bool = False,
) -> list[str]:
    """Loads a quantized checkpoint into a model, in place. After an error the model is unchanged.

        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        microscale.torch.load_quantized(model, folder)

    Linear layers in NVFP4 or MXFP4 become :class:`QuantizedLinear`, and experts become
    :class:`QuantizedExperts`. Quantized tensors of other modules, such as embeddings and subclasses
    of `nn.Linear`, are dequantized. Unquantized tensors are cast to the dtypes of the model. Tied
    parameters stay tied. Scales of inputs are ignored.

    For models of transformers, names are converted as transformers does, and buffers that
    checkpoints lack are computed.

    Args:
        model: a model of the checkpoint's architecture, quantized or not, on any device. On the
            device meta it needs no memory before.
        path: a folder or a .safetensors file that `microscale quantize` wrote, in the checkpoint
            format compressed-tensors or gpt-oss, or `save_pretrained` after :func:`quantize_`.
        device: the device to load to. By default tensors stay on their device, and those on the
            device meta go to the CPU.
        activation_format: how all quantized modules round activations, as of
            :class:`QuantizedLinear`. By default they do not, and modules that are quantized in the
            model already keep theirs, with their `round_weights` and `input_global_scale`.
        round_weights: allows NVFP4 weights with activations in FP8, which rounds them.

    Returns:
        The names of the quantized modules.

    Raises:
        Error: missing or unexpected tensors, or a shape that differs.
        CheckpointError: a file that cannot be read, or another checkpoint format.
    """
    facts = transformers_facts()
    if facts is not None:
        facts.require_unquantized(model)
    loading = _Loading(model, Stored(path), None if device is None else torch.device(device))
    loading.activations = activation_format, round_weights
    return loading.run()


class _Place(NamedTuple):
    """A tensor of a model: its module, its name there, and the tensor itself."""

    module: nn.Module
    name: str
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values. Codes have two values per byte."""
        packed = self.name in ("weight", *_LINEARS) and _is_quantized(self.module)
        return (*self.tensor.shape[:-1], 2 * self.tensor.shape[-1]) if packed else tuple(self.tensor.shape)


class _Group(NamedTuple):
    """Tensors of a checkpoint that become one or more tensors of a model.

    Each has a name and the pattern of its converter. A tensor without a pattern is not converted.
    """

    key: str
    sources: list[tuple[str, str | None]]

    @property
    def owner(self) -> str:
        return self.key.rpartition(".")[0]


class _Loading:
    """Plans the place of each tensor of a checkpoint in a model, and then loads them."""

    #: The `activation_format` and `round_weights` of new modules.
    activations: tuple[RoundedActivations | None, bool] = (None, False)

    def __init__(self, model: nn.Module, stored: Stored, device: torch.device | None) -> None:
        self._model, self._stored, self._device = model, stored, device
        self._names = {id(module): names for names, module in names_of(model)}
        self._modules = {name: module for names, module in names_of(model) for name in names}
        self._places = {
            f"{name}.{place.name}" if name else place.name: place for name, module in self._modules.items() for place in _places(module)
        }
        facts = transformers_facts()
        self._facts = facts.Names(model, self._places) if facts is not None and facts.has_conversions(model) else None
        self._linear: dict[str, Weight] = {}
        #: Functions that stack a part of experts' weights, such as codes, by name and parameter.
        self._experts: dict[str, dict[str, Callable[[_Read], Tensor]]] = {}
        self._values: dict[str, Callable[[], dict[str, Tensor]]] = {}
        self._plan()

    def _plan(self) -> None:
        """Plans all tensors. Raises an error for missing and unexpected ones."""
        groups, apart, unexpected = self._groups()
        taken: set[str] = set()
        filled: set[int] = set()
        stacked = self._stacked(groups)
        for group in groups:
            first = self._stored.weights[group.sources[0][0]]
            place = self._places[group.key]
            if group.owner in stacked and place.name in _LINEARS:
                _require_shape(group.key, tuple(self._shapes(group)[group.key].shape), place)
                self._experts.setdefault(group.owner, {})[place.name] = partial(self._merged, group)
            elif group.sources[0][1] is None and place.name == "weight" and not first.is_transposed and _takes(place.module, first.format):
                _require_shape(group.key, first.shape, place)
                self._linear[group.owner] = first
            else:
                filled |= self._plan_values(group)
                continue
            taken |= {f"{name}.{place.name}" for name in self._names[id(place.module)]}
        for name, tensors in apart.items():
            taken |= self._plan_experts(name, tensors)
        missing = {key for key, place in self._places.items() if key not in taken and id(place.tensor) not in filled}
        if self._facts is not None:
            missing, unexpected = self._facts.tolerated(missing, unexpected)
        else:
            missing |= {name for name, x in self._model.named_buffers() if x.is_meta and name not in self._places}
        wrong = [f"the checkpoint lacks {_listed(missing)}"] if missing else []
        wrong += [f"the model has no place for {_listed(unexpected)}"] if unexpected else []
        if wrong:
            raise Error(f"{'; '.join(wrong)}; pass a model that was made from the checkpoint's config")
        if "" in self._linear or "" in self._experts:
            raise Error("the model is a layer itself; pass a model with this layer")

    def _groups(self) -> tuple[list[_Group], dict[str, dict[tuple[int, str, str], Weight]], set[str]]:
        """Groups the checkpoint's tensors by the tensor of the model that they become.

        Returns the groups, the tensors of experts that a state of :class:`QuantizedExperts` has one
        by one, and the names without a place.
        """
        groups: dict[str, _Group] = {}
        apart: dict[str, dict[tuple[int, str, str], Weight]] = {}
        unexpected: set[str] = set()
        for name in sorted(self._stored.weights, key=None if self._facts is None else self._facts.order):
            weight, owner = self._stored.weights[name], name.rpartition(".")[0]
            of_input = name.endswith(".input_global_scale") and self._stored.weights.get(f"{owner}.weight")
            if of_input and of_input.format is not None:
                continue
            key, pattern = (name, None) if self._facts is None else self._facts.find(name)
            if key in self._places:
                groups.setdefault(key, _Group(key, [])).sources.append((name, pattern))
            elif (found := _EXPERT.fullmatch(key)) and _LINEARS.keys() <= {place.name for place in _places(self._modules.get(found[1]))}:
                apart.setdefault(found[1], {})[int(found[2]), found[3], found[4]] = weight
            else:
                unexpected.add(name)
        return list(groups.values()), apart, unexpected

    def _stacked(self, groups: list[_Group]) -> set[str]:
        """Returns the names of experts whose weights all have one format of layers."""
        found: dict[str, list[str | None]] = {}
        for group in groups:
            place = self._places[group.key]
            if place.name not in _LINEARS:
                continue
            weights = [self._stored.weights[name] for name, _ in group.sources]
            transposed = group.sources[0][1] is None and getattr(place.module, "is_transposed", False)
            fits = all(weight.is_transposed == transposed for weight in weights)
            found.setdefault(group.owner, []).extend(weight.format if fits else None for weight in weights)
        return {name for name, formats in found.items() if len(set(formats)) == 1 and _is_experts(self._modules[name], formats[0])}

    def _plan_values(self, group: _Group) -> set[int]:
        """Plans to load the values of a group. Returns the ids of the tensors that they fill."""
        filled = set()
        for key, tensor in self._shapes(group).items():
            place = self._places.get(key)
            if place is None:
                raise Error(f"{group.sources[0][0]} becomes {key}, which the model lacks; pass a model that was made from the checkpoint's config")
            if _is_quantized(place.module) and place.name in ("weight", *_LINEARS):
                raise Error(f"{key} is quantized in the model and not in the checkpoint; pass an unquantized model")
            _require_shape(key, tuple(tensor.shape), place)
            filled.add(id(place.tensor))
        self._values[group.key] = lambda: self._made(group, self._stored.values)
        return filled

    def _plan_experts(self, name: str, tensors: dict[tuple[int, str, str], Weight]) -> set[str]:
        """Plans to load experts that are stored one by one. Returns their keys in the model."""
        module = self._modules[name]
        places = {place.name: place for place in _places(module)}
        kinds = ("weight", "bias") if "down_proj_bias" in places else ("weight",)
        count = places["down_proj"].shape[0]
        expected = {(expert, linear, kind) for expert in range(count) for linears in _LINEARS.values() for linear in linears for kind in kinds}
        if differing := {f"{name}.{expert}.{linear}.{kind}" for expert, linear, kind in expected ^ tensors.keys()}:
            raise Error(
                f"{name} has {count} experts, and the checkpoint lacks or adds {_listed(differing)}; pass a model that was made from the "
                "checkpoint's config"
            )

        def together(part: str, kind: str, read: _Read) -> Tensor:
            linears = [torch.stack([read(tensors[expert, linear, kind]) for expert in range(count)]) for linear in _LINEARS[part]]
            # The rows of gate and up alternate, or up follows gate.
            return torch.cat(linears, 1) if getattr(module, "is_concatenated", True) else torch.stack(linears, 2).flatten(1, 2)

        def values(part: str, kind: str, key: str, swapped: bool) -> dict[str, Tensor]:
            return {key: together(part, kind, self._stored.values).transpose(1, -1 if swapped else 1)}

        formats = {weight.format for (_, _, kind), weight in tensors.items() if kind == "weight"}
        if len(formats) == 1 and _is_experts(module, next(iter(formats))):
            for part in _LINEARS:
                shape, own = _tried(f"{name}.{part}", partial(together, part, "weight", _empty)).shape, _stacked_shape(places[part])
                if tuple(shape) != own:
                    raise _other_shape(f"{name}.{part}", tuple(shape), own)
            self._experts[name] = {part: partial(together, part, "weight") for part in _LINEARS}
            filled = [(part, "_bias", "bias") for part in _LINEARS if len(kinds) == 2]
        else:
            filled = [(part, suffix, kind) for part in _LINEARS for suffix, kind in zip(("", "_bias"), kinds)]
        for part, suffix, kind in filled:
            place, key = places[part + suffix], f"{name}.{part}{suffix}"
            if _is_quantized(module) and not suffix:
                raise Error(f"{key} is quantized in the model and not in the checkpoint; pass an unquantized model")
            shape = tuple(_tried(key, lambda: together(part, kind, _empty)).shape)
            # Llama 4 has the transposes.
            swapped = not suffix and shape != place.shape
            _require_shape(key, (shape[0], *shape[:0:-1]) if swapped else shape, place)
            self._values[key] = partial(values, part, kind, key, swapped)
        return {f"{alias}.{place}" for alias in self._names[id(module)] for place in places}

    def _shapes(self, group: _Group) -> dict[str, Tensor]:
        """Returns the tensors that a group becomes, on the device meta."""
        result: dict[str, Tensor] = _tried(group.key, lambda: self._made(group, _empty))
        return result

    def _made(self, group: _Group, read: _Read) -> dict[str, Tensor]:
        """Returns the tensors of the model that a group becomes, by key."""
        weights = self._stored.weights
        if group.sources[0][1] is None:
            return {group.key: read(weights[group.sources[0][0]])}
        assert self._facts is not None, "only transformers has converters"
        result: dict[str, Tensor] = self._facts.converted(group.key, group.sources, lambda name: read(weights[name]))
        return result

    def _merged(self, group: _Group, read: _Read) -> Tensor:
        """Returns a part `[E, M, ...]` of experts' weights, such as the codes.

        The converter of the values stacks rows, so it stacks the rows of a part as well.
        """
        made, module = self._made(group, read)[group.key], self._places[group.key].module
        converted = group.sources[0][1] is not None
        return made.transpose(1, 2) if converted and getattr(module, "is_transposed", False) else made

    def run(self) -> list[str]:
        """Reads all tensors, and then changes the model. Returns the names of quantized modules."""
        made = {name: self._quantized_linear(self._modules[name], weight) for name, weight in self._linear.items()}
        made |= {name: self._quantized_experts(name, parts) for name, parts in self._experts.items()}
        values: dict[str, Tensor] = {}
        first: dict[int, str] = {}
        for make in self._values.values():
            for key, value in make().items():
                place = self._places[key]
                values[key] = value.to(self._target(place), place.tensor.dtype).contiguous()
                other = first.setdefault(id(place.tensor), key)
                if other != key and not torch.equal(values[other], values[key]):
                    raise Error(f"the model ties {other} and {key}, which differ in the checkpoint; set tie_word_embeddings=False in its config")
        replaced = [(self._names[id(self._modules[name])], module) for name, module in made.items()]
        put(self._model, replaced)
        self._fill(values)
        if self._facts is not None:
            self._facts.finish(self._device or torch.device("cpu"))
        if self._device is not None:
            self._model.to(self._device)
        return [name for names, _ in replaced for name in names]

    def _target(self, place: _Place) -> torch.device:
        """Returns the device to load a tensor to."""
        return self._device or (torch.device("cpu") if place.tensor.is_meta else place.tensor.device)

    def _quantized_linear(self, module: nn.Module, weight: Weight) -> nn.Module:
        place = next(place for place in _places(module) if place.name == "weight")
        dtype = module.weight_dtype if isinstance(module, QuantizedLinear) else place.tensor.dtype
        bias: nn.Parameter | None = getattr(module, "bias")
        weights = self._stored.quantized(weight).to(self._target(place))
        return adopt(QuantizedLinear(weights, bias, dtype, *self._rounding(module), self._input_scale(module)), module)

    def _rounding(self, module: nn.Module) -> tuple[RoundedActivations | None, bool]:
        """Returns the `activation_format` and `round_weights` of the module that replaces one."""
        if self.activations[0] is None and isinstance(module, (QuantizedLinear, QuantizedExperts)):
            return module.activation_format, module.round_weights or self.activations[1]
        return self.activations

    def _input_scale(self, module: nn.Module) -> GlobalScale | None:
        """Returns the given global scale of inputs of the layer that replaces a module."""
        if self.activations[0] is not None or not isinstance(module, QuantizedLinear):
            return None
        given = module.input_global_scale
        return None if given is None or given.is_meta else GlobalScale(given, "divisor")

    def _quantized_experts(self, name: str, parts: dict[str, Callable[[_Read], Tensor]]) -> nn.Module:
        module, made = self._modules[name], {}
        places = {place.name: place for place in _places(module)}
        for part, merge in parts.items():
            codes, scales, numbers = (merge(read) for read in (self._stored.codes, self._stored.scales, _numbers))
            if not numbers.eq(numbers[:, :1]).all():
                raise Error(f"{name} has different global scales for gate and up, which it multiplies at once; quantize both with the same one")
            format = "nvfp4" if numbers.shape[2] else "mxfp4"
            made[part] = _experts.Experts(
                codes.contiguous(),
                scales.contiguous(),
                format=cast(LayerFormat, format),
                global_scales=numbers[:, 0, 0] if format == "nvfp4" else None,
                direction="divisor" if format == "nvfp4" else None,
            ).to(self._target(places[part]))
        return adopt(QuantizedExperts(module, made["gate_up_proj"], made["down_proj"], *self._rounding(module)), module)

    def _fill(self, values: dict[str, Tensor]) -> None:
        """Copies values into the model's tensors, or replaces those on another device."""
        owners: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in self._model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    owners.setdefault(id(tensor), []).append((tensors, name))
        for key, value in values.items():
            tensor = self._places[key].tensor
            if tensor.device == value.device:
                with torch.no_grad():
                    tensor.copy_(value)
                continue
            new: Any = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            for tensors, name in owners[id(tensor)]:
                tensors[name] = new


def _numbers(weight: Weight) -> Tensor:
    """Returns the global scale for each row, `[..., M, 1]`, or `[..., M, 0]` without one."""
    numbers = [] if weight.global_scale is None else [weight.global_scale]
    rows = (*weight.shape[:-2], weight.shape[-1]) if weight.is_transposed else weight.shape[:-1]
    return torch.tensor(numbers, dtype=torch.float32).expand(*rows, len(numbers))


def _empty(weight: Weight) -> Tensor:
    return torch.empty(weight.shape, device="meta")


def _tried(key: str, make: Callable[[], Any]) -> Any:
    """Makes a tensor of several, whose shapes or number may be wrong."""
    try:
        return make()
    except Exception as why:
        raise Error(f"{key} cannot be made of the checkpoint's tensors: {why}; tensors are missing, or have other shapes") from why


def _is_quantized(module: nn.Module) -> bool:
    return isinstance(module, (QuantizedLinear, QuantizedExperts))


def _takes(module: nn.Module, format: str | None) -> bool:
    """Returns whether a linear layer can have weights in a format."""
    return format in ("nvfp4", "mxfp4") and (isinstance(module, QuantizedLinear) or is_linear(module, format))


def _is_experts(module: nn.Module | None, format: str | None = "nvfp4") -> bool:
    """Returns whether a module is experts that can have weights in a format."""
    if isinstance(module, QuantizedExperts):
        return format in ("nvfp4", "mxfp4")
    return module is not None and format in ("nvfp4", "mxfp4") and QuantizedExperts.replaces(module, format)


def _places(module: nn.Module | None) -> Iterator[_Place]:
    """Yields the tensors of a module that checkpoints have, under their names before quantizing."""
    if module is None:
        return
    if isinstance(module, QuantizedLinear):
        yield _Place(module, "weight", module.weight_packed)
    elif isinstance(module, QuantizedExperts):
        yield from (_Place(module, name, getattr(module, f"{name}_packed")) for name in _LINEARS)
    kept = {} if _is_quantized(module) else {name: x for name, x in module._buffers.items() if name not in module._non_persistent_buffers_set}
    yield from (_Place(module, name, x) for name, x in (*module._parameters.items(), *kept.items()) if x is not None)


def _stacked_shape(place: _Place) -> tuple[int, ...]:
    """Returns the shape `[E, M, K]` of experts' weights. The module may have the transposes."""
    count, rows, cols = place.shape
    transposed = not _is_quantized(place.module) and getattr(place.module, "is_transposed", False)
    return (count, cols, rows) if transposed else (count, rows, cols)


def _require_shape(key: str, found: tuple[int, ...], place: _Place) -> None:
    if found != place.shape:
        raise _other_shape(key, found, place.shape)


def _other_shape(key: str, found: tuple[int, ...], expected: tuple[int, ...]) -> Error:
    return Error(
        f"{key} has shape {list(found)} in the checkpoint and must have {list(expected)}; pass a model that was made from the checkpoint's config"
    )


def _listed(names: Iterable[str], most: int = 8) -> str:
    """Joins names for a message."""
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
