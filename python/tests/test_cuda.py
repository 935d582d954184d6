"""Tensors in the memory of NVIDIA GPUs: the bytes are a CPU's, nothing waits, graphs can be captured. Skipped without a GPU, but an
error where MICROSCALE_REQUIRE_GPU is set."""

import gc
import os
import resource
import subprocess
import sys
import threading
import types

import pytest

import microscale

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    if os.environ.get("MICROSCALE_REQUIRE_GPU"):
        raise RuntimeError("MICROSCALE_REQUIRE_GPU is set, and PyTorch finds no GPU")
    pytest.skip("no GPU", allow_module_level=True)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = ["nvfp4", "mxfp4", "mxfp8-e4m3", "mxfp8-e5m2"]
SHAPES = [(1, 1), (3, 33), (5, 3, 96), (130, 144), (128, 256), (7, 1000), (2, 64)]
#: Clock cycles of a GPU in some tens of milliseconds.
LONG = 50_000_000


def values(shape, dtype=torch.float32, seed=1):
    """Values of many magnitudes with zeros among them, on a CPU."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-6, 6, shape, generator=generator).float())
    x[torch.rand(shape, generator=generator) < 0.1] = 0
    return x.to(dtype)


def same(found, expected):
    """Compares a result on a GPU with one on a CPU."""
    assert found.codes.is_cuda and found.scales.is_cuda
    assert (found.shape, found.format, found.layout) == (expected.shape, expected.format, expected.layout)
    assert found.direction == expected.direction
    here = found.cpu()
    assert torch.equal(here.codes, expected.codes) and torch.equal(here.scales, expected.scales)
    assert here.global_scale == expected.global_scale


def within_bound(y, weights, x):
    """Compares a product with that in float64 of the dequantized weights, under the bound of sums in tensor cores."""
    w = weights.cpu().dequantize().double()
    x, y = x.cpu().double(), y.cpu()
    exact, magnitude = x @ w.T, x.abs() @ w.abs().T
    gamma = 18 * (w.shape[1] / 16 + 2) * 2.0**-23
    half_ulp = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}[y.dtype]
    off = (y.double() - exact).abs()
    bound = gamma * magnitude + half_ulp * exact.abs() + 2.0**-24
    assert bool((off <= bound).all()), f"{(off / bound).max().item():.2f} times the bound"


@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_bytes_are_a_cpus(format, dtype, layout):
    for shape in SHAPES:
        x = values(shape, dtype)
        expected = microscale.quantize(x, format, layout=layout)
        q = microscale.quantize(x.cuda(), format, layout=layout)
        same(q, expected)
        for to in DTYPES:
            assert torch.equal(q.dequantize(to).cpu(), expected.dequantize(to)), (shape, to)
        other = "swizzled" if layout == "linear" else "linear"
        converted = microscale.swizzle(q, other)
        same(converted, microscale.swizzle(expected, other))
        assert converted.codes.data_ptr() == q.codes.data_ptr()


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("mxfp4", {"convention": "torchao"}),
        ("mxfp4", {"convention": "compressed-tensors"}),
        ("mxfp4", {"convention": "modelopt"}),
        ("mxfp4", {"convention": "ggml"}),
        ("mxfp4", {"scale_rule": "rceil"}),
        ("mxfp4", {"search": "window"}),
        ("nvfp4", {"convention": "torchao"}),
        ("nvfp4", {"convention": "modelopt"}),
        ("nvfp4", {"convention": "transformer-engine"}),
        ("nvfp4", {"global_scale": 37.5}),
        ("nvfp4", {"global_scale": "none"}),
        ("nvfp4", {"search": "four-six"}),
        ("nvfp4", {"search": "full"}),
    ],
)
def test_choices_have_a_cpus_bytes(format, options):
    for dtype in DTYPES:
        x = values((33, 160), dtype)
        same(microscale.quantize(x.cuda(), format, **options), microscale.quantize(x, format, **options))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_importance_and_reports(format):
    x = values((20, 96))
    importance = torch.rand(96) + 0.1
    expected = microscale.quantize(x, format, search="full", importance=importance)
    q = microscale.quantize(x.cuda(), format, search="full", importance=importance.cuda(), report=True)
    same(q, expected)
    assert q.report == expected.report
    assert microscale.quantize(x.cuda(), format).report is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_nan_and_infinities(format, dtype):
    x = values((9, 70), dtype)
    x[4, 3], x[6, 68] = float("nan"), float("-inf")
    for choice in ("propagate", "saturate"):
        expected = microscale.quantize(x, format, non_finite=choice)
        q = microscale.quantize(x.cuda(), format, non_finite=choice, report=True)
        same(q, expected)
        assert q.report == expected.report
    same(microscale.quantize(x.cuda(), format), microscale.quantize(x, format, non_finite="propagate"))
    with pytest.raises(microscale.NonFiniteError) as on_cpu:
        microscale.quantize(x, format)
    with pytest.raises(microscale.NonFiniteError) as on_gpu:
        microscale.quantize(x.cuda(), format, non_finite="error")
    assert (on_gpu.value.first, on_gpu.value.nan, on_gpu.value.infinite) == ((4, 3), 1, 1)
    assert on_gpu.value.first == on_cpu.value.first
    assert microscale.quantize(values((2, 64)).cuda(), format, non_finite="error").report.nan == 0


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::2],
        lambda x: x[3:, 16:80],
        lambda x: x[:, 1:65],
        lambda x: x.reshape(8, 12, 160)[:, :, :96],
        lambda x: x.reshape(8, 12, 160)[::3],
        lambda x: x[5],
    ],
)
def test_views_are_read_where_they_lie(view):
    x = values((96, 160))
    there = view(x.cuda())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    q = microscale.quantize(there, "mxfp4")
    assert torch.cuda.max_memory_allocated() - before <= q.nbytes + 2 * 512
    same(q, microscale.quantize(view(x).contiguous(), "mxfp4"))
    same(microscale.quantize(there), microscale.quantize(view(x).contiguous()))
    found = microscale.amax(there).read()
    assert found == microscale.amax(view(x).contiguous())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x: x.t(), microscale.Error, "rows whose elements lie apart.*contiguous copy"),
        (lambda x: x.double(), TypeError, "dtype torch.float64"),
        (lambda x: x.to_sparse(), TypeError, "to_dense"),
        (lambda x: x[0, 0], microscale.Error, "no dimensions"),
        (lambda x: x[:1].expand(4, -1), microscale.Error, "stride"),
    ],
)
def test_tensors_that_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        microscale.quantize(make(values((32, 64)).cuda()))


def test_outputs_can_be_given():
    x = values((12, 96), torch.bfloat16)
    out = microscale.quantize(torch.zeros_like(x).cuda())
    places = out.codes.data_ptr(), out.scales.data_ptr(), out.global_scale.data_ptr()
    assert microscale.quantize(x.cuda(), out=out) is out
    assert places == (out.codes.data_ptr(), out.scales.data_ptr(), out.global_scale.data_ptr())
    expected = microscale.quantize(x)
    same(out, expected)
    back = torch.empty(12, 96, dtype=torch.float16, device="cuda")
    assert out.dequantize(out=back) is back and torch.equal(back.cpu(), expected.dequantize("float16"))


def test_parts_become_a_result_and_move():
    expected = microscale.quantize(values((8, 64)))
    made = microscale.Quantized(
        expected.codes.cuda(),
        expected.scales.cuda().view(torch.float8_e4m3fn),
        format="nvfp4",
        global_scale=expected.global_scale,
        direction="divisor",
    )
    same(made, expected)
    assert made.global_scale.is_cuda and torch.equal(made.dequantize().cpu(), expected.dequantize())
    moved = expected.to("cuda")
    same(moved, expected)
    same(moved.to("cpu").to("cuda"), expected)
    assert moved.to("cpu").global_scale == expected.global_scale
    there = microscale.Quantized(
        moved.codes, moved.scales, format="nvfp4", global_scale=moved.global_scale, direction="divisor"
    )
    assert there.global_scale.data_ptr() == moved.global_scale.data_ptr()
    assert "divisor" in repr(moved) and moved.nbytes == expected.nbytes
    assert [part.dtype for part in moved.typed] == [torch.float4_e2m1fn_x2, torch.float8_e4m3fn]


def test_an_amax_of_several():
    parts = [values((16, 64), seed=seed) * 2.0**seed for seed in range(3)]
    together = torch.cat(parts)
    amax = None
    for part in parts:
        amax = microscale.amax(part.cuda(), out=amax)
    assert isinstance(amax, microscale.DeviceAmax)
    assert amax.read() == microscale.amax(together)
    assert (amax.finite, amax.nan, amax.infinite) == (together.abs().max().item(), False, False)
    expected = microscale.quantize(together)
    for part in parts:
        q = microscale.quantize(part.cuda(), amax=amax)
        same(q, microscale.quantize(part, global_scale=expected.global_scale))
    with_nan = values((2, 64))
    with_nan[1, 1] = float("nan")
    assert microscale.amax(with_nan.cuda()).nan and not microscale.amax(with_nan.cuda()).infinite
    with pytest.raises(microscale.Error, match="amax is for nvfp4"):
        microscale.quantize(parts[0].cuda(), "mxfp4", amax=amax)
    with pytest.raises(microscale.Error, match="amax is for arrays in the memory of a GPU"):
        microscale.quantize(parts[0], amax=amax)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_products_are_within_the_bound(format, dtype):
    for rows, cols in [(64, 128), (300, 1024), (128, 176), (33, 96)]:
        weights = microscale.quantize(torch.randn(rows, cols).cuda() / 8, format)
        for tokens in (1, 2, 8, 9, 33, 130):
            x = torch.randn(tokens, cols).to(dtype).cuda()
            y = microscale.linear(weights, x)
            assert y.dtype == dtype and y.shape == (tokens, rows)
            within_bound(y, weights, x)
        x = torch.randn(2, 3, cols).to(dtype).cuda()
        assert microscale.linear(weights, x).shape == (2, 3, rows)
    out = torch.empty(4, rows, dtype=dtype, device="cuda")
    x = torch.randn(4, cols).to(dtype).cuda()
    assert microscale.linear(weights, x, out=out) is out
    within_bound(out, weights, x)
    with pytest.raises(TypeError, match="float16 or bfloat16"):
        microscale.linear(weights, x.float())


def test_workspaces_are_given_or_kept():
    weights = microscale.quantize(torch.randn(256, 512).cuda())
    x = torch.randn(100, 512, dtype=torch.bfloat16, device="cuda")
    expected = microscale.linear(weights, x)
    workspace = microscale.workspace(weights, 100)
    assert workspace.is_cuda and workspace.dtype == torch.uint8 and workspace.shape[0] > 0
    for _ in range(3):
        assert torch.equal(microscale.linear(weights, x, workspace=workspace), expected)
    assert torch.equal(microscale.linear(weights, x[:20], workspace=workspace), microscale.linear(weights, x[:20]))
    with pytest.raises(microscale.Error, match="workspace"):
        microscale.linear(weights, x, workspace=workspace[:16])
    assert microscale.workspace(weights, 8).shape[0] == 0


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_quantized_times_quantized(format):
    matrix, vectors = values((60, 256), seed=2), values((3, 256), seed=3)
    here = microscale.quantize(matrix, format), microscale.quantize(vectors, format)
    there = microscale.quantize(matrix.cuda(), format), microscale.quantize(vectors.cuda(), format)
    for dtype in DTYPES:
        for options in ({}, {"batch": 3, "vector_stride": 1}):
            found = microscale.gemv(*there, dtype=dtype, **options)
            assert torch.equal(found.cpu(), microscale.gemv(*here, dtype=dtype, **options))


def test_nothing_waits():
    x = torch.randn(64, 512, dtype=torch.bfloat16, device="cuda")
    weights = microscale.quantize(torch.randn(128, 512).cuda())
    workspace = microscale.workspace(weights, 64)

    def work():
        q = microscale.quantize(x)
        amax = microscale.amax(x)
        return (
            q,
            microscale.quantize(x, amax=amax),
            microscale.quantize(x, "mxfp4"),
            microscale.swizzle(q).dequantize(torch.bfloat16),
            microscale.linear(weights, x),
            microscale.linear(weights, x, workspace=workspace),
            microscale.linear(weights, x[:1]),
            microscale.gemv(q, microscale.quantize(x[:1])),
        )

    work()  # Compiles the kernels.
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    work()
    assert not torch.cuda.current_stream().query(), "a call waited for the GPU"
    torch.cuda.synchronize()


def test_a_tensor_that_comes_late_on_another_stream():
    source = values((256, 512), torch.bfloat16)
    there = source.cuda()
    side = torch.cuda.Stream()
    x = torch.zeros_like(there)
    weights = microscale.quantize(torch.randn(64, 512).cuda())
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        x.copy_(there)
        q = microscale.quantize(x)
        y = microscale.linear(weights, x)
        assert not side.query()
    torch.cuda.current_stream().wait_stream(side)
    same(q, microscale.quantize(source))
    within_bound(y, weights, source)
    # Produced there, used here.
    x.zero_()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        x.copy_(there)
    torch.cuda.current_stream().wait_stream(side)
    same(microscale.quantize(x, "mxfp4"), microscale.quantize(source, "mxfp4"))


def captured(work):
    """A graph of work, and its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph, results


