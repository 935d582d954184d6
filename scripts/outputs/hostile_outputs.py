"""Runs several commands on one output while file-system calls are slow and locks fail silently.

    cargo build
    python scripts/outputs/hostile_outputs.py --microscale target/debug/microscale --scenarios 1000

A scenario is two or three runs of `quantize`, `dequantize`, `convert` or `merge` with the same
output, or parts that start at the same time. The script builds hostile_outputs.c with `cc` and
preloads it. The library delays file-system calls by 0.3 to 50 ms. In half of the scenarios it also
makes every lock succeed. In half of them a thread removes `.OUT.microscale-*` directories. The
checks:

- If a run ends with exit code 0, the output equals the output of an undisturbed run, byte for byte.
- If no run of `merge` succeeds and there is no complete output, every part is still there.
- Parts that start together, without false locks and removals, all end with exit code 0.
- Every exit code is 0 or 1.

Prints the number of scenarios of each kind, and the number of each failed scenario. `--first N
--scenarios 1` repeats scenario N. Needs Linux, `cc` and Python's standard library.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time

from merge_races import contents, write_checkpoint

# Seconds after which a run counts as hung.
PATIENCE = 120


class Bench:
    """The inputs, and the outputs of undisturbed runs."""

    def __init__(self, program, scratch):
        self.program, self.scratch = program, scratch
        self.shim = scratch / "hostile_outputs.so"
        source = pathlib.Path(__file__).with_suffix(".c")
        build = ["cc", "-O1", "-shared", "-fPIC", "-w", "-o", self.shim, source, "-ldl", "-lm"]
        subprocess.run(build, check=True)
        write_checkpoint(scratch / "IN")
        (scratch / "IN/tokenizer").mkdir()
        (scratch / "IN/tokenizer/vocab.txt").write_text("a b c")
        shutil.copy(next((scratch / "IN").glob("model-0*")), scratch / "one.safetensors")
        self.wholes = {}
        for form, source in (("directory", "IN"), ("file", "one.safetensors")):
            self.make(["quantize", source, "--format", "nvfp4", "--out", f"PACKED-{form}"])
            for kind in ("quantize", "dequantize", "convert"):
                out = f"WHOLE-{kind}-{form}"
                self.make([*self.words(kind, form), "--out", out])
                self.wholes[kind, form] = made(scratch / out)
            self.wholes["merge", form] = self.wholes["parts", form] = self.wholes["quantize", form]

    def words(self, kind, form):
        """Returns the words of a command, without the output."""
        source = {"directory": "IN", "file": "one.safetensors"}[form]
        device = ["--device", "cpu"]
        return {
            "quantize": ["quantize", source, "--format", "nvfp4", *device],
            "dequantize": ["dequantize", f"PACKED-{form}", *device],
            "convert": ["convert", f"PACKED-{form}", "--to", "modelopt", *device],
            "merge": ["merge", source],
        }[kind]

    def make(self, words):
        subprocess.run([self.program, *words], cwd=self.scratch, check=True, capture_output=True)

    def start(self, words, seed, false_locks):
        environment = dict(os.environ, LD_PRELOAD=str(self.shim), HOSTILE_SEED=str(seed), RAYON_NUM_THREADS="2")
        if false_locks:
            environment["HOSTILE_LOCKS"] = "1"
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([self.program, *words], cwd=self.scratch, env=environment, **pipes)


def made(out):
    """Returns the bytes of an output, or of every file in it; None if there is no output."""
    return contents(out) if out.is_dir() else out.read_bytes() if out.exists() else None


def remove_temporaries(folder, out, draw, stop):
    """Removes temporary directories of an output at random times, as another host may do."""
    while not stop.wait(draw.uniform(0.002, 0.15)):
        for within in (folder, out):
            for path in within.glob(".OUT.microscale-*"):
                shutil.rmtree(path, ignore_errors=True)


def scenario(bench, number):
    """Runs a scenario.

    Returns its kind, the number of runs with exit code 0, whether it left an incomplete output, and
    its errors.
    """
    draw = random.Random(number)
    kind = draw.choice(["quantize", "dequantize", "convert", "merge", "merge", "parts"])
    form = draw.choice(["directory", "directory", "file"])
    false_locks, removes = draw.random() < 0.5, draw.random() < 0.5
    folder = bench.scratch / f"scenario-{number}"
    folder.mkdir()
    out = folder / "OUT"
    fills = form == "directory" and kind != "parts" and draw.random() < 0.25
    if fills:
        out.mkdir()
    if kind == "merge":
        bench.make([*bench.words("quantize", form), "--out", out, "--part", "1/1"])
    parts = contents(folder / "OUT.parts") if kind == "merge" else None
    if kind == "parts":
        false_locks = removes = False
        words = [[*bench.words("quantize", form), "--part", f"{part}/4"] for part in range(1, 5)]
    else:
        words = [bench.words(kind, form)] * draw.choice([2, 3])

    stop = threading.Event()
    remover = threading.Thread(target=remove_temporaries, args=(folder, out, random.Random(number), stop))
    if removes:
        remover.start()
    runs = []
    for place, line in enumerate(words):
        runs.append(bench.start([*line, "--out", out], number * 10 + place, false_locks))
        time.sleep(draw.choice([0, 0, 0.02, 0.1]))
    errors, wrong = [], []
    for run in runs:
        try:
            errors.append(run.communicate(timeout=PATIENCE)[1])
        except subprocess.TimeoutExpired:
            run.kill()
            errors.append(run.communicate()[1])
            wrong.append("a run hangs")
    stop.set()
    if removes:
        remover.join()

    codes = [run.returncode for run in runs]
    if kind == "parts":
        if any(codes):
            wrong.append("a part failed")
        else:
            bench.make([*bench.words("merge", form), "--out", out])
    whole = made(out) == bench.wholes[kind, form]
    if not set(codes) <= {0, 1}:
        wrong.append("an exit code is neither 0 nor 1")
    if 0 in codes and not whole and not (kind == "parts" and any(codes)):
        wrong.append("incomplete with exit code 0")
    if kind == "merge" and not whole:
        left = contents(folder / "OUT.parts") if (folder / "OUT.parts").exists() else {}
        if any(left.get(name) != data for name, data in parts.items()):
            wrong.append("no output, and a part is gone")
    name = f"{kind} to a {form}{', filled' * fills}{', false locks' * false_locks}{', removals' * removes}"
    reported = not whole and made(out) not in (None, {})
    messages = [f"  {number}: {name}: {problem}, codes {codes}: {errors}" for problem in wrong]
    shutil.rmtree(folder, ignore_errors=True)
    return kind, codes.count(0), reported, messages


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--microscale", default="target/debug/microscale")
    parser.add_argument("--scenarios", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=4)
    args = parser.parse_args()
    kinds, succeeded, reported, wrong = collections.Counter(), 0, 0, []
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(os.path.abspath(args.microscale), pathlib.Path(scratch))
        numbers = range(args.first, args.first + args.scenarios)
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            for kind, ended, incomplete, messages in pool.map(lambda number: scenario(bench, number), numbers):
                kinds[kind] += 1
                succeeded += ended
                reported += incomplete
                wrong += messages
    print(f"{args.scenarios} scenarios ({', '.join(f'{kinds[kind]} {kind}' for kind in sorted(kinds))})")
    print(f"{succeeded} runs ended with exit code 0; {reported} incomplete outputs, reported with exit code 1")
    print(f"{len(wrong)} wrong", *wrong[:20], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
