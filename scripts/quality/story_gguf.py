"""Writes a Llama checkpoint with a byte-level vocabulary as a GGUF file in f16, for llama.cpp.

    pip install gguf==0.19.0 safetensors==0.8.0 ml_dtypes==0.6.0 numpy
    python story_gguf.py sample/tiny-story story.gguf

For other checkpoints, use llama.cpp's own `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import ml_dtypes  # noqa: F401: numpy knows bf16 by it
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def name_in_gguf(name: str) -> str:
    """llama.cpp's name of a tensor of transformers' Llama."""
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module = name.removesuffix(".weight")
    if module in whole:
        return f"{whole[module]}.weight"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in the order of llama.cpp's rotary embedding, whose pairs are neighbours."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_f16(model: Path, out: Path) -> None:
    """Writes the checkpoint as GGUF: matrices in f16, the rest in f32."""
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(model.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    control = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[token in control] for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in load_file(model / "model.safetensors").items():
        values = weight.astype(np.float32)
        part = name.split(".")[-2]
        if part in heads:
            values = permuted(values, heads[part])
        writer.add_tensor(name_in_gguf(name), values.astype(np.float16) if values.ndim > 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write_f16(Path(sys.argv[1]), Path(sys.argv[2]))
