"""Writes tiny-llama/: a two-shard bf16 checkpoint in the layout of Hugging Face's Llama, with weights that look trained.

The weights are random and the model says nothing sensible; their distributions are what matters to a quantizer. A linear
weight is Student-t noise with a standard deviation of 1/sqrt(fan-in), multiplied by a log-normal factor per output channel,
and `down_proj` has a few input channels that are many times larger, as in trained models. Norm weights lie near 1.

    python make_tiny_llama.py [folder]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

SEED = 7
SHARDS = 2

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 352,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 1024,
}

GENERATION_CONFIG = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2}

TOKENIZER_CONFIG = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "model_max_length": CONFIG["max_position_embeddings"],
    "tokenizer_class": "LlamaTokenizer",
    "unk_token": "<unk>",
}

OUTLIER_CHANNELS = 3


def heavy_tailed(rng: np.random.Generator, shape: tuple[int, int], std: float) -> np.ndarray:
    """Student-t noise with five degrees of freedom, scaled to `std`."""
    degrees = 5.0
    return rng.standard_t(degrees, shape) * std / np.sqrt(degrees / (degrees - 2.0))


def linear(rng: np.random.Generator, outputs: int, inputs: int, gain: float = 1.0) -> np.ndarray:
    """A weight [outputs, inputs] whose output channels differ in scale."""
    channel = rng.lognormal(-0.08, 0.4, (outputs, 1))
    return heavy_tailed(rng, (outputs, inputs), gain / np.sqrt(inputs)) * channel


def with_outlier_channels(rng: np.random.Generator, weight: np.ndarray) -> np.ndarray:
    """The weight with a few of its input channels enlarged 6 to 20 times."""
    channels = rng.choice(weight.shape[1], OUTLIER_CHANNELS, replace=False)
    weight[:, channels] *= rng.uniform(6.0, 20.0, OUTLIER_CHANNELS)
    return weight


def norm(rng: np.random.Generator, size: int) -> np.ndarray:
    return 1.0 + 0.1 * rng.standard_normal(size)


def tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Every tensor of the model in bf16, in the order of the layers."""
    hidden, intermediate = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    queries = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    keys = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    residual_gain = 1.0 / np.sqrt(2.0 * CONFIG["num_hidden_layers"])
    made = {"model.embed_tokens.weight": heavy_tailed(rng, (CONFIG["vocab_size"], hidden), 0.02)}
    for layer in range(CONFIG["num_hidden_layers"]):
        made |= {
            f"model.layers.{layer}.{name}.weight": weight
            for name, weight in (
                ("input_layernorm", norm(rng, hidden)),
                ("self_attn.q_proj", linear(rng, queries, hidden)),
                ("self_attn.k_proj", linear(rng, keys, hidden)),
                ("self_attn.v_proj", linear(rng, keys, hidden)),
                ("self_attn.o_proj", linear(rng, hidden, queries, residual_gain)),
                ("post_attention_layernorm", norm(rng, hidden)),
                ("mlp.gate_proj", linear(rng, intermediate, hidden)),
                ("mlp.up_proj", linear(rng, intermediate, hidden)),
                (
                    "mlp.down_proj",
                    with_outlier_channels(rng, linear(rng, hidden, intermediate, residual_gain)),
                ),
            )
        }
    made["model.norm.weight"] = norm(rng, hidden)
    made["lm_head.weight"] = heavy_tailed(rng, (CONFIG["vocab_size"], hidden), 0.02)
    return {name: weight.astype(ml_dtypes.bfloat16) for name, weight in made.items()}


def shards(weights: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The tensors, in order, split into SHARDS parts of about the same number of bytes."""
    total = sum(weight.nbytes for weight in weights.values())
    parts: list[dict[str, np.ndarray]] = [{} for _ in range(SHARDS)]
    before = 0
    for name, weight in weights.items():
        parts[before * SHARDS // total][name] = weight
        before += weight.nbytes
    return parts


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "tiny-llama"
    folder.mkdir(parents=True, exist_ok=True)
    weights = tensors(np.random.default_rng(SEED))
    weight_map = {}
    for number, part in enumerate(shards(weights), start=1):
        name = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    total_size = sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", GENERATION_CONFIG)
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)


if __name__ == "__main__":
    main()
