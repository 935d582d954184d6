"""Makes activations/: rows that libraries quantize, and results of gates and RMSNorm.

    python make_activations.py           # rewrites the files
    python make_activations.py --check   # fails if any file differs from new output

README.md describes the files. Nothing here computes a scale, a code or a result of a row operation.
`te_formula.py` only checks that the rows of NVFP4 are rows on which torchao equals its formula.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import save_file
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale
from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8
from transformers import GptOssConfig
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.utils.quantization_config import FineGrainedFP8Config

import te_formula
from golden_common import File, Tensors, matches

GOLDEN = Path(__file__).resolve().parent / "activations"
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
COLUMNS = 256
GROUP = 128
# A power of two, so that it is the same number in every type.
EPSILON = 2.0**-20
# vLLM's least amax of a token and of a group. torchao takes them as a limit.
LEAST_TOKEN = 1.0 / 512.0
LEAST_GROUP = 1e-10


def metadata(library: str, function: str) -> dict[str, str]:
    torch_version = torch.__version__.split("+")[0]
    library_version = torch_version if library == "torch" else version(library)
    return {"library": library, "version": library_version, "torch": torch_version, "function": function}


def signed(magnitudes: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    return torch.where(torch.rand(magnitudes.shape, generator=random) < 0.5, -magnitudes, magnitudes)


def e4m3_ties() -> torch.Tensor:
    """Returns each midpoint of neighbouring magnitudes of E4M3, with the f32 just below and above."""
    magnitudes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (magnitudes[:-1] + magnitudes[1:]) / 2
    infinity = torch.full_like(ties, torch.inf)
    return torch.cat((ties, torch.nextafter(ties, -infinity), torch.nextafter(ties, infinity)))


def fp8_rows(type_name: str) -> torch.Tensor:
    """Returns rows of 256: ordinary ones of many magnitudes, ties, zeros, tiny and large values."""
    random = torch.Generator().manual_seed(41)
    largest, smallest = (15, -24) if type_name == "f16" else (120, -140)
    rows = []
    # Ordinary rows, and rows whose two groups have different magnitudes.
    for exponent in (0, 1, -3, 5, -9, 8, largest - 4, -20, -30, -40):
        exponent = max(exponent, smallest)
        rows.append(torch.randn(3, COLUMNS, generator=random) * 2.0**exponent)
        rows.append(torch.randn(1, COLUMNS, generator=random) * 2.0**exponent)
        rows[-1][:, GROUP:] *= 2.0**-7
    # With an amax of 448 · 2^k the scale is 2^k, and quotients are exact.
    ties = e4m3_ties()
    for exponent in (0, -9, 6):
        picked = signed(ties[torch.randperm(len(ties), generator=random)], random)
        picked = torch.cat((picked, torch.full((2 * COLUMNS - len(picked),), 447.0))).reshape(2, COLUMNS)
        picked[:, [0, GROUP]] = 448.0
        rows.append(picked * 2.0**exponent)
    # One large value among small ones, and values that round to zero.
    sparse = torch.randn(4, COLUMNS, generator=random) * 2.0**-10
    sparse[:, 77] = torch.tensor([-448.0, 3.0, 1000.0, 0.1])
    # Zeros of both signs, a zero group, tiny amax around the least ones, the type's extremes.
    zeros = torch.zeros(3, COLUMNS)
    zeros[1] = -0.0
    zeros[2, GROUP:] = torch.randn(GROUP, generator=random)
    tiny = torch.randn(8, COLUMNS, generator=random).clamp(-1, 1)
    tiny[:, [3, GROUP + 3]] = 1.0
    tiny *= torch.tensor([LEAST_TOKEN, LEAST_TOKEN * 1.01, LEAST_TOKEN * 0.99, 1e-4, LEAST_GROUP, 1.01e-10, 0.99e-10, 1e-20])[:, None]
    of_type = TYPES[type_name]
    extremes = signed(torch.rand(2, COLUMNS, generator=random), random) * torch.finfo(of_type).max
    extremes[0, 5] = torch.finfo(of_type).max
    extremes[1] = signed(torch.rand(COLUMNS, generator=random), random) * torch.finfo(of_type).tiny
    return torch.cat((*rows, sparse, zeros, tiny, extremes)).to(of_type)


def codes_and_scales(name: str, codes: torch.Tensor, scales: torch.Tensor) -> Tensors:
    return {f"{name}.codes": codes.view(torch.uint8), f"{name}.scales": scales.float().reshape(len(codes), -1)}


def torchao_fp8(type_name: str) -> File:
    """torchao widens f16 and bf16 only after it divided amax, so the rows are widened before."""
    rows = fp8_rows(type_name)
    wide, tensors = rows.float(), {"input": rows}
    for name, width, least in (("token", COLUMNS, LEAST_TOKEN), ("group", GROUP, LEAST_GROUP)):
        scales = _choose_scale_float8(wide, [1, width], hp_value_lb=least)
        tensors |= codes_and_scales(name, _quantize_affine_float8(wide, scales), scales)
    given = torch.tensor([0.037])
    tensors |= {"given.codes": _quantize_affine_float8(wide, given).view(torch.uint8), "given.scale": given}
    return tensors, metadata("torchao", "_choose_scale_float8 with hp_value_lb, _quantize_affine_float8")


def compressed_tensors_fp8() -> File:
    rows = fp8_rows("f32")
    tensors = {"input": rows}
    for name, strategy in (("token", {"strategy": "token"}), ("group", {"strategy": "group", "group_size": GROUP})):
        args = QuantizationArgs(num_bits=8, type="float", symmetric=True, dynamic=True, **strategy)
        tokens = rows.unsqueeze(0)
        scales, zero_points = compute_dynamic_scales_and_zp(tokens, args, module=None)
        if name == "group":
            # The forward pass of `group` takes matrices.
            tokens, scales, zero_points = rows, scales.squeeze(0), zero_points.squeeze(0)
        codes = quantize(tokens, scales, zero_points, args, dtype=torch.float8_e4m3fn)
        tensors |= codes_and_scales(name, codes.reshape(rows.shape), scales)
    return tensors, metadata("compressed-tensors", "compute_dynamic_scales_and_zp, quantize")


def transformers_powers(type_name: str) -> File:
    """Scales are powers of two, as in DeepSeek-V3.1: blocks of one row by 128 columns."""
    config = FineGrainedFP8Config(weight_block_size=(1, GROUP), scale_fmt="ue8m0")
    rows = fp8_rows(type_name)
    quantized = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"rows": rows})
    tensors = {"input": rows} | codes_and_scales("power", *quantized.values())
    return tensors, metadata("transformers", "Fp8Quantize, scale_fmt ue8m0")


def packed(codes: np.ndarray, scales: np.ndarray) -> tuple[bytes, bytes]:
    return codes.tobytes(), scales.tobytes()


def nvfp4_rows(type_name: str, exponent: int) -> torch.Tensor:
    """Returns rows with an amax of 2688 · 2^exponent, on whose blocks torchao equals the formula.

    torchao's scales are at least 2^-6, and it divides by 6 where the formula multiplies by 1/6 in f32.
    """
    random = torch.Generator().manual_seed(43 + exponent)
    rows = torch.randn(160, COLUMNS, generator=random) * 2.0 ** torch.randint(-3, 9, (160, COLUMNS // 16), generator=random).repeat_interleave(16, 1)
    steps = torch.tensor([0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.0, 0.0, -0.25, -1.75, -5.0])
    # Blocks with an amax of 6 · 2^k. Their quotients are ties.
    for row in range(0, 160, 5):
        rows[row, 32:64] = steps[torch.randint(len(steps), (32,), generator=random)] * 2.0 ** (row % 8)
        rows[row, [32, 48]] = 6.0 * 2.0 ** (row % 8)
    rows = rows.clamp(-2600, 2600)
    rows[:, 20] = 2688.0
    rows = (rows * 2.0**exponent).to(TYPES[type_name])
    scale = torch.tensor(2.0**exponent)
    keep = []
    for i, row in enumerate(rows):
        scales, codes = nvfp4_quantize(row[None], per_tensor_scale=scale)
        formula = te_formula.quantize(row[None].float().numpy(), np.float32(2.0**-exponent))
        if packed(codes.numpy(), scales.view(torch.uint8).numpy()) == packed(*formula):
            keep.append(i)
    assert len(keep) >= 140, f"only {len(keep)} rows"
    return rows[keep][:140].contiguous()


def torchao_nvfp4(type_name: str) -> File:
    """A given global scale with swizzled block scales, and a global scale per row."""
    rows = nvfp4_rows(type_name, -5)
    scale = torch.tensor(2.0**-5)
    made = NVFP4Tensor.to_nvfp4(rows, per_tensor_scale=scale, is_swizzled_scales=True)
    tensors = {"given.input": rows, "given.codes": made.qdata.view(torch.uint8), "given.scale": scale.reshape(1)}
    tensors["given.swizzled"] = made.scale.view(torch.uint8).flatten()
    rows = torch.cat([nvfp4_rows(type_name, exponent)[:12] for exponent in (-5, 0, 3, -11, -40)])
    results = []
    for row in rows:
        scale = per_tensor_amax_to_scale(row.abs().max())
        scales, codes = nvfp4_quantize(row[None], per_tensor_scale=scale)
        results.append((codes, scales.view(torch.uint8), scale.reshape(1)))
    codes, scales, row_scales = (torch.cat(parts) for parts in zip(*results, strict=True))
    tensors |= {"token.input": rows, "token.codes": codes, "token.scales": scales, "token.row_scales": row_scales}
    return tensors, metadata("torchao", "NVFP4Tensor.to_nvfp4, nvfp4_quantize, per_tensor_amax_to_scale")


def torchao_swizzled() -> File:
    """MXFP8 and MXFP4 with scales in tiles of 128x4, of rows and blocks that leave padding."""
    random = torch.Generator().manual_seed(44)
    rows = torch.randn(150, 160, generator=random) * 2.0 ** torch.randint(-20, 20, (150, 1), generator=random)
    rows[7], rows[140] = 0.0, -0.0
    rows = rows.to(torch.bfloat16)
    tensors = {"input": rows}
    for name, element in (("mxfp8", torch.float8_e4m3fn), ("mxfp4", torch.float4_e2m1fn_x2)):
        made = MXTensor.to_mx(rows, element, 32, ScaleCalculationMode.FLOOR, is_swizzled_scales=True)
        tensors[f"{name}.codes"] = made.qdata.view(torch.uint8)
        tensors[f"{name}.swizzled"] = made.scale.view(torch.uint8).flatten()
    return tensors, metadata("torchao", "MXTensor.to_mx, floor, is_swizzled_scales")


def gate_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns gates and `up` in f32: ordinary, large and small ones, and beyond gpt-oss' limits."""
    random = torch.Generator().manual_seed(45)
    shape = (48, 160)
    gate, up = torch.randn(shape, generator=random) * 3, torch.randn(shape, generator=random) * 3
    gate *= 2.0 ** torch.randint(-12, 6, (shape[0], 1), generator=random)
    up *= 2.0 ** torch.randint(-12, 6, (shape[0], 1), generator=random)
    special = torch.tensor([0.0, -0.0, 7.0, 7.5, -7.0, -7.5, 60.0, -60.0, 86.0, -86.0, -1e-3, 1e-30, -1e-30, 1e4, -1e4, -1.0])
    gate[:16, :16], up[:16, :16] = special, special[:, None]
    return gate, up


