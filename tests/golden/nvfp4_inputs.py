"""Input tensors of the NVFP4 golden vectors: named cases with a global scale each.

`computed` cases get the global scale that the library derives from them. `given` cases get one of
`GIVEN`, which are constants independent of the data. Every number is representable in the target
type, or is rounded to it once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from inputs import E2M1_TIES, FLOAT_TYPES, FloatType, cast_special

GROUP = 16
GROUPS_PER_ROW = 4
COLUMNS = GROUP * GROUPS_PER_ROW
SEED = 20_250_923
NVFP4_MAX = 2688.0  # 6·448

E4M3_VALUES = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)

Blocks = list[np.ndarray]


@dataclass(frozen=True)
class Given:
    """A given global scale in both directions. The two are constants, not each other's reciprocals."""

    name: str
    divisor: float
    multiplier: float
    amax: float  # the tensor amax that it approximately fits


GIVEN = (
    Given("power", 1024.0, 2.0**-10, 2.625),
    Given("odd", 1581.1765, 0.00063244044, 1.7),
    Given("one", 1.0, 1.0, 2688.0),
)
EXTREME_GIVEN = (
    Given("huge-divisor", 3.0e38, 2.0e-38, 1.0),
    Given("largest-divisor", 3.4028234663852886e38, 1.0e-39, 1.0),
    Given("tiny-divisor", 1.0e-37, 3.0e38, 1.0),
    Given("subnormal-divisor", 1.0e-39, 3.4028234663852886e38, 1.0),
)


@dataclass(frozen=True)
class Case:
    """One input tensor [rows, 64], and its given global scale, if any."""

    name: str
    rows: np.ndarray
    given: Given | None


def block_with_amax(rng: np.random.Generator, amax: float) -> np.ndarray:
    """Returns a normally distributed block with one element of exactly ±`amax` at a random index."""
    block = rng.standard_normal(GROUP)
    block *= rng.uniform(0.5, 0.95) * amax / np.abs(block).max()
    block[rng.integers(GROUP)] = rng.choice((-1.0, 1.0)) * amax
    return block


def fill(values: list[float], rest: float) -> np.ndarray:
    """Returns a block that starts with `values` and continues with `rest`."""
    block = np.full(GROUP, rest)
    block[: len(values)] = values
    return block


def normal(kind: FloatType, rng: np.random.Generator, amax: float) -> Blocks:
    """N(0, 1) blocks times powers of two from 2^-12 to 2^0, scaled so that the largest is `amax`."""
    blocks = [rng.standard_normal(GROUP) * 2.0 ** -(index % 13) for index in range(47)]
    largest = max(np.abs(block).max() for block in blocks)
    return [block_with_amax(rng, amax), *(block * amax / largest for block in blocks)]


def wide(kind: FloatType, rng: np.random.Generator, amax: float) -> Blocks:
    """N(0, 1) blocks times powers of two over the type's range or 2^±60, dense at the upper end."""
    low, high = (-60, 60) if kind.min_exponent < -60 else (-20, kind.max_exponent - 3)
    exponents = [*range(low, high - 20, 4), *range(high - 20, high + 1)]
    return [rng.standard_normal(GROUP) * 2.0**exponent for exponent in exponents]


def neighbours(kind: FloatType, value: float) -> list[float]:
    """Returns the nearest number to `value` and both neighbours, except negative ones."""
    nearest = float(np.asarray(value, dtype=kind.dtype))
    return [kind.step(nearest, distance) for distance in (-1, 0, 1) if nearest > 0.0 or distance >= 0]


def ties(kind: FloatType, rng: np.random.Generator, amax: float) -> Blocks:
    """Every E2M1 midpoint of both signs and its two neighbours, for several block scales."""
    blocks = [fill([amax], -0.5 * amax)]
    for scale in (448.0, 416.0, 30.0, 1.0, 1.125, 1.375 * 2.0**-4, 2.0**-6, 5 * 2.0**-9, 2.0**-9):
        unit = scale * amax / NVFP4_MAX
        for distance in (-1, 0, 1):
            values = [kind.step(sign * tie * unit, distance) for sign in (1.0, -1.0) for tie in E2M1_TIES]
            blocks.append(fill([6.0 * unit, *values], -unit))
    return blocks


