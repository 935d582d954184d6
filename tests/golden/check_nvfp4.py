"""Compares the NVFP4 golden vectors with the rules of each library, in correctly rounded float32.

    python check_nvfp4.py
    python check_nvfp4.py --verbose

Prints a table of differing blocks by file and case, and fails if it differs from a file's lists. With
`--verbose`, prints each differing block with both scale bytes and both code strings.

Numpy rounds every float32 operation once, to nearest even. README.md gives the same rules as formulas.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from safetensors import safe_open

from check_spec import unpack
from inputs import E2M1_TIES, E2M1_VALUES
from nvfp4_inputs import GROUP

NVFP4_VECTORS = Path(__file__).resolve().parent / "nvfp4"

F = np.float32
FLT_MAX = np.finfo(F).max
DTYPES = {"f32": np.dtype(F), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}


def e4m3(values: np.ndarray) -> np.ndarray:
    """Returns E4M3 bytes of non-negative float32 values, to nearest even, saturating at 448."""
    return np.minimum(values, F(448.0)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def from_e4m3(octets: np.ndarray) -> np.ndarray:
    return octets.view(ml_dtypes.float8_e4m3fn).astype(F)


def to_type(values: np.ndarray, type_name: str) -> np.ndarray:
    """Rounds float32 values to the type, and returns them as float32."""
    return values.astype(DTYPES[type_name]).astype(F)


def e2m1(quotients: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Returns codes of quotients, ties to even, saturating. `negative` selects the sign bits."""
    magnitudes = np.abs(quotients)
    codes = np.zeros(quotients.shape, np.uint8)
    for code, tie in enumerate(E2M1_TIES):
        codes += (magnitudes >= F(tie)) if code % 2 else (magnitudes > F(tie))
    return codes | negative.astype(np.uint8) << 3


class Torchao:
    """s = amax/2688; sf = e4m3(clamp((amax_b/6)/s, 2^-6, 448)); x·((1/s)/sf). Without s: amax_b/6 and x·(1/sf)."""

    direction = "multiplier"

    @staticmethod
    def global_scale(amax: np.float32, type_name: str) -> np.float32:
        return amax / F(2688.0)

    @staticmethod
    def scales(amax: np.ndarray, scale: np.float32 | None, type_name: str) -> np.ndarray:
        sixth = amax / F(6.0)
        return np.maximum(sixth if scale is None else sixth / scale, F(2.0**-6))

    @staticmethod
    def quotients(groups: np.ndarray, octets: np.ndarray, scale: np.float32 | None) -> tuple[np.ndarray, np.ndarray]:
        one = F(1.0) if scale is None else F(1.0) / scale
        quotients = groups * (one / from_e4m3(octets))[..., None]
        return quotients, np.signbit(quotients)

    @staticmethod
    def dequantize(values: np.ndarray, octets: np.ndarray, scale: np.float32 | None) -> np.ndarray:
        return values * (from_e4m3(octets) if scale is None else scale * from_e4m3(octets))[..., None]


