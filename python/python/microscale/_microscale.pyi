"""The extension module. Use :mod:`microscale`, which checks arguments and makes the outputs."""

import os
from collections.abc import Callable
from typing import Any

__version__: str

_Path = str | os.PathLike[str]
_Progress = Callable[[str, int, int], Any] | None
_Counts = tuple[int, int, int, int, int, int, int, tuple[int, int] | None]
_Figures = tuple[int, int, float, float, float, float]

class Recipe:
    def __init__(
        self,
        format: str,
        convention: str | None,
        scale_rule: str | None,
        ties: str | None,
        search: str | None,
        global_scale: float | str | None,
        layout: str,
        non_finite: str,
    ) -> None: ...
    @property
    def format(self) -> str: ...
    def facts(self) -> list[tuple[str, str]]: ...
    def parts(self, rows: int, cols: int) -> tuple[int, int, int]: ...

def quantize(
    values: Any,
    recipe: Recipe,
    importance: Any,
    amax: tuple[float, bool, bool] | None,
    codes: Any,
    scales: Any,
    new: bool,
) -> tuple[float | None, str | None, _Counts]: ...
def dequantize(tensor: Any, out: Any) -> None: ...
def amax(values: Any) -> tuple[float, bool, bool]: ...
def scales_in(tensor: Any, layout: str, out: Any) -> None: ...
def gemv(matrix: Any, vectors: Any, batch: int, vector_stride: int, out: Any) -> None: ...
def linear(weights: Any, activations: Any, out: Any, bias: Any) -> None: ...
def linear_experts(weights: Any, activations: Any, chosen: Any, out: Any, bias: Any) -> None: ...
def compare(original: Any, other: Any) -> _Figures: ...
def compare_quantized(values: Any, tensor: Any) -> _Figures: ...

# With the feature `cuda`. `stream` is the handle of a stream, as an integer.
SLOT_WORDS: int
AMAX_WORDS: int

def gpu_quantize(
    values: Any,
    recipe: Recipe,
    importance: Any,
    amax: Any,
    codes: Any,
    scales: Any,
    slot: Any,
    new: bool,
    count: bool,
    stream: int,
) -> tuple[str | None, _Counts | None]: ...
def gpu_dequantize(tensor: Any, out: Any, stream: int) -> None: ...
def gpu_amax(values: Any, amax: Any, stream: int) -> None: ...
def gpu_scales_in(tensor: Any, layout: str, out: Any, stream: int) -> None: ...
def gpu_gemv(matrix: Any, vectors: Any, batch: int, vector_stride: int, out: Any, stream: int) -> None: ...
def gpu_workspace_bytes(weights: Any, tokens: int, wide: bool, stream: int) -> int: ...
def gpu_experts_workspace_bytes(weights: Any, pairs: int, wide: bool, stream: int) -> int: ...
def gpu_capture(device: int, stream: int) -> int | None: ...
def gpu_linear(weights: Any, activations: Any, out: Any, bias: Any, workspace: Any, stream: int) -> None: ...
def gpu_linear_experts(
    weights: Any, activations: Any, chosen: Any, out: Any, bias: Any, workspace: Any, stream: int
) -> None: ...
def quantize_checkpoint(
    path: _Path,
    out: _Path | None,
    arguments: dict[str, Any],
    device: str,
    part: tuple[int, int] | None,
    progress: _Progress,
) -> tuple[str, list[str]]: ...
def merge_checkpoint(path: _Path, out: _Path, skip_others: bool, split_experts: bool, progress: _Progress) -> str: ...
def convert_checkpoint(
    path: _Path,
    out: _Path,
    to: str,
    format: str | None,
    requantize: bool,
    skip_others: bool,
    device: str,
    progress: _Progress,
) -> tuple[str, list[str]]: ...
def diagnose_checkpoint(path: _Path, against: _Path | None, device: str, progress: _Progress) -> str: ...
def inspect_checkpoint(path: _Path) -> str: ...
def main(arguments: list[str]) -> int: ...
