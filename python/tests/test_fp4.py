"""Products with activations in FP4, compared with the dequantized operands."""

import ml_dtypes
import numpy as np
import pytest

import microscale
from microscale import GlobalScale

FORMATS = ["mxfp4", "nvfp4"]
DTYPES = ["float32", "float16", ml_dtypes.bfloat16]


def near(y, x, weights, bits):
    """Asserts that `y` is the product of two quantized arrays, rounded to `bits` bits."""
    a, w = x.dequantize().astype("f8"), weights.dequantize().astype("f8")
    # Sums are rounded toward zero once for each 64 elements.
    most = np.abs(a) @ np.abs(w).T * 2.0**-19 + np.abs(y.astype("f8")) * 2.0**-bits
    assert (np.abs(y.astype("f8") - a @ w.T) <= most).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_quantized_to_the_format_of_the_weights(rng, format, dtype):
    weights = microscale.quantize(rng.standard_normal((40, 320), "f4"), format)
    x = rng.standard_normal((2, 3, 320), "f4").astype(dtype)
    y = microscale.linear(x, weights, activations=format)
    assert y.dtype == x.dtype and y.shape == (2, 3, 40)
    quantized = microscale.quantize(x, format)
    near(y, quantized, weights, {"float32": 22, "float16": 10}.get(str(np.dtype(dtype)), 7))
    assert (y.astype("f4") != microscale.linear(x, weights).astype("f4")).any()
    bias = rng.standard_normal(40, "f4").astype(dtype)
    np.testing.assert_array_equal(microscale.linear(x, weights, bias=bias, activations=format), y + bias)


@pytest.mark.parametrize("direction", ["divisor", "multiplier"])
def test_an_input_global_scale_is_applied(rng, direction):
    weights = microscale.quantize(rng.standard_normal((24, 160), "f4"), "nvfp4")
    x = rng.standard_normal((5, 160), "f4")
    scale = GlobalScale(500.0 if direction == "divisor" else 1 / 500, direction)
    y = microscale.linear(x, weights, activations="nvfp4", input_global_scale=scale)
    codes, scales, _ = microscale.quantize_activations(x, "nvfp4", scale=scale)
    quantized = microscale.Quantized(codes, scales, format="nvfp4", shape=x.shape, global_scale=scale)
    near(y, quantized, weights, 22)
    # Rows do not depend on each other.
    alone = microscale.linear(x[3:4], weights, activations="nvfp4", input_global_scale=scale)
    np.testing.assert_array_equal(alone[0], y[3])


@pytest.mark.parametrize("format", FORMATS)
def test_quantized_activations_are_multiplied_as_they_are(rng, format):
    weights = microscale.quantize(rng.standard_normal((24, 160), "f4"), format)
    x = rng.standard_normal((2, 3, 160), "f4")
    quantized = microscale.quantize(x, format)
    expected = microscale.linear(x, weights, activations=format)
    y = microscale.linear(quantized, weights)
    assert y.dtype == np.float32 and y.shape == (2, 3, 24)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(microscale.linear(microscale.swizzle(quantized, "swizzled"), weights), expected)
    half = microscale.linear(quantized, weights, dtype="float16")
    np.testing.assert_array_equal(half, expected.astype("float16"))
    out = np.zeros((2, 3, 24), "f4")
    assert microscale.linear(quantized, weights, out=out) is out
    np.testing.assert_array_equal(out, expected)


def test_rows_may_have_a_global_scale_each(rng):
    weights = microscale.quantize(rng.standard_normal((24, 160), "f4"), "nvfp4")
    experts = microscale.quantize_experts(rng.standard_normal((5, 24, 160), "f4"), "nvfp4")
    x = rng.standard_normal((2, 3, 160), "f4") * np.array([1e-3, 1, 50], "f4")[:, None]
    codes, scales, token_scales = microscale.quantize_activations(x, "nvfp4", scale="token")
    quantized = microscale.Quantized(codes, scales, format="nvfp4")
    y = microscale.linear(quantized, weights, token_scales=token_scales)
    chosen = rng.integers(0, 5, (6, 2), "int32")
    rows = microscale.Quantized(codes.reshape(6, -1), scales.reshape(6, -1), format="nvfp4")
    of_experts = microscale.linear_experts(rows, experts, chosen, token_scales=token_scales.reshape(6, 1))
    for i, place in enumerate(np.ndindex(2, 3)):
        scale = GlobalScale(float(token_scales[place][0]), "multiplier")
        row = microscale.Quantized(codes[place][None], scales[place][None], format="nvfp4", global_scale=scale)
        np.testing.assert_array_equal(microscale.linear(row, weights)[0], y[place])
        for j, expert in enumerate(chosen[i]):
            np.testing.assert_array_equal(microscale.linear(row, experts[expert])[0], of_experts[i, j])
    with pytest.raises(microscale.Error, match="must have 6"):
        microscale.linear(quantized, weights, token_scales=token_scales[:1])
    with pytest.raises(microscale.Error, match="token_scales"):
        microscale.linear(x, weights, token_scales=token_scales)
    mxfp4 = microscale.quantize(x)
    with pytest.raises(microscale.Error, match="global scale"):
        microscale.linear(mxfp4, microscale.quantize(rng.standard_normal((24, 160), "f4")), token_scales=token_scales)