@pytest.mark.parametrize(
    "options",
    [
        {"format": "mxfp4"},
        {"format": "mxfp8-e4m3", "layout": "swizzled"},
        {"format": "nvfp4"},
        {"format": "nvfp4", "layout": "swizzled"},
        {"format": "nvfp4", "global_scale": 40.0},
        {"format": "nvfp4", "search": "four-six"},
        {"format": "nvfp4", "non_finite": "saturate"},
    ],
)
def test_graphs_quantize_new_data(options):
    x = values((96, 256), torch.bfloat16).cuda()
    graph, (q, back) = captured(lambda: (q := microscale.quantize(x, **options), q.dequantize(torch.bfloat16)))
    for seed in range(3, 6):
        new = values((96, 256), torch.bfloat16, seed)
        x.copy_(new)
        graph.replay()
        expected = microscale.quantize(new, **options)
        same(q, expected)
        assert torch.equal(back.cpu(), expected.dequantize(torch.bfloat16))


def test_graphs_take_an_amax_from_the_gpu():
    x = values((32, 128)).cuda()
    shared = microscale.amax(x)
    graph, q = captured(lambda: microscale.quantize(x, amax=shared))
    for factor in (1.0, 3.0):
        shared.words.zero_()
        microscale.amax(x * factor, out=shared)
        graph.replay()
        number = microscale.quantize(x.cpu() * factor).global_scale
        same(q, microscale.quantize(x.cpu(), global_scale=number))


