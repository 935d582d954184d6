"""Models of transformers that are saved after `quantize_` and loaded by transformers.

Skipped where PyTorch, transformers or compressed-tensors is not installed.
"""

import copy
import json
import subprocess
import sys

import pytest
from conftest import ROOT

import microscale

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

import small_models  # noqa: E402
from transformers.utils.quantization_config import CompressedTensorsConfig  # noqa: E402

#: Classes that read weights while they are made. They cannot be loaded without dequantizing.
READ_AT_ONCE = {"t5", "switch", "mamba", "siglip"}
LOADED = ["llama", "llama, tied", "llama, classes", "llama, base", "gptneox", "bert", "roberta", "electra", "albert", "whisper", "llava"]
MIXTURES = ["mixtral", "qwen3"]


def quantized(name, recipe):
    """A quantized model, and the unquantized one with its dequantized weights."""
    from microscale.torch import quantize_

    model = small_models.model(name, torch.bfloat16)
    original = copy.deepcopy(model)
    names = quantize_(model, recipe)
    return model, small_models.dequantized(model, original, names)


def loaded(model, folder, dequantize=True):
    """Loads a folder with transformers, which must report nothing."""
    config = CompressedTensorsConfig(dequantize=dequantize)
    again, info = type(model).from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config, output_loading_info=True)
    assert not any(info.values()), info
    return again


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("name", [*LOADED, *sorted(READ_AT_ONCE)])
def test_transformers_loads_the_values(tmp_path, name, format, dequantize):
    model, expected = quantized(name, format)
    model.save_pretrained(tmp_path)
    if name in READ_AT_ONCE and not dequantize:
        with pytest.raises(AttributeError, match="weight"):
            loaded(model, tmp_path, dequantize)
        return
    again = loaded(model, tmp_path, dequantize)
    assert torch.equal(small_models.outputs(again), small_models.outputs(expected))
    found = {key: x for key, x in again.named_parameters() if not key.endswith(("_scale", "_packed"))}
    parameters = dict(expected.named_parameters())
    assert found.keys() == parameters.keys() and all(torch.equal(x, parameters[key]) for key, x in found.items())


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize("recipe", ["mxfp4", {"format": "nvfp4", "global_scale": "none"}])
@pytest.mark.parametrize("name", MIXTURES)
def test_transformers_loads_experts(tmp_path, name, recipe, dequantize):
    model, expected = quantized(name, recipe)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = loaded(model, tmp_path, dequantize)
    assert torch.equal(small_models.outputs(again), small_models.outputs(expected))
    assert torch.equal(again.model.layers[1].mlp.experts.gate_up_proj, expected.model.layers[1].mlp.experts.gate_up_proj)


@pytest.mark.parametrize("name", MIXTURES)
def test_global_scales_of_experts_are_saved_with_a_warning(tmp_path, name):
    model, _ = quantized(name, "nvfp4")
    with pytest.warns(UserWarning, match="transformers .* leaves out the global scales of experts"):
        model.save_pretrained(tmp_path)
    tensors = {each["name"]: each for each in microscale.checkpoint.inspect(tmp_path)}
    place = "model.layers.0.block_sparse_moe.experts.1.w1" if name == "mixtral" else "model.layers.0.mlp.experts.1.gate_proj"
    assert tensors[f"{place}.weight"]["format"] == "nvfp4"
    assert tensors[f"{place}.weight"]["global_scale"] == model.model.layers[0].mlp.experts.gate_up_proj_slots[1, 0].item()


def test_experts_that_transformers_cannot_load_are_refused_by_name(tmp_path):
    for name, message in [("gpt-oss", "experts of model.layers.0.mlp.experts in one tensor"), ("llama 4", "model.layers.0.feed_forward.experts has")]:
        model, _ = quantized(name, "mxfp4")
        with pytest.raises(microscale.Error, match=f"{message}.*save_file"):
            model.save_pretrained(tmp_path)
        assert not list(tmp_path.glob("*.safetensors"))


def test_experts_of_two_formats_are_refused_and_unquantized_ones_warned_of(tmp_path):
    from microscale.torch import quantize_

    model = small_models.model("qwen3", torch.bfloat16)
    quantize_(model, "mxfp4", exclude=["*.1.mlp.experts"])
    with pytest.warns(UserWarning, match="refuses to load experts that are unquantized"):
        model.save_pretrained(tmp_path / "part")
    assert "model.layers.1.mlp.experts.3.up_proj" in model.config.quantization_config["ignore"]
    assert quantize_(model, "nvfp4") == ["model.layers.1.mlp.experts"]
    with pytest.raises(microscale.Error, match="experts are in nvfp4 and in mxfp4"):
        model.save_pretrained(tmp_path / "both")


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_config_is_the_one_that_the_program_writes(tmp_path, format, sample):
    from microscale.torch import quantize_

    model = transformers.AutoModelForCausalLM.from_pretrained(sample)
    quantize_(model, format)
    microscale.checkpoint.quantize(sample, tmp_path / "program", format=format)
    expected = json.loads((tmp_path / "program" / "config.json").read_text())["quantization_config"]
    assert model.config.quantization_config == expected
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"] == expected
    # Each layer has a global scale of its own here, where engines want one for fused layers.
    assert {each["defect"] for each in microscale.checkpoint.doctor(tmp_path / "saved")["findings"]} <= {"unequal-global-scales"}
    program, saved = ({each["name"]: each for each in microscale.checkpoint.inspect(tmp_path / folder)} for folder in ("program", "saved"))
    assert {name: (each.get("format"), each["shape"]) for name, each in saved.items()} == {
        name: (each.get("format"), each["shape"]) for name, each in program.items()
    }