def scale_ties(kind: FloatType, rng: np.random.Generator, amax: float) -> Blocks:
    """Blocks whose amax gives a scale midway between E4M3 neighbours, and the amax's neighbours."""
    midpoints = (E4M3_VALUES[1:] + E4M3_VALUES[:-1]) / 2.0
    chosen = [*midpoints[:18], *midpoints[18::5], midpoints[-1]]
    amaxes = [near for midpoint in chosen for near in neighbours(kind, 6.0 * midpoint * amax / NVFP4_MAX)]
    return [block_with_amax(rng, amax), *(block_with_amax(rng, block_amax) for block_amax in amaxes)]


SCALES_IN_RANGE = (
    2.0**-20, 2.0**-14, 2.0**-11, 2.0**-10, 1.5 * 2.0**-10, 2.0**-9, 1.5 * 2.0**-9, 3 * 2.0**-9, 2.0**-7,
    7 * 2.0**-9, 7.5 * 2.0**-9, 2.0**-6, 1.125 * 2.0**-6, 0.125, 1.0, 200.0, 440.0, 448.0,
)  # fmt: skip
SCALES_OUT_OF_RANGE = (449.0, 456.0, 463.0, 464.0, 465.0, 480.0, 500.0, 512.0, 1000.0, 1.0e4)


def scale_range(kind: FloatType, rng: np.random.Generator, amax: float, saturate: bool = False) -> Blocks:
    """Blocks with underflowing, subnormal, small or largest scales. `saturate` goes beyond 448."""
    blocks = [block_with_amax(rng, amax)]
    for scale in SCALES_IN_RANGE + (SCALES_OUT_OF_RANGE if saturate else ()):
        for near in neighbours(kind, 6.0 * scale * amax / NVFP4_MAX):
            if saturate or near <= amax:
                blocks.append(block_with_amax(rng, near))
    return blocks


def zeros(kind: FloatType, rng: np.random.Generator, amax: float) -> Blocks:
    """Zero blocks of every sign, zeros among normals, and values that round or underflow to zero."""
    smallest = kind.smallest_subnormal
    mixed = block_with_amax(rng, amax / 4.0)
    mixed[1::4], mixed[3::4] = 0.0, -0.0
    among = rng.uniform(-0.2, 0.2, GROUP) * amax / 6.0
    among[:6] = amax, -smallest, smallest, -0.0, 0.0, -amax * 2.0**-9
    return [
        block_with_amax(rng, amax),
        np.zeros(GROUP),
        np.full(GROUP, -0.0),
        np.copysign(0.0, rng.standard_normal(GROUP)),
        mixed,
        among,
        fill([-smallest, smallest, -0.0], 0.0),
        fill([-amax * 2.0**-13], -0.0),
        fill([-amax * 2.0**-21, amax * 2.0**-22], -amax * 2.0**-23),
        fill([amax, -amax], -0.0),
        -np.abs(rng.standard_normal(GROUP)) * amax * 2.0**-14,
        rng.standard_normal(GROUP) * amax * 2.0**-20,
    ]


def all_zero(kind: FloatType, rng: np.random.Generator, amax: float) -> Blocks:
    return [np.zeros(GROUP), np.full(GROUP, -0.0), np.copysign(0.0, rng.standard_normal(GROUP)), np.zeros(GROUP)]


def small_tensor(kind: FloatType, rng: np.random.Generator, amax: float) -> Blocks:
    """Blocks of magnitudes up to `amax`, including a zero block."""
    return [block_with_amax(rng, amax * 2.0**-exponent) for exponent in range(7)] + [np.zeros(GROUP)]


def large_tensor(kind: FloatType, rng: np.random.Generator, amax: float) -> Blocks:
    blocks = [block_with_amax(rng, kind.largest * 2.0**-exponent) for exponent in (0, 0, 1, 2, 5, 8, 12, 15, 19)]
    return [*blocks, np.full(GROUP, kind.largest), np.full(GROUP, -kind.largest), np.zeros(GROUP)]


def with_special(*specials: float) -> Callable[..., Blocks]:
    """Normal blocks, a block with some `specials`, and a block of only `specials`."""

    def blocks(kind: FloatType, rng: np.random.Generator, amax: float) -> Blocks:
        made = [block_with_amax(rng, amax * factor) for factor in (1.0, 0.5, 0.01, 0.25, 0.125, 1.0, 0.3)]
        made[2][3 : 3 + len(specials)] = specials
        return [*made, np.resize(specials, GROUP)]

    return blocks


