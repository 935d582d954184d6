"""Merges parts while other runs replace them with other options: no output may mix both.

    python scripts/outputs/merge_races.py --microscale target/release/microscale --merges 1000

Two threads make two parts again and again, in turns as MXFP4 and as NVFP4, in one OUT.parts.
Meanwhile `merge` runs `--merges` times. Each output must equal, byte for byte, the output of one
run with one of the options. If `merge` fails, there must be no output. Needs Python's standard
library only.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import threading

SHARDS = 7
OPTIONS = (["--format", "mxfp4"], ["--format", "nvfp4"])


def write_shard(path, tensors):
    """Writes a safetensors file of f32 matrices."""
    header, data = {}, b""
    for name, (rows, cols) in tensors.items():
        values = struct.pack(f"<{rows * cols}f", *(random.gauss(0, 1) for _ in range(rows * cols)))
        header[name] = {"dtype": "F32", "shape": [rows, cols], "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_checkpoint(folder):
    folder.mkdir()
    index = {}
    for shard in range(SHARDS):
        name, tensor = f"model-{shard}-of-{SHARDS}.safetensors", f"model.layers.{shard}.mlp.down_proj.weight"
        write_shard(folder / name, {tensor: (64, 128)})
        index[tensor] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_parts(run, part, stop):
    turn = part
    while not stop.is_set():
        run("quantize", "IN", "--out", "OUT", "--part", f"{part}/2", *OPTIONS[turn % 2])
        turn += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--microscale", default="target/release/microscale")
    parser.add_argument("--merges", type=int, default=1000)
    args = parser.parse_args()
    program = os.path.abspath(args.microscale)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)

        def run(*words):
            command = [program, *words]
            if "quantize" in words:
                command += ["--device", "cpu"]
            return subprocess.run(command, cwd=scratch, capture_output=True, text=True)

        write_checkpoint(scratch / "IN")
        for number, options in enumerate(OPTIONS):
            run("quantize", "IN", "--out", f"WHOLE{number}", *options).check_returncode()
        wholes = [contents(scratch / f"WHOLE{number}") for number in range(len(OPTIONS))]

        stop = threading.Event()
        parts = [threading.Thread(target=make_parts, args=(run, part, stop)) for part in (1, 2)]
        for thread in parts:
            thread.start()
        out, merged, refused, wrong = scratch / "OUT", [0] * len(wholes), 0, []
        for number in range(args.merges):
            result = run("merge", "IN", "--out", "OUT")
            if result.returncode != 0:
                refused += 1
                if out.exists():
                    wrong.append(f"merge {number} failed, and there is an output: {result.stderr}")
            else:
                found = contents(out)
                if found in wholes:
                    merged[wholes.index(found)] += 1
                else:
                    wrong.append(f"merge {number} is mixed")
            shutil.rmtree(out, ignore_errors=True)
        stop.set()
        for thread in parts:
            thread.join()
    print(f"{args.merges} merges: {merged} whole, {refused} refused, {len(wrong)} wrong")
    print("\n".join(wrong[:10]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
