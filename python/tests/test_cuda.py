"""Tensors in the memory of NVIDIA GPUs: the bytes are a CPU's, products are within their bound."""

import pytest

torch = pytest.importorskip("torch")

from on_gpu import DTYPES, same, values, within_bound  # noqa: E402

import microscale  # noqa: E402

FORMATS = ["nvfp4", "mxfp4", "mxfp8-e4m3", "mxfp8-e5m2"]
SHAPES = [(1, 1), (3, 33), (5, 3, 96), (130, 144), (128, 256), (7, 1000), (2, 64)]


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
        ("mxfp4", {"numerics": "torchao"}),
        ("mxfp4", {"numerics": "compressed-tensors"}),
        ("mxfp4", {"numerics": "modelopt"}),
        ("mxfp4", {"numerics": "ggml"}),
        ("mxfp4", {"scale_rule": "rceil"}),
        ("mxfp4", {"search": "window"}),
        ("nvfp4", {"numerics": "torchao"}),
        ("nvfp4", {"numerics": "modelopt"}),
        ("nvfp4", {"numerics": "transformer-engine"}),
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
    same(microscale.quantize(there, "nvfp4"), microscale.quantize(view(x).contiguous(), "nvfp4"))
    found = microscale.amax(there).read()
    assert found == microscale.amax(view(x).contiguous())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x: x.t(), microscale.Error, "rows whose elements lie apart.*contiguous copy"),
        (lambda x: x.reshape(8, 4, 64)[::3], microscale.Error, "rows at uneven distances"),
        (lambda x: x.double(), TypeError, "dtype torch.float64"),
        (lambda x: x.to_sparse(), TypeError, "to_dense"),
        (lambda x: x[0, 0], microscale.Error, "no dimensions"),
        (lambda x: x[:1].expand(4, -1), microscale.Error, "stride"),
    ],
)
def test_tensors_that_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        microscale.quantize(make(values((32, 64)).cuda()), "nvfp4")


def test_outputs_can_be_given():
    x = values((12, 96), torch.bfloat16)
    out = microscale.quantize(torch.zeros_like(x).cuda(), "nvfp4")
    places = out.codes.data_ptr(), out.scales.data_ptr(), out.global_scale.value.data_ptr()
    assert microscale.quantize(x.cuda(), "nvfp4", out=out) is out
    assert places == (out.codes.data_ptr(), out.scales.data_ptr(), out.global_scale.value.data_ptr())
    expected = microscale.quantize(x, "nvfp4")
    same(out, expected)
    back = torch.empty(12, 96, dtype=torch.float16, device="cuda")
    assert out.dequantize(out=back) is back and torch.equal(back.cpu(), expected.dequantize("float16"))


