"""Times products of quantized weights on a CPU: microscale, candle and llama.cpp's ggml.

    python scripts/peers/peers_cpu_products.py [--shapes 4096x4096 14336x4096] [--tokens 1 8 32 128]
        [--threads 2] [--microscale PROGRAM] [--candle LAYER_SPEED] [--ggml DIRECTORY] [--json FILE]

The products multiply N tokens with weights of M rows and K columns, all random. Contenders take
turns, round by round, so that other load on the machine affects all of them. Times are the median
over all rounds and the least. microscale reports a median per round, the others also their least
run. ggml's threads wait for each other in loops, so other load slows it more than the others:
measure on a machine that does nothing else.

    microscale   `bench --op gemm-weights`, which rotates weights past the caches: NVFP4 and MXFP4
                 weights, activations in f32 and bf16, which it does not round
    candle       the example `layer_speed` of candle/, built with --release: candle's layers and
                 microscale's next to them. It does not rotate weights, and has its own tokens
    ggml         llama.cpp's `ggml_mul_mat` in libggml-base.so and libggml-cpu.so of DIRECTORY, with
                 weights in the layout into which llama.cpp repacks them, if it has one for the type
                 (the variant is "repacked"). Weights rotate. Activations are f32, which ggml rounds
                 to INT8 as part of the product

ggml's results are compared with the product of the unquantized weights in f32, so `error` has the
loss of the weights and of the activations. Needs numpy. Written for the ggml of llama-cpp-python
0.3.36.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from peers_report import Shape

GGML_TYPES = {"Q4_K": 12, "Q8_0": 8, "MXFP4": 39, "NVFP4": 40}
GGML_F32 = 0
FORMATS, DTYPES = ("nvfp4", "mxfp4"), ("f32", "bf16")
ROTATION_BYTES = 1 << 30
# Products of one of ggml's graphs, as in the graph of a model.
GRAPH_PRODUCTS = 8
# Relative errors of four-bit weights are near 0.1.
BOUND = 0.2


@dataclass(frozen=True)
class Key:
    """A contender's product."""

    library: str
    weights: str
    activations: str
    variant: str
    rows: int
    cols: int
    tokens: int

    @property
    def label(self) -> str:
        variant = f", {self.variant}" if self.variant else ""
        return f"{self.library} {self.weights}, {self.activations}{variant}"


@dataclass
class Times:
    """Median seconds of each round, the least of all, and the relative error if there is one."""

    medians: list[float] = field(default_factory=list)
    least: float = float("inf")
    error: float | None = None


class InitParams(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)


class Ggml:
    """ggml's shared libraries, and a CPU backend with a number of threads."""

    BASE = {
        "ggml_version": (c_char_p, []),
        "ggml_log_set": (None, [LogCallback, c_void_p]),
        "ggml_init": (c_void_p, [InitParams]),
        "ggml_free": (None, [c_void_p]),
        "ggml_tensor_overhead": (c_size_t, []),
        "ggml_graph_overhead": (c_size_t, []),
        "ggml_row_size": (c_size_t, [c_int, c_int64]),
        "ggml_quantize_chunk": (c_size_t, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
        "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
        "ggml_mul_mat": (c_void_p, [c_void_p, c_void_p, c_void_p]),
        "ggml_new_graph": (c_void_p, [c_void_p]),
        "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
        "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, [c_void_p, c_void_p]),
        "ggml_backend_buffer_free": (None, [c_void_p]),
        "ggml_backend_get_default_buffer_type": (c_void_p, [c_void_p]),
        "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
        "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
        "ggml_backend_graph_compute": (c_int, [c_void_p, c_void_p]),
        "ggml_backend_reg_dev_get": (c_void_p, [c_void_p, c_size_t]),
        "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
        "ggml_backend_dev_supports_op": (c_bool, [c_void_p, c_void_p]),
    }
    CPU = {
        "ggml_backend_cpu_init": (c_void_p, []),
        "ggml_backend_cpu_set_n_threads": (None, [c_void_p, c_int]),
        "ggml_backend_cpu_reg": (c_void_p, []),
    }

    def __init__(self, directory: Path, threads: int):
        for name, functions in (("libggml-base.so", self.BASE), ("libggml-cpu.so", self.CPU)):
            library = ctypes.CDLL(str(directory / name), mode=ctypes.RTLD_GLOBAL)
            for function, (result, arguments) in functions.items():
                found = getattr(library, function)
                found.restype, found.argtypes = result, arguments
                setattr(self, function.removeprefix("ggml_"), found)
        # ggml logs every repacked tensor.
        self.silent = LogCallback(lambda level, text, data: None)
        self.log_set(self.silent, None)
        self.backend = self.backend_cpu_init()
        self.backend_cpu_set_n_threads(self.backend, threads)
        self.plain = self.backend_get_default_buffer_type(self.backend)
        registry = self.backend_cpu_reg()
        self.device = self.backend_reg_dev_get(registry, 0)
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        prototype = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)
        extra = prototype(address)(self.device) if address else []
        self.repacking = []
        for buffer_type in extra:  # The list ends with a null pointer.
            if not buffer_type:
                break
            self.repacking.append(buffer_type)

    def context(self, tensors: int) -> int:
        """Makes a context for the descriptions of `tensors` tensors and a graph."""
        size = self.tensor_overhead() * tensors + self.graph_overhead()
        return self.init(InitParams(size, None, True))


