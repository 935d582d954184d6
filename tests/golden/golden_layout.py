"""Golden vectors of the scale layout: torchao's 128×4 swizzle of random bytes.

make_golden.py writes the file.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import torch
from torchao.prototype.mx_formats.utils import to_blocked

from golden_common import File

SHAPES = (
    (1, 1), (1, 4), (5, 3), (128, 4), (127, 5), (129, 8), (200, 17), (32, 64), (300, 1), (256, 12),
)  # fmt: skip
SEED = 20_260_301


def layout_files() -> dict[str, File]:
    """Returns tensors and metadata by file name. Matrices have no zero bytes, unlike padding."""
    rng = np.random.default_rng(SEED)
    tensors = {}
    for rows, columns in SHAPES:
        linear = torch.from_numpy(rng.integers(1, 256, (rows, columns), dtype=np.uint8))
        tensors[f"{rows}x{columns}.linear"] = linear
        tensors[f"{rows}x{columns}.swizzled"] = to_blocked(linear).contiguous()
    metadata = {
        "library": "torchao",
        "version": version("torchao"),
        "torch": torch.__version__.split("+")[0],
        "function": "torchao.prototype.mx_formats.utils.to_blocked",
    }
    return {f"torchao-{version('torchao')}-to_blocked.safetensors": (tensors, metadata)}
