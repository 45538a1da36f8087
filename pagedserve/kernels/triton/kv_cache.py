"""Writing keys and values into the paged cache, in any of its formats."""

from __future__ import annotations

from itertools import product

import torch
import triton
import triton.language as tl

from pagedserve.kernels import reference
from pagedserve.kernels.triton.arithmetic import narrow, round_half_even
from pagedserve.kernels.triton.variants import Launch, Variant, type_name

_TILE = 2048  # elements of K (and of V) that a program writes at once


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def write_kv_kernel(
    key, value,  # [num_tokens, num_kv_heads, head_dim]
    key_cache, value_cache,  # codes [num_blocks, num_kv_heads, block_size, head_dim]
    key_scales, value_scales,  # fp32 [num_blocks, num_kv_heads, block_size] of an 8-bit cache, else None
    slot_mapping,  # int64 [num_tokens]
    key_token_stride, value_token_stride, cache_block_stride, cache_head_stride, cache_token_stride,
    scale_block_stride, scale_head_stride, scale_token_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One token, HEADS heads of it. Grid (num_tokens, ceil(NUM_HEADS / HEADS))."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    mask = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    places = block * cache_block_stride + heads * cache_head_stride + offset * cache_token_stride
    scale_places = block * scale_block_stride + heads * scale_head_stride + offset * scale_token_stride
    within = (heads * HEAD_DIM)[:, None] + dims[None, :]
    k = tl.load(key + token * key_token_stride + within, mask=mask, other=0.0).to(tl.float32)
    _write_heads(k, key_cache, key_scales, places, scale_places, dims, mask, heads < NUM_HEADS, FORMAT)
    v = tl.load(value + token * value_token_stride + within, mask=mask, other=0.0).to(tl.float32)
    _write_heads(v, value_cache, value_scales, places, scale_places, dims, mask, heads < NUM_HEADS, FORMAT)


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def rotate_and_write_kernel(
    qkv,  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]
    positions,  # int64 [num_tokens]
    cos_sin,  # [max_position, ROTARY_DIM]
    key_cache, value_cache,  # codes [num_blocks, num_kv_heads, block_size, head_dim]
    key_scales, value_scales,  # fp32 [num_blocks, num_kv_heads, block_size] of an 8-bit cache, else None
    slot_mapping,  # int64 [num_tokens]
    qkv_token_stride, cos_sin_stride, cache_block_stride, cache_head_stride, cache_token_stride,
    scale_block_stride, scale_head_stride, scale_token_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rotates queries in place; rotates keys and writes them and the values into the cache.

    One token, HEADS query heads or KV_HEADS of K or V: QUERY_PARTS + 2 * KV_PARTS of them. Grid (num_tokens, parts)."""
    QUERY_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + KV_HEADS - 1) // KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = qkv + token * qkv_token_stride
    half = tl.arange(0, HALF)
    angles = cos_sin + tl.load(positions + token) * cos_sin_stride + half
    cos = tl.load(angles, mask=half < ROTARY_DIM // 2, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles + ROTARY_DIM // 2, mask=half < ROTARY_DIM // 2, other=0.0).to(tl.float32)[None, :]
    if part < QUERY_PARTS:
        heads = part * HEADS + tl.arange(0, HEADS)
        mask = (heads < NUM_HEADS)[:, None] & (half < ROTARY_DIM // 2)[None, :]
        place = row + (heads * HEAD_DIM)[:, None] + half[None, :]
        first, second = _rotated(place, cos, sin, mask, ROTARY_DIM)
        tl.store(place, first, mask=mask)
        tl.store(place + ROTARY_DIM // 2, second, mask=mask)
        return
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    heads = (part - QUERY_PARTS) % KV_PARTS * KV_HEADS + tl.arange(0, KV_HEADS)
    real = heads < NUM_KV_HEADS
    places = block * cache_block_stride + heads * cache_head_stride + offset * cache_token_stride
    scale_places = block * scale_block_stride + heads * scale_head_stride + offset * scale_token_stride
    if part < QUERY_PARTS + KV_PARTS:
        mask = real[:, None] & (half < ROTARY_DIM // 2)[None, :]
        row += NUM_HEADS * HEAD_DIM
        first, second = _rotated(row + (heads * HEAD_DIM)[:, None] + half[None, :], cos, sin, mask, ROTARY_DIM)
        first, second = first.to(tl.float32), second.to(tl.float32)
        limit = tl.maximum(tl.max(magnitude(first), axis=1), tl.max(magnitude(second), axis=1))
        if ROTARY_DIM < HEAD_DIM:
            rest = tl.arange(0, REST)
            rest_mask = real[:, None] & (rest < HEAD_DIM - ROTARY_DIM)[None, :]
            passed = tl.load(
                row + (heads * HEAD_DIM)[:, None] + (ROTARY_DIM + rest)[None, :], mask=rest_mask, other=0.0
            ).to(tl.float32)
            limit = tl.maximum(limit, tl.max(magnitude(passed), axis=1))
        factor = _write_scales(limit, key_scales, scale_places, real, FORMAT)
        _write_codes(first, key_cache, places, half, mask, factor, FORMAT)
        _write_codes(second, key_cache, places, ROTARY_DIM // 2 + half, mask, factor, FORMAT)
        if ROTARY_DIM < HEAD_DIM:
            _write_codes(passed, key_cache, places, ROTARY_DIM + rest, rest_mask, factor, FORMAT)
    else:
        dims = tl.arange(0, DIM)
        whole = real[:, None] & (dims < HEAD_DIM)[None, :]
        row += (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
        v = tl.load(row + (heads * HEAD_DIM)[:, None] + dims[None, :], mask=whole, other=0.0).to(tl.float32)
        _write_heads(v, value_cache, value_scales, places, scale_places, dims, whole, real, FORMAT)


@triton.jit
def _rotated(place, cos, sin, mask, ROTARY_DIM: tl.constexpr):
    """Both halves of heads at `place`, rotated, in their type. A program reads both before it writes either."""
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + ROTARY_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    DTYPE: tl.constexpr = place.dtype.element_ty
    return narrow(first * cos - second * sin, DTYPE), narrow(second * cos + first * sin, DTYPE)


@triton.jit
def _write_heads(x, cache, scales, places, scale_places, dims, mask, real, FORMAT: tl.constexpr):
    """Whole heads x, fp32 [heads, dims], of one token."""
    factor = _write_scales(tl.max(magnitude(x), axis=1), scales, scale_places, real, FORMAT)
    _write_codes(x, cache, places, dims, mask, factor, FORMAT)


@triton.jit
def _write_scales(limit, scales, scale_places, real, FORMAT: tl.constexpr):
    """What the heads' codes are multiplied by."""
    if FORMAT == "float":
        return limit
    else:
        factor, scale = quantization(limit, FORMAT)
        tl.store(scales + scale_places, scale, mask=real)
        return factor


@triton.jit
def _write_codes(x, cache, places, dims, mask, factor, FORMAT: tl.constexpr):
    place = cache + places[:, None] + dims[None, :]
    if FORMAT == "float":
        if cache.dtype.element_ty == tl.float16:  # held within its range; NaN stays
            x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
        tl.store(place, narrow(x, cache.dtype.element_ty), mask=mask)
    else:
        tl.store(place, encode(x, factor[:, None], FORMAT), mask=mask)


@triton.jit
def magnitude(x):
    """|x|, where NaN counts as inf."""
    return tl.where(tl.abs(x) <= 3.4028234663852886e38, tl.abs(x), float("inf"))


@triton.jit
def quantization(limit, FORMAT: tl.constexpr):
    """What codes of a head are multiplied by and its scale, from its largest magnitude: see reference.quantize_kv."""
    largest = 127.0 if FORMAT == "int8" else 448.0
    tiny = limit <= 1e-33
    finite = limit < float("inf")
    factor = tl.where(tiny | ~finite, 0.0, tl.div_rn(largest, tl.where(tiny, 1.0, limit)))
    scale = tl.where(tiny, 0.0, tl.div_rn(limit, largest))
    return factor, tl.where(finite, scale, float("nan"))


@triton.jit
def encode(x, factor, FORMAT: tl.constexpr):
    """fp32 x times factor as int8, or as the bits of fp8 e4m3, to nearest, ties to even; 0 where factor is 0."""
    scaled = tl.where(factor == 0.0, 0.0, x * factor)
    if FORMAT == "int8":
        return round_half_even(scaled).to(tl.int8)
    else:
        # By hand: sm_80 has no such conversion, and the interpreter's truncates.
        size = tl.minimum(tl.abs(scaled), 448.0)
        bits = size.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        # Below 2^-6 codes are multiples of 2^-9.
        subnormal = round_half_even(size * 512.0).to(tl.uint32)
        sign = (scaled.to(tl.uint32, bitcast=True) >> 24) & 0x80
        return (tl.where(size < 0.015625, subnormal, normal) | sign).to(tl.uint8)


def format_of(kv_dtype: torch.dtype) -> str:
    """The kernels' FORMAT of a cache's dtype."""
    return {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(kv_dtype, "float")


def gpu_layer_block_shape(num_kv_heads: int, block_size: int, head_dim: int, kv_dtype: torch.dtype) -> tuple[int, ...]:
    """What a block holds of a layer: a head's tokens after each other; of an 8-bit cache all codes of a head come
    first, then its scales, so that rows of codes stay aligned to 16 bytes."""
    if format_of(kv_dtype) == "float":
        return (2, num_kv_heads, block_size, head_dim)
    return (2, num_kv_heads, 1, block_size * reference.kv_token_size(head_dim, kv_dtype))


def cache_views(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor | None, ...]:
    """Codes of K and V, [num_blocks, num_kv_heads, block_size, head_dim], fp8 as bytes; their fp32 scales,
    [num_blocks, num_kv_heads, block_size], or None twice."""
    keys, values = reference.split_kv(kv_cache, head_dim)
    if format_of(kv_cache.dtype) == "float":
        return keys, values, None, None
    if kv_cache.dtype is torch.float8_e4m3fn:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    scales = (x.view(torch.float32).squeeze(-1) for x in reference.split_kv_scales(kv_cache, head_dim))
    return keys, values, *scales


def write_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    kv_cache: torch.Tensor,  # one layer, five dimensions: see reference.split_kv
    slot_mapping: torch.Tensor,  # int64 [num_tokens]
) -> None:
    """Stores each token's key and value in its slot; slot -1 is skipped."""
    _write_launch(key, value, kv_cache, slot_mapping).run()


def _write_launch(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> Launch:
    num_tokens, num_heads, head_dim = key.shape
    keys, values, key_scales, value_scales = cache_views(kv_cache, head_dim)
    dim = triton.next_power_of_2(head_dim)
    heads = _heads_of_a_program(num_heads, dim)
    return Launch(
        kernel=write_kv_kernel,
        grid=(num_tokens, triton.cdiv(num_heads, heads)),
        arguments={
            "key": key,
            "value": value,
            "key_cache": keys,
            "value_cache": values,
            "key_scales": key_scales,
            "value_scales": value_scales,
            "slot_mapping": slot_mapping,
            "key_token_stride": key.stride(0),
            "value_token_stride": value.stride(0),
            **cache_strides(keys, key_scales),
        },
        constexprs={
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": keys.shape[2],
            "FORMAT": format_of(kv_cache.dtype),
            "HEADS": heads,
            "DIM": dim,
        },
    )


def rotate_and_write(
    qkv: torch.Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    num_kv_heads: int,
    positions: torch.Tensor,  # int64 [num_tokens]
    cos_sin: torch.Tensor,  # [max_position, rotary_dim], as ops.rotary_embedding wants it
    kv_cache: torch.Tensor,  # one layer, five dimensions: see reference.split_kv
    slot_mapping: torch.Tensor,  # int64 [num_tokens]
) -> None:
    """Rotates the queries in place, and stores rotated keys and values in their slots; slot -1 is skipped.

    The keys in `qkv` stay as they are.
    """
    _rotate_launch(qkv, num_kv_heads, positions, cos_sin, kv_cache, slot_mapping).run()


def _rotate_launch(
    qkv: torch.Tensor,
    num_kv_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> Launch:
    num_tokens, all_heads, head_dim = qkv.shape
    num_heads, rotary_dim = all_heads - 2 * num_kv_heads, cos_sin.shape[1]
    keys, values, key_scales, value_scales = cache_views(kv_cache, head_dim)
    dim = triton.next_power_of_2(head_dim)
    heads, kv_heads = _heads_of_a_program(num_heads, dim), _heads_of_a_program(num_kv_heads, dim)
    return Launch(
        kernel=rotate_and_write_kernel,
        grid=(num_tokens, triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, kv_heads)),
        arguments={
            "qkv": qkv,
            "positions": positions,
            "cos_sin": cos_sin,
            "key_cache": keys,
            "value_cache": values,
            "key_scales": key_scales,
            "value_scales": value_scales,
            "slot_mapping": slot_mapping,
            "qkv_token_stride": qkv.stride(0),
            "cos_sin_stride": cos_sin.stride(0),
            **cache_strides(keys, key_scales),
        },
        constexprs={
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "ROTARY_DIM": rotary_dim,
            "BLOCK_SIZE": keys.shape[2],
            "FORMAT": format_of(kv_cache.dtype),
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "DIM": dim,
            "HALF": triton.next_power_of_2(rotary_dim // 2),
            "REST": triton.next_power_of_2(max(1, head_dim - rotary_dim)),
        },
    )


def _heads_of_a_program(num_heads: int, dim: int) -> int:
    return min(triton.next_power_of_2(num_heads), max(1, _TILE // dim))


def cache_strides(keys: torch.Tensor, key_scales: torch.Tensor | None) -> dict[str, int]:
    """The strides of `cache_views`, by the kernels' names; those of V are those of K."""
    names = ("block", "head", "token")
    codes = {f"cache_{name}_stride": stride for name, stride in zip(names, keys.stride(), strict=False)}
    scales = (0, 0, 0) if key_scales is None else key_scales.stride()
    return codes | {f"scale_{name}_stride": stride for name, stride in zip(names, scales, strict=True)}


def variants() -> list[Variant]:
    found = []
    formats = ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.bfloat16, torch.int8),
               (torch.bfloat16, torch.float8_e4m3fn))  # fmt: skip
    for (dtype, kv_dtype), head_dim in product(formats, (64, 80, 96, 128, 256)):
        name = f"{type_name(dtype)}-{type_name(kv_dtype)}-d{head_dim}"
        for kind, launch in _meta_launches(dtype, kv_dtype, head_dim).items():
            found.append(launch.variant(f"{kind}-{name}", ctas_per_sm=8, representative=head_dim == 128))
    return found


def _meta_launches(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> dict[str, Launch]:
    """Launches for a model of that shape, with tensors that take no memory."""
    num_kv_heads, block_size, num_tokens = 8, 16, 32
    shape = gpu_layer_block_shape(num_kv_heads, block_size, head_dim, kv_dtype)
    kv_cache = torch.empty(64, 32, *shape, dtype=kv_dtype, device="meta")[:, 0]
    qkv = torch.empty(num_tokens, 6 * num_kv_heads, head_dim, dtype=dtype, device="meta")
    _, key, value = qkv.split((4 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    cos_sin = torch.empty(4096, head_dim, device="meta")
    slots = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    return {
        "write": _write_launch(key, value, kv_cache, slots),
        "rotate-write": _rotate_launch(qkv, num_kv_heads, slots, cos_sin, kv_cache, slots),
    }
