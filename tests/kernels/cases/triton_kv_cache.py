"""Writing the KV cache in Triton, against kernels/reference.py: the same bits."""

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
KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, FP8)


_PARTS = ("K", "V", "K's scales", "V's scales")
SLOTS = (9, 0, 11, 3, -1, 5, 4)  # in any order, one skipped


def cases() -> list[Case]:
    shapes = ((2, 64, 16), (3, 80, 1), (1, 24, 8), (20, 128, 16))  # heads, head_dim, block_size
    found = []
    for kv_dtype, dtype, shape in product(KV_DTYPES, (torch.float32, torch.bfloat16), shapes):
        if dtype is torch.bfloat16 or shape == shapes[0]:
            name = f"write-{str(kv_dtype)[6:]}-{str(dtype)[6:]}-{'-'.join(map(str, shape))}"
            found.append(Case(name, partial(_check_write, kv_dtype, dtype, *shape)))
    # heads, KV heads, head_dim, rotary_dim, block_size
    shapes = ((4, 2, 64, 64, 16), (3, 3, 80, 32, 8), (2, 1, 24, 6, 4), (40, 20, 128, 128, 16))
    for kv_dtype, shape in product((torch.bfloat16, torch.int8, FP8), shapes):
        name = f"rotate-{str(kv_dtype)[6:]}-{'-'.join(map(str, shape))}"
        found.append(Case(name, partial(_check_rotate, kv_dtype, *shape)))
    return found


def gpu_pool(
    device: torch.device, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, kv_dtype: torch.dtype
) -> torch.Tensor:
    """A pool of two layers in the GPU layout that holds NaN wherever nobody wrote."""
    shape = kv_kernels.gpu_layer_block_shape(num_kv_heads, block_size, head_dim, kv_dtype)
    return poisoned_pool(num_blocks, 2, *shape, dtype=kv_dtype).to(device)


def _inputs(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """[num_tokens, heads + 2 * kv_heads, head_dim] with zeros, inf and NaN among them."""
    qkv = torch.randn(len(SLOTS), heads + 2 * kv_heads, head_dim, generator=torch.Generator().manual_seed(heads)) * 3
    qkv[1, heads:] = 0.0
    qkv[2, heads, 0], qkv[3, -1, 1] = torch.inf, torch.nan
    return qkv.to(device, dtype)


def _check_write(
    kv_dtype: torch.dtype, dtype: torch.dtype, heads: int, head_dim: int, block_size: int, device: torch.device
) -> None:
    key, value = _inputs(dtype, heads, heads, head_dim, device)[:, heads:].split(heads, dim=1)
    slots = torch.tensor(SLOTS, device=device)
    pool = gpu_pool(device, -(-12 // block_size) + 1, heads, block_size, head_dim, kv_dtype)
    wanted = pool.clone()
    kv_kernels.write_kv(key, value, pool[:, 1], slots)
    reference.write_kv(key, value, wanted[:, 1], slots)
    _assert_equal(pool, wanted, head_dim)


def _check_rotate(
    kv_dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, block_size: int,
    device: torch.device,
) -> None:  # fmt: skip
    """Angles 0, 90 and 180 degrees, whose products round nowhere: so a GPU's fused multiply-add gives the same bits."""
    qkv = _inputs(torch.bfloat16, heads, kv_heads, head_dim, device)
    quarters = torch.randint(0, 4, (30, rotary_dim // 2), generator=torch.Generator().manual_seed(1))
    cos_sin = torch.cat((torch.tensor([1, 0, -1, 0])[quarters], torch.tensor([0, 1, 0, -1])[quarters]), dim=1)
    cos_sin = cos_sin.float().to(device)
    positions, slots = torch.tensor([3, 0, 29, 7, 11, 2, 5], device=device), torch.tensor(SLOTS, device=device)
    pool = gpu_pool(device, -(-12 // block_size) + 1, kv_heads, block_size, head_dim, kv_dtype)
    wanted, wanted_qkv = pool.clone(), qkv.clone()
    kv_kernels.rotate_and_write(qkv, kv_heads, positions, cos_sin, pool[:, 1], slots)
    query, key, value = wanted_qkv.split((heads, kv_heads, kv_heads), dim=1)
    reference.rotary_embedding(positions, query, key, cos_sin)
    reference.write_kv(key, value, wanted[:, 1], slots)
    assert_close(qkv[:, :heads], query, rtol=0, atol=0, equal_nan=True)
    _assert_equal(pool, wanted, head_dim)


def _assert_equal(pool: torch.Tensor, wanted: torch.Tensor, head_dim: int) -> None:
    """Codes and scales, fp8 as bytes; NaN is NaN whatever its bits."""
    for layer in range(2):
        found, expected = (kv_kernels.cache_views(x[:, layer], head_dim) for x in (pool, wanted))
        for part, x, y in zip(_PARTS, found, expected, strict=True):
            if x is not None:
                assert_close(x, y, rtol=0, atol=0, equal_nan=True, msg=f"layer {layer}, {part}: {{}}".format)
