"""Times `microscale quantize` on a synthetic checkpoint, and copies of the same bytes.

    python scripts/speed/checkpoint_speed.py --microscale target/release/microscale \
        --directory /dev/shm/speed --gigabytes 50 \
        [--device cpu] [--device cuda:0] [--device cuda:all] [--format nvfp4] [--gpu-copy]

The checkpoint has layers of a Llama with 70 billion parameters, three per shard, up to the given
size, with normally distributed bf16 values. It has just been written, so it is in the page cache.
The peak of resident memory includes mapped pages of files. `--gpu-copy` also measures copies from
pinned memory to the GPU in PyTorch. Needs numpy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HIDDEN, KEYS, INNER = 8192, 1024, 28672
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
}
LAYERS_A_SHARD = 3


def values() -> memoryview:
    """Returns 64 MiB of bf16 and a few more: tensors start at different offsets."""
    normal = np.random.default_rng(1).standard_normal((64 << 19) + 4096, dtype=np.float32) * np.float32(0.02)
    return memoryview((normal.view(np.uint32) >> 16).astype(np.uint16)).cast("B")


def write_shard(path: Path, layers: range, block: memoryview) -> list[str]:
    header, end, sizes = {}, 0, []
    for layer in layers:
        for name, shape in LAYER.items():
            size = 2 * int(np.prod(shape))
            header[f"model.layers.{layer}.{name}.weight"] = {
                "dtype": "BF16",
                "shape": list(shape),
                "data_offsets": [end, end + size],
            }
            end += size
            sizes.append(size)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, size in enumerate(sizes):
            start = 2 * (number * 97 % 4096)
            while size:
                size -= file.write(block[start : start + min(size, 64 << 20)])
    return list(header)


def write_checkpoint(directory: Path, gigabytes: float) -> int:
    directory.mkdir(parents=True)
    layers = max(1, round(gigabytes * 1e9 / sum(2 * int(np.prod(shape)) for shape in LAYER.values())))
    shards = -(-layers // LAYERS_A_SHARD)
    block, places = values(), {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = range(shard * LAYERS_A_SHARD, min(layers, (shard + 1) * LAYERS_A_SHARD))
        places.update(dict.fromkeys(write_shard(directory / name, mine, block), name))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return sum(file.stat().st_size for file in directory.iterdir())


def timed(command: list[str]) -> tuple[float, float]:
    """Returns seconds, and the peak of resident memory in bytes.

    The peak is polled during the run: the figure of `wait4` includes this script's memory.
    """
    peak = 0
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            lines = status.read_text().splitlines()
            peak = max([peak, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))])
            time.sleep(0.005)
        seconds = time.perf_counter() - start
        if process.returncode != 0:
            errors.seek(0)
            sys.exit(f"{' '.join(command)}\n{errors.read()}")
    return seconds, peak


def gpu_copy_rate(device: int) -> float:
    """Returns the bytes per second from pinned memory to a GPU."""
    import torch

    host = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device=f"cuda:{device}")
    best = 0.0
    for _ in range(6):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        best = max(best, host.numel() / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microscale", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True, help="a new directory for input and outputs")
    parser.add_argument("--gigabytes", type=float, default=50)
    parser.add_argument("--device", action="append", default=[])
    parser.add_argument("--format", action="append", default=[])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--gpu-copy", action="store_true")
    parser.add_argument("--no-cp", action="store_true", help="skip cp, which needs the same space again")
    parser.add_argument("--same", action="store_true", help="also compare the outputs of all devices")
    args = parser.parse_args()

    source, out = args.directory / "in", args.directory / "out"
    start = time.perf_counter()
    size = write_checkpoint(source, args.gigabytes)
    shards = len(list(source.glob("*.safetensors")))
    print(f"{size / 1e9:.1f} GB in {shards} shards, written in {time.perf_counter() - start:.0f} s")
    if args.gpu_copy:
        print(f"pinned memory to cuda:0: {gpu_copy_rate(0) / 1e9:.1f} GB/s")
    if not args.no_cp:
        seconds, _ = timed(["cp", "-r", str(source), str(out)])
        print(f"{'cp -r':24} {seconds:7.2f} s {size / seconds / 1e9:7.1f} GB/s read")
        shutil.rmtree(out)
    for form in args.format or ["nvfp4", "mxfp4"]:
        kept: Path | None = None
        for device in args.device or ["cpu"]:
            for _ in range(args.runs):
                shutil.rmtree(out, ignore_errors=True)
                command = [str(args.microscale), "quantize", str(source), "--out", str(out)]
                seconds, peak = timed([*command, "--format", form, "--device", device])
                rate = size / seconds / 1e9
                print(f"{form + ' on ' + device:24} {seconds:7.2f} s {rate:7.1f} GB/s read {peak / 1e9:7.2f} GB at most")
            if args.same and kept is None:
                kept = out.rename(args.directory / "kept")
            elif kept is not None:
                differing = subprocess.run(["diff", "-rq", str(kept), str(out)], capture_output=True, text=True)
                print(f"{'':24} {'the same bytes' if differing.returncode == 0 else differing.stdout}")
        if kept is not None:
            shutil.rmtree(kept)
    shutil.rmtree(args.directory)


if __name__ == "__main__":
    main()
