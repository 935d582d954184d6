"""`QuantizedLinear.weight`, and modules that read it. Skipped where PyTorch is not installed."""

import copy
import io
import pickle

import numpy as np
import pytest

import microscale

torch = pytest.importorskip("torch")
F = torch.nn.functional

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture(params=["nvfp4", "mxfp4"])
def layer(request):
    from microscale.torch import QuantizedLinear

    torch.manual_seed(2)
    return QuantizedLinear.from_linear(torch.nn.Linear(64, 32), request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weight_is_the_dequantized_one_in_the_layers_dtype(layer, dtype):
    layer = layer.to(dtype)
    assert isinstance(layer.weight, torch.Tensor) and not isinstance(layer.weight, torch.nn.Parameter)
    assert (layer.weight.dtype, layer.weight.shape, layer.weight.device) == (dtype, (32, 64), torch.device("cpu"))
    expected = layer.dequantize(torch.float32).to(dtype)
    assert torch.equal(layer.weight, expected) and torch.equal(layer.dequantize(dtype), expected)
    x = torch.randn(3, 64, dtype=dtype)
    assert torch.equal(F.linear(x, layer.weight, layer.bias), F.linear(x, expected, layer.bias))
    assert torch.equal(layer.weight @ x.t(), expected @ x.t()) and torch.equal(layer.weight[3], expected[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_the_dtype_is_that_of_the_quantized_weights(dtype, bias):
    from microscale.torch import QuantizedLinear

    layer = QuantizedLinear.from_linear(torch.nn.Linear(64, 32, bias=bias, dtype=dtype), "nvfp4")
    assert layer.weight.dtype == dtype
    assert layer.half().weight.dtype == torch.float16 and layer.to("meta").weight.is_meta
    assert QuantizedLinear(microscale.quantize(torch.randn(32, 64), "nvfp4")).weight.dtype == torch.get_default_dtype()


def test_shape_dtype_and_device_need_no_values(layer, monkeypatch):
    monkeypatch.setattr(type(layer), "dequantize", lambda *_: pytest.fail("the weights are dequantized"))
    weight = layer.weight
    assert (weight.shape, weight.size(1), weight.dim(), weight.ndim, len(weight)) == ((32, 64), 64, 2, 2, 32)
    assert (weight.dtype, weight.device, weight.layout) == (torch.float32, torch.device("cpu"), torch.strided)
    assert (weight.numel(), weight.element_size(), weight.nbytes, weight.stride()) == (2048, 4, 8192, (64, 1))
    assert weight.is_cpu and not weight.is_cuda and not weight.is_meta and weight.is_floating_point()
    assert torch.is_floating_point(weight) and weight.is_contiguous() and not weight.requires_grad
    assert weight.grad is None and weight.is_leaf and weight.get_device() == -1


def test_the_weight_is_no_part_of_the_state(layer):
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert "weight" not in layer.state_dict() and "weight" not in dict(layer.named_buffers())
    with pytest.raises(RuntimeError, match='Missing key.*weight_packed(.|\n)*Unexpected key.*"weight"'):
        layer.load_state_dict({"weight": torch.randn(32, 64), "bias": layer.bias})


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.zero_(),
        lambda w: w.copy_(torch.zeros(32, 64)),
        lambda w: w.data.copy_(torch.zeros(32, 64)),
        lambda w: w.detach().mul_(2),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: w.__iadd__(1),
        lambda w: setattr(w, "data", torch.zeros(32, 64)),
        lambda w: torch.nn.init.normal_(w),
        lambda w: torch.nn.init.zeros_(tensor=w),
        lambda w: torch.add(w, w, out=w),
        lambda w: torch.ops.aten.mul_(w, 2),
        lambda w: microscale.dequantize(microscale.quantize(torch.zeros(32, 64), "nvfp4"), out=w),
        lambda w: w.requires_grad_(),
        lambda w: setattr(w, "requires_grad", True),
    ],
)
def test_the_weight_is_read_only(layer, write):
    expected = layer.dequantize()
    with pytest.raises(microscale.Error, match="read-only"):
        write(layer.weight)
    assert torch.equal(layer.dequantize(), expected)


@pytest.mark.parametrize("value", [torch.nn.Parameter(torch.randn(32, 64)), torch.randn(32, 64), None])
def test_assigning_to_the_weight_is_an_error(layer, value):
    expected = layer.dequantize()
    with pytest.raises(AttributeError, match="weight of a QuantizedLinear is read-only; load a state"):
        layer.weight = value
    assert torch.equal(layer.dequantize(), expected) and "weight" not in layer._parameters


def test_a_weight_can_be_frozen_which_it_is(layer):
    layer.weight.requires_grad_(False).requires_grad = False
    assert not layer.requires_grad_(False).weight.requires_grad


def test_copies_and_pickles_have_the_values(layer):
    expected = layer.dequantize()
    for copied in (copy.deepcopy(layer.weight), pickle.loads(pickle.dumps(layer.weight)), layer.weight.clone(), layer.weight.to("cpu", copy=True)):
        assert type(copied) is torch.Tensor and torch.equal(copied, expected)
    file = io.BytesIO()
    torch.save(layer.weight, file)
    file.seek(0)
    assert torch.equal(torch.load(file), expected)
    np.testing.assert_array_equal(layer.weight.numpy(), expected.numpy())
    np.testing.assert_array_equal(np.asarray(layer.weight), expected.numpy())
    assert layer.weight.tolist() == expected.tolist() and repr(layer.weight) == repr(expected)


def test_copies_and_pickles_of_layers_have_their_own_weights(layer):
    expected, x = layer.weight.clone(), torch.randn(3, 64)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied.weight, expected) and torch.equal(copied(x), layer(x))
        assert {name: tensor.dtype for name, tensor in copied.state_dict().items()} == {
            name: tensor.dtype for name, tensor in layer.state_dict().items()
        }
        copied.weight_packed.zero_()
        assert torch.equal(layer.weight, expected) and not torch.equal(copied.weight, expected)


