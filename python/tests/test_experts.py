"""Experts of mixtures: products of tokens with the weights of their experts, with arrays of
numpy."""

import numpy as np
import pytest

import microscale

ml_dtypes = pytest.importorskip("ml_dtypes")

SHAPE = (5, 24, 64)


def each(weights, x, chosen, bias=None):
    """The products of each token and each of its experts, one after the other, by `linear`."""
    rows = np.zeros((*chosen.shape, weights.shape[1]), x.dtype)
    for token, of_token in enumerate(chosen):
        for i, expert in enumerate(of_token):
            own = x[token] if x.ndim == 2 else x[token, i]
            if 0 <= expert < len(weights):
                rows[token, i] = microscale.linear(np.ascontiguousarray(own)[None], weights[int(expert)])[0]
                if bias is not None:
                    rows[token, i] += bias[expert]
    return rows


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_products_are_those_of_each_expert(rng, format, dtype):
    scale = 4.0 ** np.arange(SHAPE[0], dtype="f4")
    weights = microscale.quantize_experts((rng.standard_normal(SHAPE, "f4") * scale[:, None, None]).astype(dtype), format)
    assert (len(weights), weights.shape, weights.codes.shape) == (5, SHAPE, (5, 24, 32))
    chosen = rng.integers(0, 5, (7, 2), "int32")
    bias = rng.standard_normal((5, 24), "f4").astype(dtype)
    for shape in [(7, 64), (7, 2, 64)]:
        x = rng.standard_normal(shape, "f4").astype(dtype)
        y = microscale.linear_experts(x, weights, chosen)
        assert y.dtype == x.dtype and y.shape == (7, 2, 24)
        np.testing.assert_allclose(y.astype("f4"), each(weights, x, chosen).astype("f4"), rtol=1e-2, atol=1e-2)
        with_bias = microscale.linear_experts(x, weights, chosen, bias=bias)
        np.testing.assert_array_equal(with_bias, y + bias[chosen])
        out = np.empty_like(y)
        assert microscale.linear_experts(x, weights, chosen.astype("int64"), out=out) is out
        np.testing.assert_array_equal(out, y)


def test_int8_rounds_the_activations_of_each_expert(rng):
    weights = microscale.quantize_experts(rng.standard_normal(SHAPE, "f4"), "nvfp4")
    chosen, x = rng.integers(0, 5, (7, 2), "int32"), rng.standard_normal((7, 64), "f4")
    y = microscale.linear_experts(x, weights, chosen, activations="int8")
    for token, experts in enumerate(chosen):
        for i, expert in enumerate(experts):
            expected = microscale.linear(x[token : token + 1], weights[int(expert)], activations="int8")
            np.testing.assert_array_equal(y[token, i], expected[0])


def test_each_expert_has_a_global_scale(rng):
    x = rng.standard_normal(SHAPE, "f4") * np.array([1, 2, 8, 64, 1024], "f4")[:, None, None]
    weights = microscale.quantize_experts(x, "nvfp4", search="full")
    parts = [microscale.quantize(part, "nvfp4", search="full") for part in x]
    np.testing.assert_array_equal(weights.global_scales, [part.global_scale.value for part in parts])
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(weights[i].codes, part.codes)
        np.testing.assert_array_equal(weights[i].scales, part.scales)
    np.testing.assert_array_equal(weights.dequantize(), [part.dequantize() for part in parts])
    again = microscale.Experts(
        weights.codes, weights.scales, format="nvfp4", global_scales=weights.global_scales, direction="divisor"
    )
    np.testing.assert_array_equal(again.dequantize("float16"), weights.dequantize("float16"))
    assert "5 of 24x64 in nvfp4, a divisor each" in repr(again) and len(list(again)) == 5


