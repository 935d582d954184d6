"""Operators of PyTorch for paged KV caches. :mod:`microscale.ops` has them."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from microscale import _arrays, _gpu, _microscale
from microscale._activations import quantize_activations
from microscale._errors import Error
from microscale._registration import SHAPES_ONLY, operator
from microscale._tensors import Quantized, dequantize
from microscale._types import GlobalScale

_CACHE = ("key_cache", "value_cache", "key_block_scales", "value_block_scales")


@operator(mutates_args=_CACHE)
def append_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    scales: Tensor,
    key_block_scales: Tensor | None = None,
    value_block_scales: Tensor | None = None,
    kv_layout: str = "NHD",
    hadamard: int = 0,
) -> None:
    """Quantizes rows of K and V, and puts them into slots of a paged cache.

    The cache is in NVFP4 if there are block scales, in the layout of FlashInfer, and otherwise in
    FP8. On GPUs pages may have gaps, and pages of K and V may alternate in one tensor. A cache
    without pages is one page: pass `cache.unsqueeze(0)`, and positions as slots.

        cache = torch.zeros(2, 4, 16, 8, 64, dtype=torch.uint8)             # K and V, pages, page_size, heads, head_dim
        key, value, scales = torch.ones(3, 8, 64), torch.ones(3, 8, 64), torch.tensor([0.01, 0.02])
        microscale.ops.append_kv(key, value, cache[0], cache[1], torch.tensor([17, 18, -1]), scales)
        assert cache[0, 1, 1].any() and not cache[0, 1, 3].any()

    Args:
        key: `[tokens, heads, head_dim]`; rows may be apart. `head_dim` is a multiple of 16.
        value: the same for V.
        key_cache: codes, uint8 or float8_e4m3fn, `[pages, page_size, heads, head_dim]`, in NVFP4
            uint8 `[..., head_dim / 2]`. For the layout `HND` `[pages, heads, page_size, ...]`.
        value_cache: the same for V.
        slot_mapping: int32 or int64 `[tokens]`: page * page_size + the place in the page. Negative
            slots are skipped. On a GPU, so are slots that are not in the cache.
        scales: float32 `[2]`, the global scales of K and V, which multiply codes. Values on a GPU are
            not checked.
        key_block_scales: for NVFP4 uint8 or float8_e4m3fn `[..., head_dim / 16]`.
        value_block_scales: the same for V.
        kv_layout: `NHD` or `HND`.
        hadamard: the width of a Hadamard transform of K, from 16 to 128, or 0. Transform queries in
            the same way.
    """
    if SHAPES_ONLY.get():
        return
    parts = _cache_parts(key_cache, value_cache, key_block_scales, value_block_scales)
    rows = _arrays.values(key.detach(), "key"), _arrays.values(value.detach(), "value")
    if key_cache.is_cuda:
        _gpu.require()
        _microscale.gpu_append_kv(*rows, parts, slot_mapping, scales, kv_layout, hadamard, _gpu.stream(key_cache))
    else:
        _microscale.append_kv(*rows, parts, slot_mapping, scales.tolist(), kv_layout, hadamard)


@operator()
def gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    scales: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    key_block_scales: Tensor | None = None,
    value_block_scales: Tensor | None = None,
    lengths: Tensor | None = None,
    kv_layout: str = "NHD",
) -> tuple[Tensor, Tensor]:
    """Dequantizes slots of a paged cache to rows of K and V.

    A transform of K is not undone.

        cache, scales = torch.full((2, 4, 16, 8, 64), 0x38, dtype=torch.uint8), torch.tensor([0.5, 2.0])    # ones in FP8
        key, value = microscale.ops.gather_kv(cache[0], cache[1], torch.tensor([17, 18, -1]), scales)
        assert key.shape == (3, 8, 64) and key[0, 0, 0] == 0.5 and value[1, 0, 0] == 2 and not value[2].any()

    Args:
        key_cache: as for :func:`append_kv`.
        value_cache: as for :func:`append_kv`.
        slots: int32 or int64 `[tokens]`; negative ones give zeros. With `lengths` page tables
            `[sequences, pages]`.
        scales: float32 `[2]`, as for :func:`append_kv`.
        dtype: of the results: float16 or bfloat16, on CPUs float32 too.
        key_block_scales: for NVFP4, as for :func:`append_kv`.
        value_block_scales: for NVFP4, as for :func:`append_kv`.
        lengths: int32 `[sequences]`, the tokens of each sequence, for page tables.
        kv_layout: `NHD` or `HND`.

    Returns:
        K and V, `[tokens, heads, head_dim]`. With `lengths` `[sequences, pages * page_size, heads,
        head_dim]`, with zeros from the length of a sequence on.
    """
    parts = _cache_parts(key_cache, value_cache, key_block_scales, value_block_scales)
    if key_cache.dim() != 4:
        raise Error(f"key_cache has shape {list(key_cache.shape)} and must have four dimensions")
    page_size, heads = key_cache.shape[1:3] if kv_layout == "NHD" else (key_cache.shape[2], key_cache.shape[1])
    head_dim = key_cache.shape[3] * (1 if key_block_scales is None else 2)
    leading = slots.shape if lengths is None else (*slots.shape[:1], slots.shape[-1] * page_size)
    key, value = (key_cache.new_zeros((*leading, heads, head_dim), dtype=dtype) for _ in range(2))
    if SHAPES_ONLY.get():
        return key, value
    rows = key.view(-1, heads, head_dim), value.view(-1, heads, head_dim)
    if key_cache.is_cuda:
        _gpu.require()
        _microscale.gpu_gather_kv(parts, slots, lengths, scales, kv_layout, *rows, _gpu.stream(key))
    else:
        _microscale.gather_kv(parts, slots, lengths, scales.tolist(), kv_layout, *rows)
    return key, value


@operator()
def nvfp4_kv_quantize(input: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes vectors of K or V to NVFP4, as FlashInfer's `nvfp4_kv_quantize`.

    It gives the bytes of :func:`append_kv`. FlashInfer has it from compute capability 10.0 on, and
    multiplies by approximate reciprocals.

        codes, scales = microscale.ops.nvfp4_kv_quantize(torch.ones(3, 64), torch.tensor([0.01]))
        assert codes.shape == (3, 32) and scales.shape == (3, 4)

    Args:
        input: `[M, K]`, where K is a multiple of 16.
        global_scale: float32 `[1]`, which multiplies codes. Its value on a GPU is not checked.

    Returns:
        Codes, uint8 `[M, K / 2]`, and E4M3 scales in linear order, uint8 `[M, K / 16]`.
    """
    if input.dim() != 2 or input.shape[1] % 16:
        raise Error(f"the input has shape {list(input.shape)} and must be [M, K], where K is a multiple of 16")
    rows, columns = input.shape
    if SHAPES_ONLY.get():
        return (
            input.new_empty((rows, columns // 2), dtype=torch.uint8),
            input.new_empty((rows, columns // 16), dtype=torch.uint8),
        )
    x = input.detach() if input.stride(-1) == 1 else input.detach().contiguous()
    codes, scales, _ = quantize_activations(x, "nvfp4", scale=GlobalScale(global_scale, "multiplier"))
    return codes, scales


@operator()
def nvfp4_kv_dequantize(
    fp4_data: Tensor,
    block_scales: Tensor,
    global_scale: Tensor,
    output_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Dequantizes vectors of K or V from NVFP4, as FlashInfer's `nvfp4_kv_dequantize`.

    For the pages of a cache call :func:`gather_kv`, which computes the same.

        codes, scales = torch.full((3, 32), 0x22, dtype=torch.uint8), torch.full((3, 4), 0x38, dtype=torch.uint8)
        y = microscale.ops.nvfp4_kv_dequantize(codes, scales, torch.tensor([0.5]))
        assert y.shape == (3, 64) and (y == 0.5).all()

    Args:
        fp4_data: codes, uint8 `[M, K / 2]`, where K is a multiple of 16.
        block_scales: E4M3 in linear order, uint8 or float8_e4m3fn `[M, K / 16]`.
        global_scale: float32 `[1]`, which multiplies codes.
        output_dtype: bfloat16, float16 or float32.

    Returns:
        The values, `[M, K]`.
    """
    if fp4_data.dim() != 2 or fp4_data.shape[1] % 8:
        raise Error(f"fp4_data has shape {list(fp4_data.shape)} and must be [M, K / 2], where K is a multiple of 16")
    if SHAPES_ONLY.get():
        return fp4_data.new_empty((fp4_data.shape[0], 2 * fp4_data.shape[1]), dtype=output_dtype)
    scale = GlobalScale(global_scale.detach(), "multiplier")
    q = Quantized(fp4_data, block_scales.view(torch.uint8), format="nvfp4", global_scale=scale)
    return cast(Tensor, dequantize(q, output_dtype))


def _cache_parts(*parts: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the codes and block scales of a cache as bytes."""
    return tuple(None if part is None else part.view(torch.uint8) for part in parts)


@operator(mutates_args=("key_cache", "value_cache"))
def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Quantizes rows of K and V to FP8 and puts them into slots of a paged cache, as vLLM's
    `reshape_and_cache_flash`.

    vLLM divides approximately in some of its kernels. It has the layout `HND` in the strides of the
    cache; call :func:`append_kv` for that.

        cache = torch.zeros(2, 4, 16, 8, 64, dtype=torch.uint8)
        key, one = torch.ones(3, 8, 64), torch.tensor([1.0])
        microscale.ops.reshape_and_cache_flash(key, key, cache[0], cache[1], torch.tensor([0, 1, 2]), "fp8", one, one)
        assert (cache[:, 0, :3] == 0x38).all()

    Args:
        key: `[tokens, heads, head_dim]`. Rows from the number of slots on are left out.
        value: the same for V.
        key_cache: uint8 or float8_e4m3fn `[pages, page_size, heads, head_dim]`.
        value_cache: the same for V.
        slot_mapping: int64 `[tokens]`, as for :func:`append_kv`.
        kv_cache_dtype: `fp8` or `fp8_e4m3`.
        k_scale: float32 `[1]`, which multiplies codes of K.
        v_scale: the same for V.
    """
    if kv_cache_dtype not in ("fp8", "fp8_e4m3"):
        raise Error(f"kv_cache_dtype is {kv_cache_dtype!r}; pass 'fp8' or 'fp8_e4m3'")
    count, scales = slot_mapping.shape[0], torch.cat([k_scale.reshape(1), v_scale.reshape(1)])
    append_kv(key[:count], value[:count], key_cache, value_cache, slot_mapping, scales)
