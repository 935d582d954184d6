"""Arrays of others in the memory of NVIDIA GPUs, by DLPack and by `__cuda_array_interface__`."""

import sys
import types

import pytest

torch = pytest.importorskip("torch")

from on_gpu import LONG, same, values  # noqa: E402

import microscale  # noqa: E402


class Interface:
    """An array that has only the interface of GPUs' arrays, of a tensor of PyTorch."""

    def __init__(self, x, stream=None):
        self.x, self.shape, self.stream = x, tuple(x.shape), stream

    @property
    def __cuda_array_interface__(self):
        own = self.x.__cuda_array_interface__
        return {**own, "version": 3, "stream": self.stream}


class DLPackOnly:
    """An array that has only DLPack."""

    def __init__(self, x):
        self.x, self.shape = x, tuple(x.shape)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options):
        assert "stream" in options
        return self.x.__dlpack__(**options)


@pytest.mark.parametrize("wrap", [Interface, DLPackOnly])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_arrays_of_others(wrap, dtype):
    x = values((24, 128), dtype)
    for view in (x, x[::3], x[:, 32:96]):
        there = wrap(x.cuda()[::3] if view.shape[0] == 8 else x.cuda()[:, 32:96] if view.shape[1] == 64 else x.cuda())
        with pytest.raises(TypeError, match="memory of a library that is not known here"):
            microscale.quantize(there, "nvfp4")
        expected = microscale.quantize(view.contiguous(), "nvfp4")
        out = microscale.quantize(torch.zeros(view.shape, dtype=dtype, device="cuda"), "nvfp4")
        torch.cuda.synchronize()
        same(microscale.quantize(there, "nvfp4", out=out), expected)
        found = microscale.DeviceAmax(torch.zeros(4, device="cuda"))
        assert microscale.amax(there, out=found).read() == microscale.amax(view.contiguous())
    weights = microscale.quantize(values((40, 128)).cuda(), "nvfp4")
    y = torch.empty(24, 40, dtype=torch.float16, device="cuda")
    activations = x.half().cuda()
    microscale.linear(wrap(activations), weights, out=y)
    assert torch.equal(y, microscale.linear(activations, weights))


def test_streams_that_arrays_name_are_waited_for():
    source = values((256, 512), torch.float16)
    there, side = source.cuda(), torch.cuda.Stream()
    x = torch.zeros_like(there)
    out = microscale.quantize(x, "nvfp4")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        x.copy_(there)
    microscale.quantize(Interface(x, side.cuda_stream), "nvfp4", out=out)
    # The other stream waits in turn: this does not change the input.
    with torch.cuda.stream(side):
        x.zero_()
    same(out, microscale.quantize(source, "nvfp4"))


def test_results_come_from_the_library_of_the_input(monkeypatch):
    cupy = types.ModuleType("cupy")

    class Array(Interface):
        dtype = "float16"

        @property
        def device(self):
            return Device()

        def get(self):
            return self.x.cpu()

    class Device:
        id = 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    cupy.ndarray = Array
    cupy.empty = lambda shape, dtype: Array(torch.empty(shape, dtype=getattr(torch, dtype), device="cuda"))
    cupy.zeros = lambda shape, dtype: Array(torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda"))
    cupy.cuda = types.SimpleNamespace(
        get_current_stream=lambda: types.SimpleNamespace(ptr=torch.cuda.current_stream().cuda_stream)
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    x = values((12, 96), torch.float16)
    q = microscale.quantize(Array(x.cuda()), "mxfp4")
    expected = microscale.quantize(x, "mxfp4")
    assert type(q.codes) is Array and type(q.scales) is Array
    assert torch.equal(q.codes.x.cpu(), expected.codes) and torch.equal(q.scales.x.cpu(), expected.scales)
    assert torch.equal(q.dequantize("float16").x.cpu(), expected.dequantize("float16"))
    assert microscale.amax(Array(x.cuda())).finite == microscale.amax(x).finite
    weights = microscale.quantize(Array(values((40, 96), torch.float16).cuda()), "nvfp4")
    y = microscale.linear(Array(x.cuda()), weights)
    assert torch.equal(y.x, microscale.linear(x.cuda(), microscale.quantize(values((40, 96), torch.float16).cuda(), "nvfp4")))
