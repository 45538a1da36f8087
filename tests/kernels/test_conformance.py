"""Every native op, at every instruction set that runs here, against its definition in kernels/reference.py.

Outputs and unused cache slots are poisoned with NaN: what is read or left unwritten by mistake shows.
"""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from pagedserve.kernels import cpu, native, reference
from tests.helpers.paged_batch import make_paged_batch, poisoned_pool

DIMS = [1, 5, 8, 16, 31, 64, 100, 576]
ROWS = [0, 1, 3, 40]
KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
BLOCK_SIZES = [1, 2, 4, 8, 16, 32, 64, 128]
HEADS = [(2, 2, 16), (9, 3, 64), (8, 2, 80), (8, 1, 128), (7, 1, 24), (20, 1, 8)]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm(isa: str, rows: int, dim: int) -> None:
    x, weight = randn(rows, dim) * 3, randn(dim)
    out = cpu.rms_norm(x, weight, 1e-5, None, poisoned(rows, dim))
    assert_close(out, reference.rms_norm(x, weight, 1e-5, None, None))


@pytest.mark.parametrize("dim", DIMS)
def test_rms_norm_adds_to_the_residual_in_place(isa: str, dim: int) -> None:
    x, weight, residual = randn(7, dim), randn(dim), randn(8, dim)[1:] * 5
    wanted_residual = residual.clone()
    wanted = reference.rms_norm(x, weight, 1e-6, wanted_residual, None)
    assert cpu.rms_norm(x, weight, 1e-6, residual, x) is x
    assert_close(x, wanted)
    assert torch.equal(residual, wanted_residual)


@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_rms_norm_of_the_heads_inside_a_wider_tensor(isa: str, head_dim: int) -> None:
    qkv = randn(5, 9, head_dim)
    heads, weight = qkv[:, 2:6], randn(head_dim)
    rest = qkv.clone()
    wanted = reference.rms_norm(heads, weight, 1e-6, None, None)
    cpu.rms_norm(heads, weight, 1e-6, None, heads)
    assert_close(heads, wanted)
    assert torch.equal(qkv[:, :2], rest[:, :2]) and torch.equal(qkv[:, 6:], rest[:, 6:])


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rows", ROWS)
def test_layer_norm(isa: str, rows: int, dim: int) -> None:
    x, weight, bias = randn(rows, dim) * 3 + 50, randn(dim), randn(dim)
    for shift in (bias, None):
        out = cpu.layer_norm(x, weight, shift, 1e-5, None, poisoned(rows, dim))
        # In fp64: far from zero the two in fp32 differ by their own rounding.
        wanted = reference.layer_norm(
            x.double(), weight.double(), None if shift is None else shift.double(), 1e-5, None, None
        )
        assert_close(out, wanted.float(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("into", ["x", "residual"])
@pytest.mark.parametrize("dim", DIMS)
def test_layer_norm_adds_to_the_residual_in_place(isa: str, dim: int, into: str) -> None:
    x, weight, bias, residual = randn(7, dim), randn(dim), randn(dim), randn(8, dim)[1:] * 5
    wanted_residual = residual.clone()
    wanted = reference.layer_norm(x, weight, bias, 1e-5, wanted_residual, None)
    out = x if into == "x" else residual
    assert cpu.layer_norm(x, weight, bias, 1e-5, residual, out) is out
    assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    if into == "x":
        assert torch.equal(residual, wanted_residual)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (64, 64), (80, 80), (80, 32), (24, 6), (8, 2)])
@pytest.mark.parametrize("rows", ROWS)
def test_rotary_embedding(isa: str, rows: int, head_dim: int, rotary_dim: int) -> None:
    qkv = randn(rows, 8, head_dim)
    wanted = qkv.clone()
    positions = torch.randint(0, 50, (rows,))
    cos_sin = randn(50, rotary_dim)
    cpu.rotary_embedding(positions, qkv[:, :5], qkv[:, 5:7], cos_sin)
    reference.rotary_embedding(positions, wanted[:, :5], wanted[:, 5:7], cos_sin)
    assert_close(qkv, wanted)
    alone = wanted[:, :5].clone()
    cpu.rotary_embedding(positions, alone, None, cos_sin)
    assert_close(alone, _rotated(wanted[:, :5], positions, cos_sin))


