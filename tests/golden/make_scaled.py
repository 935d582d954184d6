"""Makes scaled/: codes of eight bits under scales, as libraries quantize, store and dequantize them.

    python make_scaled.py           # rewrites the files
    python make_scaled.py --check   # fails if any file differs from what the libraries give now

Each tensor X and its scales lie in a file under the library's names; X.expected is what the library makes of them in f32.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.utils.quantization_config import FineGrainedFP8Config

from golden_common import File, Tensors, matches

GOLDEN = Path(__file__).resolve().parent / "scaled"


def weights(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Weights whose rows and columns have many magnitudes."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=random)
    rows = torch.randint(-6, 6, (shape[-2], 1), generator=random)
    columns = torch.randint(-6, 6, (shape[-1],), generator=random)
    return values * 2.0 ** (rows + columns).float() * 0.02


def with_every_code(codes: torch.Tensor) -> torch.Tensor:
    """The same, with all 256 bytes in the first row, NaN among them."""
    codes.reshape(-1).view(torch.uint8)[:256] = torch.arange(256, dtype=torch.uint8)
    return codes


def transformers_fp8() -> File:
    """Blocks of 128x128 under `_scale_inv`, as DeepSeek-V3 and Qwen3 are published."""

    def quantized(name: str, weight: torch.Tensor, scale_fmt: str = "float", dtype: torch.dtype | None = None) -> Tensors:
        quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config(scale_fmt=scale_fmt))
        codes, scales = Fp8Quantize(quantizer).convert({name: weight}).values()
        codes, scales = with_every_code(codes), scales.to(dtype or scales.dtype)
        expected = Fp8Dequantize(quantizer)._dequantize_one(codes, scales, output_dtype=torch.float32)
        return {name: codes, f"{name}_scale_inv": scales, f"{name}.expected": expected}

    tensors = quantized("f32.weight", weights((128, 256), 1))
    tensors |= quantized("bf16.weight", weights((128, 128), 2), dtype=torch.bfloat16)
    tensors |= quantized("powers.weight", weights((256, 128), 3), scale_fmt="ue8m0")
    tensors |= quantized("experts.gate_up_proj", weights((2, 128, 128), 4))
    metadata = {"library": "transformers", "version": version("transformers"), "function": "Fp8Dequantize"}
    return tensors, metadata


def files() -> dict[str, File]:
    return {f"transformers-{version('transformers')}-fp8.safetensors": transformers_fp8()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check, wrong = parser.parse_args().check, 0
    GOLDEN.mkdir(exist_ok=True)
    for name, (tensors, metadata) in files().items():
        path = GOLDEN / name
        same = matches(path, tensors, metadata)
        if not check and not same:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
        wrong += check and not same
        print(f"{'same   ' if same else 'differs' if check else 'written'}  {name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
