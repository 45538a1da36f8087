"""A batch of rows over a paged KV cache, with the contiguous keys and values that an oracle wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagedserve.kernels import reference

NUM_LAYERS = 2  # of the pool; the batch uses the last, so that its blocks are not neighbours


def poisoned_pool(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A pool that holds NaN wherever it is read before it is written; of an 8-bit cache the scales are NaN."""
    if dtype in reference.LARGEST_CODES:
        return torch.full(shape, 255, dtype=torch.uint8).view(dtype)  # four bytes of 0xff are an fp32 NaN
    return torch.full(shape, float("nan"), dtype=dtype)


def as_cached(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values [..., head_dim] as a cache of that type gives them back, fp32."""
    if dtype not in reference.LARGEST_CODES:
        return x.to(dtype).float()
    codes, scales = reference.quantize_kv(x, dtype)
    return codes.float() * scales


@dataclass
class PagedBatch:
    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    keys: list[torch.Tensor]  # per row [seq_len, num_kv_heads, head_dim], rounded to the cache's dtype
    values: list[torch.Tensor]
    pool: torch.Tensor  # [num_blocks, NUM_LAYERS, 2, num_kv_heads, ...]
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slots: list[torch.Tensor]  # per row int64 [seq_len]

    @property
    def kv_cache(self) -> torch.Tensor:
        """The layer's view: [num_blocks, 2, num_kv_heads, ...]."""
        return self.pool[:, -1]


def make_paged_batch(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    kv_dtype: torch.dtype = torch.float32,
    transposed: bool = True,
    seed: int = 0,
) -> PagedBatch:
    """Rows whose context is in shuffled blocks of a pool that is NaN wherever no token lies.

    `transposed`: the native layout (K transposed within a block) or the reference's.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(blocks_of) + 3
    order = torch.randperm(num_blocks, generator=generator)
    block_tables = torch.full((len(seq_lens), max(blocks_of) + 1), 2**30, dtype=torch.int32)
    token_size = reference.kv_token_size(head_dim, kv_dtype)
    inner = (block_size * token_size,) if transposed else (block_size, token_size)
    pool = poisoned_pool(num_blocks, NUM_LAYERS, 2, num_kv_heads, *inner, dtype=kv_dtype)
    keys, values, slots = [], [], []
    taken = 0
    for row, (length, count) in enumerate(zip(seq_lens, blocks_of, strict=True)):
        block_tables[row, :count] = order[taken : taken + count].int()
        taken += count
        positions = torch.arange(length)
        slots.append(block_tables[row][positions // block_size].long() * block_size + positions % block_size)
        key = torch.randn(length, num_kv_heads, head_dim, generator=generator)
        value = torch.randn(length, num_kv_heads, head_dim, generator=generator)
        reference.write_kv(key, value, pool[:, -1], slots[-1])
        keys.append(as_cached(key, kv_dtype))
        values.append(as_cached(value, kv_dtype))
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    return PagedBatch(
        query=torch.randn(starts[-1], num_heads, head_dim, generator=generator),
        keys=keys,
        values=values,
        pool=pool,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32),
        block_tables=block_tables,
        slots=slots,
    )