@pytest.mark.parametrize("format", FORMATS)
def test_experts_have_the_results_of_their_own_products(rng, format):
    weights = microscale.quantize_experts(rng.standard_normal((5, 24, 192), "f4"), format)
    chosen = rng.integers(0, 5, (7, 2), "int32")
    chosen[2, 1] = -1
    for shape in [(7, 192), (7, 2, 192)]:
        x = microscale.quantize(rng.standard_normal(shape, "f4"), format)
        bias = rng.standard_normal((5, 24), "f4")
        y = microscale.linear_experts(x, weights, chosen)
        biased = microscale.linear_experts(x, weights, chosen, bias=bias)
        for token, experts in enumerate(chosen):
            for i, expert in enumerate(experts):
                place = (token,) if len(shape) == 2 else (token, i)
                row = microscale.Quantized(
                    x.codes[place][None], x.scales[place][None], format=format, global_scale=x.global_scale
                )
                expected = microscale.linear(row, weights[int(expert)])[0] if expert >= 0 else 0
                np.testing.assert_array_equal(y[token, i], expected)
                np.testing.assert_array_equal(biased[token, i], expected + bias[expert] if expert >= 0 else 0)
    values = rng.standard_normal((7, 192), "f4")
    rounded = microscale.linear_experts(values, weights, chosen, activations=format)
    given = microscale.linear_experts(microscale.quantize(values, format), weights, chosen)
    np.testing.assert_array_equal(rounded, given)


def test_choices_that_contradict_are_refused(rng):
    x = rng.standard_normal((3, 64), "f4")
    mxfp4, nvfp4 = (microscale.quantize(rng.standard_normal((8, 64), "f4"), format) for format in FORMATS)
    refused = [
        (x, mxfp4, {"activations": "nvfp4"}, "quantize both to nvfp4, or both to mxfp4"),
        (x, mxfp4, {"activations": "mxfp4", "input_global_scale": GlobalScale(2.0, "divisor")}, "no global scale"),
        (x, nvfp4, {"input_global_scale": GlobalScale(2.0, "divisor")}, "leave input_global_scale out"),
        (x, nvfp4, {"dtype": "float16"}, "leave dtype out"),
        (microscale.quantize(x), mxfp4, {"activations": "mxfp4"}, "quantized already"),
        (microscale.quantize(x), mxfp4, {"activations": "int8"}, "quantized already"),
        (microscale.quantize(x), nvfp4, {}, "quantize both to nvfp4, or both to mxfp4"),
        (microscale.quantize(x[:, :32].copy()), mxfp4, {}, "32 columns and the weights 64"),
    ]
    for activations, weights, options, message in refused:
        with pytest.raises(microscale.Error, match=message):
            microscale.linear(activations, weights, **options)


