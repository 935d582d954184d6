#!/usr/bin/env python3
"""Times products with bf16 activations in PyTorch (bf16 or FP8 weights) and Humming (4-bit weights).

    python scripts/peers/peers_gemm.py [--half held-out] [--models Qwen3-14B ...]
        [--shapes 8192x28672 ...] [--tokens 1 16 ...] [--formats nvfp4]
        [--peers pytorch humming] [--ours microscale] [--json FILE]
    python scripts/peers/peers_gemm.py --report FILE ...

The default layers and numbers of tokens are in host/src/gpu/plan/layers.txt: layers of language
models. microscale is tuned on a random half of them. Tables and geometric means are printed for
each half. With `--shapes` or `--grouped-shapes` the script measures these instead, and needs no file
of layers. `--report` prints the tables of records that earlier runs wrote.

The products multiply N tokens with weights of M rows and K columns. Weights and activations are
random normal numbers. Copies of the weights are rotated so that they are not in the L2 cache;
activations and results are not rotated. A CUDA graph of several products is replayed. The time is
the median replay divided by the number of products. Afterwards the script fills the results of the
last product with NaN, replays the graph again, and compares the results with products in float64
from the same weights, which this script decodes.

Grouped products, as in a mixture of experts, multiply each token with the weights of some of the
experts, chosen at random: `--top-k` of `--experts` with `--grouped-shapes`. The rows are sorted by
expert for all peers; the time excludes choosing and sorting.

Humming compiles kernels for the chosen layers and tokens only. To measure faster, choose fewer of
them, or fewer `--replays`.

Peers:

    pytorch           bf16 weights: cuBLAS, and torch.nn.functional.grouped_mm for grouped products
    humming           4-bit weights in Humming with the kernels that it chooses itself, compiled
                      before the measurement; grouped products with its grouped and indexed kernels
    humming-mma       the same with `mma` instead of `wgmma`, as Humming chooses for the A100
    humming-fp8       4-bit weights and activations that Humming quantizes to FP8, a scale per token.
                      The time includes this quantization
    pytorch-fp8       FP8 weights in cuBLAS (torch._scaled_mm with a scale per tensor), single matrices
                      only. The time excludes the quantization of activations

With `--ours` the records include the times of microscale: products with bf16 activations and, with
a peer for FP8, with activations that are quantized to FP8, a scale per token. Their `kernel` is the configuration that
microscale chose, such as wgmma-256x64-c2 or gemv-16x1-s8.

Needs torch with CUDA. Humming needs humming-kernels, and NVRTC with CUDA's headers or nvcc with
HUMMING_COMPILER=nvcc. Written for torch 2.11, humming-kernels 0.1.19 and CUDA 13.0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from peers_graph import replay_seconds
from peers_layers import HALVES, LAYERS, Case, Layer, Layers, print_summary
from peers_report import MX_BLOCK, NV_BLOCK, Shape

# Numbers of tokens for given shapes.
DENSE_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
GROUPED_TOKENS = (1, 16, 128, 1024)
FORMATS = ("nvfp4", "mxfp4")
PEERS = ("pytorch", "humming", "humming-mma", "humming-fp8", "pytorch-fp8")
OURS = "microscale"

# Keys that records share with the measurements of `microscale bench`.
SHARED_KEYS = ("tokens", "bytes", "kernel", "format")
ROTATION_BYTES = 1 << 30
# Weights that Humming quantizes in one call: its intermediate results take several times as much.
QUANTIZED_ELEMENTS = 1 << 30
REPLAYS = 25
# Rounding results to bf16 causes an error of 0.0017. Kernels that add partial sums rounded to bf16
# reach 0.004.
BOUND = 0.006
# Rounding activations to E4M3 causes an error of 0.027.
FP8_BOUND = 0.04
FP8 = "fp8"


def bf16_weights(shape: Shape, experts: int = 0) -> torch.Tensor:
    leading = (experts,) if experts else ()
    return torch.randn(*leading, shape.rows, shape.cols, device="cuda", dtype=torch.bfloat16)


@dataclass(frozen=True)
class Batch:
    """Activations, sorted by expert: one row per token and expert, and the ends of experts."""

    tokens: int
    rows: torch.Tensor
    ends: torch.Tensor | None

    @classmethod
    def of(cls, case: Case, tokens: int) -> Batch:
        rows = torch.randn(tokens * case.top_k, case.shape.cols, device="cuda", dtype=torch.bfloat16)
        if not case.experts:
            return cls(tokens, rows, None)
        chosen = torch.rand(tokens, case.experts, device="cuda").topk(case.top_k).indices.flatten()
        return cls(tokens, rows, chosen.bincount(minlength=case.experts).cumsum(0).int())

    @property
    def matrices(self) -> int:
        """The number of matrices that the product reads."""
        return 1 if self.ends is None else len(self.ends.unique()) - int(self.ends[0] == 0)

    def reference(self, decoded: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Returns the product with the matrices of `decoded`, in float64."""
        rows = self.rows.double()
        if self.ends is None:
            return rows @ decoded(0).T
        parts = rows.tensor_split(self.ends[:-1].long().cpu())
        return torch.cat([part @ decoded(expert).T for expert, part in enumerate(parts)])


