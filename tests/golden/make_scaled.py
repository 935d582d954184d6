"""Makes scaled/: scaled 8-bit and 4-bit codes that libraries quantize, store and dequantize.

    python make_scaled.py           # rewrites the files
    python make_scaled.py --check   # fails if any file differs from new output

Each tensor X and its scales have the library's names. X.expected holds the library's values, in f32 or
in the dtype of the scales.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import quark.torch.kernel
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, maybe_pad_tensor_for_block_quant
from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor
from quark.torch.utils.numerics import to_e8m0_uint8
from quark.torch.utils.pack import Pack_fp4
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.utils.quantization_config import FineGrainedFP8Config

from golden_common import File, Tensors, matches

GOLDEN = Path(__file__).resolve().parent / "scaled"


def weights(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Returns weights with rows and columns of many magnitudes."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=random)
    rows = torch.randint(-6, 6, (shape[-2], 1), generator=random)
    columns = torch.randint(-6, 6, (shape[-1],), generator=random)
    return values * 2.0 ** (rows + columns).float() * 0.02


def with_every_code(codes: torch.Tensor) -> torch.Tensor:
    """Returns weights with all 256 bytes, including NaN, in the first row."""
    codes.reshape(-1).view(torch.uint8)[:256] = torch.arange(256, dtype=torch.uint8)
    return codes


def transformers_fp8() -> File:
    """Blocks of 128x128 with `_scale_inv`, as published for DeepSeek-V3 and Qwen3."""

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
    # DeepSeek-V4's names, which transformers maps to the others on loading.
    for end in ("weight", "weight.expected"):
        tensors[f"v4.{end}"] = tensors[f"powers.{end}"].clone()
    tensors["v4.scale"] = tensors["powers.weight_scale_inv"].clone()
    metadata = {"library": "transformers", "version": version("transformers"), "function": "Fp8Dequantize"}
    return tensors, metadata


def compressed_tensors() -> File:
    """One scale per tensor, row, group of a row, or 128x128 block of a matrix with partial blocks."""
    tensors: Tensors = {}

    def add(name: str, weight: torch.Tensor, dtype: torch.dtype, **args: object) -> None:
        weights = QuantizationArgs(num_bits=8, symmetric=True, dynamic=False, **args)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        if weights.strategy == "block":
            padded = maybe_pad_tensor_for_block_quant(weight, (128, 128))
            parts = padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
            low, high = parts.amin(dim=(1, 3)), parts.amax(dim=(1, 3))
        elif weights.strategy == "group":
            low, high = weight.unflatten(1, (-1, weights.group_size)).aminmax(dim=2)
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
    add("group", weights((48, 384), 15), torch.float32, strategy="group", group_size=128, **float8)
    add("int8_group", weights((64, 160), 16), torch.float32, strategy="group", group_size=32, **int8)
    add("int8_group_bf16", weights((32, 128), 17), torch.bfloat16, strategy="group", group_size=64, **int8)
    return tensors, {"library": "compressed-tensors", "version": version("compressed-tensors"), "function": "decompress"}


def modelopt_fp8() -> File:
    """One scale per tensor, without dimensions."""
    weight = weights((64, 96), 11)
    scale = weight.abs().amax() / 448
    codes = FP8QTensor.quantize(weight, scale)[0]._quantized_data
    with_every_code(codes)
    expected = FP8QTensor(weight.shape, torch.float32, codes).dequantize(dtype=torch.float32, scale=scale)
    tensors = {"fc.weight": codes, "fc.weight_scale": scale, "fc.weight.expected": expected}
    tensors["fc.input_scale"] = torch.tensor(0.25)
    return tensors, {"library": "modelopt", "version": version("nvidia-modelopt"), "function": "FP8QTensor.dequantize"}


def modelopt_blocks() -> File:
    """Exports with a scale per block: MXFP8, MXFP4, FP8_PB_WO, and NVFP4 in blocks of 32 (W4A8_NVFP4_FP8)."""
    weight, tensors = weights((64, 128), 18), {}
    codes = with_every_code(MXFP8QTensor.quantize(weight)[0]._quantized_data)
    scales = torch.randint(90, 140, (64, 4), generator=torch.Generator().manual_seed(19), dtype=torch.uint8)
    expected = MXFP8QTensor(weight.shape, torch.float32, codes).dequantize(dtype=torch.float32, scale=scales)
    tensors |= {"mxfp8.weight": codes, "mxfp8.weight_scale": scales, "mxfp8.weight.expected": expected}
    codes, scales = four_bits(64, 128, 20)
    # The library treats scale 255 as infinity.
    scales = scales.clamp(max=254)
    expected = MXFP4QTensor(weight.shape, torch.float32, codes).dequantize(
        dtype=torch.float32, scale=scales, block_sizes={-1: 32}
    )
    tensors |= {"mxfp4.weight": codes, "mxfp4.weight_scale": scales, "mxfp4.weight.expected": expected}
    weight = weights((256, 256), 21)
    scales = weight.reshape(2, 128, 2, 128).abs().amax(dim=(1, 3)) / 448
    codes = FP8QTensor.quantize(weight, scales, block_sizes={-1: 128, -2: 128})[0]._quantized_data
    with_every_code(codes)
    expected = FP8QTensor(weight.shape, torch.float32, codes).dequantize(
        dtype=torch.float32, scale=scales, block_sizes={-1: 128, -2: 128}
    )
    tensors |= {"pb_wo.weight": codes, "pb_wo.weight_scale": scales.reshape(2, 1, 2, 1), "pb_wo.weight.expected": expected}
    weight = weights((64, 128), 22)
    quantized, scales, global_scale = NVFP4QTensor.quantize(weight, 32)
    codes = without_minus_zero(quantized._quantized_data)
    expected = NVFP4QTensor(weight.shape, torch.float32, codes).dequantize(
        dtype=torch.float32, scale=scales, double_scale=global_scale, block_sizes={-1: 32}, fast=False
    )
    tensors |= {"w4a8.weight": codes, "w4a8.weight_scale": scales, "w4a8.weight_scale_2": global_scale}
    tensors |= {"w4a8.weight.expected": expected, "w4a8.input_scale": torch.tensor(0.25)}
    functions = "MXFP8QTensor, MXFP4QTensor, FP8QTensor, NVFP4QTensor"
    return tensors, {"library": "modelopt", "version": version("nvidia-modelopt"), "function": functions}


def without_minus_zero(codes: torch.Tensor) -> torch.Tensor:
    """Replaces code 8 by 0. ModelOpt reads it as +0."""
    low, high = codes & 15, codes >> 4
    return torch.where(low == 8, 0, low) | torch.where(high == 8, 0, high) << 4


def four_bits(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 codes, two per byte, and E8M0 scales per 32 elements of a row: all numbers, and NaN."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=random, dtype=torch.uint8)
    scales = torch.randint(90, 140, (rows * columns // 32,), generator=random, dtype=torch.uint8)
    scales[:256] = torch.arange(256, dtype=torch.uint8)
    return codes, scales.reshape(rows, columns // 32)


def transformers_fp4() -> File:
    """DeepSeek-V4's experts, and one of its FP8 layers."""
    dequantizer = Fp8Dequantize(SimpleNamespace(quantization_config=FineGrainedFP8Config(scale_fmt="ue8m0")))
    codes, scales = four_bits(96, 128, 12)
    codes, scales = codes.view(torch.int8), scales.view(torch.float8_e8m0fnu)
    expert = "layers.3.ffn.experts.7.w1"
    tensors = {f"{expert}.weight": codes, f"{expert}.scale": scales}
    tensors[f"{expert}.weight.expected"] = dequantizer._dequantize_one(codes, scales, output_dtype=torch.float32)
    layer = "layers.3.attn.wq_a"
    quantized = Fp8Quantize(dequantizer.hf_quantizer).convert({"weight": weights((128, 256), 13)})
    codes, scales = quantized.values()
    scales = scales.to(torch.float8_e8m0fnu)
    tensors |= {f"{layer}.weight": with_every_code(codes), f"{layer}.scale": scales}
    tensors[f"{layer}.weight.expected"] = dequantizer._dequantize_one(codes, scales, output_dtype=torch.float32)
    return tensors, {"library": "transformers", "version": version("transformers"), "function": "Fp8Dequantize"}


