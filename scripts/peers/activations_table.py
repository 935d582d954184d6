#!/usr/bin/env python3
"""Times everything that docs/lab shows about activation quantizers and KV caches, in one process.

    python scripts/peers/activations_table.py [--json FILE] [--seconds 140] [--workers 12]
        [--peers compiled humming]

- plain quantizers of 8192x8192 and fused ones of 8192x14336, as a share of the copy
- 1, 16 and 64 rows of 4096 and 14336, next to an empty kernel and the peers
- SiLU and the quantizer in one kernel, next to a compiled SiLU to bf16 and our plain quantizer
- appending to and gathering from KV caches: 256 and 32768 tokens of 8 heads of 128

Inputs are bf16, and shapes are of the output. CUDA graphs of several calls are replayed; inputs are
rotated so that they are not in the L2 cache. A time is the median replay divided by the calls. The
copy reads and writes the bytes that the operation must move: inputs, residual, codes and scales
without padding. The floor of few rows is an empty kernel of Triton plus these bytes at the rate of
the copy of 8192x8192.

Checks our codes of the first rows against the CPU's. Prints Markdown tables, and for peers the
share of codes that differ from eager PyTorch's. First, worker processes compile the peers' kernels
into the caches of Inductor and Humming. Measurements that do not start within the seconds are left
out and listed.

Needs the package with CUDA (`pip install ./python`), and peers_activations.py's requirements.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

import microscale
from microscale import GlobalScale, ops
from peers_activations import FORMATS, OPERATIONS, compiled, differing, humming, replayed, rotation, silu
from peers_graph import replay_seconds
from peers_report import Shape

FEW = [Shape(rows, cols) for cols in (4096, 14336) for rows in (1, 16, 64)]
PLAIN, FUSED, TWO_KERNELS = Shape(8192, 8192), Shape(8192, 14336), (Shape(1024, 14336), Shape(8192, 14336))
#: Formats of the plain quantizers after a SiLU of their own.
SECOND_KERNELS = ["fp8-token", "fp8-group", "mxfp8", "nvfp4"]
GATES = ("silu", "gelu")
CHECKED_ROWS = 8
COPY_BYTES, COPY_CALLS, REPLAYS = 256 << 20, 20, 15
HEADS, HEAD_DIM, PAGE = 8, 128, 16

Tensors = tuple[torch.Tensor, ...]
Run = Callable[[Tensors], Any]

#: Our formats: the words for `quantize_activations`, and the bytes of codes and scales per row.
OURS: dict[str, tuple[str, dict[str, Any], Callable[[int], float]]] = {
    "fp8": ("fp8", {"scale": 0.05}, lambda k: k),
    "fp8-tensor": ("fp8", {"scale": "tensor"}, lambda k: k),
    "fp8-token": ("fp8", {"scale": "token"}, lambda k: k + 4),
    "fp8-group": ("fp8", {"scale": "group128"}, lambda k: k + k / 32),
    "mxfp8": ("mxfp8", {"scale_rule": "rceil", "layout": "128x4"}, lambda k: k + k / 32),
    "mxfp4": ("mxfp4", {"scale_rule": "floor", "layout": "128x4"}, lambda k: k / 2 + k / 32),
    "nvfp4": ("nvfp4", {"scale": GlobalScale(448.0, "divisor"), "layout": "128x4"}, lambda k: k / 2 + k / 16),
    "nvfp4-token": ("nvfp4", {"scale": "token", "layout": "128x4"}, lambda k: k / 2 + k / 16 + 4),
}
WORDS = {"plain": "none", "silu": "silu_and_mul", "gelu": "gelu_and_mul", "rmsnorm": "rms_norm", "add-rmsnorm": "rms_norm"}


def gelu(inputs: Tensors) -> torch.Tensor:
    gate, up = inputs[0].float().chunk(2, -1)
    return (torch.nn.functional.gelu(gate) * up).bfloat16()


ALL_OPERATIONS = OPERATIONS | {"gelu": gelu}


def inputs_of(shape: Shape, operation: str) -> list[Tensors]:
    return rotation(shape, "silu" if operation == "gelu" else operation)


def ours(operation: str, name: str) -> Run:
    format, options, _ = OURS[name]
    words: dict[str, Any] = options | {"operation": WORDS[operation]}

    def run(inputs: Tensors) -> Any:
        extra = dict(zip(("weight", "residual"), inputs[1:]))
        return microscale.quantize_activations(inputs[0], format, **words, **extra)

    return run


def check(operation: str, name: str, inputs: Tensors) -> None:
    """Exits if codes of the first rows are not the CPU's."""
    per_row = [tensor[:CHECKED_ROWS].clone() if tensor.dim() == 2 else tensor for tensor in inputs]
    run = ours(operation, name)
    found, expected = run(tuple(per_row_of.clone() for per_row_of in per_row)), run(tuple(part.cpu() for part in per_row))
    if not torch.equal(found.codes.cpu(), expected.codes):
        sys.exit(f"activations_table.py: {operation} {name}: codes on the GPU are not the CPU's")


