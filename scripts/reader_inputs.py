"""Small random models whose weights other libraries have made codes of eight bits. readers.py quantizes and reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.utils.quantization_config import FineGrainedFP8Config

Tensors = dict[str, torch.Tensor]


def tiny(directory: Path, described: dict[str, object], quantize: Callable[[str, torch.Tensor], Tensors]) -> Path:
    """A random Llama whose linear layers are what a function makes of them; its config's entry is given."""
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


def tiny_fp8(directory: Path) -> Path:
    """FP8 under a scale for each block of 128x128, as DeepSeek-V3 and Qwen3 are published."""
    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config())
    described = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    return tiny(directory, described, lambda name, weight: Fp8Quantize(quantizer).convert({name: weight}))


def tiny_compressed(directory: Path, kind: str) -> Path:
    """compressed-tensors' codes of eight bits of a kind, with a scale for each row."""
    weights = QuantizationArgs(num_bits=8, type=kind, strategy="channel", symmetric=True, dynamic=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(f"{kind}-quantized")

    def quantize(name: str, weight: torch.Tensor) -> Tensors:
        scale, _ = calculate_qparams(*weight.aminmax(dim=1, keepdim=True), weights)
        made = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        return {name.removesuffix("weight") + part: tensor for part, tensor in made.items()}

    group = {"targets": ["Linear"], "weights": weights.model_dump(mode="json"), "input_activations": None}
    described = {"quant_method": "compressed-tensors", "format": f"{kind}-quantized", "quantization_status": "compressed"}
    return tiny(directory, described | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}, quantize)