def compressed_tensors_mxfp4() -> File:
    """Kimi-K3's experts."""
    codes, scales = four_bits(96, 128, 14)
    # The library treats scale 255 as infinity.
    scales[scales == 255] = 127
    stored = {"weight_packed": codes, "weight_scale": scales}
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8),
    )
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    layer = "model.layers.1.block_sparse_moe.experts.3.w2"
    tensors = {f"{layer}.{name}": tensor for name, tensor in stored.items()} | {f"{layer}.weight.expected": expected}
    return tensors, {"library": "compressed-tensors", "version": version("compressed-tensors"), "function": "decompress"}


def quark_mxfp4() -> File:
    """Values and scales that Quark packs and unpacks."""
    codes, _ = four_bits(64, 128, 15)
    packer = Pack_fp4("per_group", "fp4")
    elements = packer.unpack(codes, reorder=False)
    random = torch.Generator().manual_seed(16)
    scales = 2.0 ** torch.randint(-60, 60, (64, 4), generator=random).float()
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    tensors = {name: packer.pack(elements, reorder=False), f"{name}_scale": to_e8m0_uint8(scales)}
    tensors[f"{name}.expected"] = elements * scales.repeat_interleave(32, dim=1)
    return tensors, {"library": "amd-quark", "version": version("amd-quark"), "function": "Pack_fp4, to_e8m0_uint8"}


