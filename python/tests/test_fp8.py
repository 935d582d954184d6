"""Products with activations that are rounded to FP8, compared with the rounded values."""

import ml_dtypes
import numpy as np
import pytest

import microscale

WORDS = ["fp8", "fp8-group128"]
DTYPES = ["float32", "float16", ml_dtypes.bfloat16]


def test_cpus_add_packs_with_fast_accumulation_too():
    weights = microscale.quantize(np.random.default_rng(5).standard_normal((48, 640), dtype="f4"))
    x = np.random.default_rng(6).standard_normal((3, 640), dtype="f4").astype("f2")
    plain, fast = (microscale.linear(x, weights, activations=word) for word in ("fp8", "fp8-fast"))
    assert np.array_equal(plain, fast)


def rounded(x, activations):
    """The values that activations are rounded to."""
    scale = "token" if activations == "fp8" else "group128"
    codes, _, scales = microscale.quantize_activations(x, "fp8", scale=scale)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype("f8")
    return values * np.repeat(scales.astype("f8"), 128 if scale == "group128" else x.shape[-1], -1)[..., : x.shape[-1]]


@pytest.mark.parametrize("activations", WORDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_rounded_and_mxfp4_weights_are_not(rng, activations, dtype):
    weights = microscale.quantize(rng.standard_normal((40, 320), "f4"))
    x = rng.standard_normal((2, 3, 320), "f4").astype(dtype)
    y = microscale.linear(x, weights, activations=activations)
    assert y.dtype == x.dtype and y.shape == (2, 3, 40)
    w, values = weights.dequantize().astype("f8"), rounded(x, activations)
    # Tensor cores keep 13 fraction bits of each k-step's largest term, and the result is rounded.
    most = np.abs(values) @ np.abs(w).T * 2.0**-10 + np.abs(y.astype("f8")) * 2.0**-8
    assert (np.abs(y.astype("f8") - values @ w.T) <= most).all()
    assert (y.astype("f4") != microscale.linear(x, weights).astype("f4")).any()
    bias = rng.standard_normal(40, "f4").astype(dtype)
    np.testing.assert_array_equal(microscale.linear(x, weights, bias=bias, activations=activations), y + bias)


def test_nvfp4_weights_are_rounded_only_if_allowed(rng):
    weights = microscale.quantize(rng.standard_normal((8, 64), "f4"), "nvfp4")
    x = rng.standard_normal((3, 64), "f4")
    with pytest.raises(microscale.Error, match="allow it with round_weights"):
        microscale.linear(x, weights, activations="fp8")
    y = microscale.linear(x, weights, activations="fp8", round_weights=True)
    w = weights.dequantize()
    # Both operands have a relative error of at most 2**-4.
    assert (np.abs(y - x @ w.T) <= np.abs(x) @ np.abs(w).T * 0.14).all()


def test_words_that_do_not_exist_are_refused(rng):
    weights = microscale.quantize(rng.standard_normal((8, 64), "f4"))
    x = rng.standard_normal((3, 64), "f4")
    with pytest.raises(microscale.Error, match="choose one of int8, fp8, fp8-group128, fp8-fast, mxfp4, nvfp4, mxfp4-fast"):
        microscale.linear(x, weights, activations="fp4")


@pytest.mark.parametrize("activations", WORDS)
def test_nan_stays_in_its_row(rng, activations):
    weights = microscale.quantize(rng.standard_normal((40, 256), "f4"))
    x = rng.standard_normal((3, 256), "f4")
    x[1, 7] = np.nan
    y = microscale.linear(x, weights, activations=activations)
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("activations", WORDS)
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_experts_have_the_results_of_their_own_products(rng, format, activations):
    weights = microscale.quantize_experts(rng.standard_normal((5, 24, 192), "f4"), format)
    chosen = rng.integers(0, 5, (7, 2), "int32")
    chosen[2, 1] = -1
    options = {"activations": activations, "round_weights": format == "nvfp4"}
    for shape in [(7, 192), (7, 2, 192)]:
        x = rng.standard_normal(shape, "f4")
        y = microscale.linear_experts(x, weights, chosen, **options)
        for token, experts in enumerate(chosen):
            for i, expert in enumerate(experts):
                row = x[token : token + 1] if x.ndim == 2 else x[token, i : i + 1]
                expected = microscale.linear(row, weights[int(expert)], **options)[0] if expert >= 0 else 0
                np.testing.assert_array_equal(y[token, i], expected)
    if format == "nvfp4":
        with pytest.raises(microscale.Error, match="allow it with round_weights"):
            microscale.linear_experts(x, weights, chosen, activations=activations)


@pytest.mark.parametrize("activations", WORDS)
@pytest.mark.parametrize("cols", [96, 320])
def test_quantized_activations_are_multiplied_as_they_are(rng, activations, cols):
    weights = microscale.quantize(rng.standard_normal((24, cols), "f4"))
    x = rng.standard_normal((2, 3, cols), "f4")
    quantized = microscale.quantize_activations(x, "fp8", scale="token" if activations == "fp8" else "group128")
    expected = microscale.linear(x, weights, activations=activations)
    y = microscale.linear(quantized, weights)
    assert y.dtype == np.float32 and y.shape == (2, 3, 24)
    np.testing.assert_array_equal(y, expected)
    typed = quantized._replace(codes=quantized.codes.view(ml_dtypes.float8_e4m3fn))
    np.testing.assert_array_equal(microscale.linear(typed, weights), expected)
    half = microscale.linear(quantized, weights, dtype="float16")
    np.testing.assert_array_equal(half, expected.astype("float16"))
    bias, out = rng.standard_normal(24, "f4"), np.zeros((2, 3, 24), "f4")
    assert microscale.linear(quantized, weights, bias=bias, out=out) is out
    np.testing.assert_array_equal(out, expected + bias)


def test_one_scale_serves_all_rows(rng):
    weights = microscale.quantize(rng.standard_normal((24, 160), "f4"))
    x = rng.standard_normal((5, 160), "f4")
    codes, _, _ = microscale.quantize_activations(x, "fp8", scale=0.02)
    each = np.full((5, 1), 0.02, "f4")
    expected = microscale.linear(microscale.QuantizedActivations(codes, None, each), weights)
    for scale in (each[0], each[:1], each[0, 0].reshape(())):
        y = microscale.linear(microscale.QuantizedActivations(codes, None, scale), weights)
        np.testing.assert_array_equal(y, expected)
    assert np.abs(expected - x @ weights.dequantize().T).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("activations", WORDS)
def test_experts_take_quantized_activations(rng, activations):
    weights = microscale.quantize_experts(rng.standard_normal((5, 24, 256), "f4"))
    chosen = rng.integers(-1, 5, (7, 2), "int32")
    for shape in [(7, 256), (7, 2, 256)]:
        x = rng.standard_normal(shape, "f4")
        quantized = microscale.quantize_activations(x, "fp8", scale="token" if activations == "fp8" else "group128")
        expected = microscale.linear_experts(x, weights, chosen, activations=activations)
        np.testing.assert_array_equal(microscale.linear_experts(quantized, weights, chosen), expected)


def test_quantized_activations_that_do_not_fit_are_refused(rng):
    given = microscale.QuantizedActivations
    mxfp4, nvfp4 = (microscale.quantize(rng.standard_normal((8, 256), "f4"), format) for format in ("mxfp4", "nvfp4"))
    x = rng.standard_normal((3, 256), "f4")
    codes, _, scales = microscale.quantize_activations(x, "fp8")
    refused = [
        (given(codes, None, scales), mxfp4, {"activations": "fp8"}, "quantized already"),
        (given(codes, None, scales), nvfp4, {}, "allow it with round_weights"),
        (given(codes, None, None), mxfp4, {}, "has no f32_scales"),
        (microscale.quantize_activations(x, "mxfp8"), mxfp4, {}, "has block scales"),
        (given(codes, None, scales[:2]), mxfp4, {}, "f32_scales have shape"),
        (given(codes, None, np.ones((3, 3), "f4")), mxfp4, {}, "f32_scales have shape"),
        (given(codes[:, :128].copy(), None, scales), mxfp4, {}, "128 columns and the weights 256"),
    ]
    for activations, weights, options, message in refused:
        with pytest.raises(microscale.Error, match=message):
            microscale.linear(activations, weights, **options)
    for wrong in (given(codes.view(ml_dtypes.float8_e5m2), None, scales), given(codes, None, scales.astype("f2"))):
        with pytest.raises(TypeError, match="float8_e4m3fn|float32"):
            microscale.linear(wrong, mxfp4)
    y = microscale.linear(given(codes, None, scales), nvfp4, round_weights=True)
    np.testing.assert_array_equal(y, microscale.linear(x, nvfp4, activations="fp8", round_weights=True))


class TestLayers:
    """Layers of PyTorch, where it is installed."""

    @pytest.fixture(autouse=True)
    def torch(self):
        torch = pytest.importorskip("torch")
        torch._dynamo.reset()
        torch.manual_seed(3)
        return torch

    @pytest.mark.parametrize("activations", WORDS)
    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_layer_has_the_products_bits_and_gradients_of_exact_activations(self, torch, activations, compiled):
        from microscale.torch import QuantizedLinear

        plain = torch.nn.Linear(256, 32)
        layer = QuantizedLinear.from_linear(plain, activation_format=activations)
        exact = QuantizedLinear.from_linear(plain)
        assert f"activations={activations}" in repr(layer) and "activations" not in repr(exact)
        call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        x = torch.randn(2, 3, 256)
        expected = microscale.linear(x, layer._weights(), bias=layer.bias.detach(), activations=activations)
        with torch.no_grad():
            torch.testing.assert_close(call(x), expected, rtol=0, atol=0)
        gradients = []
        for module in (call, exact):
            own = x.clone().requires_grad_()
            module(own).sum().backward()
            gradients.append(own.grad)
        torch.testing.assert_close(*gradients)
        torch.testing.assert_close(layer.bias.grad, exact.bias.grad)

    def test_a_layer_of_nvfp4_is_refused_unless_weights_may_be_rounded(self, torch):
        from microscale.torch import QuantizedLinear

        plain = torch.nn.Linear(64, 32)
        with pytest.raises(microscale.Error, match="allow it with round_weights"):
            QuantizedLinear.from_linear(plain, "nvfp4", activation_format="fp8")
        layer = QuantizedLinear.from_linear(plain, "nvfp4", activation_format="fp8", round_weights=True)
        assert layer(torch.randn(3, 64)).shape == (3, 32)
        with pytest.raises(microscale.Error, match="choose one of int8, fp8, fp8-group128, fp8-fast, mxfp4, nvfp4, mxfp4-fast"):
            QuantizedLinear.from_linear(plain, activation_format="fp4")

    def test_the_operators_fake_refuses_what_the_operator_refuses(self, torch):
        from microscale.torch import QuantizedLinear

        layer = QuantizedLinear.from_linear(torch.nn.Linear(64, 32), "nvfp4")
        arguments = (*layer._parts(), "nvfp4", "divisor", None, "fp8")
        for device in ("cpu", "meta"):
            moved = [part.to(device) if isinstance(part, torch.Tensor) else part for part in arguments]
            with pytest.raises(Exception, match="allow it with round_weights"):
                torch.ops.microscale.linear(torch.ones((3, 64), device=device), *moved)
            assert torch.ops.microscale.linear(torch.ones((3, 64), device=device), *moved, True).shape == (3, 32)
