"""Makes mma/: k-steps of Blackwell's block-scaled `mma.sync` in FP4, computed by MMA-Sim.

    python make_mma.py           # rewrites the files
    python make_mma.py --check   # fails if any file differs from new output

MMA-Sim is not on PyPI. Put a checkout of github.com/microsoft/MMA-Sim at commit c785138 on PYTHONPATH.

A file has 16 instructions of 16 x 8 results. `a` and `b` are packed codes, [16, 16 or 8, 32], with
one row per row of A and per column of B. `scale_a` and `scale_b` are bytes, [16, 16 or 8, blocks].
`c` and `d` are accumulators before and after, [16, 16, 8].
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from mmasim.simulator.nv_ptx import mma_block_scale
from safetensors.torch import save_file

from golden_common import File, matches

GOLDEN = Path(__file__).resolve().parent / "mma"
COMMIT = "c785138"
INSTRUCTIONS = 16

# The qualifier, and the range of scale bytes that ordinary tensors have.
KINDS = {
    "nvfp4": ("m16n8k64.block16.f32.e2m1.e2m1.f32.ue4m3", (0x28, 0x50), 0x7F),
    "mxfp4": ("m16n8k64.block32.f32.e2m1.e2m1.f32.ue8m0", (112, 128), 0xFF),
}


def file(kind: str) -> File:
    """Returns the operands and results of one kind."""
    qualifier, ordinary, nan = KINDS[kind]
    mma = mma_block_scale("RTX Blackwell", qualifier)
    random = torch.Generator().manual_seed(51)
    blocks = mma.k // mma.block_size

    def integers(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    steps: dict[str, list[torch.Tensor]] = {name: [] for name in ("a", "b", "scale_a", "scale_b", "c", "d")}
    for instruction in range(INSTRUCTIONS):
        codes = [integers(0, 256, (rows, mma.k // 2)).to(torch.uint8) for rows in (mma.m, mma.n)]
        if instruction % 4 == 3:
            # Sums of groups are often zero.
            codes = [code * (integers(0, 8, code.shape) == 0) for code in codes]
        # Ordinary scales, then any, rarely NaN.
        low, high = ordinary if instruction % 2 == 0 else (0, nan)
        scales = [integers(low, high, (rows, blocks)).to(torch.uint8) for rows in (mma.m, mma.n)]
        if instruction % 8 == 1:
            scales[0][0, 0] = nan
        # Accumulators near the sums, then any exponent, rarely zero, subnormal, or NaN.
        span = (120, 140) if instruction % 2 == 0 else (0, 255)
        bits = integers(*span, (mma.m, mma.n)) << 23 | integers(0, 1 << 23, (mma.m, mma.n))
        c = (bits | integers(0, 2, bits.shape) << 31).to(torch.uint32)
        c[0, 0], c[1, 1] = (0, 0x7F800001) if instruction % 8 == 1 else (0, 0x80000000)
        d = mma(
            codes[0],
            codes[1].T,
            c.view(torch.float32),
            scales[0].view(mma.s_type),
            scales[1].view(mma.s_type).T,
        )
        for name, tensor in zip(steps, (*codes, *scales, c.view(torch.float32), d)):
            steps[name].append(tensor)
    tensors = {name: torch.stack(step).contiguous() for name, step in steps.items()}
    return tensors, {"library": "MMA-Sim", "commit": COMMIT, "instruction": qualifier}


def main() -> None:
    """Writes or compares the files."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="compare instead of writing")
    check = arguments.parse_args().check
    for kind in KINDS:
        tensors, metadata = file(kind)
        path = GOLDEN / f"mma-sim-{COMMIT}-{kind}.safetensors"
        same = matches(path, tensors, metadata)
        if not same and check:
            sys.exit(f"{path.name} differs")
        if not same:
            save_file(tensors, path, metadata)
        print(f"{path.name}: {'the same' if same else 'written'}")


if __name__ == "__main__":
    main()
