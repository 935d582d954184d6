"""Compares the decisions of `microscale quantize` about each transformers class with its modules.

    python scripts/readers/architectures.py --microscale target/release/microscale
        [--out architectures.json] [CLASS or MODEL_TYPE ...]

Each class is built without memory for its weights. The script writes a small checkpoint with the
tensor names and numbers of dimensions that transformers saves, quantizes it to MXFP4, and checks:

- Every quantized tensor is the weight of a linear layer, or of an expert that the loader merges with
  the others.
- No linear layer is copied as an embedding, a norm or a convolution because of a word elsewhere in
  its name.
- compressed-tensors matches exactly the quantized layers: `ignore` lists the other linear layers,
  including tied heads, under the module names of transformers.
- A warning names transformers if initialization reads `.weight` of a quantized layer, or if a
  converter of the loader drops unquantized weights.

Each class is tried with its default config, with tied weights if it can tie them, and with its
module names as tensor names. The exit code is 1 if a class differs or cannot be built.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from compressed_tensors.utils.match import match_named_modules
from reader_small import LAYERS, classes, small_config
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION
from transformers.utils import logging

VERSIONS = {package: version(package) for package in ("transformers", "compressed-tensors", "torch")}
DEPTH, SECONDS, SMALL = 8, 100, 5_000_000
# Reasons to copy a tensor that are wrong for a linear layer, unless its name or its parent's name
# contains the word: small projections of embeddings, patches and norms may stay unquantized.
NOT_LINEAR = {"embedding": ("emb", "patch"), "norm": ("norm",), "convolution": ("conv",), "Conv1D": ()}


def numbered(name: str) -> str:
    """Returns a name with `*` for each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)


def few(names: object) -> str:
    kinds = sorted({numbered(str(name)) for name in names})
    return ", ".join(kinds[:4]) + (f" and {len(kinds) - 4} more" if len(kinds) > 4 else "")


def shallow(config: PreTrainedConfig) -> PreTrainedConfig:
    """Reduces a default config to few layers of all kinds."""
    depths = {value for key, value in vars(config).items() if re.fullmatch(LAYERS, key) and isinstance(value, int)}
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shallow(value)
        elif isinstance(value, (list, tuple)) and len(value) in depths and len(value) > DEPTH:
            setattr(config, key, type(value)(value[:DEPTH]))
        elif re.fullmatch(LAYERS, key) and isinstance(value, int) and value > DEPTH:
            setattr(config, key, DEPTH)
    return config


def build(name: str, tied: bool | None, small: bool) -> PreTrainedModel:
    """Builds a class with its default config, or a small config if that fails."""
    made, failure = getattr(transformers, name), None
    configs = {"default": lambda: shallow(made.config_class()), "small": lambda: small_config(made)}
    for what, make in configs.items():
        if small and what == "default":
            continue
        try:
            config = make()
            if tied is not None:
                config.tie_word_embeddings = tied
            with torch.device("meta"):
                return made(config)
        except Exception as error:  # noqa: BLE001  (some default configs fit no model)
            failure = error
    raise failure


def saved(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the tensors of a model by parameter name, without tied copies."""
    state, kept = model.state_dict(keep_vars=True), {}
    for target, source in (model.all_tied_weights_keys or {}).items():
        if state.get(target) is state.get(source):
            state.pop(target, None)
    for name, tensor in state.items():
        if all(tensor is not other for other in kept.values()):
            kept[name] = tensor
    return {name: tensor.detach() for name, tensor in kept.items()}


def write(directory: Path, model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a checkpoint with these names and ranks, and the same shapes if it is small."""
    shapes = {0: [], 1: [64], 2: [32, 64], 3: [2, 32, 64]}
    real = sum(tensor.numel() for tensor in tensors.values()) < SMALL
    header, end = {}, 0
    for name, tensor in tensors.items():
        shape = list(tensor.shape) if real else shapes.get(tensor.ndim, [32, 64] + [1] * (tensor.ndim - 2))
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\x80\x3f" * (end // 2))
    model.config.architectures = [type(model).__name__]
    config = json.loads(model.config.to_json_string(use_diff=True)) | {"model_type": model.config.model_type, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))


