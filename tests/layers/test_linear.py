"""Linear and norm: bias, residual, what they count as memory."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pagedserve.layers.linear import Linear
from pagedserve.layers.norm import RMSNorm
from tests.helpers.dense_weights import DenseWeight


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(has_bias: bool) -> None:
    weight, bias, x = torch.randn(9, 5), torch.randn(9) if has_bias else None, torch.randn(4, 5)
    linear = Linear(DenseWeight(weight), bias)
    kept = x.clone()
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight, bias))
    assert torch.equal(x, kept)
    assert linear.nbytes == 4 * (45 + (9 if has_bias else 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_transformers_and_adds_first(dtype: torch.dtype) -> None:
    reference = LlamaRMSNorm(24, eps=1e-3)
    reference.weight.data = torch.rand(24) + 0.5
    norm = RMSNorm(reference.weight.data.to(dtype), 1e-3)
    x, residual = torch.randn(6, 24).to(dtype), torch.randn(6, 24).to(dtype)
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    with torch.inference_mode():
        torch.testing.assert_close(norm(x).float(), reference(x.float()), **tolerance)
        total = x + residual
        torch.testing.assert_close(norm.add(x, residual).float(), reference(total.float()), **tolerance)
    assert torch.equal(residual, total)
    assert norm.nbytes == 24 * dtype.itemsize
