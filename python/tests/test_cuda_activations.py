"""Activations quantized on an NVIDIA GPU have the bytes of those on a CPU."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from on_gpu import captured, values  # noqa: E402

import microscale  # noqa: E402
from microscale import GlobalScale, ops, quantize_activations  # noqa: E402

FORMATS = [
    ("fp8", {"scale": 0.05}),
    ("fp8", {"scale": "token"}),
    ("fp8", {"scale": "tensor"}),
    ("fp8", {"scale": "group128", "power_of_two": True}),
    ("mxfp8", {"scale_rule": "rceil"}),
    ("mxfp4", {}),
    ("nvfp4", {"scale": GlobalScale(90.0, "divisor")}),
    ("nvfp4", {"scale": "token"}),
]
OPERATIONS = [("none", {}), ("silu_and_mul", {}), ("gelu_and_mul", {}), ("gelu_tanh_and_mul", {}), ("swiglu_oai", {})]
OPERATIONS += [("rms_norm", {"norm": norm}) for norm in ("llama", "gemma", "flashinfer")]


def there(value):
    """A tensor on the GPU, or a GlobalScale of one."""
    if isinstance(value, GlobalScale) and isinstance(value.value, torch.Tensor):
        return GlobalScale(value.value.cuda(), value.direction)
    return value.cuda() if isinstance(value, torch.Tensor) else value


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.is_cuda and a.shape == b.shape and torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("operation", "extra"), OPERATIONS)
@pytest.mark.parametrize(("format", "options"), FORMATS)
def test_the_bytes_are_those_of_a_cpu(format, options, operation, extra, dtype):
    for layout in ("linear", "128x4", "8x4") if format != "fp8" else ("linear",):
        for shape in ((1, 512), (2, 70, 400)):
            x = values(shape, dtype)
            mine, theirs = dict(extra), dict(extra)
            if operation == "rms_norm":
                weight, residual = values((shape[-1],), dtype, seed=2), values(shape, dtype, seed=3)
                mine |= {"weight": weight.cuda(), "residual": residual.cuda()}
                theirs |= {"weight": weight, "residual": residual}
            found = quantize_activations(x.cuda(), format, operation=operation, layout=layout, **options, **mine)
            same(found, quantize_activations(x, format, operation=operation, layout=layout, **options, **theirs))
            if operation == "rms_norm":
                assert torch.equal(mine["residual"].cpu(), theirs["residual"])


@pytest.mark.parametrize("scale", [80.0, torch.tensor([80.0]), torch.tensor(80.0)])
def test_given_scales_may_be_anywhere(scale):
    x = values((5, 96), torch.bfloat16)
    expected = quantize_activations(x, scale=GlobalScale(80.0, "divisor"))
    for given in (scale, there(scale)):
        same(quantize_activations(x.cuda(), scale=GlobalScale(given, "divisor")), expected)


@pytest.mark.parametrize("layout", ["linear", "128x4", "8x4"])
def test_experts_have_the_bytes_of_a_cpu(layout):
    counts, tile = [3, 0, 140, 9], {"linear": 1, "128x4": 128, "8x4": 8}[layout]
    offsets = torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32))
    starts = torch.from_numpy(np.cumsum([0, *(-(-count // tile) * tile for count in counts)]).astype(np.int32))
    x = values((sum(counts), 192), torch.bfloat16)
    for scale in (GlobalScale(torch.tensor([90.0, 80.0, 70.0, 60.0]), "divisor"), GlobalScale(90.0, "divisor"), "token"):
        options = {"operation": "silu_and_mul", "layout": layout}
        lists = {"offsets": offsets, "scale_offsets": starts}
        of_gpu = {name: part.cuda() for name, part in lists.items()}
        expected = quantize_activations(x, scale=scale, **options, **lists)
        same(quantize_activations(x.cuda(), scale=there(scale), **options, **of_gpu), expected)
        masked, exist = x[:150].view(3, 50, 192), torch.tensor([50, 0, 17], dtype=torch.int32)
        if isinstance(scale, GlobalScale) and isinstance(scale.value, torch.Tensor):
            scale = GlobalScale(scale.value[:3].contiguous(), "divisor")
        expected = quantize_activations(masked, scale=scale, counts=exist, **options)
        found = quantize_activations(masked.cuda(), scale=there(scale), counts=exist.cuda(), **options)
        assert torch.equal(found.scales.cpu(), expected.scales)
        for expert, count in enumerate(exist.tolist()):
            assert torch.equal(found.codes[expert, :count].cpu(), expected.codes[expert, :count])


def test_graphs_capture_it():
    x, residual, weight = (values(shape, torch.bfloat16, seed).cuda() for seed, shape in enumerate([(9, 256), (9, 256), (256,)]))
    graph, out = captured(lambda: quantize_activations(x, operation="rms_norm", weight=weight, residual=residual, layout="128x4"))
    x.copy_(values((9, 256), torch.bfloat16, 7))
    residual.copy_(values((9, 256), torch.bfloat16, 8))
    mine = residual.cpu()
    graph.replay()
    same(out, quantize_activations(x.cpu(), operation="rms_norm", weight=weight.cpu(), residual=mine, layout="128x4"))
    assert torch.equal(residual.cpu(), mine)


def test_operators_are_compiled():
    def block(x, residual, weight, scale):
        return ops.add_rmsnorm_fp4quant(x * 2, residual, weight, scale, is_sf_swizzled_layout=True)

    arguments = [values((9, 128), torch.bfloat16), values((9, 128), torch.bfloat16, 2), values((128,), torch.bfloat16, 3)]
    arguments.append(torch.tensor([90.0]))
    of_gpu = [argument.cuda() for argument in arguments]
    same(torch.compile(block, fullgraph=True, backend="aot_eager")(*of_gpu), block(*arguments))
    assert torch.equal(of_gpu[1].cpu(), arguments[1])


def test_wrong_arguments_are_named():
    x = values((4, 64), torch.bfloat16)
    with pytest.raises(TypeError, match="x is float32 and GPUs quantize activations in float16 or bfloat16"):
        quantize_activations(x.float().cuda(), "fp8")
    with pytest.raises(microscale.Error, match="x is on .* and weight on"):
        quantize_activations(x.cuda(), operation="rms_norm", weight=x[0])
    with pytest.raises(TypeError, match="scale is not in the memory of a GPU"):
        quantize_activations(x.cuda(), scale=GlobalScale(torch.ones(2), "divisor"))
    with pytest.raises(TypeError, match="scale is not in the memory of the CPU"):
        quantize_activations(x, scale=GlobalScale(torch.ones(1).cuda(), "divisor"))
    with pytest.raises(microscale.Error, match="given scale 0 is -1"):
        quantize_activations(x.cuda(), scale=GlobalScale(-1.0, "divisor"))


def test_operators_by_expert_have_the_bytes_of_a_cpu():
    x, batches, given = values((9, 256), torch.bfloat16), values((3, 6, 256), torch.bfloat16, 2), torch.tensor([90.0, 80.0, 70.0])
    offsets, starts = (torch.tensor(rows, dtype=torch.int32) for rows in ([0, 3, 3, 9], [0, 128, 128, 256]))
    counts = torch.tensor([6, 0, 2], dtype=torch.int32)
    for operator in (ops.scaled_fp4_experts_quant, ops.silu_and_mul_scaled_fp4_experts_quant):
        arguments = x, given, offsets, starts
        same(operator(*map(there, arguments), 2), operator(*arguments, 2))
    for operator in (ops.scaled_fp4_grouped_quantize, ops.silu_and_mul_scaled_nvfp4_experts_quantize):
        for scale in (given, given[:1]):
            codes, scales = operator(there(batches), there(counts), there(scale))
            expected = operator(batches, counts, scale)
            assert torch.equal(scales.cpu().view(torch.uint8), expected[1].view(torch.uint8))
            for expert, count in enumerate(counts):
                assert torch.equal(codes[:count, :, expert].cpu(), expected[0][:count, :, expert])


def test_outputs_that_are_given_are_written_to_in_graphs():
    x, scale = values((9, 128), torch.bfloat16), torch.tensor([90.0])
    options = {"scale_source": "divisor", "layout": "128x4"}
    of_gpu, scale_there = x.cuda(), scale.cuda()
    codes = torch.zeros(9, 64, dtype=torch.uint8, device="cuda")
    scales = torch.zeros(128, 8, dtype=torch.float8_e4m3fn, device="cuda")

    def work():
        ops.quantize_activations_into(of_gpu, codes, scales, scale=scale_there, **options)

    graph, _ = captured(work)
    codes.zero_()
    graph.replay()
    expected = ops.quantize_activations(x, scale=scale, **options)
    assert torch.equal(codes.cpu(), expected[0]) and torch.equal(scales.cpu().view(torch.uint8), expected[1])
