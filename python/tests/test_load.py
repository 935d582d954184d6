"""`load_quantized`: loads checkpoints of the program and of `save_pretrained` into models.

Skipped where PyTorch is not installed.
"""

import copy
import json
import subprocess
import sys

import pytest
from conftest import ROOT

import microscale

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


def program(*arguments):
    done = subprocess.run([sys.executable, "-m", "microscale", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return arguments[-1]


def kinds(model):
    """The names of the quantized linear layers and of the quantized experts of a model."""
    from microscale.torch import QuantizedExperts, QuantizedLinear

    return tuple({name for name, module in model.named_modules() if isinstance(module, kind)} for kind in (QuantizedLinear, QuantizedExperts))


def same(found, expected):
    """Asserts that two models have the same values, bit for bit, after dequantizing."""
    import small_models

    found, expected = small_models.parameters(found), small_models.parameters(expected)
    assert found.keys() == expected.keys()
    wrong = {name: small_models.relative_squared_error(found[name], x) for name, x in expected.items() if not torch.equal(found[name], x)}
    assert not wrong, wrong


@pytest.fixture
def small():
    pytest.importorskip("transformers")
    import small_models

    return small_models


#: Architectures, options of the program, and numbers of quantized linear layers and experts.
CHECKPOINTS = [
    ("llama", "--format nvfp4", 14, 0),
    ("llama", "--format mxfp4", 14, 0),
    ("llama", "--format nvfp4 --global-scale none", 14, 0),
    ("llama", "--format nvfp4 --input-scale 6", 14, 0),
    ("llama", "--format mxfp8-e4m3", 0, 0),
    ("llama, tied", "--format nvfp4", 14, 0),
    ("llama, tied", "--format nvfp4 --include *embed_tokens.weight", 14, 0),
    ("llama, classes", "--format mxfp4", 14, 0),
    ("gptneox", "--format nvfp4", 8, 0),
    ("falcon", "--format nvfp4", 0, 0),
    ("bert", "--format nvfp4", 12, 0),
    ("whisper", "--format mxfp4", 32, 0),
    ("t5", "--format nvfp4", 32, 0),
    ("mamba", "--format nvfp4", 8, 0),
    ("llava", "--format mxfp4", 28, 0),
    ("siglip", "--format mxfp4", 14, 0),
    ("mixtral", "--format nvfp4", 8, 2),
    ("mixtral", "--format mxfp4 --exclude *.layers.1.*", 4, 1),
    ("qwen3", "--format mxfp4", 8, 2),
    ("qwen3", "--format nvfp4 --exclude *.1.mlp.experts.*", 8, 1),
    ("gpt-oss", "--format mxfp4 --to gpt-oss", 0, 2),
]


@pytest.mark.parametrize("on_meta", [True, False])
@pytest.mark.parametrize(("name", "options", "linear", "experts"), CHECKPOINTS)
def test_values_are_those_of_the_dequantized_checkpoint(small, tmp_path, name, options, linear, experts, on_meta):
    from microscale.torch import load_quantized

    original = small.model(name, torch.bfloat16, seed=5)
    original.save_pretrained(tmp_path / "original", max_shard_size="60KB")
    assert len(list((tmp_path / "original").glob("*.safetensors"))) > 1
    program("quantize", tmp_path / "original", *options.split(), "--out", tmp_path / "quantized")
    program("dequantize", tmp_path / "quantized", "--dtype", "f32", "--out", tmp_path / "dequantized")
    expected = type(original).from_pretrained(tmp_path / "dequantized", dtype=torch.float32)
    model = small.empty(name, torch.float32, "meta" if on_meta else "cpu", original.config)
    names = load_quantized(model, tmp_path / "quantized")
    assert (len(kinds(model)[0]), len(kinds(model)[1])) == (linear, experts) and set(names) == set.union(*kinds(model))
    same(model, expected)
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
    for (key, x), (other, y) in zip(model.named_buffers(), expected.named_buffers()):
        assert linear or experts or (key == other and torch.equal(x, y))
    error = small.relative_squared_error(small.outputs(model), small.outputs(expected))
    assert error < 1e-10
    # Tied weights are one parameter again.
    tied = [key for key in model.all_tied_weights_keys if key.endswith("weight")]
    for key in tied:
        assert model.get_parameter(key) is model.get_parameter(model.all_tied_weights_keys[key])


def test_a_model_without_quantized_modules_is_saved_unquantized(small, tmp_path):
    """Falcon has a class of linear layers of its own, which are dequantized."""
    from microscale.torch import load_quantized

    original = small.model("falcon", torch.bfloat16, seed=5)
    original.save_pretrained(tmp_path / "original")
    program("quantize", tmp_path / "original", "--format", "mxfp4", "--out", tmp_path / "quantized")
    config = type(original.config).from_pretrained(tmp_path / "quantized")
    assert config.quantization_config
    model = small.empty("falcon", torch.bfloat16, "meta", config)
    assert load_quantized(model, tmp_path / "quantized") == []
    model.save_pretrained(tmp_path / "saved")
    again = type(original).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    same(again, model)


def test_models_of_another_quantizer_are_refused(small, tmp_path):
    from transformers.quantizers.quantizer_hqq import HqqHfQuantizer

    from microscale.torch import load_quantized

    model = small.model("llama")
    model.hf_quantizer = HqqHfQuantizer.__new__(HqqHfQuantizer)
    with pytest.raises(microscale.Error, match="was quantized by HqqHfQuantizer"):
        load_quantized(model, tmp_path)


@pytest.mark.filterwarnings("ignore:transformers .* leaves out the global scales of experts")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("name", ["llama", "llama, tied", "bert", "whisper", "t5", "llava", "mixtral", "qwen3"])
def test_saved_models_are_loaded_as_they_were(small, tmp_path, name, format, device):
    from microscale.torch import load_quantized, quantize_

    model = small.model(name, torch.bfloat16, seed=6)
    names = quantize_(model, format)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    again = small.empty(name, torch.bfloat16, device, type(model.config).from_pretrained(tmp_path))
    assert set(load_quantized(again, tmp_path)) == set(names)
    assert again.state_dict().keys() == model.state_dict().keys()
    for key, x in model.state_dict().items():
        y = again.state_dict()[key]
        assert x.dtype == y.dtype and torch.equal(x.view(torch.uint8) if x.dim() else x, y.view(torch.uint8) if y.dim() else y), key
    assert torch.equal(small.outputs(again), small.outputs(model))
    # Saved again, it has the same names.
    again.save_pretrained(tmp_path / "again")
    assert {each["name"] for each in microscale.checkpoint.inspect(tmp_path / "again")} == {each["name"] for each in microscale.checkpoint.inspect(tmp_path)}
    assert again.config.quantization_config == model.config.quantization_config


@pytest.mark.parametrize("name", ["gpt-oss", "llama 4", "mixtral"])
def test_states_of_models_are_loaded_from_a_file(small, tmp_path, name):
    from microscale.torch import load_quantized, quantize_

    model = small.model(name, torch.bfloat16, seed=6)
    names = quantize_(model, "nvfp4")
    safetensors.save_file(model.state_dict(), tmp_path / "state.safetensors")
    again = small.empty(name, torch.bfloat16, "meta", model.config)
    assert set(load_quantized(again, tmp_path / "state.safetensors")) == set(names)
    same(again, model)
    assert torch.equal(small.outputs(again), small.outputs(model))


def test_experts_that_stay_as_they_are_get_dequantized_values(small, tmp_path):
    from microscale.torch import load_quantized

    original = small.model("llama 4", torch.bfloat16, seed=5)
    original.save_pretrained(tmp_path / "original")
    program("quantize", tmp_path / "original", "--format", "mxfp4", "--split-experts", "--out", tmp_path / "quantized")
    program("dequantize", tmp_path / "quantized", "--dtype", "f32", "--out", tmp_path / "dequantized")
    model = small.empty("llama 4", torch.float32, "meta", original.config)
    assert not any("experts" in name for name in load_quantized(model, tmp_path / "quantized"))
    tensors = {}
    for file in (tmp_path / "dequantized").glob("*.safetensors"):
        tensors |= safetensors.load_file(file)
    for layer in range(2):
        place, experts = f"model.layers.{layer}.feed_forward.experts", model.model.layers[layer].feed_forward.experts
        for joined in ("gate_up_proj", "down_proj"):
            assert torch.equal(getattr(experts, joined), tensors[f"{place}.{joined}"])


class Net(torch.nn.Module):
    """A model without transformers, with a shared layer, a tied embedding and a subclass."""

    def __init__(self, dtype=torch.float32, positions=False):
        super().__init__()
        self.words = torch.nn.Embedding(96, 64, dtype=dtype)
        self.first = torch.nn.Linear(64, 64, dtype=dtype)
        self.again = self.first
        self.inner = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False, dtype=dtype), torch.nn.LayerNorm(32, dtype=dtype))
        self.own = Own(64, 64, dtype=dtype)
        self.lm_head = torch.nn.Linear(64, 96, bias=False, dtype=dtype)
        self.lm_head.weight = self.words.weight
        self.register_buffer("count", torch.tensor(7))
        if positions:
            self.register_buffer("positions", torch.arange(4), persistent=False)


