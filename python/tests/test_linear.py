"""`QuantizedLinear` compared with `nn.Linear`: shapes, gradients, autocast, devices.

Skipped where PyTorch is not installed.
"""

import copy

import pytest

import microscale

torch = pytest.importorskip("torch")

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def no_graphs():
    """Each test compiles its own graphs: PyTorch keeps few of one function."""
    torch._dynamo.reset()


@pytest.fixture(params=["nvfp4", "mxfp4"])
def layers(request):
    """A quantized layer, and an unquantized one with its weights."""
    from microscale.torch import QuantizedLinear

    torch.manual_seed(5)
    layer = torch.nn.Linear(64, 32)
    quantized = QuantizedLinear.from_linear(layer, request.param)
    layer.weight.data = quantized.dequantize()
    quantized.bias = torch.nn.Parameter(layer.bias.detach().clone())
    return quantized, layer


SHAPES = [(64,), (1, 64), (3, 64), (2, 3, 64), (0, 64), (2, 0, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("of_x", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_gradients_have_the_shapes_and_values_of_linears(layers, shape, of_x, compiled):
    x = torch.randn(shape)
    found = []
    for layer in layers:
        call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        own = x.clone().requires_grad_(of_x)
        y = call(own)
        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
        found.append((y, layer.bias.grad, own.grad))
    for mine, theirs in zip(*found):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_16_bits(layers, dtype):
    for x in (torch.randn(64, dtype=dtype), torch.randn(3, 64, dtype=dtype)):
        found = []
        for layer, weights in zip(layers, (None, layers[1].weight.to(dtype))):
            own = x.clone().requires_grad_()
            layer.bias.grad = None
            y = layer(own) if weights is None else torch.nn.functional.linear(own, weights, layer.bias.to(dtype))
            y.sum().backward()
            found.append((y, own.grad, layer.bias.grad))
        for mine, theirs in zip(*found):
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


def test_a_frozen_bias_gets_no_gradient(layers):
    layer, _ = layers
    layer.bias.requires_grad_(False)
    for x in (torch.randn(3, 64), torch.randn(64, requires_grad=True)):
        y = layer(x)
        assert y.requires_grad == x.requires_grad
        if x.requires_grad:
            y.sum().backward()
    assert layer.bias.grad is None


@pytest.mark.parametrize("shape", [(3, 62), (62,), (3, 65), (3, 32), (3, 128), (3, 1), (3, 0), ()])
@pytest.mark.parametrize("of_x", [True, False])
def test_other_columns_are_refused(layers, shape, of_x):
    layer, _ = layers
    x = torch.randn(shape).requires_grad_(of_x)
    with pytest.raises(microscale.Error, match=r"activations have shape \[.*\] and the weights 64 columns; pass activations \[..., 64\]"):
        layer(x)
    for dynamic in (None, True):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="activations have shape"):
            torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)(x)


def test_compiled_graphs_refuse_other_columns_after_the_first_call(layers):
    layer, _ = layers
    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for rows in (2, 3, 5):
            x = torch.randn(rows, 64)
            assert torch.equal(compiled(x), layer(x))
            with pytest.raises(Exception, match="activations have shape"):
                compiled(torch.randn(rows, 62))


def test_the_operators_check_shapes_for_compilers(layers):
    layer, _ = layers
    parts = (*layer._parts(), layer.format, "divisor")
    call = torch.compile(lambda x, bias: torch.ops.microscale.linear(x, *parts, bias), fullgraph=True, backend="aot_eager")
    assert call(torch.randn(3, 64), torch.randn(32)).shape == (3, 32)
    for x, bias in [
        (torch.randn(3, 32), None),
        (torch.randn(3, 65), None),
        (torch.randn(3, 64), torch.randn(31)),
        (torch.randn(3, 64), torch.randn(1)),
        (torch.randn(3, 64), torch.randn(3, 32)),
        (torch.randn(3, 64), torch.randn(32).half()),
    ]:
        with pytest.raises(Exception, match="activations have shape|bias is"):
            call(x, bias)


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        (torch.randn(31), microscale.Error, r"bias has shape \[31\] and must have \[32\]"),
        (torch.randn(1), microscale.Error, "bias has shape"),
        (torch.tensor(1.0), microscale.Error, "bias has shape"),
        (torch.randn(32, 1), microscale.Error, "bias has shape"),
        (torch.randn(1, 32), microscale.Error, "bias has shape"),
        (torch.randn(3, 32), microscale.Error, "bias has shape"),
        (torch.randn(64)[::2], microscale.Error, "bias must be contiguous"),
        (torch.randn(32).half(), TypeError, "bias is float16 and must be float32"),
        (torch.randn(32).double(), TypeError, "bias has dtype torch.float64"),
        (torch.ones(32, dtype=torch.int32), TypeError, "bias is int32 and must be float32"),
        (torch.ones(32, dtype=torch.bool), TypeError, "bias has dtype torch.bool"),
        (torch.ones(32, device="meta"), TypeError, "bias is a tensor on meta"),
        (torch.ones(32).to_sparse(), TypeError, "bias is a sparse tensor"),
        ([1.0] * 32, TypeError, "bias is a list"),
        (1.0, TypeError, "bias is of type float"),
    ],
)
def test_biases_that_are_refused(bias, error, message):
    weights = microscale.quantize(torch.randn(32, 64), "nvfp4")
    for x in (torch.randn(3, 64), torch.randn(64), torch.randn(0, 64)):
        with pytest.raises(error, match=message):
            microscale.linear(x, weights, bias=bias)


