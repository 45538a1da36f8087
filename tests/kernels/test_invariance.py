"""A row gets the same bits alone or in a batch, however its prompt is chunked, on any number of threads."""

from __future__ import annotations

import pytest
import torch

from pagedserve.kernels import cpu, native
from tests.helpers.paged_batch import PagedBatch, make_paged_batch


def attend(batch: PagedBatch, query: torch.Tensor, starts: list[int], lens: list[int], rows: list[int], **kwargs):
    return cpu.paged_attention(
        query,
        batch.kv_cache,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        batch.block_tables[rows].contiguous(),
        0.125,
        kwargs.get("sliding_window"),
        kwargs.get("soft_cap"),
        None,
    )


def whole(batch: PagedBatch, **kwargs) -> torch.Tensor:
    rows = list(range(len(batch.seq_lens)))
    return attend(batch, batch.query, batch.query_start_loc.tolist(), batch.seq_lens.tolist(), rows, **kwargs)


VARIANTS = [{}, {"sliding_window": 70}, {"soft_cap": 5.0}]


@pytest.mark.parametrize("kwargs", VARIANTS, ids=str)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("block_size", [4, 16])
def test_alone_as_in_a_batch(isa: str, block_size: int, kv_dtype: torch.dtype, kwargs: dict) -> None:
    lens, query_lens = [1, 40, 700, 130, 64], [1, 40, 1, 100, 1]
    batch = make_paged_batch(
        lens, query_lens, num_heads=6, num_kv_heads=2, head_dim=24, block_size=block_size, kv_dtype=kv_dtype
    )
    together = whole(batch, **kwargs)
    starts = batch.query_start_loc.tolist()
    for row, length in enumerate(lens):
        tokens = slice(starts[row], starts[row + 1])
        alone = attend(batch, batch.query[tokens], [0, query_lens[row]], [length], [row], **kwargs)
        assert torch.equal(alone, together[tokens])


@pytest.mark.parametrize("kwargs", VARIANTS, ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_any_chunks(isa: str, chunk: int, kv_dtype: torch.dtype, kwargs: dict) -> None:
    length = 600 if chunk > 1 else 150
    batch = make_paged_batch([length], [length], num_heads=3, num_kv_heads=1, head_dim=32, kv_dtype=kv_dtype)
    wanted = whole(batch, **kwargs)
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        part = attend(batch, batch.query[start:end], [0, end - start], [end], [0], **kwargs)
        assert torch.equal(part, wanted[start:end])


@pytest.mark.parametrize("query_len", [1, 30])
@pytest.mark.parametrize("short_rows", [0, 9])
def test_any_number_of_threads(isa: str, short_rows: int, query_len: int) -> None:
    seq_lens, query_lens = [1500, *[20] * short_rows], [query_len, *[1] * short_rows]
    batch = make_paged_batch(seq_lens, query_lens, num_heads=3, num_kv_heads=1, kv_dtype=torch.bfloat16)
    before = native.num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            native.set_num_threads(count)
            results.append(whole(batch))
    finally:
        native.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dim", [31, 576])
def test_rows_of_the_elementwise_ops(isa: str, dim: int) -> None:
    x, weight = torch.randn(50, 2 * dim), torch.randn(2 * dim)
    normed = cpu.rms_norm(x, weight, 1e-5, None, None)
    activated = cpu.gated_activation("silu", x, None)
    for row in (0, 17, 49):
        assert torch.equal(cpu.rms_norm(x[row : row + 1], weight, 1e-5, None, None)[0], normed[row])
        assert torch.equal(cpu.gated_activation("silu", x[row : row + 1], None)[0], activated[row])
