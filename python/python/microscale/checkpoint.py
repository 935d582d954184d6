"""Operations on checkpoints: safetensors files, directories in Hugging Face layout, and GGUF.

    facts = microscale.checkpoint.quantize("MODEL", "OUT", progress=True)
    assert not microscale.checkpoint.doctor("OUT", against="MODEL")["findings"]

Each function does the same as the command of the program with its name, and returns the JSON of
the command's `--json`. An output appears when it is complete. A failure, an exception in `progress`
and Ctrl-C leave nothing.

`progress` is True for a line by tqdm, or a callable. It is called before each tensor with its name,
the bytes done, and all bytes.

A missing file raises `FileNotFoundError`, and other errors of the operating system another
`OSError`. All other errors are a :class:`microscale.CheckpointError`, which is a `ValueError` and
names the file and the tensor.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable
from numbers import Real
from typing import Any

from microscale import _microscale
from microscale._errors import Error
from microscale._facts import (
    CompareFacts,
    ConvertFacts,
    DequantizeFacts,
    DoctorFacts,
    MergeFacts,
    NoGlobalScale,
    QuantizeFacts,
    TensorListed,
)
from microscale._progress import reporting
from microscale._types import (
    CheckpointDtype,
    CheckpointFormat,
    ComparedFormat,
    ComparedNumerics,
    ConvertedFormat,
    Format,
    GlobalScale,
    Kept,
    NonFinite,
    Numerics,
    Path,
    Progress,
    ScaleRule,
    Search,
    Ties,
)

__all__ = ["compare", "convert", "dequantize", "doctor", "inspect", "merge", "quantize"]


def _warned(result: tuple[str, list[str]]) -> Any:
    """Returns the facts of a result, and passes its warnings to Python."""
    facts, cautions = result
    for caution in cautions:
        warnings.warn(caution, stacklevel=3)
    return json.loads(facts)


def quantize(
    path: Path,
    out: Path | None,
    *,
    recipe: Path | None = None,
    format: Format | None = None,
    numerics: Numerics | None = None,
    scale_rule: ScaleRule | None = None,
    ties: Ties | None = None,
    search: Search | None = None,
    search_global: bool = False,
    global_scale: float | NoGlobalScale | Path | None = None,
    importance: Path | None = None,
    input_scale: float | Path | None = None,
    requantize: bool = False,
    split_experts: bool = False,
    skip_others: bool = False,
    non_finite: NonFinite | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    to: CheckpointFormat | None = None,
    kept: Kept | None = None,
    device: str = "auto",
    part: tuple[int, int] | None = None,
    progress: bool | Progress | None = None,
) -> QuantizeFacts:
    """Quantizes a checkpoint.

    Args:
        path: a .safetensors or .gguf file, or a directory.
        out: the output, a file or a directory like `path`. None returns the plan and writes
            nothing.
        recipe: a file (.toml), or the name of a built-in recipe such as `nvfp4`. The arguments
            below override its settings for all tensors.
        format: `mxfp4` by default.
        numerics: the library whose arithmetic is followed: `ocp`, `torchao`, `compressed-tensors`,
            `modelopt`, `transformer-engine` or `ggml`.
        scale_rule: `floor`, `ceil`, `even` or `rceil`, for MX formats.
        ties: `even`, `away` or `zero`, for MXFP4.
        search: `four-six`, `window` or `full` chooses block scales by their squared error.
        search_global: also search for NVFP4's global scale.
        global_scale: NVFP4's global scale: a number for all tensors in the direction of the
            numerics, a .safetensors file with one for each tensor, or `"none"`. A number whose
            direction you know can be a `GlobalScale(...).value`.
        importance: a .safetensors file with weights of errors by column, for the search.
        input_scale: stores the scale of the inputs of layers, for W4A4: their amax, or a JSON file
            of numbers by layer.
        requantize: quantize weights that are quantized already, from their values.
        split_experts: treat experts that share one tensor one by one.
        skip_others: leave out the directory's other files with weights: .bin, .pth, .onnx.
        non_finite: `error`, `propagate` or `saturate`.
        include: patterns of more tensors to quantize.
        exclude: patterns of tensors that stay unquantized. They override `include`.
        to: the checkpoint format to write: `compressed-tensors`, `modelopt`, `gpt-oss` or `gguf`,
            and others that `microscale quantize --help` lists.
        kept: storage of tensors of GGUF that stay unquantized: `unchanged` or `q8_0`.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `cuda:all`.
        part: `(I, N)` quantizes the I-th of N parts into OUT.parts, for :func:`merge`.
        progress: True, or a callable.

    Returns:
        Settings, totals and each tensor; and `notes` on loaders that refuse the output.

    Raises:
        CheckpointError: names the file and the tensor.
        OSError: an error of the operating system, such as `FileNotFoundError`.
    """
    if isinstance(global_scale, GlobalScale):
        raise TypeError("global_scale is a GlobalScale; pass its value, and numerics of its direction")
    number = global_scale is None or global_scale == "none" or isinstance(global_scale, Real)
    arguments = {
        "recipe": None if recipe is None else os.fspath(recipe),
        "format": format,
        "numerics": numerics,
        "scale_rule": scale_rule,
        "ties": ties,
        "search": search,
        "search_global": search_global,
        "global_scale": global_scale if number else None,
        "global_scales": None if number else global_scale,
        "importance": importance,
        "input_scale": input_scale,
        "requantize": requantize,
        "split_experts": split_experts,
        "skip_others": skip_others,
        "non_finite": non_finite,
        "include": list(include),
        "exclude": list(exclude),
        "to": to,
        "kept": kept,
    }
    with reporting(progress, "quantizing") as update:
        result = _microscale.quantize_checkpoint(path, out, arguments, device, part, update)
    facts: QuantizeFacts = _warned(result)
    return facts


def dequantize(
    path: Path,
    out: Path,
    *,
    dtype: CheckpointDtype | None = None,
    non_finite: NonFinite | None = None,
    skip_others: bool = False,
    device: str = "auto",
    progress: bool | Progress | None = None,
) -> DequantizeFacts:
    """Writes a checkpoint with its quantized tensors as values again.

    Args:
        path: a quantized checkpoint.
        out: the output.
        dtype: `f32`, `f16` or `bf16`. By default the dtype in config.json, or else `bf16`.
        non_finite: for values above the largest number of the dtype: `error` refuses them,
            `propagate` writes infinities, and `saturate` the largest number.
        skip_others: leave out the directory's other files with weights.
        device: `auto` is the CPU, which is faster here.
        progress: True, or a callable.

    Returns:
        Sums over the tensors, and counts of NaN and infinities.
    """
    with reporting(progress, "dequantizing") as update:
        result = _microscale.dequantize_checkpoint(path, out, dtype, non_finite, skip_others, device, update)
    facts: DequantizeFacts = json.loads(result)
    return facts


def merge(
    path: Path,
    out: Path,
    *,
    split_experts: bool = False,
    skip_others: bool = False,
    progress: bool | Progress | None = None,
) -> MergeFacts:
    """Merges the parts that :func:`quantize` made of `path` with `part` and this `out`.

    Args:
        path: the checkpoint that was quantized.
        out: the output of the parts: OUT.parts becomes OUT.
        split_experts: the `split_experts` of the parts.
        skip_others: leave out the directory's other files with weights.
        progress: True, or a callable.

    Returns:
        The number of shards and bytes, and each tensor.
    """
    with reporting(progress, "merging") as update:
        result = _microscale.merge_checkpoint(path, out, skip_others, split_experts, update)
    facts: MergeFacts = json.loads(result)
    return facts


def convert(
    path: Path,
    out: Path,
    *,
    to: ConvertedFormat,
    format: Format | None = None,
    requantize: bool = False,
    skip_others: bool = False,
    device: str = "auto",
    progress: bool | Progress | None = None,
) -> ConvertFacts:
    """Writes a quantized checkpoint in another checkpoint format.

    Args:
        path: a quantized checkpoint.
        out: the output.
        to: the checkpoint format to write: `compressed-tensors`, `modelopt`, `gpt-oss`, `gguf`, and
            others that `microscale convert --help` lists.
        format: `nvfp4` casts MXFP4 to it where that is exact, `mxfp8-e4m3` casts MXFP4 and NVFP4.
        requantize: round values that cannot be cast exactly, instead of refusing them.
        skip_others: leave out the directory's other files with weights.
        device: compares all values before and after. `auto` is the CPU, which is faster here.
        progress: True, or a callable.

    Returns:
        Sums over the tensors. `rounded` and `requantized` list tensors whose values changed.
    """
    with reporting(progress, "converting") as update:
        result = _microscale.convert_checkpoint(path, out, to, format, requantize, skip_others, device, update)
    facts: ConvertFacts = _warned(result)
    return facts


def doctor(
    path: Path, *, against: Path | None = None, device: str = "auto", progress: bool | Progress | None = None
) -> DoctorFacts:
    """Checks a quantized checkpoint for defects.

    Args:
        path: a quantized checkpoint.
        against: the unquantized checkpoint, to compare values with.
        device: dequantizes. `auto` is the CPU, which is faster here.
        progress: True, or a callable.

    Returns:
        `findings`, an empty list for a sound checkpoint, and the number of tensors and blocks.
    """
    with reporting(progress, "examining") as update:
        result = _microscale.diagnose_checkpoint(path, against, device, update)
    facts: DoctorFacts = json.loads(result)
    return facts


def compare(
    path: Path,
    other: Path | None = None,
    *,
    format: Format | ComparedFormat | None = None,
    numerics: Numerics | ComparedNumerics | None = None,
    device: str = "auto",
    progress: bool | Progress | None = None,
) -> CompareFacts:
    """Measures the loss of a checkpoint compared with the original.

    Pass `other`, or `format` for the loss that quantizing would cause. Nothing is written.

    Args:
        path: the original.
        other: the checkpoint to measure, quantized or not.
        format: the format to measure: also `nf4` and `mxfp4-e3m0`, which no checkpoint can have.
        numerics: the library whose arithmetic is followed, with `format`.
        device: `auto` is the CPU, and with `format` a GPU if there is one.
        progress: True, or a callable.

    Returns:
        The loss in total and of each tensor, and the names that only one checkpoint has.
    """
    if (other is None) == (format is None) or (numerics is not None and format is None):
        raise Error("compare takes another checkpoint, or a format and its numerics")
    with reporting(progress, "comparing") as update:
        result = _microscale.compare_checkpoints(path, other, format, numerics, device, update)
    facts: CompareFacts = json.loads(result)
    return facts


def inspect(path: Path) -> list[TensorListed]:
    """Lists the tensors of a checkpoint.

    Returns:
        For each tensor its name, shape, format or dtype, file and bytes. Quantized tensors also have
        their blocks and scales.
    """
    facts: list[TensorListed] = json.loads(_microscale.inspect_checkpoint(path))
    return facts
