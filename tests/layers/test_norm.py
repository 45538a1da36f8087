"""LayerNorm as layers use it: a copy, in place, and behind a residual add."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagedserve.layers.norm import LayerNorm, RMSNorm


@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm(has_bias: bool) -> None:
    weight, bias = torch.rand(24) + 0.5, torch.randn(24) if has_bias else None
    norm = LayerNorm(weight, bias, 1e-3)
    x, residual = torch.randn(6, 24), torch.randn(6, 24)
    wanted = F.layer_norm(x, (24,), weight, bias, 1e-3)
    torch.testing.assert_close(norm(x), wanted)
    total = x + residual
    torch.testing.assert_close(norm.add(x, residual), F.layer_norm(total, (24,), weight, bias, 1e-3))
    assert torch.equal(residual, total)
    assert norm.in_place(residual) is residual
    torch.testing.assert_close(residual, F.layer_norm(total, (24,), weight, bias, 1e-3))
    assert norm.nbytes == 4 * 24 * (2 if has_bias else 1)


def test_rms_norm_of_heads_in_place() -> None:
    weight, qkv = torch.rand(8) + 0.5, torch.randn(5, 6, 8)
    rest, wanted = qkv[:, 4:].clone(), F.rms_norm(qkv[:, :4], (8,), weight, 1e-5)
    heads = qkv[:, :4]
    assert RMSNorm(weight, 1e-5).in_place(heads) is heads
    torch.testing.assert_close(qkv[:, :4], wanted)
    assert torch.equal(qkv[:, 4:], rest)