def moved(operation: str, name: str, shape: Shape) -> int:
    """The bytes that the operation must move."""
    per_row = 2 * shape.cols * (2 if operation in GATES else 1) + OURS[name][2](shape.cols)
    return int(shape.rows * (per_row + (4 * shape.cols if operation == "add-rmsnorm" else 0)))


def replay_of(calls: list[Callable[[], object]]) -> float:
    """The median seconds of a call, from replays of a graph of calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return statistics.median(replay_seconds(graph, REPLAYS)) / len(calls)


def copy_seconds(bytes: int) -> float:
    """The time of a copy that reads and writes `bytes` bytes in total."""
    half = max(bytes // 2, 1)
    count = min(COPY_CALLS, max(2, -(-(512 << 20) // half)))
    pairs = [(torch.ones(half, dtype=torch.uint8, device="cuda"), torch.empty(half, dtype=torch.uint8, device="cuda")) for _ in range(count)]

    def copy(pair: Tensors) -> None:
        for start in range(0, half, COPY_BYTES):
            pair[1][start : start + COPY_BYTES].copy_(pair[0][start : start + COPY_BYTES])

    return replay_of([lambda pair=pairs[call % count]: copy(pair) for call in range(max(count, COPY_CALLS))])


@triton.jit
def nothing():
    pass


def empty_seconds() -> float:
    return replay_of([lambda: nothing[(1,)]() for _ in range(256)])


def peer_runs(shape: Shape, operation: str, formats: list[str], peers: list[str]) -> list[tuple[str, str, Run]]:
    """The peers' functions for a shape: the library, the format and the call."""
    runs: list[tuple[str, str, Run]] = []
    for format in (format for format in formats if format in FORMATS):
        if "compiled" in peers:
            quantize, compute = FORMATS[format], ALL_OPERATIONS[operation]
            runs.append(("torch.compile", format, compiled(lambda inputs, c=compute, q=quantize: q(c(inputs)))))
        if "humming" in peers and (run := humming(operation, format)):
            runs.append(("Humming", format, run))
    return runs


def plan(peers: list[str]) -> list[tuple[Shape, str, list[str], list[str]]]:
    """Shapes, operations, our formats, and the peers' formats, the most important ones first."""
    compared = list(FORMATS) if peers else []
    few = [format for format in ("fp8-token", "nvfp4") if peers]
    planned = [(PLAIN, "plain", list(OURS), compared)]
    planned += [(FUSED, operation, list(OURS), compared) for operation in ("silu", "rmsnorm", "add-rmsnorm")]
    planned += [(shape, operation, list(OURS), few) for shape in FEW for operation in OPERATIONS]
    planned += [(FUSED, "gelu", list(OURS), [])]
    planned += [(TWO_KERNELS[0], "silu", SECOND_KERNELS, compared)]
    return planned


def warm_up(job: tuple[str, str, str, list[str]]) -> str:
    """Runs the peers' functions of a part of the plan once, to compile them. Returns an error."""
    text, operation, format, peers = job
    try:
        torch._dynamo.reset()
        shape = Shape.parse(text)
        x = torch.ones(shape.rows, shape.cols * (2 if operation in GATES else 1), dtype=torch.bfloat16, device="cuda")
        inputs = (x, x[0, : shape.cols].clone(), x.clone())[: {"rmsnorm": 2, "add-rmsnorm": 3}.get(operation, 1)]
        if format == "bf16":
            compiled(silu)(inputs)
        else:
            for _, _, run in peer_runs(shape, operation, [format], peers):
                run(inputs)
        torch.cuda.synchronize()
    except Exception as error:  # The measurement itself reports it.
        return f"{job}: {error!r}"[:300]
    return ""


def warm_all(peers: list[str], workers: int) -> None:
    jobs = [(str(shape), operation, format, peers) for shape, operation, _, formats in plan(peers) for format in formats]
    jobs += [(str(shape), "silu", "bf16", peers) for shape in TWO_KERNELS if "compiled" in peers]
    if jobs and workers > 0:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            for error in filter(None, pool.imap_unordered(warm_up, jobs)):
                print(f"warming up: {error}", file=sys.stderr)