def test_inputs_may_have_any_strides(layers):
    layer, linear = layers
    wide = torch.randn(6, 128)
    for x in (wide[:, ::2], wide[::2, :64], torch.randn(64, 5).t(), torch.randn(1, 64).expand(4, 64), wide[:, :64].reshape(2, 3, 64).transpose(0, 1)):
        for of_x in (True, False):
            y = layer(x.detach().requires_grad_(of_x))
            torch.testing.assert_close(y, linear(x), rtol=1e-4, atol=1e-5)


def test_other_dtypes_are_refused(layers):
    layer, _ = layers
    for dtype in (torch.float64, torch.int64, torch.bool):
        with pytest.raises(TypeError, match="choose float32, float16 or bfloat16"):
            layer(torch.ones(3, 64).to(dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("of_x", [True, False])
def test_autocast_casts_as_it_does_for_linears(layers, dtype, of_x):
    layer, linear = layers
    for own in (torch.float32, *HALVES):
        x = torch.randn(3, 64, dtype=own).requires_grad_(of_x)
        with torch.autocast("cpu", dtype=dtype):
            y, expected = layer(x), linear(x)
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        assert y.dtype == expected.dtype == compiled.dtype == dtype and torch.equal(y, compiled)
        torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
        y.float().sum().backward()
        assert layer.bias.grad.dtype == torch.float32 and (not of_x or x.grad.dtype == own)
    with torch.autocast("cpu", dtype=dtype, enabled=False):
        assert layer(torch.randn(3, 64)).dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype):
        for module in layers:
            with pytest.raises((TypeError, RuntimeError)):
                module(torch.randn(3, 64, dtype=torch.float64))


def test_layers_on_meta_give_meta_results(layers):
    layer, linear = layers
    layer, linear = copy.deepcopy(layer).to("meta"), linear.to("meta")
    for shape in SHAPES:
        x = torch.empty(shape, device="meta", dtype=torch.bfloat16)
        y = layer(x)
        assert y.is_meta and y.shape == linear(x.float()).shape and y.dtype == x.dtype
    with pytest.raises(microscale.Error, match="pass activations"):
        layer(torch.empty(3, 62, device="meta"))


@pytest.mark.parametrize("sizes", [(64, 0), (0, 8)])
def test_layers_without_elements(sizes):
    from microscale.torch import QuantizedLinear

    layer = torch.nn.Linear(*sizes)
    quantized = QuantizedLinear.from_linear(layer, "nvfp4")
    x = torch.randn(3, sizes[0])
    assert torch.equal(quantized(x), layer(x))


def test_weights_without_a_global_scale_have_a_one_in_the_state():
    from microscale.torch import QuantizedLinear

    weights = microscale.quantize(torch.randn(32, 64), "nvfp4", global_scale="none")
    assert weights.direction is None
    layer = QuantizedLinear(weights)
    assert layer.state_dict()["weight_global_scale"].tolist() == [1.0]
    assert torch.equal(layer.dequantize(), weights.dequantize())
    x = torch.randn(3, 64)
    assert torch.equal(layer(x), microscale.linear(x, weights))


def test_parameters_of_functional_calls_are_the_bias(layers):
    layer, _ = layers
    x, bias = torch.randn(3, 64), torch.randn(32)
    y = torch.func.functional_call(layer, {"bias": bias}, (x,))
    torch.testing.assert_close(y, layer(x) - layer.bias + bias)
    with pytest.raises(AttributeError, match="read-only"):
        torch.func.functional_call(layer, {"weight": torch.zeros(32, 64)}, (x,))