class GgmlWeights:
    """Copies of quantized weights past the caches, in llama.cpp's layout for the type."""

    def __init__(self, ggml: Ggml, type: str, matrix: np.ndarray):
        self.ggml, self.type, self.matrix = ggml, type, matrix
        rows, cols = matrix.shape
        code, size = GGML_TYPES[type], ggml.row_size(GGML_TYPES[type], cols) * rows
        quantized = np.empty(size, dtype=np.uint8)
        ggml.quantize_chunk(code, matrix.ctypes.data, quantized.ctypes.data, 0, rows, cols, None)
        count = -(-max(2, -(-ROTATION_BYTES // size)) // GRAPH_PRODUCTS) * GRAPH_PRODUCTS
        for buffer_type in (*ggml.repacking, ggml.plain):
            self.variant = "" if buffer_type == ggml.plain else "repacked"
            context = ggml.context(count + 2)
            self.tensors = [ggml.new_tensor_2d(context, code, cols, rows) for _ in range(count)]
            buffer = ggml.backend_alloc_ctx_tensors_from_buft(context, buffer_type)
            product = ggml.mul_mat(context, self.tensors[0], ggml.new_tensor_2d(context, GGML_F32, cols, 1))
            self.owned = (context, buffer)
            if not self.variant or ggml.backend_dev_supports_op(ggml.device, product):
                break
            self.free()
        for tensor in self.tensors:
            ggml.backend_tensor_set(tensor, quantized.ctypes.data, 0, size)

    def free(self) -> None:
        context, buffer = self.owned
        self.ggml.backend_buffer_free(buffer)
        self.ggml.free(context)


class GgmlProduct:
    """Graphs of products with rotating weights."""

    def __init__(self, weights: GgmlWeights, tokens: int):
        ggml = self.ggml = weights.ggml
        rows, cols = weights.matrix.shape
        activations = np.random.default_rng(2).standard_normal((tokens, cols), dtype=np.float32)
        self.graphs, self.owned = [], []
        for first in range(0, len(weights.tensors), GRAPH_PRODUCTS):
            context = ggml.context(GRAPH_PRODUCTS + 1)
            x = ggml.new_tensor_2d(context, GGML_F32, cols, tokens)
            results = [ggml.mul_mat(context, of, x) for of in weights.tensors[first : first + GRAPH_PRODUCTS]]
            graph = ggml.new_graph(context)
            for result in results:
                ggml.build_forward_expand(graph, result)
            self.owned.append((context, ggml.backend_alloc_ctx_tensors_from_buft(context, ggml.plain)))
            ggml.backend_tensor_set(x, activations.ctypes.data, 0, activations.nbytes)
            self.graphs.append(graph)
        self.next = 0
        self.run()
        found = np.empty((tokens, rows), dtype=np.float32)
        ggml.backend_tensor_get(results[-1], found.ctypes.data, 0, found.nbytes)
        while self.next:
            self.run()
        ggml.backend_tensor_get(results[-1], found.ctypes.data, 0, found.nbytes)
        expected = activations @ weights.matrix.T
        self.error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))

    def run(self) -> float:
        """Runs the next graph and returns the seconds per product."""
        start = time.perf_counter()
        status = self.ggml.backend_graph_compute(self.ggml.backend, self.graphs[self.next])
        seconds = (time.perf_counter() - start) / GRAPH_PRODUCTS
        if status != 0:
            raise RuntimeError(f"ggml's graph failed with status {status}")
        self.next = (self.next + 1) % len(self.graphs)
        return seconds

    def sample(self, duration: float) -> list[float]:
        """Returns the seconds of runs for `duration` seconds, at least three."""
        seconds, start = [], time.perf_counter()
        while len(seconds) < 3 or time.perf_counter() - start < duration:
            seconds.append(self.run())
        return seconds

    def free(self) -> None:
        for context, buffer in self.owned:
            self.ggml.backend_buffer_free(buffer)
            self.ggml.free(context)


def time_ggml(ggml: Ggml, shape: Shape, tokens: list[int], add: Callable[..., None]) -> None:
    matrix = np.random.default_rng(1).standard_normal((shape.rows, shape.cols), dtype=np.float32)
    for type in GGML_TYPES:
        weights = GgmlWeights(ggml, type, matrix)
        for count in tokens:
            product = GgmlProduct(weights, count)
            key = Key("ggml", type, "f32 to INT8", weights.variant, shape.rows, shape.cols, count)
            seconds = product.sample(1.0)
            add(key, statistics.median(seconds), min(seconds), product.error)
            product.free()
        weights.free()


def time_microscale(program: Path, shape: Shape, tokens: list[int], threads: int, add: Callable[..., None]) -> None:
    command = [program, "bench", "--device", "cpu", "--op", "gemm-weights", "--shape", str(shape)]
    command += [word for format in FORMATS for word in ("--format", format)]
    command += [word for dtype in DTYPES for word in ("--dtype", dtype)]
    command += [word for count in tokens for word in ("--tokens", str(count))]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "bench.json"
        environment = {**os.environ, "RAYON_NUM_THREADS": str(threads)}
        subprocess.run([*command, "--json", output], env=environment, stdout=subprocess.DEVNULL, check=True)
        for entry in json.loads(output.read_text()):
            key = Key("microscale", entry["format"].upper(), entry["dtype"], "", shape.rows, shape.cols, entry["tokens"])
            add(key, entry["median_seconds"], entry["median_seconds"])


def time_candle(program: Path, shape: Shape, threads: int, add: Callable[..., None]) -> None:
    """Runs `layer_speed` and reads its table."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads)}
    arguments = [program, str(shape.rows), str(shape.cols)]
    printed = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True).stdout
    tokens = []
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "layer":
            tokens = [int(cell.split()[0]) for cell in cells[1:]]
        elif tokens and re.match(r"[\d.]+ \(", cells[-1]):
            ours = not cells[0].startswith("candle ")
            library = "microscale in candle" if ours else "candle"
            for count, cell in zip(tokens, cells[1:], strict=True):
                key = Key(library, cells[0].removeprefix("candle "), "f32", "", shape.rows, shape.cols, count)
                median, least = (float(word.strip("()")) * 1e-3 for word in cell.split())
                add(key, median, least)


def records(times: dict[Key, Times], threads: int) -> list[dict[str, object]]:
    return [
        {**asdict(key), "threads": threads, "median_seconds": statistics.median(of.medians)}
        | {"minimum_seconds": of.least, "rounds": len(of.medians), "error": of.error}
        for key, of in times.items()
    ]


def print_tables(times: dict[Key, Times]) -> None:
    """Prints a table per shape: median and least milliseconds by contender and number of tokens."""
    for shape in dict.fromkeys((key.rows, key.cols) for key in times):
        of_shape = {key: of for key, of in times.items() if (key.rows, key.cols) == shape}
        tokens = sorted({key.tokens for key in of_shape})
        print(f"\n| {shape[0]}x{shape[1]}, ms by tokens | {' | '.join(map(str, tokens))} | error |")
        print("|---" * (len(tokens) + 2) + "|")
        for label in dict.fromkeys(key.label for key in of_shape):
            row = {key.tokens: of for key, of in of_shape.items() if key.label == label}
            cells = [
                f"{statistics.median(row[count].medians) * 1e3:.2f} ({row[count].least * 1e3:.2f})" if count in row else "–"
                for count in tokens
            ]
            errors = [of.error for of in row.values() if of.error is not None]
            error = "–" if not errors else f"{max(errors):.3f}" + (" (wrong)" if max(errors) > BOUND else "")
            print(f"| {label} | {' | '.join(cells)} | {error} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, default=[Shape(4096, 4096), Shape(14336, 4096)])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--microscale", type=Path, help="the microscale program")
    parser.add_argument("--candle", type=Path, help="candle's example layer_speed")
    parser.add_argument("--ggml", type=Path, metavar="DIRECTORY", help="the folder of llama.cpp's shared libraries")
    parser.add_argument("--json", type=Path, default=Path("peers_cpu_products.json"), help="where to write the records")
    arguments = parser.parse_args()

    times: dict[Key, Times] = {}

    def add(key: Key, median: float, least: float, error: float | None = None) -> None:
        of = times.setdefault(key, Times())
        of.medians.append(median)
        of.least, of.error = min(of.least, least), error

    ggml = Ggml(arguments.ggml, arguments.threads) if arguments.ggml else None
    for _ in range(arguments.rounds):
        for shape in arguments.shapes:
            if arguments.microscale:
                time_microscale(arguments.microscale, shape, arguments.tokens, arguments.threads, add)
            if ggml:
                time_ggml(ggml, shape, arguments.tokens, add)
            if arguments.candle:
                time_candle(arguments.candle, shape, arguments.threads, add)
            arguments.json.write_text(json.dumps(records(times, arguments.threads), indent=2) + "\n")
    version = f", ggml {ggml.version().decode()}" if ggml else ""
    print(f"{arguments.threads} threads, medians of {arguments.rounds} rounds{version}")
    print_tables(times)


if __name__ == "__main__":
    main()
