"""The `cuda` attention backend: decode by csrc/cuda, prompts by Triton, over one pool."""

from __future__ import annotations

from functools import partial

import torch

from pagedserve.attention import AttentionSpec
from pagedserve.attention.cuda import CudaBackend
from pagedserve.kernels import reference
from tests.kernels.cases import Case

F16, I8 = torch.float16, torch.int8


def cases() -> list[Case]:
    return [
        Case("backend-float16", partial(_check_backend, F16, F16, None)),
        Case("backend-int8-window", partial(_check_backend, F16, I8, 24)),
    ]


# Each step: how many tokens of each of three rows. Prompts by Triton, decodes and drafts here, over one pool.
_STEPS = [(5, 20, 0), (1, 7, 33), (1, 1, 1), (1, 0, 1), (3, 1, 2)]


def _check_backend(dtype: torch.dtype, kv_dtype: torch.dtype, window: int | None, device: torch.device) -> None:
    """Steps of every kind: each is what the reference computes over what Triton and the steps before have written."""
    spec = AttentionSpec(
        num_heads=8, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype, kv_cache_dtype=kv_dtype, device=device,
        sliding_window=window, scale=0.125,
    )  # fmt: skip
    assert CudaBackend.why_not(spec) is None, CudaBackend.why_not(spec)
    backend = CudaBackend(spec)
    bytes_shape = (*backend.layer_block_shape[:-1], backend.layer_block_shape[-1] * kv_dtype.itemsize)
    pool = torch.zeros(16, 2, *bytes_shape, dtype=torch.uint8, device=device).view(kv_dtype)
    tables = torch.randperm(15, generator=torch.Generator().manual_seed(0)).int().view(3, 5).to(device)
    done = [0, 0, 0]
    for number, step in enumerate(_STEPS):
        rows = [row for row in range(3) if step[row]]
        slots = []
        for row in rows:
            at = torch.arange(done[row], done[row] + step[row], device=device)
            slots.append(tables[row][at // 16].long() * 16 + at % 16)
            done[row] += step[row]
        counts = [step[row] for row in rows]
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=device)
        seq_lens = torch.tensor([done[row] for row in rows], dtype=torch.int32, device=device)
        metadata = backend.build_metadata(
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_tables=tables[rows].contiguous(),
            slot_mapping=torch.cat(slots),
            max_query_len=max(counts),
            max_seq_len=max(done),
        )
        assert (metadata.decode is None) == (max(counts) > 4)
        generator = torch.Generator(device=device).manual_seed(number)
        qkv = torch.randn(sum(counts), 12, 64, generator=generator, device=device).to(dtype)
        query, key, value = qkv.split((8, 2, 2), dim=1)
        out = backend.forward(query, key, value, pool[:, 1], metadata)
        wanted = reference.paged_attention(
            query, pool[:, 1], starts, seq_lens, metadata.block_tables, 0.125, window, None, None
        )
        torch.testing.assert_close(out.float(), wanted.float(), rtol=4e-3, atol=4e-3)
    assert not pool[:, 0].view(torch.uint8).any()
