"""The classes of torchao and compressed-tensors take our tensors, and make the same bytes, as
ModelOpt does. Skipped where they are not installed."""

import pytest

import microscale

torch = pytest.importorskip("torch")
import microscale.torch  # noqa: E402
from microscale.torch import QuantizedLinear, to_torchao  # noqa: E402

FORMATS = ["nvfp4", "mxfp4", "mxfp8-e4m3", "mxfp8-e5m2"]
SHAPES = [(40, 96), (130, 256), (2, 128, 64)]


def values(shape, dtype=torch.bfloat16):
    torch.manual_seed(4)
    return (torch.randn(shape) * torch.logspace(-3, 3, shape[-1])).to(dtype)


def torchaos(x, format, layout, number):
    """What torchao itself makes of a tensor."""
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    swizzled = {"is_swizzled_scales": layout == "swizzled"}
    if format == "nvfp4":
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=number, **swizzled)
    names = {"mxfp4": "float4_e2m1fn_x2", "mxfp8-e4m3": "float8_e4m3fn", "mxfp8-e5m2": "float8_e5m2"}
    return mx_tensor.MXTensor.to_mx(x, getattr(torch, names[format]), 32, **swizzled)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_torchaos_tensors(format, layout, shape):
    pytest.importorskip("torchao")
    x = values(shape)
    q = microscale.quantize(x, format, numerics="torchao", layout=layout)
    ours = to_torchao(q)
    number = None if q.direction is None else torch.tensor(q.global_scale.value)
    theirs = torchaos(x, format, layout, number)
    assert type(ours) is type(theirs) and ours.shape == theirs.shape and ours.dtype == theirs.dtype
    for name in ("qdata", "scale"):
        own, expected = getattr(ours, name), getattr(theirs, name)
        assert (own.dtype, own.shape) == (expected.dtype, expected.shape), name
        assert torch.equal(own.view(torch.uint8), expected.view(torch.uint8)), name
    assert ours.qdata.data_ptr() == q.codes.data_ptr() and ours.scale.data_ptr() == q.scales.data_ptr()
    back = microscale.swizzle(q, "linear")
    assert torch.equal(ours.dequantize(torch.float32), back.dequantize())
    assert torch.equal(ours.dequantize(), back.dequantize(torch.bfloat16))


def test_torchaos_tensors_multiply():
    pytest.importorskip("torchao")
    x, w = values((8, 64)), values((48, 64))
    for format in ("nvfp4", "mxfp4"):
        q = microscale.quantize(w, format, numerics="torchao", **({"global_scale": "none"} if format == "nvfp4" else {}))
        a = microscale.quantize(x, format, numerics="torchao", **({"global_scale": "none"} if format == "nvfp4" else {}))
        if format == "nvfp4":
            # torchao dequantizes weights without activations.
            y = torch.nn.functional.linear(x, to_torchao(q))
            assert torch.equal(y, torch.nn.functional.linear(x, q.dequantize(torch.bfloat16)))
        else:
            y = to_torchao(a) @ to_torchao(q).t()
            assert torch.equal(y, a.dequantize(torch.bfloat16) @ q.dequantize(torch.bfloat16).t())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: microscale.quantize(values((4, 64)), "nvfp4"), "choose the numerics torchao"),
        (lambda: microscale.quantize(values((4, 40)), "mxfp4"), "whole blocks of 32"),
        (lambda: microscale.quantize(values((2, 4, 64)), "mxfp4", layout="swizzled"), "use linear scales"),
    ],
)
def test_what_torchao_cannot_hold(make, message):
    with pytest.raises(microscale.Error, match=message):
        to_torchao(make())


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8-e4m3"])
def test_the_layout_is_that_of_scaled_mm(format):
    """Checked by PyTorch's rules for shapes, strides and dtypes, which need no GPU of compute
    capability 10.0."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def operand(rows):
        q = microscale.quantize(values((rows, 256)), format, numerics="torchao", layout="swizzled")
        return q.typed

    (a, a_scales), (b, b_scales) = operand(130), operand(64)
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in (a, b, a_scales, b_scales)]
        a, b, a_scales, b_scales = parts
        y = torch._scaled_mm(a, b.t(), a_scales, b_scales, out_dtype=torch.bfloat16)
        assert y.shape == (130, 64)
        with pytest.raises(RuntimeError):
            torch._scaled_mm(a, b.t(), a_scales[:-1].contiguous(), b_scales, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_tensors_state(format, dtype):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

    w = values((48, 96), dtype)
    q = microscale.quantize(w, format, numerics="compressed-tensors")
    state = dict(QuantizedLinear(q).state_dict())
    scheme = preset_name_to_scheme({"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}[format], ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(f"{format}-pack-quantized")
    assert set(state) <= set(compressor.compression_param_names(scheme))
    # Its own quantizer and packed form.
    number = None
    if format == "nvfp4":
        number = generate_gparam(*(each.reshape(1) for each in torch.aminmax(w)))
        assert torch.equal(state["weight_global_scale"], number)
    scales, _ = compute_dynamic_scales_and_zp(w, scheme.weights, module=None, global_scale=number)
    given = {"weight": w, "weight_scale": scales, **({} if number is None else {"weight_global_scale": number})}
    theirs = compressor.compress(given, scheme)
    for name, tensor in state.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    back = compressor.decompress(state, scheme)["weight"]
    assert torch.equal(back.float(), q.dequantize(torch.float32).to(back.dtype).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_modelopts_bytes(format, dtype):
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed: its bytes are not compared")
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, NVFP4QTensor

    x = (torch.randn(130, 256, generator=torch.Generator().manual_seed(4)) * 3).to(dtype)
    q = microscale.quantize(x, format, numerics="modelopt")
    if format == "nvfp4":
        theirs, scales, number = NVFP4QTensor.quantize(x, 16)
        assert q.direction == "multiplier" and q.global_scale.value == number.item()
        back = theirs.dequantize(torch.float32, scale=scales, double_scale=number, block_sizes={-1: 16})
    else:
        theirs, scales = MXFP4QTensor.quantize(x, 32)
        back = theirs.dequantize(torch.float32, scale=scales, block_sizes={-1: 32})
    assert torch.equal(q.codes, theirs._quantized_data)
    assert torch.equal(q.scales, scales.view(torch.uint8).reshape(q.scales.shape))
    assert torch.equal(q.dequantize(), back)
