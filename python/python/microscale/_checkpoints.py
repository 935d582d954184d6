"""Checkpoints: safetensors files, directories in Hugging Face layout, GGUF."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, Union

from microscale import _microscale

Path = Union[str, "os.PathLike[str]"]
#: Called before each tensor with its name, the bytes that are done, and all bytes. What it raises stops the operation.
Progress = Callable[[str, int, int], Any]


def _told(result: tuple[str, list[str]]) -> dict[str, Any]:
    facts, cautions = result
    for caution in cautions:
        warnings.warn(caution, stacklevel=3)
    return json.loads(facts)


def quantize_checkpoint(
    path: Path,
    out: Path | None,
    *,
    recipe: Path | None = None,
    format: str | None = None,
    numerics: str | None = None,
    scale_rule: str | None = None,
    ties: str | None = None,
    search: str | None = None,
    search_global: bool = False,
    global_scale: float | Path | None = None,
    importance: Path | None = None,
    input_scale: float | Path | None = None,
    requantize: bool = False,
    split_experts: bool = False,
    skip_others: bool = False,
    non_finite: str | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    to: str | None = None,
    kept: str | None = None,
    device: str = "auto",
    part: tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Quantizes a checkpoint. `out` appears when it is complete; a failure, an exception of `progress` and Ctrl-C, which takes effect
    within a tensor too, leave nothing.

    Args:
        path: a .safetensors or .gguf file, or a directory.
        out: what to write, a file or a directory like `path`; None says what would be done, and writes nothing.
        recipe: a file (.toml), or the name of a recipe that comes with the package, such as `nvfp4`. What else is given goes
            before what it says for all tensors.
        format, numerics, scale_rule, ties, search, search_global, requantize, split_experts, skip_others, non_finite: as the program's
            options.
        global_scale: NVFP4's for all tensors, in the numerics' direction; a .safetensors file with one for each; or `"none"`.
        importance: a .safetensors file with weights of errors by column, for the search.
        input_scale: stores the scale of layers' inputs, for W4A4: their amax, or a JSON file of numbers by layer, as the program's
            option has it.
        include, exclude: patterns of tensors to quantize too, or to copy.
        to: of files: `compressed-tensors`, `modelopt`, `gpt-oss`, `gguf`.
        kept: what becomes of tensors of GGUF that are not quantized, as the program's `--kept`.
        device: `auto`, `cpu`, `cuda:N` or `cuda:all`.
        part: (I, N) does the I-th of N parts into OUT.parts, for :func:`merge`.
        progress: is called before each tensor with its name, the bytes done and all bytes.

    Returns:
        What `microscale quantize --json` writes: settings, totals, and each tensor; and `notes` on loaders that refuse the
        output.

    Raises:
        CheckpointError: with the file and the tensor that it is about.
    """
    scales = None if global_scale is None or global_scale == "none" or isinstance(global_scale, Real) else global_scale
    arguments = {
        "recipe": None if recipe is None else os.fspath(recipe),
        "format": format,
        "numerics": numerics,
        "scale_rule": scale_rule,
        "ties": ties,
        "search": search,
        "search_global": search_global,
        "global_scale": global_scale if scales is None else None,
        "global_scales": scales,
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
    return _told(_microscale.quantize_checkpoint(path, out, arguments, device, part, progress))


def merge(
    path: Path, out: Path, *, split_experts: bool = False, skip_others: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Puts together the parts that :func:`quantize_checkpoint` made of `path` with `part` and this `out`. Files that are not the
    checkpoint's own are copied; `skip_others` leaves out those with weights. `split_experts` is that of the parts."""
    return json.loads(_microscale.merge_checkpoint(path, out, skip_others, split_experts, progress))


def convert(
    path: Path,
    out: Path,
    *,
    to: str,
    format: str | None = None,
    requantize: bool = False,
    skip_others: bool = False,
    device: str = "auto",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes a quantized checkpoint in another checkpoint format.

    Args:
        path: a quantized checkpoint.
        out: what to write.
        to: `compressed-tensors`, `modelopt`, `gpt-oss` or `gguf`.
        format: `nvfp4` casts MXFP4 to it where that is exact, `mxfp8-e4m3` MXFP4 and NVFP4.
        requantize: round what is not exact, instead of refusing it.
        skip_others: leave out a directory's other files with weights: .bin, .pth, .onnx, other .safetensors.
        device: compares all values before and after; `auto` is the CPU, which is faster here.
        progress: as in :func:`quantize_checkpoint`.

    Returns:
        Sums over the tensors, and under `rounded` and `requantized` those whose values are not the same to the bit.
    """
    return _told(_microscale.convert_checkpoint(path, out, to, format, requantize, skip_others, device, progress))


def doctor(
    path: Path, *, against: Path | None = None, device: str = "auto", progress: Progress | None = None
) -> dict[str, Any]:
    """Looks for what is wrong with a quantized checkpoint.

    Args:
        path: a quantized checkpoint.
        against: the checkpoint that was quantized, with which values are compared.
        device: dequantizes; `auto` is the CPU, which is faster here.
        progress: as in :func:`quantize_checkpoint`.

    Returns:
        `findings`, a list that is empty if all is well, each with `defect`, `tensor`, `file`, `what`, `effect` and `fix`; and
        how much was looked at.
    """
    return json.loads(_microscale.diagnose_checkpoint(path, against, device, progress))


def inspect(path: Path) -> list[dict[str, Any]]:
    """Lists the tensors of a checkpoint: names, shapes, formats or dtypes, files, bytes; of quantized ones also blocks and
    scales."""
    return json.loads(_microscale.inspect_checkpoint(path))
