"""Compares the golden vectors with the MXFP4 rules, in slow, obvious and exact float64 arithmetic.

    python check_spec.py
    python check_spec.py --verbose

Prints a table of differing blocks by file and group, and fails if it differs from a file's `slips`.
With `--verbose`, prints each differing block with both scale bytes and both code strings. Every input
value, scale and quotient of finite blocks is exact in float64, so only the code is rounded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from inputs import BLOCK, E2M1_TIES, E2M1_VALUES

VECTORS = Path(__file__).resolve().parent / "mxfp4"


@dataclass(frozen=True)
class Convention:
    """The deliberate differences between libraries.

    rule: `floor`, `ceil`, `even` or `rceil`: how amax becomes the block scale.
    ties: `even`, `toward-zero` or `away`.
    zero_sign: which zeros get code 8. `keep`: all that were negative. `keep-unless-exact`: negatives that round to zero,
        not an input of -0. `negative-if-exact`: inputs of +0 and -0, and negatives that round to zero. `drop`: none.
    """

    rule: str
    ties: str
    zero_sign: str


def scale_exponent(rule: str, amax: float) -> int:
    """Returns the exponent of the block scale before clamping. `amax` is finite and positive."""
    bits = int(np.float32(amax).view(np.uint32))
    if rule == "even":
        bits += 0x200000
    exponent, mantissa = (bits >> 23) - 127, bits & 0x7FFFFF
    if rule in ("floor", "even"):
        return exponent - 2
    if rule == "ceil":
        return exponent - 2 + (mantissa != 0)
    if rule == "rceil":
        fraction, power = np.frexp(amax)  # amax = fraction·2^power, and 6·2^k = 0.75·2^(k+3)
        return int(power) - 3 + (fraction > 0.75)
    raise ValueError(f"unknown scale rule {rule!r}")


def e2m1_magnitude(magnitude: float, ties: str) -> int:
    """Returns the code 0..7 nearest to `magnitude`, saturating at 6."""
    for code, tie in enumerate(E2M1_TIES):
        tie_goes_down = ties == "toward-zero" or (ties == "even" and code % 2 == 0)
        if magnitude < tie or (magnitude == tie and tie_goes_down):
            return code
    return len(E2M1_VALUES) - 1


def is_negative(value: float, code: int, zero_sign: str) -> bool:
    """Returns whether the code has its sign bit set."""
    if code != 0 or zero_sign == "keep":
        return bool(np.signbit(value))
    if zero_sign == "keep-unless-exact":
        return value < 0.0
    if zero_sign == "negative-if-exact":
        return value <= 0.0
    if zero_sign == "drop":
        return False
    raise ValueError(f"unknown zero sign {zero_sign!r}")


def quantize_block(block: np.ndarray, convention: Convention) -> tuple[int, list[int]]:
    """Returns the scale byte and 32 codes of one finite float64 block."""
    amax = float(np.abs(block).max())
    exponent = -127 if amax == 0.0 else max(-127, min(127, scale_exponent(convention.rule, amax)))
    codes = []
    for value in block:
        code = e2m1_magnitude(abs(float(value)) / 2.0**exponent, convention.ties)
        codes.append(code | (8 if is_negative(float(value), code, convention.zero_sign) else 0))
    return exponent + 127, codes


def unpack(packed: np.ndarray) -> np.ndarray:
    """Unpacks bytes [rows, K/2] to codes [rows, K]. Element 2i is in the low nibble."""
    return np.stack((packed & 0x0F, packed >> 4), axis=-1).reshape(len(packed), -1)


@dataclass(frozen=True)
class Slip:
    """One finite block whose bytes differ from the rule."""

    row: int
    block: int
    found: tuple[int, list[int]]
    expected: tuple[int, list[int]]

    def __str__(self) -> str:
        def text(byte: int, codes: list[int]) -> str:
            return f"{byte:3d} " + "".join(f"{code:x}" for code in codes)

        return f"row {self.row} block {self.block}: library {text(*self.found)}  rule {text(*self.expected)}"


def find_slips(
    rows: np.ndarray, packed: np.ndarray, scales: np.ndarray, convention: Convention
) -> tuple[list[Slip], list[list[int]]]:
    """Returns all slips, and [row, block] of non-finite blocks, for which there is no rule."""
    blocks = rows.astype(np.float64).reshape(len(rows), -1, BLOCK)
    codes = unpack(packed).reshape(blocks.shape)
    slips, nonfinite = [], []
    for row, block in np.ndindex(blocks.shape[:2]):
        if not np.isfinite(blocks[row, block]).all():
            nonfinite.append([row, block])
            continue
        expected = quantize_block(blocks[row, block], convention)
        found = int(scales[row, block]), codes[row, block].tolist()
        if found != expected:
            slips.append(Slip(row, block, found, expected))
    return slips, nonfinite


def group_of(groups: list[tuple[str, int, int]], row: int) -> str:
    """Returns the name of the group that contains `row`."""
    return next(name for name, first, last in groups if first <= row <= last)


def check_file(path: Path, verbose: bool) -> bool:
    """Prints one file's slips by group. Returns whether its metadata lists the same ones."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        rows = file.get_tensor("input").to(torch.float64).numpy()
        packed, scales = (file.get_tensor(name).numpy() for name in ("codes", "scales"))
    convention = Convention(metadata["rule"], metadata["ties"], metadata["zero_sign"])
    groups = json.loads(metadata["groups"])
    slips, _ = find_slips(rows, packed, scales, convention)
    print(f"{path.name}: {len(slips)} of {scales.size} blocks differ")
    for group, count in Counter(group_of(groups, slip.row) for slip in slips).items():
        print(f"    {group}: {count}")
    if verbose:
        for slip in slips:
            print(f"    {group_of(groups, slip.row)}: {slip}")
    recorded = json.loads(metadata["slips"])
    if recorded != [[slip.row, slip.block] for slip in slips]:
        print(f"    the file's metadata lists others: {recorded}")
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", action="store_true", help="list every differing block")
    arguments = parser.parse_args()
    paths = [path for path in sorted(VECTORS.glob("*.safetensors")) if "tables" not in path.name]
    results = [check_file(path, arguments.verbose) for path in paths]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
