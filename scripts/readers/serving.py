"""Runs the commands of docs/serving.md whose engines run on a CPU, on sample/tiny-story.

    python serving.py --microscale target/release/microscale [--llama-server PATH] [--candle PATH]
        [ENGINE ...]

Engines are transformers, torchao, llama.cpp and candle; without names, all of them run. Each check
quantizes the sample, has the engine load the output and write a few words after a prompt, and
compares the words or the logits with the dequantized checkpoint. An engine that is not
installed is reported as skipped. The exit code is 1 if any check fails.

Needs transformers, compressed-tensors and accelerate (readers_requirements.txt). torchao needs
torchao and this project's Python package. llama.cpp needs gguf, ml_dtypes and the path of
`llama-server`. candle needs the path of the example `generate`:
`cargo build --release -p microscale-models --example generate`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch
from reader_program import Program
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from transformers.utils.quantization_config import CompressedTensorsConfig

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "It was a truth which she"
TOKENS = 12
#: Time limit for `llama-server` to load the model, in seconds.
START = 60


class Skipped(Exception):
    """The engine is not installed."""


def words(model: torch.nn.Module, tokenizer: AutoTokenizer, begin: str = "") -> tuple[torch.Tensor, str]:
    """The logits of the prompt, and the text that the model writes after it."""
    inputs = tokenizer(begin + PROMPT, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        logits = model(**inputs).logits
        tokens = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    return logits, tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])


def loaded(directory: Path, **options: object) -> tuple[torch.Tensor, str]:
    """Logits and text of a checkpoint that transformers loads."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **options)
    return words(model, tokenizer)


def dequantized(program: Program, quantized: Path) -> tuple[torch.Tensor, str]:
    """Logits and text of a checkpoint after `microscale dequantize`."""
    out = program.new("dequantized")
    program.run("dequantize", quantized, "--dtype", "bf16", "--out", out)
    return loaded(out)


def transformers_checks(program: Program, model: Path) -> Iterator[tuple[str, str]]:
    """Loads compressed-tensors checkpoints, packed and dequantized. Logits must be equal."""
    for name in ("mxfp4", "nvfp4", "mxfp8-e4m3"):
        quantized = program.quantize(model, "--format", name)
        logits, text = dequantized(program, quantized)
        for dequantize in (False, True):
            theirs, _ = loaded(quantized, quantization_config=CompressedTensorsConfig(dequantize=dequantize))
            if not torch.equal(logits, theirs):
                raise RuntimeError(f"{name}, dequantize={dequantize}: the logits differ")
        theirs, written = loaded(quantized)
        if written != text:
            raise RuntimeError(f"{name}: it writes {written!r}, and {text!r} after dequantize")
        yield name, written


def torchao_checks(program: Program, model: Path) -> Iterator[tuple[str, str]]:
    """Replaces the weights of linear layers by torchao's tensors. Logits must be equal."""
    if not all(importlib.util.find_spec(package) for package in ("torchao", "microscale")):
        raise Skipped("torchao or microscale is not installed")
    import microscale  # noqa: PLC0415
    from microscale.torch import to_torchao  # noqa: PLC0415

    # torchao 0.18 multiplies MXFP4 weights only with quantized activations, on GPUs.
    tokenizer, name = AutoTokenizer.from_pretrained(model), "nvfp4"
    ours, theirs = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16) for _ in range(2))
    for (path, layer), other in zip(theirs.named_modules(), ours.modules(), strict=True):
        if isinstance(layer, torch.nn.Linear) and path != "lm_head":
            tensor = to_torchao(microscale.quantize(layer.weight.detach(), name, numerics="torchao"))
            layer.weight = torch.nn.Parameter(tensor, requires_grad=False)
            other.weight.data = tensor.dequantize(torch.bfloat16)
    (logits, text), (their_logits, written) = words(ours, tokenizer), words(theirs, tokenizer)
    if not torch.equal(logits, their_logits) or text != written:
        raise RuntimeError(f"{name}: logits or words differ")
    yield name, written