class Table:
    """Records of measurements, until the time is up."""

    def __init__(self, seconds: float) -> None:
        self.records: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.end = time.monotonic() + seconds
        self.copies: dict[int, float] = {}

    def add(self, what: str, size: str, library: str, bytes: int, measure: Callable[[], float], **facts: Any) -> float | None:
        if time.monotonic() > self.end:
            self.left_out.append(f"{library} {what} {size}")
            return None
        try:
            seconds = measure()
        except Exception as error:
            self.left_out.append(f"{library} {what} {size}: {error!r}"[:300])
            return None
        if bytes and bytes not in self.copies:
            self.copies[bytes] = copy_seconds(bytes)
        record = {"what": what, "size": size, "library": library, "bytes": bytes, "seconds": seconds}
        self.records.append(record | {"copy_seconds": self.copies.get(bytes)} | facts)
        return seconds

    def of(self, what: str, size: str, library: str) -> dict[str, Any] | None:
        found = (r for r in self.records if (r["what"], r["size"], r["library"]) == (what, size, library))
        return next(found, None)


def measure_rows(table: Table, peers: list[str]) -> None:
    for shape, operation, formats, compared in plan(peers):
        measure_operation(table, shape, operation, formats, peer_runs(shape, operation, compared, peers), "compiled" in peers)
        torch.cuda.empty_cache()
    for shape in TWO_KERNELS:
        measure_operation(table, shape, "plain", SECOND_KERNELS, [], False)
        torch.cuda.empty_cache()


def measure_operation(
    table: Table, shape: Shape, operation: str, formats: list[str], theirs: list[tuple[str, str, Run]], compiles: bool
) -> None:
    sets, size = inputs_of(shape, operation), str(shape)
    original = tuple(tensor.clone() for tensor in sets[0])

    def measured(run: Run) -> Callable[[], float]:
        return lambda: replayed(run, sets)

    for name in formats:
        check(operation, name, original)
        table.add(f"{operation} {name}", size, "microscale", moved(operation, name, shape), measured(ours(operation, name)))
    for library, name, run in theirs:
        facts: dict[str, Any] = {}

        def compared(name: str = name, run: Run = run, facts: dict[str, Any] = facts) -> float:
            torch._dynamo.reset()
            expected = FORMATS[name](ALL_OPERATIONS[operation](tuple(tensor.clone() for tensor in original)))
            facts["different_codes"] = differing(run(tuple(tensor.clone() for tensor in original)), expected)
            return replayed(run, sets)

        if table.add(f"{operation} {name}", size, library, moved(operation, name, shape), compared) is not None:
            table.records[-1] |= facts
    if operation == "silu" and shape in TWO_KERNELS and compiles:
        # The first of two kernels. The second is our plain quantizer of its result.
        table.add("silu bf16", size, "torch.compile", 6 * shape.rows * shape.cols, measured(compiled(silu)))


