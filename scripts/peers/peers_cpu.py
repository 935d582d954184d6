"""Times the MXFP4 quantizers of other libraries and of microscale on a CPU.

    python scripts/peers/peers_cpu.py [--shape 8192x4096] [--threads 2]
        [--microscale target/release/microscale] [--json FILE]

torchao runs under torch.compile. compressed-tensors (scales, quantize and pack) runs eagerly, as its
users run it. The contenders take turns with a few samples per round, so that other load on the
machine affects all of them equally. `copy` moves the same number of bytes with the same threads.
Every time is a median over all rounds. Needs peers_cpu_requirements.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from collections.abc import Callable

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from peers_report import MX_BLOCK, Record, Shape, print_ratios, print_table, write_json

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
VERIFIED_ROWS = 64


@dataclass
class Contender:
    """A contender. `sample` runs it once and returns the elapsed seconds."""

    library: str
    version: str
    variant: str
    sample: Callable[[], float]
    verify: Callable[[], bool] | None = None
    op: str = "quantize"
    seconds: list[float] = field(default_factory=list)


def timed(run: Callable[[], object]) -> Callable[[], float]:
    def sample() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return sample


def quantize_torchao(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and codes, with the floor rule."""
    return to_mx(matrix, torch.float4_e2m1fn_x2, MX_BLOCK, ScaleCalculationMode.FLOOR)


def torchao_contender(matrix: torch.Tensor) -> Contender:
    compiled = torch.compile(quantize_torchao, fullgraph=True, dynamic=False)

    def verify() -> bool:
        """Returns whether compiled and eager code give the same bytes for the first rows."""
        expected = quantize_torchao(matrix[:VERIFIED_ROWS])
        found = compiled(matrix)
        return all(
            torch.equal(a[:VERIFIED_ROWS].view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(found, expected, strict=True)
        )

    return Contender("torchao", version("torchao"), "compiled", timed(lambda: compiled(matrix)), verify)


def compressed_tensors_contender(matrix: torch.Tensor) -> Contender:
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")

    def run() -> None:
        scale, _ = compute_dynamic_scales_and_zp(matrix, scheme.weights, module=None)
        compressor.compress({"weight": matrix, "weight_scale": scale}, scheme)

    return Contender("compressed-tensors", version("compressed-tensors"), "eager", timed(run))


def copy_contender(shape: Shape, itemsize: int) -> Contender:
    source = torch.randint(0, 256, (shape.quantize_bytes(itemsize) // 2,), dtype=torch.uint8)
    target = torch.empty_like(source)
    return Contender("torch", version("torch"), "copy", timed(lambda: target.copy_(source)), op="copy")


def microscale_contender(program: Path, shape: Shape, dtype: str, threads: int) -> Contender:
    """Returns the program as a contender. A sample is the median of one run of `bench`."""
    banner = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()

    def sample() -> float:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "bench.json"
            subprocess.run(
                [program, "bench", "--op", "quantize", "--format", "mxfp4", "--shape", str(shape)]
                + ["--dtype", dtype, "--device", "cpu", "--json", output],
                env={**os.environ, "RAYON_NUM_THREADS": str(threads)},
                stdout=subprocess.DEVNULL,
                check=True,
            )
            return median_seconds(json.loads(output.read_text()))

    return Contender("microscale", banner[-1] if banner else "", "floor", sample)


def median_seconds(report: object) -> float:
    """Returns the only `median_seconds` of a bench report.

    The report is a record, a list with one record, or an object with `results`.
    """
    if isinstance(report, dict) and "results" in report:
        report = report["results"]
    if isinstance(report, list) and len(report) == 1:
        report = report[0]
    if isinstance(report, dict) and "median_seconds" in report:
        return float(report["median_seconds"])
    raise SystemExit("the bench report does not hold exactly one record with median_seconds")


def measure(contenders: list[Contender], rounds: int, samples: int) -> None:
    """Measures the contenders in turns, after one warm-up sample of each."""
    for contender in contenders:
        contender.sample()
    for _ in range(rounds):
        for contender in contenders:
            contender.seconds.append(statistics.median(contender.sample() for _ in range(samples)))


def records_of(contenders: list[Contender], shape: Shape, itemsize: int, dtype: str, threads: int) -> list[Record]:
    """The measurements of contenders as records."""
    return [
        Record.of(
            shape=shape,
            bytes=shape.quantize_bytes(itemsize),
            seconds=contender.seconds,
            op=contender.op,
            format="mxfp4",
            dtype=dtype,
            device="cpu",
            threads=threads,
            library=contender.library,
            version=contender.version,
            variant=contender.variant,
            verified=contender.verify() if contender.verify else None,
        )
        for contender in contenders
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape.parse, default=Shape(8192, 4096), metavar="ROWSxCOLS")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="input type; both if not given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=3, help="samples a round")
    parser.add_argument("--microscale", type=Path, help="the microscale program, to time in the same rounds")
    parser.add_argument("--json", type=Path, default=Path("peers_cpu.json"), help="where to write the records")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    shape, records = arguments.shape, []
    for dtype in arguments.dtype or DTYPES:
        matrix = torch.randn(shape.rows, shape.cols).to(DTYPES[dtype])
        contenders = [
            copy_contender(shape, matrix.itemsize),
            torchao_contender(matrix),
            compressed_tensors_contender(matrix),
        ]
        if arguments.microscale:
            contenders.append(microscale_contender(arguments.microscale, shape, dtype, arguments.threads))
        measure(contenders, arguments.rounds, arguments.samples)
        records += records_of(contenders, shape, matrix.itemsize, dtype, arguments.threads)
    print(f"{shape}, {arguments.threads} threads, medians of {arguments.rounds} rounds of {arguments.samples}")
    print_table(records)
    print_ratios(records, "microscale")
    write_json(arguments.json, records)


if __name__ == "__main__":
    main()
