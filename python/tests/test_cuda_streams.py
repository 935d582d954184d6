"""Work on GPUs' streams: nothing waits, graphs can be captured, nothing leaks."""

import copy
import gc
import pickle
import resource
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from on_gpu import LONG, captured, same, values, within_bound  # noqa: E402

import microscale  # noqa: E402


def test_nothing_waits():
    x = torch.randn(64, 512, dtype=torch.bfloat16, device="cuda")
    weights = microscale.quantize(torch.randn(128, 512).cuda(), "nvfp4")
    workspace = microscale.workspace(weights, 64)

    def work():
        q = microscale.quantize(x, "nvfp4")
        amax = microscale.amax(x)
        return (
            q,
            microscale.quantize(x, "nvfp4", amax=amax),
            microscale.quantize(x, "mxfp4"),
            microscale.swizzle(q).dequantize(torch.bfloat16),
            microscale.linear(x, weights),
            microscale.linear(x, weights, workspace=workspace),
            microscale.linear(x[:1], weights),
            microscale.gemv(q, microscale.quantize(x[:1], "nvfp4")),
        )

    work()  # Compiles the kernels.
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    work()
    assert not torch.cuda.current_stream().query(), "a call waited for the GPU"
    torch.cuda.synchronize()


def test_a_tensor_that_comes_late_on_another_stream():
    source = values((256, 512), torch.bfloat16)
    there = source.cuda()
    side = torch.cuda.Stream()
    x = torch.zeros_like(there)
    weights = microscale.quantize(torch.randn(64, 512).cuda(), "nvfp4")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        x.copy_(there)
        q = microscale.quantize(x, "nvfp4")
        y = microscale.linear(x, weights)
        assert not side.query()
    torch.cuda.current_stream().wait_stream(side)
    same(q, microscale.quantize(source, "nvfp4"))
    within_bound(y, weights, source)
    # Produced there, used here.
    x.zero_()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        x.copy_(there)
    torch.cuda.current_stream().wait_stream(side)
    same(microscale.quantize(x, "mxfp4"), microscale.quantize(source, "mxfp4"))


@pytest.mark.parametrize(
    "options",
    [
        {"format": "mxfp4"},
        {"format": "mxfp8-e4m3", "layout": "swizzled"},
        {"format": "nvfp4"},
        {"format": "nvfp4", "layout": "swizzled"},
        {"format": "nvfp4", "global_scale": 40.0},
        {"format": "nvfp4", "search": "four-six"},
        {"format": "nvfp4", "non_finite": "saturate"},
    ],
)
def test_graphs_quantize_new_data(options):
    x = values((96, 256), torch.bfloat16).cuda()
    graph, (q, back) = captured(lambda: (q := microscale.quantize(x, **options), q.dequantize(torch.bfloat16)))
    for seed in range(3, 6):
        new = values((96, 256), torch.bfloat16, seed)
        x.copy_(new)
        graph.replay()
        expected = microscale.quantize(new, **options)
        same(q, expected)
        assert torch.equal(back.cpu(), expected.dequantize(torch.bfloat16))


def test_graphs_take_an_amax_from_the_gpu():
    x = values((32, 128)).cuda()
    shared = microscale.amax(x)
    graph, q = captured(lambda: microscale.quantize(x, "nvfp4", amax=shared))
    for factor in (1.0, 3.0):
        shared.words.zero_()
        microscale.amax(x * factor, out=shared)
        graph.replay()
        number = microscale.quantize(x.cpu() * factor, "nvfp4").global_scale
        same(q, microscale.quantize(x.cpu(), "nvfp4", global_scale=number))


@pytest.mark.parametrize("tokens", [1, 8, 9, 64])
@pytest.mark.parametrize("given", [False, True])
def test_graphs_multiply_new_data(tokens, given):
    weights = microscale.quantize(torch.randn(300, 1024).cuda(), "nvfp4")
    x = torch.randn(tokens, 1024, dtype=torch.bfloat16, device="cuda")
    workspace = microscale.workspace(weights, tokens) if given else None
    graph, (y, z) = captured(
        lambda: (microscale.linear(x, weights, workspace=workspace), microscale.linear(-x, weights, workspace=workspace))
    )
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        for _ in range(2):
            graph.replay()
        assert torch.equal(y, microscale.linear(x, weights))
        assert torch.equal(z, microscale.linear(-x, weights))
        within_bound(y, weights, x)


