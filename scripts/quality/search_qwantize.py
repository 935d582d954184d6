"""Compares microscale's search for block scales with qwantize's, which claims to be optimal.

    python scripts/quality/search_qwantize.py target/release/microscale [--large 2560x9728]

qwantize's torch reference (`nvfp4_optimal`, `mxfp4_optimal`) and `microscale quantize --search full`
get the same F32 matrices. The script sums the errors of the dequantized values in f64. qwantize
rounds ties toward zero and microscale to even, which changes codes but no error. qwantize's NVFP4
has no global scale. The script therefore runs microscale without one (`--global-scale none`), and
also with one.

The first table has matrices of 256×512 with several standard deviations: the total errors, the
number of blocks where one library errs less by more than a millionth of the block's squares, and
the number of blocks that qwantize rounds to zeros. The second table has the figures that qwantize
publishes for a layer of 2560×9728, and measurements on Gaussian data of that shape: 100 ·
‖dequantized − W‖ / ‖W‖, the root of the relative squared error in per cent. --large none omits it.

Needs qwantize, torch and safetensors (made with 0.1.1, 2.11.0 and 0.8.0). triton must be importable,
but is not used. Runs on the CPU.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from qwantize.mxfp4 import reference as mxfp4
from qwantize.nvfp4 import reference as nvfp4
from safetensors.torch import load_file, save_file

BLOCK = {"nvfp4": 16, "mxfp4": 32}
THEIRS = {
    ("nvfp4", "none"): nvfp4.nvfp4_naive,
    ("nvfp4", "full"): nvfp4.nvfp4_optimal,
    ("mxfp4", "none"): mxfp4.mxfp4_naive,
    ("mxfp4", "full"): mxfp4.mxfp4_optimal,
}
#: Rows per call of qwantize, which makes many temporaries.
ROWS = 64
#: Figures of qwantize's README (0.1.1, blocks of 16 in both formats) for down_proj in layer 0 of
#: Qwen3-4B.
PUBLISHED = {("nvfp4", "none"): 10.05, ("nvfp4", "full"): 8.74, ("mxfp4", "none"): 11.77, ("mxfp4", "full"): 11.02}


def theirs(matrix: torch.Tensor, format: str, search: str, block: int | None = None) -> torch.Tensor:
    """Quantizes and dequantizes a matrix with qwantize."""
    block = block or BLOCK[format]
    quantize = THEIRS[format, search]
    pieces = [quantize(rows.reshape(-1, block), dim=-1, return_dequant=True)[2] for rows in matrix.split(ROWS)]
    return torch.cat(pieces).reshape(matrix.shape)


def ours(program: Path, matrix: torch.Tensor, format: str, search: str, *options: str) -> torch.Tensor:
    """Quantizes and dequantizes a matrix with the program."""
    with tempfile.TemporaryDirectory() as scratch:
        original, quantized, restored = (Path(scratch, f"{part}.safetensors") for part in ("a", "q", "d"))
        save_file({"layer.weight": matrix}, original)
        for command in (
            ("quantize", original, "--format", format, "--search", search, *options, "--out", quantized),
            ("dequantize", quantized, "--dtype", "f32", "--out", restored),
        ):
            run = [str(word) for word in (program, *command, "--device", "cpu")]
            subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
        return load_file(restored)["layer.weight"]


def block_errors(matrix: torch.Tensor, other: torch.Tensor, block: int) -> torch.Tensor:
    return (matrix.double() - other.double()).square().reshape(-1, block).sum(1)


def per_cent(matrix: torch.Tensor, other: torch.Tensor) -> float:
    return (100 * (matrix.double() - other.double()).norm() / matrix.double().norm()).item()


def small_table(program: Path) -> None:
    print(
        "| format | standard deviation | qwantize plain | qwantize optimal | ours, full | blocks | ours less | theirs less "
        "| zeroed by qwantize |\n|---|---|---|---|---|---|---|---|---|"
    )
    for format, block in BLOCK.items():
        for deviation in (1.0, 0.02, 0.004, 0.001):
            matrix = torch.randn(256, 512, generator=torch.Generator().manual_seed(5)) * deviation
            options = ("--global-scale", "none") if format == "nvfp4" else ()
            plain = block_errors(matrix, theirs(matrix, format, "none"), block)
            optimal = theirs(matrix, format, "full")
            best = block_errors(matrix, optimal, block)
            mine = block_errors(matrix, ours(program, matrix, format, "full", *options), block)
            squares = matrix.double().square().reshape(-1, block).sum(1)
            less, more = ((a > b + 1e-6 * squares).sum().item() for a, b in ((best, mine), (mine, best)))
            zeroed = (optimal.reshape(-1, block) == 0).all(1).sum().item()
            sums = " | ".join(f"{errors.sum().item():.9g}" for errors in (plain, best, mine))
            print(f"| {format} | {deviation} | {sums} | {len(best)} | {less} | {more} | {zeroed} |")


def large_table(program: Path, rows: int, cols: int) -> None:
    print(f"\n{rows}×{cols}, 100 · ‖error‖ / ‖W‖:\n")
    print("| | format | block | plain | search |\n|---|---|---|---|---|")

    def row(who: str, format: str, block: int, figures: list[float]) -> None:
        print(f"| {who} | {format} | {block} | {figures[0]:.2f} % | {figures[1]:.2f} % |", flush=True)

    searches = ("none", "full")
    for format in BLOCK:
        row("published by qwantize, Qwen3-4B", format, 16, [PUBLISHED[format, search] for search in searches])
    for deviation in (1.0, 0.02):
        matrix = torch.randn(rows, cols, generator=torch.Generator().manual_seed(6)) * deviation
        data = f"Gaussian of {deviation}"
        for format, block in (("nvfp4", 16), ("mxfp4", 16), ("mxfp4", 32)):
            found = [per_cent(matrix, theirs(matrix, format, search, block)) for search in searches]
            row(f"qwantize, {data}", format, block, found)
        for format, name, options in (
            ("nvfp4", "ours, no global scale", ("--global-scale", "none")),
            ("nvfp4", "ours", ()),
            ("mxfp4", "ours", ()),
        ):
            found = [per_cent(matrix, ours(program, matrix, format, search, *options)) for search in searches]
            row(f"{name}, {data}", format, BLOCK[format], found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("microscale", type=Path, help="the built program")
    parser.add_argument("--large", default="2560x9728", metavar="ROWSxCOLS|none", help="shape of the second table")
    arguments = parser.parse_args()
    program = arguments.microscale.resolve()
    print(f"qwantize {version('qwantize')}, torch {torch.__version__}\n")
    small_table(program)
    if arguments.large != "none":
        large_table(program, *(int(part) for part in arguments.large.split("x")))


if __name__ == "__main__":
    main()
