"""PyTorch on NVIDIA GPUs: operators, layers, compiled and captured."""

import copy

import pytest

torch = pytest.importorskip("torch")

from on_gpu import DTYPES, captured, values, within_bound  # noqa: E402

import microscale  # noqa: E402
from microscale.torch import QuantizedLinear, quantize_  # noqa: E402


def layer(format="nvfp4", rows=96, cols=128, bias=True, dtype=torch.bfloat16):
    torch.manual_seed(3)
    linear = torch.nn.Linear(cols, rows, bias=bias, device="cuda", dtype=dtype)
    return QuantizedLinear.from_linear(linear, format)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_layers_quantized_there_are_those_quantized_here(format):
    torch.manual_seed(1)
    here = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64, bias=False))
    there = copy.deepcopy(here).cuda()
    assert quantize_(here, format) == quantize_(there, format) == ["0", "2"]
    moved = copy.deepcopy(here).to("cuda")
    for name, tensor in here.state_dict().items():
        for other in (there, moved):
            found = other.state_dict()[name]
            assert found.is_cuda and found.dtype == tensor.dtype and found.shape == tensor.shape
            assert torch.equal(found.cpu().view(torch.uint8), tensor.view(torch.uint8)), name
    back = moved.cpu()
    x = torch.randn(3, 64)
    assert torch.equal(back(x), here(x))
    for name, tensor in there.state_dict().items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, f"{name} is a view of more memory, which would be saved with it"


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_is_within_the_bound(format, dtype):
    module = layer(format, bias=False, dtype=dtype)
    weights = microscale.Quantized(
        module.weight_packed,
        module.weight_scale,
        format=format,
        global_scale=microscale.GlobalScale(module.weight_global_scale, "divisor") if format == "nvfp4" else None,
    )
    for shape in [(1, 128), (8, 128), (9, 128), (2, 50, 128)]:
        x = torch.randn(shape, dtype=dtype, device="cuda")
        y = module(x)
        assert y.dtype == dtype and y.shape == (*shape[:-1], 96)
        if dtype is not torch.float32:
            within_bound(y.reshape(-1, 96), weights, x.reshape(-1, 128))
            assert torch.equal(module(x.t().contiguous().t() if x.dim() == 2 else x), y)
        else:
            torch.testing.assert_close(y, x @ weights.dequantize().T, rtol=1e-4, atol=1e-4)


def test_weights_that_change_are_seen():
    module, other = layer(), layer()
    x = torch.randn(2, 128, dtype=torch.bfloat16, device="cuda")
    y = module(x)
    linear = torch.nn.Linear(128, 96, device="cuda", dtype=torch.bfloat16)
    other = QuantizedLinear.from_linear(linear, "nvfp4")
    assert not torch.equal(other(x), y)
    module.load_state_dict(other.state_dict())
    assert torch.equal(module(x), other(x))
    module.weight_scale = layer().weight_scale
    assert not torch.equal(module(x), other(x))
    twin = copy.deepcopy(module)
    assert torch.equal(twin(x), module(x))
    with torch.no_grad():
        twin.weight_packed.zero_()
    assert torch.equal(twin(x), twin.bias.expand(2, 96)) and not torch.equal(module(x), twin(x))


