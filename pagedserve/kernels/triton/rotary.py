"""Rotary position embedding of queries and keys, in place, wherever they lie in a fused projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedserve.kernels.triton.arithmetic import narrow
from pagedserve.kernels.triton.variants import Launch, Variant, type_name

_TILE = 512  # pairs that one program rotates


@triton.jit
def _rotate(base, heads, head_stride, cos, sin, mask, HALF: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    pointers = base + (heads * head_stride)[:, None] + columns[None, :]
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, narrow(first * cos - second * sin, base.dtype.element_ty), mask=mask)
    tl.store(pointers + HALF, narrow(second * cos + first * sin, base.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["max_position"])
def rotary_kernel(
    positions, query, key, cos_sin, max_position, query_stride, query_head_stride, key_stride, key_head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    position = tl.load(positions + token)
    # A position beyond the table gives NaN in this token: it reads no memory that is not the table's.
    is_known = columns < tl.where((position >= 0) & (position < max_position), HALF, 0)
    angles = cos_sin + position * (2 * HALF) + columns
    cos = tl.load(angles, mask=is_known, other=float("nan")).to(tl.float32)[None, :]
    sin = tl.load(angles + HALF, mask=is_known, other=float("nan")).to(tl.float32)[None, :]
    QUERY_PROGRAMS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    program = tl.program_id(1)
    if program < QUERY_PROGRAMS:
        heads = program * HEADS + tl.arange(0, HEADS)
        mask = (heads < NUM_HEADS)[:, None] & (columns < HALF)[None, :]
        _rotate(query + token * query_stride, heads, query_head_stride, cos, sin, mask, HALF, BLOCK)
    elif key is not None:
        heads = (program - QUERY_PROGRAMS) * HEADS + tl.arange(0, HEADS)
        mask = (heads < NUM_KV_HEADS)[:, None] & (columns < HALF)[None, :]
        _rotate(key + token * key_stride, heads, key_head_stride, cos, sin, mask, HALF, BLOCK)


def rotary_embedding(
    positions: torch.Tensor,  # int64 [num_tokens]
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], heads contiguous
    key: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin: torch.Tensor,  # [max_position, rotary_dim], contiguous
) -> Launch:
    num_tokens, num_heads, _ = query.shape
    half = cos_sin.shape[1] // 2
    num_kv_heads = 0 if key is None else key.shape[1]
    block = triton.next_power_of_2(half)
    heads = max(1, min(triton.next_power_of_2(num_heads), _TILE // block))
    return Launch(
        kernel=rotary_kernel,
        grid=(num_tokens, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads)),
        arguments={
            "positions": positions,
            "query": query,
            "key": key,
            "cos_sin": cos_sin,
            "max_position": cos_sin.shape[0],
            "query_stride": query.stride(0),
            "query_head_stride": query.stride(1),
            "key_stride": 0 if key is None else key.stride(0),
            "key_head_stride": 0 if key is None else key.stride(1),
        },
        constexprs={
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HALF": half,
            "HEADS": heads,
            "BLOCK": block,
        },
        num_warps=max(1, heads * block // 256),
    )


def variants() -> list[Variant]:
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        for num_heads, num_kv_heads, half in ((9, 3, 32), (32, 8, 64), (64, 8, 64), (8, 4, 128), (32, 32, 16)):
            qkv = torch.empty(48, num_heads + 2 * num_kv_heads, 2 * half, dtype=dtype, device="meta")
            positions = torch.empty(48, dtype=torch.int64, device="meta")
            query, key, _ = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
            launch = rotary_embedding(positions, query, key, torch.empty(64, 2 * half, device="meta"))
            name = f"rotary-{type_name(dtype)}-{num_heads}-{num_kv_heads}-{2 * half}"
            found.append(launch.variant(name, representative=name == "rotary-bf16-32-8-128"))
    return found
