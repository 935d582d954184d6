#!/usr/bin/env python3
"""What each step of quantizing buys on sample/tiny-story: the table of docs/quality.md.

    python scripts/quality/story_steps.py --microscale target/release/microscale

Calibrates on every second part of heldout.txt and evaluates on the others. A part is the end of a
novel. Needs Python 3.10 and nothing else. Takes some minutes on two cores.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORY = ROOT / "sample" / "tiny-story"

WIDTHS = ["16", "32", "64", "128"]

# The steps: a name, and options of `quantize`. STATS stands for the calibration of the original
# model, SEQUENTIAL for the one of models whose earlier layers are quantized.
STEPS = [
    ("plain", []),
    ("search", ["--search", "full"]),
    ("search, importance", ["--search", "full", "--calibration", "STATS"]),
    ("GPTQ, static scales", ["--gptq", "--gptq-static-scales", "--search", "none", "--calibration", "STATS"]),
    ("GPTQ, static searched scales", ["--gptq", "--gptq-static-scales", "--calibration", "STATS"]),
    ("GPTQ by column, static searched scales", ["--gptq", "--gptq-order", "columns", "--calibration", "STATS"]),
    ("GPTQ, plain scales in the loop", ["--gptq", "--search", "none", "--calibration", "STATS"]),
    ("GPTQ, four-six in the loop", ["--gptq", "--search", "four-six", "--calibration", "STATS"]),
    ("GPTQ, search in the loop", ["--gptq", "--calibration", "STATS"]),
    ("GPTQ, search in the loop, sequential", ["--gptq", "--calibration", "SEQUENTIAL"]),
    *((f"plain, Hadamard {width}", ["--hadamard", width]) for width in WIDTHS),
    *(
        (f"GPTQ, search in the loop, Hadamard {width}", ["--gptq", "--calibration", "STATS", "--hadamard", width])
        for width in WIDTHS
    ),
]


def runner(program: Path) -> Callable[..., None]:
    """Returns a function that runs the program with the given words."""
    program = program.resolve()

    def run(*words: object) -> None:
        subprocess.run([program, *map(str, words), "-q"], check=True, stdout=subprocess.DEVNULL)

    return run


def halves() -> dict[str, str]:
    """The parts of heldout.txt to calibrate on, and those to test on."""
    parts = (STORY / "heldout.txt").read_text().split("\n\n")
    return {"calibrate": "\n\n".join(parts[0::2]), "test": "\n\n".join(parts[1::2])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microscale", type=Path, required=True, help="the program")
    parser.add_argument("--window", default="256", help="tokens of a window")
    arguments = parser.parse_args()
    run = runner(arguments.microscale)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        for name, text in halves().items():
            (work / f"{name}.txt").write_text(text)
        cut = ["--documents", "--window", arguments.window]
        stats = work / "stats"
        run("calibrate", STORY, stats, "--text", work / "calibrate.txt", *cut)
        for form in ["nvfp4", "mxfp4"]:
            statistics = {"STATS": stats, "SEQUENTIAL": sequential(run, work, form, cut)}
            outputs = []
            for number, (_, options) in enumerate(STEPS):
                outputs.append(work / f"{form}-{number}")
                options = [statistics.get(word, word) for word in options]
                run("quantize", STORY, outputs[-1], "-f", form, *options)
            result = work / f"{form}.json"
            run("eval", STORY, *outputs, "--text", work / "test.txt", *cut, "--skip-layers",
                "--activations", form, "--json", result)
            print_table(form, json.loads(result.read_text()))


def sequential(run, work: Path, form: str, cut: list) -> Path:
    """Returns statistics with the Hessians of each layer under quantized earlier layers."""
    found = work / f"{form}-sequential"
    shutil.copytree(work / "stats", found)
    layers = json.loads((STORY / "config.json").read_text())["num_hidden_layers"]
    for layer in range(1, layers):
        model, stats = work / f"{form}-before-{layer}", work / f"{form}-stats-{layer}"
        later = [word for other in range(layer, layers) for word in ("--exclude", f"model.layers.{other}.*")]
        run("quantize", STORY, model, "-f", form, "--gptq", "--calibration", found, *later)
        run("calibrate", model, stats, "--text", work / "calibrate.txt", *cut)
        shutil.copy(stats / f"layer-{layer}.safetensors", found)
    return found


def print_table(form: str, found: dict) -> None:
    """Prints a table in Markdown. Recovered is the part of plain rounding's loss that is gone."""
    print(f"\n{form}: {found['tokens']} tokens in {found['windows']} windows, "
          f"perplexity of the original {found['perplexity']['mean']:.3f}\n")
    print("| weights | W4A16: perplexity | KL divergence | recovered | W4A4: perplexity | KL divergence | recovered |")
    print("|---|---|---|---|---|---|---|")
    rows = found["quantized"]
    plain = rows[0]["divergence"]["mean"], rows[1]["divergence"]["mean"]
    for number, (name, _) in enumerate(STEPS):
        cells = []
        for row, before in zip(rows[2 * number:2 * number + 2], plain):
            increase, divergence = row["increase"], row["divergence"]
            cells += [
                f"{100 * increase['mean']:+.2f} % ± {100 * increase['margin']:.2f}",
                f"{1000 * divergence['mean']:.2f} ± {1000 * divergence['margin']:.2f}",
                f"{100 * (1 - divergence['mean'] / before):.0f} %",
            ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
