"""Exceptions. The extension module raises them."""

from __future__ import annotations

import os


class Error(ValueError):
    """An array, a shape, or a choice of arithmetic that cannot be. The message says what can be changed."""


class NonFiniteError(Error):
    """Values that hold NaN or infinities, where `non_finite="error"` refuses them.

    Attributes:
        first: row and column of the first one, counted from 0.
        nan: how many are NaN.
        infinite: how many are infinite.
    """

    def __init__(self, message: str, first: tuple[int, int], nan: int, infinite: int) -> None:
        super().__init__(message)
        self.first = first
        self.nan = nan
        self.infinite = infinite

    def __reduce__(self):
        return type(self), (str(self), self.first, self.nan, self.infinite)


class CheckpointError(Error):
    """A checkpoint that cannot be read, written or put together.

    Attributes:
        file: the file or directory that it is about, if there is one.
        tensor: the name of the tensor that it is about, if there is one.
    """

    def __init__(
        self, message: str, file: os.PathLike[str] | str | None = None, tensor: str | None = None
    ) -> None:
        super().__init__(message)
        self.file = None if file is None else os.fspath(file)
        self.tensor = tensor

    def __reduce__(self):
        return type(self), (str(self), self.file, self.tensor)
