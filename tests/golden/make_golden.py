"""Makes the golden vectors: libraries quantize the rows of inputs.py, and files record their bytes.

    python make_golden.py           # rewrites mxfp4/, mxfp8/, nvfp4/ and layout/
    python make_golden.py --check   # fails if any file differs from new output

README.md describes the files. Nothing here computes a scale or a code, except te_formula.py. The
check_*.py compute them to list the differences.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from collections.abc import Callable

import gguf
import ml_dtypes
import numpy as np
import qwantize
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
from safetensors.torch import save
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from check_spec import Convention, find_slips
from golden_common import File, Tensors, as_torch, matches
from golden_layout import layout_files
from golden_mxfp8 import mxfp8_files
from golden_nvfp4 import nvfp4_files
from inputs import BLOCK, E2M1_VALUES, golden_input

GOLDEN = Path(__file__).resolve().parent


def quantize_torchao(rows: torch.Tensor, rule: str) -> Tensors:
    scales, codes = to_mx(rows, torch.float4_e2m1fn_x2, BLOCK, ScaleCalculationMode[rule.upper()])
    return {"codes": codes.view(torch.uint8), "scales": scales.view(torch.uint8)}


def quantize_compressed_tensors(rows: torch.Tensor, rule: str) -> Tensors:
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    scale, _ = compute_dynamic_scales_and_zp(rows, scheme.weights, module=None)
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    compressed = compressor.compress({"weight": rows, "weight_scale": scale}, scheme)
    return {"codes": compressed["weight_packed"], "scales": compressed["weight_scale"]}


def quantize_modelopt(rows: torch.Tensor, rule: str) -> Tensors:
    quantized, scales = MXFP4QTensor.quantize(rows, BLOCK)
    return {"codes": quantized._quantized_data, "scales": scales.reshape(len(rows), -1)}


def quantize_gguf(rows: torch.Tensor, rule: str) -> Tensors:
    """Returns GGUF's 17-byte blocks, and the same codes in the order of the other files."""
    with np.errstate(over="ignore", invalid="ignore"):
        blocks = gguf.quants.quantize(rows.numpy(), gguf.GGMLQuantizationType.MXFP4)
    parts = blocks.reshape(len(rows), -1, 1 + BLOCK // 2)
    halves = parts[:, :, 1:]
    codes = np.concatenate((halves & 0x0F, halves >> 4), axis=-1).reshape(len(rows), -1)
    return {
        "codes": torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4),
        "scales": torch.from_numpy(parts[:, :, 0].copy()),
        "gguf_blocks": torch.from_numpy(blocks),
    }


def codes_of_values(values: torch.Tensor) -> torch.Tensor:
    """Returns packed codes of E2M1 values, with -0 as code 8. NaN has no code and becomes 7."""
    magnitudes = torch.searchsorted(torch.tensor(E2M1_VALUES), values.abs().contiguous()).clamp(max=7)
    codes = (magnitudes | torch.signbit(values).to(torch.int64) << 3).to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def quantize_qwantize(rows: torch.Tensor, rule: str) -> Tensors:
    """Converts scales and signed E2M1 values from floats. A byte is its scale's exponent field."""
    scales, values = qwantize.mxfp4_naive(rows.reshape(len(rows), -1, BLOCK))
    octets = (scales.view(torch.int32) >> 23).to(torch.uint8)
    return {"codes": codes_of_values(values.reshape(len(rows), -1)), "scales": octets}


def quantize_microxcaling(rows: torch.Tensor, rule: str) -> Tensors:
    """Converts dequantized numbers. Dividing by the scale, a power of two, restores E2M1 values."""
    from mx.formats import ElemFormat
    from mx.mx_ops import _quantize_mx, _shared_exponents

    element = ElemFormat.fp4
    numbers = _quantize_mx(rows.clone(), 8, element, axes=[-1], block_size=BLOCK, round="nearest")
    blocks = rows.reshape(len(rows), -1, BLOCK)
    exponents = (_shared_exponents(blocks, axes=[-1]).squeeze(-1) - 2).clamp(min=-127)
    values = numbers.to(torch.float64).reshape(blocks.shape) / torch.exp2(exponents.to(torch.float64)).unsqueeze(-1)
    octets = torch.nan_to_num(exponents + 127, nan=255.0, posinf=255.0).to(torch.uint8)
    return {"codes": codes_of_values(values.to(torch.float32).reshape(len(rows), -1)), "scales": octets}


@dataclass(frozen=True)
class Library:
    """A library, its recorded function, and the nearest rule."""

    package: str
    function: str
    quantize: Callable[[torch.Tensor, str], Tensors]
    rules: tuple[str, ...]
    types: tuple[str, ...]
    ties: str = "even"
    zero_sign: str = "keep"
    fixed_version: str | None = None

    @property
    def version(self) -> str:
        return self.fixed_version or version(self.package)

    @property
    def file_stem(self) -> str:
        return f"{self.package.removeprefix('nvidia-')}-{self.version}"