def torch_gates() -> File:
    """The functions of torch in float64."""
    gate, up = gate_inputs()
    wide = gate.double(), up.double()
    tensors = {"gate": gate, "up": up}
    tensors["silu"] = F.silu(wide[0]) * wide[1]
    tensors["gelu_tanh"] = F.gelu(wide[0], approximate="tanh") * wide[1]
    tensors["gelu"] = F.gelu(wide[0]) * wide[1]
    return tensors, metadata("torch", "silu(gate) * up, gelu(gate, approximate='tanh') * up, gelu(gate) * up, in float64")


def transformers_gate() -> File:
    """gpt-oss' gate in float64."""
    gate, up = gate_inputs()
    gate_up = torch.stack((gate, up), dim=-1).flatten(-2)
    config = GptOssConfig()
    experts = SimpleNamespace(alpha=config.swiglu_alpha, limit=config.swiglu_limit)
    assert (experts.alpha, experts.limit) == (1.702, 7.0)
    tensors = {"gate_up": gate_up, "gpt_oss": GptOssExperts._apply_gate(experts, gate_up.double())}
    return tensors, metadata("transformers", "GptOssExperts._apply_gate, in float64")


def norm_inputs(of_type: torch.dtype, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns x, a residual and weights."""
    random = torch.Generator().manual_seed(46 + columns)
    x, residual = (torch.randn(16, columns, generator=random) for _ in range(2))
    factors = 2.0 ** torch.tensor([0.0, 1, -1, 3, 8, -6, -10, -14, 12, 0, 0, 0, 2, -3, 5, 0])
    x, residual = x * factors[:, None], residual * factors[:, None]
    x[9], residual[9] = 0.0, 0.0
    # Rows with one large value, sums that nearly cancel, and rows of equal values.
    x[10, 3], x[11, columns - 1] = 1000.0, -4000.0
    residual[12] = -x[12] * (1 + 2.0**-7)
    x[13], residual[13] = 0.75, 0.25
    if columns > 1024:
        x, residual = x[[0, 5, 10, 12]], residual[[0, 5, 10, 12]]
    weight = 1 + torch.randn(columns, generator=random) * 0.3
    return x.to(of_type), residual.to(of_type), weight.to(of_type)


def transformers_norms(type_name: str) -> File:
    """RMSNorm of Llama and Gemma in the dtype of the rows, with and without a residual."""
    tensors = {}
    of_type = TYPES[type_name]
    for columns in (160, 1056):
        x, residual, weight = norm_inputs(of_type, columns)
        llama, gemma = LlamaRMSNorm(columns, eps=EPSILON), GemmaRMSNorm(columns, eps=EPSILON)
        with torch.no_grad():
            llama.weight.data, gemma.weight.data = weight, weight - 1
            added = x + residual
            made = {"x": x, "residual": residual, "added": added, "llama.weight": weight, "gemma.weight": weight - 1}
            made |= {"llama.plain": llama(x), "llama.added": llama(added)}
            made |= {"gemma.plain": gemma(x), "gemma.added": gemma(added)}
        tensors |= {f"{columns}.{name}": tensor for name, tensor in made.items()}
    return tensors, metadata("transformers", f"LlamaRMSNorm, GemmaRMSNorm, eps {EPSILON}")


def torch_norm() -> File:
    """torch's rms_norm in float64."""
    x, _, weight = norm_inputs(torch.float32, 160)
    expected = F.rms_norm(x.double(), [160], weight.double(), EPSILON)
    return {"x": x, "weight": weight, "rms_norm": expected}, metadata("torch", f"rms_norm, eps {EPSILON}, in float64")


def files() -> dict[str, File]:
    torch_version = torch.__version__.split("+")[0]
    torchao, transformers = f"torchao-{version('torchao')}", f"transformers-{version('transformers')}"
    made = {f"{torchao}-fp8-{type_name}": torchao_fp8(type_name) for type_name in TYPES}
    made |= {f"{torchao}-nvfp4-{type_name}": torchao_nvfp4(type_name) for type_name in ("f32", "bf16")}
    made[f"{torchao}-mx-bf16"] = torchao_swizzled()
    made[f"compressed-tensors-{version('compressed-tensors')}-fp8-f32"] = compressed_tensors_fp8()
    made |= {f"{transformers}-fp8-{type_name}": transformers_powers(type_name) for type_name in ("f32", "bf16")}
    made[f"torch-{torch_version}-gates-f32"] = torch_gates()
    made[f"{transformers}-gates-f32"] = transformers_gate()
    made[f"torch-{torch_version}-norms-f32"] = torch_norm()
    made |= {f"{transformers}-norms-{type_name}": transformers_norms(type_name) for type_name in TYPES}
    return {f"{name}.safetensors": file for name, file in made.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check, wrong = parser.parse_args().check, 0
    GOLDEN.mkdir(exist_ok=True)
    for name, (tensors, metadata) in files().items():
        path = GOLDEN / name
        same = matches(path, tensors, metadata)
        if not check and not same:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
        wrong += check and not same
        print(f"{'same   ' if same else 'differs' if check else 'written'}  {name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
