"""Times `QuantizedLinear` on the CPU, compared with `torch.nn.Linear`.

    python scripts/speed/python_linear.py [--size 4096] [--rounds 7]

Needs the package and PyTorch. Layers take turns, and the fastest round counts, as other programs may
use the machine. Prints a table in Markdown.
"""

import argparse
import time

import torch

import microscale
from microscale.torch import QuantizedLinear

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def seconds(layer, x, least=0.1):
    """Returns the time of a call: the mean over calls that take `least` seconds together."""
    layer(x)
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < least or calls < 2:
        layer(x)
        calls += 1
    return (time.perf_counter() - start) / calls


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    size, threads = arguments.size, torch.get_num_threads()
    print(f"microscale {microscale.__version__}, PyTorch {torch.__version__}, {threads} threads, {size}x{size}, ms")
    print("\n| dtype, rows | nn.Linear | MXFP4 | NVFP4 |\n|---|---|---|---|")
    with torch.no_grad():
        for name, dtype in DTYPES.items():
            linear = torch.nn.Linear(size, size, bias=False, dtype=dtype)
            layers = [linear, *(QuantizedLinear.from_linear(linear, format) for format in ("mxfp4", "nvfp4"))]
            for rows in (1, 8, 64, 512):
                x = torch.randn(rows, size, dtype=dtype)
                rounds = [[seconds(layer, x) for layer in layers] for _ in range(arguments.rounds)]
                figures = (1e3 * min(times) for times in zip(*rounds))
                print(f"| {name}, {rows} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
