"""Exceptions. The extension module raises them."""

from __future__ import annotations

import os


class Error(ValueError):
    """An array, a shape or a choice that is not possible. The message says what to change."""


class NonFiniteError(Error):
    """Values with NaN or infinities, which `non_finite="error"` refuses.

    Attributes:
        first: row and column of the first one, counted from 0.
        nan: number of NaN.
        infinite: number of infinities.
    """

    def __init__(self, message: str, first: tuple[int, int], nan: int, infinite: int) -> None:
        super().__init__(message)
        self.first = first
        self.nan = nan
        self.infinite = infinite

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, tuple[int, int], int, int]]:
        return type(self), (str(self), self.first, self.nan, self.infinite)


class CheckpointError(Error):
    """A checkpoint that cannot be read, written or merged.

    Errors of the operating system are not of this class: a missing file is a `FileNotFoundError`.

    Attributes:
        file: the file or directory with the problem, or None.
        tensor: the name of the tensor with the problem, or None.
    """

    def __init__(
        self, message: str, file: os.PathLike[str] | str | None = None, tensor: str | None = None
    ) -> None:
        super().__init__(message)
        self.file = None if file is None else os.fspath(file)
        self.tensor = tensor

    def __reduce__(self) -> tuple[type[CheckpointError], tuple[str, str | None, str | None]]:
        return type(self), (str(self), self.file, self.tensor)
