"""Checks for readers.py without a model: gguf, comfy-kitchen, and MXFP4 of Quark and Kimi-K3."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from comfy_kitchen.tensor.mxfp8 import TensorCoreMXFP8Layout
from comfy_kitchen.tensor.nvfp4 import TensorCoreNVFP4Layout
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from reader_inputs import Tensors, tiny, tiny_plain
from reader_program import Program, differing, tensors

TYPES = gguf.GGMLQuantizationType
LAYOUTS = {"nvfp4": TensorCoreNVFP4Layout, "mxfp8": TensorCoreMXFP8Layout}


def quark_mxfp4(directory: Path) -> tuple[Path, Tensors]:
    """Writes a Llama in Quark's MXFP4. Returns the path and Quark's values in bf16."""
    # Importing Quark compiles an extension with ninja and a C++ compiler.
    from quark.torch.utils.numerics import to_e8m0_uint8
    from quark.torch.utils.pack import Pack_fp4

    packer, random, expected = Pack_fp4("per_group", "fp4"), torch.Generator().manual_seed(2), {}

    def quantize(name: str, weight: torch.Tensor) -> Tensors:
        rows, columns = weight.shape
        codes = torch.randint(0, 256, (rows, columns // 2), generator=random, dtype=torch.uint8)
        scales = 2.0 ** torch.randint(-9, -5, (rows, columns // 32), generator=random).float()
        elements = packer.unpack(codes, reorder=False)
        expected[name] = (elements * scales.repeat_interleave(32, dim=1)).to(torch.bfloat16)
        return {name: packer.pack(elements, reorder=False), f"{name}_scale": to_e8m0_uint8(scales)}

    return tiny(directory, {"quant_method": "quark"}, quantize), expected


def compressed_mxfp4(directory: Path) -> Path:
    """Writes a Llama in compressed-tensors' MXFP4, the format of Kimi-K3."""
    weights = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")

    def quantize(name: str, weight: torch.Tensor) -> Tensors:
        # Scales that make the largest quotients fit E2M1.
        scale = torch.exp2(torch.floor(torch.log2(weight.float().unflatten(1, (-1, 32)).abs().amax(2))) - 2)
        made = compressor.compress({"weight": weight, "weight_scale": scale.to(weight.dtype)}, scheme)
        return {name.removesuffix("weight") + part: tensor for part, tensor in made.items()}

    groups = {"targets": ["Linear"], "weights": weights.model_dump(mode="json"), "input_activations": None}
    described = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed"}
    return tiny(directory, described | {"config_groups": {"group_0": groups}, "ignore": ["lm_head"]}, quantize)


def comfy(directory: Path, word: str) -> tuple[Path, Tensors]:
    """Writes a Llama quantized and stored by comfy-kitchen.

    Returns the path and the values that the library dequantizes in f32.
    """
    layout, expected = LAYOUTS[word], {}

    def quantize(name: str, weight: torch.Tensor) -> Tensors:
        codes, params = layout.quantize(weight.float())
        expected[name] = layout.dequantize(codes, params)
        stored = {name + end: tensor for end, tensor in layout.state_dict_tensors(codes, params).items()}
        text = torch.tensor(list(json.dumps({"format": word}).encode()), dtype=torch.uint8)
        return stored | {name.removesuffix("weight") + "comfy_quant": text}

    return tiny(directory, None, quantize), expected


def by_comfy(program: Program, model: Path) -> list[str]:
    """Compares a checkpoint with comfy-kitchen's dequantized values."""
    stored, ours, theirs = tensors(model), program.dequantize(model, "f32"), {}
    for name in stored:
        if not name.endswith(".comfy_quant"):
            continue
        layer, word = name.removesuffix(".comfy_quant"), json.loads(stored[name].numpy().tobytes())["format"]
        codes, layout = stored[f"{layer}.weight"], LAYOUTS[word]
        scales = {"scale": stored[f"{layer}.weight_scale"].view(torch.float8_e8m0fnu)}
        if word == "nvfp4":
            scales = {"scale": stored[f"{layer}.weight_scale_2"], "block_scale": stored[f"{layer}.weight_scale"]}
        shape = tuple(layout.get_logical_shape_from_storage(codes.shape))
        theirs[f"{layer}.weight"] = layout.dequantize(codes, layout.Params(**scales, orig_dtype=torch.float32, orig_shape=shape))
    if not theirs:
        raise RuntimeError("no layer is quantized")
    return differing({name: ours[name] for name in theirs}, theirs, signs_of_zeros=True)


