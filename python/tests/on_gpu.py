"""What tests of GPUs share. They are skipped without a GPU, but an error where
MICROSCALE_REQUIRE_GPU is set."""

import os

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    if os.environ.get("MICROSCALE_REQUIRE_GPU"):
        raise RuntimeError("MICROSCALE_REQUIRE_GPU is set, and PyTorch finds no GPU")
    pytest.skip("no GPU", allow_module_level=True)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: Clock cycles of a GPU in some tens of milliseconds.
LONG = 50_000_000


def values(shape, dtype=torch.float32, seed=1):
    """Values of many magnitudes with zeros among them, on a CPU."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-6, 6, shape, generator=generator).float())
    x[torch.rand(shape, generator=generator) < 0.1] = 0
    return x.to(dtype)


def same(found, expected):
    """Compares a result on a GPU with one on a CPU."""
    assert found.codes.is_cuda and found.scales.is_cuda
    assert (found.shape, found.format, found.layout) == (expected.shape, expected.format, expected.layout)
    assert found.direction == expected.direction
    here = found.cpu()
    assert torch.equal(here.codes, expected.codes) and torch.equal(here.scales, expected.scales)
    assert here.global_scale == expected.global_scale


def within_bound(y, weights, x):
    """Compares a product with that in float64 of the dequantized weights, under the bound of sums
    in tensor cores."""
    w = weights.cpu().dequantize().double()
    x, y = x.cpu().double(), y.cpu()
    exact, magnitude = x @ w.T, x.abs() @ w.abs().T
    gamma = 18 * (w.shape[1] / 16 + 2) * 2.0**-23
    half_ulp = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}[y.dtype]
    off = (y.double() - exact).abs()
    bound = gamma * magnitude + half_ulp * exact.abs() + 2.0**-24
    assert bool((off <= bound).all()), f"{(off / bound).max().item():.2f} times the bound"


def captured(work):
    """A graph of work, and its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph, results