@pytest.mark.parametrize("tokens", [1, 8, 9, 64])
@pytest.mark.parametrize("given", [False, True])
def test_graphs_multiply_new_data(tokens, given):
    weights = microscale.quantize(torch.randn(300, 1024).cuda())
    x = torch.randn(tokens, 1024, dtype=torch.bfloat16, device="cuda")
    workspace = microscale.workspace(weights, tokens) if given else None
    graph, (y, z) = captured(
        lambda: (microscale.linear(weights, x, workspace=workspace), microscale.linear(weights, -x, workspace=workspace))
    )
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        for _ in range(2):
            graph.replay()
        assert torch.equal(y, microscale.linear(weights, x))
        assert torch.equal(z, microscale.linear(weights, -x))
        within_bound(y, weights, x)


def test_waiting_is_refused_in_a_capture():
    x = torch.randn(8, 64, device="cuda")
    microscale.quantize(x, non_finite="error")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        for options in ({"non_finite": "error"}, {"report": True}):
            with pytest.raises(microscale.Error, match="a graph is being captured.*propagate"):
                microscale.quantize(x, **options)
    graph.replay()
    assert torch.equal(y, x + 1)


def test_a_first_call_in_a_capture():
    code = """if True:
        import torch, microscale
        x = torch.randn(32, 256, dtype=torch.bfloat16, device="cuda")
        w = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q = microscale.quantize(w)
            y = microscale.linear(q, x)
        graph.replay()
        assert torch.equal(q.codes, microscale.quantize(w).codes)
        assert torch.equal(y, microscale.linear(q, x))
        print("fine")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


class Interface:
    """An array that has the interface of GPUs' arrays alone, of a tensor of PyTorch."""

    def __init__(self, x, stream=None):
        self.x, self.shape, self.stream = x, tuple(x.shape), stream

    @property
    def __cuda_array_interface__(self):
        own = self.x.__cuda_array_interface__
        return {**own, "version": 3, "stream": self.stream}


