"""Quantized activations, compared with PyTorch's operations and with `quantize`."""

import inspect
import re
import shutil

import numpy as np
import pytest

import microscale
from microscale import GlobalScale, quantize_activations

torch = pytest.importorskip("torch")

from microscale import ops  # noqa: E402

E4M3 = torch.float8_e4m3fn
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GATES = ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "swiglu_oai"]
NORMS = ["llama", "gemma", "flashinfer"]
#: Formats with the options of block scales that do not depend on the whole row.
FORMATS = [
    ("fp8", {"scale": 0.02}),
    ("fp8", {"scale": "group128"}),
    ("mxfp8", {"scale_rule": "rceil"}),
    ("mxfp4", {"scale_rule": "rceil"}),
    ("mxfp4", {}),
    ("nvfp4", {"scale": GlobalScale(300.0, "divisor")}),
    ("nvfp4", {"scale": GlobalScale(2.0**-7, "multiplier")}),
]
#: Columns that share a scale.
SHARED = {"fp8": 1, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([E2M1, -E2M1])
#: Relative error of an operation in float32: arguments of exponentials up to 16 are rounded a few
#: times, by 2^-24 each, and sums of squares have a path of at most 40 additions.
ARITHMETIC = 2.0**-17


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


def rows(*shape, dtype=torch.bfloat16):
    """Rows of quite different magnitudes, with zeros."""
    x = torch.randn(*shape) * torch.exp2(torch.randint(-4, 3, (*shape[:-1], 1)).float())
    x[..., ::37] = 0
    return x.to(dtype)


def same(found, expected):
    """Asserts that results have the same parts, bit by bit."""
    for name, a, b in zip(found._fields, found, expected):
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.shape == b.shape and a.dtype == b.dtype, name
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), name


def values(q, format, columns, factor=1.0):
    """Dequantizes activations with linear scales to float64. Also returns the step, the factor of
    each code."""
    if format in ("fp8", "mxfp8"):
        elements = q.codes.view(E4M3).double()
    else:
        nibbles = torch.stack([q.codes & 15, q.codes >> 4], -1).flatten(-2)
        elements = E2M1.double()[nibbles.long()]
    if format == "fp8":
        step = torch.tensor(factor, dtype=torch.float64) if q.f32_scales is None else q.f32_scales.double()
        if q.f32_scales is not None and q.f32_scales.shape[-1] > 1:
            step = step.repeat_interleave(128, -1)[..., :columns]
    else:
        step = q.scales.view(E4M3 if format == "nvfp4" else torch.float8_e8m0fnu).double()
        step = step.repeat_interleave(SHARED[format], -1)[..., :columns]
        step = step * (factor if q.f32_scales is None else q.f32_scales.double())
    return elements[..., :columns] * step, step.expand_as(elements[..., :columns])


def factor_of(options):
    scale = options.get("scale", 1.0)
    return scale.factor if isinstance(scale, GlobalScale) else scale if isinstance(scale, float) else 1.0


def gated(x, operation):
    """A gate in float64."""
    x = x.double()
    if operation == "swiglu_oai":
        gate, up = x[..., ::2].clamp(max=7), x[..., 1::2].clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(np.float32(1.702).item() * gate)
    gate, up = x.chunk(2, -1)
    if operation == "silu_and_mul":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if operation == "gelu_tanh_and_mul" else "none") * up


def normalized(x, weight, norm, dtype, eps=1e-5, error=0.0):
    """RMSNorm in float64, whose 1 / RMS is wrong by a relative error. Rounded where `norm` rounds
    before the last time."""
    x = x.double()
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + error)
    if norm == "llama":
        x = x.to(dtype).double()
    return x * (weight.double() + (norm == "gemma"))


def computed(x, operation, norm, weight, dtype):
    """The result of an operation, rounded; and where arithmetic in float32 cannot change it."""
    if operation == "rms_norm":
        exact = normalized(x, weight, norm, dtype)
        ends = [normalized(x, weight, norm, dtype, error=error) for error in (-ARITHMETIC, ARITHMETIC)]
        # The product of two 16-bit values is exact.
        error = 0.0 if norm == "llama" else ARITHMETIC
    else:
        exact, error = gated(x, operation), ARITHMETIC
        ends = [exact, exact]
    low, high = ends[0] * (1 - error), ends[1] * (1 + error)
    return exact, exact.to(dtype), low.to(dtype) == high.to(dtype)


OPERATIONS = [(operation, "llama") for operation in GATES] + [("rms_norm", norm) for norm in NORMS]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("operation", "norm"), OPERATIONS)
@pytest.mark.parametrize(("format", "options"), FORMATS)
def test_values_are_within_the_error_of_the_format(format, options, operation, norm, dtype):
    """Half of the distance of two elements, and the errors of the operation.

    For E2M1 the half distance is at most 1/4 of the step, or 1/4 of the value, clipped values
    included. For E4M3 it is 2^-10 of the step, or 2^-4 of the value. The dtype's rounding adds half
    a unit in the last place, or two where `llama` rounds twice.
    """
    columns = 256
    x = rows(9, 2 * columns if operation in GATES else columns, dtype=dtype)
    weight = (torch.rand(columns) + 0.5).to(dtype)
    extra = {"weight": weight, "norm": norm, "eps": 1e-5} if operation == "rms_norm" else {}
    q = quantize_activations(x, format, operation=operation, **options, **extra)
    exact, _, _ = computed(x, operation, norm, weight, dtype)
    if format == "fp8" and isinstance(options["scale"], float):
        exact = exact.clamp(-448 * options["scale"], 448 * options["scale"])
    found, step = values(q, format, columns, factor_of(options))
    of_step, of_value = (1 / 4, 1 / 4) if format in ("mxfp4", "nvfp4") else (2.0**-10, 2.0**-4)
    unit = torch.finfo(dtype).eps
    # A rounded value has a quantization error of its own size.
    right = exact.abs() * (1 + unit)
    bound = torch.maximum(of_step * step, of_value * right) + exact.abs() * (unit + 2 * ARITHMETIC) + torch.finfo(dtype).tiny
    # A given global scale bounds block scales from above: larger blocks are clipped.
    wide = (step / factor_of(options) >= 448) if format == "nvfp4" else torch.zeros_like(exact, dtype=torch.bool)
    error = (found - exact).abs()
    assert (error <= bound)[~wide].all() and (~wide).double().mean() > 0.9
    if format not in ("mxfp4", "nvfp4"):
        # The bound is no larger than the error of another operation.
        other = exact.roll(1, -1)
        assert ((found - other).abs() > bound).any()


