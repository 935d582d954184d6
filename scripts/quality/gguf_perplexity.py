"""Compares GGUF files quantized by microscale and by llama.cpp: size, perplexity, generated text.

    pip install llama-cpp-python==0.3.36 gguf==0.19.0 safetensors==0.8.0 ml_dtypes==0.6.0
    python scripts/quality/gguf_perplexity.py --microscale target/release/microscale
        [--llama-imatrix PATH] [--model sample/tiny-story]

`pip` compiles llama.cpp. The script writes the checkpoint, a Llama with a byte-level vocabulary, as
a GGUF file in f16. `microscale quantize` and `llama_model_quantize` each quantize that file.
llama.cpp loads each result, generates a few words, and measures the perplexity of heldout.txt: in
windows of 256 tokens, each after a start token, every token except the start token counts. The table
has the bits per weight of the linear layers (the bytes of all their tensors) and the bits per
parameter (the bytes of the whole file).

--llama-imatrix is the path of llama.cpp's program of this name. It adds rows with an importance
matrix, which is computed from the first half of heldout.txt. The perplexity of all rows is then
measured on the second half only.

Prints a Markdown table. Runs on the CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import subprocess
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from story_gguf import write_f16

WINDOW = 256
PROMPT = "It was a truth which she"
BEGIN = "<|endoftext|>"

# Rows of microscale, with the options of `quantize`.
OURS = {
    "microscale nvfp4": ["--format", "nvfp4"],
    "microscale nvfp4, searched": ["--format", "nvfp4", "--search", "full"],
    "microscale nvfp4, searched, imatrix": ["--format", "nvfp4", "--search", "full", "--importance", "IMATRIX"],
    "microscale mxfp4": ["--format", "mxfp4"],
    "microscale mxfp4, searched": ["--format", "mxfp4", "--search", "full"],
    "microscale mxfp4, searched, imatrix": ["--format", "mxfp4", "--search", "full", "--importance", "IMATRIX"],
}
THEIRS = {
    "llama.cpp q8_0": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, False),
    "llama.cpp q4_0": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, False),
    "llama.cpp q4_0, imatrix": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True),
    "llama.cpp q4_K_M": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, False),
    "llama.cpp q4_K_M, imatrix": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, True),
    "llama.cpp q4_K_S": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S, False),
}


def means(imatrix: Path) -> dict[str, np.ndarray]:
    """The mean squares in an importance matrix, as llama.cpp's quantizer takes them."""
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(imatrix).tensors}
    found = {}
    for name, sums in tensors.items():
        if name.endswith(".in_sum2"):
            counts = tensors[name.removesuffix(".in_sum2") + ".counts"].reshape(-1, 1)
            found[name.removesuffix(".in_sum2")] = np.ascontiguousarray(sums.reshape(len(counts), -1) / counts)
    return found


def quantize_theirs(source: Path, out: Path, ftype: int, imatrix: dict[str, np.ndarray] | None) -> None:
    """llama.cpp's quantizer, by its defaults."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = ftype, 2
    if imatrix is not None:
        # An array, at whose end there is one without a name.
        entry, pointer = type(params.imatrix)._type_, ctypes.POINTER(ctypes.c_float)
        entries = [entry(name.encode(), m.ctypes.data_as(pointer), m.size) for name, m in imatrix.items()]
        params.imatrix = (entry * (len(entries) + 1))(*entries)
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)) != 0:
        raise RuntimeError(f"llama_model_quantize failed for {out.name}")


def perplexity(llama: llama_cpp.Llama, text: bytes) -> tuple[float, int]:
    """The perplexity of a text, and the tokens that it is of."""
    tokens = llama.tokenize(text, add_bos=False)
    begin = llama.tokenize(BEGIN.encode(), add_bos=False, special=True)
    loss, count = 0.0, 0
    for start in range(0, len(tokens), WINDOW - 1):
        window = begin + tokens[start : start + WINDOW - 1]
        llama.reset()
        llama.eval(window)
        logits = np.asarray(llama.scores[: len(window) - 1], dtype=np.float64)
        top = logits.max(axis=1)
        chosen = logits[np.arange(len(window) - 1), window[1:]]
        loss += float((top + np.log(np.exp(logits - top[:, None]).sum(axis=1)) - chosen).sum())
        count += len(window) - 1
    return math.exp(loss / count), count


def measured(path: Path, text: bytes) -> tuple[float, int, str]:
    """Loads a file in llama.cpp. Returns the perplexity, the number of tokens and a generated text."""
    llama = llama_cpp.Llama(str(path), n_ctx=512, logits_all=True, n_threads=2, verbose=False, seed=1)
    found, count = perplexity(llama, text)
    written = llama.create_completion(PROMPT, max_tokens=12, temperature=0.0)["choices"][0]["text"]
    llama.close()
    return found, count, " ".join(written.split())


def bits(path: Path) -> tuple[float, float]:
    """The bits of a weight of the linear layers, and of a parameter of the model."""
    tensors = gguf.GGUFReader(path).tensors
    linear = [t for t in tensors if t.name.startswith("blk.") and len(t.shape) > 1]
    scales = [t for t in tensors if t.name.endswith(".scale")]
    weights = sum(int(t.n_elements) for t in linear)
    parameters = sum(int(t.n_elements) for t in tensors if t not in scales)
    stored = sum(int(t.n_bytes) for t in linear + scales)
    return 8 * stored / weights, 8 * sum(int(t.n_bytes) for t in tensors) / parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microscale", type=Path, required=True)
    parser.add_argument("--llama-imatrix", type=Path)
    root = Path(__file__).resolve().parents[2]
    parser.add_argument("--model", type=Path, default=root / "sample" / "tiny-story")
    args = parser.parse_args()
    text = (args.model / "heldout.txt").read_bytes()
    middle = text.index(b"\n", len(text) // 2)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        source, imatrix, numbers = scratch / "f16.gguf", scratch / "imatrix.gguf", None
        write_f16(args.model, source)
        if args.llama_imatrix:
            calibration = scratch / "calibration.txt"
            calibration.write_bytes(text[:middle])
            text = text[middle:]
            options = ["-m", source, "-f", calibration, "-o", imatrix, "-c", str(WINDOW), "-t", "2"]
            command = [str(part) for part in (args.llama_imatrix, *options)]
            subprocess.run(command, check=True, capture_output=True)
            numbers = means(imatrix)
        files = {"f16": source}
        for kept in ([], ["--kept", "q8_0"]):
            for name, options in OURS.items():
                if "IMATRIX" in options and numbers is None:
                    continue
                options = [str(imatrix) if option == "IMATRIX" else option for option in options] + kept
                name += ", the rest q8_0" if kept else ""
                out = scratch / f"{len(files)}.gguf"
                command = [args.microscale, "quantize", source, "--out", out, *options]
                subprocess.run([str(part) for part in command], check=True, capture_output=True)
                files[name] = out
        for name, (ftype, weighted) in THEIRS.items():
            if weighted and numbers is None:
                continue
            out = scratch / f"{len(files)}.gguf"
            quantize_theirs(source, out, ftype, numbers if weighted else None)
            files[name] = out
        print("| file | bits a weight | bits a parameter | perplexity | it writes |\n|---|---|---|---|---|")
        for name, path in files.items():
            (weight, parameter), (found, count, written) = bits(path), measured(path, text)
            print(f"| {name} | {weight:.2f} | {parameter:.2f} | {found:.3f} | {written} |", flush=True)
        print(f"\n{count} tokens, llama-cpp-python {llama_cpp.__version__}; the model writes after {PROMPT!r}")


if __name__ == "__main__":
    main()
