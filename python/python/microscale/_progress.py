"""Progress of operations: a callable, or a line by tqdm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from microscale._types import Progress


@contextmanager
def reporting(progress: bool | Progress | None, doing: str, *, bytes: bool = True) -> Iterator[Progress | None]:
    """Yields the callable to report to, or None. True gives a line by tqdm, closed at the end.

    The numbers are bytes, or else batches.
    """
    if progress is not True:
        yield progress or None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError("progress=True needs tqdm; install it, or pass a callable") from None
    unit = "B" if bytes else " batches"
    with tqdm(desc=doing, unit=unit, unit_scale=bytes, unit_divisor=1024) as line:

        def update(tensor: str, done: int, total: int) -> None:
            line.total = total
            line.set_postfix_str(tensor, refresh=False)
            line.update(done - line.n)

        yield update
        if line.total is not None:
            line.update(line.total - line.n)
