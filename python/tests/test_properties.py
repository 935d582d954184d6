"""Properties of random arrays, against the definition of the formats in a few lines of numpy."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import microscale

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FORMATS = ["mxfp4", "nvfp4", "mxfp8-e4m3", "mxfp8-e5m2"]
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]

shapes = hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=70)
floats = st.floats(-1e4, 1e4, width=32)
arrays = hnp.arrays(np.float32, shapes, elements=floats, fill=floats)


def elements_of(q):
    """The unscaled elements of the codes, `[rows, blocks * block]`."""
    rows = q.codes.reshape(q.rows, -1)
    if q.format == "mxfp8-e4m3":
        return rows.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if q.format == "mxfp8-e5m2":
        return rows.view(ml_dtypes.float8_e5m2).astype(np.float32)
    pairs = np.stack([rows & 15, rows >> 4], axis=-1)
    return VALUES[pairs.reshape(rows.shape[0], -1)]


def dequantized(q):
    """The values of codes and scales by the definitions of the formats, in float32."""
    block = 16 if q.format == "nvfp4" else 32
    scales = q.scales.reshape(q.rows, -1)
    if q.format == "nvfp4":
        wide = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        if q.direction == "divisor":
            wide = wide / np.float32(q.global_scale.value)
    else:
        wide = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    values = elements_of(q) * np.repeat(wide, block, axis=1)
    return values[:, : q.cols].reshape(q.shape)


@settings(max_examples=150, deadline=None)
@given(arrays, st.sampled_from(FORMATS), st.sampled_from(DTYPES))
def test_dequantizing_is_the_definition(x, format, dtype):
    q = microscale.quantize(x.astype(dtype), format)
    assert q.shape == x.shape and q.codes.dtype == q.scales.dtype == np.uint8
    assert q.codes.shape[:-1] == q.scales.shape[:-1] == x.shape[:-1]
    np.testing.assert_array_equal(microscale.dequantize(q), dequantized(q))
    for back in ("float16", "bfloat16"):
        narrow = microscale.dequantize(q, back)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(narrow, dequantized(q).astype(narrow.dtype))


@settings(max_examples=100, deadline=None)
@given(arrays, st.sampled_from(FORMATS))
def test_what_was_quantized_stays(x, format):
    """Values that a format holds are the fixed points of quantizing, given the same global
    scale."""
    if format == "nvfp4":
        q = microscale.quantize(x, format, numerics="modelopt", global_scale=1.0)
        again = microscale.quantize(microscale.dequantize(q), format, numerics="modelopt", global_scale=1.0)
    else:
        q = microscale.quantize(x, format, numerics="ocp")
        again = microscale.quantize(microscale.dequantize(q), format, numerics="ocp")
    np.testing.assert_array_equal(microscale.dequantize(again), microscale.dequantize(q))


@settings(max_examples=150, deadline=None)
@given(arrays, st.data(), st.sampled_from(FORMATS), st.sampled_from(["linear", "swizzled"]))
def test_strided_views_are_quantized_like_copies(x, data, format, layout):
    axes = data.draw(st.permutations(range(x.ndim)))
    view = x.transpose(axes)
    steps = [data.draw(st.integers(1, 3)) for _ in range(view.ndim)]
    view = view[tuple(slice(None, None, step) for step in steps)]
    expected = microscale.quantize(np.ascontiguousarray(view), format, layout=layout)
    try:
        q = microscale.quantize(view, format, layout=layout)
    except microscale.Error as error:
        # Three dimensions that no stride passes through together.
        assert "do not describe rows" in str(error) and x.ndim > 2
        return
    np.testing.assert_array_equal(q.codes, expected.codes)
    np.testing.assert_array_equal(q.scales, expected.scales)
    assert (q.global_scale, q.report) == (expected.global_scale, expected.report)
    assert microscale.amax(view) == microscale.amax(np.ascontiguousarray(view))


@settings(max_examples=60, deadline=None)
@given(arrays, st.sampled_from(FORMATS))
def test_layouts_go_both_ways(x, format):
    q = microscale.quantize(x, format)
    there = microscale.swizzle(q)
    assert there.codes is q.codes and there.layout == "swizzled"
    np.testing.assert_array_equal(there.scales, microscale.quantize(x, format, layout="swizzled").scales)
    np.testing.assert_array_equal(microscale.dequantize(there), microscale.dequantize(q))
    np.testing.assert_array_equal(microscale.swizzle(there, "linear").scales, q.scales)


@settings(max_examples=60, deadline=None)
@given(arrays, st.sampled_from(["nvfp4", "mxfp4"]))
def test_a_search_errs_no_more(x, format):
    losses = [
        microscale.compare(x, microscale.quantize(x, format, search=search)).relative_squared_error
        for search in ("none", "four-six", "full")
    ]
    if np.isfinite(losses[0]):
        assert losses[2] <= losses[1] + 1e-12 and losses[1] <= losses[0] + 1e-12


@settings(max_examples=60, deadline=None)
@given(arrays)
def test_amax_and_loss_are_numpys(x):
    assert microscale.amax(x).finite == np.abs(x).max()
    other = (x * np.float32(0.97)).astype(np.float16)
    loss = microscale.compare(x, other)
    a, b = x.astype(np.float64), other.astype(np.float64)
    assert loss.values == x.size and loss.left_out == 0
    assert loss.max_abs_error == pytest.approx(np.abs(a - b).max())
    if a.any():
        assert loss.relative_squared_error == pytest.approx(((a - b) ** 2).sum() / (a**2).sum(), rel=1e-6)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_products_are_those_of_the_values(format, dtype, rng):
    weights = microscale.quantize(rng.standard_normal((48, 256), np.float32), format)
    x = rng.standard_normal((3, 5, 256), np.float32).astype(dtype)
    y = microscale.linear(x, weights)
    assert y.shape == (3, 5, 48) and y.dtype == dtype
    exact = x.astype(np.float64) @ dequantized(weights).astype(np.float64).T
    within = {"rtol": 1e-6, "atol": 1e-4} if dtype is np.float32 else {"rtol": 2**-7, "atol": 2**-6}
    np.testing.assert_allclose(y.astype(np.float64), exact, **within)

    vector = microscale.quantize(rng.standard_normal((4, 256), np.float32), format)
    y = microscale.gemv(weights, vector, batch=4)
    a, b = dequantized(weights).astype(np.float64).reshape(4, 12, 256), dequantized(vector).astype(np.float64)
    assert y.shape == (4, 12)
    np.testing.assert_allclose(y, np.einsum("lmk,lk->lm", a, b), rtol=1e-6, atol=1e-6)
