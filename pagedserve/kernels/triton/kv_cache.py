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


@triton.jit
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
    mask = (heads[:, None] < NUM_HEADS) & (dims[None, :] < HEAD_DIM)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    within = heads[:, None] * HEAD_DIM + dims[None, :]
    place = (
        block * cache_block_stride + heads[:, None] * cache_head_stride + offset * cache_token_stride + dims[None, :]
    )
    scale_place = block * scale_block_stride + heads * scale_head_stride + offset * scale_token_stride
    k = tl.load(key + token * key_token_stride + within, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(value + token * value_token_stride + within, mask=mask, other=0.0).to(tl.float32)
    if FORMAT == "float":
        tl.store(key_cache + place, narrow(k, key_cache.dtype.element_ty), mask=mask)
        tl.store(value_cache + place, narrow(v, value_cache.dtype.element_ty), mask=mask)
    else:
        k_factor, k_scale = quantization(tl.max(magnitude(k), axis=1), FORMAT)
        v_factor, v_scale = quantization(tl.max(magnitude(v), axis=1), FORMAT)
        tl.store(key_cache + place, encode(k, k_factor[:, None], FORMAT), mask=mask)
        tl.store(value_cache + place, encode(v, v_factor[:, None], FORMAT), mask=mask)
        tl.store(key_scales + scale_place, k_scale, mask=heads < NUM_HEADS)
        tl.store(value_scales + scale_place, v_scale, mask=heads < NUM_HEADS)


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
    heads = min(triton.next_power_of_2(num_heads), max(1, _TILE // dim))
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
        key, value, kv_cache, slots = _meta_inputs(dtype, kv_dtype, head_dim)
        name = f"write-{type_name(dtype)}-{type_name(kv_dtype)}-d{head_dim}"
        launch = _write_launch(key, value, kv_cache, slots)
        found.append(launch.variant(name, ctas_per_sm=8, representative=head_dim == 128))
    return found


def _meta_inputs(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Key and value inside a fused projection, a layer of a pool, slots: strides and types, no memory."""
    num_heads, block_size = 8, 16
    shape = gpu_layer_block_shape(num_heads, block_size, head_dim, kv_dtype)
    kv_cache = torch.empty(64, 32, *shape, dtype=kv_dtype, device="meta")[:, 0]
    qkv = torch.empty(32, 6 * num_heads, head_dim, dtype=dtype, device="meta")
    key, value = qkv[:, 4 * num_heads : 5 * num_heads], qkv[:, 5 * num_heads :]
    return key, value, kv_cache, torch.empty(32, dtype=torch.int64, device="meta")
