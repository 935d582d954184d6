"""Shared by the peers' scripts: records of measurements, their table and their JSON file."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

MX_BLOCK = 32
NV_BLOCK = 16


@dataclass(frozen=True)
class Shape:
    """A matrix shape, `ROWSxCOLS` on the command line."""

    rows: int
    cols: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        rows, cols = (int(part) for part in text.lower().split("x"))
        if rows < 1 or cols < 1 or cols % MX_BLOCK:
            raise ValueError(f"shape {text}: the columns must be a positive multiple of {MX_BLOCK}")
        return cls(rows, cols)

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    def quantize_bytes(self, input_itemsize: int, block: int = MX_BLOCK) -> int:
        """The bytes that a 4-bit quantizer moves: input, packed codes and block scales."""
        return self.elements * input_itemsize + self.elements // 2 + self.elements // block

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"


@dataclass(frozen=True)
class Record:
    """One measurement. `bytes` counts input, codes and scales; for a copy, input and output."""

    op: str
    format: str
    dtype: str
    rows: int
    cols: int
    device: str
    threads: int | None
    library: str
    version: str
    variant: str
    samples: int
    median_seconds: float
    minimum_seconds: float
    bytes: int
    elements_per_second: float
    bytes_per_second: float
    verified: bool | None

    @classmethod
    def of(cls, *, shape: Shape, bytes: int, seconds: list[float], **fields: object) -> Record:
        median = statistics.median(seconds)
        return cls(
            rows=shape.rows,
            cols=shape.cols,
            samples=len(seconds),
            median_seconds=median,
            minimum_seconds=min(seconds),
            bytes=bytes,
            elements_per_second=shape.elements / median,
            bytes_per_second=bytes / median,
            **fields,
        )


def print_table(records: list[Record]) -> None:
    """Prints the records, with their bandwidth as a share of the copy of the same input type."""
    copies = {record.dtype: record.bytes_per_second for record in records if record.op == "copy"}
    print(f"{'what':34} {'type':5} {'median ms':>10} {'min ms':>10} {'Melem/s':>10} {'GB/s':>9} {'of copy':>8}  verified")
    for record in records:
        copy = copies.get(record.dtype)
        print(
            f"{f'{record.library} {record.version} {record.variant}':34} {record.dtype:5} "
            f"{record.median_seconds * 1e3:10.3f} {record.minimum_seconds * 1e3:10.3f} "
            f"{record.elements_per_second / 1e6:10.1f} "
            f"{record.bytes_per_second / 1e9:9.2f} "
            f"{f'{record.bytes_per_second / copy:.1%}' if copy else '':>8}  "
            f"{'' if record.verified is None else 'yes' if record.verified else 'NO'}"
        )


def print_ratios(records: list[Record], ours: str) -> None:
    """Prints the speed of `ours` relative to each other library on the same input type."""
    for mine in (record for record in records if record.library == ours):
        for peer in records:
            if peer.library != ours and peer.dtype == mine.dtype and peer.op == mine.op:
                ratio = peer.median_seconds / mine.median_seconds
                print(f"{ours} over {peer.library} {peer.variant}, {mine.dtype}: {ratio:.2f}x")


def write_json(path: Path, records: list[Record]) -> None:
    path.write_text(json.dumps([asdict(record) for record in records], indent=2) + "\n")
