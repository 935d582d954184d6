"""Shared functions of the scripts that make golden vectors."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from safetensors import safe_open

Tensors = dict[str, torch.Tensor]
File = tuple[Tensors, dict[str, str]]  # tensors and metadata


def as_torch(rows: np.ndarray) -> torch.Tensor:
    """Returns a torch copy of rows of any input type."""
    if rows.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(rows.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(rows.copy())


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares type, shape and bits. NaN equals itself, and -0 differs from +0."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def matches(path: Path, tensors: Tensors, metadata: dict[str, str]) -> bool:
    """Returns whether the file at `path` has exactly these tensors and this metadata."""
    if not path.exists():
        return False
    with safe_open(path, framework="pt") as file:
        return (
            file.metadata() == metadata
            and set(file.keys()) == set(tensors)
            and all(same_bytes(file.get_tensor(name), tensor) for name, tensor in tensors.items())
        )
