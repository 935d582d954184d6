#!/usr/bin/env python3
"""Times GEMV in other libraries: cuBLAS (bf16, in PyTorch) and bitsandbytes (4-bit, if installed).

    python scripts/peers/peers_gemv.py 8192x28672 28672x8192

The products are y = W x for one token, W with M rows and K columns. Copies of the weights are
rotated so that they are not in the L2 cache. A CUDA graph of many products is replayed. The time is
the median replay divided by the number of products. `microscale bench --op gemv-weights` measures
microscale's products in the same way.
"""

import statistics
import sys

import torch

from peers_graph import replay_seconds

ROTATION_BYTES = 1 << 30
REPLAYS = 25


def microseconds(products):
    """Returns the median time of one call of `products` in a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for product in products:
            product()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product()
    return statistics.median(replay_seconds(graph, REPLAYS)) * 1e6 / len(products)


def turns(make, size):
    """Returns sets of operands in rotation that together exceed the cache."""
    sets = [make() for _ in range(max(2, -(-ROTATION_BYTES // size)))]
    return [sets[i % len(sets)] for i in range(max(len(sets), 20))]


def cublas(rows, cols):
    x = torch.randn(1, cols, device="cuda", dtype=torch.bfloat16)
    weights = turns(lambda: torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16), 2 * rows * cols)
    return microseconds([lambda w=w: torch.nn.functional.linear(x, w) for w in weights])


def bitsandbytes(rows, cols, quant_type):
    import bitsandbytes.functional as bnb

    x = torch.randn(1, 1, cols, device="cuda", dtype=torch.bfloat16)

    def make():
        weight = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
        return bnb.quantize_4bit(weight, quant_type=quant_type, blocksize=64)

    weights = turns(make, rows * cols // 2)
    out = torch.empty(1, 1, rows, device="cuda", dtype=torch.bfloat16)
    return microseconds([lambda w=w: bnb.gemv_4bit(x, w[0].t(), out=out, state=w[1]) for w in weights])


def main():
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
    peers = {"cuBLAS bf16": cublas}
    for kind in ("nf4", "fp4"):
        peers[f"bitsandbytes {kind}"] = lambda rows, cols, kind=kind: bitsandbytes(rows, cols, kind)
    for shape in sys.argv[1:]:
        rows, cols = map(int, shape.split("x"))
        for name, peer in peers.items():
            try:
                print(f"{shape:>12}  {name:<18} {peer(rows, cols):8.1f} us")
            except Exception as error:  # A missing or unsuitable peer reports why.
                print(f"{shape:>12}  {name:<18} {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
