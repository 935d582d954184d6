"""PyTorch: tensors, operators, layers. Skipped where it is not installed."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

import microscale

torch = pytest.importorskip("torch")


@pytest.fixture
def model():
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 50, bias=False), torch.nn.Linear(50, 8)]
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8-e4m3"])
def test_tensors_are_quantized_like_arrays(dtype, format):
    x = torch.randn(5, 3, 96).to(dtype)
    q = microscale.quantize(torch.nn.Parameter(x), format)
    values = x.float().numpy() if dtype is torch.bfloat16 else x.numpy()
    if dtype is torch.bfloat16:
        import ml_dtypes

        values = values.astype(ml_dtypes.bfloat16)
    expected = microscale.quantize(values, format)
    assert isinstance(q.codes, torch.Tensor) and q.codes.dtype == torch.uint8
    np.testing.assert_array_equal(q.codes.numpy(), expected.codes)
    np.testing.assert_array_equal(q.scales.numpy(), expected.scales)
    assert q.global_scale == expected.global_scale
    back = q.dequantize(dtype)
    assert back.dtype == dtype and back.shape == x.shape
    np.testing.assert_array_equal(back.float().numpy(), expected.dequantize(str(dtype)[6:]).astype(np.float32))
    assert microscale.compare(x, q) == microscale.compare(values, expected)


def test_views_are_read_where_they_lie():
    x = torch.randn(96, 40)
    for view in (x.t(), x[::2], x[:, ::3], x.reshape(4, 24, 40).transpose(0, 1)):
        q, expected = microscale.quantize(view, "nvfp4"), microscale.quantize(view.contiguous(), "nvfp4")
        assert torch.equal(q.codes, expected.codes) and torch.equal(q.scales, expected.scales)


def test_torchs_own_dtypes_go_out_and_in():
    q = microscale.quantize(torch.randn(8, 64), "nvfp4")
    codes, scales = q.typed
    assert (codes.dtype, scales.dtype) == (torch.float4_e2m1fn_x2, torch.float8_e4m3fn)
    assert codes.data_ptr() == q.codes.data_ptr()
    again = microscale.Quantized(codes, scales, format="nvfp4", global_scale=q.global_scale)
    assert again.shape == (8, 64) and torch.equal(again.dequantize(), q.dequantize())
    assert microscale.quantize(torch.randn(8, 64), "mxfp4").typed[1].dtype == torch.float8_e8m0fnu


def fake():
    """A tensor without memory."""
    with torch._subclasses.fake_tensor.FakeTensorMode():
        return torch.ones(2, 32)


def resized(size):
    """A tensor whose storage has another size than its shape says."""
    x = torch.randn(2, 32)
    x.untyped_storage().resize_(size)
    return x


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.empty(2, 32, device="meta"), r"on meta.* pass x\.cpu\(\)"),
        (lambda: torch.randn(2, 32).to_sparse(), "to_dense"),
        (lambda: torch.randn(2, 32).double(), "dtype torch.float64; pass float32"),
        (lambda: torch.randn(2, 32, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (lambda: torch.randn(2, 32).to(torch.float8_e4m3fn), "x has dtype torch.float8_e4m3fn; pass float32"),
        (lambda: torch.randn(2, 32).to(torch.float8_e5m2), "x has dtype torch.float8_e5m2; pass float32"),
        (fake, "x has no memory that can be read"),
        (lambda: torch._to_functional_tensor(torch.randn(2, 32)), "x has no memory that can be read"),
        (lambda: torch._efficientzerotensor((2, 32)), "x has no memory that can be read"),
        (lambda: resized(0), "x has no memory that can be read"),
    ],
)
def test_tensors_that_are_refused(make, message):
    with pytest.raises(TypeError, match=message):
        microscale.quantize(make(), "nvfp4")


def test_elements_outside_of_the_storage_are_refused():
    with pytest.raises(microscale.Error, match=r"x has elements outside of its storage of 252 bytes; pass x\.clone"):
        microscale.quantize(resized(252), "nvfp4")
    q = microscale.quantize(torch.randn(2, 32), "nvfp4")
    with pytest.raises(microscale.Error, match="out has elements outside of its storage"):
        q.dequantize(out=resized(128))
    assert torch.equal(q.dequantize(out=resized(256)), q.dequantize())


CALLS_IN_MODES = """
import torch
import microscale

x = torch.randn(2, 32)

def call(x):
    try:
        microscale.quantize(x)
    except TypeError as error:
        assert "fake or wrapped" in str(error) or "no memory that can be read" in str(error), error
    else:
        raise AssertionError("tensors without memory were quantized")
    return x.sum()

with torch._subclasses.fake_tensor.FakeTensorMode():
    call(torch.ones(2, 32))