class DLPackOnly:
    """An array that has DLPack alone."""

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
            microscale.quantize(there)
        expected = microscale.quantize(view.contiguous())
        out = microscale.quantize(torch.zeros(view.shape, dtype=dtype, device="cuda"))
        torch.cuda.synchronize()
        same(microscale.quantize(there, out=out), expected)
        found = microscale.DeviceAmax(torch.zeros(4, device="cuda"))
        assert microscale.amax(there, out=found).read() == microscale.amax(view.contiguous())
    weights = microscale.quantize(values((40, 128)).cuda())
    y = torch.empty(24, 40, dtype=torch.float16, device="cuda")
    activations = x.half().cuda()
    microscale.linear(weights, wrap(activations), out=y)
    assert torch.equal(y, microscale.linear(weights, activations))


def test_streams_that_arrays_name_are_waited_for():
    source = values((256, 512), torch.float16)
    there, side = source.cuda(), torch.cuda.Stream()
    x = torch.zeros_like(there)
    out = microscale.quantize(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        x.copy_(there)
    microscale.quantize(Interface(x, side.cuda_stream), out=out)
    # The other stream waits in turn: this does not change what is read.
    with torch.cuda.stream(side):
        x.zero_()
    same(out, microscale.quantize(source))


def test_results_come_from_the_library_of_the_input(monkeypatch):
    cupy = types.ModuleType("cupy")

    class Array(Interface):
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
    weights = microscale.quantize(Array(values((40, 96), torch.float16).cuda()))
    y = microscale.linear(weights, Array(x.cuda()))
    assert torch.equal(y.x, microscale.linear(microscale.quantize(values((40, 96), torch.float16).cuda()), x.cuda()))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q, x: microscale.linear(q.cpu(), x), microscale.Error, "on cuda:0 and codes on the CPU; move"),
        (lambda q, x: microscale.linear(q, x.cpu()), TypeError, "codes is in the memory of cuda:0"),
        (lambda q, x: q.dequantize(out=torch.empty(16, 64)), TypeError, "codes is in the memory of cuda:0"),
        (
            lambda q, x: microscale.quantize(x, search="full", importance=torch.ones(64)),
            microscale.Error,
            "importance on the CPU",
        ),
        (lambda q, x: microscale.quantize(x.cpu(), out=q), TypeError, "codes is in the memory of cuda:0"),
        (lambda q, x: microscale.quantize(x, out=q.cpu()), microscale.Error, "on the CPU"),
        (lambda q, x: microscale.compare(x, q), TypeError, r"original\.cpu\(\) and other\.cpu\(\)"),
        (lambda q, x: microscale.quantize(x, global_scale=q.global_scale), TypeError, "as `amax`, or float"),
        (lambda q, x: microscale.linear(q, x[:, :32].contiguous()), microscale.Error, "32 columns and the weights 64"),
        (lambda q, x: q.dequantize(out=q.codes.view(torch.float16)), microscale.Error, "out has"),
        (lambda q, x: microscale.linear(microscale.swizzle(q), x), microscale.Error, "swizzled"),
    ],
)
def test_what_does_not_go_together(call, error, message):
    x = values((16, 64), torch.bfloat16).cuda()
    with pytest.raises(error, match=message):
        call(microscale.quantize(x), x)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus():
    x = values((16, 64), torch.bfloat16)
    expected = microscale.quantize(x)
    q = microscale.quantize(x.to("cuda:1"))
    assert torch.cuda.current_device() == 0 and q.codes.device.index == 1
    same(q, expected)
    assert torch.equal(q.dequantize().cpu(), expected.dequantize())
    with pytest.raises(microscale.Error, match="on cuda:0 and codes on cuda:1"):
        microscale.linear(q, x.to("cuda:0"))
    for tokens in (1, 16):
        within_bound(microscale.linear(q, x[:tokens].to("cuda:1")), q, x[:tokens])
    assert torch.cuda.current_device() == 0 and torch.empty(1, device="cuda").device.index == 0


def resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def test_ten_thousand_calls_leave_nothing():
    x = torch.randn(32, 64, dtype=torch.bfloat16, device="cuda")
    weights = microscale.quantize(torch.randn(64, 64).cuda())

    def call(times):
        for _ in range(times):
            q = microscale.quantize(x)
            q.dequantize()
            microscale.linear(weights, x)
            microscale.amax(x)
            microscale.swizzle(q)
            try:
                microscale.quantize(x, global_scale=-1.0)
            except microscale.Error:
                pass
        for _ in range(times // 20):
            microscale.quantize(x, non_finite="error")
        torch.cuda.synchronize()

    call(200)
    gc.collect()
    references, before = sys.getrefcount(x), (torch.cuda.memory_allocated(), resident(), torch.cuda.mem_get_info()[0])
    call(2000)
    gc.collect()
    after = (torch.cuda.memory_allocated(), resident(), torch.cuda.mem_get_info()[0])
    assert sys.getrefcount(x) == references
    assert after[0] == before[0]
    assert after[1] - before[1] < 8 << 20
    assert before[2] - after[2] < 64 << 20


def test_threads_with_streams_of_their_own():
    weights = microscale.quantize(torch.randn(256, 512).cuda())
    inputs = [torch.randn(64, 512, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    expected = [(microscale.quantize(x).cpu(), microscale.linear(weights, x)) for x in inputs]
    torch.cuda.synchronize()
    wrong = []

    def work(x, right):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                q, y = microscale.quantize(x), microscale.linear(weights, x)
                here = q.cpu()
                if not (torch.equal(here.codes, right[0].codes) and torch.equal(y, right[1])):
                    wrong.append(q)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