def measure_cache(table: Table, tokens: int, name: str, widths: list[int]) -> None:
    scales, slots = torch.tensor([0.01, 0.01], device="cuda"), torch.randperm(tokens, device="cuda")
    # Keys and values in bf16, codes and block scales of both, and slots.
    bytes = tokens * (HEADS * (4 * HEAD_DIM + sum(widths)) + 8)
    sets: list[Tensors] = []
    for _ in range(min(20, max(2, -(-(256 << 20) // bytes)))):
        parts = [torch.zeros(tokens // PAGE, PAGE, HEADS, width, dtype=torch.uint8, device="cuda") for width in widths]
        rows = torch.randn(2, tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        sets.append((rows[0], rows[1], *parts))

    def append(of: Tensors) -> None:
        ops.append_kv(of[0], of[1], of[2], of[3], slots, scales, *of[4:])

    def gather(of: Tensors) -> Tensors:
        return ops.gather_kv(of[2], of[3], slots, scales, torch.bfloat16, *of[4:])

    # Gathering first fills its results with zeros, by other kernels.
    for what, call in (("append-kv", append), ("gather-kv", gather)):
        calls = [lambda of=of, call=call: call(of) for of in sets * (20 // len(sets))]
        table.add(f"{what} {name}", f"{tokens} tokens", "microscale", bytes, lambda calls=calls: replay_of(calls))


def measure_kv(table: Table) -> None:
    for tokens in (256, 32768):
        measure_cache(table, tokens, "fp8", [HEAD_DIM] * 2)
        measure_cache(table, tokens, "nvfp4", [HEAD_DIM // 2] * 2 + [HEAD_DIM // 16] * 2)
        torch.cuda.empty_cache()


def of_copy(record: dict[str, Any] | None) -> str:
    if record is None:
        return "–"
    return f"{record['seconds'] * 1e6:.1f}, {record['copy_seconds'] / record['seconds']:.2f}"


def print_tables(table: Table, empty: float, peers: list[str]) -> None:
    libraries = [name for name, peer in (("torch.compile", "compiled"), ("Humming", "humming")) if peer in peers]

    def microseconds(what: str, size: str, library: str) -> str:
        record = table.of(what, size, library)
        return "–" if record is None else f"{record['seconds'] * 1e6:.1f}"

    print(f"\nµs, and the copy's time divided by it; then the peers' µs ({', '.join(libraries)})\n")
    print("| | plain 8192×8192 | silu 8192×14336 | gelu | rmsnorm | add-rmsnorm |\n|---|---|---|---|---|---|")
    for name in OURS:
        cells = []
        for operation in ("plain", "silu", "gelu", "rmsnorm", "add-rmsnorm"):
            size = str(PLAIN if operation == "plain" else FUSED)
            what = f"{operation} {name}"
            theirs = [microseconds(what, size, library) for library in libraries]
            rest = f"; {', '.join(theirs)}" if set(theirs) != {"–"} and theirs else ""
            cells.append(of_copy(table.of(what, size, "microscale")) + rest)
        print(f"| {name} | {' | '.join(cells)} |")

    large = table.copies.get(moved("plain", "fp8-token", PLAIN))
    rate = moved("plain", "fp8-token", PLAIN) / large if large else float("inf")
    print(f"\nThe empty kernel takes {empty * 1e6:.2f} µs, and the copy moves {rate / 1e12:.2f} TB/s.")
    print("Few rows: µs, and µs divided by the empty kernel's and the bytes' together; then the peers' µs\n")
    print(f"| | {' | '.join(map(str, FEW))} |\n|---|{'---|' * len(FEW)}")
    for operation in OPERATIONS:
        for name in OURS:
            cells = []
            for shape in FEW:
                what, record = f"{operation} {name}", table.of(f"{operation} {name}", str(shape), "microscale")
                if record is None:
                    cells.append("–")
                    continue
                ratio = record["seconds"] / (empty + record["bytes"] / rate)
                theirs = [microseconds(what, str(shape), library) for library in libraries]
                rest = f"; {', '.join(theirs)}" if theirs and set(theirs) != {"–"} else ""
                cells.append(f"{record['seconds'] * 1e6:.1f}, {ratio:.2f}{rest}")
            print(f"| {operation} {name} | {' | '.join(cells)} |")

    print("\nA compiled SiLU to bf16 and our plain quantizer, and this divided by the fused kernel: µs\n")
    for shape in TWO_KERNELS:
        first = table.of("silu bf16", str(shape), "torch.compile")
        for name in SECOND_KERNELS:
            second, fused = (table.of(f"{operation} {name}", str(shape), "microscale") for operation in ("plain", "silu"))
            if first and second and fused:
                both = first["seconds"] + second["seconds"]
                print(f"- {shape} {name}: {both * 1e6:.1f}, {both / fused['seconds']:.2f}")

    print("\nKV caches: µs, and the copy's time divided by it\n")
    for record in (record for record in table.records if record["what"].split()[0] in ("append-kv", "gather-kv")):
        print(f"- {record['what']}, {record['size']}: {of_copy(record)}")
    different = [r for r in table.records if r.get("different_codes")]
    if different:
        worst = max(different, key=lambda record: record["different_codes"])
        print(f"\nPeers' codes that differ from eager PyTorch's: at most {worst['different_codes']:.2e} ({worst['library']} {worst['what']})")
    if table.left_out:
        print(f"\nLeft out: {'; '.join(table.left_out)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="*", choices=("compiled", "humming"), default=["compiled", "humming"])
    parser.add_argument("--seconds", type=float, default=140, help="start no measurement later than this")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile the peers' kernels first")
    parser.add_argument("--json", type=Path, default=Path("activations_table.json"), help="where to write the records")
    arguments = parser.parse_args()
    start = time.monotonic()
    if not torch.cuda.is_available():
        print("activations_table.py: torch sees no CUDA device", file=sys.stderr)
        return 2
    warm_all(arguments.peers, arguments.workers)
    print(f"compiled after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    torch.manual_seed(0)
    table = Table(arguments.seconds - (time.monotonic() - start))
    empty = empty_seconds()
    measure_kv(table)
    measure_rows(table, arguments.peers)
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "empty_seconds": empty}
    arguments.json.write_text(json.dumps([device | record for record in table.records], indent=2) + "\n")
    print(f"{device['device']}, PyTorch {torch.__version__}, {time.monotonic() - start:.0f} s")
    print_tables(table, empty, arguments.peers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
