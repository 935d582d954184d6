"""Makes scaled/: codes of eight bits under scales, as libraries quantize, store and dequantize them.

    python make_scaled.py           # rewrites the files
    python make_scaled.py --check   # fails if any file differs from what the libraries give now

Each tensor X and its scales lie in a file under the library's names; X.expected is what the library makes of them, in f32 or in the dtype of its scales.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, maybe_pad_tensor_for_block_quant
from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor
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
    # DeepSeek-V4's names, which transformers maps to the others as it loads them.
    for end in ("weight", "weight.expected"):
        tensors[f"v4.{end}"] = tensors[f"powers.{end}"].clone()
    tensors["v4.scale"] = tensors["powers.weight_scale_inv"].clone()
    metadata = {"library": "transformers", "version": version("transformers"), "function": "Fp8Dequantize"}
    return tensors, metadata


def compressed_tensors() -> File:
    """One scale for a tensor, for each row, or for each 128x128 of a matrix that is not whole blocks."""
    tensors: Tensors = {}

    def add(name: str, weight: torch.Tensor, dtype: torch.dtype, **args: object) -> None:
        weights = QuantizationArgs(num_bits=8, symmetric=True, dynamic=False, **args)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        if weights.strategy == "block":
            padded = maybe_pad_tensor_for_block_quant(weight, (128, 128))
            parts = padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
            low, high = parts.amin(dim=(1, 3)), parts.amax(dim=(1, 3))
        else:
            low, high = weight.aminmax(dim=1, keepdim=True) if weights.strategy == "channel" else weight.aminmax()
        scale, _ = calculate_qparams(low, high, weights)
        compressor = BaseCompressor.get_value_from_registry(f"{weights.type}-quantized")
        stored = compressor.compress({"weight": weight, "weight_scale": scale.to(dtype)}, scheme)
        with_every_code(stored["weight"])
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = stored["weight"], stored["weight_scale"]
        tensors[f"{name}.weight.expected"] = compressor.decompress(stored, scheme)["weight"]

    float8, int8 = {"type": "float"}, {"type": "int"}
    add("channel", weights((96, 160), 5), torch.float32, strategy="channel", **float8)
    add("channel_bf16", weights((96, 160), 6), torch.bfloat16, strategy="channel", **float8)
    add("tensor", weights((32, 96), 7), torch.float32, strategy="tensor", **float8)
    add("int8", weights((64, 160), 8), torch.float32, strategy="channel", **int8)
    add("int8_bf16", weights((64, 160), 9), torch.bfloat16, strategy="channel", **int8)
    add("block", weights((200, 300), 10), torch.float32, strategy="block", block_structure=[128, 128], **float8)
    return tensors, {"library": "compressed-tensors", "version": version("compressed-tensors"), "function": "decompress"}


def modelopt_fp8() -> File:
    """One scale for a tensor, without dimensions."""
    weight = weights((64, 96), 11)
    scale = weight.abs().amax() / 448
    codes = FP8QTensor.quantize(weight, scale)[0]._quantized_data
    with_every_code(codes)
    expected = FP8QTensor(weight.shape, torch.float32, codes).dequantize(dtype=torch.float32, scale=scale)
    tensors = {"fc.weight": codes, "fc.weight_scale": scale, "fc.weight.expected": expected}
    tensors["fc.input_scale"] = torch.tensor(0.25)
    return tensors, {"library": "modelopt", "version": version("nvidia-modelopt"), "function": "FP8QTensor.dequantize"}


def files() -> dict[str, File]:
    return {
        f"transformers-{version('transformers')}-fp8.safetensors": transformers_fp8(),
        f"compressed-tensors-{version('compressed-tensors')}-8-bits.safetensors": compressed_tensors(),
        f"modelopt-{version('nvidia-modelopt')}-fp8.safetensors": modelopt_fp8(),
    }


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