def test_operators_are_what_torch_asks_of_them():
    x = values((4, 48)).cuda()
    for format in ("nvfp4", "mxfp4"):
        torch.library.opcheck(torch.ops.microscale.quantize, (x, format, None, None, None))
    parts = torch.ops.microscale.quantize(x, "nvfp4", None, "full", "error")
    torch.library.opcheck(torch.ops.microscale.dequantize, (*parts, "nvfp4", "divisor", 48, torch.float16))
    weights = torch.ops.microscale.quantize(torch.randn(24, 64, device="cuda"), "nvfp4", None, None, None)
    for tokens in (3, 20):
        x = torch.randn(tokens, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        torch.library.opcheck(torch.ops.microscale.linear, (x, *weights, "nvfp4", "divisor"))


def test_gradients_reach_the_input():
    module = layer()
    x = torch.randn(4, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    module(x).sum().backward()
    expected = torch.ones(4, 96, dtype=torch.bfloat16, device="cuda") @ module.dequantize(torch.bfloat16)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("backend", ["aot_eager", "cudagraphs"])
def test_the_graph_is_not_broken(backend):
    model = torch.nn.Sequential(layer(), torch.nn.SiLU(), layer(rows=64, cols=96)).requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for tokens in (1, 20):
            for _ in range(4):
                x = torch.randn(tokens, 128, dtype=torch.bfloat16, device="cuda")
                assert torch.equal(compiled(x).clone(), model(x))


@pytest.mark.parametrize("tokens", [1, 8, 9, 64])
def test_layers_in_a_graph(tokens):
    model = torch.nn.Sequential(layer(), torch.nn.SiLU(), layer("mxfp4", rows=64, cols=96)).requires_grad_(False)
    x = torch.randn(tokens, 128, dtype=torch.bfloat16, device="cuda")
    graph, y = captured(lambda: model(x))
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, model(x))


def test_non_finite_weights_are_an_error():
    linear = torch.nn.Linear(32, 8, device="cuda")
    with torch.no_grad():
        linear.weight[2, 5] = float("inf")
    with pytest.raises(microscale.NonFiniteError) as raised:
        QuantizedLinear.from_linear(linear, "nvfp4")
    assert raised.value.first == (2, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_as_it_does_for_linears(dtype):
    module = layer()
    linear = torch.nn.Linear(128, 96, device="cuda", dtype=torch.bfloat16)
    for own in DTYPES:
        x = torch.randn(2, 128, dtype=own, device="cuda")
        expected = module(x.to(dtype))
        with torch.autocast("cuda", dtype=dtype):
            y, z = module(x), module(x.clone().requires_grad_())
            assert torch.equal(y, expected) and y.dtype == z.dtype == linear(x).dtype == dtype
            # Where only the bias has a gradient, it is added after a rounding.
            torch.testing.assert_close(z, y, rtol=0.02, atol=0.02)
        assert module(x).dtype == own


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weight_is_the_dequantized_one(dtype):
    module = layer().to(dtype)
    weight, x = module.weight, torch.randn(3, 128, dtype=dtype, device="cuda")
    assert (weight.dtype, weight.device, weight.shape) == (dtype, torch.device("cuda", 0), (96, 128)) and weight.is_cuda
    expected = module.dequantize(dtype)
    assert torch.equal(weight, expected) and torch.equal(torch.nn.functional.linear(x, weight), torch.nn.functional.linear(x, expected))
    assert torch.equal(microscale.quantize(weight, "nvfp4").codes, microscale.quantize(expected, "nvfp4").codes)
    with pytest.raises(microscale.Error, match="read-only"):
        weight.zero_()
    encoder = torch.nn.TransformerEncoderLayer(64, 2, 96, batch_first=True, device="cuda", dtype=dtype).eval()
    reference = copy.deepcopy(encoder)
    for name in quantize_(encoder, "nvfp4"):
        reference.get_submodule(name).weight.data = encoder.get_submodule(name).dequantize(dtype)
    x = torch.randn(2, 5, 64, dtype=dtype, device="cuda")
    with torch.no_grad():
        near = 1e-3 if dtype is torch.float32 else 0.05
        torch.testing.assert_close(encoder(x), reference(x), rtol=near, atol=near)


@pytest.mark.parametrize("shape", [(128,), (3, 128), (0, 128), (2, 9, 128)])
@pytest.mark.parametrize("of_x", [True, False])
def test_gradients_have_the_shapes_of_linears(shape, of_x):
    module = layer(dtype=torch.float32)
    x = torch.randn(shape, device="cuda").requires_grad_(of_x)
    y = module(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 96) and module.bias.grad.shape == (96,)
    assert torch.equal(module.bias.grad, torch.full((96,), float(y.numel() // 96), device="cuda"))
    assert not of_x or x.grad.shape == x.shape
    for cols in (126, 129, 64):
        with pytest.raises(microscale.Error, match="pass activations"):
            module(torch.randn(*shape[:-1], cols, device="cuda").requires_grad_(of_x))


def test_biases_on_another_device_are_refused():
    module, x = layer(), torch.randn(2, 128, dtype=torch.bfloat16, device="cuda")
    weights = microscale.quantize(torch.randn(96, 128, device="cuda"), "nvfp4")
    for bias in (torch.zeros(96, dtype=torch.bfloat16), torch.zeros(95, dtype=torch.bfloat16, device="cuda"), torch.zeros(96, device="cuda")):
        with pytest.raises((microscale.Error, TypeError, RuntimeError)):
            microscale.linear(x, weights, bias=bias)
    with pytest.raises((microscale.Error, TypeError, RuntimeError)):
        microscale.linear(x.cpu(), weights.cpu(), bias=torch.zeros(96, dtype=torch.bfloat16, device="cuda"))
    module.bias = torch.nn.Parameter(module.bias.detach().cpu())
    with pytest.raises((microscale.Error, TypeError, RuntimeError)):
        module(x.clone().requires_grad_())


@pytest.mark.parametrize("device", [None, "cuda"])
def test_checkpoints_are_loaded_to_a_gpu(tmp_path, device):
    safetensors = pytest.importorskip("safetensors.torch")
    from microscale.torch import load_quantized

    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.LayerNorm(96), torch.nn.Linear(96, 64, bias=False))
    quantize_(model, "nvfp4")
    safetensors.save_file(model.state_dict(), tmp_path / "state.safetensors")
    with torch.device("meta" if device else "cuda"):
        again = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.LayerNorm(96), torch.nn.Linear(96, 64, bias=False))
    assert load_quantized(again, tmp_path / "state.safetensors", device=device) == ["0", "2"]
    for name, x in again.state_dict().items():
        assert x.is_cuda and torch.equal(x.cpu().view(torch.uint8), model.state_dict()[name].view(torch.uint8)), name
    x = torch.randn(4, 64)
    torch.testing.assert_close(again(x.cuda()).cpu(), model(x), rtol=1e-4, atol=1e-4)


def test_a_layer_is_sixteen_bits_close_to_its_linear():
    torch.manual_seed(5)
    linear = torch.nn.Linear(256, 128, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16)
    for format, most in (("nvfp4", 0.12), ("mxfp4", 0.17)):
        y, exact = QuantizedLinear.from_linear(linear, format)(x).double(), linear(x).double()
        assert (y - exact).norm() / exact.norm() < most
