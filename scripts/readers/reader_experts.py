"""Checks for readers.py: split experts compute the same as transformers' merged experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import torch
from reader_program import Program, tensors
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear, silu
from transformers import Llama4TextConfig, Qwen3_5MoeTextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 3, 64, 96, 5


def llama4() -> tuple[str, nn.Module, Callable[[nn.Module, torch.Tensor], torch.Tensor]]:
    config = Llama4TextConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, hidden_act="silu")
    # Its rows are sorted by expert, the same number for each.
    return "llama4", Llama4TextExperts(config), lambda module, x: module(x.flatten(0, 1)).unflatten(0, (EXPERTS, TOKENS))


def qwen3_5() -> tuple[str, nn.Module, Callable[[nn.Module, torch.Tensor], torch.Tensor]]:
    config = Qwen3_5MoeTextConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, num_experts_per_tok=1, hidden_act="silu"
    )

    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(TOKENS, 1, dtype=x.dtype)
        return torch.stack([module(x[e], torch.full((TOKENS, 1), e), ones) for e in range(EXPERTS)])

    return "qwen3_5_moe", Qwen3_5MoeExperts(config), run


def same_products(program: Program, make: Callable[[], tuple]) -> list[str]:
    """Compares a layer with products of its experts, which the program split."""
    torch.manual_seed(0)
    model_type, module, run = make()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
        parameter.data = parameter.data.bfloat16()
    directory = program.new(model_type)
    directory.mkdir()
    weights = {f"model.layers.0.mlp.experts.{name}": weight.data for name, weight in module.named_parameters()}
    other = {"model.layers.0.self_attn.q_proj.weight": torch.randn(HIDDEN, HIDDEN).bfloat16()}
    save_file(weights | other, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, "text_config": {"hidden_size": HIDDEN}}))
    split = tensors(program.quantize(directory, "--format", "mxfp4", "--split-experts", "--exclude", "*.experts.*"))
    x = torch.randn(EXPERTS, TOKENS, HIDDEN, dtype=torch.float64)
    theirs = run(module.double(), x)

    def expert(number: int) -> torch.Tensor:
        gate, up, down = (
            split[f"model.layers.0.mlp.experts.{number}.{name}.weight"].double() for name in ("gate_proj", "up_proj", "down_proj")
        )
        return linear(silu(linear(x[number], gate)) * linear(x[number], up), down)

    ours = torch.stack([expert(number) for number in range(EXPERTS)])
    return [] if torch.allclose(ours, theirs, rtol=1e-12, atol=1e-9) else [f"{(ours - theirs).abs().max()} of {theirs.abs().max()}"]


def expert_checks(program: Program) -> dict[str, Callable[[], list[str]]]:
    made = {"Llama 4's": llama4, "Qwen3.5's": qwen3_5}
    return {f"transformers computes with {whose} experts of a layer the same as with split ones": partial(same_products, program, make) for whose, make in made.items()}