@dataclass
class Decided:
    """The decisions of the program about a checkpoint.

    `fates` has the reason to copy each tensor, or None for a quantized one.
    """

    fates: dict[str, str | None]
    config: dict
    warnings: list[str]
    refused: str | None = None

    @classmethod
    def of(cls, program: Path, checkpoint: Path) -> Decided:
        plan, out = checkpoint.with_name("plan.json"), checkpoint.with_name("out")
        command = [program, "quantize", checkpoint, "--format", "mxfp4"]
        subprocess.run([*command, "--dry-run", "--json", plan], check=True, capture_output=True)
        fates = {tensor["name"]: tensor["copied"] for tensor in json.loads(plan.read_text())["tensors"]}
        done = subprocess.run([*command, "--out", out], capture_output=True, text=True)
        messages = [line.removeprefix("warning: ") for line in done.stderr.splitlines() if line.startswith("warning: ")]
        if done.returncode:
            return cls(fates, {}, messages, done.stderr.partition("error: ")[2].strip())
        return cls(fates, json.loads((out / "config.json").read_text())["quantization_config"], messages)


@dataclass
class Loader:
    """Maps tensor names of a file to parameters of transformers."""

    model: PreTrainedModel
    modules: dict[str, nn.Module]
    renamings: list[WeightRenaming]
    converters: list[WeightConverter]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Loader:
        steps = get_model_conversion_mapping(model)
        kinds = ([step for step in steps if isinstance(step, kind)] for kind in (WeightRenaming, WeightConverter))
        return cls(model, dict(model.named_modules()), *kinds)

    def parameter(self, file: str, state: dict) -> tuple[str, str | None]:
        """Returns the parameter of a tensor, and the source pattern of its converter."""
        name, source = rename_source_key(file, self.renamings, self.converters, self.model.base_model_prefix, state)
        return (file, None) if name not in state and file in state else (name, source)

    def packed(self, layer: str) -> str:
        """Returns the module name of a quantized layer."""
        for steps in ((self.renamings, self.converters), ([], [])):
            name = rename_source_key(f"{layer}.weight_packed", *steps)[0].removesuffix(".weight_packed")
            prefix = f"{self.model.base_model_prefix}."
            found = next((name for name in (name, prefix + name, name.removeprefix(prefix)) if name in self.modules), None)
            if found is not None:
                return found
        return name


def initialization_reads(model: PreTrainedModel, modules: dict[str, nn.Module], quantized: set[str]) -> set[str]:
    """Returns the quantized layers whose `.weight` initialization reads."""
    read, seen = set(), set()
    for name in sorted(quantized):
        if numbered(name) in seen:
            continue
        seen.add(numbered(name))
        weight = modules[name]._parameters.pop("weight")
        parts = name.split(".")
        above = [".".join(parts[:count]) for count in range(len(parts), -1, -1)]
        for at in above:
            owner = next(modules[up] for up in above if len(up) <= len(at) and isinstance(modules[up], PreTrainedModel))
            try:
                with torch.no_grad(), initialization.guard_torch_init_functions():
                    owner._init_weights(modules[at])
            except AttributeError as error:
                if "weight" in str(error):
                    read.add(name)
            except Exception:  # noqa: BLE001, S110  (some initializations fail on the meta device)
                pass
        modules[name]._parameters["weight"] = weight
    return read