def test_the_library_reads_the_values(layer):
    expected = layer.dequantize()
    q = microscale.quantize(layer.weight, layer.format)
    assert torch.equal(q.codes, microscale.quantize(expected, layer.format).codes)
    assert microscale.compare(expected, layer.weight).max_abs_error == 0
    with pytest.raises(RuntimeError, match="no memory with values"):
        layer.weight.data_ptr()


def test_gradients_go_through_products_with_the_weight(layer):
    x = torch.randn(3, 64, requires_grad=True)
    F.linear(x, layer.weight).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3, 32) @ layer.dequantize())


def test_compiled_graphs_read_the_weight(layer):
    def product(x):
        return F.linear(x.to(layer.weight.dtype), layer.weight)

    x = torch.randn(3, 64)
    torch.testing.assert_close(torch.compile(product, fullgraph=True, backend="aot_eager")(x), product(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_works_with_a_quantized_output_projection(bias, need_weights):
    from microscale.torch import QuantizedLinear, quantize_

    attention = torch.nn.MultiheadAttention(64, 2, bias=bias, batch_first=True).eval()
    # PyTorch reads the weight of the projection and does not call it.
    assert quantize_(torch.nn.ModuleList([attention]), "nvfp4") == [] and type(attention.out_proj) is not QuantizedLinear
    attention.out_proj = QuantizedLinear.from_linear(torch.nn.Linear(64, 64, bias=bias), "nvfp4")
    expected = copy.deepcopy(attention)
    expected.out_proj = torch.nn.Linear(64, 64, bias=bias)
    expected.out_proj.weight.data = attention.out_proj.dequantize()
    expected.out_proj.bias = attention.out_proj.bias
    x = torch.randn(2, 5, 64)
    for grad in (torch.no_grad, torch.enable_grad):
        with grad():
            y, z = (module(x, x, x, need_weights=need_weights)[0] for module in (attention, expected))
        torch.testing.assert_close(y, z)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_transformer_layers_work_in_both_modes(activation, norm_first, masked):
    from microscale.torch import quantize_

    torch.manual_seed(4)
    one = torch.nn.TransformerEncoderLayer(64, 2, 96, dropout=0, activation=activation, batch_first=True, norm_first=norm_first)
    encoder = torch.nn.TransformerEncoder(one, 2, enable_nested_tensor=not norm_first)
    expected = copy.deepcopy(encoder)
    names = quantize_(encoder, "nvfp4")
    assert names == [f"layers.{layer}.linear{i}" for layer in range(2) for i in (1, 2)]
    for name in names:
        expected.get_submodule(name).weight.data = encoder.get_submodule(name).dequantize()
    x, mask = torch.randn(2, 5, 64), torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = masked
    kept = ~mask
    for training in (True, False):
        for grad in (torch.no_grad, torch.enable_grad):
            with grad():
                y, z = (module.train(training)(x, src_key_padding_mask=mask) for module in (encoder, expected))
            torch.testing.assert_close(y[kept], z[kept], rtol=1e-4, atol=1e-4)


MODULES = ["t5", "switch", "nllb", "mamba", "mobilebert", "siglip", "llava", "falcon"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
def test_models_that_read_weights_compute(name, dtype):
    pytest.importorskip("transformers")
    import small_models

    from microscale.torch import quantize_

    model = small_models.model(name, dtype)
    original = copy.deepcopy(model)
    names = quantize_(model, "mxfp4")
    assert (len(names) >= 8) != (name == "falcon"), names
    expected = small_models.dequantized(model, original, names)
    error = small_models.relative_squared_error(small_models.outputs(model), small_models.outputs(expected))
    assert error < (1e-10 if dtype is torch.float32 else 1e-3)
