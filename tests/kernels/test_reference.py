"""The definitions themselves, against torch's own functions in fp64 and against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from pagedserve.kernels import reference
from tests.helpers.paged_batch import PagedBatch, make_paged_batch


def oracle(batch: PagedBatch, scale: float, window: int | None = None, soft_cap: float | None = None) -> torch.Tensor:
    """scaled_dot_product_attention in fp64 over contiguous keys and values."""
    parts = []
    starts = batch.query_start_loc.tolist()
    for row, (key, value) in enumerate(zip(batch.keys, batch.values, strict=True)):
        q = batch.query[starts[row] : starts[row + 1]].double().transpose(0, 1)
        k, v = key.double().transpose(0, 1), value.double().transpose(0, 1)
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        seq_len, query_len = k.shape[1], q.shape[1]
        at = torch.arange(seq_len - query_len, seq_len)[:, None]
        seen = torch.arange(seq_len) <= at
        if window is not None:
            seen &= torch.arange(seq_len) > at - window
        if soft_cap is None:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
        else:
            scores = soft_cap * torch.tanh(q @ k.transpose(1, 2) * scale / soft_cap)
            attended = torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ v
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
@pytest.mark.parametrize("heads", [(2, 2, 16), (9, 3, 64), (4, 1, 33)], ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (7, None), (None, 2.0), (20, 2.0)])
def test_paged_attention_equals_sdpa(
    heads: tuple[int, int, int],
    block_size: int,
    kv_dtype: torch.dtype,
    transposed: bool,
    window: int | None,
    soft_cap: float | None,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    batch = make_paged_batch(
        [1, 17, 40, 65],
        [1, 17, 1, 9],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        kv_dtype=kv_dtype,
        transposed=transposed,
    )
    arguments = (batch.query, batch.kv_cache, batch.query_start_loc, batch.seq_lens, batch.block_tables)
    out = reference.paged_attention(*arguments, 0.2, window, soft_cap, None)
    assert_close(out.double(), oracle(batch, 0.2, window, soft_cap), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_an_int8_cache_gives_back_what_was_written_to_half_a_step(transposed: bool) -> None:
    """Of each token and head by itself: an outlier costs its own head's other numbers, and nobody else's."""
    num_tokens, num_kv_heads, head_dim, block_size = 9, 3, 8, 4
    kv = torch.randn(2, num_tokens, num_kv_heads, head_dim)
    kv[0, 4, 1, 3] = 1000.0
    inner = (block_size * (head_dim + 4),) if transposed else (block_size, head_dim + 4)
    pool = torch.full((3, 2, num_kv_heads, *inner), -1, dtype=torch.int8)
    slots = torch.tensor([11, 2, 7, 0, 5, -1, 9, 1, 3])
    reference.write_kv(kv[0], kv[1], pool, slots)
    codes, scales = reference.split_kv(pool, head_dim), reference.split_kv_scales(pool, head_dim)
    for x, code, scale in zip(kv, codes, scales, strict=True):
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            block, offset = divmod(slot, block_size)
            steps = scale[block, :, offset].contiguous().view(torch.float32)
            assert_close(steps, x[token].abs().amax(-1, keepdim=True) / 127)
            error = (code[block, :, offset].float() * steps - x[token]).abs()
            assert (error <= steps * 0.5001).all()
    assert (pool.view(torch.uint8) == 255).sum() >= 2 * 4 * num_kv_heads * (head_dim + 4)  # slots 4, 6, 8 and 10


def test_paged_attention_reads_16_bit_queries() -> None:
    batch = make_paged_batch([9, 30], [9, 1], kv_dtype=torch.bfloat16, transposed=False)
    batch.query = batch.query.bfloat16()
    out = reference.paged_attention(
        batch.query, batch.kv_cache, batch.query_start_loc, batch.seq_lens, batch.block_tables, 0.25, None, None, None
    )
    assert out.dtype is torch.bfloat16
    assert_close(out.double(), oracle(batch, 0.25), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("transposed", [False, True])
def test_write_kv_puts_each_token_in_its_slot(transposed: bool) -> None:
    inner = (12,) if transposed else (4, 3)
    kv_cache = torch.zeros(5, 2, 2, *inner)
    key, value = torch.randn(3, 2, 3), torch.randn(3, 2, 3)
    reference.write_kv(key, value, kv_cache, torch.tensor([9, -1, 4]))
    keys, values = reference.split_kv(kv_cache, 3)
    for token, block, offset in ((0, 2, 1), (2, 1, 0)):
        assert torch.equal(keys[block, :, offset], key[token])
        assert torch.equal(values[block, :, offset], value[token])
    assert kv_cache.count_nonzero() == 2 * 2 * 2 * 3  # two tokens, nothing else


def test_rms_norm_equals_torch() -> None:
    x, weight, residual = torch.randn(4, 6), torch.randn(6), torch.randn(4, 6)
    assert_close(reference.rms_norm(x, weight, 1e-5, None, None), F.rms_norm(x, (6,), weight, 1e-5))
    total = x + residual
    assert_close(reference.rms_norm(x, weight, 1e-5, residual, None), F.rms_norm(total, (6,), weight, 1e-5))
    assert torch.equal(residual, total)


def test_rotary_embedding_is_a_rotation_in_the_complex_plane() -> None:
    positions = torch.tensor([3, 0, 7])
    angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1]))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    query = torch.randn(3, 2, 6)  # the last two of six elements are not rotated
    pairs = torch.complex(query[..., 0:2], query[..., 2:4])
    turned = pairs * torch.exp(1j * angles[positions])[:, None]
    wanted = torch.cat((turned.real, turned.imag, query[..., 4:]), dim=-1)
    reference.rotary_embedding(positions, query, None, cos_sin)
    assert_close(query, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_activations(dtype: torch.dtype) -> None:
    x = torch.randn(3, 10).to(dtype)
    gate, up = x[:, :5], x[:, 5:]
    assert torch.equal(reference.gated_activation("silu", x, None), F.silu(gate) * up)
    assert torch.equal(reference.gated_activation("gelu_erf", x, None), F.gelu(gate) * up)
    assert torch.equal(reference.gated_activation("gelu_tanh", x, None), F.gelu(gate, approximate="tanh") * up)
    with pytest.raises(ValueError, match="swish"):
        reference.gated_activation("swish", x, None)


def test_swap_blocks_copies_in_order() -> None:
    pool = torch.arange(8.0).view(4, 2)
    reference.swap_blocks(pool, pool, torch.tensor([[0, 1], [1, 2]]))
    assert torch.equal(pool, torch.tensor([[0.0, 1], [0, 1], [0, 1], [6, 7]]))


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_router_takes_the_largest_shares_and_of_equals_the_first(renormalize: bool) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0, 2.0], [-math.inf, 5.0, -math.inf, 4.0, -math.inf]])
    weights, experts = reference.route(logits, 3, renormalize)
    assert experts.tolist() == [[1, 2, 4], [1, 3, 0]]
    shares = torch.softmax(logits.double(), -1).gather(1, experts)
    wanted = shares / shares.sum(-1, keepdim=True) if renormalize else shares
    assert_close(weights, wanted.float())
    assert weights.dtype is torch.float32 and experts.dtype is torch.int64


@pytest.mark.parametrize(
    ("row", "first"),
    [([1.0, math.nan, 0.0], [1, 0]), ([1.0, math.inf, 0.0], [1, 0]), ([-math.inf] * 3, [0, 1])],
    ids=str,
)
def test_a_router_whose_logits_are_no_numbers_gives_nan(row: list[float], first: list[int]) -> None:
    weights, experts = reference.route(torch.tensor([row, [1.0, 2.0, 3.0]]), 2, True)
    assert weights[0].isnan().all()
    assert experts.tolist() == [first, [2, 1]]
    assert weights[1].isfinite().all()


@pytest.mark.parametrize(("kind", "act"), [("silu", F.silu), ("gelu_erf", F.gelu)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_experts_are_gated_mlps_whose_results_are_added(kind: str, act: object, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(7, 12), torch.randn(5, 16, 12), torch.randn(5, 12, 8)
    weights, chosen = reference.route(torch.randn(7, 5), 3, False)
    wanted = torch.zeros(7, 12, dtype=torch.float64)
    for token in range(7):
        for weight, expert in zip(weights[token].double(), chosen[token], strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            wanted[token] += weight * (down[expert].double() @ (act(gate) * up))
    arguments = (x.to(dtype), weights, chosen, gate_up.to(dtype), down.to(dtype), kind)
    found = reference.experts(*arguments, None)
    assert found.dtype is dtype
    error = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    assert_close(found.double(), wanted, atol=error * wanted.abs().max().item(), rtol=error)
    out = torch.empty_like(found)
    assert reference.experts(*arguments, out) is out and torch.equal(out, found)