@dataclass(frozen=True)
class Record:
    """One measurement. `bytes` counts codes and scales; `error` is relative, over all results."""

    library: str
    version: str
    variant: str
    kernel: str
    format: str
    dtype: str
    rows: int
    cols: int
    experts: int
    top_k: int
    tokens: int
    device: str
    samples: int
    median_seconds: float
    minimum_seconds: float
    bytes: int | None
    bytes_per_second: float | None
    operations_per_second: float
    error: float | None
    verified: bool | None

    @classmethod
    def of(cls, *, case: Case, tokens: int, bytes: int | None, seconds: list[float], **fields: object) -> Record:
        median = statistics.median(seconds)
        return cls(
            dtype="bf16",
            rows=case.shape.rows,
            cols=case.shape.cols,
            experts=case.experts,
            top_k=case.top_k,
            tokens=tokens,
            device=torch.cuda.get_device_name(),
            samples=len(seconds),
            median_seconds=median,
            minimum_seconds=min(seconds),
            bytes=bytes,
            bytes_per_second=bytes / median if bytes else None,
            operations_per_second=2 * tokens * case.top_k * case.shape.elements / median,
            **fields,
        )

    @property
    def case(self) -> Case:
        return Case(Shape(self.rows, self.cols), self.experts, self.top_k)

    @property
    def fp8(self) -> bool:
        return FP8 in self.variant.split()

    @property
    def label(self) -> str:
        return " ".join(part for part in (self.library, self.variant, self.format) if part)


