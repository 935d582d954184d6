"""Makes the importance matrices of checkpoint/golden/ with llama.cpp's llama-imatrix.

    python make_imatrix.py PATH/TO/llama-imatrix

Build llama-imatrix from the llama.cpp source in the package of llama-cpp-python 0.3.36. The script
needs gguf and numpy. The model is small and has experts. Its weights are random, and the text repeats
a few letters, so one of three experts is never chosen. README.md describes the files.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter, LlamaFileType, TokenType
from safetensors.numpy import save_file

FOLDER = Path(__file__).resolve().parents[2] / "checkpoint/golden"
SEED, HIDDEN, EXPERTS = 20_261_124, 64, 3
TEXT = "abcdefgh" * 5
TOKENS = 32


def bytes_as_letters() -> list[str]:
    """Returns the letters that stand for bytes in GPT-2's byte-level vocabulary, in byte order."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


def write_model(path: Path) -> None:
    random = np.random.default_rng(SEED)
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_block_count(1)
    writer.add_context_length(TOKENS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(1)
    tokens = ["<|begin|>", *bytes_as_letters()]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] + [TokenType.NORMAL] * 256)
    writer.add_token_merges([f"{a} {b}" for a, b in [("a", "b")]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)

    def weight(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.1, shape).astype(np.float32))

    weight("token_embd.weight", len(tokens), HIDDEN)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    for name, rows in (("attn_q", HIDDEN), ("attn_k", HIDDEN // 2), ("attn_v", HIDDEN // 2), ("attn_output", HIDDEN)):
        weight(f"blk.0.{name}.weight", rows, HIDDEN)
    weight("blk.0.ffn_gate_inp.weight", EXPERTS, HIDDEN)
    for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        weight(f"blk.0.{name}.weight", EXPERTS, HIDDEN, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        write_model(scratch / "model.gguf")
        (scratch / "text.txt").write_text(TEXT * 8)
        for form, end in (("gguf", "gguf"), ("dat", "dat")):
            options = ["-m", "model.gguf", "-f", "text.txt", "-c", str(TOKENS), "-t", "1"]
            options += ["--output-format", form, "-o", f"imatrix.{end}"]
            subprocess.run([sys.argv[1], *options], check=True, cwd=scratch)
            (FOLDER / f"imatrix.{end}").write_bytes((scratch / f"imatrix.{end}").read_bytes())
    # As llama.cpp's quantizer reads it: means, and 1 for experts without tokens.
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(FOLDER / "imatrix.gguf").tensors}
    values = {}
    for name in (name for name in tensors if name.endswith(".in_sum2")):
        weight = name.removesuffix(".in_sum2")
        counts = tensors[f"{weight}.counts"].reshape(-1, 1)
        print(weight, tensors[name].shape, counts.ravel())
        sums = tensors[name].reshape(len(counts), -1)
        values[weight] = np.where(counts > 0, sums / np.maximum(counts, 1), np.float32(1)).astype(np.float32)
    save_file(values, FOLDER / "imatrix-values.safetensors")


if __name__ == "__main__":
    main()
