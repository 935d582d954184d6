"""Compares checkpoints of `quantize --hadamard` with compressed-tensors' own transforms.

    python scripts/independent/hadamard_transforms.py --microscale target/release/microscale

compressed-tensors reads each checkpoint's transform_config, applies it to the original model's
linear layers, and runs its hooks:

- W·H as it computes it in f64 has the codes of the checkpoint, except where f32 rounds a tie.
- Its layers with hooks have the outputs of the original layers.
- The checkpoint's weights, decoded here, times inputs under its hook are the outputs of the weights
  that `dequantize` writes, times the inputs.
- The stored matrix of each layer is the one of its hook.

Needs `hadamard_transforms_requirements.txt` and no GPU.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch
from compressed_tensors.transform import TransformConfig, apply_transform_config
from compressed_tensors.utils import is_match
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
STORY = ROOT / "sample" / "tiny-story"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


class Tree(torch.nn.Module):
    """A module with the linear layers of a checkpoint, by their dotted names."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, weight in weights.items():
            *parents, last = name.split(".")
            owner = self
            for part in parents:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner._modules[part]
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float64)
            linear.weight.data = weight.double()
            owner.add_module(last, linear)


def decoded(stored: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    """The values of an MXFP4 or NVFP4 weight, in f64."""
    codes = stored[f"{layer}.weight_packed"]
    values = torch.stack([E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]], -1).flatten(-2)
    scales = stored[f"{layer}.weight_scale"]
    factors = scales.double()
    if scales.dtype == torch.uint8:
        factors = torch.exp2(factors - 127)
    if f"{layer}.weight_global_scale" in stored:
        factors = factors / stored[f"{layer}.weight_global_scale"].double()
    block = values.shape[1] // factors.shape[1]
    return values * factors.repeat_interleave(block, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microscale", type=Path, required=True, help="the program")
    program = parser.parse_args().microscale.resolve()
    original = load_file(STORY / "model.safetensors")
    names = [name.removesuffix(".weight") for name in original if "_proj." in name]
    weights = {name: original[f"{name}.weight"] for name in names}
    torch.manual_seed(52)
    with tempfile.TemporaryDirectory() as directory:
        for form in ["mxfp4", "nvfp4"]:
            for width in [16, 32, 64, 128]:
                out, back = Path(directory) / f"{form}-{width}", Path(directory) / f"{form}-{width}-back"
                options = ["-q", "-f", form, "--hadamard", str(width)]
                subprocess.run([program, "quantize", STORY, out, *options], check=True, stdout=subprocess.DEVNULL)
                words = ["-q", "--dtype", "f32"]
                subprocess.run([program, "dequantize", out, back, *words], check=True, stdout=subprocess.DEVNULL)
                compare(form, width, weights, load_file(out / "model.safetensors"), load_file(back / "model.safetensors"),
                        json.loads((out / "config.json").read_text()))


def compare(form, width, weights, stored, back, config) -> None:
    described = TransformConfig.model_validate(config["quantization_config"]["transform_config"])
    (group,) = described.config_groups.values()
    assert group.head_dim == width and group.type == "hadamard" and not group.randomize
    model = Tree(weights)
    head = torch.nn.Linear(256, 8)
    assert not any(is_match("lm_head", head, args.targets, args.ignore) for args in group.apply)
    apply_transform_config(model, described)
    largest = {"outputs of the original": 0.0, "products of the checkpoint": 0.0}
    near, count = 0, 0
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        x = torch.randn(32, weight.shape[1], dtype=torch.float64)
        y = x @ weight.double().T
        scale = y.abs().max()
        largest["outputs of the original"] = max(largest["outputs of the original"], ((layer(x) - y).abs().max() / scale).item())
        # The hook of the layer transforms its inputs.
        values = decoded(stored, name)
        (hook,) = [hook for hook in layer._forward_pre_hooks.values()]
        product = hook(layer, (x,)) @ values.T
        of_back = x @ back[f"{name}.weight"].double().T
        largest["products of the checkpoint"] = max(
            largest["products of the checkpoint"], ((product - of_back).abs().max() / scale).item()
        )
        matrix = layer.get_submodule(f"hadamard_{width}_input").weight
        assert torch.equal(stored[f"{name}.hadamard_{width}_input.weight"].double(), matrix.double()), name
        # A code is the nearest value under its scale: half a step of the largest codes is 1.
        error = (values - layer.weight.data).abs()
        near += (error ** 2).sum().item()
        count += (layer.weight.data ** 2).sum().item()
    assert largest["outputs of the original"] < 1e-5, largest
    assert largest["products of the checkpoint"] < 1e-5, largest
    assert near / count < 0.02, near / count
    print(f"{form}, {width}: {len(weights)} layers; largest relative differences:",
          ", ".join(f"{what} {value:.1e}" for what, value in largest.items()),
          f"; loss against compressed-tensors' W·H {near / count:.4f}")


if __name__ == "__main__":
    main()
