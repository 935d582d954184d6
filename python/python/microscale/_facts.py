"""Results of operations on checkpoints: the JSON of the program as typed dictionaries.

docs/json.md describes the keys.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from microscale._types import ConvertedFormat, Direction


class Sums(TypedDict):
    """Sums over tensors."""

    tensors: int
    elements: int
    bytes_before: int
    bytes_after: int
    ratio: float | None


class Skipped(TypedDict):
    """An entry of the input directory that was not copied."""

    path: str
    why: str


class Errors(TypedDict):
    """Errors of values. Figures that are not finite are None."""

    relative_squared_error: float | None
    sqnr_db: float | None
    max_abs_error: float | None
    cosine: float | None
    left_out: int


class _SearchedLoss(TypedDict, total=False):
    plain_relative_squared_error: float | None
    rescaled_blocks: int
    tried_scales: int


class _OutputLoss(TypedDict, total=False):
    output_error: float | None
    plain_output_error: float | None


class QuantizedLoss(Errors, _SearchedLoss, _OutputLoss):
    """Errors of quantized values, and counts of values that could not be represented.

    Errors of layers' outputs are GPTQ's, and those without it.
    """

    nan: int
    infinite: int
    clipped_blocks: int
    flushed_blocks: int
    saturated_scales: int


class _TensorFactsOfQuantized(TypedDict, total=False):
    format: str
    recipe: int
    global_scale: float
    seconds: float
    loss: QuantizedLoss
    nan: int
    infinite: int


class TensorFacts(_TensorFactsOfQuantized):
    """The outcome of one tensor. `copied` is the reason why a tensor is unquantized."""

    name: str
    file: str
    dtype: str
    shape: list[int]
    elements: int
    bytes_before: int
    bytes_after: int
    copied: str | None


class PartSummary(TypedDict):
    """Shards of a part."""

    made: int
    kept: int
    of: int
    directory: str


class Settings(TypedDict, total=False):
    """The settings that decide the bytes, in words."""

    format: str
    numerics: str
    scale_rule: str
    ties: str
    block_scale: str
    quotient: str
    negative_zero: str
    global_scale: str
    global_scale_direction: str
    search: str
    search_global: str
    hadamard: str
    importance: str
    gptq: str
    input_scale: str
    scale_layout: str
    non_finite: str
    files: str


class UsedRecipe(Settings):
    """A recipe of several, and the tensors that it was used for."""

    used_for: Sums


class _QuantizeFactsOfRun(Settings, total=False):
    device: str
    seconds: float
    quantize_seconds: float
    bytes_per_second: float | None
    quantized: Sums
    copied: Sums
    total: Sums
    loss: QuantizedLoss
    skipped: list[Skipped]
    part: PartSummary
    #: Only for several recipes. The settings above are common to all.
    recipes: list[UsedRecipe]


class QuantizeFacts(_QuantizeFactsOfRun):
    """The result of :func:`microscale.checkpoint.quantize`.

    A plan (`out=None`) has no figures of a run.
    """

    tensors: list[TensorFacts]
    notes: list[str]


class DequantizeFacts(TypedDict):
    """The result of :func:`microscale.checkpoint.dequantize`."""

    dtype: str
    device: str
    seconds: float
    dequantize_seconds: float
    dequantized: Sums
    copied: Sums
    nan_scales: int
    nan: int
    infinite: int
    skipped: list[Skipped]


class MergeFacts(TypedDict):
    """The result of :func:`microscale.checkpoint.merge`."""

    seconds: float
    shards: int
    bytes: int
    tensors: list[TensorFacts]
    left: str | None
    skipped: list[Skipped]


class Rounded(TypedDict):
    """A tensor whose global scale was inverted and rounded."""

    tensor: str
    before: float
    after: float
    differing: int
    values: int


Requantized = TypedDict(
    "Requantized",
    {
        "tensor": str,
        "from": str,
        "to": str,
        "differing": int,
        "values": int,
        "relative_squared_error": "float | None",
    },
)


class ConvertFacts(TypedDict):
    """The result of :func:`microscale.checkpoint.convert`."""

    to: ConvertedFormat
    seconds: float
    converted: Sums
    in_bf16: Sums
    copied: Sums
    cast: int
    rounded: list[Rounded]
    requantized: list[Requantized]
    rounded_inputs: list[str]
    dropped_inputs: list[str]
    unscaled_inputs: list[str]
    dropped_activations: str | None
    dropped_cache: str | None
    skipped: list[Skipped]


class Finding(TypedDict):
    """A defect of a checkpoint."""

    defect: str
    tensor: str | None
    file: str
    what: str
    effect: str
    fix: str


class DoctorFacts(TypedDict):
    """The result of :func:`microscale.checkpoint.doctor`."""

    findings: list[Finding]
    quantized_tensors: int
    other_tensors: int
    blocks: int


class _Compared(TypedDict, total=False):
    loss: Errors
    same_bytes: bool


class TensorCompared(_Compared):
    """The difference of one tensor: `loss` for floats, and `same_bytes` for other dtypes."""

    name: str
    shape: list[int]


class CompareFacts(TypedDict):
    """The result of :func:`microscale.checkpoint.compare`."""

    total: Errors
    tensors: list[TensorCompared]
    only_first: list[str]
    only_second: list[str]


class _Listed(TypedDict, total=False):
    format: str
    checkpoint_format: str
    global_scale: float
    direction: Direction
    hadamard: int
    dtype: str
    scale_dtype: str
    scale_block: list[int]
    blocks: int
    nan_scales: int
    scale_range: list[int] | None
    unreadable: str


class TensorListed(_Listed):
    """A tensor of :func:`microscale.checkpoint.inspect`."""

    name: str
    shape: list[int]
    file: str
    bytes: int


class Estimate(TypedDict):
    """A mean, and half the width of its 95 % confidence interval: None for a single window."""

    mean: float
    margin: float | None


class LayerOutput(TypedDict):
    """The error of a layer's output: None without any error."""

    weight: str
    sqnr_db: float | None