def _rotated(query: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    query = query.clone()
    reference.rotary_embedding(positions, query, None, cos_sin)
    return query


KINDS = ["silu", "gelu_tanh", "gelu_erf", "relu"]
SHAPES = [(0, 5), (1, 1), (3, 31), (2, 64), (5, 1536), (2, 20000)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "dim"), SHAPES)
def test_gated_activation(isa: str, kind: str, rows: int, dim: int) -> None:
    x = randn(rows, 2 * dim) * 4
    if rows:
        x[0, 0], x[-1, dim - 1] = 120.0, -120.0  # where a careless e^x overflows
    out = cpu.gated_activation(kind, x, poisoned(rows, dim))
    assert_close(out, reference.gated_activation(kind, x, None), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "dim"), SHAPES)
def test_activation(isa: str, kind: str, rows: int, dim: int) -> None:
    x = randn(rows, dim) * 4
    if rows:
        x[0, 0] = 120.0
        x[-1, -1] = float("nan")
    wanted = reference.activation(kind, x, None)
    assert_close(cpu.activation(kind, x, poisoned(rows, dim)), wanted, atol=2e-6, rtol=2e-6, equal_nan=True)
    assert cpu.activation(kind, x, x) is x
    assert_close(x, wanted, atol=2e-6, rtol=2e-6, equal_nan=True)


@pytest.mark.parametrize(("rows", "dim"), SHAPES)
def test_scale_soft_cap_and_add_work_in_place(isa: str, rows: int, dim: int) -> None:
    wide, y = randn(rows, dim + 3) * 40, randn(rows, dim)
    x, rest = wide[:, :dim], wide[:, dim:].clone()  # rows that lie apart
    for op in ("scale", "soft_cap", "add"):
        operand = y if op == "add" else 7.5
        wanted = getattr(reference, op)(x.clone(), operand)
        assert getattr(cpu, op)(x, operand) is x
        assert_close(x, wanted, atol=2e-6, rtol=2e-6)
    assert torch.equal(wide[:, dim:], rest)


@pytest.mark.parametrize("dtype", list(native.DTYPES))
@pytest.mark.parametrize("dim", DIMS)
def test_embedding(isa: str, dim: int, dtype: torch.dtype) -> None:
    table = randn(9, dim).to(dtype)[2:]
    ids = torch.tensor([6, 0, 6, 3])
    assert torch.equal(cpu.embedding(table, ids, poisoned(4, dim)), table[ids].float())
    for wrong in (-1, 7):
        with pytest.raises(ValueError, match=rf"row_ids\[1\] is {wrong}, the table has 7 rows"):
            cpu.embedding(table, torch.tensor([0, wrong]), None)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", [8, 80])
def test_write_kv(isa: str, block_size: int, head_dim: int, kv_dtype: torch.dtype) -> None:
    num_tokens, num_kv_heads, num_blocks = 37, 3, 64
    token_size = reference.kv_token_size(head_dim, kv_dtype)
    pool = poisoned_pool(num_blocks, 2, 2, num_kv_heads, block_size * token_size, dtype=kv_dtype)
    wanted = pool.clone()
    kv = randn(num_tokens, 2, num_kv_heads, head_dim) * 1e3
    kv[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), 1e-6, 7e4])  # rounding at the edges of fp16
    kv[1, 0] *= 1e-38  # 8 bits: too small for a scale, and counted as zero
    kv[2, 1, 1] = 0.0
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[3::5] = -1
    cpu.write_kv(kv[:, 0], kv[:, 1], pool[:, 1], slots)
    reference.write_kv(kv[:, 0], kv[:, 1], wanted[:, 1], slots)
    assert torch.equal(pool.isnan(), wanted.isnan())
    assert torch.equal(pool.nan_to_num(), wanted.nan_to_num())
    if kv_dtype is torch.float16:
        assert not pool.isinf().any()  # 7e4 and the infinity are held at the largest number


