#!/usr/bin/env python3
"""Times activation quantizers in PyTorch (torch.compile) and Humming, next to ours and to a copy.

    python scripts/peers/peers_activations.py [--shapes 64x4096 ...] [--ours microscale] [--json FILE]

Operations, from bf16: `plain`, `silu` (SiLU(gate) · up of rows with both halves), `rmsnorm` and
`add-rmsnorm`. Formats: FP8 per token, FP8 per 128 columns and NVFP4 without a global scale.
`silu, two kernels` is a compiled SiLU that writes bf16, and then the plain quantizer.

Shapes are of the output. A CUDA graph of several calls is replayed. The inputs are rotated so
that they are not in the L2 cache. The time is the median replay divided by the number of calls. The
outputs of each peer are compared with eager PyTorch.

Peers: `compiled` is eager code of this script through torch.compile.
`humming` is Humming's `process_input`, which has no norms.

Needs torch with CUDA. Humming needs humming-kernels, and NVRTC with CUDA's headers or nvcc with
HUMMING_COMPILER=nvcc. Written for torch 2.11, humming-kernels 0.1.19 and CUDA 13.0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from peers_graph import replay_seconds
from peers_report import NV_BLOCK, Shape

SHAPES = ("1x4096", "16x4096", "64x4096", "1x14336", "64x14336", "1024x14336", "8192x8192", "8192x14336")
GROUP = 128
FP8 = torch.float8_e4m3fn
FP8_MAX, E2M1_MAX, EPSILON = 448.0, 6.0, 1e-6
ROTATION_BYTES, CALLS, REPLAYS = 512 << 20, 40, 15

Tensors = tuple[torch.Tensor, ...]
Operation = Callable[[Tensors], torch.Tensor]
Quantizer = Callable[[torch.Tensor], Tensors]


def silu(inputs: Tensors) -> torch.Tensor:
    gate, up = inputs[0].float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).bfloat16()


def rmsnorm(inputs: Tensors) -> torch.Tensor:
    values = inputs[0].float()
    normalized = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + EPSILON)
    return normalized.bfloat16() * inputs[1]


def add_rmsnorm(inputs: Tensors) -> torch.Tensor:
    summed = inputs[0] + inputs[2]
    inputs[2].copy_(summed)
    return rmsnorm((summed, inputs[1]))


def fp8_token(values: torch.Tensor) -> Tensors:
    scale = values.abs().amax(-1, keepdim=True).float().clamp(min=1e-10) / FP8_MAX
    return (values.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def fp8_group(values: torch.Tensor) -> Tensors:
    codes, scales = fp8_token(values.unflatten(-1, (-1, GROUP)))
    return codes.flatten(-2), scales.squeeze(-1)


def nvfp4(values: torch.Tensor) -> Tensors:
    """E2M1 by rounding half to even, two codes per byte, under E4M3 scales."""
    blocks = values.float().unflatten(-1, (-1, NV_BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / E2M1_MAX).clamp(2**-9, FP8_MAX).to(FP8)
    magnitude = (blocks / scale.float()).abs()
    code = (magnitude > 0.25).to(torch.uint8)
    for position, threshold in enumerate((0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += (magnitude >= threshold if position % 2 == 0 else magnitude > threshold).to(torch.uint8)
    code |= (blocks < 0).to(torch.uint8) << 3
    pairs = code.flatten(-2).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, scale.squeeze(-1)


OPERATIONS: dict[str, Operation] = {
    "plain": lambda inputs: inputs[0],
    "silu": silu,
    "rmsnorm": rmsnorm,
    "add-rmsnorm": add_rmsnorm,
}
FORMATS: dict[str, Quantizer] = {"fp8-token": fp8_token, "fp8-group": fp8_group, "nvfp4": nvfp4}
HUMMING_FORMATS: dict[str, dict[str, object]] = {
    "fp8-token": {"quant_mode": "dynamic_token", "quant_dtype": "float8e4m3"},
    "fp8-group": {
        "quant_mode": "dynamic_group",
        "quant_dtype": "float8e4m3",
        "quant_group_size": GROUP,
        "group_scale_dtype": "float32",
    },
}
HUMMING_OPERATIONS = {
    "plain": {},
    "silu": {"activation_type": "binary_split", "activation_impl": "a / (1.0f + __expf(-a)) * b"},
}


def rotation(shape: Shape, operation: str) -> list[Tensors]:
    """Returns inputs that together exceed the cache."""
    columns = shape.cols * (2 if operation == "silu" else 1)
    weights = torch.randn(shape.cols, dtype=torch.bfloat16, device="cuda")

    def make() -> Tensors:
        values = torch.randn(shape.rows, columns, dtype=torch.bfloat16, device="cuda")
        if "rmsnorm" not in operation:
            return (values,)
        return (values, weights, torch.randn_like(values)) if operation == "add-rmsnorm" else (values, weights)

    count = min(CALLS, max(2, -(-ROTATION_BYTES // (shape.rows * columns * 2))))
    return [make() for _ in range(count)]


def replayed(run: Callable[[Tensors], object], sets: list[Tensors]) -> float:
    """Returns the median seconds of a call, from replays of a graph of calls."""
    calls = len(sets) * max(1, CALLS // len(sets))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(sets[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # The outputs stay alive, so that the calls do not share memory.
        outputs = [run(sets[call % len(sets)]) for call in range(calls)]
    seconds = statistics.median(replay_seconds(graph, REPLAYS)) / calls
    del outputs
    return seconds


def differing(found: Tensors, expected: Tensors) -> float:
    """Returns the share of codes that differ from eager PyTorch's."""
    bytes_of = [part.contiguous().view(torch.uint8) for part in (found[0], expected[0])]
    return (bytes_of[0] != bytes_of[1]).float().mean().item()


def compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, fullgraph=True, dynamic=False)


def humming(operation: str, format: str) -> Callable[[Tensors], Tensors] | None:
    if operation not in HUMMING_OPERATIONS or format not in HUMMING_FORMATS:
        return None
    from humming import ops

    options = HUMMING_OPERATIONS[operation] | HUMMING_FORMATS[format]
    return lambda inputs: ops.process_input(inputs[0], **options)


def measure(shape: Shape, peers: list[str]) -> list[dict[str, object]]:
    records = []
    for operation, compute in OPERATIONS.items():
        sets = rotation(shape, operation)
        original, inputs = (tuple(tensor.clone() for tensor in sets[0]) for _ in range(2))

        def restored() -> Tensors:
            for part, source in zip(inputs, original, strict=True):
                part.copy_(source)
            return inputs

        def record(peer: str, format: str, run: Callable[[Tensors], Tensors]) -> None:
            torch._dynamo.reset()
            expected = FORMATS[format](compute(restored()))
            different = differing(run(restored()), expected)
            seconds = replayed(run, sets)
            row = {"what": f"{operation} {format}", "rows": shape.rows, "cols": shape.cols, "library": peer}
            records.append(row | {"median_seconds": seconds, "different_codes": different})
            print(f"{peer:22} {operation:12} {format:10} {shape!s:12} {seconds * 1e6:9.2f} µs  {different:.2e}", flush=True)

        for format, quantize in FORMATS.items():
            if "compiled" in peers:
                fused = compiled(lambda inputs, c=compute, q=quantize: q(c(inputs)))
                record("compiled", format, fused)
                if operation == "silu":
                    first, second = compiled(compute), compiled(quantize)
                    record("compiled, two kernels", format, lambda inputs: second(first(inputs)))
            if "humming" in peers and (run := humming(operation, format)):
                record("humming", format, run)
        if operation == "silu" and "compiled" in peers:
            # The first of two kernels, for the sum with our plain quantizer.
            seconds = replayed(compiled(compute), sets)
            row = {"what": "silu bf16", "rows": shape.rows, "cols": shape.cols, "library": "compiled"}
            records.append(row | {"median_seconds": seconds})
            print(f"{'compiled':22} {'silu':12} {'bf16':10} {shape!s:12} {seconds * 1e6:9.2f} µs", flush=True)
        del sets, original, inputs
        torch.cuda.empty_cache()
    return records


def ours(program: str, shapes: list[Shape]) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "ours.json")
        given = [word for shape in shapes for word in ("--shape", str(shape))]
        subprocess.run([program, "bench", "--op", "activations", "--device", "cuda", *given, "--json", file], check=True)
        return [record | {"library": "microscale"} for record in json.loads(file.read_text())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="ROWSxCOLS")
    parser.add_argument("--peers", nargs="+", choices=("compiled", "humming"), default=["compiled", "humming"])
    parser.add_argument("--ours", metavar="PROGRAM", help="the program microscale")
    parser.add_argument("--json", type=Path, default=Path("peers_activations.json"), help="where to write the records")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("peers_activations.py: torch sees no CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    shapes = [Shape.parse(text) for text in arguments.shapes]
    records = ours(arguments.ours, shapes) if arguments.ours else []
    for shape in shapes:
        records += measure(shape, arguments.peers)
        device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps([device | record for record in records], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