torch.func.grad(call)(x)
torch.vmap(call)(x[None])
q = microscale.quantize(x)
assert type(q.codes) is torch.Tensor and q.dequantize().shape == x.shape
torch.func.grad(call)(x)
torch.vmap(call)(x[None])
"""


def test_modes_and_transforms_of_torch_are_refused_and_break_nothing():
    subprocess.run([sys.executable, "-c", CALLS_IN_MODES], check=True)


def test_torch_is_not_imported_for_arrays():
    code = "import sys, numpy, microscale; microscale.quantize(numpy.ones((2, 32), 'f4')); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_layers_are_replaced_and_compute(model, format):
    from microscale.torch import QuantizedLinear, quantize_

    first = model[0].weight.detach().clone()
    names = quantize_(model, {"format": format, "search": "full"})
    assert names == ["0", "2"] and isinstance(model[0], QuantizedLinear) and type(model[3]) is torch.nn.Linear
    expected = microscale.quantize(first, format, search="full").dequantize()
    assert torch.equal(model[0].dequantize(), expected)
    x = torch.randn(3, 7, 64)
    y = torch.nn.functional.linear(x, expected, model[0].bias)
    torch.testing.assert_close(model[0](x), y, rtol=1e-5, atol=1e-5)
    for dtype in (torch.float16, torch.bfloat16):
        torch.testing.assert_close(model[0](x.to(dtype)).float(), y, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_state_has_compressed_tensors_names(model, format):
    from microscale.torch import QuantizedLinear, quantize_

    quantize_(model, format)
    state = model.state_dict()
    own = {name.removeprefix("0."): tensor for name, tensor in state.items() if name.startswith("0.")}
    block, scale = (16, torch.float8_e4m3fn) if format == "nvfp4" else (32, torch.uint8)
    expected = {
        "weight_packed": (torch.uint8, (96, 32)),
        "weight_scale": (scale, (96, 64 // block)),
        "weight_global_scale": (torch.float32, (1,)),
        "bias": (torch.float32, (96,)),
    }
    if format == "mxfp4":
        del expected["weight_global_scale"]
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in own.items()} == expected
    other = QuantizedLinear.from_linear(torch.nn.Linear(64, 96), format)
    other.load_state_dict(own)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(other(x), model[0](x))
    with pytest.raises(microscale.Error, match="divisor"):
        QuantizedLinear.from_linear(torch.nn.Linear(64, 96), "nvfp4", numerics="modelopt")


def test_scales_keep_their_dtypes_when_a_model_is_cast(model):
    from microscale.torch import quantize_

    quantize_(model, "nvfp4")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "weight_" in name}
    assert len(before) == 6
    model = model.to(torch.bfloat16).half().float().bfloat16()
    for name, tensor in before.items():
        after = model.state_dict()[name]
        assert after.dtype == tensor.dtype and torch.equal(after.view(torch.uint8), tensor.view(torch.uint8)), name
    assert model[0].bias.dtype == torch.bfloat16


def test_operators_are_what_torch_asks_of_them():
    import microscale.torch  # noqa: F401

    x = torch.randn(4, 40)
    torch.library.opcheck(torch.ops.microscale.quantize, (x, "nvfp4", None, None, "error"))
    parts = torch.ops.microscale.quantize(x, "mxfp4", None, "full", "error")
    torch.library.opcheck(torch.ops.microscale.dequantize, (*parts, "mxfp4", "divisor", 40, torch.float16))
    weights = torch.ops.microscale.quantize(torch.randn(24, 64), "nvfp4", None, None, "error")
    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.library.opcheck(torch.ops.microscale.linear, (x, *weights, "nvfp4", "divisor"))


def test_the_graph_is_not_broken(model):
    from microscale.torch import quantize_

    assert quantize_(model, "nvfp4", filter_fn=lambda layer, name: layer.out_features != 50) == ["0"]
    model = model.to(torch.bfloat16)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))
    other = torch.randn(9, 64, dtype=torch.bfloat16)
    assert torch.equal(compiled(other), model(other))


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="Inductor needs a compiler of C++")
def test_inductor_compiles_what_is_beside_the_operators(model):
    """Inductor makes C++ of all but the operators, in one graph, also where lengths are not known
    beforehand."""
    from microscale.torch import quantize_

    quantize_(model, "nvfp4")
    model = model.to(torch.bfloat16)

    def whole(x):
        y = model(x)
        codes, scales, number = torch.ops.microscale.quantize(y.relu(), "nvfp4", None, None, "error")
        return y, torch.ops.microscale.dequantize(codes, scales, number, "nvfp4", "divisor", 8, torch.float32) * 2

    compiled = torch.compile(whole, fullgraph=True, backend="inductor", dynamic=True)
    for rows in (5, 9):
        x = torch.randn(rows, 64, dtype=torch.bfloat16)
        with torch.no_grad():
            (y, back), (expected, expected_back) = compiled(x), whole(x)
        torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
        assert back.shape == expected_back.shape
        # The last layer is not quantized, and Inductor may round it otherwise.
        again = microscale.quantize(y.relu(), "nvfp4").dequantize() * 2
        assert torch.equal(back, again)


def test_gradients_reach_the_input():
    from microscale.torch import QuantizedLinear

    layer = QuantizedLinear.from_linear(torch.nn.Linear(64, 32), "nvfp4")
    x = torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    expected = torch.ones(4, 32, dtype=torch.bfloat16) @ layer.dequantize(torch.bfloat16)
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_reach_the_bias(dtype):
    from microscale.torch import QuantizedLinear

    layer = QuantizedLinear.from_linear(torch.nn.Linear(64, 32), "nvfp4")
    for x in (torch.randn(4, 3, 64, dtype=dtype), torch.randn(4, 3, 64, dtype=dtype, requires_grad=True)):
        layer.bias.grad = None
        layer(x).sum().backward()
        assert torch.equal(layer.bias.grad, torch.full((32,), 12.0))
        with torch.no_grad():
            expected = microscale.linear(x.detach(), layer._weights()) + layer.bias.to(dtype)
            assert torch.equal(layer(x), expected)