NONFINITE = {
    "nan": with_special(np.nan),
    "negative-nan": with_special(-np.nan),
    "positive-infinity": with_special(np.inf),
    "negative-infinity": with_special(-np.inf),
    "nan-and-infinity": with_special(np.nan, -np.inf),
}

Maker = Callable[[FloatType, np.random.Generator, float], Blocks]


def computed_cases(kind: FloatType) -> Iterator[tuple[str, Maker, float, Given | None]]:
    """Name, function, tensor amax. At 2.625 the exact global scale is a power of two, 1024 or 2^-10."""
    yield from (
        ("normal", normal, 3.171875, None),
        ("normal-small", normal, 0.0205, None),
        ("wide", wide, 0.0, None),
        ("ties", ties, 2.625, None),
        ("ties-odd", ties, 1.7, None),
        ("scale-ties", scale_ties, 2.625, None),
        ("scale-ties-odd", scale_ties, 1.0, None),
        ("scale-range", scale_range, 2.625, None),
        ("scale-range-odd", scale_range, 3.3, None),
        ("zeros", zeros, 2.5, None),
        ("all-zero", all_zero, 0.0, None),
    )
    if kind.min_exponent == -126:
        for name, amax in (("tiny-1e-30", 1e-30), ("tiny-1e-35", 1e-35), ("tiny-1e-37", 1e-37), ("tiny-1e-38", 1e-38)):
            yield name, small_tensor, amax, None
    else:
        yield "tiny-1e-4", small_tensor, 1e-4, None
        yield "tiny-1e-6", small_tensor, 1e-6, None
    yield "tiny-subnormal", small_tensor, 64.0 * kind.smallest_subnormal, None
    yield "tiny-smallest", small_tensor, kind.smallest_subnormal, None
    yield "huge", large_tensor, kind.largest, None
    for name, maker in NONFINITE.items():
        yield name, maker, 3.0, None


def given_cases(kind: FloatType) -> Iterator[tuple[str, Maker, float, Given]]:
    def saturating(kind: FloatType, rng: np.random.Generator, amax: float) -> Blocks:
        return scale_range(kind, rng, amax, saturate=True)

    makers = {
        "normal": normal, "ties": ties, "scale-ties": scale_ties, "scale-range": saturating, "zeros": zeros,
    }  # fmt: skip
    for given in GIVEN:
        for name, maker in makers.items():
            yield f"{name}-{given.name}", maker, given.amax, given
    yield "all-zero-odd", all_zero, 0.0, GIVEN[1]
    yield "wide-one", wide, 0.0, GIVEN[2]
    for given in EXTREME_GIVEN:
        yield f"normal-{given.name}", normal, given.amax, given
        yield f"zeros-{given.name}", zeros, given.amax, given
    for name, maker in NONFINITE.items():
        yield f"{name}-odd", maker, 1.7, GIVEN[1]


def ungiven_cases(kind: FloatType) -> Iterator[tuple[str, Maker, float, None]]:
    """Cases without a global scale, whose block scales are amax/6."""
    for name, maker, _, given in given_cases(kind):
        if given is GIVEN[2]:
            yield name.removesuffix("-one"), maker, 2688.0, None
    yield "normal-weights", normal, 0.25, None
    yield "all-zero", all_zero, 0.0, None
    for name, maker in NONFINITE.items():
        yield name, maker, 1000.0, None


VARIANTS = {"computed": computed_cases, "given": given_cases, "none": ungiven_cases}


def nvfp4_cases(variant: str, type_name: str) -> list[Case]:
    """All cases of one variant for one type. A partial last row repeats the case's last block."""
    kind = FLOAT_TYPES[type_name]
    cases = []
    for index, (name, maker, amax, given) in enumerate(VARIANTS[variant](kind)):
        rng = np.random.default_rng((SEED, sorted(VARIANTS).index(variant), index, kind.mantissa_bits))
        blocks = maker(kind, rng, amax)
        blocks += [blocks[-1]] * (-len(blocks) % GROUPS_PER_ROW)
        rows = np.stack([cast_special(kind, block) for block in blocks]).reshape(-1, COLUMNS)
        cases.append(Case(name, rows, given))
    return cases
