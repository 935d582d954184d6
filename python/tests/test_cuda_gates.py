"""Gates of products on NVIDIA GPUs, compared with the CPU's."""

import pytest

torch = pytest.importorskip("torch")

from on_gpu import captured  # noqa: E402

import microscale  # noqa: E402

HOPPER = torch.cuda.get_device_capability() == (9, 0)
PRODUCTS = [("mxfp4", {}), ("nvfp4", {}), ("mxfp4", {"activations": "mxfp4"}), ("nvfp4", {"activations": "nvfp4"})]
PRODUCTS += [("mxfp4", {"activations": "fp8"}), ("nvfp4", {"activations": "fp8-group128", "round_weights": True})] * HOPPER
GATES = ["silu_and_mul", "swiglu_oai"]


def near(y, expected, dtype):
    # Parts of K are added in another order.
    ulp = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6, torch.float32: 2.0**-14}[dtype]
    torch.testing.assert_close(y.cpu(), expected, rtol=ulp, atol=2.0**-8 if dtype != torch.float32 else 2.0**-12)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("format", "options"), PRODUCTS)
def test_products_are_the_cpus(format, options, gate):
    for tokens in (1, 9, 200):
        weights = microscale.quantize(torch.randn(192, 512) / 32, format)
        x, bias = torch.randn(tokens, 512, dtype=torch.bfloat16), torch.randn(192, dtype=torch.bfloat16)
        there = weights.to("cuda")
        y = microscale.linear(x.cuda(), there, bias=bias.cuda(), gate=gate, **options)
        assert y.shape == (tokens, 96)
        near(y, microscale.linear(x, weights, bias=bias, gate=gate, **options), torch.bfloat16)
        x, bias = x.cuda(), bias.cuda()
        graph, again = captured(lambda: microscale.linear(x, there, bias=bias, gate=gate, **options))
        graph.replay()
        assert torch.equal(again, y)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("format", "options"), PRODUCTS)
def test_experts_are_the_cpus(format, options, gate):
    weights = microscale.quantize_experts(torch.randn(6, 192, 512) / 32, format)
    there, chosen = weights.to("cuda"), torch.randint(0, 6, (40, 2), dtype=torch.int32)
    x, bias = torch.randn(40, 512, dtype=torch.bfloat16), torch.randn(6, 192, dtype=torch.bfloat16)
    y = microscale.linear_experts(x.cuda(), there, chosen.cuda(), bias=bias.cuda(), gate=gate, **options)
    assert y.shape == (40, 2, 96)
    near(y, microscale.linear_experts(x, weights, chosen, bias=bias, gate=gate, **options), torch.bfloat16)


@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")
def test_quantized_activations_are_combined_too():
    weights = microscale.quantize(torch.randn(192, 512) / 32)
    x = torch.randn(33, 512, dtype=torch.bfloat16)
    for quantize in (microscale.quantize, lambda x: microscale.quantize_activations(x, "fp8")):
        y = microscale.linear(quantize(x.cuda()), weights.to("cuda"), gate="silu_and_mul", dtype=torch.bfloat16)
        expected = microscale.linear(quantize(x), weights, gate="silu_and_mul", dtype=torch.bfloat16)
        near(y, expected, torch.bfloat16)
