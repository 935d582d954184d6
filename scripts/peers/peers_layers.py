"""Shared by the peers' scripts: layers of language models, and summaries of their measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from peers_report import Shape

LAYERS = Path(__file__).resolve().parents[2] / "host/src/gpu/plan/layers.txt"
HALVES = ("tuned", "held-out")
TOKEN_RANGES = (range(1, 65), range(65, 8193))


@dataclass(frozen=True)
class Case:
    """Weights of one shape: one matrix, or one per expert. A token uses `top_k` experts."""

    shape: Shape
    experts: int = 0
    top_k: int = 1

    def __str__(self) -> str:
        return f"{self.shape}, {self.top_k} of {self.experts} experts" if self.experts else str(self.shape)

    @property
    def kind(self) -> str:
        return "grouped" if self.experts else "dense"


@dataclass(frozen=True)
class Layer:
    """A line of layers.txt. `model` joins the names of several models by `+`."""

    model: str
    role: str
    case: Case
    half: str

    def __str__(self) -> str:
        return f"{self.model} {self.role} {self.case}"

    def is_of(self, models: list[str] | None) -> bool:
        """Returns whether a name in `models`, in any case, is part of the model's name. `None` has all."""
        return models is None or any(name.lower() in self.model.lower() for name in models)


@dataclass(frozen=True)
class Layers:
    """The layers of a file, and the numbers of tokens to report."""

    layers: tuple[Layer, ...]
    reported_tokens: tuple[int, ...]

    @classmethod
    def read(cls, path: Path) -> Layers:
        """Reads a file as layers.txt describes it. Raises ValueError for a line that is no layer."""
        layers, reported = [], ()
        for line in path.read_text().splitlines():
            match line.split():
                case []:
                    pass
                case [first, *_] if first.startswith("#"):
                    pass
                case ["tuned-tokens", *_]:
                    pass
                case ["reported-tokens", *counts]:
                    reported = tuple(map(int, counts))
                case [model, role, rows, cols, *experts, half] if len(experts) in (0, 2) and half in HALVES:
                    case = Case(Shape.parse(f"{rows}x{cols}"), *map(int, experts))
                    layers.append(Layer(model, role, case, half))
                case _:
                    raise ValueError(f"{path}: {line!r} is no layer")
        return cls(tuple(layers), reported)


class Measured(Protocol):
    """The attributes of a record that summaries need."""

    library: str
    format: str
    tokens: int
    median_seconds: float
    verified: bool | None
    case: Case
    kernel: str
    #: Activations are multiplied in FP8.
    fp8: bool


@dataclass(frozen=True)
class Comparison:
    """One of our products and the fastest of a peer's, of the same case, tokens and format."""

    ours: Measured
    peer: Measured

    @property
    def speedup(self) -> float:
        return self.peer.median_seconds / self.ours.median_seconds


def comparisons(records: Iterable[Measured], ours: str, peer: str) -> list[Comparison]:
    """Compares our records with the fastest of a library's variants for the same activations.

    A library without 4-bit weights is compared with each of our formats. Wrong results do not count.
    """
    right = [record for record in records if record.verified is not False]
    compared = []
    for mine in (record for record in right if record.library == ours):
        same = [
            record
            for record in right
            if record.library == peer
            and (record.case, record.tokens, record.fp8) == (mine.case, mine.tokens, mine.fp8)
            and record.format in (mine.format, "bf16", "e4m3")
        ]
        if same:
            compared.append(Comparison(mine, min(same, key=lambda record: record.median_seconds)))
    return compared


def format_of(record: Measured) -> str:
    """Returns the formats of a record's weights and, if they are FP8, activations."""
    return f"{record.format} x fp8" if record.fp8 else record.format


def print_summary(records: list[Measured], names: dict[Case, str], ours: str, peers: list[str]) -> None:
    """Prints our geometric mean speedups over the peers, and every product that is slower."""
    compared = {peer: comparisons(records, ours, peer) for peer in peers}
    formats = list(dict.fromkeys(format_of(record) for record in records if record.library == ours))
    print(f"\n| {ours}, geometric mean speedup | {' | '.join(f'over {peer}' for peer in peers)} |")
    print("|---" * (len(peers) + 1) + "|")
    for kind in ("dense", "grouped"):
        for format in formats:
            for tokens in TOKEN_RANGES:
                cells = []
                for peer in peers:
                    speedups = [
                        each.speedup
                        for each in compared[peer]
                        if each.ours.case.kind == kind and format_of(each.ours) == format and each.ours.tokens in tokens
                    ]
                    mean = f"{statistics.geometric_mean(speedups):.3f} ({len(speedups)})" if speedups else "–"
                    cells.append(mean)
                if any(cell != "–" for cell in cells):
                    print(f"| {kind}, {format}, {tokens[0]} to {tokens[-1]} tokens | {' | '.join(cells)} |")
    for peer in peers:
        slower = [each for each in compared[peer] if each.speedup < 1]
        print(f"\n{ours} is slower than {peer} in {len(slower)} of {len(compared[peer])} products:")
        for each in slower:
            mine, theirs = each.ours, each.peer
            kernels = f"{mine.kernel} | {theirs.kernel}" if theirs.kernel else mine.kernel
            print(
                f"- {names.get(mine.case, mine.case)}, {format_of(mine)}, {mine.tokens} tokens: "
                f"{mine.median_seconds * 1e6:.1f} and {theirs.median_seconds * 1e6:.1f} us, "
                f"{each.speedup:.3f}, {kernels}"
            )