def test_numbers_that_are_no_experts_leave_zeros(rng):
    weights = microscale.quantize_experts(rng.standard_normal(SHAPE, "f4"), "mxfp4")
    x = rng.standard_normal((3, 64), "f4")
    chosen = np.array([[0, 5], [-1, 2], [7, -3]], "int32")
    y = microscale.linear_experts(x, weights, chosen, bias=np.ones((5, 24), "f4"))
    here = (chosen >= 0) & (chosen < 5)
    assert not y[~here].any() and y[here].all()
    out = np.full_like(y, 3)
    microscale.linear_experts(x, weights, chosen, out=out)
    assert (out[~here] == 3).all()
    assert microscale.linear_experts(x[:0], weights, chosen[:0]).shape == (0, 2, 24)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": np.ones((3, 32), "f4")}, microscale.Error, r"must have \[3, 64\]"),
        ({"x": np.ones((4, 64), "f4")}, microscale.Error, r"must have \[3, 64\] or.*\[3, 2, 64\]"),
        ({"x": np.ones((3, 64), "f8")}, TypeError, "dtype"),
        ({"x": np.ones((64, 3), "f4").T}, microscale.Error, "contiguous"),
        ({"chosen": np.zeros(3, "int32")}, microscale.Error, r"pass \[tokens, k\]"),
        ({"chosen": [[0, 1]]}, TypeError, "pass an array of int32"),
        ({"bias": np.ones((5, 23), "f4")}, microscale.Error, r"bias has shape \[5, 23\] and must have \[5, 24\]"),
        ({"bias": np.ones((24, 5), "f4")}, microscale.Error, "bias has shape"),
        ({"bias": np.ones(120, "f4")}, microscale.Error, "bias has shape"),
        ({"bias": np.ones((5, 24, 1), "f4")}, microscale.Error, "bias has shape"),
        ({"bias": np.ones((5, 24), "f2")}, TypeError, "bias is float16 and must be float32"),
        ({"out": np.ones((3, 24), "f4")}, microscale.Error, "out has 72 elements"),
    ],
)
def test_operands_that_do_not_fit(rng, change, error, message):
    weights = microscale.quantize_experts(rng.standard_normal(SHAPE, "f4"), "nvfp4")
    arguments = {"x": np.ones((3, 64), "f4"), "chosen": np.zeros((3, 2), "int32"), **change}
    with pytest.raises(error, match=message):
        microscale.linear_experts(arguments.pop("x"), weights, arguments.pop("chosen"), **arguments)


#: Integers out of range for five experts. Truncated to 32 bits, some are in range.
OUT_OF_RANGE = [-1, 5, 2**31 - 1, -(2**31), 2**31, 2**32, 2**32 + 1, 2**33 + 4, -(2**32), -(2**32) + 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1]


def numbers_of(dtype):
    """Numbers of experts, and numbers out of range that a dtype can have."""
    facts = np.iinfo(dtype)
    return np.array([[0, 1, 4] + [n for n in OUT_OF_RANGE if facts.min <= n <= facts.max]], dtype)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_large_numbers_are_no_experts(rng, dtype, library):
    weights = microscale.quantize_experts(rng.standard_normal(SHAPE, "f4"), "mxfp4")
    chosen, x = numbers_of(dtype), rng.standard_normal((1, 64), "f4")
    expected = [weights[int(n)].dequantize() @ x[0] if n in (0, 1, 4) else np.zeros(24, "f4") for n in chosen[0]]
    if library == "torch":
        torch = pytest.importorskip("torch")
        weights = microscale.Experts(torch.from_numpy(weights.codes), torch.from_numpy(weights.scales), format="mxfp4")
        y = microscale.linear_experts(torch.from_numpy(x), weights, torch.from_numpy(chosen)).numpy()
    else:
        y = microscale.linear_experts(x, weights, chosen)
    np.testing.assert_allclose(y[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bool", "complex64", "object"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_numbers_that_are_no_integers_are_refused(rng, dtype, library):
    chosen = np.array([[1, 0]]).astype(dtype)
    weights = microscale.quantize_experts(rng.standard_normal(SHAPE, "f4"), "mxfp4")
    x = np.ones((1, 64), "f4")
    if library == "torch":
        torch = pytest.importorskip("torch")
        if dtype == "object":
            pytest.skip("PyTorch has no objects")
        weights = microscale.Experts(torch.from_numpy(weights.codes), torch.from_numpy(weights.scales), format="mxfp4")
        x, chosen = torch.from_numpy(x), torch.from_numpy(chosen)
    with pytest.raises(TypeError, match="experts are an array of .*; pass an array of int32"):
        microscale.linear_experts(x, weights, chosen)


def test_parts_that_are_not_experts(rng):
    weights = microscale.quantize_experts(rng.standard_normal(SHAPE, "f4"), "nvfp4")
    with pytest.raises(microscale.Error, match="4 global scales of 5 experts"):
        microscale.Experts(weights.codes, weights.scales, format="nvfp4", global_scales=[1.0] * 4, direction="divisor")
    with pytest.raises(ValueError, match="go together"):
        microscale.Experts(weights.codes, weights.scales, format="nvfp4", direction="divisor")
    with pytest.raises(microscale.Error, match="nvfp4 or mxfp4"):
        microscale.Experts(weights.codes, weights.scales, format="mxfp8-e4m3")
    with pytest.raises(microscale.Error, match="bytes"):
        microscale.linear_experts(
            np.ones((1, 64), "f4"), microscale.Experts(weights.codes, weights.scales[:4], format="mxfp4"), np.zeros((1, 1), "int32")
        )
    with pytest.raises(microscale.Error, match="matrices of one shape"):
        microscale.quantize_experts([np.ones((2, 32), "f4"), np.ones((3, 32), "f4")], "nvfp4")
    with pytest.raises(microscale.Error, match="one or more"):
        microscale.quantize_experts([], "nvfp4")
    with pytest.raises(TypeError, match="leave layout and out"):
        microscale.quantize_experts(np.ones(SHAPE, "f4"), "nvfp4", layout="swizzled")