class Own(torch.nn.Linear):
    """A subclass, which stays."""


@pytest.fixture(params=["words.weight"])
def folder(request, tmp_path):
    """A checkpoint of a `Net` in two shards, for codes and scales. One tensor is unquantized."""
    torch.manual_seed(7)
    net = Net(torch.bfloat16)
    state = {name: x.clone() for name, x in net.state_dict().items() if name != "lm_head.weight" and not name.startswith("again.")}
    safetensors.save_file(state, tmp_path / "net.safetensors")
    options = ["--include", "own.weight", "--exclude", request.param]
    program("quantize", tmp_path / "net.safetensors", "--format", "nvfp4", *options, "--out", tmp_path / "quantized.safetensors")
    tensors = safetensors.load_file(tmp_path / "quantized.safetensors")
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for name, x in tensors.items():
        shards["b.safetensors" if name.endswith("_scale") else "a.safetensors"][name] = x
    folder = tmp_path / "folder"
    folder.mkdir()
    for file, part in shards.items():
        safetensors.save_file(part, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    program("dequantize", tmp_path / "quantized.safetensors", "--dtype", "f32", "--out", tmp_path / "dequantized.safetensors")
    return folder


def expected_of(folder):
    return safetensors.load_file(folder.parent / "dequantized.safetensors")


@pytest.mark.parametrize("folder", ["words.weight", "none"], indirect=True)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("path", ["folder", "quantized.safetensors"])
def test_models_without_transformers(folder, path, device):
    from microscale.torch import load_quantized

    with torch.device(device):
        net = Net()
    names = load_quantized(net, folder.parent / path)
    assert sorted(names) == ["again", "first", "inner.0"] and net.first is net.again
    expected = expected_of(folder)
    assert torch.equal(net.first.dequantize(), expected["first.weight"]) and torch.equal(net.first.bias, expected["first.bias"])
    assert torch.equal(net.inner[0].dequantize(), expected["inner.0.weight"]) and torch.equal(net.inner[1].weight, expected["inner.1.weight"])
    assert type(net.own) is Own and torch.equal(net.own.weight, expected["own.weight"])
    assert net.lm_head.weight is net.words.weight and torch.equal(net.words.weight, expected["words.weight"])
    assert net.count == 7 and not any(x.is_meta for x in (*net.parameters(), *net.buffers()))
    assert net.first.weight.dtype == net.words.weight.dtype == torch.float32
    assert net.first.bias.requires_grad and isinstance(net.words.weight, torch.nn.Parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_have_the_models_dtypes_and_what_it_has_stays(folder, dtype):
    from microscale.torch import load_quantized

    net, calls = Net(dtype), []
    net.first.register_forward_hook(lambda *_: calls.append(1))
    net.eval().first.bias.requires_grad_(False)
    words, bias = net.words.weight, net.first.bias
    load_quantized(net, folder)
    assert net.words.weight is words and net.first.bias is bias and not bias.requires_grad
    assert net.first.weight.dtype == words.dtype == dtype and not net.first.training
    net.first(torch.randn(2, 64, dtype=dtype))
    assert calls == [1]
    # The model may be quantized.
    load_quantized(net, folder)
    assert net.first.weight.dtype == dtype and torch.equal(net.first.dequantize(), expected_of(folder)["first.weight"])


def test_a_device_can_be_given(folder):
    from microscale.torch import load_quantized

    with torch.device("meta"):
        net = Net()
    load_quantized(net, folder, device="cpu")
    assert {x.device.type for x in (*net.parameters(), *net.buffers())} == {"cpu"}


def state(module):
    return {name: (id(x), x.clone()) for name, x in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())}


def changed(folder, change):
    """Changes the tensors of the checkpoint, and puts them into one file."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= safetensors.load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(tensors)
    safetensors.save_file(tensors, folder / "model.safetensors")


#: Changes of a checkpoint, with the error.
WRONG = {
    "missing norm": (lambda t: t.pop("inner.1.weight"), "the checkpoint lacks inner.1.weight;"),
    "missing weight": (lambda t: [t.pop(f"first.weight_{part}") for part in ("packed", "scale", "global_scale")], "lacks again.weight, first.weight;"),
    "missing bias": (lambda t: t.pop("first.bias"), "lacks again.bias, first.bias;"),
    "missing embedding": (lambda t: t.pop("words.weight"), "lacks lm_head.weight, words.weight;"),
    "missing buffer": (lambda t: t.pop("count"), "lacks count;"),
    "unexpected": (lambda t: t.update(extra=torch.ones(3)), "the model has no place for extra;"),
    "both": (lambda t: t.update(extra=t.pop("count")), "lacks count; the model has no place for extra;"),
    "scale gone": (lambda t: t.pop("first.weight_scale"), "first.weight"),
    "codes gone": (lambda t: t.pop("first.weight_packed"), "first.weight"),
    "shape": (lambda t: t.update({"inner.1.weight": torch.ones(33)}), r"inner.1.weight has shape \[33\] in the checkpoint and must have \[32\]"),
    "rows": (
        lambda t: t.update({f"first.weight_{part}": t[f"first.weight_{part}"][:32].clone() for part in ("packed", "scale")}),
        r"first.weight has shape \[32, 64\] in the checkpoint and must have \[64, 64\]",
    ),
    "FP8": (lambda t: t.update({"own.bias": t["own.bias"].to(torch.float8_e4m3fn)}), "own.bias is F8_E4M3|own"),
    "tied, differing": (lambda t: t.update({"lm_head.weight": t["words.weight"] * 2}), "the model ties .* which differ in the checkpoint"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_checkpoints_are_refused_and_change_nothing(folder, kind):
    from microscale.torch import load_quantized

    change, message = WRONG[kind]
    changed(folder, change)
    net = Net()
    before, modules = state(net), dict(net.named_modules())
    with pytest.raises(microscale.Error, match=message):
        load_quantized(net, folder)
    assert dict(net.named_modules()) == modules
    after = state(net)
    assert all(after[name][0] == address and torch.equal(after[name][1], x) for name, (address, x) in before.items())


def test_tied_weights_that_are_the_same_may_be_stored_twice(folder):
    from microscale.torch import load_quantized

    changed(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["words.weight"].clone()}))
    net = Net()
    load_quantized(net, folder)
    assert net.lm_head.weight is net.words.weight and torch.equal(net.words.weight, expected_of(folder)["words.weight"])


def test_buffers_on_meta_that_no_checkpoint_has_are_refused(folder):
    from microscale.torch import load_quantized

    with torch.device("meta"):
        net = Net(positions=True)
    with pytest.raises(microscale.Error, match="lacks positions"):
        load_quantized(net, folder)
    assert net.words.weight.is_meta
    net = Net(positions=True)
    load_quantized(net, folder)
    assert net.positions.tolist() == [0, 1, 2, 3]


def test_other_checkpoint_formats_are_refused_with_a_hint(folder, tmp_path):
    from microscale.torch import load_quantized

    other = tmp_path / "other.safetensors"
    program("quantize", tmp_path / "net.safetensors", "--format", "nvfp4", "--to", "modelopt", "--out", other)
    message = "first.weight is nvfp4 in the checkpoint format modelopt.*convert --to compressed-tensors"
    with pytest.raises(microscale.CheckpointError, match=message) as raised:
        load_quantized(Net(), other)
    assert (raised.value.file, raised.value.tensor) == (str(other), "first.weight")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(Net().state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(microscale.CheckpointError, match="pytorch_model.bin is not in safetensors"):
        load_quantized(Net(), pickled)


def test_checkpoints_with_hadamard_transforms_are_refused_by_that_name(tmp_path):
    from microscale.torch import load_quantized

    program("quantize", ROOT / "sample/tiny-llama", "--hadamard", "32", "--out", tmp_path / "out")
    message = "inputs of .*_proj.weight have a Hadamard transform of 32 columns.*without --hadamard"
    with pytest.raises(microscale.CheckpointError, match=message) as raised:
        load_quantized(Net(), tmp_path / "out")
    assert raised.value.tensor.endswith("_proj.weight")


def test_quantized_modules_round_activations_as_asked(folder):
    from microscale.torch import load_quantized

    net, exact = Net(), Net()
    load_quantized(net, folder, activation_format="nvfp4")
    load_quantized(exact, folder)
    assert exact.first.activation_format is None
    x = torch.randn(3, net.first.in_features)
    expected = microscale.linear(x, exact.first._weights(), bias=exact.first.bias.detach(), activations="nvfp4")
    with torch.no_grad():
        assert torch.equal(net.first(x), expected)
    with pytest.raises(microscale.Error, match="allow it with round_weights"):
        load_quantized(Net(), folder, activation_format="fp8")
    load_quantized(net, folder, activation_format="fp8", round_weights=True)
    assert net.first.activation_format == "fp8"


def test_quantized_models_keep_how_they_round_activations(folder):
    from microscale.torch import QuantizedLinear, load_quantized

    net = Net()
    load_quantized(net, folder, activation_format="fp8", round_weights=True)
    weights = net.first._weights()
    scale = microscale.GlobalScale(600.0, "divisor")
    net.inner[0] = QuantizedLinear(net.inner[0]._weights(), activation_format="nvfp4", input_global_scale=scale)
    load_quantized(net, folder)
    assert net.first.activation_format == "fp8" and net.first.round_weights
    assert torch.equal(net.first.weight_packed, weights.codes)
    assert net.inner[0].activation_format == "nvfp4" and net.inner[0].input_global_scale.tolist() == [600.0]
    load_quantized(net, folder, activation_format="nvfp4")
    assert net.first.activation_format == "nvfp4" and not net.first.round_weights
    assert net.inner[0].input_global_scale is None


def test_files_that_are_not_there_or_no_checkpoints(tmp_path):
    from microscale.torch import load_quantized

    (tmp_path / "text.safetensors").write_text("no safetensors")
    for path in (tmp_path / "none", tmp_path / "text.safetensors", tmp_path):
        with pytest.raises(FileNotFoundError if path.name == "none" else microscale.Error):
            load_quantized(Net(), path)
    with pytest.raises(TypeError):
        load_quantized(Net(), 3)


def test_gates_with_other_global_scales_are_refused(small, tmp_path):
    from microscale.torch import load_quantized, quantize_

    model = small.model("qwen3", torch.bfloat16, seed=6)
    quantize_(model, "nvfp4")
    tensors = model.state_dict()
    tensors["model.layers.1.mlp.experts.2.up_proj.weight_global_scale"] *= 2
    safetensors.save_file(tensors, tmp_path / "state.safetensors")
    again = small.empty("qwen3", torch.bfloat16, "cpu", model.config)
    with pytest.raises(microscale.Error, match="layers.1.mlp.experts has different global scales for gate and up"):
        load_quantized(again, tmp_path / "state.safetensors")
    assert kinds(again) == (set(), set())


@pytest.mark.parametrize("change", [lambda t, p: t.pop(f"{p}.3.up_proj.weight_packed"), lambda t, p: t.update({f"{p}.4.up_proj.weight": torch.ones(96, 64)})])
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_experts_that_are_missing_or_too_many_are_refused(small, tmp_path, name, change):
    from microscale.torch import load_quantized, quantize_

    model = small.model(name, torch.bfloat16, seed=6)
    quantize_(model, "mxfp4")
    tensors = model.state_dict()
    change(tensors, "model.layers.1.mlp.experts")
    safetensors.save_file(tensors, tmp_path / "state.safetensors")
    again = small.empty(name, torch.bfloat16, "cpu", model.config)
    before = copy.deepcopy(again)
    with pytest.raises(microscale.Error, match="model.layers.1.mlp.experts"):
        load_quantized(again, tmp_path / "state.safetensors")
    assert kinds(again) == (set(), set())
    same(again, before)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_experts_of_other_shapes_are_refused(small, tmp_path, name):
    from microscale.torch import load_quantized, quantize_

    model = small.model(name, torch.bfloat16, seed=6)
    quantize_(model, "mxfp4")
    for parts in (["1.up_proj"], [f"{i}.{linear}" for i in range(4) for linear in ("gate_proj", "up_proj")]):
        tensors = model.state_dict()
        for part in parts:
            for suffix in ("weight_packed", "weight_scale"):
                key = f"model.layers.1.mlp.experts.{part}.{suffix}"
                tensors[key] = tensors[key][:8].clone()
        safetensors.save_file(tensors, tmp_path / "state.safetensors")
        again = small.empty(name, torch.bfloat16, "cpu", model.config)
        with pytest.raises(microscale.Error, match="model.layers.1.mlp.experts"):
            load_quantized(again, tmp_path / "state.safetensors")
        assert kinds(again) == (set(), set())