@pytest.mark.parametrize(("operation", "norm"), OPERATIONS)
@pytest.mark.parametrize(("format", "options"), [entry for entry in FORMATS if entry[1].get("scale") != "group128"])
def test_bytes_are_those_of_two_functions(format, options, operation, norm):
    """Fused codes equal the codes of the rounded result, wherever float32's errors cannot change the
    rounding of a value that shares the scale."""
    columns = 256
    x = rows(33, 2 * columns if operation in GATES else columns)
    weight = (torch.rand(columns) + 0.5).bfloat16()
    extra = {"weight": weight, "norm": norm, "eps": 1e-5} if operation == "rms_norm" else {}
    found = quantize_activations(x, format, operation=operation, **options, **extra)
    _, rounded, sure = computed(x, operation, norm, weight, torch.bfloat16)
    expected = quantize_activations(rounded, format, **options)
    block = SHARED[format]
    sure = sure.view(33, -1, block).all(-1)
    assert sure.double().mean() > 0.6
    code_blocks = [q.codes.view(33, sure.shape[1], -1) for q in (found, expected)]
    assert torch.equal(code_blocks[0][sure], code_blocks[1][sure])
    if format != "fp8":
        assert torch.equal(found.scales[sure], expected.scales[sure])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 200])
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize(("format", "named"), [("mxfp4", "mxfp4"), ("mxfp8", "mxfp8-e4m3")])
def test_mx_formats_have_the_bytes_of_quantize(format, named, rule, layout, columns, dtype):
    x = rows(3, 5, columns, dtype=dtype)
    q = quantize_activations(x, format, scale_rule=rule, layout=layout)
    ties = {"ties": "even"} if format == "mxfp4" else {}
    swizzled = "linear" if layout == "linear" else "swizzled"
    expected = microscale.quantize(x, named, numerics="ocp", scale_rule=rule, layout=swizzled, **ties)
    assert torch.equal(q.codes, expected.codes) and torch.equal(q.scales, expected.scales)
    assert q.f32_scales is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["linear", "128x4"])
def test_nvfp4_has_the_bytes_of_quantize(layout, dtype):
    x = rows(7, 200, dtype=dtype)
    swizzled = "linear" if layout == "linear" else "swizzled"
    scale = GlobalScale(731.0, "divisor")
    expected = microscale.quantize(x, "nvfp4", numerics="transformer-engine", global_scale=scale, layout=swizzled)
    for given in (scale, GlobalScale(torch.tensor([731.0]), "divisor"), GlobalScale(torch.tensor(731.0), "divisor")):
        q = quantize_activations(x, "nvfp4", scale=given, layout=layout)
        assert torch.equal(q.codes, expected.codes) and torch.equal(q.scales, expected.scales)
        assert q.f32_scales is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_per_token_is_a_tensor_per_row(dtype):
    x = rows(6, 96, dtype=dtype)
    q = quantize_activations(x, "nvfp4")
    for row, codes, scales, f32_scale in zip(x, *q):
        expected = microscale.quantize(row, "nvfp4", numerics="transformer-engine")
        assert torch.equal(codes, expected.codes) and torch.equal(scales, expected.scales)
        assert f32_scale.item() == np.float32(1) / np.float32(expected.global_scale.value)