def test_parts_become_a_result_and_move():
    expected = microscale.quantize(values((8, 64)), "nvfp4")
    made = microscale.Quantized(
        expected.codes.cuda(),
        expected.scales.cuda().view(torch.float8_e4m3fn),
        format="nvfp4",
        global_scale=expected.global_scale,
    )
    same(made, expected)
    assert made.global_scale.value.is_cuda and torch.equal(made.dequantize().cpu(), expected.dequantize())
    moved = expected.to("cuda")
    same(moved, expected)
    same(moved.to("cpu").to("cuda"), expected)
    assert moved.to("cpu").global_scale == expected.global_scale
    there = microscale.Quantized(
        moved.codes, moved.scales, format="nvfp4", global_scale=moved.global_scale
    )
    assert there.global_scale.value.data_ptr() == moved.global_scale.value.data_ptr()
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
    expected = microscale.quantize(together, "nvfp4")
    for part in parts:
        q = microscale.quantize(part.cuda(), "nvfp4", amax=amax)
        same(q, microscale.quantize(part, "nvfp4", global_scale=expected.global_scale))
    with_nan = values((2, 64))
    with_nan[1, 1] = float("nan")
    assert microscale.amax(with_nan.cuda()).nan and not microscale.amax(with_nan.cuda()).infinite
    with pytest.raises(microscale.Error, match="amax is for nvfp4"):
        microscale.quantize(parts[0].cuda(), "mxfp4", amax=amax)
    for wrong, found in ((parts[0], amax), (parts[0].cuda(), microscale.amax(parts[0]))):
        with pytest.raises(TypeError, match="pass the result of microscale.amax for an array there"):
            microscale.quantize(wrong, "nvfp4", amax=found)
        with pytest.raises(TypeError, match="x is in the memory of"):
            microscale.amax(wrong, out=found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_products_are_within_the_bound(format, dtype):
    for rows, cols in [(64, 128), (300, 1024), (128, 176), (33, 96)]:
        weights = microscale.quantize(torch.randn(rows, cols).cuda() / 8, format)
        for tokens in (1, 2, 8, 9, 33, 130):
            x = torch.randn(tokens, cols).to(dtype).cuda()
            y = microscale.linear(x, weights)
            assert y.dtype == dtype and y.shape == (tokens, rows)
            within_bound(y, weights, x)
        x = torch.randn(2, 3, cols).to(dtype).cuda()
        assert microscale.linear(x, weights).shape == (2, 3, rows)
    out = torch.empty(4, rows, dtype=dtype, device="cuda")
    x = torch.randn(4, cols).to(dtype).cuda()
    assert microscale.linear(x, weights, out=out) is out
    within_bound(out, weights, x)
    with pytest.raises(TypeError, match="dtype is float64"):
        microscale.linear(x.double(), weights)


def test_workspaces_are_given_or_kept():
    weights = microscale.quantize(torch.randn(256, 512).cuda(), "nvfp4")
    x = torch.randn(100, 512, dtype=torch.bfloat16, device="cuda")
    expected = microscale.linear(x, weights)
    workspace = microscale.workspace(weights, 100)
    assert workspace.is_cuda and workspace.dtype == torch.uint8 and workspace.shape[0] > 0
    for _ in range(3):
        assert torch.equal(microscale.linear(x, weights, workspace=workspace), expected)
    assert torch.equal(microscale.linear(x[:20], weights, workspace=workspace), microscale.linear(x[:20], weights))
    with pytest.raises(microscale.Error, match="workspace"):
        microscale.linear(x, weights, workspace=workspace[:16])
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


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q, x: microscale.linear(x, q.cpu()), microscale.Error, "on cuda:0 and codes on the CPU; move"),
        (lambda q, x: microscale.linear(x.cpu(), q), TypeError, "codes is in the memory of cuda:0"),
        (lambda q, x: q.dequantize(out=torch.empty(16, 64)), TypeError, "codes is in the memory of cuda:0"),
        (
            lambda q, x: microscale.quantize(x, "nvfp4", search="full", importance=torch.ones(64)),
            microscale.Error,
            "importance on the CPU",
        ),
        (lambda q, x: microscale.quantize(x.cpu(), "nvfp4", out=q), TypeError, "codes is in the memory of cuda:0"),
        (lambda q, x: microscale.quantize(x, "nvfp4", out=q.cpu()), microscale.Error, "on the CPU"),
        (lambda q, x: microscale.quantize(x, "nvfp4", global_scale=q.global_scale), TypeError, "pass `amax`"),
        (lambda q, x: microscale.linear(x[:, :32].contiguous(), q), microscale.Error, "32 columns and the weights 64"),
        (lambda q, x: q.dequantize(out=q.codes.view(torch.float16)), microscale.Error, "out has"),
        (lambda q, x: microscale.linear(x, microscale.swizzle(q)), microscale.Error, "swizzled"),
    ],
)
def test_what_does_not_go_together(call, error, message):
    x = values((16, 64), torch.bfloat16).cuda()
    with pytest.raises(error, match=message):
        call(microscale.quantize(x, "nvfp4"), x)


def test_losses_are_a_cpus():
    x = values((16, 64), torch.bfloat16)
    q = microscale.quantize(x, "nvfp4")
    expected = microscale.compare(x, q)
    there = x.cuda()
    for original in (x, there):
        for other in (q, microscale.quantize(there, "nvfp4")):
            assert microscale.compare(original, other) == expected
    assert microscale.compare(there, q.dequantize().cuda()) == microscale.compare(x, q.dequantize())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus():
    x = values((16, 64), torch.bfloat16)
    expected = microscale.quantize(x, "nvfp4")
    q = microscale.quantize(x.to("cuda:1"), "nvfp4")
    assert torch.cuda.current_device() == 0 and q.codes.device.index == 1
    same(q, expected)
    assert torch.equal(q.dequantize().cpu(), expected.dequantize())
    with pytest.raises(microscale.Error, match="on cuda:0 and codes on cuda:1"):
        microscale.linear(x.to("cuda:0"), q)
    for tokens in (1, 16):
        within_bound(microscale.linear(x[:tokens].to("cuda:1"), q), q, x[:tokens])
    assert torch.cuda.current_device() == 0 and torch.empty(1, device="cuda").device.index == 0