LIBRARIES = (
    Library(
        "torchao",
        "torchao.prototype.mx_formats.mx_tensor.to_mx",
        quantize_torchao,
        ("floor", "ceil", "even", "rceil"),
        ("f32", "bf16"),
    ),
    Library(
        "compressed-tensors",
        "compute_dynamic_scales_and_zp, then MXFP4PackedCompressor.compress, preset MXFP4A16",
        quantize_compressed_tensors,
        ("even",),
        ("f32", "bf16", "f16"),
        zero_sign="keep-unless-exact",
    ),
    Library(
        "nvidia-modelopt",
        "modelopt.torch.quantization.qtensor.mxfp4_tensor.MXFP4QTensor.quantize",
        quantize_modelopt,
        ("rceil",),
        ("f32", "bf16", "f16"),
        ties="toward-zero",
        zero_sign="negative-if-exact",
    ),
    Library(
        "gguf",
        "gguf.quants.quantize, type MXFP4; codes reordered from its half-split nibbles, raw blocks in gguf_blocks",
        quantize_gguf,
        ("floor",),
        ("f32",),
        ties="toward-zero",
        zero_sign="drop",
    ),
    Library(
        "qwantize",
        "qwantize.mxfp4_naive; codes from its signed values, bytes from its float32 scales",
        quantize_qwantize,
        ("floor",),
        ("f32", "bf16"),
        ties="toward-zero",
        zero_sign="keep-unless-exact",
    ),
)

# Not on PyPI: needs a checkout of github.com/microsoft/microxcaling at this commit on PYTHONPATH.
MICROXCALING = Library(
    "microxcaling",
    "mx.mx_ops._quantize_mx, element fp4, block 32, round='nearest'; bytes from mx.mx_ops._shared_exponents",
    quantize_microxcaling,
    ("floor",),
    ("f32",),
    ties="away",
    zero_sign="keep-unless-exact",
    fixed_version="7bc4195",
)


def library_file(library: Library, rule: str, type_name: str) -> File:
    """Returns tensors and metadata of one library's file."""
    golden = golden_input(type_name)
    rows = as_torch(golden.rows)
    made = {name: tensor.contiguous() for name, tensor in library.quantize(rows.clone(), rule).items()}
    convention = Convention(rule, library.ties, library.zero_sign)
    slips, nonfinite = find_slips(golden.rows, made["codes"].numpy(), made["scales"].numpy(), convention)
    metadata = {
        "library": library.package,
        "version": library.version,
        "torch": torch.__version__.split("+")[0],
        "function": library.function,
        "rule": rule,
        "ties": library.ties,
        "zero_sign": library.zero_sign,
        "groups": json.dumps(golden.groups),
        "slips": json.dumps([[slip.row, slip.block] for slip in slips]),
        "nonfinite": json.dumps(nonfinite),
    }
    return {"input": rows, **made}, metadata


def ml_dtypes_file() -> File:
    """Returns ml_dtypes' conversions of every 16-bit float, E2M1 code and E8M0 byte."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        codes = {
            name: patterns.view(dtype).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0x0F
            for name, dtype in (("e2m1_from_bf16", ml_dtypes.bfloat16), ("e2m1_from_f16", np.float16))
        }
    nibbles = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    octets = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    tables = {**codes, "e2m1_to_f32": nibbles.astype(np.float32), "e8m0_to_f32": octets.astype(np.float32)}
    metadata = {
        "library": "ml_dtypes",
        "version": version("ml_dtypes"),
        "function": "astype between bfloat16, float16, float32 and float4_e2m1fn, float8_e8m0fnu",
    }
    return {name: torch.from_numpy(table) for name, table in tables.items()}, metadata


def mxfp4_files() -> dict[str, File]:
    """Returns every MXFP4 file's tensors and metadata, by file name."""
    files = {f"ml_dtypes-{version('ml_dtypes')}-tables.safetensors": ml_dtypes_file()}
    microxcaling = (MICROXCALING,) if find_spec("mx") else ()
    for library in LIBRARIES + microxcaling:
        for rule in library.rules:
            for type_name in library.types:
                name = f"{library.file_stem}-{rule}-{type_name}.safetensors"
                files[name] = library_file(library, rule, type_name)
    return files


FOLDERS = {"mxfp4": mxfp4_files, "mxfp8": mxfp8_files, "nvfp4": nvfp4_files, "layout": layout_files}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the files, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stale = []
    for folder, make_files in FOLDERS.items():
        files = make_files()
        vectors = GOLDEN / folder
        changed = [name for name, made in files.items() if not matches(vectors / name, *made)]
        if arguments.check:
            unknown = {path.name for path in vectors.glob("*.safetensors")} - set(files)
            for name in [name for name in unknown if name.startswith("microxcaling-")]:
                print(f"not checked, no module mx: {folder}/{name}", file=sys.stderr)
                unknown.remove(name)
            changed += sorted(unknown)
            stale += [f"{folder}/{name}" for name in changed]
        else:
            vectors.mkdir(exist_ok=True)
            for name in changed:
                (vectors / name).write_bytes(save(*files[name]))
    for name in stale:
        print(f"differs: {name}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