class CompressedTensors:
    """sf = e4m3(min(G·T(amax_b/6), 448)), 0 becomes 0.125; x/(sf/G). G = T(T(1/max(amax, tiny))·2688), infinity becomes 1."""

    direction = "divisor"

    @staticmethod
    def global_scale(amax: np.float32, type_name: str) -> np.float32:
        smallest_normal = F(ml_dtypes.finfo(DTYPES[type_name]).smallest_normal)
        reciprocal = to_type(F(1.0) / np.maximum(amax, smallest_normal), type_name)
        scale = to_type(reciprocal * F(2688.0), type_name)
        return scale if np.isfinite(scale) else F(1.0)

    @staticmethod
    def scales(amax: np.ndarray, scale: np.float32, type_name: str) -> np.ndarray:
        return scale * to_type(amax / F(6.0), type_name)

    @staticmethod
    def replace_zero(octets: np.ndarray) -> np.ndarray:
        return np.where(octets == 0, np.uint8(0x20), octets)

    @staticmethod
    def quotients(groups: np.ndarray, octets: np.ndarray, scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
        quotients = groups / (from_e4m3(octets) / scale)[..., None]
        return quotients, groups < 0.0

    @staticmethod
    def dequantize(values: np.ndarray, octets: np.ndarray, scale: np.float32) -> np.ndarray:
        return (values * (from_e4m3(octets) / scale)[..., None]).astype(ml_dtypes.bfloat16)


class Modelopt:
    """s = amax/2688; t = amax_b/(6·s), 0 becomes 1; sf = e4m3(clamp(t, 2^-9, 448)); x/(sf·s)."""

    direction = "multiplier"

    @staticmethod
    def global_scale(amax: np.float32, type_name: str) -> np.float32:
        return amax / F(2688.0)

    @staticmethod
    def scales(amax: np.ndarray, scale: np.float32, type_name: str) -> np.ndarray:
        scales = amax / (F(6.0) * scale)
        return np.maximum(np.where(scales == 0.0, F(1.0), scales), F(2.0**-9))

    @staticmethod
    def quotients(groups: np.ndarray, octets: np.ndarray, scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
        quotients = groups / (from_e4m3(octets) * scale)[..., None]
        return quotients, groups < 0.0

    @staticmethod
    def dequantize(values: np.ndarray, octets: np.ndarray, scale: np.float32) -> np.ndarray:
        """Treats code 8 as +0."""
        return (values + F(0.0)) * (from_e4m3(octets) * scale)[..., None]


class TransformerEngine:
    """G = min(2688/amax, FLT_MAX), 0 becomes 1; sf = e4m3(min(amax_b·(G·(1/6)), 448)); x·min(1/(sf·(1/G)), FLT_MAX)."""

    direction = "divisor"

    @staticmethod
    def global_scale(amax: np.float32, type_name: str) -> np.float32:
        scale = np.fmin(F(2688.0) / amax, FLT_MAX)
        return F(1.0) if amax == 0.0 or scale == 0.0 else scale

    @staticmethod
    def scales(amax: np.ndarray, scale: np.float32, type_name: str) -> np.ndarray:
        return amax * (scale * (F(1.0) / F(6.0)))

    @staticmethod
    def quotients(groups: np.ndarray, octets: np.ndarray, scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
        factor = np.fmin(F(1.0) / (from_e4m3(octets) * (F(1.0) / scale)), FLT_MAX)
        quotients = groups * factor[..., None]
        return quotients, np.signbit(quotients)


CONVENTIONS = {
    "torchao": Torchao,
    "compressed-tensors": CompressedTensors,
    "modelopt": Modelopt,
    "transformer-engine": TransformerEngine,
}


def tensor_amax(rows: np.ndarray, convention: str) -> np.float32:
    """Returns the tensor's amax, or NaN if it has one. Transformer Engine's maximum ignores NaN."""
    reduce = np.fmax.reduce if convention == "transformer-engine" else np.max
    return F(reduce(np.abs(rows), axis=None))


@dataclass(frozen=True)
class Slip:
    """One finite block whose bytes differ from the rule."""

    case: str
    row: int
    block: int
    found: tuple[int, list[int]]
    expected: tuple[int, list[int]]

    def __str__(self) -> str:
        def text(byte: int, codes: list[int]) -> str:
            return f"{byte:3d} " + "".join(f"{code:x}" for code in codes)

        return (
            f"{self.case} row {self.row} block {self.block}: "
            f"library {text(*self.found)}  rule {text(*self.expected)}"
        )


@dataclass
class Findings:
    """The result of a comparison. Lists of blocks hold [case, row, block], others names of cases."""

    slips: list[Slip] = field(default_factory=list)
    degenerate: list[list] = field(default_factory=list)
    nonfinite: list[list] = field(default_factory=list)
    global_slips: list[str] = field(default_factory=list)
    dequantize_slips: list[list] = field(default_factory=list)

    def metadata(self) -> dict[str, str]:
        return {
            "slips": json.dumps([[slip.case, slip.row, slip.block] for slip in self.slips]),
            "degenerate": json.dumps(self.degenerate),
            "nonfinite": json.dumps(self.nonfinite),
            "global_slips": json.dumps(self.global_slips),
            "dequantize_slips": json.dumps(self.dequantize_slips),
        }


def same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compares bits elementwise. All NaN are equal."""
    bits = np.dtype(f"u{a.dtype.itemsize}")
    nan = np.isnan(a.astype(F)) & np.isnan(b.astype(F))
    return nan | (a.view(bits) == b.view(bits))


def compare_case(
    findings: Findings, name: str, arrays: dict[str, np.ndarray], convention: str, type_name: str, computed: bool
) -> None:
    """Adds the findings of one case. `arrays` holds its tensors, with the input widened to float32."""
    rule = CONVENTIONS[convention]
    rows, packed, octets = arrays["input"], arrays["codes"], arrays["scales"]
    scale = F(arrays["global_scale"][0]) if "global_scale" in arrays else None
    groups = rows.reshape(len(rows), -1, GROUP)
    codes = unpack(packed).reshape(groups.shape)
    finite = np.isfinite(groups).all(axis=-1)
    with np.errstate(all="ignore"):
        if computed:
            expected_scale = rule.global_scale(tensor_amax(rows, convention), type_name)
            if not same_bits(np.array([expected_scale], F), np.array([scale], F)).all():
                findings.global_slips.append(name)
        factors = rule.scales(np.abs(groups).max(axis=-1), scale, type_name)
        expected_octets = e4m3(np.where(np.isnan(factors), F(0.0), factors))
        if rule is CompressedTensors:
            expected_octets = rule.replace_zero(expected_octets)
        quotients, negative = rule.quotients(groups, expected_octets, scale)
        expected_codes = e2m1(quotients, negative)
    degenerate = np.isnan(factors) | np.isnan(quotients).any(axis=-1)
    if scale is not None and (not np.isfinite(scale) or scale == 0.0):
        degenerate[:] = True
    for row, block in np.ndindex(finite.shape):
        if not finite[row, block]:
            findings.nonfinite.append([name, row, block])
        elif degenerate[row, block]:
            findings.degenerate.append([name, row, block])
        else:
            expected = int(expected_octets[row, block]), expected_codes[row, block].tolist()
            found = int(octets[row, block]), codes[row, block].tolist()
            if found != expected:
                findings.slips.append(Slip(name, row, block, found, expected))
    if "dequantized" in arrays:
        values = np.array(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), F)[codes]
        with np.errstate(all="ignore"):
            dequantized = rule.dequantize(values, octets, scale)
        same = same_bits(arrays["dequantized"].reshape(groups.shape), dequantized).all(axis=-1)
        findings.dequantize_slips += [[name, int(row), int(block)] for row, block in np.argwhere(~same)]


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


def find_nvfp4(
    tensors: dict[str, torch.Tensor], cases: list[str], convention: str, type_name: str, computed: bool
) -> Findings:
    """Compares all cases of one file."""
    findings = Findings()
    for case in cases:
        arrays = {
            name.removeprefix(f"{case}."): as_numpy(tensor)
            for name, tensor in tensors.items()
            if name.rpartition(".")[0] == case
        }
        arrays["input"] = arrays["input"].astype(F)
        compare_case(findings, case, arrays, convention, type_name, computed)
    return findings


def check_file(path: Path, verbose: bool) -> bool:
    """Prints one file's findings by case. Returns whether its metadata lists the same ones."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    variant, type_name = path.stem.rsplit("-", 2)[1:]
    cases = json.loads(metadata["cases"])
    findings = find_nvfp4(tensors, cases, metadata["convention"], type_name, variant == "computed")
    blocks = sum(tensors[f"{case}.scales"].numel() for case in cases)
    print(
        f"{path.name}: {len(findings.slips)} of {blocks} blocks differ, "
        f"{len(findings.degenerate)} degenerate, {len(findings.nonfinite)} nonfinite, "
        f"{len(findings.global_slips)} global scales and {len(findings.dequantize_slips)} dequantized blocks differ"
    )
    for case, count in Counter(slip.case for slip in findings.slips).items():
        print(f"    {case}: {count}")
    for name in ("global_slips", "dequantize_slips"):
        if getattr(findings, name):
            print(f"    {name}: {getattr(findings, name)[:12]}")
    if verbose:
        for slip in findings.slips:
            print(f"    {slip}")
        print(f"    degenerate: {dict(Counter(case for case, _, _ in findings.degenerate))}")
    stale = [name for name, value in findings.metadata().items() if metadata[name] != value]
    for name in stale:
        print(f"    the file's metadata lists other {name}: {metadata[name]}")
    return not stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", action="store_true", help="list every differing block")
    arguments = parser.parse_args()
    paths = [path for path in sorted(NVFP4_VECTORS.glob("*.safetensors")) if "tables" not in path.name]
    results = [check_file(path, arguments.verbose) for path in paths]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
