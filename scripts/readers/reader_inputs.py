"""Small random models with FP8, INT8 or MXFP4 weights of other libraries, for readers.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.utils.quantization_config import FineGrainedFP8Config

Tensors = dict[str, torch.Tensor]


def tiny(directory: Path, described: dict[str, object] | None, quantize: Callable[[str, torch.Tensor], Tensors]) -> Path:
    """Writes a random Llama. `quantize` returns the stored tensors of each linear layer.

    `described` becomes the config's `quantization_config`.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    stored: Tensors = {}
    for name, weight in LlamaForCausalLM(config).to(torch.bfloat16).state_dict().items():
        stored |= quantize(name, weight) if "proj" in name else {name: weight}
    directory.mkdir()
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    described = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": described}
    (directory / "config.json").write_text(json.dumps(described))
    return directory


def tiny_plain(directory: Path, *, pickled: bool = False) -> Path:
    """Writes an unquantized Llama in bf16: in safetensors, or as PyTorch's `.bin`."""
    tiny(directory, None, lambda name, weight: {name: weight})
    if pickled:
        file = directory / "model.safetensors"
        torch.save(load_file(file), directory / "pytorch_model.bin")
        file.unlink()
    return directory


def deepseek_v4(directory: Path) -> tuple[Path, Tensors]:
    """Writes MXFP4 experts and a block FP8 layer under DeepSeek-V4's names.

    Returns the path and the values that transformers dequantizes in f32.
    """
    config = FineGrainedFP8Config(scale_fmt="ue8m0")
    quantizer = SimpleNamespace(quantization_config=config)
    loader = Fp8Dequantize(quantizer)
    random = torch.Generator().manual_seed(1)
    stored: Tensors = {"head.weight": torch.randn(64, 256, generator=random).to(torch.bfloat16)}
    expected: Tensors = {}
    for layer in ("layers.0.ffn.experts.0.w1", "layers.0.ffn.experts.1.w1"):
        codes = torch.randint(-128, 128, (128, 128), generator=random, dtype=torch.int8)
        scales = torch.randint(115, 122, (128, 8), generator=random, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        stored |= {f"{layer}.weight": codes, f"{layer}.scale": scales}
        expected[f"{layer}.weight"] = loader._dequantize_one(codes, scales, output_dtype=torch.float32)
    layer, weight = "layers.0.attn.wq_a", torch.randn(256, 256, generator=random)
    codes, scales = Fp8Quantize(quantizer).convert({"weight": weight}).values()
    stored |= {f"{layer}.weight": codes, f"{layer}.scale": scales}
    expected[f"{layer}.weight"] = loader._dequantize_one(codes, scales, output_dtype=torch.float32)
    directory.mkdir()
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    described = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", "quantization_config": described}))
    return directory, expected


def tiny_fp8(directory: Path) -> Path:
    """Writes FP8 weights with a scale per 128x128 block, the format of DeepSeek-V3 and Qwen3."""
    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config())
    described = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    return tiny(directory, described, lambda name, weight: Fp8Quantize(quantizer).convert({name: weight}))


def tiny_compressed(directory: Path, kind: str, group: int | None = None) -> Path:
    """Writes compressed-tensors' FP8 or INT8 weights, with scales per row or `group` columns."""
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=8, type=kind, symmetric=True, dynamic=False, **strategy)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(f"{kind}-quantized")

    def quantize(name: str, weight: torch.Tensor) -> Tensors:
        ends = weight.unflatten(1, (-1, group)).aminmax(dim=2) if group else weight.aminmax(dim=1, keepdim=True)
        scale, _ = calculate_qparams(*ends, weights)
        made = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        return {name.removesuffix("weight") + part: tensor for part, tensor in made.items()}

    groups = {"targets": ["Linear"], "weights": weights.model_dump(mode="json"), "input_activations": None}
    described = {"quant_method": "compressed-tensors", "format": f"{kind}-quantized", "quantization_status": "compressed"}
    return tiny(directory, described | {"config_groups": {"group_0": groups}, "ignore": ["lm_head"]}, quantize)
