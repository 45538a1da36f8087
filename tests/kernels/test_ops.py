"""ops: the right implementation for each tensor, and the same answers from both."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from pagedserve.kernels import native, ops, reference
from tests.helpers.paged_batch import make_paged_batch


@pytest.fixture(params=["native", "reference"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and not native.available():
        pytest.skip("the native library is not built here")
    if request.param == "reference":
        monkeypatch.setattr(native, "available", lambda: False)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_dtype_is_served(implementation: str, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 8).to(dtype), torch.ones(8, dtype=dtype)
    normed = ops.rms_norm(x, weight, 1e-6)
    assert normed.dtype is dtype
    assert_close(normed, F.rms_norm(x, (8,), weight, 1e-6))
    assert_close(ops.silu_mul(x), F.silu(x[:, :4]) * x[:, 4:])
    assert_close(ops.gelu_mul(x), F.gelu(x[:, :4]) * x[:, 4:])
    assert_close(ops.gelu_mul(x, approximate="tanh"), F.gelu(x[:, :4], approximate="tanh") * x[:, 4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_dtype_is_served_between_layers(implementation: str, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(3, 8).to(dtype), torch.randn(8).to(dtype), torch.randn(8).to(dtype)
    assert_close(ops.layer_norm(x, weight, bias, 1e-5), F.layer_norm(x, (8,), weight, bias, 1e-5))
    assert_close(ops.activation("relu", x), F.relu(x))
    assert_close(ops.activation("gelu_tanh", x), F.gelu(x, approximate="tanh"))
    assert_close(ops.scale(x.clone(), 3.0), x * 3)
    assert_close(ops.soft_cap(x.clone(), 2.0), torch.tanh(x / 2) * 2)
    assert_close(ops.add(x.clone(), x), x + x)
    table = torch.randn(5, 8).to(torch.bfloat16)
    assert torch.equal(ops.embedding(table, torch.tensor([4, 1]), dtype), table[[4, 1]].to(dtype))


def test_out_and_residual_are_written_in_place(implementation: str) -> None:
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    total = x + residual
    out = torch.empty(3, 8)
    assert ops.rms_norm(x, torch.ones(8), 1e-6, residual=residual, out=out) is out
    assert_close(residual, total)
    assert_close(out, F.rms_norm(total, (8,), eps=1e-6))
    half = torch.empty(3, 4)
    assert ops.silu_mul(x, out=half) is half
    assert_close(half, F.silu(x[:, :4]) * x[:, 4:])


@pytest.mark.parametrize("transposed", [False, True])
def test_attention_takes_either_layout(implementation: str, transposed: bool) -> None:
    batch = make_paged_batch([20, 7], [1, 7], transposed=transposed)
    new_key, new_value = torch.randn(8, 2, 16), torch.randn(8, 2, 16)
    slots = torch.cat((batch.slots[0][-1:], batch.slots[1]))
    ops.write_kv(new_key, new_value, batch.kv_cache, slots)
    keys, values = reference.split_kv(batch.kv_cache, 16)
    assert torch.equal(keys[slots // 16, :, slots % 16], new_key)
    assert torch.equal(values[slots // 16, :, slots % 16], new_value)
    arguments = (batch.query, batch.kv_cache, batch.query_start_loc, batch.seq_lens, batch.block_tables)
    out = torch.full_like(batch.query, float("nan"))
    assert ops.paged_attention(*arguments, scale=0.25, sliding_window=9, soft_cap=4.0, out=out) is out
    assert_close(out, reference.paged_attention(*arguments, 0.25, 9, 4.0, None), atol=2e-6, rtol=1e-5)


def test_rotary_embedding_in_place(implementation: str) -> None:
    positions, cos_sin = torch.tensor([1, 2]), torch.randn(4, 8)
    query, key = torch.randn(2, 3, 8), torch.randn(2, 1, 8)
    wanted_query, wanted_key = query.clone(), key.clone()
    reference.rotary_embedding(positions, wanted_query, wanted_key, cos_sin)
    ops.rotary_embedding(positions, query, key, cos_sin)
    assert_close(query, wanted_query)
    assert_close(key, wanted_key)


def test_blocks_move_within_and_between_pools(implementation: str) -> None:
    device, host = torch.randn(4, 2, 3).bfloat16(), torch.zeros(2, 2, 3).bfloat16()
    ops.copy_blocks(device, torch.tensor([[0, 3]]))
    assert torch.equal(device[3], device[0])
    ops.swap_blocks(device, host, torch.tensor([[2, 1], [1, 0]]))
    assert torch.equal(host, device[[1, 2]])
    ops.swap_blocks(host, device, torch.empty(0, 2, dtype=torch.int64))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 320, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_bitmask_leaves_what_its_bits_allow(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    wide = torch.randn(5, vocab_size + 7, generator=generator).to(dtype)
    wide[0, 0] = -torch.inf
    num_words = vocab_size // 32 + 2  # one more than is needed
    masks = torch.randint(-(2**31), 2**31, (3, num_words), generator=generator, dtype=torch.int64).to(torch.int32)
    masks[0] = -1
    masks[1, 1:] = 0
    rows = [4, 0, 2]
    expected = wide.clone()
    for row, mask in zip(rows, masks.tolist(), strict=True):
        for token in range(vocab_size):
            if not mask[token // 32] >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    ops.apply_token_bitmask(wide[:, :vocab_size], torch.tensor(rows), masks)
    assert torch.equal(wide, expected)
