"""Outputs that autograd knows: tensors that it saved, and tensors that require grad."""

import pytest

import microscale

torch = pytest.importorskip("torch")


@pytest.fixture
def q():
    return microscale.quantize(torch.randn(4, 64), "nvfp4")


def writes(q):
    """Each function that writes to a tensor of PyTorch on a CPU, with the shape of that."""
    weights = microscale.quantize_experts(torch.randn(2, 4, 64), "mxfp4")
    x, chosen = torch.randn(3, 64), torch.tensor([[0], [1], [0]])
    return {
        "dequantize": ((4, 64), lambda out: microscale.dequantize(q, out=out)),
        "dequantize of a Quantized": ((4, 64), lambda out: q.dequantize(out=out)),
        "linear": ((3, 4), lambda out: microscale.linear(x, q, out=out)),
        "linear with a bias": ((3, 4), lambda out: microscale.linear(x, q, bias=torch.ones(4), out=out)),
        "gemv": ((4,), lambda out: microscale.gemv(q, microscale.quantize(x[:1], "nvfp4"), out=out)),
        "linear_experts": ((3, 1, 4), lambda out: microscale.linear_experts(x, weights, chosen, out=out)),
    }


@pytest.mark.parametrize("name", ["dequantize", "dequantize of a Quantized", "linear", "linear with a bias", "gemv", "linear_experts"])
def test_outputs_tell_autograd_that_they_changed(q, name):
    shape, write = writes(q)[name]
    out = torch.full(shape, 2.0)
    x = torch.ones(shape, requires_grad=True)
    y = (x * out).sum()
    version = out._version
    assert write(out) is out and out._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    assert x.grad is None
    # Views share the version.
    whole = torch.zeros(2, *shape)
    version = whole._version
    write(whole[1])
    assert whole._version > version and not whole[0].any() and whole[1].any()


@pytest.mark.parametrize("name", ["dequantize", "linear", "gemv", "linear_experts"])
def test_outputs_that_require_grad_are_refused(q, name):
    shape, write = writes(q)[name]
    leaf = torch.full(shape, 2.0, requires_grad=True)
    for out in (leaf, leaf * 1, torch.nn.Parameter(torch.zeros(shape))):
        before = out.detach().clone()
        with pytest.raises(microscale.Error, match=r"out requires grad.*pass out\.detach\(\), or write under torch\.no_grad"):
            write(out)
        assert torch.equal(out, before)
    with torch.no_grad():
        write(leaf)
    assert torch.equal(leaf, write(torch.empty(shape)))
    with torch.inference_mode():
        assert torch.equal(write(torch.empty(shape)), leaf)
        assert write(leaf) is leaf


def test_a_quantized_output_tells_autograd_that_it_changed(q):
    versions = q.codes._version, q.scales._version
    x = torch.randn(4, 64)
    microscale.quantize(x, "nvfp4", out=q)
    assert q.codes._version > versions[0] and q.scales._version > versions[1]
    # Values that are refused may have been written to a part.
    versions = q.codes._version, q.scales._version
    x[3, 63] = torch.nan
    with pytest.raises(microscale.NonFiniteError):
        microscale.quantize(x, "nvfp4", out=q)
    assert q.codes._version > versions[0] and q.scales._version > versions[1]
