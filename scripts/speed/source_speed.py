"""Times `microscale` on FP8, INT8, MX, NVFP4, GGUF and `.bin` sources, as a share of a copy.

    python scripts/speed/source_speed.py --microscale target/release/microscale
        --directory /dev/shm/sources [--gigabytes 1] [--runs 3]

Each source is a file of matrices with 8192 columns and random codes. It has just been written, so it
is in the page cache. `read` is the source's size divided by the command's time. `written` is the size
of the output as a share of the source. `share` is the time of `cp`, which reads and writes all bytes
of the source, divided by the command's time. The command and `cp` take turns; the best run of each
counts. Needs numpy, and gguf for GGUF files.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

ROWS, COLS = 4096, 8192
Tensor = tuple[str, str, list[int], bytes]


def random_bytes(count: int, low: int = 0, high: int = 256) -> bytes:
    return np.random.default_rng(count + low).integers(low, high, count, dtype=np.uint8).tobytes()


def floats(count: int) -> bytes:
    return (np.random.default_rng(count).random(count, dtype=np.float32) * np.float32(1e-3) + np.float32(1e-4)).tobytes()


def bf16() -> bytes:
    normal = np.random.default_rng(1).standard_normal(ROWS * COLS, dtype=np.float32) * np.float32(0.02)
    return (normal.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def numbers_of_e4m3(count: int) -> bytes:
    """Returns random codes of E4M3 without NaN."""
    codes = np.frombuffer(random_bytes(count), np.uint8) & 0xFE
    return codes.tobytes()


def plain(name: str) -> Iterator[Tensor]:
    yield f"{name}.weight", "BF16", [ROWS, COLS], bf16()


def block_fp8(name: str) -> Iterator[Tensor]:
    yield f"{name}.weight", "F8_E4M3", [ROWS, COLS], numbers_of_e4m3(ROWS * COLS)
    yield f"{name}.weight_scale_inv", "F32", [ROWS // 128, COLS // 128], floats(ROWS * COLS // 128**2)


def row_fp8(name: str) -> Iterator[Tensor]:
    yield f"{name}.weight", "F8_E4M3", [ROWS, COLS], numbers_of_e4m3(ROWS * COLS)
    yield f"{name}.weight_scale", "F32", [ROWS, 1], floats(ROWS)


def row_int8(name: str) -> Iterator[Tensor]:
    yield f"{name}.weight", "I8", [ROWS, COLS], random_bytes(ROWS * COLS)
    yield f"{name}.weight_scale", "F32", [ROWS, 1], floats(ROWS)


def mxfp8(name: str) -> Iterator[Tensor]:
    yield f"{name}.weight", "F8_E4M3", [ROWS, COLS], numbers_of_e4m3(ROWS * COLS)
    yield f"{name}.weight_scale", "U8", [ROWS, COLS // 32], random_bytes(ROWS * COLS // 32, 110, 120)


def nvfp4(name: str) -> Iterator[Tensor]:
    """Yields NVFP4 with power-of-two block scales, so that MXFP8 represents all values."""
    powers = np.frombuffer(random_bytes(ROWS * COLS // 16, 6, 9), np.uint8) << 3
    yield f"{name}.weight_packed", "U8", [ROWS, COLS // 2], random_bytes(ROWS * COLS // 2)
    yield f"{name}.weight_scale", "F8_E4M3", [ROWS, COLS // 16], powers.tobytes()
    yield f"{name}.weight_global_scale", "F32", [1], np.float32(1024).tobytes()


def deepseek(name: str) -> Iterator[Tensor]:
    yield f"{name}.weight", "I8", [ROWS, COLS // 2], random_bytes(ROWS * COLS // 2)
    yield f"{name}.scale", "F8_E8M0", [ROWS, COLS // 32], random_bytes(ROWS * COLS // 32, 110, 120)


def safetensors(path: Path, count: int, source: Callable[[str], Iterator[Tensor]]) -> None:
    tensors = [tensor for number in range(count) for tensor in source(f"layers.{number}.ffn.experts.0.w2")]
    header, end = {}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for *_, data in tensors:
            file.write(data)


def torch_pickle(count: int) -> bytes:
    """Returns a pickle of matrices as torch.save writes it, without torch."""

    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    def number(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little")

    out = io.BytesIO()
    out.write(b"\x80\x02}(")
    for key in range(count):
        out.write(text(f"layers.{key}.ffn.experts.0.w2.weight") + b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage"))
        out.write(b"ctorch\nBFloat16Storage\n" + text(str(key)) + text("cpu") + number(ROWS * COLS) + b"tQ" + number(0))
        out.write(number(ROWS) + number(COLS) + b"\x86" + number(COLS) + number(1) + b"\x86\x89}tR")
    out.write(b"u.")
    return out.getvalue()


def pytorch(path: Path, count: int) -> None:
    data = bf16()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("x/data.pkl", torch_pickle(count))
        for key in range(count):
            archive.writestr(f"x/data/{key}", data)


def gguf(path: Path, count: int, kind: str) -> None:
    """Writes matrices of a type, all with the same values."""
    import gguf

    writer, stored = gguf.GGUFWriter(path, "llama"), gguf.GGMLQuantizationType[kind]
    writer.add_block_count(count)
    values = np.random.default_rng(1).standard_normal((ROWS, COLS), dtype=np.float32) * np.float32(0.02)
    data = gguf.quantize(values, stored)
    for number in range(count):
        writer.add_tensor(f"blk.{number}.ffn_down.weight", data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def timed(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


SOURCES = {
    "bf16": plain,
    "bf16, PyTorch's .bin": None,
    "block FP8 (128x128)": block_fp8,
    "FP8, a scale a row": row_fp8,
    "INT8, a scale a row": row_int8,
    "MXFP8": mxfp8,
    "MXFP4, DeepSeek-V4's": deepseek,
    "NVFP4": nvfp4,
    "GGUF, BF16": "BF16",
    "GGUF, Q8_0": "Q8_0",
}
COMMANDS = {
    "quantize --format nvfp4": ["quantize", "--format", "nvfp4"],
    "quantize --format mxfp4": ["quantize", "--format", "mxfp4"],
    "dequantize": ["dequantize"],
    "convert": ["convert", "--to", "compressed-tensors"],
    "convert --format nvfp4": ["convert", "--to", "compressed-tensors", "--format", "nvfp4"],
    "convert --format mxfp8-e4m3": ["convert", "--to", "compressed-tensors", "--format", "mxfp8-e4m3"],
    "convert --to fp8-block": ["convert", "--to", "fp8-block"],
    "convert --to comfyui": ["convert", "--to", "comfyui"],
    "convert --to modelopt": ["convert", "--to", "modelopt"],
}
FROM_MXFP4 = [title for title in COMMANDS if title.startswith("convert") and "comfyui" not in title and "modelopt" not in title]
# Conversions of each source that are exact. ComfyUI has swizzled scales.
CONVERTED = {deepseek: FROM_MXFP4, nvfp4: ["convert --format mxfp8-e4m3", "convert --to comfyui", "convert --to modelopt"], mxfp8: ["convert --to comfyui"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microscale", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True, help="a new directory for inputs and outputs")
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="run only rows whose `source: command` contains this text")
    args = parser.parse_args()
    args.directory.mkdir(parents=True)
    print("| source | command | read | written | share of a copy |\n|---|---|---|---|---|")
    for name, source in SOURCES.items():
        end = "bin" if source is None else "gguf" if isinstance(source, str) else "safetensors"
        path = args.directory / f"in.{end}"
        each = sum(len(data) for *_, data in (source if callable(source) else plain)("x"))
        count = max(1, round(args.gigabytes * 1e9 / each))
        # Unquantized sources are not dequantized, and NVFP4 is not quantized again.
        titles = [
            title
            for title in COMMANDS
            if args.only in f"{name}: {title}"
            and not (title == "dequantize" and (source is plain or not callable(source)))
            and not (title.startswith("quantize") and source is nvfp4)
            and not (title.startswith("convert") and title not in CONVERTED.get(source, []))
        ]
        if not titles:
            continue
        if source is None:
            pytorch(path, count)
        elif isinstance(source, str):
            gguf(path, count, source)
        else:
            safetensors(path, count, source)
        size, copied = path.stat().st_size, args.directory / "copy"
        out = args.directory / ("out.gguf" if end == "gguf" else "out.safetensors")
        for title in titles:
            verb, *options = COMMANDS[title]
            copies, seconds = [], []
            for _ in range(args.runs):
                copied.unlink(missing_ok=True)
                out.unlink(missing_ok=True)
                copies.append(timed(["cp", str(path), str(copied)]))
                copied.unlink()
                seconds.append(timed([str(args.microscale), verb, str(path), *options, "--out", str(out)]))
            best, share = min(seconds), min(copies) / min(seconds)
            print(f"| {name} | `{title}` | {size / best / 1e9:.2f} GB/s | {out.stat().st_size / size:.2f} | {share:.0%} |", flush=True)
        path.unlink()
    shutil.rmtree(args.directory)


if __name__ == "__main__":
    main()
