"""Compares GPTQ of microscale with checkpoints of llm-compressor and GPTQModel, on a CPU.

    python scripts/peers/peers_gptq.py --windows WINDOWS.json
    PYTHON scripts/peers/peers_llmcompressor.py sample/tiny-story WINDOWS.json LLM --scheme NVFP4A16
    PYTHON scripts/peers/peers_gptqmodel.py sample/tiny-story WINDOWS.json INT4
    python scripts/peers/peers_gptq.py --microscale PROGRAM --format nvfp4 --peers LLM INT4

The first command writes the windows of tokens that all calibrate on: every second part of the text,
cut as `microscale calibrate --documents` cuts it. The last command measures:

- The relative output error of each layer, tr(R·H·Rᵀ) / tr(W·H·Wᵀ), where R is the dequantized
  matrix minus W, and H = XᵀX of the layer's inputs in the original model while it calibrates. The
  sums are in f64. The table has the mean over the layers, and the least and largest ratio to the
  first checkpoint's error of a layer.
- Perplexity and divergence of the checkpoints on the other parts of the text, by `microscale eval`.

Needs numpy and tokenizers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

STORY = Path(__file__).resolve().parents[2] / "sample" / "tiny-story"
WINDOW = 256

#: Options of `microscale quantize`. STATS stands for the calibration.
OURS = {
    "plain": [],
    "GPTQ, static scales, by column": [
        *["--numerics", "compressed-tensors", "--search", "none"],
        *["--gptq", "--gptq-order", "columns", "--calibration", "STATS"],
    ],
    "GPTQ, static searched scales, by column": [
        *["--gptq", "--gptq-order", "columns", "--calibration", "STATS"],
    ],
    "GPTQ, search in the loop": ["--gptq", "--calibration", "STATS"],
}


def write_windows(text: str, model: Path, file: Path) -> None:
    """Cuts a text into inputs. Each begins with the model's first token."""
    bos = json.loads((model / "config.json").read_text())["bos_token_id"]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens = []
    for part in filter(None, text.rstrip().split("\n\n")):
        tokens += [bos, *tokenizer.encode(f"{part}\n", add_special_tokens=False).ids]
    parts = [tokens[start : start + WINDOW - 1] for start in range(0, len(tokens), WINDOW - 1)]
    file.write_text(json.dumps([[bos, *part[:-1]] for part in parts]))


def tensors_of(file: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file in f32 and bf16 as f32. numpy has no bf16."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:end]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            values = data[end + first : end + last]
            if entry["dtype"] == "BF16":
                values = np.frombuffer(values, np.uint16).astype(np.uint32) << 16
            tensors[name] = np.frombuffer(values, np.float32).reshape(entry["shape"])
    return tensors


def hessians(statistics: Path) -> dict[str, np.ndarray]:
    """Returns the Hessian of each layer's weights."""
    inputs = json.loads((statistics / "calibration.json").read_text())["inputs"]
    stored: dict[str, np.ndarray] = {}
    for file in statistics.glob("layer-*.safetensors"):
        stored |= tensors_of(file)
    return {weight: stored[f"{name}.hessian"].astype(np.float64) for weight, name in inputs.items()}


def output_errors(
    quantized: dict[str, np.ndarray], original: dict[str, np.ndarray], sums: dict[str, np.ndarray]
) -> np.ndarray:
    """Returns the relative output error of each layer."""

    def energy(matrix: np.ndarray, hessian: np.ndarray) -> float:
        return float(np.sum((matrix @ hessian) * matrix))

    errors = []
    for name, hessian in sums.items():
        weight = original[name].astype(np.float64)
        errors.append(energy(quantized[name] - weight, hessian) / energy(weight, hessian))
    return np.array(errors)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=Path, help="writes the windows to this file, and ends")
    parser.add_argument("--microscale", type=Path, help="the program")
    parser.add_argument("--format", choices=["nvfp4", "mxfp4"], default="nvfp4")
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="checkpoints to compare")
    options = parser.parse_args()
    parts = (STORY / "heldout.txt").read_text().split("\n\n")
    texts = {"calibration": "\n\n".join(parts[0::2]), "test": "\n\n".join(parts[1::2])}
    if options.windows:
        write_windows(texts["calibration"], STORY, options.windows)
        return

    def run(*words: object) -> None:
        command = [options.microscale.resolve(), *map(str, words), "--quiet"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    original = tensors_of(STORY / "model.safetensors")
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        cut = ["--documents", "--window", WINDOW]
        for name, text in texts.items():
            (work / f"{name}.txt").write_text(text)
        stats = work / "stats"
        run("calibrate", STORY, stats, "--text", work / "calibration.txt", *cut)
        sums = hessians(stats)
        rows = [(peer.name, peer) for peer in options.peers]
        for name, words in OURS.items():
            out = work / f"ours-{len(rows)}"
            words = [stats if word == "STATS" else word for word in words]
            run("quantize", STORY, out, "-f", options.format, "--device", "cpu", *words)
            rows.append((name, out))
        result = work / "result.json"
        checkpoints = [checkpoint for _, checkpoint in rows]
        run("eval", STORY, *checkpoints, "--text", work / "test.txt", *cut, "--skip-layers",
            "--json", result)
        found = json.loads(result.read_text())["quantized"]
        print("| checkpoint | output error | of the first's | perplexity | KL divergence, 1/1000 |")
        print("|---|---|---|---|---|")
        for number, ((name, checkpoint), measured) in enumerate(zip(rows, found, strict=True)):
            # GPTQModel's are values already.
            values = checkpoint
            if (checkpoint / "config.json").read_text().find("quantization_config") >= 0:
                values = work / f"values-{number}"
                run("dequantize", checkpoint, values, "--dtype", "f32")
            quantized = tensors_of(values / "model.safetensors")
            errors = output_errors(quantized, original, sums)
            first = errors if number == 0 else first
            ratios = errors / first
            increase, divergence = measured["increase"], measured["divergence"]
            print(f"| {name} | {errors.mean():.6f} | {ratios.min():.3f} to {ratios.max():.3f} | "
                  f"+{100 * increase['mean']:.2f} % ± {100 * increase['margin']:.2f} | "
                  f"{1000 * divergence['mean']:.2f} ± {1000 * divergence['margin']:.2f} |")


if __name__ == "__main__":
    main()
