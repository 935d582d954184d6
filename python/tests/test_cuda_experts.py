"""Experts of mixtures in the memory of NVIDIA GPUs, activations in float32, and biases."""

import pytest

torch = pytest.importorskip("torch")

from on_gpu import captured, values, within_bound  # noqa: E402

import microscale  # noqa: E402

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALVES]


def experts(shape, format, seed=1):
    """Experts on a GPU, with global scales far apart, and the same on a CPU."""
    x = values(shape, seed=seed) / 8 * 2.0 ** torch.arange(shape[0]).reshape(-1, 1, 1)
    there = microscale.quantize_experts(x.cuda(), format)
    return there, microscale.quantize_experts(x, format)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_bytes_are_a_cpus(format):
    there, here = experts((5, 48, 96), format)
    back = there.cpu()
    assert torch.equal(back.codes, here.codes) and torch.equal(back.scales, here.scales)
    assert (there.direction, there.shape) == (here.direction, here.shape)
    if format == "nvfp4":
        assert torch.equal(there.global_scales.cpu(), here.global_scales)
    assert torch.equal(there.dequantize().cpu(), here.dequantize())
    moved = here.to("cuda")
    assert torch.equal(moved.dequantize(torch.float16).cpu(), here.dequantize(torch.float16))
    assert torch.equal(moved.to("cpu").codes, here.codes)


def near_float32(y, weights, x):
    """Whether results are as near to the exact ones as sums in float32 of parts are that lose
    nothing of `x`."""
    assert y.dtype == torch.float32
    exact, wide = weights.dequantize().double(), x.double()
    gamma = 3 * 18 * (x.shape[-1] / 16 + 2) * 2.0**-23
    bound = gamma * (wide.abs() @ exact.abs().T) + 2.0**-24
    return bool(((y.double() - wide @ exact.T).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_products_are_within_the_bound(format, dtype):
    for shape in [(4, 64, 128), (8, 300, 512), (3, 96, 288)]:
        there, here = experts(shape, format)
        for tokens, top_k in [(1, 1), (1, 3), (5, 2), (60, 3), (300, 2)]:
            chosen = torch.randint(0, shape[0], (tokens, top_k))
            for leading in [(tokens,), (tokens, top_k)]:
                x = torch.randn(*leading, shape[2]).to(dtype)
                y = microscale.linear_experts(x.cuda(), there, chosen.cuda())
                assert y.is_cuda and y.dtype == dtype and y.shape == (tokens, top_k, shape[1])
                rows = x if x.dim() == 3 else x.unsqueeze(1).expand(-1, top_k, -1)
                for expert in range(shape[0]):
                    own = chosen == expert
                    if dtype == torch.float32:
                        assert near_float32(y.cpu()[own], here[expert], rows[own])
                    else:
                        within_bound(y.cpu()[own], here[expert], rows[own])


@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_and_pairs_of_no_expert(dtype):
    there, here = experts((4, 64, 128), "nvfp4")
    chosen = torch.tensor([[0, 4], [-1, 2], [3, 9]], dtype=torch.int32)
    x, bias = torch.randn(3, 128).to(dtype), (torch.randn(4, 64) * 100).to(dtype)
    y = microscale.linear_experts(x.cuda(), there, chosen.cuda(), bias=bias.cuda()).cpu()
    none = (chosen < 0) | (chosen >= 4)
    assert not y[none].any()
    for expert in range(4):
        own = chosen == expert
        rows = x.unsqueeze(1).expand(-1, 2, -1)[own]
        exact = rows.double() @ here[expert].dequantize().double().T + bias[expert].double()
        near = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(y[own].double(), exact, rtol=2 * near, atol=near)
    out = torch.full((3, 2, 64), 7.0, dtype=dtype, device="cuda")
    assert microscale.linear_experts(x.cuda(), there, chosen.cuda(), out=out) is out
    assert (out.cpu()[none] == 7).all() and not (out.cpu()[~none] == 7).all()
    with pytest.raises(TypeError):
        microscale.linear_experts(x.double().cuda(), there, chosen.cuda())
    with pytest.raises(microscale.Error, match="the workspace has"):
        microscale.linear_experts(
            x.cuda(), there, chosen.cuda(), workspace=torch.zeros(64, dtype=torch.uint8, device="cuda")
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_captured_and_follow_the_routing(dtype):
    there, _ = experts((6, 96, 256), "nvfp4")
    x = torch.randn(40, 256, dtype=dtype, device="cuda")
    chosen = torch.randint(0, 6, (40, 2), dtype=torch.int32, device="cuda")
    workspace = microscale.experts_workspace(there, 80, dtype)
    expected = microscale.linear_experts(x, there, chosen, workspace=workspace)
    assert torch.equal(expected, microscale.linear_experts(x, there, chosen))
    graph, y = captured(lambda: microscale.linear_experts(x, there, chosen))
    for _ in range(3):
        chosen.copy_(torch.randint(0, 6, (40, 2), dtype=torch.int32))
        x.normal_()
        graph.replay()
        assert torch.equal(y, microscale.linear_experts(x, there, chosen, workspace=workspace))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_float32_is_not_rounded(format):
    for rows, cols in [(64, 128), (300, 1024), (33, 96)]:
        weights = microscale.quantize(torch.randn(rows, cols).cuda() / 8, format)
        here = weights.cpu()
        for tokens in (1, 8, 9, 130):
            x = torch.randn(tokens, cols).cuda()
            y = microscale.linear(x, weights)
            assert y.dtype == torch.float32 and y.shape == (tokens, rows)
            assert near_float32(y.cpu(), here, x.cpu())
            workspace = microscale.workspace(weights, tokens, "float32")
            assert torch.equal(microscale.linear(x, weights, workspace=workspace), y)
            assert torch.equal(
                microscale.linear(x.half(), weights, workspace=workspace), microscale.linear(x.half(), weights)
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added_before_the_rounding(dtype):
    from microscale.torch import QuantizedLinear

    layer = QuantizedLinear.from_linear(torch.nn.Linear(256, 96).cuda(), "nvfp4")
    with torch.no_grad():
        for tokens in (1, 8, 40):
            x = torch.randn(tokens, 256, dtype=dtype, device="cuda")
            bias = layer.bias.to(dtype)
            exact = x.double() @ layer.dequantize().double().T + bias.double()
            y = microscale.linear(x, layer._weights(), bias=bias)
            # One rounding, after the bias.
            ulp = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
            torch.testing.assert_close(y.double(), exact, rtol=ulp, atol=1e-4)
            assert torch.equal(layer(x), y)
            compiled = torch.ops.microscale.linear(x, *layer._parts(), "nvfp4", "divisor", bias)
            assert torch.equal(compiled, y)


@pytest.mark.parametrize("transposed", [False, True])
def test_modules_compute_what_they_do_on_a_cpu(transposed):
    transformers = pytest.importorskip("transformers")
    from microscale.torch import quantize_

    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 50}
    torch.manual_seed(1)
    if transposed:
        config = transformers.GptOssConfig(
            **small, head_dim=32, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, eos_token_id=1, pad_token_id=0
        )
    else:
        config = transformers.Qwen3MoeConfig(
            **small, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, intermediate_size=96
        )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    quantize_(model, "nvfp4")
    module = model.model.layers[0].mlp.experts
    x, index, routing = torch.randn(33, 64), torch.randint(0, 4, (33, 2)), torch.rand(33, 2)
    with torch.no_grad():
        expected = module(x, index, routing)
        module = module.to(device="cuda")
        y = module(x.cuda(), index.cuda(), routing.cuda())
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.cpu(), expected, rtol=1e-4, atol=1e-4)
        module = module.to(dtype=torch.bfloat16)
        operands = x.cuda().bfloat16(), index.cuda(), routing.cuda()
        y = module(*operands)
        torch.testing.assert_close(y.float().cpu(), expected, rtol=0.05, atol=0.05)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*operands), y)
        graph, again = captured(lambda: module(*operands))
        graph.replay()
        assert torch.equal(again, y)


