"""Compares a dequantized checkpoint with compressed-tensors' own decompression, bit for bit.

    python loader_view.py QUANTIZED DEQUANTIZED

QUANTIZED has config.json with a quantization_config of format nvfp4-pack-quantized,
mxfp4-pack-quantized or mxfp8-quantized. Its safetensors files have X.weight_packed (X.weight for
MXFP8), X.weight_scale and, for NVFP4, X.weight_global_scale. DEQUANTIZED has safetensors files with
X.weight. Prints one line per tensor, and exits with 1 if any differs or is missing.

A BF16 weight must equal the library's `decompress`, which always computes that type. For F32 and F16
the library has no decompressor. Such a weight must equal its `dequantize` in float32, rounded once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors import safe_open

FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")
PARTS = ("weight_packed", "weight", "weight_scale", "weight_global_scale")


class Checkpoint:
    """The tensors of all safetensors files of a directory, read on demand."""

    def __init__(self, directory: Path) -> None:
        self.files = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self.files |= dict.fromkeys(file.keys(), path)
        if not self.files:
            raise SystemExit(f"{directory}: no tensors")

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name)

    def quantized_modules(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Returns each X with an X.weight_scale, and its parts by local name."""
        for name in sorted(self.files):
            module, _, part = name.rpartition(".")
            if part == "weight_scale":
                yield module, {part: self[f"{module}.{part}"] for part in PARTS if f"{module}.{part}" in self.files}


def scheme_of(directory: Path) -> QuantizationScheme:
    """Returns the only scheme of a checkpoint, as compressed-tensors parses it."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    groups = list(QuantizationConfig.model_validate(config).config_groups.values())
    scheme = groups[0]
    format_name = getattr(scheme.format, "value", scheme.format) or config["format"]
    if len(groups) != 1 or format_name not in FORMATS:
        raise SystemExit(f"{directory}: want one group, of one of the formats {', '.join(FORMATS)}")
    scheme.format = format_name
    return scheme


def dequantize_f32(parts: dict[str, torch.Tensor], scheme: QuantizationScheme) -> torch.Tensor:
    """Runs the library's `dequantize` with codes and scales as float32."""
    if "weight_packed" in parts:
        packed = parts["weight_packed"]
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, dtype=torch.float32)
    else:
        codes = parts["weight"].to(torch.float32)
    scale = parts["weight_scale"]
    scale = (decompress_mx_scale(scale) if scale.dtype == torch.uint8 else scale).to(torch.float32)
    global_scale = parts.get("weight_global_scale")
    return dequantize(codes, scale, args=scheme.weights, dtype=torch.float32, global_scale=global_scale)


def library_weight(parts: dict[str, torch.Tensor], scheme: QuantizationScheme, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bfloat16:
        return BaseCompressor.get_value_from_registry(scheme.format).decompress(parts, scheme)["weight"]
    return dequantize_f32(parts, scheme).to(dtype)


def differing(ours: torch.Tensor, library: torch.Tensor) -> int:
    """Returns the number of elements with different bits. All NaN are equal."""
    bits = {2: torch.int16, 4: torch.int32}[ours.element_size()]
    same = (ours.contiguous().view(bits) == library.contiguous().view(bits)) | (ours.isnan() & library.isnan())
    return int((~same).sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quantized", type=Path)
    parser.add_argument("dequantized", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scheme = scheme_of(arguments.quantized)
    dequantized = Checkpoint(arguments.dequantized)
    print(f"{'tensor':60} {'type':10} {'shape':16} {'elements':>10} {'differ':>8}")
    good, count = True, 0
    for module, parts in Checkpoint(arguments.quantized).quantized_modules():
        name = f"{module}.weight"
        if name not in dequantized.files:
            print(f"{name:60} missing")
            good = False
            continue
        ours = dequantized[name]
        library = library_weight(parts, scheme, ours.dtype)
        shape = "x".join(map(str, ours.shape))
        difference = str(differing(ours, library)) if ours.shape == library.shape else "shape"
        print(f"{name:60} {str(ours.dtype)[6:]:10} {shape:16} {ours.numel():10} {difference:>8}")
        good &= difference == "0"
        count += 1
    print(f"{count} tensors, {scheme.format}: {'all the same' if good and count else 'NOT the same'}")
    return 0 if good and count else 1


if __name__ == "__main__":
    sys.exit(main())