def quark_nvfp4() -> File:
    """Codes that Quark packs, under scales of two stages; the scale of the inputs has only the second."""
    codes, _ = four_bits(64, 128, 23)
    elements = Pack_fp4("per_group", "fp4").unpack(codes, reorder=False)
    scales = weights((64, 8), 24).abs().clamp(min=2**-9).to(torch.float8_e4m3fn)
    global_scale = torch.tensor(8.5e-5)
    stages = {"weight_scale": scales, "weight_scale_2": global_scale, "input_scale_2": torch.tensor(1.7e-3)}
    layer = "model.layers.1.mlp.experts.3.down_proj"
    tensors = {f"{layer}.weight": codes} | {f"{layer}.{name}": tensor for name, tensor in stages.items()}
    of_scales = ("fp8_e4m3", scales.float(), global_scale, torch.tensor(0.0), None, None, "per_tensor")
    scales = quark.torch.kernel.dequantize(*of_scales)
    of_codes = ("fp4", elements, scales, torch.tensor(0.0), -1, 16, "per_group")
    tensors[f"{layer}.weight.expected"] = quark.torch.kernel.dequantize(*of_codes)
    return tensors, {"library": "amd-quark", "version": version("amd-quark"), "function": "Pack_fp4, dequantize"}


def files() -> dict[str, File]:
    return {
        f"transformers-{version('transformers')}-fp4.safetensors": transformers_fp4(),
        f"compressed-tensors-{version('compressed-tensors')}-mxfp4.safetensors": compressed_tensors_mxfp4(),
        f"amd-quark-{version('amd-quark')}-mxfp4.safetensors": quark_mxfp4(),
        f"amd-quark-{version('amd-quark')}-nvfp4.safetensors": quark_nvfp4(),
        f"transformers-{version('transformers')}-fp8.safetensors": transformers_fp8(),
        f"compressed-tensors-{version('compressed-tensors')}-8-bits.safetensors": compressed_tensors(),
        f"modelopt-{version('nvidia-modelopt')}-fp8.safetensors": modelopt_fp8(),
        f"modelopt-{version('nvidia-modelopt')}-blocks.safetensors": modelopt_blocks(),
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
