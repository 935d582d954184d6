"""Reads the tensors of quantized checkpoints in safetensors as tensors of PyTorch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microscale import _tensors, checkpoint
from microscale._errors import CheckpointError
from microscale._facts import TensorListed

#: Dtypes of safetensors whose values need no scales.
_PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
#: Suffixes of the tensors with codes and with scales, by checkpoint format and format.
_PARTS = {
    ("compressed-tensors", "nvfp4"): ("_packed", "_scale"),
    ("compressed-tensors", "mxfp4"): ("_packed", "_scale"),
    ("compressed-tensors", "mxfp8-e4m3"): ("", "_scale"),
    ("gpt-oss", "mxfp4"): ("_blocks", "_scales"),
}


class _Place(NamedTuple):
    """The place of a tensor in a file."""

    file: Path
    dtype: str
    shape: list[int]
    start: int
    bytes: int


class Weight(NamedTuple):
    """A tensor of a checkpoint as `inspect` lists it. Unquantized ones have no format."""

    name: str
    shape: tuple[int, ...]
    format: str | None
    dtype: torch.dtype | None
    checkpoint_format: str
    global_scale: float | None

    @property
    def is_transposed(self) -> bool:
        """Whether the transpose of the last two dimensions is stored, as gpt-oss does."""
        return self.checkpoint_format == "gpt-oss"


class Stored:
    """The tensors of a checkpoint.

    Attributes:
        weights: by name, which is that in the unquantized checkpoint.
    """

    def __init__(self, path: Any) -> None:
        """Reads and checks the headers of a file or folder."""
        self._path = Path(path)
        listed = checkpoint.inspect(path)
        self._places = _places(self._path, {Path(each["file"]) for each in listed})
        self.weights = {each["name"]: self._weight(each) for each in listed}

    def _weight(self, listed: TensorListed) -> Weight:
        name, format = listed["name"], listed.get("format")
        kept, dtype = listed.get("checkpoint_format", ""), _PLAIN.get(listed.get("dtype", ""))
        if "unreadable" in listed:
            raise CheckpointError(f"{name}: {listed['unreadable']}", listed["file"], name)
        if "hadamard" in listed:
            raise CheckpointError(
                f"the inputs of {name} have a Hadamard transform of {listed['hadamard']} columns, which layers of PyTorch do not apply "
                "here; undo it with `microscale dequantize`, or quantize the original without --hadamard",
                listed["file"],
                name,
            )
        if format is not None and (kept, format) not in _PARTS:
            raise CheckpointError(
                f"{name} is {format} in the checkpoint format {kept}, which is not loaded; convert the checkpoint with "
                "`microscale convert --to compressed-tensors`",
                listed["file"],
                name,
            )
        if format is None and dtype is None:
            raise CheckpointError(
                f"{name} is {listed['dtype']}, whose values depend on scales; quantize the checkpoint with `microscale quantize`",
                listed["file"],
                name,
            )
        return Weight(name, tuple(listed["shape"]), format, dtype, kept, listed.get("global_scale"))

    def plain(self, weight: Weight) -> Tensor:
        """Reads an unquantized tensor."""
        return self._read(weight.name)

    def codes(self, weight: Weight) -> Tensor:
        """Reads the codes of a quantized tensor as bytes, of a transposed one as stored."""
        codes = self._part(weight, 0)
        # gpt-oss has a dimension for blocks.
        return codes.flatten(-2) if weight.is_transposed else codes

    def scales(self, weight: Weight) -> Tensor:
        """Reads the scales of a quantized tensor as bytes, of a transposed one as stored."""
        return self._part(weight, 1)

    def _part(self, weight: Weight, part: int) -> Tensor:
        return self._read(weight.name + _PARTS[weight.checkpoint_format, str(weight.format)][part]).view(torch.uint8)

    def quantized(self, weight: Weight) -> _tensors.Quantized:
        """Reads a quantized tensor, of a transposed one the matrix as stored."""
        shape = (*weight.shape[:-2], weight.shape[-1], weight.shape[-2]) if weight.is_transposed else weight.shape
        direction, number = None if weight.global_scale is None else "divisor", weight.global_scale
        parts = self.codes(weight), self.scales(weight)
        return _tensors.Quantized._of(*parts, number, direction, str(weight.format), shape, "linear", None)

    def values(self, weight: Weight) -> Tensor:
        """Reads the values of a tensor, of a quantized one in float32."""
        if weight.format is None:
            return self.plain(weight)
        values = self.quantized(weight).dequantize(torch.float32)
        result: Tensor = values.transpose(-1, -2) if weight.is_transposed else values
        return result

    def _read(self, name: str) -> Tensor:
        place = self._places[name]
        size = place.file.stat().st_size
        if size < place.start + place.bytes:
            raise CheckpointError(f"{name} ends past the end of {place.file}; copy the file again", place.file, name)
        dtype = _PLAIN.get(place.dtype, torch.uint8)
        if not place.bytes:
            return torch.empty(place.shape, dtype=dtype)
        mapped = torch.from_file(os.fspath(place.file), shared=False, size=size, dtype=torch.uint8)
        # Copied, as the file may change later.
        return mapped[place.start : place.start + place.bytes].clone().view(dtype).reshape(place.shape)


def _places(path: Path, files: set[Path]) -> dict[str, _Place]:
    """Returns the places of all tensors of a checkpoint, by their names in files."""
    indexed: dict[str, Path] = {}
    for index in sorted(path.glob("*.safetensors.index.json")):
        indexed |= {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    places = {}
    for file in sorted(files | set(indexed.values())):
        if file.suffix != ".safetensors":
            raise CheckpointError(f"{file} is not in safetensors; quantize or convert the checkpoint with `microscale`", file)
        with open(file, "rb") as opened:
            end = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(end))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if indexed.get(name, file) == file:
                start, stop = entry["data_offsets"]
                places[name] = _Place(file, entry["dtype"], entry["shape"], 8 + end + start, stop - start)
    return places
