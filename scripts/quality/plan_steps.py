"""Measures plans and uniform formats of the same size on sample/tiny-story: a table of docs/plan.md.

    python scripts/quality/plan_steps.py --microscale target/release/microscale

Calibrates on every second part of heldout.txt and evaluates on the others, as story_steps.py does.
Plans are made from the losses of tensors, with and without the importance of the calibration.
"Loss" is the plan's own measure of each choice, under the importance of the calibration. Needs
Python 3.10 and nothing else. Takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from story_steps import STORY, halves, runner

# The last two are the sizes of MXFP8 and of NVFP4 with unquantized ends.
BITS = ["4.5", "5", "6", "8.25", "10.2502"]
UNIFORM = ["mxfp4", "nvfp4", "mxfp4-keep-ends", "nvfp4-keep-ends", "mxfp8-e4m3"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microscale", type=Path, required=True, help="the program")
    run = runner(parser.parse_args().microscale)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        for name, text in halves().items():
            (work / f"{name}.txt").write_text(text)
        cut = ["--documents", "--window", "256"]
        stats = work / "stats"
        run("calibrate", STORY, stats, "--text", work / "calibrate.txt", *cut, "--skip-hessians")
        importance = ["--importance", stats / "importance.safetensors"]
        rows, models = [], []

        def add(name: str, bits: float, loss: float, *options: object) -> None:
            models.append(work / f"model-{len(models)}")
            run("quantize", STORY, models[-1], *options)
            rows.append((name, bits, loss))

        compared: dict[str, dict] = {}
        for budget in BITS:
            for kind, options in [("importance", importance), ("weights only", [])]:
                recipe, facts = work / f"{budget}-{len(models)}.toml", work / "plan.json"
                run("plan", STORY, "--bits", budget, *options, "-o", recipe, "--json", facts)
                plan = json.loads(facts.read_text())
                loss = plan["loss"]
                if options:
                    compared |= {other["recipe"]: other for other in plan["alternatives"]}
                else:
                    loss = None
                add(f"plan, {budget} bits, {kind}", plan["bits"], loss, "-r", recipe)
        for name in UNIFORM:
            other = compared[name]
            add(name, other["bits"], other["loss"], "-f" if name == "mxfp8-e4m3" else "-r", name)
        result = work / "eval.json"
        run("eval", STORY, *models, "--text", work / "test.txt", *cut, "--skip-layers", "--json", result)
        print("| recipe | bits per weight | loss | perplexity | KL divergence |\n|---|---|---|---|---|")
        for (name, bits, loss), found in zip(rows, json.loads(result.read_text())["quantized"]):
            increase, divergence = found["increase"], found["divergence"]
            print(
                f"| {name} | {bits:.3f} | {'–' if loss is None else f'{1e3 * loss:.3f}'} "
                f"| {100 * increase['mean']:+.2f} % ± {100 * increase['margin']:.2f} "
                f"| {1e3 * divergence['mean']:.2f} ± {1e3 * divergence['margin']:.2f} |"
            )


if __name__ == "__main__":
    main()