class TestLayers:
    """Layers of PyTorch, where it is installed."""

    @pytest.fixture(autouse=True)
    def torch(self):
        torch = pytest.importorskip("torch")
        torch._dynamo.reset()
        torch.manual_seed(3)
        return torch

    def test_pytorchs_codes_and_swizzled_scales_are_multiplied(self, torch):
        weights = microscale.quantize(torch.randn(48, 128), "nvfp4")
        x = microscale.quantize(torch.randn(5, 128), "nvfp4", layout="swizzled")
        codes, scales = x.typed
        # `torch._scaled_mm` takes the scales as one row of bytes.
        given = microscale.Quantized(
            codes, scales.reshape(-1), format="nvfp4", global_scale=x.global_scale, layout="swizzled"
        )
        assert codes.dtype is torch.float4_e2m1fn_x2
        torch.testing.assert_close(microscale.linear(given, weights), microscale.linear(x, weights), rtol=0, atol=0)

    @pytest.mark.parametrize("format", FORMATS)
    @pytest.mark.parametrize("given", [False, True])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_layer_has_the_products_bits_and_gradients_of_exact_activations(self, torch, format, given, compiled):
        from microscale.torch import QuantizedLinear

        if given and format == "mxfp4":
            with pytest.raises(microscale.Error, match="no global scale"):
                QuantizedLinear.from_linear(
                    torch.nn.Linear(64, 8), format, activation_format=format, input_global_scale=GlobalScale(2.0, "divisor")
                )
            return
        plain = torch.nn.Linear(256, 32)
        scale = GlobalScale(600.0, "divisor") if given else None
        layer = QuantizedLinear.from_linear(plain, format, activation_format=format, input_global_scale=scale)
        exact = QuantizedLinear.from_linear(plain, format)
        assert f"activations={format}" in repr(layer)
        assert ("input_global_scale" in layer.state_dict()) == given
        call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        x = torch.randn(2, 3, 256)
        expected = microscale.linear(
            x, layer._weights(), bias=layer.bias.detach(), activations=format, input_global_scale=scale
        )
        with torch.no_grad():
            torch.testing.assert_close(call(x), expected, rtol=0, atol=0)
        gradients = []
        for module in (call, exact):
            own = x.clone().requires_grad_()
            module(own).sum().backward()
            gradients.append(own.grad)
        torch.testing.assert_close(*gradients)

    def test_a_layer_keeps_its_input_global_scale(self, torch):
        from microscale.torch import QuantizedLinear

        def layer(scale):
            return QuantizedLinear.from_linear(
                torch.nn.Linear(64, 32), "nvfp4", activation_format="nvfp4", input_global_scale=scale
            )

        first, second = layer(GlobalScale(1 / 512, "multiplier")), layer(GlobalScale(2.0, "divisor"))
        assert first.input_global_scale.item() == 512
        second.load_state_dict(first.state_dict())
        x = torch.randn(3, 64)
        torch.testing.assert_close(first(x), second(x), rtol=0, atol=0)
        assert second.half().input_global_scale.dtype is torch.float32

    def test_a_layer_of_another_format_is_refused(self, torch):
        from microscale.torch import QuantizedLinear

        plain = torch.nn.Linear(64, 32)
        with pytest.raises(microscale.Error, match="quantize both to nvfp4, or both to mxfp4"):
            QuantizedLinear.from_linear(plain, "nvfp4", activation_format="mxfp4")
        with pytest.raises(microscale.Error, match="leave input_global_scale out"):
            QuantizedLinear.from_linear(plain, "nvfp4", input_global_scale=GlobalScale(2.0, "divisor"))

    def test_the_operators_fake_refuses_what_the_operator_refuses(self, torch):
        from microscale.torch import QuantizedLinear

        layer = QuantizedLinear.from_linear(torch.nn.Linear(64, 32), "nvfp4")
        arguments = (*layer._parts(), "nvfp4", "divisor", None)
        for device in ("cpu", "meta"):
            moved = [part.to(device) if isinstance(part, torch.Tensor) else part for part in arguments]
            x = torch.ones((3, 64), device=device)
            with pytest.raises(Exception, match="quantize both"):
                torch.ops.microscale.linear(x, *moved, "mxfp4")
            assert torch.ops.microscale.linear(x, *moved, "nvfp4").shape == (3, 32)
            scale = torch.tensor([2.0], device=device)
            with pytest.raises(Exception, match="leave input_global_scale out"):
                torch.ops.microscale.linear(x, *moved, None, False, scale)


def test_fast_accumulation_changes_nothing_on_cpus(rng):
    weights = microscale.quantize(rng.standard_normal((40, 320), "f4"))
    x = rng.standard_normal((6, 320), "f4")
    quantized = microscale.quantize(x)
    expected = microscale.linear(x, weights, activations="mxfp4")
    np.testing.assert_array_equal(microscale.linear(x, weights, activations="mxfp4-fast"), expected)
    given = microscale.linear(quantized, weights, activations="mxfp4-fast")
    np.testing.assert_array_equal(given, microscale.linear(quantized, weights))
    experts = microscale.quantize_experts(rng.standard_normal((3, 40, 320), "f4"))
    chosen = np.array([[0], [2], [1], [1], [0], [2]], "i4")
    expected, fast = (
        microscale.linear_experts(x, experts, chosen, activations=word) for word in ("mxfp4", "mxfp4-fast")
    )
    np.testing.assert_array_equal(fast, expected)


def test_fast_accumulation_is_for_mxfp4(rng):
    nvfp4 = microscale.quantize(rng.standard_normal((40, 320), "f4"), "nvfp4")
    x = rng.standard_normal((6, 320), "f4")
    with pytest.raises(microscale.Error, match="nvfp4"):
        microscale.linear(x, nvfp4, activations="mxfp4-fast")
    with pytest.raises(microscale.Error, match="quantized already"):
        microscale.linear(microscale.quantize(x, "nvfp4"), nvfp4, activations="mxfp4-fast")
