"""`quantize_`: the modules that it replaces, their attributes, and failures.

Skipped where PyTorch is not installed.
"""

import copy
import pickle

import pytest

import microscale

torch = pytest.importorskip("torch")
nn = torch.nn
prune = pytest.importorskip("torch.nn.utils.prune")


def quantized(model):
    from microscale.torch import QuantizedExperts, QuantizedLinear

    return {name for name, module in model.named_modules() if isinstance(module, (QuantizedLinear, QuantizedExperts))}


class Named(nn.Module):
    """A module with the given children."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def failing():
    """Layers that cannot be quantized, with the error."""
    nan, double, hooked = nn.Linear(64, 8), nn.Linear(64, 8, dtype=torch.float64), nn.Linear(64, 8)
    with torch.no_grad():
        nan.weight[3, 5] = torch.nan
    hooked.forward = hooked.forward
    infinite = nn.Linear(64, 8, device="cpu")
    with torch.no_grad():
        infinite.weight[7, 63] = torch.inf
    return {
        "nan": (nan, microscale.NonFiniteError, "inner.last: .*NaN"),
        "infinite": (infinite, microscale.NonFiniteError, "inner.last: "),
        "double": (double, TypeError, "inner.last: .*float64; pass float32"),
        "double on meta": (double.to("meta"), TypeError, "inner.last: .*float64"),
        "own forward": (hooked, microscale.Error, "inner.last: its method forward was replaced"),
    }


@pytest.mark.parametrize("kind", ["nan", "infinite", "double", "double on meta", "own forward"])
def test_a_failure_names_the_layer_and_changes_nothing(kind):
    from microscale.torch import quantize_

    last, error, message = failing()[kind]
    model = Named(first=nn.Linear(64, 32), inner=Named(middle=nn.Linear(32, 64), last=last))
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if not tensor.is_meta}
    with pytest.raises(error, match=message) as raised:
        quantize_(model, "nvfp4")
    if error is microscale.NonFiniteError:
        assert raised.value.first in [(3, 5), (7, 63)] and raised.value.nan + raised.value.infinite == 1
    assert dict(model.named_modules()) == modules and dict(model.named_parameters()).keys() == parameters.keys()
    assert all(tensor is parameters[name] for name, tensor in model.named_parameters())
    assert all(torch.equal(tensor.nan_to_num(), model.state_dict()[name].nan_to_num()) for name, tensor in before.items())
    assert quantize_(model, "nvfp4", exclude=["inner.last"]) == ["first", "inner.middle"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": {"format": "nvfp4", "numerics": "modelopt"}}, "0: .*divisor"),
        ({"recipe": {"format": "mxfp8-e4m3"}}, "nvfp4 or mxfp4, not to mxfp8-e4m3"),
        ({"recipe": {"layout": "swizzled"}}, "0: .*linear scales"),
        ({"recipe": {"search": "best"}}, "0: .*best"),
        ({"filter_fn": lambda module, name: 1 / (name != "1")}, None),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_options_change_nothing(options, message, device):
    from microscale.torch import quantize_

    model = nn.Sequential(nn.Linear(64, 32, device=device), nn.Linear(32, 32, device=device))
    with pytest.raises(microscale.Error if message else ZeroDivisionError, match=message):
        quantize_(model, **options)
    assert not quantized(model)


def test_a_layer_by_itself_is_refused():
    from microscale.torch import quantize_

    with pytest.raises(microscale.Error, match="use QuantizedLinear.from_linear"):
        quantize_(nn.Linear(64, 32), "nvfp4")


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_modules_keep_their_mode_and_their_bias(requires_grad, training):
    from microscale.torch import quantize_

    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32, bias=False))
    model[0].bias.requires_grad_(requires_grad)
    model[0].train(training)
    model[1].train(not training)
    model[0].index, bias = 7, model[0].bias
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    quantize_(model, "nvfp4")
    assert (model[0].training, model[1].training, model[0].index) == (training, not training, 7)
    assert model[0].bias is bias and model[0].bias.requires_grad == requires_grad and model[1].bias is None
    if requires_grad:
        before = model[0].bias.detach().clone()
        model(torch.randn(3, 64)).sum().backward()
        optimizer.step()
        assert not torch.equal(model[0].bias, before)


def test_modules_keep_their_hooks_and_handles_remove_them():
    from microscale.torch import quantize_

    model, calls = nn.Sequential(nn.Linear(64, 32)), []
    layer = model[0]
    handles = [
        layer.register_forward_pre_hook(lambda module, args: calls.append("pre")),
        layer.register_forward_pre_hook(lambda module, args, kwargs: calls.append("pre with kwargs"), with_kwargs=True),
        layer.register_forward_hook(lambda module, args, y: calls.append("forward")),
        layer.register_forward_hook(lambda module, args, kwargs, y: calls.append("with kwargs"), with_kwargs=True),
        layer.register_forward_hook(lambda module, args, y: calls.append("always"), always_call=True),
        layer.register_full_backward_pre_hook(lambda module, gradient: calls.append("backward pre")),
        layer.register_full_backward_hook(lambda module, before, after: calls.append("backward")),
    ]
    x = torch.randn(3, 64, requires_grad=True)
    model(x).sum().backward()
    expected, calls[:] = list(calls), []
    assert len(expected) == len(handles)
    quantize_(model, "nvfp4")
    model(x).sum().backward()
    assert calls == expected
    calls.clear()
    for handle in handles:
        handle.remove()
    model(x).sum().backward()
    assert calls == []


def test_a_module_with_two_names_is_replaced_under_both():
    from microscale.torch import quantize_

    shared = nn.Linear(64, 64)
    block = Named(inner=nn.Linear(64, 32))
    model = Named(first=shared, middle=Named(again=shared, block=block), block=block)
    names = quantize_(model, "nvfp4")
    assert sorted(names) == ["block.inner", "first", "middle.again", "middle.block.inner"]
    assert model.first is model.middle.again and model.block.inner is model.middle.block.inner
    assert quantized(model) == {"first", "middle.block.inner"} and type(model.first) is not nn.Linear
    # Excluded under one name, it stays under both.
    for options in ({"exclude": ["middle.again"]}, {"filter_fn": lambda module, name: name != "first"}):
        model = Named(first=shared, middle=Named(again=shared))
        assert quantize_(model, **options) == [] and model.first is model.middle.again is shared


HEADS = [
    *("lm_head", "decoder.lm_head", "language_model.lm_head", "embed_out", "model.embed_out", "output_projection", "lm_head.decoder"),
    *("cls.predictions.decoder", "bert.cls.predictions.decoder", "generator_lm_head", "proj_out", "head", "output", "lm_loss"),
    *("pred_layer.proj", "vocab_projector", "lm_heads.0", "output_layer"),
]


@pytest.mark.parametrize("name", HEADS)
def test_layers_with_names_of_heads_stay_unquantized(name):
    from microscale.torch import quantize_

    def model():
        made = Named(body=Named(proj_out=nn.Linear(64, 64), output=nn.Linear(64, 64), headway=nn.Linear(64, 64)))
        parent = made
        *parents, own = name.split(".")
        for part in parents:
            parent.add_module(part, parent._modules.get(part) or Named())
            parent = parent._modules[part]
        parent.add_module(own, nn.Linear(64, 96))
        return made

    body = ["body.proj_out", "body.output", "body.headway"]
    assert quantize_(model(), "nvfp4") == body
    assert quantize_(model(), "nvfp4", exclude=["*.headway"]) == body[:2]
    assert quantize_(model(), "nvfp4", include=[name]) == [*body, name]
    assert quantize_(model(), "nvfp4", include=["*"], exclude=[name]) == body


class Asked(nn.Module):
    """A model with an output head of an unknown name."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.to_words = nn.Linear(64, 96)

    def get_output_embeddings(self):
        return self.to_words