def differences(program: Path, model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> tuple[Decided, list[str]]:
    """Returns the decisions about a model whose file has these tensors, and the wrong decisions."""
    loader, state = Loader.of(model), model.state_dict()
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "model"
        write(checkpoint, model, tensors)
        decided = Decided.of(program, checkpoint)
    wrong: dict[str, list[str]] = {}
    packed, dropped = set(), []
    for file, tensor in tensors.items():
        fate, (parameter, source) = decided.fates.get(file), loader.parameter(file, state)
        owner, _, leaf = parameter.rpartition(".")
        module = loader.modules.get(owner)
        linear = isinstance(module, nn.Linear) and leaf == "weight" and tensor.ndim == 2
        merged = source is not None and state.get(parameter) is not None and state[parameter].ndim == 3 and tensor.ndim == 2
        # The loader makes a linear layer per expert of Llama 4, and the program splits the experts.
        merged |= type(module).__name__ in MODULES_TO_PATCH_FOR_QUANTIZATION
        if fate is None and not linear and not merged:
            wrong.setdefault(f"quantized, but a {type(module).__name__} of {tensor.ndim} dimensions", []).append(file)
        if fate is None and not merged:
            packed.add(loader.packed(file.removesuffix(".weight")))
        near = ".".join(file.split(".")[-3:-1])
        misplaced = (kind in fate and not any(word in near for word in words) for kind, words in NOT_LINEAR.items()) if fate else ()
        if linear and any(misplaced):
            wrong.setdefault(f"copied as {fate}, but linear", []).append(file)
        if fate is not None and source is not None and source.endswith(".weight"):
            dropped.append(file)
    warned = any("transformers" in line for line in decided.warnings)
    if dropped and not warned and decided.refused is None:
        wrong["dropped by a converter of the loader, without a warning"] = dropped
    if decided.config:
        targets = [target for group in decided.config["config_groups"].values() for target in group["targets"]]
        matched = match_named_modules(model, targets, decided.config["ignore"])
        expected = {name for name, module in matched if isinstance(module, (nn.Linear, nn.Embedding))}
        if not warned:
            wrong |= {"expected quantized by the loader": sorted(expected - packed)} if expected - packed else {}
            wrong |= {"quantized, but no module of the loader": sorted(packed - expected)} if packed - expected else {}
        reads = initialization_reads(model, loader.modules, expected & packed)
        if reads and not warned:
            wrong["read by initialization, without a warning"] = sorted(reads)
    return decided, [f"{what}: {few(names)}" for what, names in wrong.items()]


def variants(name: str, small: bool) -> Iterator[tuple[str, PreTrainedModel, dict[str, torch.Tensor]]]:
    """Yields a class as saved, with tied weights, and with its module names as tensor names."""
    model = build(name, None, small)
    tensors = saved(model)
    model._weight_conversions = None
    with torch.device("meta"):
        files = revert_weight_conversion(model, dict(tensors))
    yield "as saved", model, files
    if not getattr(model.config, "tie_word_embeddings", False) and getattr(model, "_tied_weights_keys", None):
        tied = build(name, True, small)
        tied._weight_conversions = None
        with torch.device("meta"):
            yield "with tied weights", tied, revert_weight_conversion(tied, saved(tied))
    if files.keys() != tensors.keys():
        yield "under the names of its modules", model, tensors


def compare(program: Path, name: str, small: bool = False) -> dict:
    found: dict = {"class": name, "wrong": {}}
    for what, model, tensors in variants(name, small):
        decided, wrong = differences(program, model, tensors)
        found["model_type"] = model.config.model_type
        if what == "as saved":
            known = not any(line.startswith("the architecture ") for line in decided.warnings)
            found |= {"known": known, "warnings": decided.warnings}
            found |= {"refused": decided.refused} if decided.refused else {}
        if wrong:
            found["wrong"][what] = wrong
    return found


def too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microscale", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="results as JSON")
    parser.add_argument("names", nargs="*", help="classes or model types")
    args = parser.parse_args()
    logging.set_verbosity(50)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, too_long)
    entries = []
    for name in sorted(classes()):
        model_type = getattr(getattr(transformers, name).config_class, "model_type", "")
        if args.names and name not in args.names and model_type not in args.names:
            continue
        signal.alarm(SECONDS)
        try:
            try:
                entry = compare(args.microscale.resolve(), name)
            except subprocess.CalledProcessError:  # The program refuses shapes that contradict the config.
                entry = compare(args.microscale.resolve(), name, small=True)
        except Exception as error:  # noqa: BLE001  (the other classes run anyway)
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
            entry = {"class": name, "model_type": model_type, "not_built": why, "wrong": {}}
        signal.alarm(0)
        entries.append(entry)
        result = "not built" if "not_built" in entry else "DIFFERS" if entry["wrong"] else "same"
        lines = [f"{what}: {text}" for what, wrong in entry["wrong"].items() for text in wrong]
        print("\n    ".join([f"{result:9}  {entry['model_type']}, {name} {entry.get('not_built', '')}", *lines]), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"versions": VERSIONS, "classes": entries}, indent=1))
    unknown = sorted({entry["model_type"] for entry in entries if not entry.get("known", True)})
    failed = sum(bool(entry["wrong"]) for entry in entries)
    print(f"{len(entries)} classes, {failed} differ; architectures unknown to the program: {' '.join(unknown)}")
    return 1 if failed or any("not_built" in entry for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
