"""Times the Python package on an NVIDIA GPU, next to the program's `bench` in the same run.

    python scripts/speed/python_gpu.py --microscale target/release/microscale
        [--shape 16384x16384] [--layers 8192x8192] [--json FILE]

Needs PyTorch with CUDA and the package (`pip install ./python`). Large tensors are quantized in
eager calls, enqueued one after another on the stream, and in CUDA graphs. Layers are multiplied in
graphs. As in `bench`, 1 GiB of buffers take turns, so that no input is in a cache. Times are medians
of replays or of rounds, by CUDA events. The overhead of a call is CPU time, for a tensor of 4x64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import microscale
from microscale.torch import QuantizedLinear

ROTATION_BYTES = 1 << 30
#: Approximate duration of a graph in seconds, and maximum launches in it.
GRAPH_SECONDS, MOST_LAUNCHES = 2e-3, 256
REPLAYS = 25

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--microscale", type=Path, required=True, help="the program")
parser.add_argument("--shape", default="16384x16384", metavar="ROWSxCOLS", help="shape of the quantized tensor")
parser.add_argument("--layers", action="append", metavar="ROWSxCOLS", help="shapes of the layers' weights [8192x8192]")
parser.add_argument("--tokens", type=int, action="append", help="rows of activations [1, 8, 16, 64]")
parser.add_argument("--json", type=Path, help="where to write the figures")


def bench(program: Path, *arguments: str) -> list[dict]:
    """Returns measurements of the program in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        command = [program, "bench", "--device", "cuda:0", "--dtype", "bf16", *arguments, "--json", file]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text())


def events_seconds(run: Callable[[], object], rounds: int, each: int) -> float:
    """Returns the median time of one operation. `run` enqueues `each` operations."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e-3 for start, end in events) / each


def graph_seconds(calls: list[Callable[[], object]], estimate: float) -> float:
    """Returns the median time of calls that take turns in a graph."""
    launches = max(len(calls), min(MOST_LAUNCHES, int(GRAPH_SECONDS / estimate) + 1))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for i in range(launches):
            kept.append(calls[i % len(calls)]())
    return events_seconds(graph.replay, REPLAYS, launches)


def row(name: str, seconds: float, program: float, goal: float) -> dict:
    ratio = seconds / program
    missed = "" if ratio <= goal else "   MISSED"
    print(f"{name:52} {seconds * 1e6:9.2f} µs   bench {program * 1e6:9.2f} µs   {ratio:6.3f}   goal {goal:.2f}{missed}")
    return {"name": name, "seconds": seconds, "bench_seconds": program, "ratio": ratio, "goal": goal}


def quantizing(program: Path, shape: str) -> list[dict]:
    rows, cols = map(int, shape.split("x"))
    formats = ("--format", "mxfp4", "--format", "nvfp4", "--shape", shape)
    times = {(m["op"], m["format"]): m["median_seconds"] for m in bench(program, "--op", "quantize", *formats)}
    amax = bench(program, "--op", "amax-quantize", "--format", "nvfp4", "--shape", shape)
    times["amax-quantize", "nvfp4"] = amax[0]["median_seconds"]
    inputs = [torch.randn(rows, cols, device="cuda").bfloat16() for _ in range(max(2, ROTATION_BYTES // (2 * rows * cols)))]
    figures = []
    for op, format, options in [
        ("quantize", "mxfp4", {}),
        ("quantize", "nvfp4", {"global_scale": 448.0}),
        ("amax-quantize", "nvfp4", {}),
    ]:
        program_seconds = times[op, format]
        outs = [microscale.quantize(x, format, **options) for x in inputs]
        turns = list(zip(inputs, outs, strict=True))

        def eager(turns=turns, format=format, options=options):
            for x, out in turns * 8:
                microscale.quantize(x, format, out=out, **options)

        def fresh(format=format, options=options):
            for x in inputs * 8:
                microscale.quantize(x, format, **options)

        name = f"{op} {format} {shape}"
        each = 8 * len(inputs)
        figures.append(row(f"{name}, eager, outputs given", events_seconds(eager, 9, each), program_seconds, 1.03))
        figures.append(row(f"{name}, eager, new outputs", events_seconds(fresh, 9, each), program_seconds, 1.03))
        calls = [lambda x=x, out=out: microscale.quantize(x, format, out=out, **options) for x, out in turns]
        figures.append(row(f"{name}, graph", graph_seconds(calls, program_seconds), program_seconds, 1.03))
        del outs, turns, calls
    return figures


def call_microseconds(call: Callable[[], object]) -> float:
    """Returns the median CPU time of a call, which returns before the GPU finishes."""
    for _ in range(500):
        call()
    rounds = []
    for _ in range(15):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call()
        rounds.append((time.perf_counter() - start) / 200)
    torch.cuda.synchronize()
    return statistics.median(rounds) * 1e6


def overheads() -> list[dict]:
    x = torch.randn(4, 64, device="cuda").bfloat16()
    one = x[:1].contiguous()
    mx, nv = microscale.quantize(x, "mxfp4"), microscale.quantize(x, "nvfp4")
    shared = microscale.amax(x)
    given, back = microscale.quantize(x, "nvfp4", global_scale=448.0), torch.empty_like(x)
    layer = QuantizedLinear.from_linear(torch.nn.Linear(64, 64, bias=False, device="cuda", dtype=torch.bfloat16)).requires_grad_(False)
    plain = torch.nn.Linear(64, 64, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    many = torch.randn(16, 64, device="cuda").bfloat16()
    calls = {
        "quantize mxfp4": lambda: microscale.quantize(x, "mxfp4"),
        "quantize mxfp4, outputs given": lambda: microscale.quantize(x, "mxfp4", out=mx),
        "quantize nvfp4, global scale given": lambda: microscale.quantize(x, "nvfp4", global_scale=448.0),
        "quantize nvfp4, all given": lambda: microscale.quantize(x, "nvfp4", global_scale=448.0, out=given),
        "quantize nvfp4, amax given": lambda: microscale.quantize(x, "nvfp4", amax=shared),
        "quantize nvfp4 (three kernels)": lambda: microscale.quantize(x, "nvfp4"),
        "dequantize": lambda: nv.dequantize(torch.bfloat16),
        "dequantize, output given": lambda: nv.dequantize(out=back),
        "linear, 1 row": lambda: microscale.linear(one, nv),
        "QuantizedLinear, 1 row": lambda: layer(one),
        "QuantizedLinear, 16 rows": lambda: layer(many),
        "for comparison: torch.nn.Linear, 1 row": lambda: plain(one),
        "for comparison: torch.empty": lambda: torch.empty(4, 64, device="cuda"),
        "for comparison: x + 1": lambda: x + 1,
    }
    figures = []
    with torch.no_grad():
        for name, call in calls.items():
            microseconds = call_microseconds(call)
            missed = "  MISSED" if microseconds > 15 and "comparison" not in name else ""
            print(f"call of {name:44} {microseconds:7.2f} µs   goal 15{missed}")
            figures.append({"name": name, "microseconds": microseconds, "goal": 15})
    return figures


def products(program: Path, shape: str, counts: list[int]) -> dict[tuple[str, int], float]:
    """Returns the program's times of the product that the library chooses, by format and tokens."""
    times = {}
    for op, few in [("gemv-weights", True), ("gemm-weights", False)]:
        tokens = [argument for count in counts if (count <= 8) == few for argument in ("--tokens", str(count))]
        if tokens:
            measured = bench(program, "--op", op, "--format", "nvfp4", "--format", "mxfp4", "--shape", shape, *tokens)
            times |= {(m["format"], m["tokens"]): m["median_seconds"] for m in measured}
    return times


