"""Makes scaled/comfy-kitchen-*: NVFP4 and MXFP8 files of comfy-kitchen for ComfyUI.

    python make_comfyui.py                            # rewrites the files
    python make_comfyui.py --check                    # fails if a file differs from new output
    python make_comfyui.py --read OURS.safetensors --values OURS-f32.safetensors

With `--read`, compares the library's values of OURS with f32 values, bit for bit.

Each tensor X and its scales have ComfyUI's names. X.expected holds the library's values in f32. One
file names the format of each layer in tensors, the other in its metadata, which ComfyUI's
`convert_old_quants` reads.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from comfy_kitchen.tensor.mxfp8 import TensorCoreMXFP8Layout
from comfy_kitchen.tensor.nvfp4 import TensorCoreNVFP4Layout
from safetensors.torch import load_file, save_file

from golden_common import File, Tensors, matches

GOLDEN = Path(__file__).resolve().parent / "scaled"

LAYOUTS = {"nvfp4": TensorCoreNVFP4Layout, "mxfp8": TensorCoreMXFP8Layout}


def weights(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Returns weights with rows and columns of many magnitudes, some of them zeros."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=random)
    rows = torch.randint(-4, 4, (shape[0], 1), generator=random)
    columns = torch.randint(-4, 4, (shape[1],), generator=random)
    values = values * 2.0 ** (rows + columns).float() * 0.02
    values[1, :64] = 0
    return values


def quantized(word: str, layer: str, weight: torch.Tensor) -> Tensors:
    layout = LAYOUTS[word]
    codes, params = layout.quantize(weight)
    stored = layout.state_dict_tensors(codes, params)
    tensors = {f"{layer}.weight{end}": tensor for end, tensor in stored.items()}
    return tensors | {f"{layer}.weight.expected": layout.dequantize(codes, params)}


def text(word: str) -> torch.Tensor:
    return torch.tensor(list(json.dumps({"format": word}).encode()), dtype=torch.uint8)


def file(named: bool) -> File:
    """Whole tiles, padded tiles and padded matrices. With metadata, only the last ones."""
    tensors: Tensors = {}
    words = {}
    shapes = {"matrix": (100, 72)}
    if named:
        shapes |= {"whole": (128, 128), "tiles": (160, 96)}
    for number, (word, (shape, size)) in enumerate((word, item) for word in LAYOUTS for item in shapes.items()):
        layer = f"model.diffusion_model.blocks.{number}.{shape}"
        tensors |= quantized(word, layer, weights(size, number))
        words[layer] = {"format": word}
        if named:
            tensors[f"{layer}.comfy_quant"] = text(word)
    metadata = {"library": "comfy-kitchen", "version": version("comfy-kitchen"), "function": "quantize, dequantize"}
    if not named:
        metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": words})
    return tensors, metadata


def differing(path: Path, values: Path) -> int:
    """Returns the layers of a file whose library values differ from the given ones."""
    tensors, values = load_file(path), load_file(values)
    wrong = layers = 0
    for name in tensors:
        if not name.endswith(".comfy_quant"):
            continue
        layer, layers = name.removesuffix(".comfy_quant"), layers + 1
        word = json.loads(tensors[name].numpy().tobytes())["format"]
        codes, layout = tensors[f"{layer}.weight"], LAYOUTS[word]
        scales = {"scale": tensors[f"{layer}.weight_scale"].view(torch.float8_e8m0fnu)}
        if word == "nvfp4":
            scales = {"scale": tensors[f"{layer}.weight_scale_2"], "block_scale": tensors[f"{layer}.weight_scale"]}
        shape = tuple(layout.get_logical_shape_from_storage(codes.shape))
        params = layout.Params(**scales, orig_dtype=torch.float32, orig_shape=shape)
        made, expected = layout.dequantize(codes, params), values[f"{layer}.weight"]
        same = made.shape == expected.shape and torch.equal(made.view(torch.int32), expected.view(torch.int32))
        wrong += not same
    print(f"{wrong} of {layers} layers differ")
    return wrong + (layers == 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--read", type=Path, metavar="FILE", help="a file of ours")
    parser.add_argument("--values", type=Path, metavar="FILE", help="its values in f32")
    given, wrong = parser.parse_args(), 0
    if given.read:
        return 1 if differing(given.read, given.values) else 0
    for kind, named in (("named", True), ("metadata", False)):
        path = GOLDEN / f"comfy-kitchen-{version('comfy-kitchen')}-{kind}.safetensors"
        tensors, metadata = file(named)
        same = matches(path, tensors, metadata)
        if not given.check and not same:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
        wrong += given.check and not same
        print(f"{'same   ' if same else 'differs' if given.check else 'written'}  {path.name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
