"""Input rows of the golden vectors: named groups of 32-element blocks, one set per float type.

Every number is built exactly in float64 and is representable in the target type, or is rounded to it
once. Blocks with an amax below 2^-124 need the smallest E8M0 byte under some rule. They have groups of
their own (`smallest-scale`, `subnormal`, `ties-smallest-scale`) because several libraries treat that
byte specially.
"""

from __future__ import annotations

from dataclasses import dataclass
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

BLOCK = 32
BLOCKS_PER_ROW = 2
ROW = BLOCK * BLOCKS_PER_ROW
SEED = 20_240_117

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@dataclass(frozen=True)
class FloatType:
    """An input type: its numpy type, an unsigned type of its width, and the range of exponents."""

    name: str
    dtype: np.dtype
    bits: np.dtype
    mantissa_bits: int
    min_exponent: int
    max_exponent: int
    boundary_exponents: tuple[int, ...]
    tie_exponents: tuple[int, ...]

    def cast(self, values: np.ndarray) -> np.ndarray:
        """Rounds float64 values to this type. Finite values saturate."""
        limit = float(self.largest)
        return np.clip(values, -limit, limit).astype(np.float32).astype(self.dtype)

    @property
    def largest(self) -> float:
        return (2.0 - 2.0**-self.mantissa_bits) * 2.0**self.max_exponent

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    def step(self, value: float, ulps: int) -> float:
        """Returns the number `ulps` steps away from `value`, outward for positive `ulps`."""
        magnitude = np.asarray(abs(value), dtype=self.dtype).view(self.bits).astype(np.int64) + ulps
        stepped = magnitude.astype(self.bits).view(self.dtype)
        return float(np.copysign(np.float64(stepped), value))


FLOAT_TYPES = {
    "f32": FloatType(
        "f32",
        np.dtype(np.float32),
        np.dtype(np.uint32),
        23,
        -126,
        127,
        (-123, -100, -63, -31, -10, -3, -2, -1, 0, 1, 2, 3, 10, 31, 63, 100, 126, 127),
        (-126, -125, -60, -1, 0, 1, 60, 125),
    ),
    "bf16": FloatType(
        "bf16",
        np.dtype(ml_dtypes.bfloat16),
        np.dtype(np.uint16),
        7,
        -126,
        127,
        (-123, -100, -63, -31, -10, -3, -2, -1, 0, 1, 2, 3, 10, 31, 63, 100, 126, 127),
        (-126, -125, -60, -1, 0, 1, 60, 125),
    ),
    "f16": FloatType(
        "f16",
        np.dtype(np.float16),
        np.dtype(np.uint16),
        10,
        -14,
        15,
        (-14, -13, -12, -11, -10, -6, -3, -2, -1, 0, 1, 2, 3, 6, 10, 13, 14, 15),
        (-22, -17, -14, -6, -1, 0, 1, 13),
    ),
}

Blocks = list[np.ndarray]


def block_with_amax(rng: np.random.Generator, amax: float) -> np.ndarray:
    """Returns a normally distributed block with one element of exactly ±`amax` at a random index."""
    block = rng.standard_normal(BLOCK)
    block *= rng.uniform(0.5, 0.95) * amax / np.abs(block).max()
    block[rng.integers(BLOCK)] = rng.choice((-1.0, 1.0)) * amax
    return block


def fill(values: list[float], rest: float) -> np.ndarray:
    """Returns a block that starts with `values` and continues with `rest`."""
    block = np.full(BLOCK, rest)
    block[: len(values)] = values
    return block


