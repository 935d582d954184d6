"""Compares microscale's GPTQ with llm-compressor's, by a layer's output error and by time, on a CPU.

    cargo build --release -p microscale --example gptq
    python scripts/quality/gptq_llmcompressor.py target/release/examples/gptq [--shape 4096x4096]

Both get the same f32 weights (Gaussian, σ = 0.02) and the same f32 Hessian of 2·K tokens. The inputs are
a few directions that all columns share, and noise, with sizes that differ by column and some large
columns. The script sums tr(R·H·Rᵀ) / tr(W·H·Wᵀ) in f64 without damping, where R is the dequantized
matrix minus W. Both dampen by 1 %.

llm-compressor's `quantize_weight` takes scales from before the loop, as `--static` does. In NVFP4
both use compressed-tensors' global scale and block scales; in MXFP4 its scales too. Its time includes
the factorization, and ours are the factorization and the loop.

Needs llmcompressor, compressed-tensors, torch and numpy (made with 0.14.0.1, 0.20.0, 2.15.0 and
2.4).
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.quant_scheme import MXFP4, NVFP4
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

# Format, numerics, and options of our runs after the first, which is like llm-compressor's.
OURS = [
    ["--static", "--natural"],
    ["--static", "--columns"],
    ["--static", "--columns", "--search", "full"],
    ["--static"],
    [],
    ["--search", "four-six"],
    ["--search", "window"],
    ["--search", "full"],
]


def inputs(tokens: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Returns the inputs of a layer, [tokens, columns]."""
    directions = max(columns // 64, 4)
    shared = torch.randn(tokens, directions, generator=generator)
    mixed = shared @ torch.randn(directions, columns, generator=generator) / directions**0.5
    noise = torch.randn(tokens, columns, generator=generator)
    sizes = torch.exp(0.5 * torch.randn(columns, generator=generator))
    sizes[torch.randperm(columns, generator=generator)[: columns // 200 + 1]] *= 10
    return (mixed + 0.5 * noise) * sizes


def theirs(
    weights: torch.Tensor, hessian: torch.Tensor, args: QuantizationArgs
) -> tuple[np.ndarray, float]:
    """Returns llm-compressor's dequantized weights, and seconds."""
    blocks = weights.unflatten(1, (-1, args.group_size))
    low, high = blocks.amin(-1), blocks.amax(-1)
    global_scale = None
    if args.group_size == 16:
        global_scale = generate_gparam(weights.min(), weights.max())
    scale, zero = calculate_qparams(low, high, args, global_scale)
    if global_scale is not None:
        global_scale = global_scale.reshape(1)
    start = time.perf_counter()
    quantized, _, fallback = quantize_weight(
        weights[None].clone(),
        hessian[None].clone(),
        scale[None].float(),
        zero[None].float(),
        global_scale,
        args,
    )
    seconds = time.perf_counter() - start
    assert not fallback.any(), "llm-compressor fell back to rounding"
    return quantized[0].numpy(), seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", help="the example gptq, built")
    parser.add_argument("--shape", default="4096x4096", help="rows x columns (default: %(default)s)")
    parser.add_argument("--formats", nargs="+", choices=["nvfp4", "mxfp4"], default=["nvfp4", "mxfp4"])
    parser.add_argument("--skip-theirs", action="store_true", help="runs only microscale")
    options = parser.parse_args()
    rows, columns = (int(number) for number in options.shape.split("x"))
    generator = torch.Generator().manual_seed(1)
    x = inputs(2 * columns, columns, generator)
    hessian = x.T @ x
    hessian /= len(x)
    del x
    weights = 0.02 * torch.randn(rows, columns, generator=generator)
    h, w = hessian.numpy().astype(np.float64), weights.numpy()

    def norm(rest: np.ndarray) -> float:
        return float(np.sum((rest @ h) * rest))

    energy = norm(w.astype(np.float64))

    def loss(dequantized: np.ndarray) -> float:
        return norm(dequantized.astype(np.float64) - w) / energy

    print("| format | library | options | relative output error | factorization, s | loop, s |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ["weights", "hessian", "dequantized"]]
        w.tofile(files[0])
        hessian.numpy().tofile(files[1])
        for name in options.formats:
            preset = {"nvfp4": NVFP4, "mxfp4": MXFP4}[name]
            for order in [] if options.skip_theirs else [None, "weight"]:
                args = preset["weights"].model_copy(update={"actorder": order})
                dequantized, seconds = theirs(weights, hessian, args)
                print(
                    f"| {name} | llm-compressor | {order or 'natural'} | {loss(dequantized):.4e} | "
                    f"together | {seconds:.2f} |",
                    flush=True,
                )
            for extra in OURS:
                command = [options.program, *files[:2], str(rows), str(columns), name]
                command += ["--numerics", "compressed-tensors", "--dequantized", files[2], *extra]
                printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                numbers = dict(line.split() for line in printed.splitlines())
                dequantized = np.fromfile(files[2], dtype=np.float32).reshape(rows, columns)
                print(
                    f"| {name} | microscale | {' '.join(extra)} | {loss(dequantized):.4e} | "
                    f"{numbers['factor_s']} | {numbers['loop_s']} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