def test_captures_have_workspaces_of_their_own():
    weights = microscale.quantize(torch.randn(300, 1024).cuda(), "nvfp4")
    x = torch.randn(200, 1024, dtype=torch.bfloat16, device="cuda")

    def products():
        # What this leaves in the graph's pool are no zeros.
        torch.full((1 << 25,), 255, dtype=torch.uint8, device="cuda")
        results = []
        for tokens in (16, 9, 200, 64, 16):
            results.append(microscale.linear(x[:tokens], weights))
            torch.full((1 << 25,), 255, dtype=torch.uint8, device="cuda")
        return results

    graphs = [captured(products) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(4):
        x.copy_(torch.randn_like(x))
        torch.cuda.synchronize()
        for _ in range(3):
            for stream, (graph, _) in zip(streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for _, results in graphs:
            for y in results:
                assert torch.equal(y, microscale.linear(x[: len(y)], weights))


def test_what_was_found_in_tensors_is_looked_for_again():
    q = microscale.quantize(torch.randn(8, 64).cuda(), "nvfp4")
    other = microscale.quantize(3 * torch.randn(8, 64).cuda(), "nvfp4")
    before, expected = q.dequantize(), other.dequantize()
    assert torch.equal(q.dequantize(), before)
    q.codes, q.scales, q._global = other.codes, other.scales, other._global
    assert torch.equal(q.dequantize(), expected)
    q.codes.set_(other.codes.clone().fill_(0))
    assert not q.dequantize().any()
    assert torch.equal(pickle.loads(pickle.dumps(other)).dequantize(), copy.deepcopy(other).dequantize())


def test_waiting_is_refused_in_a_capture():
    x = torch.randn(8, 64, device="cuda")
    microscale.quantize(x, "nvfp4", non_finite="error")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        for options in ({"non_finite": "error"}, {"report": True}):
            with pytest.raises(microscale.Error, match="a graph is being captured.*propagate"):
                microscale.quantize(x, **options)
    graph.replay()
    assert torch.equal(y, x + 1)


def test_a_first_call_in_a_capture():
    code = """if True:
        import torch, microscale
        x = torch.randn(32, 256, dtype=torch.bfloat16, device="cuda")
        w = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q = microscale.quantize(w)
            y = microscale.linear(x, q)
        graph.replay()
        assert torch.equal(q.codes, microscale.quantize(w).codes)
        assert torch.equal(y, microscale.linear(x, q))
        print("fine")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


def resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def test_ten_thousand_calls_leave_nothing():
    x = torch.randn(32, 64, dtype=torch.bfloat16, device="cuda")
    weights = microscale.quantize(torch.randn(64, 64).cuda(), "nvfp4")

    def call(times):
        for _ in range(times):
            q = microscale.quantize(x, "nvfp4")
            q.dequantize()
            microscale.linear(x, weights)
            microscale.amax(x)
            microscale.swizzle(q)
            try:
                microscale.quantize(x, "nvfp4", global_scale=-1.0)
            except microscale.Error:
                pass
        for _ in range(times // 20):
            microscale.quantize(x, "nvfp4", non_finite="error")
        torch.cuda.synchronize()

    call(200)
    gc.collect()
    references, before = sys.getrefcount(x), (torch.cuda.memory_allocated(), resident(), torch.cuda.mem_get_info()[0])
    call(2000)
    gc.collect()
    after = (torch.cuda.memory_allocated(), resident(), torch.cuda.mem_get_info()[0])
    assert sys.getrefcount(x) == references
    assert after[0] == before[0]
    assert after[1] - before[1] < 8 << 20
    assert before[2] - after[2] < 64 << 20


def test_threads_with_streams_of_their_own():
    weights = microscale.quantize(torch.randn(256, 512).cuda(), "nvfp4")
    inputs = [torch.randn(64, 512, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    expected = [(microscale.quantize(x, "nvfp4").cpu(), microscale.linear(x, weights)) for x in inputs]
    torch.cuda.synchronize()
    wrong = []

    def work(x, right):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                q, y = microscale.quantize(x, "nvfp4"), microscale.linear(x, weights)
                here = q.cpu()
                if not (torch.equal(here.codes, right[0].codes) and torch.equal(y, right[1])):
                    wrong.append(q)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
