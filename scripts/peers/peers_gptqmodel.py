"""Quantizes a model by GPTQModel on a CPU, for peers_gptq.py, and writes its values in f32.

    python scripts/peers/peers_gptqmodel.py MODEL WINDOWS.json OUT

GPTQModel's GPTQ makes integers: here INT4 with a scale in f16 for 32 weights, 4.5 bits a weight as
in NVFP4. It has no GPTQ for NVFP4 or MXFP4. The last line is the CPU time of `GPTQ.quantize`.
Needs gptqmodel 7.7.0, which needs another version of torch than llm-compressor.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import numpy as np
import torch
from gptqmodel import GPTQConfig, GPTQModel
from gptqmodel.quantization.gptq import GPTQ
from safetensors.numpy import load_file, save_file


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Returns the eight codes of each i32 along a new last axis, the lowest bits first."""
    return (packed.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15


def values_of(tensors: dict[str, np.ndarray], layer: str) -> np.ndarray:
    """Returns a layer's weights, [rows, columns]. The stored zero points are one too small."""
    packed, scales = tensors[f"{layer}.qweight"], tensors[f"{layer}.scales"].astype(np.float32)
    codes = nibbles(packed).transpose(0, 2, 1).reshape(-1, packed.shape[1]).astype(np.float32)
    zeros = nibbles(tensors[f"{layer}.qzeros"]).reshape(scales.shape).astype(np.float32) + 1
    group = tensors[f"{layer}.g_idx"]
    return np.ascontiguousarray(((codes - zeros[group]) * scales[group]).T)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("windows", type=Path, help="lists of tokens, in JSON")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    windows = json.loads(options.windows.read_text())
    spent, inner = 0.0, GPTQ.quantize

    def timed(self: GPTQ, *arguments: object, **named: object) -> object:
        nonlocal spent
        start = time.thread_time()
        result = inner(self, *arguments, **named)
        spent += time.thread_time() - start
        return result

    GPTQ.quantize = timed
    config = GPTQConfig(bits=4, group_size=32)
    model = GPTQModel.load(str(options.model), config, dtype=torch.float32, device="cpu")
    torch.set_num_threads(1)
    batches = [{"input_ids": window, "attention_mask": [1] * len(window)} for window in windows]
    model.quantize(batches, batch_size=1)
    with tempfile.TemporaryDirectory() as directory:
        model.save(directory)
        tensors = load_file(Path(directory) / "model.safetensors")
    layers = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    others = {
        name: values.astype(np.float32)
        for name, values in tensors.items()
        if not name.endswith((".qweight", ".qzeros", ".scales", ".g_idx"))
    }
    values = others | {f"{layer}.weight": values_of(tensors, layer) for layer in layers}
    options.out.mkdir()
    save_file(values, options.out / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(options.model / name, options.out)
    print(spent)


if __name__ == "__main__":
    main()
