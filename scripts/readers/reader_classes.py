"""Quantizes a small model of each transformers class, loads it, and compares with microscale.

    python scripts/readers/reader_classes.py --microscale target/release/microscale
        --out classes.json [--table classes.md] [CLASS ...]

Each class is saved in bf16 and quantized with default options to NVFP4 and MXFP4. transformers loads
the result twice: dequantized while it loads, and dequantized in the forward pass. The model that
`microscale dequantize` writes is the reference for the loading report, for every weight bit for bit,
and for logits if the model takes simple inputs. Each class runs in its own process. A run resumes:
it skips classes that are already in the results, unless they are named. The exit code is 1 if a
class loads wrong and `quantize` or `doctor` does not report it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path

os.environ["TQDM_DISABLE"] = "1"
import torch
import transformers
from reader_small import TASKS, classes, inputs, small_model
from transformers import PreTrainedModel
from transformers.utils import logging
from transformers.utils.quantization_config import CompressedTensorsConfig

FORMATS = ("nvfp4", "mxfp4")
MODES = {"load": True, "run": False}
SECONDS, BYTES, PARAMETERS = 240, 14 << 30, 320_000_000
VERSIONS = {package: version(package) for package in ("transformers", "compressed-tensors", "torch")}
# Parameters that remain if weights are dequantized in the first forward pass.
SCALES = ("weight_scale", "weight_global_scale", "weight_zero_point", "weight_shape", "input_global_scale")
# Maximum relative squared error of a 4-bit weight in any format.
QUANTIZED = 0.05

# A class that loads its voices from a file that `save_pretrained` omits, and has no loading info.
OMNI = "Qwen2_5OmniForConditionalGeneration"


class Wrong(Exception):
    """A difference between the loaded model and the reference."""


def few(names: object) -> str:
    """Returns the first names, with `*` for numbers, and the number of the others."""
    kinds = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", str(name)) for name in sorted(map(str, names))))
    return ", ".join(kinds[:3]) + (f" and {len(kinds) - 3} more" if len(kinds) > 3 else "")


def brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, Wrong):
        return text
    # The loader's own report names the conversion that failed.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        reported = getattr(frame.f_locals.get("loading_info"), "conversion_errors", None)
        if reported:
            name, why = next(iter(reported.items()))
            lines = str(why).strip().splitlines()
            why = next((line for line in reversed(lines) if "Error" in line), lines[-1])
            return f"conversion of {few([name])}: {' '.join(why.split())}"[:260]
    # The innermost function of transformers is more specific than the message.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/transformers/" in frame.filename]
    where = f" in {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{where}: {text}"[:260]


def run(program: Path, *args: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([program, *map(str, args)], capture_output=True, text=True)


def error_of(done: subprocess.CompletedProcess, directory: Path) -> str:
    return done.stderr.partition("error: ")[2].strip().replace(str(directory), "the checkpoint")[:300]


def load(made: type[PreTrainedModel], directory: Path, config: object | None) -> tuple[PreTrainedModel, dict[str, set]]:
    given = {} if config is None else {"quantization_config": config}
    if made.__name__ == OMNI:
        return made.from_pretrained(directory, dtype=torch.bfloat16, **given).eval(), {}
    model, info = made.from_pretrained(directory, dtype=torch.bfloat16, output_loading_info=True, **given)
    return model.eval(), {key: {str(name) for name in value} for key, value in info.items()}


def logits(model: PreTrainedModel, given: dict[str, torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**given).logits


def usable(model: PreTrainedModel) -> dict[str, torch.Tensor] | None:
    """Returns the first inputs that a model accepts and that give finite logits."""
    for given in inputs(model):
        try:
            if logits(model, given).isfinite().all():
                return given
        except Exception:  # noqa: BLE001, S112  (models raise anything)
            continue
    return None


def parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.named_parameters() if not name.endswith(SCALES)}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8) if values.ndim else values.reshape(1).view(torch.uint8)


def strange(info: dict[str, set], usual: dict[str, set]) -> list[str]:
    """Returns the keys that the loader reports, except those it reports for the original model."""
    found = {key: names - usual.get(key, set()) for key, names in info.items()}
    return [f"{key.replace('_keys', '')}: {few(names)}" for key, names in found.items() if names]


def joined(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Merges the experts of Llama 4, one linear layer each, into one transposed tensor."""
    expert = re.compile(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight")
    layers: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, weight in weights.items():
        if found := expert.fullmatch(name):
            layers.setdefault(found[1], {}).setdefault(found[2], []).append(weight.T)
    kept = {name: weight for name, weight in weights.items() if not expert.fullmatch(name)}
    for layer, parts in layers.items():
        kept[f"{layer}.gate_up_proj"] = torch.stack([torch.cat(pair, dim=1) for pair in zip(parts["gate"], parts["up"], strict=True)])
        kept[f"{layer}.down_proj"] = torch.stack(parts["down"])
    return kept


def compared(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    only = ours.keys() ^ theirs.keys()
    if only:
        raise Wrong(f"only one has {few(only)}")
    wrong = [name for name in ours if not same(ours[name], theirs[name])]
    if wrong:
        raise Wrong(f"other values: {few(wrong)}")


def by_transformers(made: type, quantized: Path, ours: tuple, given: dict | None, usual: dict, *, dequantize: bool) -> None:
    """Raises if transformers loads another model than `microscale dequantize` writes."""
    model, info = load(made, quantized, CompressedTensorsConfig(dequantize=dequantize))
    problems = strange(info, usual)
    if problems:
        raise Wrong("; ".join(problems))
    if given is None and not dequantize:
        model.hf_quantizer.compressor.decompress_model(model)
    result = logits(model, given) if given is not None else None
    theirs = parameters(model)
    if is_llama4 := theirs.keys() != ours[0].keys() and type(model).__name__.startswith("Llama4"):
        theirs = joined(theirs)
    compared(ours[0], theirs)
    # One linear layer per expert rounds differently from a batched product.
    if given is not None and not (torch.allclose(ours[1], result, rtol=0.02, atol=0.02) if is_llama4 else same(ours[1], result)):
        raise Wrong("other logits, with the same weights")


def outcome(step: object, *args: object, **options: object) -> str:
    try:
        step(*args, **options)
    except Exception as error:  # noqa: BLE001  (loaders raise anything)
        if os.environ.get("TRACE"):
            traceback.print_exc()
        return brief(error)
    return "same"


def check(program: Path, name: str, scratch: Path) -> dict:
    made = getattr(transformers, name)
    model = small_model(name)
    entry: dict = {"model_type": model.config.model_type, "parameters": sum(value.numel() for value in model.parameters())}
    if entry["parameters"] > PARAMETERS:
        return entry | {"skipped": f"too large: {entry['parameters']:,} parameters"}
    source = scratch / "model"
    model.save_pretrained(source)
    if name == OMNI:
        torch.save({}, source / "spk_dict.pt")
    original = parameters(model)
    try:
        before, usual = load(made, source, None)
    except Exception as error:  # noqa: BLE001
        return entry | {"skipped": f"transformers does not load what it saves: {brief(error)}"}
    loaded = {name: value for name, value in parameters(before).items() if name in original}
    own = {name for name, value in loaded.items() if torch.equal(value.double(), original[name].double())}
    given = usable(before)
    lost = sorted(original.keys() - own)
    entry |= {"logits": given is not None} | ({"unlike_saved": few(lost)} if lost else {})
    del before, model
    for format in FORMATS:
        entry[format] = one_format(program, made, scratch / format, source, format, original, own, given, usual)
    return entry


def one_format(
    program: Path, made: type, scratch: Path, source: Path, format: str, original: dict, own: set, given: dict | None, usual: dict
) -> dict:
    scratch.mkdir()
    quantized, back = scratch / "quantized", scratch / "dequantized"
    done = run(program, "quantize", source, "--format", format, "--out", quantized)
    messages = [line.removeprefix("warning: ") for line in done.stderr.splitlines() if line.startswith("warning: ")]
    if done.returncode:
        return {"refused": error_of(done, source), "warnings": messages}
    doctor = run(program, "doctor", quantized)
    result: dict = {"warnings": messages, "doctor": doctor.returncode}
    if doctor.returncode:
        result["found"] = doctor.stdout.strip()[:300]
    done = run(program, "dequantize", quantized, "--dtype", "bf16", "--out", back)
    if done.returncode:
        return result | {"refused": error_of(done, quantized)}
    try:
        model, info = load(made, back, None)
    except Exception as error:  # noqa: BLE001
        return result | {"dequantized": brief(error)}
    problems = strange(info, usual)
    ours = (parameters(model), logits(model, given) if given is not None else None)
    error = {key: (ours[0][key].double() - original[key].double()).square().sum() for key in own & ours[0].keys()}
    far = [key for key, value in error.items() if not value <= QUANTIZED * original[key].double().square().sum()]
    result["quantized"] = sum(bool(value > 0) for value in error.values())
    result["dequantized"] = "; ".join(problems + ([f"other values: {few(far)}"] if far else [])) or "same"
    del model
    for mode, dequantize in MODES.items():
        result[mode] = outcome(by_transformers, made, quantized, ours, given, usual, dequantize=dequantize)
    shutil.rmtree(scratch)
    return result


def in_process(program: Path, name: str, scratch: Path) -> dict:
    """Returns the entry of a class from its own process, which may hang or crash."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        try:
            entry = check(program, name, scratch)
        except BaseException as error:  # noqa: BLE001
            if os.environ.get("TRACE"):
                traceback.print_exc()
            entry = {"skipped": f"not built: {brief(error)}"}
        with os.fdopen(write, "w") as pipe:
            json.dump(entry, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"skipped": f"ended by signal {os.WTERMSIG(status)}"}


def verdict(entry: dict) -> tuple[str, str]:
    """Returns the result of a class, and the reason."""
    if "skipped" in entry:
        return "not run", entry["skipped"]
    formats = {format: entry[format] for format in FORMATS}
    if all("refused" in result for result in formats.values()):
        return "refused", formats["nvfp4"]["refused"]
    wrong = {}
    for format, result in formats.items():
        for step in ("refused", "dequantized", *MODES):
            if result.get(step, "same") != "same":
                wrong.setdefault(result[step], []).append(f"{format} {step}")
    return ("wrong" if wrong else "same"), "; ".join(f"{reason} ({', '.join(where)})" for reason, where in wrong.items())


def is_reported(entry: dict) -> bool:
    """Returns whether `quantize` warns about each format that loads wrong, and `doctor` too."""
    results = [entry[format] for format in FORMATS]
    wrong = [result for result in results if any(result.get(step, "same") != "same" for step in ("dequantized", *MODES))]
    return all(result["doctor"] and any("transformers" in line for line in result["warnings"]) for result in wrong)


def table(entries: dict[str, dict]) -> str:
    lines = ["| model type | class | as it loads | as it runs | reason |", "|---|---|---|---|---|"]
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].get("model_type") or "", item[0])):
        result, reason = verdict(entry)
        columns = ["–", "–"]
        if result in ("same", "wrong"):
            columns = ["same" if all(entry[format].get(mode) == "same" for format in FORMATS) else "**differs**" for mode in MODES]
        reason = reason.replace("|", "\\|")[:400]
        lines.append(f"| {entry.get('model_type') or '–'} | {name} | {columns[0]} | {columns[1]} | {reason} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microscale", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="results as JSON; a run resumes from them")
    parser.add_argument("--table", type=Path, help="Markdown table of the results")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--part", default="0/1", help="N/OF: every OF-th class, starting with class N")
    parser.add_argument("classes", nargs="*")
    args = parser.parse_args()
    logging.set_verbosity(50)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    stored = json.loads(args.out.read_text()) if args.out.exists() else {}
    entries = stored.get("classes", {}) if stored.get("versions") == VERSIONS else {}
    part, parts = map(int, args.part.split("/"))
    chosen = [(name, task) for name, task in sorted(classes().items()) if task in args.tasks][part::parts]
    for name, task in chosen:
        if (args.classes and name not in args.classes) or (name in entries and not args.classes):
            continue
        start = time.monotonic()
        hasattr(transformers, name)  # Imports the class once, before the fork.
        with tempfile.TemporaryDirectory() as scratch:
            entry = in_process(args.microscale.resolve(), name, Path(scratch))
        entries[name] = {"task": task, **entry, "seconds": round(time.monotonic() - start, 1)}
        args.out.write_text(json.dumps({"versions": VERSIONS, "classes": entries}, indent=1))
        print(f"{name}: {': '.join(filter(None, verdict(entries[name])))[:200]}", flush=True)
    if args.table:
        args.table.write_text(table(entries) + "\n")
    results = Counter(verdict(entry)[0] for entry in entries.values())
    silent = [name for name, entry in entries.items() if verdict(entry)[0] == "wrong" and not is_reported(entry)]
    print(", ".join(f"{count} {result}" for result, count in results.items()), f"; wrong without a warning: {len(silent)}")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
