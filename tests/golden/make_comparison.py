"""Makes nf4/ and mxfp4-e3m0/ with bitsandbytes and microxcaling, for the comparison formats.

    python make_comparison.py           # rewrites both folders
    python make_comparison.py --check   # fails if a file differs from new output

README.md describes the files. Nothing here computes a scale or a code. bitsandbytes runs on a CPU.
microxcaling is not on PyPI: without a checkout on PYTHONPATH its folder is skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import save

from golden_common import File, Tensors, as_torch, matches
from inputs import BLOCK, golden_input

GOLDEN = Path(__file__).resolve().parent
SEED = 20_261_122
NF4_BLOCK = 64
MICROXCALING = "7bc4195"
E3M0_VALUES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)

FLOATS = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def with_amax(row: np.ndarray, amax: float) -> np.ndarray:
    """Rounds the row's largest magnitude to bf16, so that the scale is exact in every type."""
    row = np.array(row, dtype=np.float64)
    row[np.argmax(np.abs(row))] = amax
    return np.clip(row, -amax, amax)


def nf4_groups(kind: str) -> dict[str, list[np.ndarray]]:
    """Returns rows of one block each, as float64. Their amaxes are exact in bf16 and in the type."""
    random = np.random.default_rng(SEED)
    exponents = range(-14, 15) if kind == "f16" else range(-120, 121, 4)
    mantissas = lambda: 1 + random.integers(0, 128) / 128
    code = __import__("bitsandbytes").functional.get_4bit_type("nf4", device="cpu")
    middles = ((code[:-1] + code[1:]) / 2).numpy()
    around = [np.nextafter(middles, np.float32(side)) for side in (-2, 2)]
    ties = np.concatenate([middles, *around, [1.0, -1.0, 0.0, -0.0]]).astype(np.float64)
    ties = np.concatenate([ties, np.full(NF4_BLOCK - len(ties), 0.5)])
    sweep = np.arange(0x3400, 0x3F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    sweep = np.concatenate([sweep, -sweep])
    sweep = np.concatenate([sweep, np.zeros(-len(sweep) % (NF4_BLOCK - 1))]).reshape(-1, NF4_BLOCK - 1)
    tails = lambda: random.standard_normal(NF4_BLOCK) ** 3
    groups = {
        "normal": [with_amax(random.standard_normal(NF4_BLOCK) * 2.0**e, mantissas() * 2.0 ** (e + 1)) for e in exponents],
        "heavy-tailed": [with_amax(tails(), mantissas() * 8) for _ in range(16)],
        "ties": [ties * 2.0**e for e in (-3, 0, 5)],
        "sweep": [np.concatenate([row, [amax]]) for amax in (1.0, 1.7734375) for row in sweep],
        "zero": [np.zeros(NF4_BLOCK), -np.zeros(NF4_BLOCK)],
        "one-element": [np.eye(NF4_BLOCK)[i] * value for i, value in ((0, 3.0), (63, -0.375), (31, 2.0**-10))],
    }
    if kind != "f16":
        largest = 2.0**128 - 2.0**120
        groups["largest"] = [with_amax(random.standard_normal(NF4_BLOCK) * 2.0**126, largest) for _ in range(4)]
        groups["smallest-normal"] = [random.uniform(-1, 1, NF4_BLOCK) * 2.0**-125 for _ in range(2)]
        groups["smallest-normal"] = [with_amax(row, 2.0**-125) for row in groups["smallest-normal"]]
        groups["below-1e-38"] = [with_amax(random.uniform(-1, 1, NF4_BLOCK) * 2.0**e, 2.0**e) for e in (-127, -128, -130)]
    return groups


def nf4_file(kind: str) -> File:
    """Returns bitsandbytes' output for rows of one type. Its first element is in the high nibble."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    rows, ranges = [], []
    for name, group in nf4_groups(kind).items():
        ranges.append([name, len(rows), len(rows) + len(group) - 1])
        rows += group
    with np.errstate(over="ignore"):
        values = as_torch(np.stack(rows).astype(np.float32).astype(FLOATS[kind]))
    packed, state = quantize_4bit(values, blocksize=NF4_BLOCK, quant_type="nf4")
    packed = packed.reshape(len(rows), NF4_BLOCK // 2)
    scales = state.absmax.to(torch.bfloat16).reshape(-1, 1)
    assert torch.equal(scales.to(torch.float32).reshape(-1), state.absmax), "an absmax that bf16 does not have"
    tensors = {
        "input": values,
        "codes": packed >> 4 | packed << 4,
        "scales": scales,
        "dequantized": dequantize_4bit(packed.reshape(-1, 1), state).reshape(values.shape),
    }
    metadata = {
        "library": "bitsandbytes",
        "version": version("bitsandbytes"),
        "torch": torch.__version__.split("+")[0],
        "function": "bitsandbytes.functional.quantize_4bit, blocksize=64, quant_type='nf4', then dequantize_4bit, CPU",
        "groups": json.dumps(ranges),
    }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, metadata


def nf4_table() -> File:
    """Returns the codebook, and its midpoints from bitsandbytes' CPU path."""
    from bitsandbytes.backends.default.ops import _get_4bit_quantize_bounds
    from bitsandbytes.functional import get_4bit_type

    bounds, _ = _get_4bit_quantize_bounds("nf4", torch.device("cpu"))
    tensors = {"values": get_4bit_type("nf4", device="cpu"), "midpoints": bounds}
    return tensors, {"library": "bitsandbytes", "version": version("bitsandbytes")}


def nf4_files() -> dict[str, File]:
    stem = f"bitsandbytes-{version('bitsandbytes')}"
    return {f"{stem}-table.safetensors": nf4_table()} | {
        f"{stem}-{kind}.safetensors": nf4_file(kind) for kind in FLOATS
    }


def e3m0_codes(values: torch.Tensor) -> torch.Tensor:
    """Returns the codes of E3M0 values, with -0 as code 8. NaN has no code and becomes 7."""
    magnitudes = torch.searchsorted(torch.tensor(E3M0_VALUES), values.abs().contiguous()).clamp(max=7)
    return (magnitudes | torch.signbit(values).to(torch.int64) << 3).to(torch.uint8)


def e3m0_parameters() -> tuple[int, int, int, float, float]:
    """ebits, mbits (sign and implicit bit included), emax, the largest and the smallest normal number, as
    `_get_format_params` derives them for its own formats without NaN."""
    from mx.formats import _get_min_norm

    ebits, mbits = 3, 2
    emax = 2 ** (ebits - 1)
    return ebits, mbits, emax, 2**emax * float(2 ** (mbits - 1) - 1) / 2 ** (mbits - 2), _get_min_norm(ebits)


def e3m0_rows() -> File:
    from mx.formats import _FORMAT_CACHE
    from mx.mx_ops import _quantize_mx, _shared_exponents

    element = ("e3m0",)
    _FORMAT_CACHE[element] = e3m0_parameters()
    golden = golden_input("f32")
    rows = as_torch(golden.rows)
    numbers = _quantize_mx(rows.clone(), 8, element, axes=[-1], block_size=BLOCK, round="even")
    blocks = rows.reshape(len(rows), -1, BLOCK)
    emax = _FORMAT_CACHE[element][2]
    exponents = (_shared_exponents(blocks, axes=[-1]).squeeze(-1) - emax).clamp(min=-127)
    values = numbers.to(torch.float64).reshape(blocks.shape) / torch.exp2(exponents.to(torch.float64)).unsqueeze(-1)
    codes = e3m0_codes(values.to(torch.float32).reshape(len(rows), -1))
    octets = torch.nan_to_num(exponents + 127, nan=255.0, posinf=255.0).to(torch.uint8)
    metadata = {
        "library": "microxcaling",
        "version": MICROXCALING,
        "torch": torch.__version__.split("+")[0],
        "function": "mx.mx_ops._quantize_mx, 3 bits of exponent and none of mantissa, block 32, round='even'; bytes from "
        "mx.mx_ops._shared_exponents",
        "groups": json.dumps(golden.groups),
    }
    return {"input": rows, "codes": codes[:, 0::2] | codes[:, 1::2] << 4, "scales": octets}, metadata


def e3m0_table() -> File:
    """Returns the code of every 16-bit float by `_quantize_elemwise_core`. NaN's is meaningless."""
    from mx.elemwise_ops import _quantize_elemwise_core

    ebits, mbits, _, largest, _ = e3m0_parameters()
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    tensors = {}
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        # Infinities stay infinite, beyond the largest code, which replaces them.
        values = _quantize_elemwise_core(
            patterns.view(dtype).to(torch.float32), mbits, ebits, largest, round="even", saturate_normals=True
        )
        tensors[f"e3m0_from_{name}"] = e3m0_codes(values)
    metadata = {
        "library": "microxcaling",
        "version": MICROXCALING,
        "torch": torch.__version__.split("+")[0],
        "function": "mx.elemwise_ops._quantize_elemwise_core, bits=2, exp_bits=3, round='even', saturate_normals=True",
    }
    return tensors, metadata


def e3m0_files() -> dict[str, File]:
    stem = f"microxcaling-{MICROXCALING}"
    return {f"{stem}-floor-f32.safetensors": e3m0_rows(), f"{stem}-tables.safetensors": e3m0_table()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the files, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folders = {"nf4": nf4_files}
    if find_spec("mx"):
        folders["mxfp4-e3m0"] = e3m0_files
    else:
        print("no module mx: mxfp4-e3m0/ is left alone", file=sys.stderr)
    stale = []
    for folder, make_files in folders.items():
        vectors = GOLDEN / folder
        files = make_files()
        changed = [name for name, made in files.items() if not matches(vectors / name, *made)]
        if arguments.check:
            unknown = {path.name for path in vectors.glob("*.safetensors")} - set(files)
            stale += [f"{folder}/{name}" for name in changed + sorted(unknown)]
            continue
        vectors.mkdir(exist_ok=True)
        for name in changed:
            (vectors / name).write_bytes(save(*files[name]))
    for name in stale:
        print(f"differs: {name}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