def decoding(program: Path, shape: str, counts: list[int]) -> list[dict]:
    rows, cols = map(int, shape.split("x"))
    times = products(program, shape, counts)
    figures = []
    for format in ("nvfp4", "mxfp4"):
        weights = torch.randn(rows, cols, device="cuda").bfloat16()
        linear = torch.nn.Linear(cols, rows, bias=False, device="cuda", dtype=torch.bfloat16)
        linear.weight.data = weights
        first = QuantizedLinear.from_linear(linear, format).requires_grad_(False)
        bytes = first.weight_packed.nbytes + first.weight_scale.nbytes
        layers = [first, *(QuantizedLinear.from_linear(linear, format) for _ in range(min(255, ROTATION_BYTES // bytes)))]
        del linear, weights
        for tokens in counts:
            program_seconds = times[format, tokens]
            x = torch.randn(tokens, cols, device="cuda").bfloat16()
            with torch.no_grad():
                calls = [lambda layer=layer, x=x: layer(x) for layer in layers]
                seconds = graph_seconds(calls, program_seconds)
            figures.append(row(f"QuantizedLinear {format} {shape}, {tokens} rows, graph", seconds, program_seconds, 1.05))
    return figures


def main() -> None:
    arguments = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, microscale {microscale.__version__}")
    figures = {"overheads": overheads(), "quantizing": quantizing(arguments.microscale, arguments.shape)}
    figures["decoding"] = []
    for shape in arguments.layers or ["8192x8192"]:
        figures["decoding"] += decoding(arguments.microscale, shape, arguments.tokens or [1, 8, 16, 64])
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
