"""Mixtures of experts as transformers has them, with their experts in four bits. Skipped where it
or PyTorch is not installed."""

import copy

import pytest

import microscale

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 100}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "intermediate_size": 96}


def config(name):
    """A small configuration of a family."""
    if name == "gpt-oss":
        return transformers.GptOssConfig(
            **SMALL, head_dim=32, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, eos_token_id=1, pad_token_id=0
        )
    if name == "qwen3":
        return transformers.Qwen3MoeConfig(**SMALL, **ROUTED, head_dim=32)
    if name == "mixtral":
        return transformers.MixtralConfig(**SMALL, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2)
    return transformers.DeepseekV3Config(
        **SMALL,
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
    )


FAMILIES = ["gpt-oss", "qwen3", "mixtral", "deepseek"]


@pytest.fixture(params=FAMILIES)
def model(request):
    """A small model with weights that are not zeros, biases included."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config(request.param)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def experts_of(model):
    return [(name, module) for name, module in model.named_modules() if name.endswith(".experts")]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_experts_are_replaced_and_compute(model, format):
    from microscale.torch import QuantizedExperts, quantize_

    reference = copy.deepcopy(model)
    before = dict(experts_of(model))
    names = quantize_(model, format)
    after = experts_of(model)
    assert after and {name for name, _ in after} <= set(names)
    tokens = torch.randint(0, 100, (2, 9))
    for name, module in after:
        assert isinstance(module, QuantizedExperts)
        own, transposed = reference.get_submodule(name), before[name].is_transposed
        for part in ("gate_up_proj", "down_proj"):
            weights = getattr(own, part).data
            back = module.dequantize(part)
            weights.copy_(back.transpose(1, 2) if transposed else back)
        experts = back.shape[0]
        x = torch.randn(7, 64)
        index, routing = torch.randint(0, experts, (7, 2)), torch.rand(7, 2)
        with torch.no_grad():
            torch.testing.assert_close(module(x, index, routing), own(x, index, routing), rtol=1e-4, atol=1e-4)
    # The whole model, linear layers dequantized too.
    for name in set(names) - {name for name, _ in after}:
        reference.get_submodule(name).weight.data.copy_(model.get_submodule(name).dequantize())
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, reference(tokens).logits, rtol=1e-3, atol=1e-3)
        assert torch.isfinite(model.to(torch.bfloat16)(tokens).logits).all()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_state_has_a_linear_layer_for_each_expert(model, format):
    from microscale.torch import QuantizedExperts, quantize_

    quantize_(model, format)
    name, module = experts_of(model)[-1]
    state = {key.removeprefix(name + "."): value for key, value in model.state_dict().items() if key.startswith(name + ".")}
    parts = ["weight_packed", "weight_scale"]
    parts += ["weight_global_scale"] if format == "nvfp4" else []
    parts += ["bias"] if module.down_proj_bias is not None else []
    count = module.down_proj_packed.shape[0]
    linears = ("gate_proj", "up_proj", "down_proj")
    assert set(state) == {f"{e}.{linear}.{part}" for e in range(count) for linear in linears for part in parts}
    scale = torch.float8_e4m3fn if format == "nvfp4" else torch.uint8
    assert state["1.up_proj.weight_packed"].dtype == torch.uint8 and state["1.up_proj.weight_scale"].dtype == scale
    assert state["1.gate_proj.weight_packed"].shape == (module.gate_up_proj_packed.shape[1] // 2, 32)
    # The values: the rows of gate and of up.
    linear = microscale.Quantized(
        state["1.gate_proj.weight_packed"].contiguous(),
        state["1.gate_proj.weight_scale"].contiguous(),
        format=format,
        global_scale=(
            microscale.GlobalScale(state["1.gate_proj.weight_global_scale"].item(), "divisor") if format == "nvfp4" else None
        ),
    )
    half = module.gate_up_proj_packed.shape[1] // 2
    rows = slice(half) if module.is_concatenated else slice(0, None, 2)
    assert torch.equal(linear.dequantize(), module.dequantize("gate_up_proj")[1, rows])

    state = {key: value.clone() for key, value in state.items()}
    x, index, routing = torch.randn(5, 64), torch.randint(0, count, (5, 2)), torch.rand(5, 2)
    expected = module(x, index, routing)
    for buffer in module.buffers():
        buffer.zero_() if buffer.dtype == torch.uint8 else buffer.mul_(2)
    assert not torch.equal(module(x, index, routing), expected)
    assert not module.load_state_dict(state).missing_keys
    assert torch.equal(module(x, index, routing), expected)
    with pytest.raises(RuntimeError, match="Missing key.*0.up_proj.weight_packed"):
        module.load_state_dict({key: value for key, value in state.items() if key != "0.up_proj.weight_packed"})
    with pytest.raises(RuntimeError, match="Unexpected key.*9999"):
        module.load_state_dict({**state, "9999.up_proj.bias": state["0.up_proj.weight_packed"]})
    if format == "nvfp4":
        with pytest.raises(RuntimeError, match="is not that of gate_proj"):
            module.load_state_dict({**state, "0.up_proj.weight_global_scale": torch.tensor([3.0])})
    assert isinstance(module, QuantizedExperts) and format in repr(module)


def test_global_scales_stay_when_a_model_is_cast(model):
    from microscale.torch import quantize_

    quantize_(model, "nvfp4")
    _, module = experts_of(model)[-1]
    before = module.gate_up_proj_slots.clone()
    model.to(torch.bfloat16).half().float()
    assert module.gate_up_proj_slots.dtype == torch.float32 and torch.equal(module.gate_up_proj_slots, before)


def test_the_graph_is_not_broken(model):
    from microscale.torch import quantize_

    quantize_(model, "nvfp4")
    _, module = experts_of(model)[-1]
    count = module.down_proj_packed.shape[0]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for tokens in (5, 11):
        x, index, routing = torch.randn(tokens, 64), torch.randint(0, count, (tokens, 2)), torch.rand(tokens, 2)
        with torch.no_grad():
            assert torch.equal(compiled(x, index, routing), module(x, index, routing))


def test_the_operator_is_what_torch_asks_of_it():
    import microscale.torch  # noqa: F401

    weights = microscale.quantize_experts(torch.randn(4, 24, 64), "nvfp4")
    x, experts = torch.randn(3, 64, dtype=torch.bfloat16), torch.randint(0, 4, (3, 2))
    parts = (weights.codes, weights.scales, weights.global_scales, "nvfp4", "divisor")
    torch.library.opcheck(torch.ops.microscale.linear_experts, (x, experts, *parts))
    bias = torch.randn(4, 24, dtype=torch.bfloat16)
    y = torch.ops.microscale.linear_experts(x, experts, *parts, bias)
    assert torch.equal(y, microscale.linear_experts(x, weights, experts, bias=bias))
    torch.library.opcheck(torch.ops.microscale.linear_experts, (x, experts, *parts, bias, "fp8", True))
    with pytest.raises(Exception, match="allow it with round_weights"):
        torch.ops.microscale.linear_experts(*(part.to("meta") for part in (x, experts, *parts[:3])), *parts[3:], None, "fp8")


@pytest.mark.parametrize(
    ("format", "activations"), [("mxfp4", "int8"), ("mxfp4", "fp8"), ("nvfp4", "fp8-group128"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4")]
)
def test_activations_are_rounded_in_both_products(model, format, activations):
    from microscale.torch import quantize_

    torch._dynamo.reset()
    options = {"activation_format": activations, "round_weights": format == "nvfp4"}
    quantize_(model, {"format": format, **options})
    _, module = experts_of(model)[-1]
    assert f"activations={activations}" in repr(module)
    count = module.down_proj_packed.shape[0]
    x, index, routing = torch.randn(7, 64), torch.randint(0, count, (7, 2)), torch.rand(7, 2)

    def product(name, x):
        parts = (getattr(module, f"{name}_{part}") for part in ("packed", "scale", "slots"))
        codes, scales, slots = parts
        numbers = {"global_scales": slots[:, 0], "direction": "divisor"} if format == "nvfp4" else {}
        weights = microscale.Experts(codes, scales, format=format, **numbers)
        bias = getattr(module, f"{name}_bias")
        bias = None if bias is None else bias.detach()
        rounding = {"activations": activations, "round_weights": format == "nvfp4"}
        return microscale.linear_experts(x, weights, index.int(), bias=bias, **rounding)

    with torch.no_grad():
        y = module._gate(module, product("gate_up_proj", x))
        expected = (product("down_proj", y) * routing.unsqueeze(-1)).sum(1)
        assert torch.equal(module(x, index, routing), expected)
        module.activation_format = None
        assert not torch.equal(module(x, index, routing), expected)
        module.activation_format = activations
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, index, routing), expected)


def test_activations_that_the_weights_do_not_take_are_refused(model):
    from microscale.torch import QuantizedExperts

    (_, module), *_ = experts_of(model)
    with pytest.raises(microscale.Error, match="allow it with round_weights"):
        QuantizedExperts.from_experts(module, "nvfp4", activation_format="fp8")
    with pytest.raises(microscale.Error, match="quantize both to nvfp4, or both to mxfp4"):
        QuantizedExperts.from_experts(module, "nvfp4", activation_format="mxfp4")


def test_experts_that_are_left_alone(model):
    from microscale.torch import QuantizedExperts, quantize_

    (name, module), *_ = experts_of(model)
    assert name not in quantize_(copy.deepcopy(model), "nvfp4", exclude=["*.experts"])
    assert QuantizedExperts.replaces(module, "mxfp4") and not QuantizedExperts.replaces(model, "mxfp4")
    module.has_post_expert_norm = True
    assert not QuantizedExperts.replaces(module, "mxfp4")
    with pytest.raises(microscale.Error, match="divisor"):
        QuantizedExperts.from_experts(module, "nvfp4", numerics="modelopt")
