"""Gates of products: pairs of rows of weights give one result."""

import ml_dtypes
import numpy as np
import pytest

import microscale

GATES = ["silu_and_mul", "swiglu_oai"]
#: Formats of weights, and options.
PRODUCTS = [
    ("mxfp4", {}),
    ("nvfp4", {}),
    ("mxfp4", {"activations": "int8"}),
    ("mxfp4", {"activations": "fp8"}),
    ("nvfp4", {"activations": "fp8-group128", "round_weights": True}),
    ("mxfp4", {"activations": "mxfp4"}),
    ("nvfp4", {"activations": "nvfp4", "input_global_scale": microscale.GlobalScale(600.0, "divisor")}),
]


def gated(sums, gate):
    """The results of sums `[..., 2 * M]` in float64, whose pairs are a gate and `up`."""
    sums = sums.astype("f8")
    gates, up = sums[..., ::2], sums[..., 1::2]
    if gate == "silu_and_mul":
        return gates / (1 + np.exp(-gates)) * up
    gates, up = np.minimum(gates, 7), np.clip(up, -7, 7)
    return gates / (1 + np.exp(-1.702 * gates)) * (up + 1)


def near(y, expected):
    bits = {"float32": 20, "float16": 10}.get(str(y.dtype), 7)
    np.testing.assert_allclose(y.astype("f8"), expected, rtol=2.0**-bits, atol=2.0**-20)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("format", "options"), PRODUCTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
def test_pairs_of_sums_are_combined_and_rounded_once(rng, format, options, gate, dtype):
    weights = microscale.quantize(rng.standard_normal((48, 256), "f4") / 4, format)
    x = rng.standard_normal((2, 3, 256), "f4").astype(dtype)
    bias = rng.standard_normal(48, "f4").astype(dtype)
    # In float32, products round neither values nor sums otherwise.
    sums = microscale.linear(x.astype("f4"), weights, bias=bias.astype("f4"), **options)
    y = microscale.linear(x, weights, bias=bias, gate=gate, **options)
    assert y.dtype == x.dtype and y.shape == (2, 3, 24)
    near(y, gated(sums, gate))
    out = np.zeros((2, 3, 24), dtype)
    assert microscale.linear(x, weights, bias=bias, gate=gate, out=out, **options) is out
    np.testing.assert_array_equal(out, y)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("format", "options"), PRODUCTS)
def test_experts_are_combined_too(rng, format, options, gate):
    weights = microscale.quantize_experts(rng.standard_normal((5, 48, 256), "f4") / 4, format)
    chosen = rng.integers(0, 5, (7, 2), "int32")
    chosen[2, 1], chosen[4, 0] = -1, 5
    x, bias = rng.standard_normal((7, 256), "f4"), rng.standard_normal((5, 48), "f4")
    sums = microscale.linear_experts(x, weights, chosen, bias=bias, **options)
    y = microscale.linear_experts(x, weights, chosen, bias=bias, gate=gate, **options)
    assert y.shape == (7, 2, 24) and not y[2, 1].any() and not y[4, 0].any()
    expected = gated(sums, gate)
    expected[2, 1] = expected[4, 0] = 0
    near(y, expected)
    out = np.full((7, 2, 24), 3, "f4")
    microscale.linear_experts(x, weights, chosen, bias=bias, gate=gate, out=out, **options)
    y[2, 1] = y[4, 0] = 3
    np.testing.assert_array_equal(out, y)


def test_quantized_activations_are_combined_too(rng):
    weights = microscale.quantize(rng.standard_normal((48, 256), "f4") / 4)
    x = rng.standard_normal((5, 256), "f4")
    for quantized in (microscale.quantize(x), microscale.quantize_activations(x, "fp8")):
        y = microscale.linear(quantized, weights, gate="silu_and_mul", dtype="float16")
        assert y.dtype == np.float16
        near(y, gated(microscale.linear(quantized, weights), "silu_and_mul"))


def test_gates_that_do_not_exist_and_odd_rows_are_refused(rng):
    x = rng.standard_normal((3, 64), "f4")
    even, odd = (microscale.quantize(rng.standard_normal((rows, 64), "f4")) for rows in (8, 7))
    with pytest.raises(microscale.Error, match="pass one of silu_and_mul, swiglu_oai"):
        microscale.linear(x, even, gate="gelu")
    with pytest.raises(microscale.Error, match="pairs of rows, and the weights have 7"):
        microscale.linear(x, odd, gate="silu_and_mul")
