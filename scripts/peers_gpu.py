"""Times torchao's MXFP4 quantizer on an NVIDIA GPU, eager and under torch.compile, beside a copy of the same bytes.

    python peers_gpu.py [--shape 16384x16384] [--dtype bf16] [--json FILE]

Needs torch with CUDA and torchao, nothing else (written for torch 2.11, triton 3.6, torchao 0.18.0). Times are CUDA events
around single calls, medians after warm-up. Successive calls read different buffers whose total is at least 512 MiB, so that
none finds its input in the L2 cache.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from collections.abc import Callable

import torch

from peers_report import MX_BLOCK, Record, Shape, print_table, write_json

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
ROTATION_BYTES = 512 << 20
VERIFIED_ROWS = 64


def event_seconds(run: Callable[[int], object], warmup: int, samples: int) -> list[float]:
    """Seconds of each of `samples` calls of run(index) by CUDA events."""
    for index in range(warmup):
        run(index)
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
    for index, (start, end) in enumerate(events):
        start.record()
        run(index)
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in events]


def rotation(make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Enough tensors made by `make` to exceed the cache together."""
    tensors = [make()]
    while sum(tensor.nbytes for tensor in tensors) < ROTATION_BYTES:
        tensors.append(make())
    return tensors


def copy_seconds(total_bytes: int, warmup: int, samples: int) -> list[float]:
    """A device-to-device copy that reads one half of `total_bytes` and writes the other."""
    sources = rotation(lambda: torch.randint(0, 256, (total_bytes // 2,), dtype=torch.uint8, device="cuda"))
    targets = [torch.empty_like(source) for source in sources]

    def run(index: int) -> None:
        targets[index % len(targets)].copy_(sources[index % len(sources)])

    return event_seconds(run, warmup, samples)


def same_bytes(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected, strict=True))


def measure(dtype: str, shape: Shape, rule: str, warmup: int, samples: int) -> list[Record]:
    """The copy, torchao eager and torchao compiled, on one input type."""
    # Imported here so that the script can say that there is no GPU where torchao is not installed either.
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    mode = ScaleCalculationMode[rule.upper()]

    def quantize(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return to_mx(matrix, torch.float4_e2m1fn_x2, MX_BLOCK, mode)

    matrices = rotation(lambda: torch.randn(shape.rows, shape.cols, dtype=DTYPES[dtype], device="cuda"))
    total_bytes = shape.mxfp4_bytes(matrices[0].itemsize)

    def record(op: str, library: str, variant: str, seconds: list[float], verified: bool | None) -> Record:
        return Record.of(
            shape=shape,
            bytes=total_bytes,
            seconds=seconds,
            op=op,
            format="mxfp4",
            dtype=dtype,
            device=torch.cuda.get_device_name(),
            threads=None,
            library=library,
            version=version(library),
            variant=variant,
            verified=verified,
        )

    def torchao_record(variant: str, run: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Record:
        """Times `run` and compares its first rows with what the eager code gives for them."""
        seconds = event_seconds(lambda index: run(matrices[index % len(matrices)]), warmup, samples)
        found = tuple(part[:VERIFIED_ROWS] for part in run(matrices[0]))
        return record("quantize", "torchao", variant, seconds, same_bytes(found, quantize(matrices[0][:VERIFIED_ROWS])))

    return [
        record("copy", "torch", "copy", copy_seconds(total_bytes, warmup, samples), None),
        torchao_record("eager", quantize),
        torchao_record("compiled", torch.compile(quantize, fullgraph=True, dynamic=False)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape.parse, default=Shape(16384, 16384), metavar="ROWSxCOLS")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="input type; both if not given")
    parser.add_argument("--rule", choices=("floor", "ceil", "even", "rceil"), default="floor", help="scale rule")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--json", type=Path, default=Path("peers_gpu.json"), help="where to write the records")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("peers_gpu.py: torch sees no CUDA device", file=sys.stderr)
        return 2

    torch.manual_seed(0)
    records = []
    for dtype in arguments.dtype or DTYPES:
        records += measure(dtype, arguments.shape, arguments.rule, arguments.warmup, arguments.samples)
        torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}, {arguments.shape}, rule {arguments.rule}, medians of {arguments.samples}")
    print_table(records)
    write_json(arguments.json, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
