"""Results of products on NVIDIA GPUs that are quantized, global scales by token, and groups."""

import pytest

torch = pytest.importorskip("torch")

from on_gpu import captured  # noqa: E402

import microscale  # noqa: E402
from microscale import GlobalScale, ResultFormat  # noqa: E402

HOPPER = torch.cuda.get_device_capability() == (9, 0)
PRODUCTS = [("mxfp4", {}), ("nvfp4", {}), ("nvfp4", {"activations": "nvfp4"})] + [("mxfp4", {"activations": "fp8"})] * HOPPER
RESULTS = [
    ResultFormat("fp8"),
    ResultFormat("fp8", "group128"),
    ResultFormat("mxfp4", layout="128x4"),
    ResultFormat("nvfp4"),
    ResultFormat("nvfp4", GlobalScale(600.0, "divisor"), layout="128x4"),
]


def equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("results", RESULTS)
@pytest.mark.parametrize(("format", "options"), PRODUCTS)
def test_results_have_the_bytes_of_two_calls(format, options, results):
    weights = microscale.quantize(torch.randn(192, 512) / 32, format).to("cuda")
    bias = torch.randn(192, dtype=torch.bfloat16).cuda()
    for tokens in (1, 9, 200):
        x = torch.randn(tokens, 512, dtype=torch.bfloat16).cuda()
        y = microscale.linear(x, weights, bias=bias, **options)
        expected = microscale.quantize_activations(y, **results._asdict())
        equal(microscale.linear(x, weights, bias=bias, quantize_results=results, **options), expected)
        graph, again = captured(lambda: microscale.linear(x, weights, bias=bias, quantize_results=results, **options))
        graph.replay()
        equal(again, expected)
        if not options:
            workspace = microscale.workspace(weights, 200, quantize_results=True)
            own = microscale.linear(x, weights, bias=bias, quantize_results=results, workspace=workspace)
            equal(own, expected)


def test_a_scale_in_device_memory_is_applied():
    weights = microscale.quantize(torch.randn(192, 512) / 32).to("cuda")
    x = torch.randn(33, 512, dtype=torch.bfloat16).cuda()
    scale = GlobalScale(torch.tensor([600.0]).cuda(), "divisor")
    found = microscale.linear(x, weights, quantize_results=ResultFormat("nvfp4", scale))
    equal(found, microscale.quantize_activations(microscale.linear(x, weights), "nvfp4", scale=scale))


def test_results_of_experts_have_the_bytes_of_two_calls():
    weights = microscale.quantize_experts(torch.randn(6, 192, 512) / 32).to("cuda")
    chosen = torch.randint(0, 6, (40, 2), dtype=torch.int32).cuda()
    x = torch.randn(40, 512, dtype=torch.bfloat16).cuda()
    y = microscale.linear_experts(x, weights, chosen)
    for results in RESULTS:
        expected = microscale.quantize_activations(y, **results._asdict())
        equal(microscale.linear_experts(x, weights, chosen, quantize_results=results), expected)


def test_results_in_float32_are_refused():
    weights, x = microscale.quantize(torch.randn(64, 64)).to("cuda"), torch.randn(3, 64).cuda()
    with pytest.raises(microscale.Error, match="f16 or bf16"):
        microscale.linear(x, weights, quantize_results="fp8")


def test_token_scales_are_those_of_the_cpu():
    weights = microscale.quantize(torch.randn(192, 512) / 32, "nvfp4")
    x = torch.randn(33, 512, dtype=torch.bfloat16)
    codes, scales, token_scales = microscale.quantize_activations(x, "nvfp4", scale="token")
    quantized = microscale.Quantized(codes, scales, format="nvfp4")
    there = microscale.Quantized(codes.cuda(), scales.cuda(), format="nvfp4")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        expected = microscale.linear(quantized, weights, token_scales=token_scales, dtype=dtype)
        y = microscale.linear(there, weights.to("cuda"), token_scales=token_scales.cuda(), dtype=dtype)
        ulp = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6, torch.float32: 2.0**-14}[dtype]
        torch.testing.assert_close(y.cpu(), expected, rtol=ulp, atol=2.0**-8)
    experts = microscale.quantize_experts(torch.randn(6, 192, 512) / 32, "nvfp4")
    chosen = torch.randint(0, 6, (33, 2), dtype=torch.int32)
    expected = microscale.linear_experts(quantized, experts, chosen, token_scales=token_scales)
    y = microscale.linear_experts(there, experts.to("cuda"), chosen.cuda(), token_scales=token_scales.cuda())
    torch.testing.assert_close(y.cpu(), expected, rtol=2.0**-14, atol=2.0**-8)


def test_groups_have_the_results_of_their_own_products():
    sizes = [(96, 128, 128), (1, 256, 512), (200, 384, 1024)]
    weights = [microscale.quantize(torch.randn(rows, cols)).to("cuda") for _, rows, cols in sizes]
    x = [torch.randn(tokens, cols, dtype=torch.bfloat16).cuda() for tokens, _, cols in sizes]
    for group, found in zip(zip(x, weights), microscale.linear_groups(x, weights), strict=True):
        assert torch.equal(found, microscale.linear(*group))
