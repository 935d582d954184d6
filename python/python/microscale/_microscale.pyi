"""The extension module. Use :mod:`microscale`, which checks arguments and allocates the outputs."""

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

__version__: str

# Arrays, quantized arrays and experts: the functions look for their attributes.
_Object: TypeAlias = Any
_Path: TypeAlias = str | os.PathLike[str]
_Progress: TypeAlias = Callable[[str, int, int], object] | None
_Counts: TypeAlias = tuple[int, int, int, int, int, int, int, tuple[int, int] | None]
_Figures: TypeAlias = tuple[int, int, float, float, float, float]

class Recipe:
    def __init__(
        self,
        format: str,
        numerics: str | None,
        scale_rule: str | None,
        ties: str | None,
        search: str | None,
        global_scale: float | str | None,
        layout: str,
        non_finite: str,
    ) -> None: ...
    @property
    def format(self) -> str: ...
    @property
    def direction(self) -> str | None: ...
    def facts(self) -> list[tuple[str, str]]: ...
    def parts(self, rows: int, cols: int) -> tuple[int, int, int]: ...

class ActivationRecipe:
    def __init__(
        self,
        format: str,
        operation: str,
        norm: str,
        eps: float,
        scale: str | None,
        scale_rule: str | None,
        power_of_two: bool,
        layout: str,
    ) -> None: ...
    def parts(self, cols: int) -> tuple[int, int, int, int, int]: ...

def described(array: _Object) -> tuple[tuple[int, ...], str]: ...
def quantize(
    values: _Object,
    recipe: Recipe,
    importance: _Object,
    amax: tuple[float, bool, bool] | None,
    codes: _Object,
    scales: _Object,
    new: bool,
) -> tuple[float | None, str | None, _Counts]: ...
def quantize_activations(
    values: _Object,
    recipe: ActivationRecipe,
    residual: _Object,
    weight: _Object,
    number: float | None,
    scale: _Object,
    experts: tuple[_Object, ...] | None,
    codes: _Object,
    scales: _Object,
    f32_scales: _Object,
) -> None: ...
def append_kv(
    keys: _Object,
    values: _Object,
    parts: tuple[_Object, ...],
    slots: _Object,
    scales: list[float],
    order: str,
    hadamard: int,
) -> None: ...
def gather_kv(
    parts: tuple[_Object, ...],
    slots: _Object,
    lengths: _Object,
    scales: list[float],
    order: str,
    keys: _Object,
    values: _Object,
) -> None: ...
def dequantize(tensor: _Object, out: _Object) -> None: ...
def amax(values: _Object) -> tuple[float, bool, bool]: ...
def scales_in(tensor: _Object, layout: str, out: _Object) -> None: ...
def gemv(matrix: _Object, vectors: _Object, batch: int, vector_stride: int, out: _Object) -> None: ...
def linear(
    weights: _Object,
    x: _Object,
    out: _Object,
    bias: _Object,
    activations: str | None,
    round_weights: bool,
    gate: str | None,
) -> None: ...
def linear_experts(
    weights: _Object,
    x: _Object,
    chosen: _Object,
    out: _Object,
    bias: _Object,
    activations: str | None,
    round_weights: bool,
    gate: str | None,
) -> None: ...
def require_activations(format: str, activations: str, round_weights: bool) -> None: ...
def compare(original: _Object, other: _Object) -> _Figures: ...
def compare_quantized(values: _Object, tensor: _Object) -> _Figures: ...

# With the feature `cuda`. `stream` is the handle of a CUDA stream as an integer.
SLOT_WORDS: int
AMAX_WORDS: int
COUNTER_BYTES: int

def gpu_quantize(
    values: _Object,
    recipe: Recipe,
    importance: _Object,
    amax: _Object,
    codes: _Object,
    scales: _Object,
    slot: _Object,
    new: bool,
    count: bool,
    stream: int,
) -> tuple[str | None, _Counts | None]: ...
def gpu_quantize_activations(
    values: _Object,
    recipe: ActivationRecipe,
    residual: _Object,
    weight: _Object,
    number: float | None,
    scale: _Object,
    experts: tuple[_Object, ...] | None,
    codes: _Object,
    scales: _Object,
    f32_scales: _Object,
    stream: int,
) -> None: ...
def gpu_append_kv(
    keys: _Object,
    values: _Object,
    parts: tuple[_Object, ...],
    slots: _Object,
    scales: _Object,
    order: str,
    hadamard: int,
    stream: int,
) -> None: ...
def gpu_gather_kv(
    parts: tuple[_Object, ...],
    slots: _Object,
    lengths: _Object,
    scales: _Object,
    order: str,
    keys: _Object,
    values: _Object,
    stream: int,
) -> None: ...
def gpu_dequantize(tensor: _Object, out: _Object, stream: int) -> None: ...
def gpu_amax(values: _Object, amax: _Object, stream: int) -> None: ...
def gpu_scales_in(tensor: _Object, layout: str, out: _Object, stream: int) -> None: ...
def gpu_gemv(matrix: _Object, vectors: _Object, batch: int, vector_stride: int, out: _Object, stream: int) -> None: ...
def gpu_workspace_bytes(weights: _Object, tokens: int, wide: bool, stream: int) -> int: ...
def gpu_experts_workspace_bytes(weights: _Object, pairs: int, wide: bool, stream: int) -> int: ...
def gpu_rounded_workspace_bytes(weights: _Object, tokens: int, rounded: str, stream: int) -> int: ...
def gpu_experts_rounded_workspace_bytes(weights: _Object, pairs: int, rounded: str, stream: int) -> int: ...
def gpu_capture(device: int, stream: int) -> int | None: ...
def gpu_bytes_with_results(bytes: int, rows: int, results: int) -> int: ...
def gpu_linear(
    weights: _Object,
    x: _Object,
    out: _Object,
    quantized: tuple[ActivationRecipe, str, float | None, _Object, _Object, _Object, _Object] | None,
    bias: _Object,
    workspace: _Object,
    activations: str | None,
    round_weights: bool,
    gate: str | None,
    stream: int,
) -> None: ...
def gpu_linear_experts(
    weights: _Object,
    x: _Object,
    chosen: _Object,
    out: _Object,
    bias: _Object,
    workspace: _Object,
    activations: str | None,
    round_weights: bool,
    gate: str | None,
    stream: int,
) -> None: ...
def quantize_checkpoint(
    path: _Path,
    out: _Path | None,
    arguments: Mapping[str, object],
    device: str,
    part: tuple[int, int] | None,
    progress: _Progress,
) -> tuple[str, list[str]]: ...
def plan_checkpoint(
    path: _Path,
    out: _Path | None,
    arguments: Mapping[str, object],
    made_by: str,
    device: str,
    progress: _Progress,
) -> tuple[str, str, list[str]]: ...
def evaluate_models(
    path: _Path,
    quantized: list[_Path],
    arguments: Mapping[str, object],
    activations: list[str],
    skip_layers: bool,
    progress: _Progress,
) -> str: ...
def calibrate_model(
    path: _Path,
    out: _Path,
    arguments: Mapping[str, object],
    skip_hessians: bool,
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
def dequantize_checkpoint(
    path: _Path,
    out: _Path,
    dtype: str | None,
    non_finite: str | None,
    skip_others: bool,
    device: str,
    progress: _Progress,
) -> str: ...
def compare_checkpoints(
    path: _Path,
    other: _Path | None,
    format: str | None,
    numerics: str | None,
    device: str,
    progress: _Progress,
) -> str: ...
def words() -> list[tuple[str, list[str]]]: ...
def main(arguments: list[str]) -> int: ...
