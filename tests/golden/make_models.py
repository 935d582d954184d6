"""Makes models/: small random causal language models of transformers, with logits and hidden states.

    python make_models.py           # rewrites the files
    python make_models.py --check   # fails if any file differs from new output

models/README.md describes the files. Every forward pass is transformers' own. The script also fails
if a tensor of a model, or a setting listed in `MODELS`, has no effect on the logits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load, save
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

GOLDEN = Path(__file__).resolve().parent / "models"
TOKENS = 24
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Large enough to matter next to the mean square of a row.
    "rms_norm_eps": 0.01,
}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
GLOBAL = {"rope_type": "default", "rope_theta": 1000000.0}
# With 48 original positions some frequencies are kept, some divided and two interpolated.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
# The real model's, but with 512 original positions: both ends of the ramp are inside the head.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 512,
}
# A change of a tensor or of a setting changes a logit by at least this.
LEAST_EFFECT = 5e-4
# The least difference between the router logits of the last expert selected and of the next one.
# The seeds of the models with experts were selected for it.
LEAST_MARGIN = 0.1
# The order of sums depends on the processor. `--check` accepts these parts of the largest value.
ROUNDING = {"tokens": 0, "logits_f32": 1e-5, "logits_bf16": 0.03, "hidden_f32": 1e-5}


@dataclass
class Golden:
    """A model: its architecture, seed and settings, and other settings that must change the logits."""

    architecture: str
    seed: int
    settings: dict
    changes: list[dict]

    def model_class(self) -> type[PreTrainedModel]:
        return getattr(transformers, f"{self.architecture}ForCausalLM")

    def config(self, **changes: object) -> PreTrainedConfig:
        return self.model_class().config_class(**deepcopy(SMALL | self.settings | changes))


def rope(parameters: dict, **changes: object) -> dict:
    return {"rope_parameters": parameters | changes}


def layers(local: dict, full: dict) -> dict:
    return {"rope_parameters": {"sliding_attention": local, "full_attention": full}}


EPS = {"rms_norm_eps": 1e-6}
WINDOWS = [{"sliding_window": 7}, {"sliding_window": 9}]
SWAPPED = {"layer_types": ["full_attention", "sliding_attention"]}
MODELS = {
    "llama": Golden("Llama", 1, rope(LOCAL), [EPS, rope(LOCAL, rope_theta=20000.0)]),
    "llama3": Golden(
        "Llama",
        2,
        rope(LLAMA3) | {"head_dim": 32, "tie_word_embeddings": True},
        [
            EPS,
            rope(GLOBAL, rope_theta=500000.0),
            rope(LLAMA3, factor=6.0),
            rope(LLAMA3, low_freq_factor=2.0),
            rope(LLAMA3, high_freq_factor=6.0),
            rope(LLAMA3, original_max_position_embeddings=32),
        ],
    ),
    "mistral": Golden("Mistral", 3, rope(LOCAL) | {"sliding_window": 8}, [EPS, rope(GLOBAL), *WINDOWS]),
    "qwen2": Golden("Qwen2", 4, rope(GLOBAL) | {"tie_word_embeddings": True}, [EPS, rope(LOCAL)]),
    "qwen3": Golden("Qwen3", 5, rope(GLOBAL) | {"head_dim": 32, "tie_word_embeddings": True}, [EPS, rope(LOCAL)]),
    "gemma3_text": Golden(
        "Gemma3",
        6,
        layers(LOCAL, GLOBAL)
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        [
            EPS,
            *WINDOWS,
            SWAPPED,
            layers(LOCAL, LOCAL),
            layers(GLOBAL, GLOBAL),
            {"query_pre_attn_scalar": 32},
            {"hidden_activation": "gelu"},
        ],
    ),
    "qwen3_moe": Golden(
        "Qwen3Moe",
        75,
        rope(GLOBAL)
        | {
            "head_dim": 32,
            "mlp_only_layers": [0],
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        [EPS, rope(LOCAL), {"norm_topk_prob": False}, {"num_experts_per_tok": 1}, {"num_experts_per_tok": 3}],
    ),
    "gpt_oss": Golden(
        "GptOss",
        46,
        rope(YARN)
        | {
            "head_dim": 32,
            "max_position_embeddings": 16384,
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "sliding_window": 8,
        },
        [
            EPS,
            *WINDOWS,
            SWAPPED,
            rope(GLOBAL, rope_theta=150000.0),
            rope(YARN, factor=16.0),
            rope(YARN, original_max_position_embeddings=1024),
            rope(YARN, truncate=True),
            rope(YARN, attention_factor=1.0),
            rope(YARN, beta_fast=16.0),
            rope(YARN, beta_slow=2.0),
            {"num_experts_per_tok": 1},
            {"swiglu_limit": 8.0},
            {"swiglu_alpha": 1.0},
        ],
    ),
}


def values(name: str, shape: torch.Size, golden: Golden, random: torch.Generator) -> torch.Tensor:
    """Returns random values of a size at which each tensor matters."""
    noise = torch.randn(shape, generator=random)
    if "norm" in name:
        return noise * 0.2 + (0.0 if golden.architecture == "Gemma3" else 1.0)
    if name.endswith("sinks"):
        return noise
    if name.endswith("bias"):
        return noise * 0.3
    if name.endswith("embed_tokens.weight"):
        return noise * (0.125 if golden.config().tie_word_embeddings else 0.5)
    if name.endswith(("router.weight", "mlp.gate.weight")):
        return noise * 0.3
    if golden.architecture == "GptOss" and name.endswith("experts.gate_up_proj"):
        # Large enough to reach the limits of gate and up.
        return noise * 0.4
    inputs = shape[-2] if golden.architecture == "GptOss" and len(shape) == 3 else shape[-1]
    return noise * inputs**-0.5


def save_model(golden: Golden, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors`."""
    model = golden.model_class()(golden.config()).to(torch.bfloat16)
    random = torch.Generator().manual_seed(golden.seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(values(name, parameter.shape, golden, random))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def loaded(golden: Golden, folder: Path, dtype: torch.dtype, **changes: object) -> PreTrainedModel:
    config = golden.config(**changes) if changes else None
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return golden.model_class().from_pretrained(folder, config=config, dtype=dtype, **implementations).eval()


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[None], use_cache=False).logits[0].float()


