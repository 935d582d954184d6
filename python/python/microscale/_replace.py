"""Replaces the linear layers and experts of models with quantized modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from microscale._errors import Error
from microscale._linear import QuantizedLinear
from microscale._mixtures import QuantizedExperts
from microscale._operators import block_of
from microscale._states import transformers_facts
from microscale._types import LayerFormat

#: Names of output heads. Names that inner layers have too are whole names.
HEADS = (
    *("*lm_head", "*lm_head.decoder", "*lm_head.out_proj", "*lm_heads.*", "*embed_out", "*unembed"),
    *("*cls.predictions.decoder", "*mlm_score.decoder", "output_projection", "*.output_projection", "output_layer", "*.output_layer"),
    *("head", "output", "proj_out", "lm_loss", "pred_layer.proj", "vocab_projector", "language_model.output"),
)
#: Attributes for a module's hooks. New modules share the dictionaries, so that handles still remove
#: their hooks.
_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook"),
)

#: Returns whether to quantize a module, from the module and its fully qualified name.
Filter = Callable[[nn.Module, str], bool]


def quantize_(
    model: nn.Module,
    recipe: LayerFormat | Mapping[str, Any] = "mxfp4",
    *,
    filter_fn: Filter | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
) -> list[str]:
    """Quantizes the linear layers of a model in place, and the experts of transformers' mixtures.

    Layers become :class:`QuantizedLinear`, and experts :class:`QuantizedExperts`. If a layer cannot
    be quantized, the error names it and the model is unchanged. These modules stay unquantized:

    - output heads: the modules that `get_output_embeddings()` returns, for the model and its parts,
      and layers with the name of a head, such as `lm_head`, `embed_out` or
      `cls.predictions.decoder`;
    - layers that share their weights with another module, such as a head tied to an embedding;
    - layers whose rows are no whole number of blocks, and layers without elements;
    - subclasses of `nn.Linear`, and layers with other tensors than a weight and a bias, such as
      those with a parametrization, weight norm or a pruning mask.

    The new modules keep `training`, forward and backward hooks, public attributes and the bias. A
    module with two names is replaced under both. On the device meta, the new modules are on it too.
    Each layer and each expert has a global scale of its own; for checkpoints that engines serve,
    where fused layers share one, use :func:`microscale.checkpoint.quantize`.

    A model of transformers gets a `config.quantization_config`, so that `save_pretrained` writes a
    checkpoint which transformers and :func:`load_quantized` read. Call this function with the model
    that you save: a part of it has another config.

    Args:
        model: the model, on CPUs, NVIDIA GPUs or the device meta.
        recipe: a format, or a mapping with `format`, with `activation_format` and `round_weights`
            of the new modules, and with other options of :func:`microscale.quantize`.
        filter_fn: if given, is called with the module and its fully qualified name, as in torchao.
            Returns whether to quantize the module.
        include: patterns of output heads to quantize too.
        exclude: patterns of layers that stay unquantized. They override `include`.

    Returns:
        The names of the modules that were quantized.

    Raises:
        Error: a layer that cannot be quantized, or a pattern in `include` for a tied head.
    """
    options = {"format": recipe} if isinstance(recipe, str) else dict(recipe)
    format = options.setdefault("format", "mxfp4")
    block_of(format)
    facts = transformers_facts()
    if facts is not None:
        facts.require_unquantized(model)
    chosen = _chosen(model, format, tuple(include), tuple(exclude), filter_fn)
    made = []
    for names, module in chosen:
        try:
            made.append(replacement(module, **options))
        except Exception as why:
            if why.args and isinstance(why.args[0], str):
                why.args = (f"{names[0]}: {why.args[0]}", *why.args[1:])
            raise
    replaced = [(names, new) for (names, _), new in zip(chosen, made)]
    put(model, replaced)
    return [name for names, _ in replaced for name in names]


def replacement(module: nn.Module, **options: Any) -> nn.Module:
    """Quantizes a linear layer or experts to a module that can replace it."""
    if "forward" in vars(module):
        raise Error("its method forward was replaced, as accelerate's hooks do; remove the hooks, quantize, and dispatch the model again")
    if isinstance(module, nn.Linear):
        return adopt(QuantizedLinear.from_linear(module, **options), module)
    return adopt(QuantizedExperts.from_experts(module, **options), module)


def adopt(new: nn.Module, old: nn.Module) -> nn.Module:
    """Gives a module the mode, hooks, biases and attributes of the module that it replaces."""
    new.training = old.training
    # Optimizers and other modules may hold the biases.
    new._parameters.update({name: own for name, own in old._parameters.items() if name in new._parameters})
    own = vars(old)
    vars(new).update({name: own[name] for name in _HOOKS if name in own})
    for name, value in own.items():
        if not name.startswith("_") and not hasattr(new, name):
            setattr(new, name, value)
    return new


def put(model: nn.Module, replaced: list[tuple[list[str], nn.Module]]) -> None:
    """Replaces the modules with these names, and updates the configs of transformers' models."""
    for names, module in replaced:
        for name in names:
            parent, _, own = name.rpartition(".")
            model.get_submodule(parent)._modules[own] = module
    facts = transformers_facts()
    if facts is not None:
        facts.describe(model)