def fp8_of(x, scale):
    return (x.float() / scale).clamp(-448, 448).to(E4M3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_has_the_bytes_of_torchs_casts(dtype):
    x = rows(2, 6, 300, dtype=dtype)
    x[0, 0] = 0
    for given in (0.25, np.float32(0.25), torch.tensor([0.25]), torch.tensor(0.25)):
        q = quantize_activations(x, "fp8", scale=given)
        assert torch.equal(q.codes.view(E4M3).float(), fp8_of(x, 0.25).float()) and q.scales is None and q.f32_scales is None
    amax = x.float().abs().amax(-1, keepdim=True)
    scale = (amax / 448).clamp(min=1 / (448 * 512))
    q = quantize_activations(x, "fp8", scale="token")
    assert torch.equal(q.f32_scales, scale) and torch.equal(q.codes.view(E4M3).float(), fp8_of(x, scale).float())
    groups = torch.nn.functional.pad(x.float(), (0, 84)).view(2, 6, 3, 128)
    scale = groups.abs().amax(-1).clamp(min=1e-10) / 448
    for power_of_two in (False, True):
        if power_of_two:
            scale = torch.exp2(torch.ceil(torch.log2(scale.clamp(min=1e-10).double()))).float()
        q = quantize_activations(x, "fp8", scale="group128", power_of_two=power_of_two)
        assert torch.equal(q.f32_scales, scale)
        expected = fp8_of(x, scale.repeat_interleave(128, -1)[..., :300])
        assert torch.equal(q.codes.view(E4M3).float(), expected.float())


@pytest.mark.parametrize("rows_there", [1, 8, 13])
@pytest.mark.parametrize(("format", "columns"), [("nvfp4", 176), ("mxfp4", 96), ("mxfp8", 128)])
def test_tiles_of_8x4_have_rows_in_order(format, columns, rows_there):
    x = rows(rows_there, columns)
    linear, tiled = (quantize_activations(x, format, layout=layout).scales for layout in ("linear", "8x4"))
    blocks = linear.shape[1]
    padded = torch.nn.functional.pad(linear, (0, -blocks % 4, 0, -rows_there % 8))
    expected = padded.view(padded.shape[0] // 8, 8, padded.shape[1] // 4, 4).transpose(1, 2)
    assert tiled.shape == padded.shape and torch.equal(tiled.flatten(), expected.flatten())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_residuals_become_the_rounded_sum(norm, dtype):
    x, residual = rows(5, 256, dtype=dtype), rows(5, 256, dtype=dtype)
    weight = torch.rand(256).to(dtype)
    before, total = x.clone(), (x.float() + residual.float()).to(dtype)
    version = residual._version
    options = {"operation": "rms_norm", "weight": weight, "norm": norm}
    q = quantize_activations(x, "fp8", residual=residual, **options)
    assert torch.equal(residual, total) and torch.equal(x, before) and residual._version > version
    same(q, quantize_activations(total, "fp8", **options))


def test_numpy_arrays_are_quantized_in_place_too():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x, residual, weight = rows(4, 64), rows(4, 64), rows(64)
    arrays = [t.float().numpy().astype(ml_dtypes.bfloat16) for t in (x, residual, weight)]
    q = quantize_activations(arrays[0], operation="rms_norm", residual=arrays[1], weight=arrays[2], layout="8x4")
    expected = quantize_activations(x, operation="rms_norm", residual=residual, weight=weight, layout="8x4")
    assert all(isinstance(part, np.ndarray) for part in q)
    for a, b in zip(q, expected):
        np.testing.assert_array_equal(a, b.numpy())
    np.testing.assert_array_equal(arrays[1].astype(np.float32), residual.float().numpy())


def test_arrays_of_jax_are_read():
    jax = pytest.importorskip("jax")
    x = rows(4, 64, dtype=torch.float32)
    q = quantize_activations(jax.numpy.asarray(x.numpy()), "mxfp4")
    np.testing.assert_array_equal(q.codes, quantize_activations(x, "mxfp4").codes.numpy())


def test_weights_are_ones_by_default_and_rows_may_be_apart():
    x = rows(6, 512)
    view = x[::2, :256]
    same(
        quantize_activations(view, operation="rms_norm"),
        quantize_activations(view.contiguous(), operation="rms_norm", weight=torch.ones(256, dtype=torch.bfloat16)),
    )
    assert quantize_activations(x[0], "fp8").f32_scales.shape == (1,)
    assert [tuple(part.shape) for part in quantize_activations(x[:0], layout="128x4")] == [(0, 256), (0, 32), (0, 1)]


def test_nan_and_infinities_propagate():
    x = rows(3, 64)
    x[0, 3], x[1, 20] = float("nan"), float("-inf")
    clean = quantize_activations(torch.where(x.isfinite(), x, 0), "fp8")
    q = quantize_activations(x, "fp8")
    assert torch.equal(q.codes.view(E4M3).float().isnan(), ~x.isfinite()) and torch.equal(q.f32_scales, clean.f32_scales)
    found, _ = values(quantize_activations(x, "nvfp4"), "nvfp4", 64)
    assert found[0, :16].isnan().all() and found[1, 16:32].isnan().all() and found.isnan().sum() == 32


@pytest.mark.parametrize("layout", ["linear", "128x4", "8x4"])
@pytest.mark.parametrize(("format", "scale"), [("nvfp4", "each"), ("nvfp4", "token"), ("mxfp8", None), ("fp8", "each")])
def test_experts_in_order_are_matrices(format, scale, layout):
    if format == "fp8" and layout != "linear":
        pytest.skip("fp8 has no block scales")
    counts, tile = [3, 0, 140, 9], {"linear": 1, "128x4": 128, "8x4": 8}[layout]
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    scale_offsets = np.cumsum([0, *(-(-count // tile) * tile for count in counts)]).astype(np.int32)
    x = rows(sum(counts), 192)
    given = torch.tensor([100.0, 200.0, 300.0, 400.0])
    whole = GlobalScale(given, "divisor") if format == "nvfp4" else given
    options = {"operation": "silu_and_mul", "layout": layout}
    arrays = {"offsets": torch.from_numpy(offsets), "scale_offsets": torch.from_numpy(scale_offsets)}
    q = quantize_activations(x, format, scale=whole if scale == "each" else scale, **options, **arrays)
    needed = int(scale_offsets[-1])
    exact = quantize_activations(
        x, format, scale=whole if scale == "each" else scale, scale_rows=needed + 2 * tile, **options, **arrays
    )
    for expert, (first, last) in enumerate(zip(offsets, offsets[1:])):
        own = GlobalScale(given[expert].item(), "divisor") if format == "nvfp4" else given[expert].item()
        single = quantize_activations(x[first:last], format, scale=own if scale == "each" else scale, **options)
        assert torch.equal(q.codes[first:last], single.codes)
        if q.f32_scales is not None:
            assert torch.equal(q.f32_scales[first:last], single.f32_scales)
        if format != "fp8":
            there = slice(scale_offsets[expert], scale_offsets[expert + 1])
            assert torch.equal(q.scales[there], single.scales)
    if format != "fp8":
        assert q.scales.shape[0] >= needed and not q.scales[needed:].any()
        assert exact.scales.shape[0] == needed + 2 * tile and torch.equal(exact.scales[:needed], q.scales[:needed])


@pytest.mark.parametrize("layout", ["linear", "128x4", "8x4"])
def test_experts_with_counts_are_matrices(layout):
    counts = torch.tensor([3, 0, 10], dtype=torch.int32)
    x = rows(3, 10, 64)
    q = quantize_activations(x, "nvfp4", counts=counts, layout=layout)
    assert q.codes.shape == (3, 10, 32) and q.f32_scales.shape == (3, 10, 1)
    for expert, count in enumerate(counts.tolist()):
        there = torch.where(torch.arange(10)[:, None] < count, x[expert].float(), 0).bfloat16()
        single = quantize_activations(there, "nvfp4", layout=layout)
        assert torch.equal(q.codes[expert, :count], single.codes[:count])
        assert torch.equal(q.f32_scales[expert, :count], single.f32_scales[:count])
        first = quantize_activations(x[expert, :count], "nvfp4", layout=layout)
        found = q.scales[expert].flatten()[: first.scales.numel()]
        assert torch.equal(found, first.scales.flatten())
    single = quantize_activations(x, "nvfp4", counts=counts, scale=GlobalScale(300.0, "divisor"))
    assert torch.equal(single.codes[2], quantize_activations(x[2], scale=GlobalScale(300.0, "divisor")).codes)


@pytest.mark.parametrize(("format", "layout"), [("nvfp4", "128x4"), ("fp8", "linear"), ("mxfp8", "8x4")])
def test_out_is_written_to(format, layout):
    x = rows(5, 64)
    expected = quantize_activations(x, format, layout=layout)
    out = microscale.QuantizedActivations(*(None if part is None else torch.full_like(part, 7) for part in expected))
    versions = [None if part is None else part._version for part in out]
    found = quantize_activations(x, format, layout=layout, out=out)
    same(found, expected)
    for part, given, version in zip(found, out, versions):
        assert part is given and (part is None or part._version > version)
    if format == "mxfp8":
        typed = (out.codes.view(E4M3), out.scales.view(torch.float8_e8m0fnu), None)
        assert quantize_activations(2 * x, format, layout=layout, out=typed).codes is typed[0]
        same(out, quantize_activations(2 * x, format, layout=layout))


X = torch.ones(4, 64, dtype=torch.bfloat16)
INT = torch.int32


def ones(*shape, dtype=torch.bfloat16):
    return torch.ones(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "mxfp3"}, ValueError, "format is \"mxfp3\"; pass one of fp8, mxfp8, mxfp4, nvfp4"),
        ({"operation": "silu"}, ValueError, "operation is \"silu\"; pass one of none, silu_and_mul"),
        ({"layout": "swizzled"}, ValueError, "layout is \"swizzled\"; pass one of linear, 128x4, 8x4"),
        ({"norm": "t5", "operation": "rms_norm"}, ValueError, "norm is \"t5\""),
        ({"scale_rule": "up", "format": "mxfp4"}, ValueError, "scale rule"),
        ({"scale_rule": "ceil"}, ValueError, "nvfp4 has no scale_rule"),
        ({"eps": 0.0, "operation": "rms_norm"}, ValueError, "eps is 0"),
        ({"eps": float("nan"), "operation": "rms_norm"}, ValueError, "eps is NaN"),
        ({"power_of_two": True, "format": "fp8"}, ValueError, "power_of_two belongs to fp8 with scale"),
        ({"layout": "128x4", "format": "fp8"}, ValueError, "no block scales to swizzle"),
        ({"scale": 2.0}, TypeError, "scale is of type float; pass a GlobalScale"),
        ({"scale": "group128"}, ValueError, "scale is \"group128\" and nvfp4 takes"),
        ({"scale": "token", "format": "mxfp4"}, ValueError, "scale is \"token\" and mxfp4 takes none"),
        ({"scale": "divisor"}, ValueError, "scale is 'divisor'; pass a number or a GlobalScale"),
        ({"scale": GlobalScale(2.0, "divisor"), "format": "fp8"}, ValueError, "scale is a GlobalScale"),
        ({"scale": GlobalScale(2.0, "up")}, ValueError, "direction of scale is 'up'"),
        ({"scale": GlobalScale(-2.0, "divisor")}, ValueError, "given scale 0 is -2"),
        ({"scale": GlobalScale(torch.ones(3), "divisor")}, ValueError, r"scale has 3 elements and must have 1"),
        ({"scale": [1.0], "format": "fp8"}, TypeError, "scale is a list"),
        ({"scale": torch.ones(1, dtype=torch.bfloat16), "format": "fp8"}, TypeError, "scale is bfloat16 and must be float32"),
        ({"x": ones(4, 63), "operation": "silu_and_mul"}, ValueError, "x has 63 columns and a gate combines pairs"),
        ({"x": torch.tensor(1.0)}, ValueError, "x has no dimensions"),
        ({"x": ones(4, 64, dtype=torch.float64)}, TypeError, "x has dtype torch.float64"),
        ({"x": ones(4, 64, dtype=torch.uint8)}, TypeError, "x is uint8; pass float32"),
        ({"x": ones(64, 4).t()}, ValueError, "x has rows whose elements lie apart"),
        ({"x": [1.0]}, TypeError, "x is a list"),
        ({"weight": ones(64)}, ValueError, "weight belongs to operation=\"rms_norm\""),
        ({"residual": ones(4, 64)}, ValueError, "residual belongs to operation=\"rms_norm\""),
        ({"weight": ones(63), "operation": "rms_norm"}, ValueError, r"weight has shape \[63\] and must have \[64\]"),
        ({"weight": ones(64).float(), "operation": "rms_norm"}, TypeError, "weight is float32 and must be bfloat16"),
        ({"residual": ones(64, 4), "operation": "rms_norm"}, ValueError, r"residual has shape \[64, 4\] and must have"),
        ({"residual": ones(4, 64).half(), "operation": "rms_norm"}, TypeError, "residual is float16 and must be bfloat16"),
        ({"residual": ones(4, 128)[:, ::2], "operation": "rms_norm"}, ValueError, "residual must be contiguous"),
        ({"residual": X, "operation": "rms_norm"}, ValueError, "residual shares memory with x"),
        ({"residual": ones(4, 64).requires_grad_(), "operation": "rms_norm"}, ValueError, "residual requires grad"),
        ({"counts": ones(1, dtype=INT)}, ValueError, r"x has shape \(4, 64\) and counts need"),
        ({"counts": ones(3, dtype=INT), "x": ones(2, 4, 64)}, ValueError, r"counts have shape \[3\] and must have \[2\]"),
        ({"counts": ones(2, dtype=torch.float32), "x": ones(2, 4, 64)}, TypeError, "counts is float32 and must be int32"),
        ({"counts": ones(2, dtype=INT) * 5, "x": ones(2, 4, 64)}, ValueError, "counts of at most an expert's rows"),
        ({"counts": ones(2, dtype=INT) * -1, "x": ones(2, 4, 64)}, ValueError, "counts of at most an expert's rows"),
        ({"counts": ones(2, dtype=INT), "offsets": ones(2, dtype=INT)}, ValueError, "counts and offsets exclude each other"),
        ({"scale_rows": 4}, ValueError, "scale_offsets and scale_rows belong to offsets"),
        ({"offsets": ones(2, dtype=INT), "x": ones(2, 4, 64)}, ValueError, "offsets need"),
        ({"offsets": torch.tensor([0, 4], dtype=INT), "layout": "8x4"}, ValueError, "scale_offsets are missing"),
        ({"offsets": torch.tensor([0, 3], dtype=INT)}, ValueError, "offsets that end with the number of rows"),
        ({"offsets": torch.tensor([0, 4], dtype=torch.float32)}, TypeError, "offsets is float32 and must be int32"),
        ({"offsets": torch.tensor([4], dtype=INT)}, ValueError, r"offsets have shape \[1\]"),
        (
            {"offsets": torch.tensor([0, 4], dtype=INT), "scale_offsets": torch.tensor([0, 9], dtype=INT)},
            ValueError,
            "scale_offsets end at 9",
        ),
        (
            {"offsets": torch.tensor([0, 4], dtype=INT), "scale_offsets": torch.tensor([0], dtype=INT)},
            ValueError,
            "scale_offsets has shape",
        ),
        (
            {"offsets": torch.tensor([0, 4], dtype=INT), "scale_offsets": torch.tensor([0, 8], dtype=INT), "layout": "8x4", "scale_rows": 9},
            ValueError,
            "scale_rows is 9 and must be a multiple of 8",
        ),
        ({"out": (ones(4, 32, dtype=torch.uint8), None, None)}, ValueError, "out.scales has shape None"),
        ({"out": (ones(4, 31, dtype=torch.uint8), None, None)}, ValueError, "out.codes has shape"),
        ({"out": (ones(4, 32), ones(4, 4, dtype=torch.uint8), torch.ones(4, 1))}, TypeError, "codes is bfloat16"),
        ({"out": ()}, ValueError, "out has 0 parts"),
    ],
)
def test_wrong_arguments_are_named(options, error, message):
    options = dict(options)
    x = options.pop("x", X)
    with pytest.raises(error, match=message):
        quantize_activations(x, **options)


def test_an_error_leaves_the_residual_as_it_was():
    residual = ones(4, 64)
    with pytest.raises(ValueError, match="given scale"):
        quantize_activations(X, operation="rms_norm", residual=residual, scale=GlobalScale(0.0, "divisor"))
    assert torch.equal(residual, ones(4, 64))


# The operators of other libraries' names.

SCALE = torch.tensor([512.0])
FP8_SCALE = torch.tensor([0.01])


def empty(*shape):
    return torch.full(shape, 0x11, dtype=torch.uint8)


def calls():
    """Arguments of each operator."""
    wide, x, weight = rows(9, 256), rows(9, 128), rows(128)
    of_experts = torch.tensor([0, 3, 3, 9], dtype=INT), torch.tensor([0, 8, 8, 16], dtype=INT)
    given = torch.tensor([300.0, 400.0, 500.0])
    norm = "rms_norm", weight
    full = torch.tensor([5, 5, 5], dtype=INT)
    kv, slots = (rows(3, 2, 32), rows(3, 2, 32)), torch.tensor([7, -1, 2])
    tables, lengths = torch.tensor([[1, 0]], dtype=INT), torch.tensor([5], dtype=INT)
    cache = empty(2, 4, 2, 32), empty(2, 4, 2, 32)
    codes, block_scales = (empty(2, 2, 4, 16), empty(2, 2, 4, 16)), (empty(2, 2, 4, 2), empty(2, 2, 4, 2))
    return {
        "quantize_activations": [
            (rows(2, 3, 200),),
            (rows(2, 3, 200), "mxfp8", "none", None, None, "llama", 1e-6, None, "token", "ceil", False, "8x4"),
            (rows(5, 200), "fp8", "swiglu_oai", None, None, "llama", 1e-6, None, "group128", None, True),
            (x, "nvfp4", *norm, rows(9, 128), "gemma", 1e-5, SCALE, "divisor", None, False, "128x4"),
            (x, "fp8", *norm, None, "flashinfer", 1e-5, FP8_SCALE, "given"),
            (x, "nvfp4", "none", None, None, "llama", 1e-6, given, "divisor", None, False, "8x4", *of_experts),
            (x, "mxfp4", "none", None, None, "llama", 1e-6, None, "token", None, False, "8x4", *of_experts, 24),
            (x, "fp8", "none", None, None, "llama", 1e-6, None, "token", None, False, "linear", of_experts[0]),
            (
                *(rows(3, 5, 64), "nvfp4", "silu_and_mul", None, None, "llama", 1e-6, given, "multiplier", None, False, "128x4"),
                *(None, None, None, torch.tensor([5, 5, 5], dtype=INT)),
            ),
        ],
        "quantize_activations_into": [
            (x, empty(9, 64), empty(128, 8), None, "nvfp4", *norm, rows(9, 128), "gemma", 1e-5, SCALE, "divisor", None, False, "128x4"),
            (x, empty(9, 128), None, torch.empty(9, 1), "fp8"),
            (
                *(wide, empty(9, 64), empty(24, 8), None, "nvfp4", "silu_and_mul", None, None, "llama", 1e-6, given, "divisor"),
                *(None, False, "8x4", *of_experts, 24),
            ),
        ],
        "scaled_fp4_experts_quant": [(x, given[:2], of_experts[0][[0, 1, 3]], of_experts[1][[0, 1, 3]] * 16, 2)],
        "silu_and_mul_scaled_fp4_experts_quant": [(wide, given, of_experts[0], of_experts[1] * 16, 2)],
        "scaled_fp4_grouped_quantize": [(rows(3, 5, 64), full, given), (rows(3, 130, 80), full, SCALE)],
        "silu_and_mul_scaled_nvfp4_experts_quantize": [(rows(3, 5, 64), full, given)],
        "append_kv": [
            (*kv, *cache[:2], slots, given[:2]),
            (*kv, *codes, slots, given[:2], *block_scales, "HND", 16),
        ],
        "gather_kv": [
            (*cache, slots, given[:2]),
            (*codes, slots, given[:2], torch.float32, *block_scales, None, "HND"),
            (*cache, tables, given[:2], torch.float16, None, None, lengths),
        ],
        "reshape_and_cache_flash": [(*kv, *cache, slots, "fp8", FP8_SCALE, FP8_SCALE)],
        "nvfp4_kv_quantize": [(x, FP8_SCALE)],
        "nvfp4_kv_dequantize": [(empty(9, 64), empty(9, 8), FP8_SCALE), (empty(9, 64), empty(9, 8), FP8_SCALE, torch.float32)],
        "scaled_fp8_quant": [(x,), (x, FP8_SCALE), (x, None, None, None, True)],
        "scaled_fp4_quant": [(x, SCALE), (x, SCALE, False), (rows(3, 3, 128), SCALE)],
        "silu_and_mul_nvfp4_quant": [(wide, SCALE)],
        "silu_and_mul_quant": [(wide, FP8_SCALE), (rows(2, 3, 256), FP8_SCALE)],
        "rms_norm_static_fp8_quant": [(x, weight, FP8_SCALE, 1e-5)],
        "fused_add_rms_norm_static_fp8_quant": [(x, rows(9, 128), weight, FP8_SCALE, 1e-5)],
        "rms_norm_dynamic_per_token_quant": [(x, weight, 1e-5), (x, weight, 1e-5, E4M3, None, rows(9, 128))],
        "per_token_group_quant_fp8": [(x,), (rows(2, 3, 256), 128, 1e-10, True)],
        "nvfp4_quantize": [(x, SCALE), (x, SCALE, 1), (x, SCALE, 2)],
        "silu_and_mul_nvfp4_quantize": [(wide, SCALE), (wide, SCALE, 16, False), (wide, SCALE, 16, True, True)],
        "mxfp4_quantize": [(x,)],
        "mxfp8_quantize": [(x,), (rows(2, 3, 128), False)],
        "rmsnorm_fp4quant": [(x, weight, SCALE), (rows(2, 3, 128), weight)],
        "add_rmsnorm_fp4quant": [(x, rows(9, 128), weight, SCALE), (x, rows(9, 128), weight)],
    }


def test_every_operator_is_tested():
    assert set(calls()) == set(ops.__all__)
    for name in ops.__all__:
        assert getattr(ops, name).__doc__ and hasattr(torch.ops.microscale, name)


CASES = [(name, number) for name, arguments in calls().items() for number in range(len(arguments))]


def tupled(result):
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


def cloned(arguments):
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_operators_are_what_torch_asks_of_them(name, number):
    # Changed arguments have no defaults in `torch.ops`.
    bound = inspect.signature(getattr(ops, name)).bind(*calls()[name][number])
    bound.apply_defaults()
    torch.library.opcheck(getattr(torch.ops.microscale, name), bound.args)


@pytest.mark.parametrize(("name", "number"), CASES)
def test_fake_kernels_have_the_shapes_of_the_real_ones(name, number):
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = calls()[name][number]
    real = tupled(getattr(ops, name)(*cloned(arguments)))
    with FakeTensorMode() as mode:
        of_fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        fake = tupled(getattr(ops, name)(*of_fakes))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("name", "number"), CASES)
def test_the_graph_is_not_broken(name, number, dynamic):
    function = getattr(ops, name)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: function(*args), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    arguments = calls()[name][number]
    mine, theirs = cloned(arguments), cloned(arguments)
    found, expected = tupled(compiled(*mine)), tupled(function(*theirs))
    for a, b in zip([*found, *mine], [*expected, *theirs], strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        else:
            assert a == b


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="Inductor needs a compiler of C++")
def test_inductor_compiles_a_block_with_a_residual():
    def block(x, residual, weight, scale):
        codes, scales = ops.add_rmsnorm_fp4quant(x * 2, residual, weight, scale, is_sf_swizzled_layout=True)
        return codes, scales.view(torch.uint8) + 0, residual + 1

    arguments = [rows(9, 128), rows(9, 128), rows(128), SCALE]
    mine, theirs = cloned(arguments), cloned(arguments)
    found = torch.compile(block, fullgraph=True, backend="inductor")(*mine)
    for a, b in zip([*found, *mine], [*block(*theirs), *theirs], strict=True):
        assert torch.equal(a, b)


def test_operators_are_the_function_with_other_arguments():
    x, weight, wide = rows(9, 128), rows(128), rows(9, 256)
    divisor = GlobalScale(512.0, "divisor")

    def equal(found, q, parts=("codes", "scales")):
        for part, name in zip(tupled(found), parts, strict=True):
            assert torch.equal(part.view(torch.uint8).flatten(), getattr(q, name).view(torch.uint8).flatten()), name

    equal(ops.scaled_fp4_quant(x, SCALE), quantize_activations(x, scale=divisor, layout="128x4"))
    equal(ops.nvfp4_quantize(x, SCALE, 1), quantize_activations(x, scale=divisor, layout="8x4"))
    gated = quantize_activations(wide, scale=divisor, layout="128x4", operation="silu_and_mul")
    equal(ops.silu_and_mul_nvfp4_quant(wide, SCALE), gated)
    equal(ops.silu_and_mul_nvfp4_quantize(wide, SCALE), gated)
    equal(ops.mxfp4_quantize(x, sfLayout=2), quantize_activations(x, "mxfp4", scale_rule="rceil"))
    equal(ops.mxfp8_quantize(x, False), quantize_activations(x, "mxfp8", scale_rule="rceil"))
    norm = {"operation": "rms_norm", "weight": weight}
    equal(
        ops.rms_norm_dynamic_per_token_quant(x, weight, 1e-6), quantize_activations(x, "fp8", **norm), ("codes", "f32_scales")
    )
    equal(ops.rmsnorm_fp4quant(x, weight, SCALE), quantize_activations(x, scale=divisor, norm="flashinfer", **norm))
    equal(
        ops.rmsnorm_fp4quant(x, weight, block_size=32, is_sf_swizzled_layout=True),
        quantize_activations(x, "mxfp4", norm="flashinfer", scale_rule="rceil", layout="128x4", **norm),
    )
    residual = rows(9, 128)
    other = residual.clone()
    equal(
        ops.add_rmsnorm_fp4quant(x, residual, weight, SCALE),
        quantize_activations(x, scale=divisor, norm="flashinfer", residual=other, **norm),
    )
    assert torch.equal(residual, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_per_tensor_is_of_the_amax_of_all_rows(dtype):
    x, residual, weight = rows(7, 130, dtype=dtype), rows(7, 130, dtype=dtype), rows(130, dtype=dtype)
    q = quantize_activations(x, "fp8", scale="tensor")
    assert q.f32_scales.shape == (1,) and q.f32_scales == x.abs().max().float() / 448
    assert torch.equal(q.codes, quantize_activations(x, "fp8", scale=q.f32_scales).codes)
    # After an operation, of its rounded results. A residual is added once.
    norm = {"operation": "rms_norm", "weight": weight}
    sums, other = residual.clone(), residual.clone()
    q = quantize_activations(x, "fp8", scale="tensor", residual=sums, **norm)
    per_token = quantize_activations(x, "fp8", scale="token", residual=other, **norm)
    assert torch.equal(sums, other) and q.f32_scales == per_token.f32_scales.max()
    assert torch.equal(q.codes, quantize_activations(sums, "fp8", scale=q.f32_scales, **norm).codes)
    # Values that are not finite do not count, and zeros have the least scale.
    x[2, 3], x[2, 4] = torch.inf, torch.nan
    x[x.abs() > 1] = torch.inf
    q = quantize_activations(x, "fp8", scale="tensor")
    assert q.f32_scales == x[x.isfinite()].abs().max().float() / 448 and (q.codes[x.isinf()] == 0x7F).all()
    for shape in ((3, 16), (0, 16)):
        q = quantize_activations(torch.zeros(shape, dtype=dtype), "fp8", scale="tensor")
        assert q.f32_scales == 1 / (448 * 512) and not q.codes.any()
    with pytest.raises(microscale.Error, match="rows by expert need scales that are given, per token or per group"):
        quantize_activations(rows(3, 5, 64), "fp8", scale="tensor", counts=torch.tensor([5, 5, 5], dtype=INT))


def test_scaled_fp8_quant_has_the_three_scales_of_vllm():
    x = rows(9, 128)
    for arguments, scale in [((), "tensor"), ((None, None, None, True), "token"), ((FP8_SCALE,), FP8_SCALE)]:
        q = quantize_activations(x, "fp8", scale=scale)
        codes, scales = ops.scaled_fp8_quant(x, *arguments)
        assert codes.dtype == E4M3 and torch.equal(codes.view(torch.uint8), q.codes)
        assert torch.equal(scales, FP8_SCALE if q.f32_scales is None else q.f32_scales)
    codes, scales = ops.scaled_fp8_quant(x, num_token_padding=16, use_per_token_if_dynamic=True)
    q = quantize_activations(x, "fp8")
    assert codes.shape == (16, 128) and scales.shape == (16, 1)
    assert torch.equal(codes[:9].view(torch.uint8), q.codes) and torch.equal(scales[:9], q.f32_scales)


def test_operators_by_expert_are_the_function_with_other_arguments():
    counts = torch.tensor([3, 0, 6], dtype=INT)
    offsets, starts = torch.tensor([0, 3, 3, 9], dtype=INT), torch.tensor([0, 128, 128, 256], dtype=INT)
    given = torch.tensor([300.0, 400.0, 500.0])
    lists = {"scale": GlobalScale(given, "divisor"), "layout": "128x4"}
    for operation, by_offsets, by_counts in [
        ("none", ops.scaled_fp4_experts_quant, ops.scaled_fp4_grouped_quantize),
        ("silu_and_mul", ops.silu_and_mul_scaled_fp4_experts_quant, ops.silu_and_mul_scaled_nvfp4_experts_quantize),
    ]:
        x, batches = rows(9, 128), rows(3, 6, 128)
        codes, scales = by_offsets(x, given, offsets, starts, 2)
        expected = quantize_activations(x, operation=operation, offsets=offsets, scale_offsets=starts, **lists)
        assert torch.equal(codes, expected.codes) and torch.equal(scales.view(torch.uint8), expected.scales)
        codes, scales = by_counts(batches, counts, given)
        expected = quantize_activations(batches, operation=operation, counts=counts, **lists)
        for expert, count in enumerate(counts):
            assert torch.equal(codes[:count, :, expert], expected.codes[expert, :count])
            # A tile of 128 rows and four columns is `[32, 4, 4]`: row % 32, row / 32, column.
            tile = scales[..., expert].view(torch.uint8)
            for row in range(count):
                own = tile[row % 32, row // 32, 0].transpose(0, 1).reshape(-1)
                matrix = quantize_activations(batches[expert], operation=operation, scale=GlobalScale(given[expert].item(), "divisor"))
                assert torch.equal(own[: matrix.scales.shape[1]], matrix.scales[row])


@pytest.mark.parametrize("number", range(3))
def test_outputs_that_are_given_are_written_to(number):
    arguments = calls()["quantize_activations_into"][number]
    x, codes, scales, f32_scales, *others = cloned(arguments)
    assert ops.quantize_activations_into(x, codes, scales, f32_scales, *others) is None
    expected = ops.quantize_activations(arguments[0], *cloned(arguments[4:]))
    for part, own in zip((codes, scales, f32_scales), expected, strict=True):
        assert (part is None and not own.numel()) or torch.equal(part, own)
    with pytest.raises(microscale.Error, match="out.codes has shape"):
        ops.quantize_activations_into(x, codes[:3], scales, f32_scales, *others)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.scaled_fp4_quant(rows(2, 40), SCALE), "rows of 40 are not whole blocks of 16"),
        (lambda: ops.scaled_fp4_quant(torch.tensor(1.0), SCALE), "no dimensions"),
        (lambda: ops.quantize_activations(rows(2, 64), "mxfp3"), "format is 'mxfp3'"),
        (lambda: ops.quantize_activations(rows(2, 64), scale=SCALE), "scale_source is 'token' and scale is given"),
        (lambda: ops.quantize_activations(rows(2, 64), scale_source="divisor"), "scale is missing"),
        (lambda: ops.quantize_activations(rows(2, 64), scale=SCALE, scale_source="given"), "pass a GlobalScale"),
        (lambda: ops.silu_and_mul_quant(rows(2, 41), FP8_SCALE), "the input has 41 columns"),
        (lambda: ops.scaled_fp8_quant(rows(2, 3, 64)), "the input has 3 dimensions"),
        (lambda: ops.scaled_fp8_quant(rows(2, 64), scale_ub=SCALE), "scale_ub"),
        (lambda: ops.nvfp4_kv_quantize(rows(2, 40), SCALE), "K is a multiple of 16"),
        (lambda: ops.nvfp4_kv_dequantize(empty(2, 20), empty(2, 2), SCALE), "K is a multiple of 16"),
        (lambda: ops.per_token_group_quant_fp8(rows(2, 128), 64), "group_size is 64"),
        (lambda: ops.per_token_group_quant_fp8(rows(2, 64)), "whole groups of 128"),
        (lambda: ops.nvfp4_quantize(rows(2, 64), SCALE, 3), "sfLayout is 3"),
        (lambda: ops.silu_and_mul_nvfp4_quantize(rows(2, 64), SCALE, 32), "sf_vec_size is 32"),
        (lambda: ops.mxfp8_quantize(rows(2, 64), True, 128), "alignment is 128"),
        (lambda: ops.rmsnorm_fp4quant(rows(2, 64), rows(64), block_size=8), "block_size is 8"),
        (lambda: ops.rmsnorm_fp4quant(rows(2, 64), rows(64), SCALE, block_size=32), "global_scale belongs to"),
        (lambda: ops.rms_norm_dynamic_per_token_quant(rows(2, 64), rows(64), 1e-5, torch.int8), "pass torch.float8_e4m3fn"),
        (lambda: ops.rms_norm_dynamic_per_token_quant(rows(2, 64), rows(64), 1e-5, E4M3, SCALE), "scale_ub"),
    ],
)
def test_operators_refuse_other_variants(call, message):
    with pytest.raises((microscale.Error, TypeError), match=message):
        call()


@pytest.mark.parametrize("function", [quantize_activations, *(getattr(ops, name) for name in ops.__all__)])
def test_examples_run(function):
    text = function.__doc__
    example = re.search(r"\n\n((?: {8}.*\n)+)\n    Args:", text)
    assert "assert" in example[1]
    exec(re.sub("^ {8}", "", example[1], flags=re.M), {"torch": torch, "numpy": np, "microscale": microscale, "GlobalScale": GlobalScale})
