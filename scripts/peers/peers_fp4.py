#!/usr/bin/env python3
"""Times products of two NVFP4 matrices, next to dequantizing both and multiplying with cuBLAS.

    python scripts/peers/peers_fp4.py [--json FILE]

The shapes are of GPU MODE's contest, as in cli/src/bench/contest.rs: products of 128 tokens,
gated products and groups. Results are f16. Each product has its weights and activations in NVFP4, and
is computed in three ways:

    fp4         `microscale.linear` of both, and `linear_experts` for groups, which also sorts rows
    two steps   both operands are dequantized to f16 by this package's kernels, and multiplied by
                cuBLAS; a gate is applied by a compiled function
    f16         cuBLAS with operands that are in f16 already

CUDA graphs of several products are replayed, whose weights together exceed the L2 cache. A time is
the median replay divided by the products in it. Results of `fp4` and `two steps` are compared.

The last columns are the rate of `fp4` as a share of 989 TFLOP/s, and `two steps` divided by `fp4`.

Needs torch with CUDA and the package (`pip install ./python`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import microscale
from microscale import Quantized
from peers_graph import replay_seconds

ROTATION_BYTES, PRODUCTS, REPLAYS = 256 << 20, 20, 15
F16_PEAK = 989e12
#: Results of cuBLAS are rounded to f16, as ours are, and sums are in another order.
BOUND = 2e-3


@dataclass(frozen=True)
class Product:
    """Products of one launch: tokens, rows and columns of each group; a gate joins pairs of rows."""

    groups: tuple[tuple[int, int, int], ...]
    gated: bool = False

    def __str__(self) -> str:
        tokens, rows, cols = self.groups[0]
        shape = f"{rows}x{cols}"
        if self.gated:
            return f"gated, twice {rows // 2}x{cols}, {tokens} tokens"
        if len(self.groups) > 1:
            return f"{len(self.groups)} groups of {shape}, {sum(group[0] for group in self.groups)} tokens"
        return f"{shape}, {tokens} tokens"

    @property
    def operations(self) -> int:
        return sum(2 * tokens * rows * cols for tokens, rows, cols in self.groups)

    @property
    def weight_bytes(self) -> int:
        return sum(rows * cols * 9 // 16 for _, rows, cols in self.groups)


def groups_of(tokens: list[int], rows: int, cols: int) -> Product:
    return Product(tuple((count, rows, cols) for count in tokens))


CONTEST = (
    *(Product(((128, rows, cols),)) for rows, cols in ((7168, 16384), (4096, 7168), (7168, 2048))),
    *(
        Product(((tokens, 2 * rows, cols),), gated=True)
        for tokens, rows, cols in ((256, 4096, 7168), (512, 4096, 7168), (256, 3072, 4096), (512, 3072, 7168))
    ),
    groups_of([80, 176, 128, 72, 64, 248, 96, 160], 4096, 7168),
    groups_of([40, 76, 168, 72, 164, 148, 196, 160], 7168, 2048),
    groups_of([192, 320], 3072, 4096),
    groups_of([128, 384], 4096, 1536),
)

@dataclass(frozen=True)
class Operands:
    """The activations of all groups, and the weights of each and of all."""

    x: Quantized
    weights: list[Quantized]
    experts: microscale.Experts | None
    #: The group of each row of `x`, `[rows, 1]`.
    chosen: torch.Tensor

    @classmethod
    def of(cls, product: Product) -> Operands:
        """Random normal numbers. Products of gates fit f16."""
        counts = torch.tensor([tokens for tokens, _, _ in product.groups])
        _, rows, cols = product.groups[0]
        weights = torch.randn(len(counts), rows, cols, device="cuda")
        x = microscale.quantize(0.1 * torch.randn(int(counts.sum()), cols, device="cuda"), "nvfp4")
        chosen = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts)[:, None].cuda()
        experts = microscale.quantize_experts(weights, "nvfp4") if len(counts) > 1 else None
        return cls(x, [microscale.quantize(of, "nvfp4") for of in weights], experts, chosen)

    def dequantized(self, product: Product) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each group's operands in f16."""
        rows = self.x.dequantize(torch.float16).split([tokens for tokens, _, _ in product.groups])
        return [(x, w.dequantize(torch.float16)) for x, w in zip(rows, self.weights, strict=True)]


@torch.compile(dynamic=False)
def silu_and_mul(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.float().unflatten(-1, (-1, 2)).unbind(-1)
    return (torch.nn.functional.silu(gate) * up).half()


def fp4(product: Product, operands: Operands) -> list[torch.Tensor]:
    if operands.experts is not None:
        results = microscale.linear_experts(operands.x, operands.experts, operands.chosen, dtype=torch.float16)
        return list(results.squeeze(1).split([tokens for tokens, _, _ in product.groups]))
    gate = "silu_and_mul" if product.gated else None
    return [microscale.linear(operands.x, operands.weights[0], gate=gate, dtype=torch.float16)]


def f16(product: Product, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    results = [x @ w.T for x, w in pairs]
    return [silu_and_mul(both) for both in results] if product.gated else results


def seconds_of(run: Callable[[int], object]) -> float:
    """The median seconds of a product. `run` has the product's number."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(0)
    stream.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for i in range(PRODUCTS):
            kept.append(run(i))
    return statistics.median(replay_seconds(graph, REPLAYS)) / PRODUCTS


def measure(product: Product) -> dict[str, object]:
    count = min(PRODUCTS, max(2, -(-ROTATION_BYTES // product.weight_bytes)))
    sets = [Operands.of(product) for _ in range(count)]
    ours, theirs = fp4(product, sets[0]), f16(product, sets[0].dequantized(product))
    # A gate's results are of products that f16 has rounded.
    error = max(((a - b).double().norm() / b.double().norm()).item() for a, b in zip(ours, theirs, strict=True))
    if not error <= BOUND:
        sys.exit(f"peers_fp4.py: {product}: fp4 and f16 differ by {error:.1e}")
    del ours, theirs
    record: dict[str, object] = {"product": str(product), "operations": product.operations, "error": error}
    record["fp4"] = seconds_of(lambda i: fp4(product, sets[i % count]))
    record["two_steps"] = seconds_of(lambda i: f16(product, sets[i % count].dequantized(product)))
    decoded = [of.dequantized(product) for of in sets]
    record["f16"] = seconds_of(lambda i: f16(product, decoded[i % count]))
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the records")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("peers_fp4.py: torch sees no CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    records = []
    device = f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"
    print(f"{device}, µs\n\n| product | fp4 | two steps | f16 | of the peak | two steps / fp4 |\n|---|---|---|---|---|---|")
    for product in CONTEST:
        record = measure(product)
        records.append({"device": device} | record)
        times = [float(record[name]) for name in ("fp4", "two_steps", "f16")]
        cells = [f"{seconds * 1e6:.1f}" for seconds in times]
        share, factor = product.operations / times[0] / F16_PEAK, times[1] / times[0]
        print(f"| {product} | {' | '.join(cells)} | {share:.2f} | {factor:.2f} |", flush=True)
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
