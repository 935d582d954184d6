"""KV caches: `append_kv` and `gather_kv` of `microscale.ops`. Skipped where PyTorch is not
installed."""

import pytest

import microscale
from microscale import GlobalScale

torch = pytest.importorskip("torch")

from microscale import ops  # noqa: E402

PAGES, SIZE, HEADS, DIM = 4, 8, 3, 48
SCALES = torch.tensor([0.0123, 0.5])
SLOTS = torch.tensor([17, 3, -1, 31, 4])
LAYOUTS = ["NHD", "HND"]
FORMATS = ["fp8", "nvfp4"]


def cache_of(format, layout, fill=0):
    """Codes of K and of V, and their block scales in NVFP4."""
    inner = (SIZE, HEADS) if layout == "NHD" else (HEADS, SIZE)
    widths = [DIM, DIM] if format == "fp8" else [DIM // 2, DIM // 2, DIM // 16, DIM // 16]
    return [torch.full((PAGES, *inner, width), fill, dtype=torch.uint8) for width in widths]


def at(part, slot, layout):
    """The vectors of a slot, `[heads, width]`."""
    page = part[slot // SIZE]
    return page[slot % SIZE] if layout == "NHD" else page[:, slot % SIZE]


def rows(dtype=torch.float32, tokens=len(SLOTS)):
    torch.manual_seed(5)
    return torch.randn(tokens, HEADS, DIM).to(dtype), (torch.randn(tokens, HEADS, DIM) * 8).to(dtype)


def append(key, value, cache, slots=SLOTS, **options):
    ops.append_kv(key, value, *cache[:2], slots, SCALES, *cache[2:], **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_vectors_outside_of_a_cache_have_its_bytes_and_values(dtype):
    cache = cache_of("nvfp4", "NHD")
    key, value = rows(dtype)
    append(key, value, cache)
    back = ops.gather_kv(*cache[:2], SLOTS, SCALES, dtype, *cache[2:])
    for i, x in enumerate((key, value)):
        codes, scales = ops.nvfp4_kv_quantize(x.reshape(-1, DIM), SCALES[i : i + 1])
        values = ops.nvfp4_kv_dequantize(codes, scales.view(torch.float8_e4m3fn), SCALES[i : i + 1], dtype)
        for row, slot in enumerate(SLOTS.tolist()):
            if slot >= 0:
                assert torch.equal(at(cache[i], slot, "NHD"), codes.view(-1, HEADS, DIM // 2)[row])
                assert torch.equal(at(cache[i + 2], slot, "NHD"), scales.view(-1, HEADS, DIM // 16)[row])
                assert torch.equal(back[i][row], values.view(-1, HEADS, DIM)[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_has_pytorchs_codes(layout, dtype):
    cache = cache_of("fp8", layout, 0x11)
    key, value = rows(dtype)
    append(key, value, cache, kv_layout=layout)
    for part, x, scale in zip(cache, (key, value), SCALES):
        codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        untouched = set(range(PAGES * SIZE)) - set(SLOTS.tolist())
        for row, slot in enumerate(SLOTS.tolist()):
            assert slot < 0 or torch.equal(at(part, slot, layout), codes[row])
        assert all((at(part, slot, layout) == 0x11).all() for slot in untouched)
    back = ops.gather_kv(*cache, SLOTS, SCALES, dtype, kv_layout=layout)
    for found, x, scale in zip(back, (key, value), SCALES):
        codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        expected = (codes.float() * scale).to(dtype)
        expected[2] = 0
        assert found.dtype == dtype and torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nvfp4_has_the_bytes_of_quantized_activations(layout, dtype):
    cache = cache_of("nvfp4", layout, 0x11)
    key, value = rows(dtype)
    append(key, value, cache, kv_layout=layout)
    back = ops.gather_kv(*cache[:2], SLOTS.int(), SCALES, torch.float32, *cache[2:], kv_layout=layout)
    for i, (x, scale) in enumerate(zip((key, value), SCALES.tolist())):
        # The cache divides by the reciprocal of the scale.
        given = GlobalScale(scale, "multiplier")
        codes, scales, _ = microscale.quantize_activations(x, "nvfp4", scale=given)
        for row, slot in enumerate(SLOTS.tolist()):
            if slot >= 0:
                assert torch.equal(at(cache[i], slot, layout), codes[row])
                assert torch.equal(at(cache[i + 2], slot, layout), scales[row])
        expected = microscale.Quantized(codes, scales, format="nvfp4", global_scale=given).dequantize()
        expected[2] = 0
        assert torch.equal(back[i], expected)


@pytest.mark.parametrize("format", FORMATS)
def test_page_tables_give_sequences(format):
    cache = cache_of(format, "NHD")
    key, value = rows(tokens=PAGES * SIZE)
    append(key, value, cache, torch.arange(PAGES * SIZE))
    every = ops.gather_kv(*cache[:2], torch.arange(PAGES * SIZE), SCALES, torch.float32, *cache[2:])
    tables, lengths = torch.tensor([[2, 0], [3, -1]], dtype=torch.int32), torch.tensor([11, 5], dtype=torch.int32)
    found = ops.gather_kv(*cache[:2], tables, SCALES, torch.float32, *cache[2:], lengths=lengths)
    for x, all_rows in zip(found, every):
        assert x.shape == (2, 2 * SIZE, HEADS, DIM)
        paged = all_rows.view(PAGES, SIZE, HEADS, DIM)
        assert torch.equal(x[0, :11], torch.cat([paged[2], paged[0]])[:11]) and not x[0, 11:].any()
        assert torch.equal(x[1, :5], paged[3, :5]) and not x[1, 5:].any()


def test_a_transform_of_k_is_orthogonal_and_leaves_v():
    plain, turned = cache_of("fp8", "NHD"), cache_of("fp8", "NHD")
    key, value = rows()
    append(key, value, plain)
    append(key, value, turned, hadamard=16)
    assert torch.equal(plain[1], turned[1]) and not torch.equal(plain[0], turned[0])
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) / 2**0.5
    found, _ = ops.gather_kv(*turned, SLOTS, SCALES, torch.float32)
    back = (found.view(-1, HEADS, 3, 16) @ matrix).view(-1, HEADS, DIM)
    kept = SLOTS >= 0
    assert (back[kept] - key[kept]).abs().max() < 0.5
    assert (found[kept] - key[kept]).abs().max() > 1


def test_rows_may_be_apart_and_one_page_is_a_cache_without_pages():
    both = torch.randn(5, 2 * HEADS + 1, DIM)
    key, value = both[:, :HEADS], both[:, HEADS : 2 * HEADS]
    pages, flat = cache_of("fp8", "NHD"), [torch.zeros((PAGES * SIZE, HEADS, DIM), dtype=torch.uint8) for _ in range(2)]
    append(key, value, pages)
    append(key, value, [part.unsqueeze(0) for part in flat])
    assert all(torch.equal(part.view(-1, HEADS, DIM), own) and own.any() for part, own in zip(pages, flat))
    typed = [part.view(torch.float8_e4m3fn) for part in cache_of("fp8", "NHD")]
    append(key, value, typed)
    assert torch.equal(typed[0].view(torch.uint8), pages[0])


def test_vllms_operator_is_the_same():
    cache, other = cache_of("fp8", "NHD"), cache_of("fp8", "NHD")
    key, value = rows(torch.bfloat16)
    append(key, value, cache)
    padded = (torch.cat([x, x]) for x in (key, value))
    ops.reshape_and_cache_flash(*padded, *other, SLOTS, "fp8", SCALES[0], SCALES[1:])
    assert all(torch.equal(part, own) for part, own in zip(cache, other))
    with pytest.raises(microscale.Error, match="fp8_e5m2"):
        ops.reshape_and_cache_flash(key, value, *other, SLOTS, "fp8_e5m2", SCALES[0], SCALES[1:])


@pytest.mark.parametrize("format", FORMATS)
def test_the_operators_are_what_torch_asks_of_them(format):
    cache = cache_of(format, "NHD")
    key, value = rows(torch.bfloat16)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    append_kv = torch.ops.microscale.append_kv
    # Changed arguments have no defaults here.
    block_scales = cache[2:] or (None, None)
    torch.library.opcheck(append_kv, (key, value, *cache[:2], SLOTS, SCALES, *block_scales), test_utils=checks)
    gather = torch.ops.microscale.gather_kv
    torch.library.opcheck(gather, (*cache[:2], SLOTS, SCALES, torch.bfloat16, *cache[2:]), test_utils=checks)

    def step(key, value, *cache):
        append(key, value, cache)
        return ops.gather_kv(*cache[:2], SLOTS, SCALES, torch.bfloat16, *cache[2:])

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    other = [part.clone() for part in cache]
    assert all(map(torch.equal, compiled(key, value, *cache), step(key, value, *other)))
    assert all(map(torch.equal, cache, other)) and cache[0].any()


def test_what_does_not_fit_is_refused():
    cache, nvfp4 = cache_of("fp8", "NHD"), cache_of("nvfp4", "NHD")
    key, value = rows()
    refused = [
        (lambda: append(key, value, cache, SLOTS[:3]), "must have .5."),
        (lambda: append(key, value, cache, SLOTS + 100), "slot 117"),
        (lambda: append(key[..., :32], value, cache), "key has shape"),
        (lambda: append(key, value, nvfp4[:3] + [nvfp4[3][..., :2]]), "value_block_scales has shape"),
        (lambda: append(key, value, [*nvfp4[:3], None]), "block scales are missing"),
        (lambda: append(key, value, [cache[0], cache[0]]), "shares memory"),
        (lambda: append(key, value, cache, kv_layout="NDH"), "pass one of NHD, HND"),
        (lambda: append(key, value, cache, hadamard=24), "Hadamard transform of 16, 32, 64 or 128"),
        (lambda: append(key, value, torch.zeros(PAGES, 2, SIZE, HEADS, DIM, dtype=torch.uint8).unbind(1)), "contiguous"),
        (lambda: ops.gather_kv(*cache, SLOTS, -SCALES), "scale 0 is"),
        (lambda: ops.gather_kv(*cache, torch.zeros((2, 1), dtype=torch.int32), SCALES, lengths=torch.zeros(3).int()), "page tables"),
    ]
    for call, message in refused:
        with pytest.raises(microscale.Error, match=message):
            call()
    with pytest.raises(TypeError, match="int32"):
        append(key, value, cache, SLOTS.float())