def check_attention(batch, *, sliding_window: int | None = None, soft_cap: float | None = None) -> None:
    arguments = (batch.query, batch.kv_cache, batch.query_start_loc, batch.seq_lens, batch.block_tables)
    scale = batch.query.shape[-1] ** -0.5
    wanted = reference.paged_attention(*arguments, scale, sliding_window, soft_cap, None)
    out = cpu.paged_attention(*arguments, scale, sliding_window, soft_cap, torch.full_like(wanted, float("nan")))
    assert not wanted.isnan().any()
    assert_close(out, wanted, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_paged_attention(isa: str, heads: tuple[int, int, int], block_size: int, kv_dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim = heads
    batch = make_paged_batch(
        [1, 9, 63, 64, 65, 130],  # decode, prefill, chunked prefill, around the tile of 64 tokens
        [1, 9, 1, 5, 2, 70],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        kv_dtype=kv_dtype,
    )
    check_attention(batch)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("window", [1, 7, 64, 600])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_sliding_window_and_soft_cap(isa: str, window: int, soft_cap: float | None, block_size: int) -> None:
    batch = make_paged_batch([40, 700, 90], [40, 1, 33], block_size=block_size)
    for row, (seq_len, query_len) in enumerate(((40, 40), (700, 1), (90, 33))):
        # Blocks wholly behind the window are gone from the table.
        batch.block_tables[row, : max(0, seq_len - query_len + 1 - window) // block_size] = -1
    check_attention(batch, sliding_window=window, soft_cap=soft_cap)


@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [([1100, 515], [1, 1]), ([1100, 515], [1, 40]), ([3, 1600, *range(1, 9)], [0, 1, *[1] * 8])],
    ids=["decode", "mixed", "one long among many"],
)
def test_context_longer_than_a_split(isa: str, num_threads: int, seq_lens: list[int], query_lens: list[int]) -> None:
    batch = make_paged_batch(seq_lens, query_lens, num_heads=3, num_kv_heads=1, kv_dtype=torch.bfloat16)
    check_attention(batch)
    check_attention(batch, sliding_window=520)


def test_rows_without_tokens_are_skipped(isa: str) -> None:
    check_attention(make_paged_batch([5, 3, 8], [2, 0, 8]))


def test_strided_query(isa: str) -> None:
    batch = make_paged_batch([20, 33], [20, 1])
    qkv = torch.randn(21, 8, 16)
    qkv[:, :4] = batch.query
    batch.query = qkv[:, :4]
    check_attention(batch)


def test_a_nan_in_one_row_stays_there(isa: str) -> None:
    batch = make_paged_batch([30, 30], [3, 3])
    batch.query[1, 2] = float("nan")
    out = cpu.paged_attention(
        batch.query, batch.kv_cache, batch.query_start_loc, batch.seq_lens, batch.block_tables, 0.25, None, None, None
    )
    poisoned_heads = out.isnan().any(-1)
    assert poisoned_heads[1, 2] and poisoned_heads.sum() == 1


@pytest.mark.parametrize("block_elements", [1, 7, 100_000])
def test_swap_blocks(isa: str, block_elements: int) -> None:
    src, dst = randn(6, block_elements), randn(9, block_elements)
    wanted = dst.clone()
    pairs = torch.tensor([[5, 0], [0, 8], [1, 0]])
    cpu.swap_blocks(src, dst, pairs)
    reference.swap_blocks(src, wanted, pairs)
    assert torch.equal(dst, wanted)


def test_copies_within_a_pool_run_in_order(isa: str) -> None:
    pool = randn(4, 2, 3, 5).bfloat16()
    wanted = pool.clone()
    pairs = torch.tensor([[0, 1], [1, 2], [3, 0]])
    cpu.swap_blocks(pool, pool, pairs)
    reference.swap_blocks(wanted, wanted, pairs)
    assert torch.equal(pool, wanted) and torch.equal(pool[2], pool[1])
