"""Quantizes a model by llm-compressor's GPTQ on a CPU, for peers_gptq.py.

    python scripts/peers/peers_llmcompressor.py MODEL WINDOWS.json OUT --scheme NVFP4A16

Quantizes the weights of the decoder's linear layers, with the defaults of `GPTQModifier`, and
writes a compressed checkpoint. The last line is the number of CPU seconds after the Hessians, with
one thread. Needs peers_gptq_requirements.txt.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("windows", type=Path, help="lists of tokens, in JSON")
    parser.add_argument("out", type=Path)
    parser.add_argument("--scheme", default="NVFP4A16", help="or MXFP4A16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    spent, inner = 0.0, GPTQModifier.compress_modules

    def timed(self: GPTQModifier) -> None:
        nonlocal spent
        start = time.thread_time()
        inner(self)
        spent += time.thread_time() - start
        assert not self._rtn_fallback_module_names, "llm-compressor fell back to rounding"

    GPTQModifier.compress_modules = timed
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    batches = []
    for window in json.loads(options.windows.read_text()):
        tokens = torch.tensor([window])
        batches.append({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
    oneshot(
        model=model,
        dataset=DataLoader(batches, batch_size=None),
        recipe=GPTQModifier(targets="Linear", scheme=options.scheme, ignore=["lm_head"]),
        num_calibration_samples=len(batches),
        pipeline="sequential",
    )
    model.save_pretrained(options.out, save_compressed=True)
    shutil.copy(options.model / "tokenizer.json", options.out)
    print(spent)


if __name__ == "__main__":
    main()
