"""A mixture of experts: transformers' own is the oracle in tests/models; here what a row may not depend on."""

from __future__ import annotations

import pytest
import torch

from pagedserve.kernels import native, ops
from pagedserve.layers.linear import Linear
from pagedserve.layers.moe import MixtureOfExperts
from pagedserve.quantization.packed import PackedMethod

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 64, 96, 6, 3


def linear(out_features: int, in_features: int) -> Linear:
    return Linear(PackedMethod("int8").from_dense(torch.randn(out_features, in_features) / in_features**0.5))


@pytest.mark.skipif(not native.available(), reason="packed experts need the native CPU library, which is not built")
def test_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    torch.manual_seed(0)
    mixture = MixtureOfExperts(
        linear(NUM_EXPERTS, HIDDEN),
        [linear(2 * INNER, HIDDEN) for _ in range(NUM_EXPERTS)],
        [linear(HIDDEN, INNER) for _ in range(NUM_EXPERTS)],
        top_k=TOP_K,
        renormalize=True,
        activation=ops.silu_mul,
    )
    x = torch.randn(17, HIDDEN)
    together = mixture(x)
    assert together.abs().min() > 0
    for i in range(len(x)):
        assert torch.equal(mixture(x[i : i + 1])[0], together[i])
    assert torch.equal(mixture(x.flip(0)), together.flip(0))


@pytest.mark.parametrize("renormalize", [False, True])
def test_the_router_takes_the_best(renormalize: bool) -> None:
    logits = torch.randn(5, NUM_EXPERTS)
    weights, experts = ops.route(logits, TOP_K, renormalize=renormalize)
    shares = logits.softmax(-1)
    for row in range(5):
        best = shares[row].argsort(descending=True)[:TOP_K]
        assert experts[row].tolist() == best.tolist()
        wanted = shares[row][best]
        torch.testing.assert_close(weights[row], wanted / wanted.sum() if renormalize else wanted)
