"""Compares the table of architectures with transformers: which weights are linear layers, and what their modules are called.

    python architectures.py --microscale target/release/microscale [MODEL_TYPE ...]

Each model that generates is built without memory for its weights, two layers deep, and written as a file without data under
the names that transformers saves. `quantize --dry-run` says what it takes each weight for. What is quantized must be a linear
layer; what is a linear layer must not be called an embedding, a norm or a convolution, unless the table says so. The exit code
is 1 if an architecture of the table differs; of others it is only said.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings
from transformers.models.auto import modeling_auto
from transformers.utils import logging

TABLE = Path(__file__).parent.parent / "checkpoint" / "src" / "names" / "architectures.rs"
MAPPINGS = [
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
]
LAYERS = r"num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|depth|num_(de|en)coder_layers"
EXPERTS = r"num_local_experts|num_experts|n_routed_experts|moe_num_experts"


def table() -> dict[str, dict]:
    """The rows of the table, by model_type: beginnings of names, the head, and the three lists."""
    source = TABLE.read_text()
    pair = r'\("([^"]*)", "([^"]*)"\)'
    lists = {name: re.findall(pair, body) for name, body in re.findall(r"const (\w+): &\[\(&str, &str\)\] = &\[(.*?)\];", source, re.S)}
    rows = {}
    for row in re.findall(r"Architecture \{(.*?)\.\.PLAIN", source[source.index("const TABLE") :], re.S):
        renamed = re.search(r"renamed: (\w+|&\[.*?\])", row, re.S)
        head = re.search(r'head: "([^"]*)"', row)
        rest = {key: re.search(rf"{key}: &\[(.*?)\]", row, re.S) for key in ("linear", "embeddings", "transposed")}
        described = {key: re.findall(r'"([^"]*)"', found[1]) if found else [] for key, found in rest.items()}
        described["renamed"] = [] if not renamed else lists.get(renamed[1]) or re.findall(pair, renamed[1])
        described["head"] = head[1] if head else "lm_head"
        types = re.sub(r"\\\s+", "", re.search(r'types:\s*"(.*?)"', row, re.S)[1])
        rows |= {name: described for name in types.split()}
    return rows


def module_of(name: str, renamed: list[tuple[str, str]]) -> str:
    for old, new in renamed:
        name = name.replace(old, new) if old.startswith(".") else name
    beginnings = [(old, new) for old, new in renamed if not old.startswith(".")]
    return next((new + name[len(old) :] for old, new in beginnings if name.startswith(old)), name)


def shrink(config: transformers.PreTrainedConfig) -> transformers.PreTrainedConfig:
    for key, value in list(vars(config).items()):
        small = 2 if re.fullmatch(LAYERS, key) else 4 if re.fullmatch(EXPERTS, key) else None
        if small is not None and isinstance(value, int) and value > small:
            setattr(config, key, small)
        if isinstance(value, transformers.PreTrainedConfig):
            shrink(value)
    return config


def build(name: str) -> transformers.PreTrainedModel:
    made = getattr(transformers, name)
    with torch.device("meta"):
        try:
            return made(shrink(made.config_class()))
        except Exception:  # noqa: BLE001  (some configs have lists as long as the layers)
            return made(made.config_class())


def saved_names(model: transformers.PreTrainedModel) -> dict[str, str]:
    """The name in a file of each parameter, as save_pretrained has it."""
    conversions = [step for step in get_model_conversion_mapping(model, add_legacy=False) if type(step).__name__ != "PrefixChange"]
    reverse = [step.reverse_transform() for step in conversions[::-1]]
    renamings = [step for step in reverse if isinstance(step, WeightRenaming)]
    return {name: apply_renamings(name, renamings) for name, _ in model.named_parameters()}


def write(directory: Path, model: transformers.PreTrainedModel, names: dict[str, str]) -> None:
    """A checkpoint of these names and shapes, without data."""
    header, end = {}, 0
    for name, parameter in model.named_parameters():
        start, end = end, end + 2 * parameter.numel()
        header[names[name]] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (directory / "config.json").write_text(json.dumps({"model_type": model.config.model_type, "architectures": [type(model).__name__]}))


def compare(program: Path, model: transformers.PreTrainedModel, row: dict) -> list[str]:
    names, wrong = saved_names(model), []
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch), model, names)
        plan = Path(scratch) / "plan.json"
        subprocess.run([program, "quantize", scratch, "--dry-run", "--json", plan], check=True, capture_output=True)
        fates = {tensor["name"]: tensor["copied"] for tensor in json.loads(plan.read_text())["tensors"]}
    for parameter, file in names.items():
        owner, _, leaf = parameter.rpartition(".")
        if leaf != "weight" or len(model.get_parameter(parameter).shape) < 2:
            continue
        module, fate, layer = model.get_submodule(owner), fates[file], file.removesuffix(".weight")
        kind = type(module).__name__
        if module_of(file, row["renamed"]) != parameter:
            wrong.append(f"{file} is {parameter}, not {module_of(file, row['renamed'])}")
        if fate is None and not isinstance(module, nn.Linear):
            wrong.append(f"{file} is quantized, and is a {kind}")
        if isinstance(module, nn.Linear) and fate in ("convolution", "Conv1D, which loaders take unquantized alone"):
            wrong.append(f"{file} is copied as a {fate}, and is a {kind}")
        if isinstance(module, nn.Linear) and fate == "embedding" and layer.endswith(tuple(row["embeddings"] or ["\0"])):
            wrong.append(f"{file} is among the embeddings, and is a {kind}")
    head = model.get_output_embeddings()
    called = next((name for name, module in model.named_modules() if module is head), None) if head is not None else None
    tied = getattr(model, "_tied_weights_keys", None) or {}
    generates = type(model).__name__.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))
    if generates and called and f"{called}.weight" in tied and called != row["head"]:
        wrong.append(f"the tied head is {called}, not {row['head']}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microscale", type=Path, required=True)
    parser.add_argument("types", nargs="*")
    args = parser.parse_args()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    rows, built, failed, unknown = table(), set(), 0, set()
    classes = {}
    for mapping in MAPPINGS:
        for model_type, names in getattr(modeling_auto, mapping, {}).items():
            for name in names if isinstance(names, (tuple, list)) else [names]:
                classes[name] = model_type
    for name, model_type in sorted(classes.items()):
        if args.types and model_type not in args.types:
            continue
        if model_type not in rows:
            unknown.add(model_type)
            continue
        try:
            wrong = compare(args.microscale.resolve(), build(name), rows[model_type])
        except Exception as error:  # noqa: BLE001  (a default config may be of no model)
            print(f"not built  {model_type}, {name}: {type(error).__name__}: {str(error)[:80]}")
            continue
        built.add(model_type)
        failed += bool(wrong)
        print("\n    ".join([f"{'DIFFERS' if wrong else 'same   '}    {model_type}, {name}", *wrong[:5]]))
    print(f"{len(built)} of {len(rows)} architectures built, {failed} models differ; not in the table: {' '.join(sorted(unknown))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
