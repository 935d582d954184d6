"""Golden vectors of NVFP4: the recorded library functions. make_golden.py writes the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

import te_formula
from check_nvfp4 import CONVENTIONS, find_nvfp4
from golden_common import File, Tensors, as_torch
from nvfp4_inputs import GROUP, Given, nvfp4_cases


def quantize_torchao(rows: torch.Tensor, given: Given | None, computed: bool) -> Tensors:
    scale = None
    if given is not None:
        scale = torch.tensor(given.multiplier, dtype=torch.float32)
    elif computed:
        scale = per_tensor_amax_to_scale(torch.max(torch.abs(rows)))
    quantized = NVFP4Tensor.to_nvfp4(rows, GROUP, per_tensor_scale=scale)
    made = {"codes": quantized.qdata.view(torch.uint8), "scales": quantized.scale.view(torch.uint8)}
    if scale is not None:
        made["global_scale"] = scale.reshape(1)
    return {**made, "dequantized": quantized.dequantize(torch.float32)}


def quantize_compressed_tensors(rows: torch.Tensor, given: Given | None, computed: bool) -> Tensors:
    """Returns the global scale as llm-compressor's observers compute it, from amax in the input type."""
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    if computed:
        amax = torch.max(rows.max(), -rows.min())
        scale = generate_gparam(-amax.reshape(1), amax.reshape(1))
    else:
        scale = torch.tensor([given.divisor], dtype=torch.float32)
    block_scale, _ = compute_dynamic_scales_and_zp(rows, scheme.weights, module=None, global_scale=scale)
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    state = {"weight": rows, "weight_scale": block_scale, "weight_global_scale": scale}
    compressed = compressor.compress(state, scheme)
    return {
        "codes": compressed["weight_packed"],
        "scales": compressed["weight_scale"].view(torch.uint8),
        "global_scale": compressed["weight_global_scale"],
        "dequantized": compressor.decompress(compressed, scheme)["weight"],
    }


def quantize_modelopt(rows: torch.Tensor, given: Given | None, computed: bool) -> Tensors:
    given_scale = None if computed else torch.tensor(given.multiplier, dtype=torch.float32)
    quantized, block_scale, scale = NVFP4QTensor.quantize(rows, GROUP, weights_scaling_factor_2=given_scale)
    dequantized = quantized.dequantize(torch.float32, scale=block_scale, double_scale=scale, block_sizes={-1: GROUP})
    return {
        "codes": quantized._quantized_data,
        "scales": block_scale.view(torch.uint8),
        "global_scale": scale.reshape(1),
        "dequantized": dequantized,
    }


def quantize_te_formula(rows: torch.Tensor, given: Given | None, computed: bool) -> Tensors:
    widened = rows.to(torch.float32).numpy()
    with np.errstate(all="ignore"):
        scale = te_formula.encode_scale(widened) if computed else np.float32(given.divisor)
        codes, scales = te_formula.quantize(widened, scale)
    made = {"codes": codes, "scales": scales, "global_scale": np.array([scale], np.float32)}
    return {name: torch.from_numpy(array) for name, array in made.items()}


@dataclass(frozen=True)
class Nvfp4Library:
    """A library, its recorded function, and the rule that it follows."""

    stem: str
    library: str
    version: str
    function: str
    convention: str
    quantize: Callable[[torch.Tensor, Given | None, bool], Tensors]
    variants: tuple[str, ...]
    types: tuple[str, ...]


def released(package: str) -> dict[str, str]:
    name = package.removeprefix("nvidia-")
    return {"stem": f"{name}-{version(package)}", "library": package, "version": version(package)}