def test_output_embeddings_of_models_stay_unquantized():
    from microscale.torch import quantize_

    assert quantize_(Asked(), "nvfp4") == ["body"]
    assert quantize_(Named(inner=Asked(), other=nn.Linear(64, 64)), "nvfp4") == ["inner.body", "other"]
    several = Asked()
    several.to_words = nn.ModuleList([nn.Linear(64, 96), nn.Linear(64, 96)])
    assert quantize_(several, "nvfp4") == ["body"]
    for error in (NotImplementedError, AttributeError):
        silent = Asked()
        silent.get_output_embeddings = lambda error=error: (_ for _ in ()).throw(error())
        assert quantize_(silent, "nvfp4") == ["body", "to_words"]


def tied(by):
    """A model whose classifier has the weights of the embedding."""
    model = Named(words=nn.Embedding(96, 64), body=nn.Linear(64, 64), classify=nn.Linear(64, 96, bias=False))
    if by == "parameter":
        model.classify.weight = model.words.weight
    elif by == "memory":
        model.classify.weight = nn.Parameter(model.words.weight.detach())
    else:
        model = copy.deepcopy(tied("parameter")).to(by)
        model.classify.weight = model.words.weight
    return model


@pytest.mark.parametrize("by", ["parameter", "memory", "meta"])
def test_tied_weights_stay_unquantized(by):
    from microscale.torch import quantize_

    model = tied(by)
    with pytest.raises(microscale.Error, match="classify shares its weights with words"):
        quantize_(model, "nvfp4", include=["classify"])
    assert not quantized(model)
    assert quantize_(model, "nvfp4") == ["body"]
    if by != "memory":
        assert model.classify.weight is model.words.weight
    # Two linear layers with the same weights stay tied as well.
    model = Named(one=nn.Linear(64, 64), two=nn.Linear(64, 64), three=nn.Linear(64, 64))
    model.two.weight = model.one.weight
    assert quantize_(model, "nvfp4") == ["three"]


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def unusual():
    """Linear layers with other tensors than a weight and a bias, or another class."""
    parametrized, normed, pruned, spectral = (nn.Linear(64, 64) for _ in range(4))
    nn.utils.parametrizations.orthogonal(parametrized)
    nn.utils.parametrizations.weight_norm(normed)
    prune.l1_unstructured(pruned, "weight", amount=0.5)
    nn.utils.parametrizations.spectral_norm(spectral)
    old = nn.utils.weight_norm(nn.Linear(64, 64))
    older = nn.utils.spectral_norm(nn.Linear(64, 64))
    buffered, nested = nn.Linear(64, 64), nn.Linear(64, 64)
    buffered.register_buffer("mask", torch.ones(64))
    nested.adapter = nn.Linear(60, 60)
    more = nn.Linear(64, 64)
    more.register_parameter("gain", nn.Parameter(torch.ones(1)))
    ready = nn.LazyLinear(64)
    ready(torch.randn(2, 60))
    return {
        "subclass": Own(64, 64),
        "parametrization": parametrized,
        "weight norm": normed,
        "old weight norm": old,
        "spectral norm": spectral,
        "old spectral norm": older,
        "pruned": pruned,
        "buffer": buffered,
        "child": nested,
        "parameter": more,
        "lazy": nn.LazyLinear(64),
        "lazy, with other columns": ready,
        "attention's": nn.MultiheadAttention(64, 2).out_proj,
        "bilinear": nn.Bilinear(64, 64, 64),
        "identity": nn.Identity(),
        "half a block": nn.Linear(72, 64),
        "no rows": nn.Linear(64, 0),
        "no columns": nn.Linear(0, 64),
    }


