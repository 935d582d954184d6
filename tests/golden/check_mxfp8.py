"""Compares the MXFP8 golden vectors with the rules, in exact float64 arithmetic.

    python check_mxfp8.py

Prints a table of differing blocks by file and group, and fails if it differs from a file's `slips`.
ml_dtypes rounds the elements.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from check_spec import group_of
from inputs import BLOCK
from mxfp8_inputs import ELEMENT_TYPES, ElementType

MXFP8_VECTORS = Path(__file__).resolve().parent / "mxfp8"


def scale_exponent(element: ElementType, rule: str, amax: float) -> int:
    """Returns E - max_exponent (floor), or the smallest power of two of at least amax/largest (rceil)."""
    fraction, power = np.frexp(amax)  # amax = fraction·2^power, and largest = 0.875·2^(max_exponent + 1)
    exponent = int(power) - 1 - element.max_exponent
    return exponent + (rule == "rceil" and fraction > 0.875)


def quantize_block(block: np.ndarray, element: ElementType, rule: str) -> tuple[int, np.ndarray]:
    """Returns the scale byte and 32 element bytes of one finite float64 block."""
    amax = float(np.abs(block).max())
    exponent = -127 if amax == 0.0 else max(-127, min(127, scale_exponent(element, rule, amax)))
    quotients = np.clip(block / 2.0**exponent, -element.largest, element.largest)
    # Exact in float32 too, except for quotients so small that they round to zero.
    rounded = quotients.astype(np.float32)
    assert (rounded == quotients).all() or np.abs(quotients[rounded != quotients]).max() < 2.0**-60
    return exponent + 127, rounded.astype(element.dtype).view(np.uint8)


def find_mxfp8_slips(
    rows: np.ndarray, codes: np.ndarray, scales: np.ndarray, element_name: str, rule: str
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns [row, block] of finite blocks that differ from the rule, and of non-finite blocks."""
    blocks = rows.astype(np.float64).reshape(len(rows), -1, BLOCK)
    codes = codes.reshape(blocks.shape)
    slips, nonfinite = [], []
    for row, block in np.ndindex(blocks.shape[:2]):
        if not np.isfinite(blocks[row, block]).all():
            nonfinite.append([row, block])
            continue
        byte, expected = quantize_block(blocks[row, block], ELEMENT_TYPES[element_name], rule)
        if byte != scales[row, block] or (expected != codes[row, block]).any():
            slips.append([row, block])
    return slips, nonfinite


def check_file(path: Path) -> bool:
    """Prints one file's slips by group. Returns whether its metadata lists the same ones."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        rows = file.get_tensor("input").to(torch.float64).numpy()
        codes, scales = (file.get_tensor(name).numpy() for name in ("codes", "scales"))
    groups = json.loads(metadata["groups"])
    slips, nonfinite = find_mxfp8_slips(rows, codes, scales, metadata["element"], metadata["rule"])
    print(f"{path.name}: {len(slips)} of {scales.size} blocks differ")
    for group, count in Counter(group_of(groups, row) for row, _ in slips).items():
        print(f"    {group}: {count}")
    good = json.loads(metadata["slips"]) == slips and json.loads(metadata["nonfinite"]) == nonfinite
    if not good:
        print("    the file's metadata lists others")
    return good


def main() -> int:
    results = [check_file(path) for path in sorted(MXFP8_VECTORS.glob("*.safetensors"))]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