class EvaluatedModel(TypedDict):
    """A quantized model of an evaluation."""

    model: str
    activations: str | None
    loss: Estimate
    perplexity: Estimate
    increase: Estimate
    divergence: Estimate
    agreement: Estimate
    layers: list[LayerOutput]


class EvaluateFacts(TypedDict):
    """The result of :func:`microscale.checkpoint.evaluate`."""

    model: str
    windows: int
    tokens: int
    loss: Estimate
    perplexity: Estimate
    quantized: list[EvaluatedModel]


class CalibrationRun(TypedDict):
    """The model, the text and the options of a calibration."""

    model: str
    text: str
    text_bytes: int
    window: int
    windows: int
    documents: bool
    dtype: str
    device: str
    hessians: bool


class CalibrateFacts(TypedDict):
    """The result of :func:`microscale.checkpoint.calibrate`."""

    run: CalibrationRun
    layers: int
    complete: bool
    unseen_experts: dict[str, list[int] | bool]
    inputs: dict[str, str]


class PlanPoint(TypedDict):
    """A size and its loss."""

    bytes: int
    bits: float
    loss: float


class PlanShare(PlanPoint):
    """The tensors of a format."""

    format: str
    tensors: int
    elements: int


class PlanAlternative(PlanPoint):
    """One format for all tensors."""

    recipe: str


class PlanChoice(TypedDict):
    """A format that a tensor could have."""

    format: str
    bytes: int
    loss: float


class PlannedTensor(TypedDict):
    """A tensor of a plan. The tensors of a `group` have one format."""

    name: str
    elements: int
    group: int
    format: str
    choices: list[PlanChoice]


class PlanFacts(TypedDict):
    """The result of :func:`microscale.checkpoint.plan`."""

    files: str
    held_by: list[str]
    search: str
    importance: str | None
    elements: int
    budget_bytes: int
    bytes: int
    bits: float
    other_bytes: int
    loss: float
    relaxed_loss: float
    loss_bound: float
    optimal: bool
    formats: list[PlanShare]
    alternatives: list[PlanAlternative]
    tensors: list[PlannedTensor]
    curve: list[PlanPoint]


class PartFacts(TypedDict):
    """A part of :func:`microscale.ray.quantize_checkpoint`."""

    part: int
    made: int
    kept: int
    of: int
    directory: str
    node: str


class RayFacts(MergeFacts):
    """The result of :func:`microscale.ray.quantize_checkpoint`."""

    parts: list[PartFacts]


#: The word for a global scale that is left out.
NoGlobalScale = Literal["none"]