LIBRARIES = (
    Nvfp4Library(
        **released("torchao"),
        function="NVFP4Tensor.to_nvfp4 (nvfp4_quantize), per_tensor_amax_to_scale; NVFP4Tensor.dequantize to float32",
        convention="torchao",
        quantize=quantize_torchao,
        variants=("computed", "given", "none"),
        types=("f32", "bf16"),
    ),
    Nvfp4Library(
        **released("compressed-tensors"),
        function="generate_gparam, compute_dynamic_scales_and_zp (calculate_qparams), NVFP4PackedCompressor.compress "
        "and decompress, preset NVFP4A16",
        convention="compressed-tensors",
        quantize=quantize_compressed_tensors,
        variants=("computed", "given"),
        types=("f32", "bf16", "f16"),
    ),
    Nvfp4Library(
        **released("nvidia-modelopt"),
        function="NVFP4QTensor.quantize; NVFP4QTensor.dequantize to float32",
        convention="modelopt",
        quantize=quantize_modelopt,
        variants=("computed", "given"),
        types=("f32", "bf16", "f16"),
    ),
    Nvfp4Library(
        stem="transformer-engine-formula",
        library="te_formula.py, an emulation",
        version="core_nvfp4.cuh of 2026",
        function="te_formula.encode_scale, te_formula.quantize",
        convention="transformer-engine",
        quantize=quantize_te_formula,
        variants=("computed", "given"),
        types=("f32", "bf16", "f16"),
    ),
)


def library_file(library: Nvfp4Library, variant: str, type_name: str) -> File:
    """Returns tensors and metadata of one library's file."""
    computed = variant == "computed"
    cases = nvfp4_cases(variant, type_name)
    tensors: Tensors = {}
    for case in cases:
        rows = as_torch(case.rows)
        made = library.quantize(rows.clone(), case.given, computed)
        tensors[f"{case.name}.input"] = rows
        tensors |= {f"{case.name}.{name}": tensor.contiguous() for name, tensor in made.items()}
    names = [case.name for case in cases]
    findings = find_nvfp4(tensors, names, library.convention, type_name, computed)
    metadata = {
        "library": library.library,
        "version": library.version,
        "torch": torch.__version__.split("+")[0],
        "function": library.function,
        "convention": library.convention,
        "direction": "none" if variant == "none" else CONVENTIONS[library.convention].direction,
        "cases": json.dumps(names),
        **findings.metadata(),
    }
    return tensors, metadata


def fp8_inputs(dtype: np.dtype, bits_to_try: np.ndarray) -> np.ndarray:
    """Returns every bf16 number, and every 8-bit type's midpoint with its float32 neighbours."""
    with np.errstate(invalid="ignore"):
        values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    beyond = np.float32(2.0) * values[-1] - values[-2]  # the next number after the largest
    ladder = np.concatenate(([-beyond], values, [beyond]))
    midpoints = (ladder[1:] + ladder[:-1]) / np.float32(2.0)
    neighbours = [np.nextafter(midpoints, np.float32(-np.inf)), midpoints, np.nextafter(midpoints, np.float32(np.inf))]
    return np.concatenate((bits_to_try, np.stack(neighbours, axis=-1).ravel()))


def ml_dtypes_file() -> File:
    """Returns ml_dtypes' conversions from and to 8-bit floats."""
    patterns = np.arange(256, dtype=np.uint8)
    every_bf16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    tables = {}
    for name, dtype in (("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)):
        inputs = fp8_inputs(dtype, every_bf16)
        with np.errstate(all="ignore"):
            tables[f"{name}_to_f32"] = patterns.view(dtype).astype(np.float32)
            tables[f"{name}_from_f32_in"] = inputs
            tables[f"{name}_from_f32_out"] = inputs.astype(dtype).view(np.uint8)
    metadata = {
        "library": "ml_dtypes",
        "version": version("ml_dtypes"),
        "function": "astype between float32 and float8_e4m3fn, float8_e5m2",
    }
    return {name: torch.from_numpy(table) for name, table in tables.items()}, metadata


def nvfp4_files() -> dict[str, File]:
    """Returns every file's tensors and metadata, by file name."""
    files = {f"ml_dtypes-{version('ml_dtypes')}-tables.safetensors": ml_dtypes_file()}
    for library in LIBRARIES:
        for variant in library.variants:
            for type_name in library.types:
                files[f"{library.stem}-{variant}-{type_name}.safetensors"] = library_file(library, variant, type_name)
    return files