def free_port() -> int:
    """A port that no program listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def completion(server: Path, model: Path) -> str:
    """What `llama-server` writes after the prompt."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [str(server), "-m", str(model), "--port", str(port), "-c", "512", "-t", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START
        while True:
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5):
                    break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{server} does not load {model}") from None
                time.sleep(0.2)
        body = json.dumps({"prompt": PROMPT, "n_predict": TOKENS, "temperature": 0, "seed": 1}).encode()
        request = urllib.request.Request(
            f"{address}/completion", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["content"]
    finally:
        process.terminate()
        process.wait()


def llama_checks(program: Program, model: Path, server: Path | None) -> Iterator[tuple[str, str]]:
    """Serves GGUF files. llama.cpp rounds activations, so only the first word must be equal."""
    if server is None or not importlib.util.find_spec("gguf"):
        raise Skipped("no --llama-server, or gguf is not installed")
    sys.path.insert(0, str(ROOT / "scripts" / "quality"))
    from story_gguf import write_f16  # noqa: PLC0415

    source = program.new("story.gguf")
    write_f16(model, source)
    for name in ("mxfp4", "nvfp4"):
        quantized, back = program.new(f"{name}.gguf"), program.new("f32.gguf")
        program.run("quantize", source, "--format", name, "--out", quantized)
        program.run("dequantize", quantized, "--dtype", "f32", "--out", back)
        written, text = completion(server, quantized), completion(server, back)
        if not written.split() or written.split()[0] != text.split()[0]:
            raise RuntimeError(f"{name}: it writes {written!r}, and {text!r} after dequantize")
        yield name, written


def candle_checks(program: Program, model: Path, example: Path | None) -> Iterator[tuple[str, str]]:
    """Runs candle's example on quantized checkpoints. The words must be equal.

    The example starts with the token that begins a text, and transformers does not.
    """
    if example is None:
        raise Skipped("no --candle")
    for name in ("mxfp4", "nvfp4"):
        quantized = program.quantize(model, "--format", name)
        out = program.new("dequantized")
        program.run("dequantize", quantized, "--dtype", "f32", "--out", out)
        command = [str(example), str(quantized), "--prompt", PROMPT, "--tokens", str(TOKENS)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        reference = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(out)
        _, text = words(reference, tokenizer, begin=tokenizer.bos_token)
        if text.strip() not in done.stdout:
            raise RuntimeError(f"{name}: it prints {done.stdout!r}, and transformers {text!r}")
        yield name, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microscale", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=ROOT / "sample" / "tiny-story")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--candle", type=Path)
    parser.add_argument("engines", nargs="*", metavar="ENGINE")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        program = Program(args.microscale.resolve(), Path(directory))
        engines = {
            "transformers": lambda: transformers_checks(program, args.model),
            "torchao": lambda: torchao_checks(program, args.model),
            "llama.cpp": lambda: llama_checks(program, args.model, args.llama_server),
            "candle": lambda: candle_checks(program, args.model, args.candle),
        }
        unknown = set(args.engines) - engines.keys()
        if unknown:
            parser.error(f"unknown engine {', '.join(sorted(unknown))}; engines are {', '.join(engines)}")
        for engine in args.engines or engines:
            try:
                for name, text in engines[engine]():
                    print(f"{engine}: {name}: ok: {PROMPT}{text!r}", flush=True)
            except Skipped as why:
                print(f"{engine}: skipped: {why}", flush=True)
            except Exception as error:  # noqa: BLE001: the other engines run, and the exit code is 1
                print(f"{engine}: FAILED: {error}", flush=True)
                failed = True
    for package in ("transformers", "compressed-tensors", "torchao", "torch"):
        if importlib.util.find_spec(package.replace("-", "_")):
            print(f"{package} {importlib.metadata.version(package)}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
