"""Input rows of the MXFP8 golden vectors.

They are the general groups of inputs.py, and groups for each 8-bit element type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from inputs import (
    BLOCK,
    Blocks,
    FloatType,
    GoldenInput,
    block_with_amax,
    build_groups,
    fill,
    heavy_tailed,
    largest_finite,
    mixed_zero,
    negative_zero,
    normal_by_exponent,
    smallest_scale,
    subnormal,
    with_special,
    zero,
    zeros_among_normals,
)

SEED = 20_251_121


@dataclass(frozen=True)
class ElementType:
    """An 8-bit element type. The largest number of both types is 1.75·2^max_exponent."""

    name: str
    dtype: np.dtype
    max_exponent: int

    @property
    def values(self) -> np.ndarray:
        """Returns all finite magnitudes in ascending order, in float64."""
        with np.errstate(invalid="ignore"):
            values = np.arange(128, dtype=np.uint8).view(self.dtype).astype(np.float64)
        return values[np.isfinite(values)]

    @property
    def largest(self) -> float:
        return float(self.values[-1])


ELEMENT_TYPES = {
    "e4m3": ElementType("e4m3", np.dtype(ml_dtypes.float8_e4m3fn), 8),
    "e5m2": ElementType("e5m2", np.dtype(ml_dtypes.float8_e5m2), 15),
}


def around(kind: FloatType, rng: np.random.Generator, mantissas: tuple[float, ...], ulps: tuple[int, ...]) -> Blocks:
    """Blocks with an amax of `mantissa`·2^k, and with its neighbours at these distances in ulps."""
    return [
        block_with_amax(rng, kind.step(mantissa * 2.0**exponent, distance))
        for exponent in kind.boundary_exponents
        for mantissa in mantissas
        for distance in ulps
        if abs(exponent) != 127
    ]


def tie_values(element: ElementType, kind: FloatType, scale: float) -> Iterator[float]:
    """Midpoints of elements times `scale`, all small ones and some others, with their neighbours."""
    values = element.values
    midpoints = (values[1:] + values[:-1]) / 2.0
    for index, midpoint in enumerate([*midpoints[:10], *midpoints[10::7], *midpoints[-3:]]):
        for distance in (-1, 0, 1):
            yield kind.step((-1.0) ** index * float(midpoint) * scale, distance)


def element_ties(element: ElementType, kind: FloatType, exponents: tuple[int, ...]) -> Blocks:
    """Ties at scales 2^k. amax is the largest element times 2^k, for which both rules agree."""
    blocks = []
    for exponent in exponents:
        scale = 2.0**exponent
        values = list(tie_values(element, kind, scale))
        for start in range(0, len(values), BLOCK - 1):
            blocks.append(fill([element.largest * scale, *values[start : start + BLOCK - 1]], -scale))
    return blocks


def saturated(element: ElementType, kind: FloatType, rng: np.random.Generator) -> Blocks:
    """Blocks with elements between `floor`'s largest element and the next power of two."""
    blocks = []
    for exponent in (-40, -1, 0, 3, 60):
        top = 2.0 ** (element.max_exponent + 1 + exponent)
        block = rng.uniform(0.8, 0.999, BLOCK) * top * rng.choice((-1.0, 1.0), BLOCK)
        block[:6] = kind.step(top, -1), -kind.step(top, -1), 0.9375 * top, 0.875 * top, 0.9375 * top, -0.875 * top
        block[4:6] = kind.step(0.9375 * top, 1), kind.step(-0.875 * top, 1)
        blocks.append(block)
    return blocks


def small_among_large(element: ElementType, kind: FloatType, rng: np.random.Generator) -> Blocks:
    """Blocks whose elements are mostly subnormal or round to zero, of both signs."""
    blocks = []
    for exponent in (-50, 0, 50):
        scale = 2.0**exponent
        block = rng.uniform(-4.0, 4.0, BLOCK) * float(element.values[1]) * scale
        half = float(element.values[1]) * scale / 2.0
        block[:6] = element.largest * scale, -kind.smallest_subnormal, kind.smallest_subnormal, half, -half, -0.0
        block[6:8] = kind.step(half, 1), kind.step(-half, 1)
        blocks.append(block)
    return blocks


def mxfp8_input(element_name: str, type_name: str) -> GoldenInput:
    """Builds all groups for one element type and one input type."""
    element = ELEMENT_TYPES[element_name]
    groups = {
        "normal-by-exponent": normal_by_exponent,
        "heavy-tailed": heavy_tailed,
        "zero": zero,
        "negative-zero": negative_zero,
        "mixed-zero": mixed_zero,
        "zeros-among-normals": zeros_among_normals,
        "small-among-large": lambda kind, rng: small_among_large(element, kind, rng),
        "power-of-two": lambda kind, rng: around(kind, rng, (1.0,), (-1, 0, 1)),
        "largest-times-power-of-two": lambda kind, rng: around(kind, rng, (1.75,), (-2, -1, 0, 1, 2)),
        "ties": lambda kind, rng: element_ties(element, kind, (-60, -1, 0, 1, 60)),
        "saturated": lambda kind, rng: saturated(element, kind, rng),
        "smallest-scale": lambda kind, rng: [
            *smallest_scale(kind, rng),
            *(block_with_amax(rng, rng.uniform(1.0, 1.99) * 2.0**exponent) for exponent in range(-124, -108)),
        ],
        "subnormal": subnormal,
        "largest-finite": largest_finite,
        "nan": with_special(np.nan),
        "negative-nan": with_special(-np.nan),
        "positive-infinity": with_special(np.inf),
        "negative-infinity": with_special(-np.inf),
        "nan-and-infinity": with_special(np.nan, np.inf),
    }
    return build_groups(groups, type_name, (SEED, element.max_exponent))
