"""Figures about arrays: losses, and largest magnitudes."""

from __future__ import annotations

from typing import Any, NamedTuple

from microscale import _gpu


class Report(NamedTuple):
    """Counts of values that could not be represented when an array was quantized."""

    nan: int
    """NaN in the input."""
    infinite: int
    """Infinities in the input."""
    clipped_blocks: int
    """Blocks whose largest magnitude is above the largest element times the scale."""
    flushed_blocks: int
    """Blocks that were not zero and became zeros."""
    saturated_scales: int
    """Blocks whose scale left the range of the scale format and was clamped."""
    rescaled_blocks: int
    """Blocks that a search gave another scale than the numerics'."""
    tried_scales: int
    """Scales whose error a search computed."""
    first_non_finite: tuple[int, int] | None
    """Row and column of the first NaN or infinity."""


class Amax(NamedTuple):
    """The largest magnitude of an array."""

    finite: float
    """The largest magnitude among finite values; 0 if there are none."""
    nan: bool
    """There is a NaN."""
    infinite: bool
    """There is an infinity."""


class DeviceAmax:
    """The largest magnitude of arrays in the memory of a GPU, where it stays until you read it.

    Attributes:
        words: float32 `[4]` on the GPU: one that is not used, the largest magnitude, and the bits
            of 1 for each of NaN and infinity if there is one.
    """

    __slots__ = ("words",)

    def __init__(self, words: Any) -> None:
        self.words = words

    def read(self) -> Amax:
        """The figures. Waits for the GPU."""
        _, finite, nan, infinite = _gpu.numbers(self.words)
        return Amax(finite, nan != 0, infinite != 0)

    @property
    def finite(self) -> float:
        """The largest magnitude among finite values; 0 if there are none. Waits for the GPU."""
        return self.read().finite

    @property
    def nan(self) -> bool:
        """There is a NaN. Waits for the GPU."""
        return self.read().nan

    @property
    def infinite(self) -> bool:
        """There is an infinity. Waits for the GPU."""
        return self.read().infinite


class Loss(NamedTuple):
    """The error of an array compared with the original. Pairs with NaN or an infinity are left
    out."""

    values: int
    """Pairs compared."""
    left_out: int
    """Pairs left out."""
    relative_squared_error: float
    """Sum of squared differences over the sum of squares of the original."""
    sqnr_db: float
    """Signal to quantization noise, in dB."""
    max_abs_error: float
    """The largest difference."""
    cosine: float
    """The cosine of the angle between the two."""