def is_linear(module: nn.Module, format: str) -> bool:
    """Returns whether a :class:`QuantizedLinear` can replace a module."""
    if type(module) is not nn.Linear or vars(module).get("_buffers") or vars(module).get("_modules"):
        return False
    weight = module._parameters.get("weight")
    if module._parameters.keys() != {"weight", "bias"} or not isinstance(weight, nn.Parameter):
        return False
    return weight.numel() > 0 and weight.shape[1] % block_of(format) == 0


def names_of(model: nn.Module) -> list[tuple[list[str], nn.Module]]:
    """Returns the modules of a model with all of their names."""
    found: dict[int, tuple[list[str], nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), ([], module))[0].append(name)
    return list(found.values())


def _chosen(
    model: nn.Module,
    format: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    filter_fn: Filter | None,
) -> list[tuple[list[str], nn.Module]]:
    """Returns the modules to quantize with all of their names."""
    modules = names_of(model)
    heads, owners = _heads(model), _owners(modules)

    def matches(names: list[str], patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)

    chosen = []
    for names, module in modules:
        if not (is_linear(module, format) or QuantizedExperts.replaces(module, format)) or matches(names, exclude):
            continue
        weight, included = module._parameters.get("weight"), matches(names, include)
        others = [] if weight is None else [name for name in owners[_address(weight)] if name not in names]
        if included and others:
            raise Error(
                f"{names[0]} shares its weights with {others[0]}, which would keep the unquantized values; untie them first, or leave it out "
                "of include"
            )
        head = id(module) in heads or matches(names, HEADS)
        if others or (head and not included) or not all(filter_fn is None or filter_fn(module, name) for name in names):
            continue
        if "" in names:
            raise Error("the model is a layer itself; use QuantizedLinear.from_linear or QuantizedExperts.from_experts")
        chosen.append((names, module))
    return chosen


def _heads(model: nn.Module) -> set[int]:
    """Returns the ids of the output heads of a model and its parts, and of the modules in them."""
    heads: set[int] = set()
    for module in model.modules():
        ask = getattr(module, "get_output_embeddings", None)
        try:
            head = ask() if callable(ask) else None
        except (AttributeError, NotImplementedError, TypeError):
            continue
        if isinstance(head, nn.Module):
            heads |= {id(inner) for inner in head.modules()}
    return heads


def _owners(modules: list[tuple[list[str], nn.Module]]) -> dict[int, list[str]]:
    """Returns the names of the modules that have a parameter, by its address."""
    owners: dict[int, list[str]] = {}
    for names, module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(_address(parameter), []).extend(names)
    return owners


def _address(parameter: nn.Parameter) -> int:
    """Returns the address of a parameter's memory, or of its object if it has none."""
    known = (parameter.is_cpu or parameter.is_cuda) and not is_lazy(parameter)
    return (parameter.data_ptr() if known else 0) or id(parameter)