@pytest.mark.filterwarnings("ignore:.*(weight_norm|zero-element|Lazy)")
@pytest.mark.parametrize("kind", unusual())
def test_other_layers_stay_unquantized(kind):
    from microscale.torch import quantize_

    model = Named(one=nn.Linear(64, 64), other=unusual()[kind])
    other = model.other
    assert quantize_(model, "nvfp4") == ["one"] and model.other is other


def test_a_lazy_layer_that_was_made_is_a_layer():
    from microscale.torch import quantize_

    model = Named(lazy=nn.LazyLinear(32))
    model.lazy(torch.randn(2, 64))
    assert quantize_(model, "nvfp4") == ["lazy"]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_models_on_meta_stay_there_and_take_states(format):
    from microscale.torch import quantize_

    def model(device):
        return nn.Sequential(nn.Linear(64, 32, device=device), nn.ReLU(), nn.Linear(32, 32, bias=False, device=device, dtype=torch.bfloat16))

    here, there = model("cpu"), model("meta")
    assert quantize_(here, format) == quantize_(there, format) == ["0", "2"]
    facts = {name: (tensor.shape, tensor.dtype) for name, tensor in here.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in there.state_dict().items()} == facts
    assert all(tensor.is_meta for tensor in there.state_dict().values())
    assert there[2].weight.is_meta and there[2].weight.dtype == torch.bfloat16
    assert there[0](torch.empty(3, 64, device="meta")).shape == (3, 32)
    with pytest.warns(UserWarning, match="no-op"):
        there.load_state_dict(here.state_dict())
    assert there[0].weight.is_meta
    there.load_state_dict(here.state_dict(), assign=True)
    x = torch.randn(3, 64)
    assert torch.equal(there[0](x), here[0](x)) and torch.equal(there[2].weight, here[2].weight)


def test_quantized_models_can_be_copied_and_pickled():
    from microscale.torch import quantize_

    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    quantize_(model, "nvfp4")
    x = torch.randn(3, 64)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), model(x)) and quantized(copied) == {"0", "2"}


HEADS_OF_CLASSES = {
    "llama": {"lm_head"},
    "llama, tied": {"lm_head"},
    "llama, classes": set(),
    "llama, base": set(),
    "gptneox": {"lm_head"},
    "bert": {"cls.predictions.decoder"},
    "roberta": {"lm_head.decoder"},
    "electra": {"generator_lm_head"},
    "albert": {"predictions.decoder"},
    "whisper": {"proj_out"},
    "t5": {"lm_head"},
    "mamba": {"lm_head"},
    "llava": {"lm_head"},
    "mixtral": {"lm_head"},
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", HEADS_OF_CLASSES)
def test_heads_of_transformers_stay_unquantized(name, device):
    pytest.importorskip("transformers")
    import small_models

    from microscale.torch import quantize_

    model = small_models.empty(name, torch.bfloat16, device)
    assert quantize_(model, "mxfp4")
    assert {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} == HEADS_OF_CLASSES[name]


def test_models_of_another_quantizer_are_refused():
    pytest.importorskip("transformers")
    import small_models
    from transformers.quantizers.quantizer_hqq import HqqHfQuantizer

    from microscale.torch import quantize_

    model = small_models.model("llama")
    model.hf_quantizer = HqqHfQuantizer.__new__(HqqHfQuantizer)
    with pytest.raises(microscale.Error, match="the model was quantized by HqqHfQuantizer"):
        quantize_(model, "nvfp4")
    assert not quantized(model)
