"""Configs and names in files of transformers' models with quantized layers."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from microscale._errors import Error
from microscale._linear import QuantizedLinear
from microscale._mixtures import QuantizedExperts

#: Words of compressed-tensors' configs for formats: name, strategy and dtype of scales, and block.
_WORDS = {
    "nvfp4": ("nvfp4-pack-quantized", "tensor_group", "torch.float8_e4m3fn", 16),
    "mxfp4": ("mxfp4-pack-quantized", "group", "torch.uint8", 32),
}
#: The version of compressed-tensors whose config this is.
_VERSION = "0.20.0"
_EXPERTS = (
    "transformers 5.24 leaves out the global scales of experts in nvfp4, and makes their weights thousands of times too large, without an "
    "error; vLLM and microscale.torch.load_quantized read them right. Experts in mxfp4, or in nvfp4 with global_scale=\"none\", all read right"
)
_UNQUANTIZED_EXPERTS = (
    "transformers 5.24 refuses to load experts that are unquantized in a quantized model; vLLM and microscale.torch.load_quantized load them"
)


class Quantizer(HfQuantizer):  # type: ignore[misc]
    """Hooks of transformers for a model with quantized layers: what `save_pretrained` writes."""

    requires_calibration = False
    is_trainable = True
    is_qat_trainable = True
    is_compileable = True

    def __init__(self) -> None:
        """Takes no config: the model has its layers."""

    def is_serializable(self, **_: Any) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel, *_: Any, **__: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Updates the config, and returns the state with names that transformers can rename.

        Raises an error if transformers could not load the files.
        """
        describe(model)
        files = _Files(model)
        if len({module.format for module in _experts(model).values()}) > 1:
            raise Error("experts are in nvfp4 and in mxfp4, which transformers reads as one format; quantize all experts to the same format")
        names = files.of_experts()
        if files.unquantized_experts():
            warnings.warn(_UNQUANTIZED_EXPERTS, stacklevel=4)
        if any(bool((module.down_proj_slots[:, 0] != 1).any()) for module in _experts(model).values() if module.format == "nvfp4"):
            warnings.warn(_EXPERTS, stacklevel=4)
        return {names.get(name, name): tensor for name, tensor in model.state_dict().items()}, {}


def has_conversions(model: nn.Module) -> bool:
    """Returns whether files of a model may have other tensors than it, as in transformers 5."""
    return isinstance(model, PreTrainedModel) and find_spec("transformers.core_model_loading") is not None


def require_unquantized(model: nn.Module) -> None:
    """Raises an error if another quantizer of transformers has quantized a model."""
    for name, part in _models(model).items():
        quantizer = getattr(part, "hf_quantizer", None)
        if quantizer is not None and not isinstance(quantizer, Quantizer):
            raise Error(f"{name or 'the model'} was quantized by {type(quantizer).__name__}; load the unquantized model")


def require_described() -> None:
    """Raises an error if transformers saves a model whose config does not name quantized layers.

    If only a part of a model was quantized, only that part's config names its layers. From files of
    the model, transformers would load random weights in their place, without an error.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        saved = frame.f_locals.get("self") if frame.f_code.co_name == "save_pretrained" else None
        if isinstance(saved, PreTrainedModel) and not isinstance(getattr(saved, "hf_quantizer", None), Quantizer):
            raise Error(
                f"the config of {type(saved).__name__} does not name its quantized layers, in the place of which transformers would load "
                "random weights; call quantize_ with this model before you save it, with filter_fn=lambda *_: False to quantize nothing more"
            )
        frame = frame.f_back


def describe(model: nn.Module) -> None:
    """Sets `config.quantization_config` of transformers' models that have quantized layers.

    These are the model, or the outermost of its parts that are such models.
    """
    found = _models(model)
    for name, part in found.items():
        if not _is_quantized(part):
            continue
        described = isinstance(getattr(part, "hf_quantizer", None), Quantizer)
        part.hf_quantizer = Quantizer()
        # Models in models are described with these.
        if any(other != name and (not other or name.startswith(other + ".")) for other in found):
            continue
        if not described:
            _own_config(part)
        part.config.quantization_config = _quantization_config(part)


def _is_quantized(model: nn.Module) -> bool:
    return any(isinstance(module, (QuantizedLinear, QuantizedExperts)) for module in model.modules())


def _own_config(model: PreTrainedModel) -> None:
    """Gives a model a config of its own. Other models may have been made with the same object."""
    shared, own = model.config, copy.copy(model.config)
    for module in model.modules():
        if vars(module).get("config") is shared:
            module.config = own


def _models(model: nn.Module) -> dict[str, PreTrainedModel]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}


def _experts(model: nn.Module) -> dict[str, QuantizedExperts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedExperts)}


def _quantization_config(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the config that compressed-tensors reads.

    Its lists have names of modules and of files: transformers compares the former, engines the
    latter.
    """
    files = _Files(model)
    layers: dict[str, list[str]] = {}
    unquantized = []
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if isinstance(module, QuantizedLinear):
            layers.setdefault(module.format, []).append(name)
        elif isinstance(module, QuantizedExperts):
            own = {place for place in (name, *(file.rpartition(".")[0].rpartition(".")[0] for file in files.experts(name)[:1]))}
            layers.setdefault(module.format, []).extend(rf"re:(.*\.)?{re.escape(place)}\.\d+\." for place in sorted(own))
        elif isinstance(module, nn.Linear) or (weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding)):
            unquantized.append(name)
    groups = {
        f"group_{i}": _group(format, ["Linear"] if len(layers) == 1 else files.both(names))
        for i, (format, names) in enumerate(layers.items())
    }
    return {
        "config_groups": groups,
        "format": _WORDS[next(iter(layers))][0] if len(layers) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": sorted({*files.both(unquantized), *files.unquantized_experts()}),
        "kv_cache_scheme": None,
        "moe_sparsity_config": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": _VERSION,
    }


