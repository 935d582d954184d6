"""Arrays of CuPy in the memory of NVIDIA GPUs. Skipped where CuPy is not installed."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")

import on_gpu  # noqa: E402, F401

import microscale  # noqa: E402


def same(q, expected):
    """Compares a result in arrays of CuPy with one in arrays of numpy."""
    assert isinstance(q.codes, cupy.ndarray) and isinstance(q.scales, cupy.ndarray)
    np.testing.assert_array_equal(q.codes.get(), expected.codes)
    np.testing.assert_array_equal(q.scales.get(), expected.scales)
    here = q.cpu()
    assert (here.global_scale, here.direction, here.shape) == (expected.global_scale, expected.direction, expected.shape)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8-e4m3"])
def test_bytes_are_a_cpus(rng, format, dtype):
    for shape in [(3, 33), (5, 3, 96), (130, 144)]:
        x = rng.standard_normal(shape, "f4").astype(dtype)
        q, expected = microscale.quantize(cupy.asarray(x), format), microscale.quantize(x, format)
        same(q, expected)
        same(microscale.swizzle(q), microscale.swizzle(expected))
        back = q.dequantize(dtype)
        assert isinstance(back, cupy.ndarray)
        np.testing.assert_array_equal(back.get(), expected.dequantize(dtype))
        found = microscale.amax(cupy.asarray(x))
        assert found.read() == microscale.amax(x)
    view = cupy.asarray(x)[::2, 16:112]
    same(microscale.quantize(view, format), microscale.quantize(np.ascontiguousarray(x[::2, 16:112]), format))
    with pytest.raises(TypeError, match="CuPy has no bfloat16"):
        q.dequantize("bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_products(rng, dtype):
    w = rng.standard_normal((48, 128), "f4")
    weights, here = microscale.quantize(cupy.asarray(w), "nvfp4"), microscale.quantize(w, "nvfp4")
    exact = here.dequantize().astype("f8")
    for tokens in (1, 8, 30):
        x = rng.standard_normal((tokens, 128), "f4").astype(dtype)
        y = microscale.linear(cupy.asarray(x), weights)
        assert isinstance(y, cupy.ndarray) and y.dtype == dtype
        np.testing.assert_allclose(y.get(), x.astype("f8") @ exact.T, rtol=1e-2, atol=2e-2)
    np.testing.assert_array_equal(
        microscale.gemv(weights, microscale.quantize(cupy.asarray(w[:1]), "nvfp4")).get(), microscale.gemv(here, microscale.quantize(w[:1], "nvfp4"))
    )


def test_experts(rng):
    w = rng.standard_normal((4, 48, 64), "f4")
    weights, here = microscale.quantize_experts(cupy.asarray(w), "nvfp4"), microscale.quantize_experts(w, "nvfp4")
    np.testing.assert_array_equal(weights.codes.get(), here.codes)
    x, chosen = rng.standard_normal((9, 64), "f4").astype("f2"), rng.integers(0, 4, (9, 2))
    y = microscale.linear_experts(cupy.asarray(x), weights, cupy.asarray(chosen))
    assert isinstance(y, cupy.ndarray)
    expected = microscale.linear_experts(x, here, chosen).astype("f4")
    np.testing.assert_allclose(y.get().astype("f4"), expected, rtol=1e-2, atol=2e-2)


def test_work_is_on_the_current_stream(rng):
    x = rng.standard_normal((256, 512), "f4")
    expected = microscale.quantize(x, "nvfp4")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        there = cupy.zeros(x.shape, "f4")
        there.set(x, stream=stream)
        q = microscale.quantize(there, "nvfp4")
        stream.synchronize()
        same(q, expected)


def test_memory_is_shared_with_torch(rng):
    x = rng.standard_normal((16, 64), "f4")
    q = microscale.quantize(torch.from_dlpack(cupy.asarray(x)), "nvfp4")
    torch.cuda.synchronize()
    assert q.codes.is_cuda and torch.equal(q.cpu().codes, torch.from_numpy(microscale.quantize(x, "nvfp4").codes))
