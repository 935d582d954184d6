"""Arrays of JAX on a CPU, read by DLPack; results go back the same way. Skipped where JAX is not
installed."""

import subprocess
import sys

import numpy as np
import pytest

import microscale

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_arrays_are_quantized_like_numpys(dtype, format):
    x = jax.random.normal(jax.random.key(1), (5, 3, 96)).astype(dtype)
    q, expected = microscale.quantize(x, format), microscale.quantize(np.asarray(x), format)
    assert isinstance(q.codes, np.ndarray)
    np.testing.assert_array_equal(q.codes, expected.codes)
    np.testing.assert_array_equal(q.scales, expected.scales)
    assert q.global_scale == expected.global_scale
    assert microscale.amax(x) == microscale.amax(np.asarray(x))
    assert microscale.compare(x, q) == microscale.compare(np.asarray(x), expected)


def test_results_go_to_jax_and_come_again():
    x = jax.random.normal(jax.random.key(2), (16, 64))
    q = microscale.quantize(x, "mxfp4")
    codes, scales = jax.dlpack.from_dlpack(q.codes), jax.dlpack.from_dlpack(q.scales)
    assert codes.dtype == jnp.uint8
    again = microscale.Quantized(codes, scales, format="mxfp4")
    back = again.dequantize()
    np.testing.assert_array_equal(back, q.dequantize())
    assert jnp.from_dlpack(back).shape == x.shape
    weights = microscale.Quantized(codes, scales, format="mxfp4", shape=(16, 64))
    y = microscale.linear(x[:2], weights)
    np.testing.assert_array_equal(y, microscale.linear(np.asarray(x[:2]), q))


def test_results_are_not_written_into_jax():
    x = jax.random.normal(jax.random.key(3), (4, 64))
    q = microscale.quantize(x, "mxfp4")
    with pytest.raises((TypeError, ValueError, BufferError), match="read-only|not be written|writ"):
        q.dequantize(out=jnp.zeros((4, 64)))


def test_jax_is_not_imported_for_arrays():
    code = "import sys, numpy, microscale; microscale.quantize(numpy.ones((2, 32), 'f4')); print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
