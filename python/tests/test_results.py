"""Results of products that are quantized for the next layer, and products of groups."""

import ml_dtypes
import numpy as np
import pytest

import microscale
from microscale import GlobalScale, ResultFormat

RESULTS = [
    "fp8",
    "mxfp4",
    ResultFormat("fp8", "group128", power_of_two=True),
    ResultFormat("fp8", 0.25),
    ResultFormat("mxfp8", scale_rule="rceil", layout="128x4"),
    ResultFormat("nvfp4"),
    ResultFormat("nvfp4", GlobalScale(600.0, "divisor"), layout="128x4"),
    ResultFormat("nvfp4", GlobalScale(0.01, "multiplier"), layout="8x4"),
]


def expected_of(y, results):
    results = ResultFormat(results) if isinstance(results, str) else results
    return microscale.quantize_activations(y, **results._asdict())


def equal(found, expected):
    assert isinstance(found, microscale.QuantizedActivations)
    for a, b in zip(found, expected):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape and a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("results", RESULTS)
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_results_have_the_bytes_of_two_calls(rng, results, dtype):
    weights = microscale.quantize(rng.standard_normal((96, 320), "f4"), "nvfp4")
    x, bias = rng.standard_normal((2, 3, 320), "f4").astype(dtype), rng.standard_normal(96, "f4").astype(dtype)
    for options in ({}, {"gate": "silu_and_mul"}, {"activations": "nvfp4"}, {"activations": "int8"}):
        y = microscale.linear(x, weights, bias=bias, **options)
        found = microscale.linear(x, weights, bias=bias, quantize_results=results, **options)
        equal(found, expected_of(y, results))
        out = microscale.QuantizedActivations(*(None if part is None else np.empty_like(part) for part in found))
        again = microscale.linear(x, weights, bias=bias, quantize_results=results, out=out, **options)
        assert again.codes is out.codes
        equal(again, found)


@pytest.mark.parametrize("results", RESULTS)
def test_results_of_experts_have_the_bytes_of_two_calls(rng, results):
    weights = microscale.quantize_experts(rng.standard_normal((5, 64, 192), "f4"))
    chosen = rng.integers(0, 5, (7, 2), "int32")
    chosen[2, 1] = -1
    x = rng.standard_normal((7, 192), "f4").astype("f2")
    y = microscale.linear_experts(x, weights, chosen)
    equal(microscale.linear_experts(x, weights, chosen, quantize_results=results), expected_of(y, results))


def test_results_are_the_next_layers_activations(rng):
    first, second = (microscale.quantize(rng.standard_normal((192, 192), "f4"), "nvfp4") for _ in range(2))
    x, scale = rng.standard_normal((5, 192), "f4"), GlobalScale(60.0, "divisor")
    codes, scales, _ = microscale.linear(x, first, quantize_results=ResultFormat("nvfp4", scale))
    hidden = microscale.Quantized(codes, scales, format="nvfp4", global_scale=scale)
    y = microscale.linear(x, first)
    expected = microscale.linear(y, second, activations="nvfp4", input_global_scale=scale)
    np.testing.assert_array_equal(microscale.linear(hidden, second), expected)
    hidden = microscale.linear(x, microscale.quantize(rng.standard_normal((192, 192), "f4")), quantize_results="fp8")
    assert microscale.linear(hidden, microscale.quantize(rng.standard_normal((8, 192), "f4"))).shape == (5, 8)


def test_wrong_formats_are_refused(rng):
    weights, x = microscale.quantize(rng.standard_normal((64, 64), "f4")), rng.standard_normal((2, 64), "f4")
    with pytest.raises(microscale.Error, match="pass one of fp8"):
        microscale.linear(x, weights, quantize_results="int4")
    with pytest.raises(microscale.Error, match="layout"):
        microscale.linear(x, weights, quantize_results=ResultFormat("fp8", layout="128x4"))
    with pytest.raises(microscale.Error, match="parts"):
        microscale.linear(x, weights, quantize_results="fp8", out=(np.zeros((2, 64), "u1"),))


@pytest.mark.parametrize("options", [{}, {"activations": "mxfp4"}, {"gate": "swiglu_oai"}])
def test_groups_have_the_results_of_their_own_products(rng, options):
    sizes = [(96, 128, 128), (1, 256, 512), (0, 8, 64), (7, 384, 32)]
    weights = [microscale.quantize(rng.standard_normal((rows, cols), "f4")) for _, rows, cols in sizes]
    x = [rng.standard_normal((tokens, cols), "f4").astype("f2") for tokens, _, cols in sizes]
    bias = [None, *(rng.standard_normal(rows, "f4").astype("f2") for _, rows, _ in sizes[1:])]
    expected = [microscale.linear(*group, bias=own, **options) for *group, own in zip(x, weights, bias)]
    found = microscale.linear_groups(x, weights, bias=bias, **options)
    out = [np.zeros_like(y) for y in expected]
    again = microscale.linear_groups(x, weights, bias=bias, out=out, **options)
    for y, found, own, again in zip(expected, found, out, again, strict=True):
        np.testing.assert_array_equal(found, y)
        assert again is own
        np.testing.assert_array_equal(own, y)
    with pytest.raises(microscale.Error, match="4 weights and 3 of x"):
        microscale.linear_groups(x[1:], weights)
