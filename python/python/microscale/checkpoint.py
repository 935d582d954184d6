"""Operations on checkpoints: safetensors files, directories in Hugging Face layout, and GGUF.

    facts = microscale.checkpoint.quantize("MODEL", "OUT", progress=True)
    assert not microscale.checkpoint.doctor("OUT", against="MODEL")["findings"]

Each function does the same as the command of the program with its name (`evaluate` as `eval`), and
returns the JSON of the command's `--json`. An output appears when it is complete. A failure, an
exception in `progress` and Ctrl-C leave nothing, but for the statistics of `calibrate`, which the
same call continues.

`progress` is True for a line by tqdm, or a callable. It is called before each tensor with its name,
the bytes done, and all bytes. `evaluate` and `calibrate` call it before each decoder layer with
`layer N`, the batches done, and all batches.

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
from typing import Any, Literal

from microscale import _microscale
from microscale._errors import Error
from microscale._facts import (
    CalibrateFacts,
    CompareFacts,
    ConvertFacts,
    DequantizeFacts,
    DoctorFacts,
    EvaluateFacts,
    MergeFacts,
    NoGlobalScale,
    PlanFacts,
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
    GptqOrder,
    InputFormat,
    Kept,
    NonFinite,
    Numerics,
    Path,
    PlannedFormat,
    Progress,
    ScaleRule,
    Search,
    Ties,
)

__all__ = [
    "calibrate",
    "compare",
    "convert",
    "dequantize",
    "doctor",
    "evaluate",
    "inspect",
    "merge",
    "plan",
    "quantize",
]


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
    hadamard: Literal[16, 32, 64, 128] | None = None,
    global_scale: float | NoGlobalScale | Path | None = None,
    importance: Path | None = None,
    calibration: Path | None = None,
    gptq: bool = False,
    gptq_static_scales: bool = False,
    gptq_order: GptqOrder | None = None,
    gptq_damping: float | None = None,
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
        hadamard: the width of a block Hadamard transform of weights and of the inputs of their
            layers, for `mxfp4` and `nvfp4` in compressed-tensors, which vLLM runs. Experts, heads
            and layers with a bias are quantized without it.
        global_scale: NVFP4's global scale: a number for all tensors in the direction of the
            numerics, a .safetensors file with one for each tensor, or `"none"`. A number whose
            direction you know can be a `GlobalScale(...).value`.
        importance: a .safetensors file with weights of errors by column, for the search.
        calibration: a directory of :func:`calibrate`, for the search or for `gptq`.
        gptq: use GPTQ, which minimizes the errors of layers' outputs. Works for `mxfp4` and `nvfp4`,
            with `search="full"` by default.
        gptq_static_scales: choose block scales before GPTQ's loop, not in it.
        gptq_order: `blocks` or `columns` with the largest inputs first, or `natural`.
        gptq_damping: the part of the mean diagonal entry to add to Hessians, 0.01 by default.
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
        "hadamard": hadamard,
        "global_scale": global_scale if number else None,
        "global_scales": None if number else global_scale,
        "importance": importance,
        "calibration": calibration,
        "gptq": gptq,
        "gptq_static_scales": gptq_static_scales,
        "gptq_order": gptq_order,
        "gptq_damping": gptq_damping,
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


def plan(
    path: Path,
    out: Path | None = None,
    *,
    bits: float | None = None,
    size: int | None = None,
    formats: Iterable[PlannedFormat] = (),
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    search: Search | None = None,
    importance: Path | None = None,
    to: CheckpointFormat | None = None,
    split_experts: bool = False,
    device: str = "auto",
    progress: bool | Progress | None = None,
) -> PlanFacts:
    """Chooses a format for each tensor, so that the least is lost within a budget.

    Pass `bits` or `size`.

    Args:
        path: the checkpoint.
        out: a recipe to write, for `quantize(recipe=out)`. None writes nothing.
        bits: the largest number of bits per weight, scales included, over the tensors that can be
            quantized.
        size: the largest size of all tensors in bytes.
        formats: what tensors may become. By default every format of the checkpoint format, and
            `unquantized`.
        include: patterns of more tensors to quantize.
        exclude: patterns of tensors that stay unquantized. They override `include`.
        search: searches block scales, while measuring and in the recipe.
        importance: a file with weights of the loss by column, as of :func:`quantize`.
        to: the checkpoint format that will hold the plan.
        split_experts: choose for experts that share one tensor one by one.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `cuda:all`.
        progress: True, or a callable.

    Returns:
        The plan, its loss and a proved bound, and other plans to compare with.
    """
    arguments: dict[str, Any] = {
        "bits": bits,
        "size": size,
        "formats": list(formats),
        "include": list(include),
        "exclude": list(exclude),
        "search": search,
        "importance": None if importance is None else os.fspath(importance),
        "to": to,
        "split_experts": split_experts,
    }
    given = [f"{name}={value!r}" for name, value in arguments.items() if value not in (None, [], False)]
    made_by = f"microscale.checkpoint.plan({', '.join([repr(os.fspath(path)), *given])})"
    with reporting(progress, "measuring") as update:
        result, recipe, cautions = _microscale.plan_checkpoint(path, out, arguments, made_by, device, update)
    facts: PlanFacts = _warned((result, cautions))
    if out is not None:
        # A recipe that is there is complete.
        partial = f"{os.fspath(out)}.partial"
        with open(partial, "w", encoding="utf-8") as file:
            file.write(recipe)
        os.replace(partial, out)
    return facts


def evaluate(
    path: Path,
    quantized: Path | Iterable[Path],
    *,
    text: Path,
    window: int | None = None,
    windows: int | None = None,
    documents: bool = False,
    dtype: Literal["f32", "bf16"] = "f32",
    activations: Iterable[InputFormat] = (),
    skip_layers: bool = False,
    progress: bool | Progress | None = None,
) -> EvaluateFacts:
    """Measures what quantization costs a model, on the CPU, one layer in memory at a time.

    Args:
        path: the original, a directory with config.json and tokenizer.json.
        quantized: a quantized checkpoint directory of it, or several.
        text: a file to run the models on, in UTF-8.
        window: tokens that a model reads at once. By default its context, at most 2048.
        windows: read only the first windows.
        documents: empty lines separate documents.
        dtype: the dtype of hidden states, `f32` or `bf16`.
        activations: formats to round the inputs of quantized layers to as well, each for a further
            row: `nvfp4`, `mxfp4`, `mxfp8` or `fp8`.
        skip_layers: do not measure the output of each layer, which takes half of the time.
        progress: True, or a callable.

    Returns:
        Perplexity, divergence from the original and agreement, with confidence intervals, and the
        SQNR of each layer's output.
    """
    paths = [quantized] if isinstance(quantized, (str, os.PathLike)) else list(quantized)
    reading = _reading(text, window, windows, documents, dtype)
    with reporting(progress, "evaluating", bytes=False) as update:
        result = _microscale.evaluate_models(path, paths, reading, list(activations), skip_layers, update)
    facts: EvaluateFacts = json.loads(result)
    return facts


def calibrate(
    path: Path,
    out: Path,
    *,
    text: Path,
    window: int | None = None,
    windows: int | None = None,
    documents: bool = False,
    dtype: Literal["f32", "bf16"] = "f32",
    skip_hessians: bool = False,
    progress: bool | Progress | None = None,
) -> CalibrateFacts:
    """Records the inputs of a model's layers, on the CPU, one layer in memory at a time.

    An interrupted calibration stays in `out`. The same call continues it after the last complete
    layer.

    Args:
        path: the model, a directory with config.json and tokenizer.json.
        out: the directory of statistics, for `quantize(calibration=out)`.
        text: a file to run the model on, in UTF-8.
        window: tokens that the model reads at once. By default its context, at most 2048.
        windows: read only the first windows.
        documents: empty lines separate documents.
        dtype: the dtype of hidden states, `f32` or `bf16`.
        skip_hessians: do not compute the Hessians that GPTQ needs, K² floats for an input of K.
        progress: True, or a callable.

    Returns:
        The run, and experts that saw no token, which also warn.
    """
    reading = _reading(text, window, windows, documents, dtype)
    with reporting(progress, "calibrating", bytes=False) as update:
        result = _microscale.calibrate_model(path, out, reading, skip_hessians, update)
    facts: CalibrateFacts = _warned(result)
    return facts


def _reading(text: Path, window: int | None, windows: int | None, documents: bool, dtype: str) -> dict[str, object]:
    """Returns the arguments of a text and its windows."""
    return {"text": text, "window": window, "windows": windows, "documents": documents, "dtype": dtype}