def normal_by_exponent(kind: FloatType, rng: np.random.Generator) -> Blocks:
    """Normal blocks, amax swept over every exponent from 2^-124 (or the type's smallest subnormal) to the largest."""
    first = max(kind.min_exponent - kind.mantissa_bits, -124)
    exponents = range(first, kind.max_exponent + 1)
    repeats = max(1, 240 // len(exponents))
    return [
        rng.uniform(0.999, 1.999) * 2.0**exponent * (block := rng.standard_normal(BLOCK)) / np.abs(block).max()
        for exponent in exponents
        for _ in range(repeats)
    ]


def heavy_tailed(kind: FloatType, rng: np.random.Generator) -> Blocks:
    """Student-t blocks (1.5 to 5 degrees of freedom) of log-normal scale."""
    return [rng.standard_t(rng.uniform(1.5, 5.0), BLOCK) * rng.lognormal(-3.0, 2.0) for _ in range(48)]


def zero(kind: FloatType, rng: np.random.Generator) -> Blocks:
    return [np.zeros(BLOCK)] * 2


def negative_zero(kind: FloatType, rng: np.random.Generator) -> Blocks:
    return [np.full(BLOCK, -0.0)] * 2


def mixed_zero(kind: FloatType, rng: np.random.Generator) -> Blocks:
    return [np.copysign(0.0, rng.standard_normal(BLOCK)) for _ in range(2)]


def zeros_among_normals(kind: FloatType, rng: np.random.Generator) -> Blocks:
    """Normal blocks with +0 in every fourth element and -0 in another fourth."""
    blocks = [rng.standard_normal(BLOCK) for _ in range(4)]
    for block in blocks:
        block[1::4] = 0.0
        block[3::4] = -0.0
    return blocks


def tiny_among_large(kind: FloatType, rng: np.random.Generator) -> Blocks:
    """Blocks with amax 4·2^k whose other elements, of both signs, are all below the first tie, 0.25·2^k."""
    blocks = []
    for exponent in kind.tie_exponents[1:]:
        scale = 2.0**exponent
        block = rng.uniform(-0.249, 0.249, BLOCK) * scale
        block[:4] = 4.0 * scale, -kind.smallest_subnormal, kind.smallest_subnormal, -0.125 * scale
        blocks.append(block)
    return blocks


def around(mantissas: tuple[float, ...], ulps: tuple[int, ...], exponents: slice) -> Callable[..., Blocks]:
    """Blocks with an amax of `mantissa`·2^k, and with its neighbours at these distances in ulps."""

    def blocks(kind: FloatType, rng: np.random.Generator) -> Blocks:
        return [
            block_with_amax(rng, kind.step(mantissa * 2.0**exponent, distance))
            for exponent in kind.boundary_exponents[exponents]
            for mantissa in mantissas
            for distance in ulps
        ]

    return blocks


def tie_blocks(kind: FloatType, exponent: int) -> Iterator[np.ndarray]:
    """Every E2M1 tie at scale 2^exponent with both neighbours, for each sign.

    With amax 4 every scale rule agrees on the scale, but the tie at 5 is out of reach; with amax 6 all but `ceil` do.
    """
    for amax, ties in ((4.0, E2M1_TIES[:-1]), (6.0, E2M1_TIES)):
        for sign in (1.0, -1.0):
            values = [
                kind.step(sign * tie * 2.0**exponent, distance) for tie in ties for distance in (-1, 0, 1)
            ]
            yield fill([sign * amax * 2.0**exponent, *values], -sign * 2.0**exponent)


def ties(kind: FloatType, rng: np.random.Generator) -> Blocks:
    return [block for exponent in kind.tie_exponents for block in tie_blocks(kind, exponent)]


def ties_smallest_scale(kind: FloatType, rng: np.random.Generator) -> Blocks:
    """The ties at scale 2^-127, byte 0. All are subnormal or nearly so."""
    return list(tie_blocks(kind, -127)) if kind.min_exponent == -126 else []


def smallest_scale(kind: FloatType, rng: np.random.Generator) -> Blocks:
    """Normal amax below 2^-124: random ones, and powers of two, 1.5·2^k and 1.75·2^k with their neighbours."""
    if kind.min_exponent != -126:
        return []
    exponents = (-126, -125)
    blocks = [block_with_amax(rng, rng.uniform(1.0, 1.99) * 2.0**exponent) for exponent in exponents * 3]
    for exponent in exponents:
        for mantissa in (1.0, 1.5, 1.75):
            blocks += [block_with_amax(rng, kind.step(mantissa * 2.0**exponent, d)) for d in (0, 1)]
    return blocks


def subnormal(kind: FloatType, rng: np.random.Generator) -> Blocks:
    """Only subnormals: every power of two as amax, the smallest in one element, the largest in all."""
    smallest = kind.smallest_subnormal
    blocks = [
        block_with_amax(rng, smallest * 2.0**exponent * rng.choice((1.0, 1.25, 1.5, 1.75)))
        for exponent in range(kind.mantissa_bits)
    ]
    blocks.append(fill([smallest, -smallest], 0.0))
    blocks.append(fill([kind.step(2.0**kind.min_exponent, -1)] * BLOCK, 0.0))
    return blocks


def largest_finite(kind: FloatType, rng: np.random.Generator) -> Blocks:
    largest = kind.largest
    return [
        np.full(BLOCK, largest),
        np.full(BLOCK, -largest),
        block_with_amax(rng, largest),
        fill([largest, -1.0, kind.smallest_subnormal], 1.0),
    ]


def with_special(*specials: float) -> Callable[..., Blocks]:
    """Normal blocks with `specials` at the start, middle and end, then zeros, then only specials."""

    def blocks(kind: FloatType, rng: np.random.Generator) -> Blocks:
        made = []
        for start in (0, BLOCK // 2, BLOCK - len(specials)):
            block = rng.standard_normal(BLOCK)
            block[start : start + len(specials)] = specials
            made.append(block)
        made.append(fill(list(specials), 0.0))
        made.append(np.resize(specials, BLOCK))
        return made

    return blocks


GROUPS: dict[str, Callable[[FloatType, np.random.Generator], Blocks]] = {
    "normal-by-exponent": normal_by_exponent,
    "heavy-tailed": heavy_tailed,
    "zero": zero,
    "negative-zero": negative_zero,
    "mixed-zero": mixed_zero,
    "zeros-among-normals": zeros_among_normals,
    "tiny-among-large": tiny_among_large,
    "power-of-two": around((1.0,), (-1, 0, 1), slice(None)),
    "six-times-power-of-two": around((1.5,), (-1, 0, 1), slice(None)),
    "seven-times-power-of-two": around((1.75,), (-1, 0, 1), slice(None)),
    "near-boundary": around((1.0, 1.5), (-8, -3, -2, 2, 3, 8), slice(0, None, 5)),
    "ties": ties,
    "ties-smallest-scale": ties_smallest_scale,
    "smallest-scale": smallest_scale,
    "subnormal": subnormal,
    "largest-finite": largest_finite,
    "nan": with_special(np.nan),
    "negative-nan": with_special(-np.nan),
    "positive-infinity": with_special(np.inf),
    "negative-infinity": with_special(-np.inf),
    "both-infinities": with_special(np.inf, -np.inf),
    "nan-and-infinity": with_special(np.nan, np.inf),
}


@dataclass(frozen=True)
class GoldenInput:
    """Rows [rows, ROW] of one float type, and each group as (name, first row, last row)."""

    rows: np.ndarray
    groups: list[tuple[str, int, int]]


def golden_input(type_name: str) -> GoldenInput:
    """Builds all groups for one type."""
    return build_groups(GROUPS, type_name, (SEED,))


def build_groups(
    makers: dict[str, Callable[[FloatType, np.random.Generator], Blocks]], type_name: str, seed: tuple[int, ...]
) -> GoldenInput:
    """Builds groups for one type. A partial last row is padded with a normal block."""
    kind = FLOAT_TYPES[type_name]
    blocks: list[np.ndarray] = []
    groups = []
    for index, (name, make) in enumerate(makers.items()):
        rng = np.random.default_rng((*seed, index, kind.mantissa_bits))
        made = list(make(kind, rng))
        if not made:
            continue
        while len(made) % BLOCKS_PER_ROW:
            made.append(rng.standard_normal(BLOCK))
        first_row = len(blocks) // BLOCKS_PER_ROW
        blocks += [cast_special(kind, block) for block in made]
        groups.append((name, first_row, len(blocks) // BLOCKS_PER_ROW - 1))
    return GoldenInput(np.stack(blocks).reshape(-1, ROW), groups)


def cast_special(kind: FloatType, block: np.ndarray) -> np.ndarray:
    """Casts finite elements with saturation, and preserves NaN and infinities."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(block), kind.cast(block), block.astype(kind.dtype)).astype(kind.dtype)
