"""Arrays of JAX in the memory of NVIDIA GPUs: read where they lie, results through PyTorch. Skipped
where JAX has no GPU."""

import os

# JAX takes most of the memory of a GPU beforehand otherwise.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402
import on_gpu  # noqa: E402, F401

import microscale  # noqa: E402

try:
    GPU = jax.devices("gpu")[0]
except RuntimeError:
    pytest.skip("JAX has no GPU", allow_module_level=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_arrays_are_read_where_they_lie(format, dtype):
    x = jax.device_put(jax.random.normal(jax.random.key(1), (12, 96)).astype(dtype), GPU)
    expected = microscale.quantize(np.asarray(x), format)
    with pytest.raises(TypeError, match="memory of a library that is not known here"):
        microscale.quantize(x, format)
    out = microscale.quantize(torch.zeros(12, 96, device="cuda"), format)
    assert microscale.quantize(x, format, out=out) is out
    np.testing.assert_array_equal(out.cpu().codes.numpy(), expected.codes)
    np.testing.assert_array_equal(out.cpu().scales.numpy(), expected.scales)
    assert out.cpu().global_scale == expected.global_scale
    through = microscale.quantize(torch.from_dlpack(x), format)
    np.testing.assert_array_equal(through.cpu().codes.numpy(), expected.codes)


def test_results_go_to_jax():
    x = torch.randn(16, 64, device="cuda")
    q = microscale.quantize(x, "mxfp4")
    codes, scales = jnp.from_dlpack(q.codes), jnp.from_dlpack(q.scales)
    assert codes.dtype == jnp.uint8 and GPU in codes.devices()
    again = microscale.Quantized(codes, scales, format="mxfp4")
    back = torch.empty(16, 64, device="cuda")
    again.dequantize(out=back)
    assert torch.equal(back, q.dequantize())
    y = jnp.from_dlpack(back)
    np.testing.assert_array_equal(np.asarray(y), back.cpu().numpy())
