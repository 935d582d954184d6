"""What the makers of golden vectors share."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
File = tuple[Tensors, dict[str, str]]  # tensors and metadata


def as_torch(rows: np.ndarray) -> torch.Tensor:
    """A torch copy of rows of any of the input types."""
    if rows.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(rows.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(rows.copy())