def test_the_config_names_what_is_not_quantized(tmp_path):
    from microscale.torch import quantize_

    model = small_models.model("mixtral", torch.bfloat16)
    quantize_(model, "mxfp4", exclude=["*.1.self_attn.q_proj"])
    config = model.config.quantization_config
    assert set(config["ignore"]) == {
        "lm_head",
        "model.layers.1.self_attn.q_proj",
        # The name in the model, and that in files.
        *(f"model.layers.{i}.{place}.gate" for i in range(2) for place in ("mlp", "block_sparse_moe")),
    }
    # Layers that are quantized or replaced later change the list.
    quantize_(model, "mxfp4")
    assert "model.layers.1.self_attn.q_proj" not in model.config.quantization_config["ignore"]
    model.model.layers[0].self_attn.k_proj = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert "model.layers.0.self_attn.k_proj" in json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_layers_of_two_formats_have_groups_of_their_own(tmp_path):
    from microscale.torch import quantize_

    model = small_models.model("llama", torch.bfloat16)
    original = copy.deepcopy(model)
    names = quantize_(model, "nvfp4", filter_fn=lambda module, name: "self_attn" in name) + quantize_(model, "mxfp4")
    expected = small_models.dequantized(model, original, names)
    model.save_pretrained(tmp_path)
    groups = model.config.quantization_config["config_groups"].values()
    assert {group["format"]: len(group["targets"]) for group in groups} == {"nvfp4-pack-quantized": 8, "mxfp4-pack-quantized": 6}
    again = loaded(model, tmp_path, dequantize=False)
    assert torch.equal(small_models.outputs(again), small_models.outputs(expected))


def test_other_models_of_a_config_stay_unquantized(tmp_path):
    from microscale.torch import quantize_

    config = small_models.config("llama")
    first, second = (transformers.LlamaForCausalLM(config) for _ in range(2))
    quantize_(first, "nvfp4")
    assert first.config.quantization_config["quant_method"] == "compressed-tensors"
    assert first.model.config is first.config and first.model.layers[0].self_attn.config is first.config
    assert getattr(config, "quantization_config", None) is None and second.config is config
    second.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(small_models.outputs(again), small_models.outputs(second.eval()))


@pytest.mark.parametrize("part", ["model", "model.layers.0", "model.layers.1.mlp"])
def test_a_model_with_a_quantized_part_is_refused_until_its_config_says_so(tmp_path, part):
    from microscale.torch import quantize_

    model = small_models.model("llama", torch.bfloat16)
    quantize_(model.get_submodule(part), "mxfp4")
    with pytest.raises(microscale.Error, match="config of LlamaForCausalLM does not name its quantized layers.*call quantize_ with this model"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    assert "lm_head.weight" in model.state_dict()
    quantize_(model, "nvfp4", filter_fn=lambda *_: False)
    model.save_pretrained(tmp_path)
    names = {each["name"] for each in microscale.checkpoint.inspect(tmp_path) if each.get("format")}
    assert names and all(name.startswith(part) for name in names)
    assert "lm_head" in model.config.quantization_config["ignore"]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_a_part_can_be_saved_by_itself(tmp_path):
    model, expected = quantized("llama", "mxfp4")
    model.model.save_pretrained(tmp_path)
    again = loaded(model.model, tmp_path, dequantize=False)
    assert torch.equal(small_models.outputs(again), small_models.outputs(expected.model))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_models_that_were_loaded_are_saved_under_the_names_of_their_files(tmp_path):
    from microscale.torch import quantize_

    original = small_models.model("mixtral", torch.bfloat16)
    original.save_pretrained(tmp_path / "original")
    names = {each["name"] for each in microscale.checkpoint.inspect(tmp_path / "original")}
    model = type(original).from_pretrained(tmp_path / "original", dtype=torch.bfloat16)
    expected = small_models.dequantized(model, original, quantize_(model, "mxfp4"))
    model = copy.deepcopy(model)
    model.save_pretrained(tmp_path / "quantized")
    assert {each["name"] for each in microscale.checkpoint.inspect(tmp_path / "quantized")} == names
    again = loaded(model, tmp_path / "quantized")
    assert torch.equal(small_models.outputs(again), small_models.outputs(expected))


@pytest.mark.parametrize("name", [*MIXTURES, "gpt-oss", "llama 4", "t5"])
def test_states_are_saved_by_safetensors(tmp_path, name):
    from safetensors.torch import load_file, save

    model, _ = quantized(name, "nvfp4")
    state = {key: tensor for key, tensor in model.state_dict().items() if key not in model.all_tied_weights_keys and "embed_tokens" not in key}
    (tmp_path / "state.safetensors").write_bytes(save(state))
    again = load_file(tmp_path / "state.safetensors")
    assert again.keys() == state.keys()
    assert all(torch.equal(again[key].view(torch.uint8), state[key].view(torch.uint8)) for key in state if state[key].dim())


ALONE = """
import sys, torch
import microscale.torch
model = torch.nn.Sequential(torch.nn.Linear(64, 32))
microscale.torch.quantize_(model)
model.state_dict()
print("transformers" in sys.modules, "safetensors" in sys.modules)
"""


def test_transformers_is_not_imported_for_other_models():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False False\n"
