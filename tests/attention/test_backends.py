"""Every backend over several steps of several rows, against attention over the whole sequences at once."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from pagedserve.attention import BACKENDS, AttentionBackend, AttentionSpec
from pagedserve.kernels import reference
from tests.helpers.paged_batch import poisoned_pool

NUM_BLOCKS, NUM_LAYERS = 40, 3
# Each step: how many tokens of each of three rows; prefill, chunks, decode and rows that pause, mixed.
STEPS = [(5, 20, 0), (1, 7, 33), (1, 0, 1), (1, 1, 1), (30, 1, 2)]
LENGTHS = [sum(step[row] for step in STEPS) for row in range(3)]


def make_backend(name: str, **changes: object) -> AttentionBackend:
    spec = AttentionSpec(
        **{
            "num_heads": 6,
            "num_kv_heads": 2,
            "head_dim": 16,
            "block_size": 8,
            "dtype": torch.float32,
            "kv_cache_dtype": torch.float32,
            "device": torch.device("cpu"),
            "scale": 0.25,
        }
        | changes
    )
    backend = BACKENDS.resolve(name)
    reason = backend.why_not(spec)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return backend(spec)


def run_steps(backend: AttentionBackend, q, k, v, layer: int, window: int | None = None) -> list[torch.Tensor]:
    """Feeds the rows' tokens step by step through one layer of a poisoned pool; outputs per row, in order."""
    spec = backend.spec
    pool = poisoned_pool(NUM_BLOCKS, NUM_LAYERS, *backend.layer_block_shape, dtype=spec.kv_cache_dtype)
    before = pool.clone()
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).int()
    per_row = NUM_BLOCKS // 3
    tables = torch.stack([order[row * per_row : (row + 1) * per_row] for row in range(3)])
    done = [0, 0, 0]
    outputs: list[list[torch.Tensor]] = [[], [], []]
    for step in STEPS:
        rows = [row for row in range(3) if step[row]]
        spans = [slice(done[row], done[row] + step[row]) for row in rows]
        slots = []
        for row, span in zip(rows, spans, strict=True):
            positions = torch.arange(span.start, span.stop)
            slots.append(tables[row][positions // spec.block_size] * spec.block_size + positions % spec.block_size)
            done[row] = span.stop
        counts = [step[row] for row in rows]
        metadata = backend.build_metadata(
            query_start_loc=torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32),
            seq_lens=torch.tensor([done[row] for row in rows], dtype=torch.int32),
            block_tables=tables[rows].contiguous(),
            slot_mapping=torch.cat(slots).long(),
            max_query_len=max(counts),
            max_seq_len=max(done[row] for row in rows),
        )
        gathered = [torch.cat([x[row][span] for row, span in zip(rows, spans, strict=True)]) for x in (q, k, v)]
        out = backend.forward(*gathered, pool[:, layer], metadata, sliding_window=window)
        for row, part in zip(rows, out.split(counts), strict=True):
            outputs[row].append(part)
    untouched = [other for other in range(NUM_LAYERS) if other != layer]
    assert torch.equal(pool[:, untouched].view(torch.uint8), before[:, untouched].view(torch.uint8))
    return [torch.cat(parts) for parts in outputs]


def rows_of_random_tokens(num_heads: int, head_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_heads)
    return [torch.randn(length, num_heads, head_dim, generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("block_size", [8, 16])
def test_steps_equal_the_whole_sequence_at_once(name: str, block_size: int, window: int | None) -> None:
    backend = make_backend(name, block_size=block_size, sliding_window=window)
    q, k, v = rows_of_random_tokens(6, 16), rows_of_random_tokens(2, 16), rows_of_random_tokens(2, 16)
    for row, out in enumerate(run_steps(backend, q, k, v, layer=1)):
        positions = torch.arange(LENGTHS[row])
        seen = positions <= positions[:, None]
        if window is not None:
            seen &= positions > positions[:, None] - window
        wanted = F.scaled_dot_product_attention(
            q[row].double().transpose(0, 1),
            k[row].double().transpose(0, 1).repeat_interleave(3, 0),
            v[row].double().transpose(0, 1).repeat_interleave(3, 0),
            attn_mask=seen,
            scale=0.25,
        ).transpose(0, 1)
        assert_close(out.double(), wanted, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("kv_cache_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_cpu_equals_reference(kv_cache_dtype: torch.dtype, soft_cap: float | None) -> None:
    q, k, v = rows_of_random_tokens(6, 16), rows_of_random_tokens(2, 16), rows_of_random_tokens(2, 16)
    results = [
        run_steps(make_backend(name, kv_cache_dtype=kv_cache_dtype, soft_cap=soft_cap), q, k, v, 0)
        for name in ("cpu", "reference")
    ]
    for ours, wanted in zip(*results, strict=True):
        assert_close(ours, wanted, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_layer_may_have_its_own_window(name: str) -> None:
    q, k, v = rows_of_random_tokens(6, 16), rows_of_random_tokens(2, 16), rows_of_random_tokens(2, 16)
    own = run_steps(make_backend(name), q, k, v, 2, window=5)
    of_the_spec = run_steps(make_backend(name, sliding_window=5), q, k, v, 2)
    full = run_steps(make_backend(name), q, k, v, 2)
    for row in range(3):
        assert torch.equal(own[row], of_the_spec[row])
        assert not torch.allclose(own[row], full[row])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_block_takes_the_bytes_of_its_tokens(name: str) -> None:
    # K and V, 2 KV heads, 8 tokens, head_dim 16; with 8 bits an fp32 scale for each head and token.
    assert math.prod(make_backend(name).layer_block_shape) == 2 * 2 * 8 * 16
    assert math.prod(make_backend(name, kv_cache_dtype=torch.int8).layer_block_shape) == 2 * 2 * 8 * (16 + 4)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rotary_dim", [16, 6])
def test_forward_qkv_is_rotation_then_forward(name: str, rotary_dim: int) -> None:
    backend = make_backend(name, kv_cache_dtype=torch.bfloat16, sliding_window=11)
    num_tokens, num_heads, num_kv_heads, head_dim = 20, 6, 2, 16
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    positions = torch.arange(3, 3 + num_tokens)
    cos_sin = torch.randn(40, rotary_dim)
    metadata = backend.build_metadata(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables=torch.tensor([[4, 1, 2]], dtype=torch.int32),
        slot_mapping=torch.tensor([[4], [1], [2]]).mul(8).add(torch.arange(8)).flatten()[:num_tokens],
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
    pools = [torch.zeros(5, 1, *backend.layer_block_shape, dtype=torch.bfloat16) for _ in range(2)]
    rotated = qkv.clone()
    query, key, value = rotated.view(num_tokens, -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    reference.rotary_embedding(positions, query, key, cos_sin)
    wanted = backend.forward(query, key, value, pools[0][:, 0], metadata, sliding_window=5)
    out = backend.forward_qkv(qkv, positions, cos_sin, pools[1][:, 0], metadata, sliding_window=5)
    assert torch.equal(qkv[:, : num_heads * head_dim], rotated[:, : num_heads * head_dim])
    assert torch.equal(pools[1], pools[0]) and pools[0].count_nonzero() > 0
    assert torch.equal(out, wanted)
    assert not torch.equal(backend.forward_qkv(rotated, positions, cos_sin, pools[1][:, 0], metadata), wanted)


def test_cpu_refuses_a_projection_that_does_not_fit() -> None:
    backend = make_backend("cpu")
    metadata = backend.build_metadata(
        query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
        seq_lens=torch.tensor([2], dtype=torch.int32),
        block_tables=torch.tensor([[0]], dtype=torch.int32),
        slot_mapping=torch.tensor([0, 1]),
        max_query_len=2,
        max_seq_len=2,
    )
    pool, cos_sin, positions = torch.zeros(1, *backend.layer_block_shape), torch.zeros(4, 16), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="qkv of 161 numbers a token does not fit 2 KV heads of 16"):
        backend.forward_qkv(torch.zeros(2, 161), positions, cos_sin, pool, metadata)
    with pytest.raises(ValueError, match="qkv has 3 tokens, the rows 2"):
        backend.forward_qkv(torch.zeros(3, 160), torch.tensor([0, 1, 2]), cos_sin, pool, metadata)
    with pytest.raises(ValueError, match="query has 3 tokens, the rows have 2"):
        backend.forward(torch.zeros(3, 6, 16), *torch.zeros(2, 2, 2, 16), pool, metadata)