def copies(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Returns the tensors and enough copies of them to exceed the cache."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    more = max(2, -(-ROTATION_BYTES // size)) - 1
    return [tensors] + [{name: tensor.clone() for name, tensor in tensors.items()} for _ in range(more)]


def replayed(
    products: list[Callable[[], torch.Tensor]], tokens: int, replays: int
) -> tuple[list[float], torch.Tensor]:
    """Replays a graph of all `products`.

    Returns the seconds per product of each replay, and the results of the last product.
    """
    # Every product occurs equally often, so that the rotation continues from replay to replay.
    wanted = max(1, min(20, 8192 // tokens))
    products = products * -(-wanted // len(products))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for product in products[:2]:
            product()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            results = product()
    seconds = [seconds / len(products) for seconds in replay_seconds(graph, replays)]
    results.fill_(float("nan"))
    graph.replay()
    results = results.clone()
    torch.cuda.synchronize()
    return seconds, results


class PyTorch:
    """Products with bf16 weights: cuBLAS, or grouped_mm."""

    library, version, format, bound = "PyTorch", torch.__version__, "bf16", BOUND

    def __init__(self, case: Case):
        self.case = case
        self.variant = "grouped_mm" if case.experts else "cuBLAS"
        self.sets = copies({"weight": bf16_weights(case.shape, case.experts)})

    def matrix_bytes(self) -> int:
        return 2 * self.case.shape.elements

    def decoded(self, expert: int) -> torch.Tensor:
        weight = self.sets[0]["weight"]
        return (weight[expert] if self.case.experts else weight).double()

    def kernel(self, batch: Batch) -> str:
        return ""

    def products(self, batch: Batch) -> list[Callable[[], torch.Tensor]]:
        weights = [tensors["weight"].transpose(-1, -2) for tensors in self.sets]
        if batch.ends is not None:
            grouped_mm = torch.nn.functional.grouped_mm
            return [lambda w=w: grouped_mm(batch.rows, w, offs=batch.ends) for w in weights]
        out = torch.empty(len(batch.rows), self.case.shape.rows, device="cuda", dtype=torch.bfloat16)
        return [lambda w=w: torch.mm(batch.rows, w, out=out) for w in weights]


class PyTorchFp8(PyTorch):
    """Products with FP8 weights and activations, with a scale for each tensor: cuBLAS."""

    format, bound = "e4m3", FP8_BOUND

    def __init__(self, case: Case):
        self.case, self.variant = case, f"cuBLAS {FP8}"
        # Values of a normal distribution are in the range of E4M3.
        self.sets = copies({"weight": bf16_weights(case.shape).to(torch.float8_e4m3fn)})
        self.scale = torch.ones((), device="cuda")

    def matrix_bytes(self) -> int:
        return self.case.shape.elements

    def products(self, batch: Batch) -> list[Callable[[], torch.Tensor]]:
        rows, out = batch.rows.to(torch.float8_e4m3fn), torch.bfloat16
        # cuBLAS takes multiples of 16 rows.
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 16))

        def product(weight: torch.Tensor) -> torch.Tensor:
            return torch._scaled_mm(rows, weight.T, self.scale, self.scale, out_dtype=out)[: len(batch.rows)]

        return [lambda w=tensors["weight"]: product(w) for tensors in self.sets]


class HummingKernels:
    """Humming's configuration of a layer for one case, and one kernel per number of rows."""

    SCHEMAS = {
        "nvfp4": {"scale_dtype": "float8e4m3", "group_size": NV_BLOCK, "scale_2_type": "tensor"},
        "mxfp4": {"scale_dtype": "float8e8m0", "group_size": MX_BLOCK},
    }

    def __init__(self, case: Case, format: str, gemm: str, variant: str, tokens: list[int]):
        # Imported here: the other peers run without Humming.
        from humming.schema import HummingInputSchema, HummingWeightSchema
        from humming.transform import prepare_layer_config

        self.case, self.format, self.gemm, self.variant = case, format, gemm, variant
        self.schema = HummingWeightSchema.from_config({"dtype": "float4e2m1", **self.SCHEMAS[format]})
        fp8 = {"a_dtype": "float8e4m3", "input_scale_dtype": "float32", "input_quant_mode": "dynamic_token"}
        self.config = prepare_layer_config(
            case.shape.rows,
            case.shape.cols,
            self.schema,
            HummingInputSchema(**fp8) if variant == FP8 else None,
            num_experts=case.experts,
            pad_n_to_multiple=128,  # For 2880 rows. Results have no padding.
            torch_dtype=torch.bfloat16,
        )
        self.compute = None if gemm == "dense" else json.dumps({"gemm_type": gemm})
        self.tunings = {count * case.top_k: self.tuning(count * case.top_k) for count in tokens}

    def tuning(self, rows: int) -> dict[str, object]:
        """Returns Humming's kernel for `rows` rows, or its kernel for a GPU that has only `mma`."""
        from humming.config import GemmType
        from humming.tune import get_heuristics_config
        from humming.tune.sm8x import Sm80Heuristics

        if self.variant == "mma":
            return Sm80Heuristics.get_config(self.config, rows, gemm_type=GemmType(self.gemm)) | {"mma_type": "mma"}
        return get_heuristics_config(self.config, rows, gemm_type=self.gemm)

    def jobs(self) -> Iterator[Callable[[], object]]:
        from humming.kernel.humming import HummingKernel

        for tuning in {json.dumps(values) for values in self.tunings.values()}:
            yield lambda tuning=tuning: HummingKernel.prepare_kernels(self.config.to_str(), self.compute, tuning)


class Humming:
    """Products with 4-bit weights in Humming, which quantizes and arranges them."""

    library = "Humming"

    def __init__(self, kernels: HummingKernels):
        from humming.transform import transform_humming_tensors

        self.kernels, self.case, self.format = kernels, kernels.case, kernels.format
        self.version = version("humming-kernels")
        dense = "" if kernels.gemm == "dense" else kernels.gemm.removesuffix("_contiguous")
        self.variant = " ".join(part for part in (dense, kernels.variant) if part)
        self.bound = FP8_BOUND if kernels.variant == FP8 else BOUND
        self.plain = self.quantized()
        self.sets = copies(transform_humming_tensors(kernels.config, self.plain))
        self.locks = torch.zeros(2048, dtype=torch.int32, device="cuda")

    def quantized(self) -> dict[str, torch.Tensor]:
        """Quantizes random weights, some experts at a time."""
        schema, shape, experts = self.kernels.schema, self.case.shape, self.case.experts
        most = max(1, QUANTIZED_ELEMENTS // shape.elements)
        if experts <= most:
            return schema.quant_tensor(bf16_weights(shape, experts), schema, torch.bfloat16)
        counts = [min(most, experts - first) for first in range(0, experts, most)]
        parts = [schema.quant_tensor(bf16_weights(shape, count), schema, torch.bfloat16) for count in counts]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def matrix_bytes(self) -> int:
        return self.case.shape.elements // 2 + self.case.shape.elements // self.kernels.schema.weight_scale_group_size

    def decoded(self, expert: int) -> torch.Tensor:
        """Decodes a matrix from Humming's codes (low bits first) and unarranged scales."""
        index = expert if self.case.experts else ...
        codes, scales = (self.plain[name][index].contiguous() for name in ("weight", "weight_scale"))
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device="cuda")
        pairs = codes.view(torch.uint8)
        decoded = torch.cat([values, -values])[torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).int()]
        blocks = decoded.unflatten(-1, (scales.shape[-1], -1))
        blocks *= scales.float().double().unsqueeze(-1)
        if "weight_scale_2" in self.plain:
            blocks *= self.plain["weight_scale_2"].double()[expert]
        return blocks.flatten(-2)

    def kernel(self, batch: Batch) -> str:
        values = self.kernels.tunings[len(batch.rows)]
        return f"{values['mma_type']} {'x'.join(map(str, values['block_shape']))}"

    def routing(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Returns the arguments that assign rows to experts."""
        if batch.ends is None:
            return {}
        if self.kernels.gemm == "grouped_contiguous":
            return {"expert_layout": torch.nn.functional.pad(batch.ends, (1, 0)).long()}
        from humming.testing.data import generate_moe_tensors

        counts = batch.ends.diff(prepend=batch.ends.new_zeros(1))
        experts = torch.arange(self.case.experts, device="cuda").repeat_interleave(counts)
        block = self.kernels.tunings[len(batch.rows)]["block_shape"][0]
        tensors = generate_moe_tensors(experts.int().unsqueeze(1), self.case.experts, self.kernels.gemm, block)
        return dict(zip(("sorted_ids", "expert_ids", "num_tokens_padded"), tensors[2:], strict=True))

    def products(self, batch: Batch) -> list[Callable[[], torch.Tensor]]:
        from humming.forward import humming_forward

        out = torch.empty(len(batch.rows), self.case.shape.rows, device="cuda", dtype=torch.bfloat16)
        tuning = json.dumps(self.kernels.tunings[len(batch.rows)])
        fixed = {"outputs": out, "locks": self.locks, "compute_config": self.kernels.compute, "tuning_config": tuning}
        fixed |= self.routing(batch)

        def product(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
            return humming_forward(self.kernels.config, batch.rows, **tensors, **fixed)

        return [lambda tensors=tensors: product(tensors) for tensors in self.sets]


def compiled(kernels: list[HummingKernels]) -> None:
    """Compiles all kernels in parallel. A failure is reported when the kernel is used."""

    def attempt(job: Callable[[], object]) -> None:
        try:
            job()
        except Exception:
            pass

    started = time.monotonic()
    jobs = [job for each in kernels for job in each.jobs()]
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        list(executor.map(attempt, jobs))
    print(f"{len(jobs)} kernels of Humming ready after {time.monotonic() - started:.0f} s", flush=True)


def measure(peer: PyTorch | Humming, tokens: int, replays: int) -> Record:
    batch = Batch.of(peer.case, tokens)
    seconds, results = replayed(peer.products(batch), tokens, replays)
    expected = batch.reference(peer.decoded)
    # NaN if any result is NaN.
    error = float((results.double() - expected).norm() / expected.norm())
    return Record.of(
        case=peer.case,
        tokens=tokens,
        bytes=batch.matrices * peer.matrix_bytes(),
        seconds=seconds,
        library=peer.library,
        version=peer.version,
        variant=peer.variant,
        kernel=peer.kernel(batch),
        format=peer.format,
        error=error,
        verified=error <= peer.bound,
    )


def ours(program: str, case: Case, formats: list[str], tokens: list[int], fp8: bool) -> list[Record]:
    """Runs `microscale bench`, which verifies its own results."""
    command = [*shlex.split(program), "bench", "--device", "cuda:0", "--dtype", "bf16"]
    shape = f"{case.shape.rows}x{case.shape.cols}"
    if case.experts:
        command += ["--shape", f"{shape}x{case.experts}", "--top-k", str(case.top_k)]
        ops = {"gemm-experts": "", "gemm-experts-fp8": FP8}
    else:
        command += ["--shape", shape]
        ops = {"gemm-weights": "", "gemm-fp8": FP8}
    command += [argument for op, variant in ops.items() if fp8 or not variant for argument in ("--op", op)]
    command += [argument for format in formats for argument in ("--format", format)]
    command += [argument for count in tokens for argument in ("--tokens", str(count))]
    with tempfile.TemporaryDirectory() as directory:
        written = Path(directory) / "ours.json"
        subprocess.run([*command, "--json", str(written)], stdout=subprocess.DEVNULL, check=True)
        entries = json.loads(written.read_text())
    ours_too = {"library": OURS, "version": "", "error": None, "verified": True}
    return [
        Record.of(
            case=case,
            seconds=[entry["median_seconds"]],
            variant=ops[entry["op"]],
            **ours_too,
            **{key: entry[key] for key in SHARED_KEYS},
        )
        for entry in entries
    ]


def line_of(record: Record) -> str:
    error = "" if record.error is None else f"  error {record.error:.1e}"
    wrong = "  WRONG" if record.verified is False else ""
    return (
        f"{record.tokens:6} tokens  {record.label:28} {record.median_seconds * 1e6:9.1f} us  "
        f"{record.operations_per_second * 1e-12:6.1f} Tflop/s  {record.kernel:20}{error}{wrong}"
    )


def print_tables(records: list[Record], names: dict[Case, str]) -> None:
    """Prints a table per case: microseconds per number of tokens, and the speedup over PyTorch."""
    for case in dict.fromkeys(record.case for record in records):
        of_case = [record for record in records if record.case == case]
        labels = list(dict.fromkeys(record.label for record in of_case))
        print(f"\n| {names.get(case, case)}: tokens | {' | '.join(labels)} |")
        print("|---" * (len(labels) + 1) + "|")
        for tokens in sorted({record.tokens for record in of_case}):
            by_label = {record.label: record for record in of_case if record.tokens == tokens}
            base = next((record for record in by_label.values() if record.library == PyTorch.library), None)
            cells = []
            for label in labels:
                record = by_label.get(label)
                cell = "–" if record is None else f"{record.median_seconds * 1e6:.1f}"
                if record is not None and base is not None and record is not base:
                    cell += f", {base.median_seconds / record.median_seconds:.2f}"
                if record is not None and record.verified is False:
                    cell += " (wrong)"
                cells.append(cell)
            print(f"| {tokens} | {' | '.join(cells)} |")


def print_report(records: list[Record], layers: list[Layer]) -> None:
    """Prints tables and speedups of each half of the layers, and of shapes that are no layers."""
    names = {layer.case: str(layer) for layer in layers}
    halves = {layer.case: layer.half for layer in layers}
    for half in (*HALVES, None):
        of_half = [record for record in records if halves.get(record.case) == half]
        if not of_half:
            continue
        print(f"\n## {f'{half.capitalize()} layers' if half else 'Other shapes'}")
        print_tables(of_half, names)
        libraries = {record.library for record in of_half}
        peers = [peer for peer in (Humming.library, PyTorch.library) if peer in libraries]
        if OURS in libraries and peers:
            print_summary(of_half, names, OURS, peers)


def is_chosen(layer: Layer, arguments: argparse.Namespace) -> bool:
    """Returns whether a layer is of the half, models and kind that are asked for."""
    of_half = arguments.half in ("all", layer.half)
    return of_half and layer.is_of(arguments.models) and arguments.kind in ("all", layer.case.kind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=Path, default=LAYERS, metavar="FILE", help="the layers and their halves")
    parser.add_argument("--half", choices=(*HALVES, "all"), default="all", help="the half of the layers")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="layers of models with such a part of the name only")
    parser.add_argument("--kind", choices=("dense", "grouped", "all"), default="all", help="layers of this kind only")
    parser.add_argument("--shapes", nargs="+", metavar="MxK", help="shapes of single matrices instead of layers")
    parser.add_argument("--tokens", nargs="+", type=int, help="for dense products; for layers also for grouped ones")
    parser.add_argument(
        "--grouped-shapes", nargs="+", metavar="MxK", help="shapes of an expert's matrix instead of layers"
    )
    parser.add_argument("--grouped-tokens", nargs="+", type=int, help="for grouped products")
    parser.add_argument("--experts", type=int, default=32, help="for --grouped-shapes")
    parser.add_argument("--top-k", type=int, default=4, help="for --grouped-shapes")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=FORMATS)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS[:2])
    parser.add_argument("--replays", type=int, default=REPLAYS, help="timed replays per product of a peer")
    parser.add_argument("--ours", metavar="PROGRAM", help="the microscale program, to measure the same products")
    parser.add_argument("--json", type=Path, default=Path("peers_gemm.json"), help="where to write the records")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="print the tables of records and exit")
    arguments = parser.parse_args()
    if arguments.replays < 1:
        parser.error("--replays must be at least 1")
    given = bool(arguments.shapes or arguments.grouped_shapes)
    read = Layers((), ()) if given else Layers.read(arguments.layers)
    layers = [layer for layer in read.layers if is_chosen(layer, arguments)]
    if arguments.report:
        entries = [entry for path in arguments.report for entry in json.loads(path.read_text())]
        others = {layer.case for layer in read.layers} - {layer.case for layer in layers}
        records = [Record(**entry) for entry in entries]
        print_report([record for record in records if record.case not in others], layers)
        return 0
    cases = [Case(Shape.parse(shape)) for shape in arguments.shapes or ()]
    cases += [Case(Shape.parse(shape), arguments.experts, arguments.top_k) for shape in arguments.grouped_shapes or ()]
    cases += [layer.case for layer in layers]
    if not cases:
        parser.error("no layer is of this half, these models and this kind")
    dense_tokens = arguments.tokens or (DENSE_TOKENS if given else read.reported_tokens)
    grouped_tokens = arguments.grouped_tokens or (GROUPED_TOKENS if given else dense_tokens)
    tokens_of = {case: grouped_tokens if case.experts else dense_tokens for case in cases}
    if not torch.cuda.is_available():
        print("peers_gemm.py: torch sees no CUDA device", file=sys.stderr)
        return 2

    torch.manual_seed(0)
    print(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"medians of {arguments.replays}"
    )
    failures = 0

    # Constructors of the peers per case: the weights of only one peer are in memory at a time.
    peers: dict[Case, list[Callable[[], PyTorch | Humming]]] = {case: [] for case in cases}
    kernels = []
    for case in cases:
        if "pytorch" in arguments.peers:
            peers[case].append(lambda case=case: PyTorch(case))
        if "pytorch-fp8" in arguments.peers and not case.experts:
            peers[case].append(lambda case=case: PyTorchFp8(case))
        gemms = ("grouped_contiguous", "indexed") if case.experts else ("dense",)
        chosen = [name.removeprefix("humming").strip("-") for name in arguments.peers if name.startswith("humming")]
        for format, gemm, variant in itertools.product(arguments.formats, gemms, chosen):
            try:
                kernels.append(HummingKernels(case, format, gemm, variant, tokens_of[case]))
            except Exception as error:  # A missing or unsuitable peer reports why.
                what = f"Humming {gemm} {variant} {format}"
                print(f"{case}  {what}: {type(error).__name__}: {error}", flush=True)
                failures += 1
            else:
                peers[case].append(lambda of=kernels[-1]: Humming(of))
    if kernels:
        compiled(kernels)

    records = []
    for case in cases:
        print(case, flush=True)
        if arguments.ours:
            fp8 = any(FP8 in name for name in arguments.peers)
            found = ours(arguments.ours, case, arguments.formats, tokens_of[case], fp8)
            print(*map(line_of, found), sep="\n", flush=True)
            records += found
        for make in peers[case]:
            peer, step = None, "weights"
            try:
                peer = make()
                for tokens in tokens_of[case]:
                    step = f"{tokens} tokens"
                    records.append(measure(peer, tokens, arguments.replays))
                    print(line_of(records[-1]), flush=True)
                    failures += not records[-1].verified
            except Exception as error:
                name = f"{peer.library} {peer.variant} {peer.format}" if peer else "Humming"
                print(f"  {name}, {step}: {type(error).__name__}: {error}", flush=True)
                failures += 1
            del peer
            torch.cuda.empty_cache()
            arguments.json.write_text(json.dumps([asdict(record) for record in records], indent=2) + "\n")
    print_report(records, layers)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
