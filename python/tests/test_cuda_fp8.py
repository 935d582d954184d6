"""Products with FP8 activations on NVIDIA GPUs, compared with the CPU's."""

import pytest

torch = pytest.importorskip("torch")

from on_gpu import captured  # noqa: E402

import microscale  # noqa: E402
from microscale.torch import QuantizedExperts, QuantizedLinear  # noqa: E402

#: GPUs without these products refuse them.
HOPPER = torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")
WORDS = ["fp8", "fp8-group128"]


class Mixture(torch.nn.Module):
    """The experts of a mixture, as transformers has them."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(4, 192, 128, dtype=torch.bfloat16) / 8)
        self.down_proj = torch.nn.Parameter(torch.randn(4, 128, 96, dtype=torch.bfloat16) / 8)

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


@pytest.mark.skipif(HOPPER, reason="has the products")
def test_other_gpus_say_that_they_lack_the_products():
    weights = microscale.quantize(torch.randn(64, 128, device="cuda"))
    with pytest.raises(NotImplementedError, match="compute capability 9.0"):
        microscale.linear(torch.ones(3, 128, dtype=torch.bfloat16, device="cuda"), weights, activations="fp8")


@needs_hopper
@pytest.mark.parametrize("activations", WORDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_the_cpus(activations, dtype):
    for rows, cols, tokens in [(64, 128, 1), (96, 640, 9), (300, 1024, 200)]:
        weights = microscale.quantize(torch.randn(rows, cols) / 8)
        there, x = weights.to("cuda"), torch.randn(tokens, cols, dtype=dtype)
        y = microscale.linear(x.cuda(), there, activations=activations)
        # Parts of K are added in another order. Kernels for few tokens add sums of 32 columns, CPUs
        # of 128.
        expected = microscale.linear(x, weights, activations=activations)
        torch.testing.assert_close(y.cpu(), expected, rtol=2.0**-7, atol=2.0**-9)
        workspace = microscale.workspace(there, tokens + 100, dtype, activations)
        assert torch.equal(microscale.linear(x.cuda(), there, workspace=workspace, activations=activations), y)
    with pytest.raises(microscale.Error, match="f16 or bf16"):
        microscale.linear(x.float().cuda(), there, activations=activations)


@needs_hopper
def test_fast_accumulation_is_near_the_cpus():
    weights = microscale.quantize(torch.randn(300, 4096) / 64)
    there, x = weights.to("cuda"), torch.randn(300, 4096, dtype=torch.bfloat16)
    for tokens in (5, 300):
        y = microscale.linear(x[:tokens].cuda(), there, activations="fp8-fast").cpu()
        expected = microscale.linear(x[:tokens], weights, activations="fp8")
        # Sums of all of K keep 13 fraction bits.
        torch.testing.assert_close(y, expected, rtol=2.0**-6, atol=2.0**-6)


@needs_hopper
def test_fast_accumulation_of_mxfp4_is_near_the_cpus():
    weights = microscale.quantize(torch.randn(4096, 4096) / 64)
    there, x = weights.to("cuda"), torch.randn(4096, 4096, dtype=torch.bfloat16)
    expected = microscale.linear(x.cuda(), there, activations="mxfp4").cpu()
    quantized = microscale.quantize(x.cuda())
    for y in (
        microscale.linear(x.cuda(), there, activations="mxfp4-fast"),
        microscale.linear(quantized, there, activations="mxfp4-fast", dtype="bfloat16"),
    ):
        # Sums of all of K keep 13 fraction bits.
        torch.testing.assert_close(y.cpu(), expected, rtol=2.0**-6, atol=2.0**-6)
        assert (y.cpu() != expected).any()


@needs_hopper
@pytest.mark.parametrize("activations", WORDS)
def test_experts_are_the_cpus(activations):
    weights = microscale.quantize_experts(torch.randn(6, 96, 256) / 8)
    there, x = weights.to("cuda"), torch.randn(40, 256, dtype=torch.bfloat16)
    chosen = torch.randint(-1, 7, (40, 2), dtype=torch.int32)
    y = microscale.linear_experts(x.cuda(), there, chosen.cuda(), activations=activations)
    expected = microscale.linear_experts(x, weights, chosen, activations=activations)
    torch.testing.assert_close(y.cpu(), expected, rtol=2.0**-7, atol=2.0**-9)
    workspace = microscale.experts_workspace(there, 100, activations=activations)
    again = microscale.linear_experts(x.cuda(), there, chosen.cuda(), workspace=workspace, activations=activations)
    assert torch.equal(again, y)


@needs_hopper
def test_layers_are_captured_and_compiled():
    layer = QuantizedLinear.from_linear(
        torch.nn.Linear(256, 96, device="cuda", dtype=torch.bfloat16), activation_format="fp8"
    )
    x = torch.randn(33, 256, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        expected = layer(x)
        graph, y = captured(lambda: layer(x))
        graph.replay()
        assert torch.equal(y, expected)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), expected)


@needs_hopper
@pytest.mark.parametrize("activations", WORDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_quantized_activations_are_multiplied_as_they_are(activations, dtype):
    half = torch.float16 if dtype == torch.float16 else torch.bfloat16

    def same(y, expected):
        # Results in float32 may be summed in another order.
        near = 2.0**-7 if dtype == torch.float32 else 0
        torch.testing.assert_close(y.to(half), expected, rtol=near, atol=near / 32)

    scale = "token" if activations == "fp8" else "group128"
    for rows, cols, tokens in [(64, 128, 1), (300, 1024, 200)]:
        there = microscale.quantize(torch.randn(rows, cols, device="cuda") / 8)
        x = torch.randn(tokens, cols, dtype=half, device="cuda")
        codes, _, scales = microscale.quantize_activations(x, "fp8", scale=scale)
        given = microscale.QuantizedActivations(codes.view(torch.float8_e4m3fn), None, scales)
        y = microscale.linear(given, there, dtype=dtype)
        assert y.dtype == dtype
        same(y, microscale.linear(x, there, activations=activations))
        graph, again = captured(lambda: microscale.linear(given, there, dtype=dtype))
        graph.replay()
        assert torch.equal(again, y)
    one = torch.tensor([0.02], device="cuda")
    codes, _, _ = microscale.quantize_activations(x, "fp8", scale=one)
    y = microscale.linear(microscale.QuantizedActivations(codes, None, one), there)
    each = one.expand(tokens, 1).contiguous()
    assert torch.equal(y, microscale.linear(microscale.QuantizedActivations(codes, None, each), there))
    experts, chosen = microscale.quantize_experts(torch.randn(6, 96, 256, device="cuda") / 8), torch.randint(0, 6, (40, 2)).cuda()
    x = torch.randn(40, 256, dtype=half, device="cuda")
    given = microscale.quantize_activations(x, "fp8", scale=scale)
    y = microscale.linear_experts(given, experts, chosen, dtype=dtype)
    same(y, microscale.linear_experts(x, experts, chosen, activations=activations))


@needs_hopper
@pytest.mark.parametrize("activations", WORDS)
def test_modules_of_experts_are_compiled(activations):
    module = Mixture()
    there = QuantizedExperts.from_experts(module.cuda(), activation_format=activations)
    here = QuantizedExperts.from_experts(module.cpu(), activation_format=activations)
    x, index, routing = torch.randn(33, 128, dtype=torch.bfloat16), torch.randint(0, 4, (33, 2)), torch.rand(33, 2).bfloat16()
    arguments = [x.cuda(), index.cuda(), routing.cuda()]
    with torch.no_grad():
        y = there(*arguments)
        torch.testing.assert_close(y.cpu(), here(x, index, routing), rtol=2.0**-6, atol=2.0**-10)
        compiled = torch.compile(there, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*arguments), y)
        graph, captured_y = captured(lambda: there(*arguments))
        graph.replay()
        assert torch.equal(captured_y, y)


def test_int8_is_refused():
    weights = microscale.quantize(torch.randn(64, 128, device="cuda"))
    x = torch.ones(3, 128, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(microscale.Error, match="GPUs do not multiply with activations in int8"):
        microscale.linear(x, weights, activations="int8")
    layer = QuantizedLinear(weights, dtype=torch.bfloat16, activation_format="int8")
    with pytest.raises(microscale.Error, match="GPUs do not multiply with activations in int8"):
        layer(x)