def observed(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], float]:
    """Returns logits, hidden states, the experts of each token and layer, and the least margin."""
    hidden, experts, margins = [], [], [float("inf")]

    def routed(module: torch.nn.Module, _: tuple, output: tuple[torch.Tensor, ...]) -> None:
        ordered = output[0].float().sort(descending=True).values
        margins.append((ordered[:, module.top_k - 1] - ordered[:, module.top_k]).min().item())
        experts.append(output[2].sort().values)

    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0][0]))
    model.model.layers[-1].register_forward_hook(lambda _, inputs, output: hidden.append(output[0]))
    for module in model.modules():
        if isinstance(module, GptOssTopKRouter | Qwen3MoeTopKRouter):
            module.register_forward_hook(routed)
    logits = logits_of(model, tokens)
    with torch.no_grad():
        assert torch.equal(model.lm_head(model.model.norm(hidden[-1])).float(), logits)
    return logits, torch.stack(hidden).float(), experts, min(margins)


def check_effects(golden: Golden, folder: Path, tokens: torch.Tensor, expected: torch.Tensor) -> float:
    """Fails if a tensor, an expert or a listed setting does not matter. Returns the least effect."""
    random = torch.Generator().manual_seed(0)
    model = loaded(golden, folder, torch.float32)
    assert torch.equal(logits_of(model, tokens), expected)
    effects = {}
    for name, parameter in model.named_parameters():
        pieces = parameter.data if "experts." in name else parameter.data[None]
        for index, piece in enumerate(pieces):
            before = piece.clone()
            piece.add_(torch.randn(piece.shape, generator=random) * piece.std() * 0.25)
            effects[f"{name} {index}"] = (logits_of(model, tokens) - expected).abs().max().item()
            piece.copy_(before)
    for change in golden.changes:
        changed = logits_of(loaded(golden, folder, torch.float32, **change), tokens)
        effects[str(change)] = (changed - expected).abs().max().item()
    name, least = min(effects.items(), key=lambda effect: effect[1])
    assert least >= LEAST_EFFECT, f"{name} changes the logits by only {least:.1e}"
    return least


def made(golden: Golden, folder: Path) -> tuple[dict[str, bytes], str]:
    """Returns the contents of a model's files, made in an empty folder, and a line about them."""
    save_model(golden, folder)
    tokens = torch.randint(SMALL["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(100 + golden.seed))
    logits, hidden, experts, margin = observed(loaded(golden, folder, torch.float32), tokens)
    logits_bf16, _, experts_bf16, _ = observed(loaded(golden, folder, torch.bfloat16), tokens)
    # Otherwise a tiny error in a router would change the experts of a token, and all its logits.
    assert margin >= LEAST_MARGIN, f"margin {margin:.4f}"
    assert all(map(torch.equal, experts, experts_bf16)), "other experts in bfloat16"
    least = check_effects(golden, folder, tokens, logits)
    tensors = {"tokens": tokens, "logits_f32": logits, "logits_bf16": logits_bf16, "hidden_f32": hidden}
    torch_version = torch.__version__.split("+")[0]
    # One string, because the order of several is not fixed.
    source = f"transformers {transformers.__version__}, torch {torch_version}, {golden.architecture}ForCausalLM, eager"
    files = {file: (folder / file).read_bytes() for file in ("config.json", "model.safetensors")}
    files["logits.safetensors"] = save(tensors, {"source": source})
    difference = (logits - logits_bf16).abs().max()
    text = f"logits up to {logits.abs().max():.2f}, bf16 differs by up to {difference:.3f}, least effect {least:.1e}"
    return files, text + (f", margin {margin:.3f}" if experts else "")


def same(path: Path, content: bytes) -> bool:
    """Returns whether a file has this content. Logits and hidden states may differ by rounding."""
    if not path.exists():
        return False
    found = path.read_bytes()
    if path.name != "logits.safetensors" or found == content:
        return found == content
    old, new = load(found), load(content)
    alike = old.keys() == new.keys() and all(old[name].shape == new[name].shape for name in new)
    return alike and all((old[name] - new[name]).abs().max() <= ROUNDING[name] * old[name].abs().max() for name in new)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check, wrong = parser.parse_args().check, 0
    # The order of sums may depend on the number of threads.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name, golden in MODELS.items():
        with tempfile.TemporaryDirectory() as temporary:
            files, text = made(golden, Path(temporary))
        for file, content in files.items():
            path = GOLDEN / name / file
            is_same = same(path, content)
            if not check and not is_same:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            wrong += check and not is_same
            print(f"{'same   ' if is_same else 'differs' if check else 'written'}  {name}/{file}")
        print(f"         {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