def tiny_gguf(file: Path, kind: TYPES = TYPES.F32) -> Path:
    """Writes random tensors of a type, with the names of llama.cpp's converter."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    for name, shape in {
        "token_embd.weight": (32, 128),
        "blk.0.attn_q.weight": (48, 128),
        "blk.0.ffn_down.weight": (64, 192),
        "blk.0.ffn_up_exps.weight": (3, 32, 64),
        "blk.0.attn_norm.weight": (128,),
    }.items():
        values = random.standard_normal(shape, dtype=np.float32)
        stored = kind if len(shape) > 1 else TYPES.F32
        writer.add_tensor(name, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def nvfp4_scales(blocks: np.ndarray) -> np.ndarray:
    """Returns the four scales of each of ggml's NVFP4 blocks."""
    scales = blocks.reshape(-1, 36)[:, :4].copy().reshape(-1)
    return torch.from_numpy(scales).view(torch.float8_e4m3fn).to(torch.float32).numpy()


def by_gguf(program: Program, model: Path) -> list[str]:
    """Compares a GGUF file with gguf-py's values, times global scales, as in llama.cpp."""

    def read(file: Path) -> dict[str, gguf.ReaderTensor]:
        return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}

    back = program.new("dequantized.gguf")
    program.run("dequantize", model, "--dtype", "f32", "--out", back)
    stored, ours, theirs, expected = read(model), read(back), {}, {}
    for name, tensor in stored.items():
        if name.endswith(".scale") or name.endswith(".input_scale"):
            continue
        values = gguf.dequantize(np.asarray(tensor.data), tensor.tensor_type)
        scale = stored.get(name.replace(".weight", ".scale"))
        if scale is not None:
            # microscale multiplies the block scale and the global scale first.
            codes = values.reshape(-1, 16)
            factors = nvfp4_scales(np.asarray(tensor.data))[:, None]
            codes = np.divide(codes, factors, out=np.zeros_like(codes), where=factors != 0)
            values = (codes * (factors * np.asarray(scale.data)[0])).reshape(values.shape)
        theirs[name] = torch.from_numpy(np.array(values, dtype=np.float32).reshape(-1))
        made = gguf.dequantize(np.asarray(ours[name].data), ours[name].tensor_type)
        expected[name] = torch.from_numpy(np.array(made, dtype=np.float32).reshape(-1))
    if all(tensor.tensor_type not in (TYPES.MXFP4, TYPES.NVFP4) for tensor in stored.values()):
        raise RuntimeError("no tensor is quantized")
    return differing(expected, theirs, signs_of_zeros=False)


def gguf_checks(program: Program) -> dict[str, Callable[[], list[str]]]:
    def of_gguf(kind: TYPES, *options: str) -> list[str]:
        out = program.new("quantized.gguf")
        program.run("quantize", tiny_gguf(program.new("model.gguf"), kind), "--out", out, *options)
        return by_gguf(program, out)

    nvfp4 = ("--format", "nvfp4")
    cases = [(TYPES.F32, "--format", "mxfp4"), (TYPES.F32, *nvfp4), (TYPES.F32, *nvfp4, "--numerics", "modelopt")]
    cases += [(kind, "--format", format) for kind in (TYPES.F16, TYPES.BF16, TYPES.Q8_0) for format in ("mxfp4", "nvfp4")]
    cases += [(TYPES.BF16, *nvfp4, "--kept", "q8_0"), (TYPES.BF16, *nvfp4, "--input-scale", "448")]
    title = "gguf reads {} of GGUF's {}".format
    return {title(" ".join(case[1:]), case[0].name): lambda case=case: of_gguf(*case) for case in cases}


def comfy_checks(program: Program, by_model: dict[str, Callable[[Path], list[str]]]) -> dict[str, Callable[[], list[str]]]:
    """Checks ComfyUI checkpoints that microscale writes, reads and converts.

    `by_model` has the checks of the other checkpoint formats.
    """
    formats = {"nvfp4": ("nvfp4", "modelopt"), "mxfp8": ("mxfp8-e4m3", "compressed-tensors")}

    def written(word: str) -> list[str]:
        format, other = formats[word]
        quantize = ["--format", format, "--numerics", "modelopt" if word == "nvfp4" else "torchao"]
        model = tiny_plain(program.new("plain"))
        direct = program.quantize(model, *quantize, "--to", "comfyui")
        converted = program.convert(program.quantize(model, *quantize, "--to", other), "comfyui")
        return by_comfy(program, direct) + by_comfy(program, converted)

    def read(word: str) -> list[str]:
        model, expected = comfy(program.new("comfyui"), word)
        ours = program.dequantize(model, "f32")
        wrong = differing({name: ours[name] for name in expected}, expected, signs_of_zeros=True)
        other = formats[word][1]
        return wrong + by_model[other](program.convert(model, other))

    found = {}
    for word in formats:
        found[f"comfy-kitchen reads quantized and converted {word}"] = lambda word=word: written(word)
        found[f"comfy-kitchen reads its own {word} the same, and other libraries read it converted"] = lambda word=word: read(word)
    return found