def _group(format: str, targets: list[str]) -> dict[str, Any]:
    word, strategy, scale_dtype, block = _WORDS[format]
    weights = {
        "dynamic": False,
        "group_size": block,
        "num_bits": 4,
        "scale_dtype": scale_dtype,
        "strategy": strategy,
        "symmetric": True,
        "type": "float",
    }
    return {"format": word, "input_activations": None, "output_activations": None, "targets": targets, "weights": weights}


def _one_by_one() -> Iterable[str]:
    """Returns classes of experts that transformers splits into layers in quantized models."""
    try:
        from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION
    except ImportError:
        return ()
    return [name for name, facts in MODULES_TO_PATCH_FOR_QUANTIZATION.items() if "compressed-tensors" in facts["quantization_methods"]]


class _Files:
    """The names of a model's tensors in files, by the conversions of transformers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def _saved(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors that `save_pretrained` makes of a state."""
        if find_spec("transformers.core_model_loading") is None:
            # Before version 5 the tensors of files were the model's.
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        try:
            result: dict[str, Tensor] = revert_weight_conversion(self._model, tensors)
            return result
        except Exception:
            # `save_pretrained` will raise the same error.
            return tensors

    def _renamed(self, names: list[str]) -> dict[str, str]:
        """Returns the names in files of tensors that are not converted."""
        saved = self._saved({name: torch.tensor(i) for i, name in enumerate(names)})
        return {names[int(number)]: name for name, number in saved.items()}

    def both(self, modules: list[str]) -> list[str]:
        """Returns names of modules and their names in files. Patterns stay."""
        plain = [name for name in modules if not name.startswith("re:")]
        renamed = self._renamed([f"{name}.weight_packed" for name in plain]).values()
        return sorted({*modules, *(name.removesuffix(".weight_packed") for name in renamed)})

    def experts(self, name: str) -> list[str]:
        """Returns the names in files of experts' linear layers: gate, up and down of each expert.

        The list is empty if files do not have the experts one by one.
        """
        module = self._model.get_submodule(name)
        parts = {part: getattr(module, f"{part}_packed").shape[:2] for part in ("gate_up_proj", "down_proj")}
        # Numbers for rows show where a conversion puts each row.
        rows = {part: torch.arange(shape.numel()).reshape(*shape, 1) for part, shape in parts.items()}
        rows["down_proj"] += rows["gate_up_proj"].numel()
        transposed = getattr(module, "is_transposed", False)
        saved = self._saved({f"{name}.{part}": x.transpose(1, 2) if transposed else x for part, x in rows.items()})
        found = {int(x.flatten()[0]): (file, x.flatten()) for file, x in saved.items() if x.numel()}
        names = []
        for expert in range(module._count()):
            for _, part, own in module._linears():
                expected = rows[part][expert, own].flatten()
                file, numbers = found.get(int(expected[0]), ("", expected))
                if not file.endswith(".weight") or not numbers.equal(expected):
                    return []
                names.append(file.removesuffix(".weight"))
        return names

    def unquantized_experts(self) -> list[str]:
        """Returns the names in files of unquantized linear layers that the model has stacked."""
        together = {name: x.to("meta") for name, x in self._model.named_parameters() if x.dim() == 3}
        saved = self._saved({name: x.detach() for name, x in together.items()})
        return [name.removesuffix(".weight") for name, x in saved.items() if name.endswith(".weight") and x.dim() == 2]

    def of_experts(self) -> dict[str, str]:
        """Returns names that transformers can rename for experts' tensors, by name in the state."""
        given: dict[str, str] = {}
        for name, module in self._model.named_modules():
            if type(module).__name__ in _one_by_one():
                raise Error(
                    f"transformers loads the experts of a quantized {type(self._model).__name__} one by one, and {name} has them in one "
                    "tensor; save model.state_dict() with safetensors.torch.save_file, which load_quantized loads"
                )
        for name, module in _experts(self._model).items():
            own = [f"{name}.{expert}.{linear}" for expert in range(module._count()) for linear, _, _ in module._linears()]
            files = self.experts(name)
            biased = module.gate_up_proj_bias is not None or module.down_proj_bias is not None
            if not files or biased:
                raise Error(
                    f"files of {type(self._model).__name__} have the experts of {name} in one tensor, which compressed-tensors cannot have "
                    "quantized; save model.state_dict() with safetensors.torch.save_file, which load_quantized loads, or exclude the experts"
                )
            for kept in (2, 3):
                tails = [f"{name}.{'.'.join(file.split('.')[-kept:])}" for file in files]
                renamed = self._renamed([f"{tail}.weight_packed" for tail in tails])
                if [renamed[f"{tail}.weight_packed"] for tail in tails] == [f"{file}.weight_packed" for file in files]:
                    break
            else:
                raise Error(
                    f"{name} has unknown names in files of {type(self._model).__name__}; save model.state_dict() with "
                    "safetensors.torch.save_file, which load_quantized loads"
                )
            parts = ("weight_packed", "weight_scale", "weight_global_scale")
            given |= {f"{place}.{part}": f"{tail}.{part}" for place, tail in zip(own, tails) for part in parts}
        return given


