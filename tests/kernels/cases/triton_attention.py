"""Attention and the KV cache in Triton, against kernels/reference.py."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from torch.testing import assert_close

from pagedserve.kernels import reference
from pagedserve.kernels.triton import kv_cache as kv_kernels
from tests.helpers.paged_batch import poisoned_pool
from tests.kernels.cases import Case

FP8 = torch.float8_e4m3fn
_PARTS = ("K", "V", "K's scales", "V's scales")
KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, FP8)


def cases() -> list[Case]:
    return [*_write_cases()]


def _name(*parts: object) -> str:
    return "-".join(str(part).removeprefix("torch.") for part in parts)


def _randn(device: torch.device, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _gpu_pool(
    device: torch.device, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, kv_dtype: torch.dtype
) -> torch.Tensor:
    """A pool of two layers in the GPU layout that holds NaN wherever nobody wrote."""
    shape = kv_kernels.gpu_layer_block_shape(num_kv_heads, block_size, head_dim, kv_dtype)
    return poisoned_pool(num_blocks, 2, *shape, dtype=kv_dtype).to(device)


def _write_cases() -> list[Case]:
    shapes = ((2, 64, 16), (3, 80, 1), (1, 24, 8), (20, 128, 16))  # heads, head_dim, block_size
    return [
        Case(_name("write", kv_dtype, dtype, *shape), partial(_check_write, kv_dtype, dtype, *shape))
        for kv_dtype, dtype, shape in product(KV_DTYPES, (torch.float32, torch.bfloat16), shapes)
        if dtype is torch.bfloat16 or shape == shapes[0]
    ]


def _check_write(
    kv_dtype: torch.dtype, dtype: torch.dtype, heads: int, head_dim: int, block_size: int, device: torch.device
) -> None:
    """Keys and values inside a wider tensor; slots in any order, one skipped; zeros, inf and NaN among them."""
    num_blocks = -(-12 // block_size) + 1
    qkv = _randn(device, 7, 3 * heads, head_dim) * 3
    qkv[1, heads:] = 0.0
    qkv[2, heads, 0], qkv[3, -1, 1] = torch.inf, torch.nan
    key, value = qkv.to(dtype)[:, heads : 2 * heads], qkv.to(dtype)[:, 2 * heads :]
    slots = torch.tensor([9, 0, 11, 3, -1, 5, 4], device=device)
    pool = _gpu_pool(device, num_blocks, heads, block_size, head_dim, kv_dtype)
    wanted = pool.clone()
    kv_kernels.write_kv(key, value, pool[:, 1], slots)
    reference.write_kv(key, value, wanted[:, 1], slots)
    for layer, x, y in ((n, pool[:, n], wanted[:, n]) for n in range(2)):
        for part, found, expected in zip(_PARTS, _parts(x, head_dim), _parts(y, head_dim), strict=False):
            where = f"layer {layer}, {part}: {{}}"
            assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=where.format)


def _parts(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Codes and scales, fp8 as bytes; NaN is NaN whatever its bits."""
    return tuple(x for x in kv_kernels.cache_views(kv_cache, head_dim) if x is not None)
