"""Times torchao's MXFP4 or NVFP4 quantizer on an NVIDIA GPU, eager and compiled, next to a copy.

    python scripts/peers/peers_gpu.py [--format nvfp4] [--shape 16384x16384] [--dtype bf16] [--json FILE]

The copy moves the same number of bytes. NVFP4's per-tensor scale is given in advance; variants with
"amax" compute it first, which reads the input twice.

Needs only torch with CUDA, and torchao (written for torch 2.11, triton 3.6, torchao 0.18.0). Times
are CUDA events around single calls, medians after warm-up. Successive calls read different buffers,
512 MiB or more in total, so that no call finds its input in the L2 cache.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from collections.abc import Callable

import torch

from peers_report import MX_BLOCK, NV_BLOCK, Record, Shape, print_table, write_json

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
ROTATION_BYTES = 512 << 20
VERIFIED_ROWS = 64


def event_seconds(run: Callable[[int], object], warmup: int, samples: int) -> list[float]:
    """Returns the seconds of each of `samples` calls of run(index), by CUDA events."""
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
    """Returns tensors made by `make` that together exceed the cache."""
    tensors = [make()]
    while sum(tensor.nbytes for tensor in tensors) < ROTATION_BYTES:
        tensors.append(make())
    return tensors


def copy_seconds(total_bytes: int, warmup: int, samples: int) -> list[float]:
    """Times a device-to-device copy that reads one half of `total_bytes` and writes the other."""
    sources = rotation(lambda: torch.randint(0, 256, (total_bytes // 2,), dtype=torch.uint8, device="cuda"))
    targets = [torch.empty_like(source) for source in sources]

    def run(index: int) -> None:
        targets[index % len(targets)].copy_(sources[index % len(sources)])

    return event_seconds(run, warmup, samples)


def same_bytes(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected, strict=True))


Quantizer = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def mxfp4_quantizers(rule: str) -> dict[str, Quantizer]:
    """Returns torchao's MXFP4 quantizer, by suffix of the variant."""
    # Imported here: without a GPU the script exits before it needs torchao.
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    mode = ScaleCalculationMode[rule.upper()]
    return {"": lambda matrix: to_mx(matrix, torch.float4_e2m1fn_x2, MX_BLOCK, mode)}


def nvfp4_quantizers(example: torch.Tensor) -> dict[str, Quantizer]:
    """Returns torchao's NVFP4 quantizers: with the scale of `example`, and computing the scale."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    given = per_tensor_amax_to_scale(example.abs().max())
    return {
        "": lambda matrix: nvfp4_quantize(matrix, NV_BLOCK, given),
        " amax": lambda matrix: nvfp4_quantize(matrix, NV_BLOCK, per_tensor_amax_to_scale(matrix.abs().max())),
    }


def measure(dtype: str, shape: Shape, format: str, rule: str, warmup: int, samples: int) -> list[Record]:
    """Measures the copy, torchao eager and torchao compiled, for one input type."""
    matrices = rotation(lambda: torch.randn(shape.rows, shape.cols, dtype=DTYPES[dtype], device="cuda"))
    quantizers = mxfp4_quantizers(rule) if format == "mxfp4" else nvfp4_quantizers(matrices[0])
    once = shape.quantize_bytes(matrices[0].itemsize, MX_BLOCK if format == "mxfp4" else NV_BLOCK)

    def record(op: str, library: str, variant: str, seconds: list[float], verified: bool | None, size: int) -> Record:
        return Record.of(
            shape=shape,
            bytes=size,
            seconds=seconds,
            op=op,
            format=format,
            dtype=dtype,
            device=torch.cuda.get_device_name(),
            threads=None,
            library=library,
            version=version(library),
            variant=variant,
            verified=verified,
        )

    def torchao_record(variant: str, run: Quantizer, eager: Quantizer, size: int) -> Record:
        """Times `run`, and compares the first rows of its result with eager code."""
        seconds = event_seconds(lambda index: run(matrices[index % len(matrices)]), warmup, samples)
        found, expected = (tuple(part[:VERIFIED_ROWS] for part in make(matrices[0])) for make in (run, eager))
        return record("quantize", "torchao", variant, seconds, same_bytes(found, expected), size)

    records = [record("copy", "torch", "copy", copy_seconds(once, warmup, samples), None, once)]
    for what, quantize in quantizers.items():
        size = once + (matrices[0].nbytes if what else 0)
        records.append(torchao_record(f"eager{what}", quantize, quantize, size))
        compiled = torch.compile(quantize, fullgraph=True, dynamic=False)
        records.append(torchao_record(f"compiled{what}", compiled, quantize, size))
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape.parse, default=Shape(16384, 16384), metavar="ROWSxCOLS")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="input type; both if not given")
    parser.add_argument("--format", choices=("mxfp4", "nvfp4"), default="mxfp4")
    parser.add_argument("--rule", choices=("floor", "ceil", "even", "rceil"), default="floor", help="scale rule of MXFP4")
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
        records += measure(
            dtype, arguments.shape, arguments.format, arguments.rule, arguments.warmup, arguments.samples
        )
        torch.cuda.empty_cache()
    rule = f", rule {arguments.rule}" if arguments.format == "mxfp4" else ""
    print(f"{torch.cuda.get_device_name()}, {arguments.shape}, {arguments.format}{rule}, medians of {arguments.samples}")
    print_table(records)
    write_json(arguments.json, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
