"""KV caches in the memory of NVIDIA GPUs, compared with the CPU's."""

import pytest

torch = pytest.importorskip("torch")

from on_gpu import captured  # noqa: E402

import microscale  # noqa: E402
from microscale import ops  # noqa: E402

PAGES, SIZE, HEADS, DIM, TOKENS = 9, 16, 4, 128, 70
SCALES = torch.tensor([0.0123, 0.5])
FORMATS, LAYOUTS, HALVES = ["fp8", "nvfp4"], ["NHD", "HND"], [torch.float16, torch.bfloat16]


def cache_of(format, layout, alternate=False):
    """Codes of K and of V, and their block scales in NVFP4. Pages may alternate in one tensor."""
    inner = (SIZE, HEADS) if layout == "NHD" else (HEADS, SIZE)
    widths = [DIM] if format == "fp8" else [DIM // 2, DIM // 16]
    cache = []
    for width in widths:
        if alternate:
            cache += torch.full((PAGES, 2, *inner, width), 9, dtype=torch.uint8, device="cuda").unbind(1)
        else:
            cache += [torch.full((PAGES, *inner, width), 9, dtype=torch.uint8, device="cuda") for _ in range(2)]
    return cache


def rows(dtype):
    torch.manual_seed(6)
    # K and V are parts of one product, as in attention.
    both = torch.randn(TOKENS, 3 * HEADS, DIM).to(dtype)
    slots = torch.randperm(PAGES * SIZE)[:TOKENS]
    slots[::7] = -1
    return both[:, HEADS : 2 * HEADS], both[:, 2 * HEADS :], slots


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", HALVES)
def test_bytes_and_values_are_the_cpus(format, layout, alternate, dtype):
    key, value, slots = rows(dtype)
    there = cache_of(format, layout, alternate)
    here = [part.cpu().contiguous() for part in there]
    for hadamard in (0, 128):
        options = {"kv_layout": layout, "hadamard": hadamard}
        ops.append_kv(key, value, *here[:2], slots, SCALES, *here[2:], **options)
        of_gpu = key.cuda(), value.cuda(), *there[:2], slots.cuda(), SCALES.cuda(), *there[2:]
        ops.append_kv(*of_gpu, **options)
        assert all(torch.equal(part.cpu(), own) for part, own in zip(there, here))
    for numbers in (slots, slots.int()):
        expected = ops.gather_kv(*here[:2], numbers, SCALES, dtype, *here[2:], kv_layout=layout)
        found = ops.gather_kv(*there[:2], numbers.cuda(), SCALES.cuda(), dtype, *there[2:], kv_layout=layout)
        assert all(torch.equal(x.cpu(), own) for x, own in zip(found, expected))
    tables, lengths = torch.tensor([[2, 0, 7], [3, 8, 1]], dtype=torch.int32), torch.tensor([40, 5], dtype=torch.int32)
    expected = ops.gather_kv(*here[:2], tables, SCALES, dtype, *here[2:], lengths=lengths, kv_layout=layout)
    found = ops.gather_kv(
        *there[:2], tables.cuda(), SCALES.cuda(), dtype, *there[2:], lengths=lengths.cuda(), kv_layout=layout
    )
    assert all(torch.equal(x.cpu(), own) for x, own in zip(found, expected))


@pytest.mark.parametrize("dtype", HALVES)
def test_vectors_outside_of_a_cache_are_the_cpus(dtype):
    x, scale = rows(dtype)[0].flatten(0, 1), SCALES[:1]
    expected = ops.nvfp4_kv_quantize(x, scale)
    graph, found = captured(lambda of=x.cuda(), by=scale.cuda(): ops.nvfp4_kv_quantize(of, by))
    graph.replay()
    assert all(torch.equal(part.cpu(), own) for part, own in zip(found, expected))
    values = ops.nvfp4_kv_dequantize(*found, scale.cuda(), dtype)
    assert torch.equal(values.cpu(), ops.nvfp4_kv_dequantize(*expected, scale, dtype))


@pytest.mark.parametrize("format", FORMATS)
def test_calls_are_captured_and_compiled(format):
    key, value, slots = (x.cuda() for x in rows(torch.bfloat16))
    cache, scales = cache_of(format, "NHD"), SCALES.cuda()

    def step(key, value, slots):
        ops.append_kv(key, value, *cache[:2], slots, scales, *cache[2:])
        return ops.gather_kv(*cache[:2], slots, scales, torch.bfloat16, *cache[2:])

    expected = step(key, value, slots)
    after = [part.clone() for part in cache]
    graph, found = captured(lambda: step(key, value, slots))
    for part in cache:
        part.fill_(9)
    graph.replay()
    assert all(map(torch.equal, found, expected)) and all(map(torch.equal, cache, after))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(key, value, slots), expected))


def test_what_does_not_fit_is_refused():
    key, value, slots = (x.cuda() for x in rows(torch.bfloat16))
    cache, scales = cache_of("fp8", "NHD"), SCALES.cuda()
    with pytest.raises(microscale.Error, match="shares memory"):
        ops.append_kv(key, value, cache[0], cache[0], slots, scales)
    with pytest.raises(TypeError, match="float16 and bfloat16"):
        ops.append_kv(key.float(), value.float(), *cache, slots, scales)
    # Slots that are not in the cache are skipped.
    before = [part.clone() for part in cache]
    ops.append_kv(key, value, *cache, torch.full_like(slots, PAGES * SIZE), scales)
    assert all(map(torch.equal, cache, before))