class Names:
    """The keys in a model of tensors in files, by the conversions of transformers."""

    def __init__(self, model: PreTrainedModel, keys: Iterable[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._model, self._keys = model, dict.fromkeys(keys, True)
        self._conversions = get_model_conversion_mapping(model)
        self._renamings = [each for each in self._conversions if isinstance(each, WeightRenaming)]
        self._converters = [each for each in self._conversions if isinstance(each, WeightConverter)]

    def find(self, name: str) -> tuple[str, str | None]:
        """Returns a tensor's key in the model, and the pattern of its converter or None."""
        from transformers.core_model_loading import rename_source_key

        prefix = self._model.base_model_prefix
        key, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._keys)
        if key not in self._keys and name in self._keys:
            return name, None
        return key, pattern

    def converted(self, key: str, sources: list[tuple[str, str]], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Returns the tensors that a converter makes of others, by key.

        `sources` are names of tensors, which `read` reads, with their patterns.
        """
        converter = copy.deepcopy(next(each for each in self._converters if sources[0][1] in each.source_patterns))
        for name, pattern in sources:
            converter.add_tensor(key, name, pattern, read(name))
        made = converter.convert(key, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def order(self, name: str) -> Any:
        """Returns a sort key that orders experts by number."""
        from transformers.core_model_loading import dot_natural_key

        return dot_natural_key(name)

    def tolerated(self, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
        """Removes the missing and unexpected keys that the model's class expects."""
        found = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
        self._model._adjust_missing_and_unexpected_keys(found)
        return found.missing_keys, found.unexpected_keys

    def finish(self, device: torch.device) -> None:
        """Initializes tensors that files lack on `device`, and keeps the conversions for saving."""
        model = self._model
        for tensor in (*model.parameters(), *model.buffers()):
            tensor._is_hf_initialized = True
        for module in model.modules():
            module._is_hf_initialized = True
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and tensor.is_meta:
                        empty = torch.empty_like(tensor, device=device)
                        tensors[name] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                        module._is_hf_initialized = False
        model.initialize_weights()
        model._weight_conversions = [each for each in self._conversions if each.was_used()]
        if not _is_quantized(model) and getattr(model.config, "quantization_config", None) is not None:
            # All weights were dequantized, so the config of the files does not hold for the model.
            _own_config(model)
            del model.config.quantization_config
