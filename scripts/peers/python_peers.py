"""Times the Python package and its peers on a CPU, and compares their bytes.

    python scripts/peers/python_peers.py [--shape 8192x4096] [--threads 2]
        [--microscale target/release/microscale] [--json FILE]

Calls torchao, compressed-tensors and the package in this process with the same PyTorch tensor, and starts the program as a
process. The contenders come from peers_cpu.py and take turns in the same way. Needs
peers_cpu_requirements.txt and the package (`pip install ./python`).
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--shape", default="8192x4096", metavar="ROWSxCOLS")
parser.add_argument("--dtype", choices=("f32", "bf16"), action="append", help="input type; both if not given")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--samples", type=int, default=3, help="samples a round")
parser.add_argument("--microscale", type=Path, help="the program, to time in the same rounds")
parser.add_argument("--json", type=Path, default=Path("python_peers.json"), help="where to write the records")
arguments = parser.parse_args()
# The package reads the variable when it starts its thread pool.
os.environ["RAYON_NUM_THREADS"] = str(arguments.threads)

import peers_cpu  # noqa: E402
import torch  # noqa: E402
from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import preset_name_to_scheme  # noqa: E402
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp  # noqa: E402
from peers_report import Shape, print_ratios, print_table, write_json  # noqa: E402

import microscale  # noqa: E402


def same_as_torchao(matrix: torch.Tensor) -> bool:
    """Returns whether scales and codes equal the results of eager torchao."""
    rows = matrix[: peers_cpu.VERIFIED_ROWS]
    q = microscale.quantize(rows, "mxfp4", numerics="torchao")
    scales, codes = peers_cpu.quantize_torchao(rows)
    return torch.equal(q.codes, codes.view(torch.uint8)) and torch.equal(q.scales, scales.view(torch.uint8))


def same_as_compressed_tensors(matrix: torch.Tensor) -> bool:
    """Returns whether scales and codes equal the tensors that compressed-tensors packs."""
    rows = matrix[: peers_cpu.VERIFIED_ROWS]
    q = microscale.quantize(rows, "mxfp4", numerics="compressed-tensors")
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    scale, _ = compute_dynamic_scales_and_zp(rows, scheme.weights, module=None)
    packed = compressor.compress({"weight": rows, "weight_scale": scale}, scheme)
    return torch.equal(q.codes, packed["weight_packed"]) and torch.equal(
        q.scales, packed["weight_scale"].view(torch.uint8)
    )


def package_contender(matrix: torch.Tensor, numerics: str, verify) -> peers_cpu.Contender:
    out = microscale.quantize(matrix, "mxfp4", numerics=numerics)

    def sample() -> float:
        start = time.perf_counter()
        microscale.quantize(matrix, "mxfp4", numerics=numerics, out=out)
        return time.perf_counter() - start

    variant = f"package, {numerics}"
    return peers_cpu.Contender("microscale", microscale.__version__, variant, sample, lambda: verify(matrix))


def main() -> None:
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    shape, records = Shape.parse(arguments.shape), []
    for dtype in arguments.dtype or peers_cpu.DTYPES:
        matrix = torch.randn(shape.rows, shape.cols).to(peers_cpu.DTYPES[dtype])
        contenders = [
            peers_cpu.copy_contender(shape, matrix.itemsize),
            peers_cpu.torchao_contender(matrix),
            peers_cpu.compressed_tensors_contender(matrix),
            package_contender(matrix, "torchao", same_as_torchao),
            package_contender(matrix, "compressed-tensors", same_as_compressed_tensors),
        ]
        if arguments.microscale:
            contenders.append(peers_cpu.microscale_contender(arguments.microscale, shape, dtype, arguments.threads))
        peers_cpu.measure(contenders, arguments.rounds, arguments.samples)
        records += peers_cpu.records_of(contenders, shape, matrix.itemsize, dtype, arguments.threads)
    print(f"{shape}, {arguments.threads} threads, medians of {arguments.rounds} rounds of {arguments.samples}")
    print_table(records)
    print_ratios(records, "microscale")
    write_json(arguments.json, records)


if __name__ == "__main__":
    main()
