"""Runs the program under test, and compares tensors, for readers.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file


class Program:
    """The program, and a directory for its outputs."""

    def __init__(self, path: Path, scratch: Path):
        self.path, self.scratch, self.made = path, scratch, 0

    def new(self, name: str) -> Path:
        self.made += 1
        return self.scratch / f"{self.made}-{name}"

    def run(self, *args: str | Path) -> str:
        command = [str(self.path), *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        return done.stdout

    def quantize(self, model: Path, *args: str | Path) -> Path:
        out = self.new("quantized")
        self.run("quantize", model, "--out", out, *args)
        return out

    def convert(self, model: Path, to: str, *args: str) -> Path:
        out = self.new(to)
        self.run("convert", model, "--to", to, "--out", out, *args)
        return out

    def dequantize(self, model: Path, dtype: str) -> dict[str, torch.Tensor]:
        out = self.new("dequantized")
        self.run("dequantize", model, "--dtype", dtype, "--out", out)
        return tensors(out)


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], *, signs_of_zeros: bool) -> list[str]:
    """Returns the names of tensors that differ, or that only one side has."""
    wrong = sorted(ours.keys() ^ theirs.keys())
    for name in sorted(ours.keys() & theirs.keys()):
        a, b = ours[name], theirs[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            wrong.append(f"{name}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}")
            continue
        same = torch.equal(a, b)
        if signs_of_zeros:
            bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
            same = same and torch.equal(a.view(bits), b.view(bits))
        if not same:
            wrong.append(name)
    return wrong
