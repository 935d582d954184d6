"""States of layers: their bytes are loaded as bytes, whatever their dtype is called."""

import copy

import pytest

import microscale

torch = pytest.importorskip("torch")

FORMATS = ["nvfp4", "mxfp4"]
#: The dtypes that a layer's scales are views of.
SCALES = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}
#: Dtypes that say something else than the layer's, or that would be converted.
OTHERS = {
    "weight_packed": [torch.float32, torch.float8_e4m3fn, torch.int32, torch.bool],
    "weight_scale": [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int16],
    "weight_global_scale": [torch.uint8, torch.int32],
    "bias": [torch.uint8, torch.int64],
}


class Mixture(torch.nn.Module):
    """Experts as transformers has them."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(2, 64, 32))
        self.down_proj = torch.nn.Parameter(torch.randn(2, 32, 32))
        self.gate_up_proj_bias = torch.nn.Parameter(torch.randn(2, 64))
        self.down_proj_bias = torch.nn.Parameter(torch.randn(2, 32))

    def _apply_gate(self, x):
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def linear(format):
    from microscale.torch import QuantizedLinear

    return QuantizedLinear.from_linear(torch.nn.Linear(64, 96), format), ""


def experts(format):
    from microscale.torch import QuantizedExperts

    return QuantizedExperts.from_experts(Mixture(), format), "1.down_proj."


def bytes_of(module):
    """The bytes of each tensor of a state."""
    return {name: tensor.contiguous().view(torch.uint8).clone() for name, tensor in module.state_dict().items()}


def same(module, expected):
    found = bytes_of(module)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("make", [linear, experts])
def test_bytes_are_loaded_as_bytes(make, format, assign):
    (module, _), (other, _) = make(format), make(format)
    expected, state = bytes_of(module), module.state_dict()
    dtypes = {name: tensor.dtype for name, tensor in state.items()}
    for scale, codes in [(torch.uint8, torch.uint8), (SCALES[format], torch.float4_e2m1fn_x2), (torch.uint8, torch.int8)]:
        given = {
            name: tensor.view(codes if name.endswith("packed") else scale) if "_packed" in name or name.endswith("weight_scale") else tensor
            for name, tensor in copy.deepcopy(state).items()
        }
        fresh = copy.deepcopy(other)
        assert not any(fresh.load_state_dict(given, assign=assign))
        same(fresh, expected)
        assert {name: tensor.dtype for name, tensor in fresh.state_dict().items()} == dtypes
        # A state that was given stays as it was.
        assert all(tensor.dtype in (scale, codes, torch.float32) for tensor in given.values())


@pytest.mark.parametrize("part", OTHERS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("make", [linear, experts])
def test_a_state_of_another_dtype_is_refused_and_nothing_converted(make, format, part):
    module, place = make(format)
    name, state, expected = place + part, module.state_dict(), bytes_of(module)
    if name not in state:
        return
    others = OTHERS[part] + ([SCALES["mxfp4" if format == "nvfp4" else "nvfp4"]] if part == "weight_scale" else [])
    for dtype in others:
        given = torch.ones(state[name].shape, dtype=torch.uint8).to(dtype)
        with pytest.raises(RuntimeError, match=rf"{part} is {str(dtype).removeprefix('torch.')} and must be"):
            module.load_state_dict({**state, name: given})
        same(module, expected)


@pytest.mark.parametrize("make", [linear, experts])
def test_numbers_are_converted_as_numbers(make):
    module, place = make("nvfp4")
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for part in ("weight_global_scale", "bias"):
        state[place + part] = torch.full_like(state[place + part], 2.0, dtype=torch.bfloat16)
    module.load_state_dict(state)
    loaded = module.state_dict()
    for part in ("weight_global_scale", "bias"):
        assert loaded[place + part].dtype == torch.float32 and (loaded[place + part] == 2).all()


def test_a_bias_is_a_number_for_each_row():
    from microscale.torch import QuantizedLinear

    weights = microscale.quantize(torch.randn(4, 64), "nvfp4")
    for shape in [(4, 1), (1, 4), (1,), (), (5,)]:
        with pytest.raises(microscale.Error, match="bias has shape"):
            QuantizedLinear(weights, torch.zeros(shape))
        layer = QuantizedLinear(weights, torch.zeros(4))
        layer.bias = torch.nn.Parameter(torch.zeros(shape))
        for requires_grad in (True, False):
            layer.bias.requires_grad_(requires_grad)
            with pytest.raises(microscale.Error, match="bias has shape"):
                layer(torch.randn(4, 64))
        with pytest.raises(microscale.Error, match="bias has shape"):
            parts = layer.weight_packed, layer.weight_scale.view(torch.uint8), layer.weight_global_scale
            torch.ops.microscale.linear(torch.randn(4, 64), *parts, "nvfp4", "divisor", torch.zeros(shape))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("concatenated", [True, False])
def test_tensors_of_a_state_share_no_memory_and_have_no_gaps(format, concatenated):
    from microscale.torch import QuantizedExperts

    safetensors = pytest.importorskip("safetensors.torch")
    mixture = Mixture()
    mixture.is_concatenated = concatenated
    module = torch.nn.Sequential(QuantizedExperts.from_experts(mixture, format), linear(format)[0])
    state = module.state_dict()
    assert all(tensor.is_contiguous() for tensor in state.values())
    storages = [tensor.untyped_storage() for tensor in state.values()]
    assert len({storage.data_ptr() for storage in storages}) == len(state)
    assert [storage.nbytes() for storage in storages] == [tensor.nbytes for tensor in state.values()]
    again = safetensors.load(safetensors.save(state))
    assert again.keys() == state.keys()
    fresh = torch.nn.Sequential(QuantizedExperts.from_experts(mixture, format), linear(format)[0])
    for buffer in fresh[0].buffers():
        buffer.zero_()
    fresh.load_state_dict(again)
    same(fresh, bytes_of(module))
    # With `keep_vars` they are the module's own.
    kept = module.state_dict(keep_vars=True)
    assert kept["0.1.down_proj.weight_packed"].data_ptr() == module[0].down_proj_packed[1].data_ptr()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("make", [linear, experts])
def test_a_state_is_assigned_to_a_module_on_meta(make, format):
    module, _ = make(format)
    expected, state = bytes_of(module), module.state_dict()
    empty = copy.deepcopy(module).to("meta")
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    with pytest.warns(UserWarning, match="no-op|does nothing; pass assign=True"):
        empty.load_state_dict(state)
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    assert not any(empty.load_state_dict(state, assign=True))
    assert not any(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    same(empty, expected)
    if make is experts:
        # A copy: the state can change.
        state["1.down_proj.weight_packed"].zero_()
        same(empty, expected)
        x, index, routing = torch.randn(3, 32), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
        assert torch.equal(empty(x, index, routing), module(x, index, routing))
    with pytest.raises(RuntimeError, match="meta"):
        module.load_state_dict(copy.deepcopy(module).to("meta").state_dict())
    same(module, expected)


@pytest.mark.parametrize("format", FORMATS)
def test_assigned_biases_have_the_states_dtype_and_the_rest_stays(format):
    module, _ = experts(format)
    expected = bytes_of(module)
    state = {name: tensor.bfloat16() if name.endswith("bias") else tensor for name, tensor in module.state_dict().items()}
    module.load_state_dict(state, assign=True)
    assert module.down_proj_bias.dtype == torch.bfloat16 and isinstance(module.down_proj_bias, torch.nn.Parameter)
    part = {name: tensor for name, tensor in module.state_dict().items() if name.startswith("1.")}
    module, _ = experts(format)
    before = bytes_of(module)
    missing, unexpected = module.load_state_dict(part, assign=True, strict=False)
    assert unexpected == [] and all(name.startswith("0.") for name in missing)
    after = bytes_of(module)
    assert all(torch.equal(after[name], before[name]) for name in after if name.startswith("0.") and not name.endswith("bias"))
    assert all(torch.equal(after[name], expected[name]) for name in after if name.startswith("1.") and not name.endswith("bias"))