def test_large_numbers_are_no_experts():
    there, here = experts((5, 24, 64), "mxfp4")
    numbers = [0, 4, -1, 5, 2**31, 2**32, 2**32 + 1, -(2**32) + 1, 2**63 - 1, -(2**63)]
    x = torch.randn(1, 64)
    y = microscale.linear_experts(x.cuda(), there, torch.tensor([numbers]).cuda()).cpu()[0]
    for i, n in enumerate(numbers):
        expected = here[n].dequantize() @ x[0] if n in (0, 4) else torch.zeros(24)
        torch.testing.assert_close(y[i], expected, rtol=1e-3, atol=1e-3)
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(TypeError, match="pass an array of int32"):
            microscale.linear_experts(x.cuda(), there, torch.tensor([[1, 0]]).to(dtype).cuda())


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_states_are_saved_from_a_gpu_and_loaded_to_one(tmp_path, format):
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    from microscale.torch import load_quantized, quantize_

    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 50}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "intermediate_size": 96}
    config = transformers.Qwen3MoeConfig(**small, **moe, head_dim=32)
    model = transformers.Qwen3MoeForCausalLM(config).eval().cuda()
    names = quantize_(model, format)
    safetensors.save_file(model.state_dict(), tmp_path / "state.safetensors")
    with torch.device("meta"):
        again = transformers.Qwen3MoeForCausalLM(config).eval()
    assert set(load_quantized(again, tmp_path / "state.safetensors", device="cuda")) == set(names)
    tokens = torch.arange(7, device="cuda")[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert model(tokens).logits.dtype == torch.bfloat16
    for name, x in model.state_dict().items():
        assert torch.equal(again.state_dict()[name].view(torch.uint8), x.view(torch.uint8)), name
