"""Makes checkpoint/golden/q8_0.safetensors: values, and gguf-py's Q8_0 blocks.

    python make_q8_0.py             # rewrites it
    python make_q8_0.py --check     # fails if it differs from new output

Needs gguf 0.19.0 and numpy. README.md describes the file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from safetensors.numpy import load_file, save_file

FILE = Path(__file__).resolve().parents[2] / "checkpoint/golden/q8_0.safetensors"
SEED, BLOCKS, ELEMENTS = 20_261_124, 600, 32


def values() -> np.ndarray:
    """Returns blocks of many magnitudes, ties, zeros, single values, and scales at f16's limits."""
    random = np.random.default_rng(SEED)
    rows = random.normal(0, 1, (BLOCKS, ELEMENTS)).astype(np.float32)
    rows *= np.exp2(random.integers(-12, 13, (BLOCKS, 1)).astype(np.float32))
    # Under a scale of 1 or 2, halves are ties.
    ties = np.arange(ELEMENTS, dtype=np.float32) - 15.5
    ties[0] = 127
    for row, scale in enumerate((1, -1, 2, 0.5, 2.0**-10)):
        rows[row] = ties * np.float32(scale)
    rows[5] = 0
    rows[6] = -0.0
    rows[7] = 0
    rows[7, 31] = -3
    # Scales that are subnormal in f16, round to 0, or round to f16's largest.
    for row, amax in enumerate((127 * 2.0**-20, 127 * 2.0**-24, 127 * 2.0**-25, 1e-30, 127 * 65504.0, 8_321_039.0)):
        rows[8 + row] *= np.float32(amax) / np.abs(rows[8 + row]).max()
    # Values that f16 and bf16 can hold.
    rows[100:200] = rows[100:200].astype(np.float16).astype(np.float32)
    return rows


def main() -> None:
    made = values()
    tensors = {"values": made, "blocks": quantize(made, Type.Q8_0)}
    if "--check" in sys.argv:
        kept = load_file(FILE)
        assert all(kept[name].tobytes() == array.tobytes() for name, array in tensors.items()), "they differ"
    else:
        save_file(tensors, FILE)


if __name__ == "__main__":
    main()
