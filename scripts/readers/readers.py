"""Loads checkpoints written by microscale in other libraries, and compares every weight.

    python scripts/readers/readers.py --microscale target/release/microscale [--sample sample/tiny-llama]

Most checks write a checkpoint with microscale, dequantize it with a library on the CPU, and compare
the result bit for bit with `microscale dequantize`. Others write a checkpoint with the library, and
check that microscale reads the same values and converts it. ModelOpt and gguf never produce -0;
their comparisons ignore the signs of zeros. The exit code is 1 if any check fails. Needs
readers_requirements.txt.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from reader_experts import expert_checks
from reader_inputs import deepseek_v4, tiny_compressed, tiny_fp8, tiny_plain
from reader_models import MIXTURES, MODELS, Model
from reader_others import comfy_checks, compressed_mxfp4, gguf_checks, quark_mxfp4
from reader_program import Program, differing, tensors
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging
from transformers.utils.quantization_config import CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

BLOCK = 16
STORY = Path(__file__).resolve().parents[2] / "sample" / "tiny-story"


def loaded_weights(directory: Path, config: object) -> dict[str, torch.Tensor]:
    """Returns the parameters that transformers loads and dequantizes."""
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=config, dtype=torch.bfloat16, output_loading_info=True
    )
    # Dequantized layers have no parameter for input scales.
    info["unexpected_keys"] = {key for key in info["unexpected_keys"] if not key.endswith(".input_global_scale")}
    problems = {key: value for key, value in info.items() if value}
    if problems:
        raise RuntimeError(f"transformers reports {problems}")
    logits = model(torch.arange(8)[None]).logits
    if not logits.isfinite().all():
        raise RuntimeError("the model's logits are not finite")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def by_transformers(program: Program, model: Path, config: object) -> list[str]:
    """Compares a checkpoint with the values that transformers dequantizes."""
    # Layers that are dequantized in the forward pass keep their scales.
    scales = ("weight_scale", "weight_global_scale", "input_global_scale")
    theirs = {name: weight for name, weight in loaded_weights(model, config).items() if not name.endswith(scales)}
    ours = program.dequantize(model, "bf16")
    # Tied weights are one parameter.
    theirs = {name: theirs[name] for name in theirs if name in ours or name != "lm_head.weight"}
    return differing(ours, theirs, signs_of_zeros=True)


def loaded_model(model: Model, directory: Path, config: object | None) -> dict[str, torch.Tensor]:
    """Returns the parameters in transformers after a forward pass, and the `logits`."""
    given = {} if config is None else {"quantization_config": config}
    loaded, info = model.loader.from_pretrained(directory, dtype=torch.bfloat16, output_loading_info=True, **given)
    problems = {key: value for key, value in info.items() if value}
    if problems:
        raise RuntimeError(f"transformers reports {problems}")
    tokens = torch.arange(3, 11)[None]
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens} if loaded.config.is_encoder_decoder else {"input_ids": tokens}
    if loaded.main_input_name == "input_features":
        sound = torch.linspace(-1, 1, 32 * 32).reshape(1, 32, 32).to(torch.bfloat16)
        inputs = {"input_features": sound, "decoder_input_ids": tokens}
    run = loaded
    if isinstance(loaded, Llama4ForConditionalGeneration):
        # Without an image, the forward pass of transformers 5.24 fails after the language model.
        run = loaded.language_model
        if hasattr(loaded, "ct_decompress_hook"):
            loaded.hf_quantizer.compressor.decompress_model(loaded)
    with torch.no_grad():
        logits = run(**inputs).logits
    if not logits.isfinite().all():
        raise RuntimeError("the model's logits are not finite")
    # Layers that are dequantized in the forward pass keep their scales.
    scales = ("weight_scale", "weight_global_scale")
    parameters = {name: value.detach() for name, value in loaded.named_parameters() if not name.endswith(scales)}
    return parameters | {"logits": logits}


def by_model(program: Program, model: Model, *options: str, plain: bool) -> list[str]:
    """Compares a quantized model in transformers with the output of `dequantize`."""
    exclude = [word for pattern in model.exclude for word in ("--exclude", pattern)]
    quantized = program.quantize(model.save(program.new("model")), *options, *exclude)
    back = program.new("dequantized")
    program.run("dequantize", quantized, "--dtype", "bf16", "--out", back)
    program.run("doctor", quantized)
    ours = loaded_model(model, back, None)
    theirs = loaded_model(model, quantized, CompressedTensorsConfig(dequantize=not plain))
    return differing(ours, theirs, signs_of_zeros=True)


def by_modelopt(program: Program, model: Path) -> list[str]:
    """Compares a checkpoint with the values that ModelOpt dequantizes."""
    stored, ours = tensors(model), program.dequantize(model, "f32")
    theirs: dict[str, torch.Tensor] = {}
    for name, codes in stored.items():
        if codes.dtype != torch.uint8:
            continue
        shape = torch.Size((*codes.shape[:-1], codes.shape[-1] * 2))
        quantized = NVFP4QTensor(shape, torch.float32, codes)
        scale, double_scale = stored[f"{name}_scale"], stored[f"{name}_scale_2"]
        theirs[name] = quantized.dequantize(
            dtype=torch.float32, scale=scale, double_scale=double_scale, block_sizes={-1: BLOCK}
        )
    if not theirs:
        raise RuntimeError("no tensor is in ModelOpt's format")
    return differing({name: ours[name] for name in theirs}, theirs, signs_of_zeros=False)


def tiny_gpt_oss(directory: Path) -> Path:
    """Writes an unquantized random model of gpt-oss' architecture."""
    torch.manual_seed(0)
    config = GptOssConfig(
        num_hidden_layers=2, num_local_experts=3, vocab_size=64, hidden_size=64, intermediate_size=96, head_dim=32,
        num_attention_heads=2, num_key_value_heads=2, num_experts_per_tok=1, sliding_window=16, dtype="bfloat16",
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = GptOssForCausalLM(config).to(torch.bfloat16)
    directory.mkdir()
    weights = {name: weight.contiguous().clone() for name, weight in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    described = config.to_dict() | {"architectures": ["GptOssForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(described))
    return directory


def tiny_mixture(directory: Path) -> Path:
    """Writes an unquantized random mixture of experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        num_hidden_layers=2, num_experts=3, num_experts_per_tok=1, vocab_size=64, hidden_size=64, intermediate_size=128,
        moe_intermediate_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=2, decoder_sparse_step=1,
        tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def experts_apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Splits the merged experts of transformers, with the names in checkpoints."""
    apart: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        layer, _, part = name.rpartition(".experts.")
        for i, expert in enumerate(weight if layer else ()):
            if part == "gate_up_proj":
                apart[f"{layer}.experts.{i}.gate_proj.weight"], apart[f"{layer}.experts.{i}.up_proj.weight"] = expert.chunk(2)
            else:
                apart[f"{layer}.experts.{i}.{part}.weight"] = expert
        if not layer:
            apart[name] = weight
    return apart


def read_as(program: Program, model: Path, config: object) -> list[str]:
    """Compares a checkpoint of another library in `microscale dequantize` and in transformers."""
    return differing(program.dequantize(model, "bf16"), loaded_weights(model, config), signs_of_zeros=True)


def by_modelopt_fp8(program: Program, model: Path) -> list[str]:
    """Compares an FP8 checkpoint with the values that ModelOpt dequantizes."""
    stored, ours = tensors(model), program.dequantize(model, "f32")
    theirs: dict[str, torch.Tensor] = {}
    for name, codes in stored.items():
        if codes.dtype == torch.float8_e4m3fn:
            quantized = FP8QTensor(codes.shape, torch.float32, codes)
            theirs[name] = quantized.dequantize(dtype=torch.float32, scale=stored[f"{name}_scale"])
    if not theirs:
        raise RuntimeError("no tensor is FP8")
    return differing({name: ours[name] for name in theirs}, theirs, signs_of_zeros=True)


def modelopt_export(directory: Path, recipe: dict) -> Path:
    """Writes a random Llama quantized and exported by ModelOpt."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.config.architectures = ["LlamaForCausalLM"]
    model = mtq.quantize(model, recipe, lambda model: model(torch.arange(32)[None]))
    export_hf_checkpoint(model, export_dir=str(directory))
    return directory


def model_check(name: str, format: str, plain: bool) -> str:
    return f"transformers reads {name} in {format}, dequantized {'as it runs' if plain else 'as it loads'}"


WORDS = {True: "same", False: "**differs**", None: "–"}


def table(outcomes: dict[str, bool]) -> str:
    """Formats the results: the table of models in docs/files.md, and other checks by library."""
    columns = [(format, plain) for format in ("nvfp4", "mxfp4") for plain in (False, True)]
    heads = [f"{format}, dequantized {'as it runs' if plain else 'as it loads'}" for format, plain in columns]
    lines = ["| model | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    models = {name: [model_check(name, *column) for column in columns] for name in MODELS | MIXTURES}
    lines += [f"| {name} | " + " | ".join(WORDS[outcomes.get(check)] for check in row) + " |" for name, row in models.items()]
    lines += ["", "| read by | checkpoint | values |", "|---|---|---|"]
    others = [check for check in outcomes if not any(check in row for row in models.values())]
    for check in sorted(others, key=lambda check: check.partition(" read")[0]):
        loader, what = re.split(r" reads? ", check, maxsplit=1)
        lines.append(f"| {loader} | {what} | {WORDS[outcomes[check]]} |")
    return "\n".join(lines)


def checks(program: Program, sample: Path) -> dict[str, Callable[[], list[str]]]:
    ct = CompressedTensorsConfig(dequantize=True)

    def exported() -> list[str]:
        original = modelopt_export(program.new("modelopt-export"), mtq.W4A16_NVFP4_CFG)
        converted = program.convert(original, "compressed-tensors")
        back = program.convert(converted, "modelopt")
        wrong = by_modelopt(program, original) + by_transformers(program, converted, ct) + by_modelopt(program, back)
        # Codes and block scales are unchanged.
        before, after = tensors(original), tensors(back)
        kept = [name for name in before if not name.endswith("_scale_2")]
        return wrong + [name for name in kept if not torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))]

    def gpt_oss() -> list[str]:
        model = program.quantize(tiny_gpt_oss(program.new("gpt-oss")), "--to", "gpt-oss")
        return by_transformers(program, model, Mxfp4Config(dequantize=True))

    def fp8() -> list[str]:
        model = tiny_fp8(program.new("fp8"))
        wrong = read_as(program, model, FineGrainedFP8Config(dequantize=True))
        # Excluded tensors are written in bf16 with the same values.
        quantized = program.quantize(model, "--format", "nvfp4", "--exclude", "*.layers.1.*")
        before, after = program.dequantize(model, "bf16"), program.dequantize(quantized, "bf16")
        kept = {name for name in before if ".layers.1." in name or "proj" not in name}
        wrong += differing({name: before[name] for name in kept}, {name: after[name] for name in kept}, signs_of_zeros=True)
        return wrong + by_transformers(program, quantized, ct)

    def fp8_block(*options: str) -> list[str]:
        quantized = program.quantize(tiny_plain(program.new("plain")), *options)
        converted = program.convert(quantized, "fp8-block", "--requantize")
        wrong = by_transformers(program, converted, FineGrainedFP8Config(dequantize=True))
        if "mxfp4" in options:
            before, after = program.dequantize(quantized, "f32"), program.dequantize(converted, "f32")
            wrong += differing(before, after, signs_of_zeros=True)
        return wrong

    def quark() -> list[str]:
        model, expected = quark_mxfp4(program.new("quark"))
        ours = program.dequantize(model, "bf16")
        wrong = differing({name: ours[name] for name in expected}, expected, signs_of_zeros=True)
        for format in [[], ["--format", "nvfp4"]]:
            converted = program.convert(model, "compressed-tensors", *format)
            theirs = loaded_weights(converted, ct)
            wrong += differing({name: theirs[name] for name in expected}, expected, signs_of_zeros=True)
        return wrong

    def kimi() -> list[str]:
        model = compressed_mxfp4(program.new("kimi"))
        return read_as(program, model, ct) + by_transformers(program, program.convert(model, "compressed-tensors", "--format", "nvfp4"), ct)

    def cast(*to: str) -> list[str]:
        quantized = program.quantize(tiny_plain(program.new("plain")), "--format", "mxfp4")
        converted = program.convert(quantized, "compressed-tensors", *to)
        same = differing(program.dequantize(quantized, "f32"), program.dequantize(converted, "f32"), signs_of_zeros=True)
        return same + by_transformers(program, converted, ct)

    def with_inputs() -> list[str]:
        model = tiny_plain(program.new("plain"))
        modelopt = program.quantize(model, "--format", "nvfp4", "--input-scale", "448", "--to", "modelopt")
        return by_modelopt(program, modelopt) + by_transformers(program, program.convert(modelopt, "compressed-tensors"), ct)

    def calibrated() -> list[str]:
        stats = program.new("statistics")
        program.run("calibrate", STORY, stats, "--text", STORY / "heldout.txt", "--windows", "8")
        amax = json.loads((stats / "input_amax.json").read_text())
        options = ["--gptq", "--calibration", stats, "--input-scale", stats / "input_amax.json"]
        model = program.quantize(STORY, "--format", "nvfp4", *options)
        config = CompressedTensorsConfig(dequantize=False)
        loaded = AutoModelForCausalLM.from_pretrained(model, quantization_config=config, dtype=torch.bfloat16)
        suffix = ".input_global_scale"
        theirs = {name: scale.detach() for name, scale in loaded.named_parameters() if name.endswith(suffix)}
        # Fused layers have the same input. 2688 is 6 · 448.
        expected = {f"{name}{suffix}": torch.tensor([2688 / most]) for name, most in amax.items() if ".hadamard_" not in name}
        wrong = differing(expected, theirs, signs_of_zeros=True)
        return wrong + by_transformers(program, model, config)

    def mxfp8() -> list[str]:
        return by_transformers(program, program.quantize(tiny_plain(program.new("plain")), "--format", "mxfp8-e4m3"), ct)

    def pickled() -> list[str]:
        quantized = program.quantize(tiny_plain(program.new("pickled"), pickled=True), "--format", "nvfp4")
        expected = program.quantize(tiny_plain(program.new("plain")), "--format", "nvfp4")
        ours, theirs = tensors(quantized), tensors(expected)
        same = [name for name in ours if not torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8))]
        return same + by_transformers(program, quantized, ct)

    def deepseek() -> list[str]:
        model, expected = deepseek_v4(program.new("deepseek-v4"))
        ours = program.dequantize(model, "f32")
        converted = program.dequantize(program.convert(model, "compressed-tensors", "--format", "nvfp4"), "f32")
        wrong = differing({name: ours[name] for name in expected}, expected, signs_of_zeros=True)
        experts = {name: weight for name, weight in expected.items() if "experts" in name}
        return wrong + differing({name: converted[name] for name in experts}, experts, signs_of_zeros=True)

    def eight_bits(kind: str, group: int | None = None) -> list[str]:
        model = tiny_compressed(program.new(kind), kind, group)
        return read_as(program, model, ct) + by_transformers(program, program.quantize(model, "--format", "nvfp4"), ct)

    def modelopt_fp8() -> list[str]:
        model = modelopt_export(program.new("modelopt-fp8"), mtq.FP8_DEFAULT_CFG)
        quantized = program.quantize(model, "--format", "nvfp4", "--to", "modelopt")
        return by_modelopt_fp8(program, model) + by_modelopt(program, quantized)

    def mixture() -> list[str]:
        model = program.quantize(tiny_mixture(program.new("mixture")), "--recipe", "nvfp4-mxfp4-experts")
        theirs = experts_apart(loaded_weights(model, ct))
        return differing(program.dequantize(model, "bf16"), theirs, signs_of_zeros=True)

    def mixed(rule: str) -> list[str]:
        recipe = program.new("recipe.toml")
        recipe.write_text(f'format = "nvfp4"\n[[tensors]]\nmatch = "{rule}"\nformat = "mxfp4"\n')
        # When it dequantizes while loading, transformers assumes one format for all layers except
        # experts. In the forward pass each layer has its own.
        return by_transformers(
            program, program.quantize(sample, "--recipe", recipe), CompressedTensorsConfig(dequantize=False)
        )

    found: dict[str, Callable[[], list[str]]] = {}
    for rule in ["*.down_proj.weight", "*.self_attn.*", "*.layers.1.*"]:
        found[f"compressed-tensors and transformers read NVFP4 with MXFP4 for {rule}"] = lambda rule=rule: mixed(rule)
    for quantizer in ["compressed-tensors", "torchao", "modelopt", "transformer-engine"]:
        nvfp4 = ["--format", "nvfp4", "--numerics", quantizer]
        found[f"compressed-tensors and transformers read NVFP4 by {quantizer}"] = lambda nvfp4=nvfp4: by_transformers(
            program, program.quantize(sample, *nvfp4), ct
        )
        found[f"ModelOpt reads NVFP4 by {quantizer}"] = lambda nvfp4=nvfp4: by_modelopt(
            program, program.quantize(sample, *nvfp4, "--to", "modelopt")
        )
    for quantizer in ["ocp", "compressed-tensors", "modelopt", "ggml"]:
        mxfp4 = ["--format", "mxfp4", "--numerics", quantizer]
        found[f"compressed-tensors and transformers read MXFP4 by {quantizer}"] = lambda mxfp4=mxfp4: by_transformers(
            program, program.quantize(sample, *mxfp4), ct
        )
    for name, model in (MODELS | MIXTURES).items():
        # transformers ignores global scales of experts: docs/files.md.
        nvfp4 = ["--format", "nvfp4"] + (["--global-scale", "none"] if name in MIXTURES else [])
        for options in [nvfp4, ["--format", "mxfp4"]]:
            for plain in [False, True] if model.plain else [False]:
                found[model_check(name, options[1], plain)] = (
                    lambda model=model, options=options, plain=plain: by_model(program, model, *options, plain=plain)
                )
    found["transformers reads block FP8 the same, and NVFP4 made from it"] = fp8
    for kind in ["float", "int"]:
        found[f"transformers reads {kind}-quantized the same, and NVFP4 made from it"] = lambda kind=kind: eight_bits(kind)
        found[f"transformers reads {kind}-quantized in groups the same, and NVFP4 made from it"] = (
            lambda kind=kind: eight_bits(kind, 64)
        )
    for format in ["mxfp4", "nvfp4"]:
        found[f"transformers reads block FP8 made from {format}"] = lambda format=format: fp8_block("--format", format)
    found["transformers reads Quark's MXFP4 as Quark does, converted to compressed-tensors, and as NVFP4"] = quark
    found["compressed-tensors and transformers read their own MXFP4 the same, and NVFP4 made from it"] = kimi
    for to in ["nvfp4", "mxfp8-e4m3"]:
        found[f"compressed-tensors and transformers read {to.upper()} made from MXFP4"] = lambda to=to: cast("--format", to)
    found["ModelOpt and transformers read NVFP4 with input scales"] = with_inputs
    found["transformers reads NVFP4 by GPTQ with calibrated input scales, and the same input scales"] = calibrated
    by_other = {"modelopt": lambda path: by_modelopt(program, path), "compressed-tensors": lambda path: by_transformers(program, path, ct)}
    found |= gguf_checks(program) | comfy_checks(program, by_other) | expert_checks(program)
    found["compressed-tensors and transformers read MXFP8"] = mxfp8
    found["compressed-tensors and transformers read NVFP4 made from PyTorch's .bin"] = pickled
    found["transformers reads DeepSeek-V4's FP8 and MXFP4 the same, and NVFP4 has the experts' values"] = deepseek
    found["ModelOpt reads its own FP8 the same, and NVFP4 made from it"] = modelopt_fp8
    found["transformers reads gpt-oss' experts"] = gpt_oss
    found["compressed-tensors and transformers read NVFP4 with MXFP4 for experts"] = mixture
    found["ModelOpt and transformers read ModelOpt's own export, converted to compressed-tensors and back"] = exported
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microscale", type=Path, required=True)
    parser.add_argument("--sample", type=Path, default=Path(__file__).resolve().parents[2] / "sample" / "tiny-llama")
    parser.add_argument("--only", default="", help="run only checks whose name contains this text")
    parser.add_argument("--table", action="store_true", help="print the results as tables")
    args = parser.parse_args()
    libraries = ["compressed-tensors", "transformers", "nvidia-modelopt", "gguf", "comfy-kitchen", "amd-quark", "torch"]
    print(", ".join(f"{library} {version(library)}" for library in libraries))
    outcomes: dict[str, bool] = {}
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        for what, check in checks(Program(args.microscale.resolve(), Path(scratch)), args.sample).items():
            if args.only not in what:
                continue
            try:
                wrong = check()
            except Exception as error:  # noqa: BLE001  (a refusal is a failed check)
                wrong = [f"{type(error).__name__}: {error}"]
            outcomes[what] = not wrong
            print(f"{'FAILED' if wrong else 'same  '}  {what}")
            for line in wrong[:10]:
                print(f"        {line}")
    if args.table:
        print(table(outcomes))
    failed = sum(not same for same in outcomes.values())
    print(f"{failed} checks failed" if failed else "every weight is the same")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
