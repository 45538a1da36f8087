"""A mixture of experts: transformers' own is the oracle in tests/models; here the layer alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagedserve.kernels import native, ops
from pagedserve.layers.linear import Linear
from pagedserve.layers.moe import MixtureOfExperts
from pagedserve.quantization.none import DenseMethod
from pagedserve.quantization.packed import PackedMethod

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 64, 96, 6, 3


@pytest.mark.parametrize("is_packed", [False, True])
def test_every_token_is_the_weighted_sum_of_its_experts(is_packed: bool) -> None:
    if is_packed and not native.available():
        pytest.skip("packed experts need the native CPU library, which is not built")
    torch.manual_seed(0)
    method = PackedMethod("auto") if is_packed else DenseMethod()
    gate_up, down = torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN) / 8, torch.randn(NUM_EXPERTS, HIDDEN, INNER) / 8
    router = torch.randn(NUM_EXPERTS, HIDDEN)
    mixture = MixtureOfExperts(
        Linear(method.from_dense(router)),
        method.stack_experts([[method.from_dense(part) for part in expert.chunk(2)] for expert in gate_up]),
        method.stack_experts([[method.from_dense(expert)] for expert in down]),
        top_k=TOP_K,
        renormalize=True,
        activation="silu",
    )
    x = torch.randn(17, HIDDEN)
    shares, best = (x.double() @ router.double().T).topk(TOP_K)
    wanted = torch.zeros(17, HIDDEN, dtype=torch.float64)
    for token in range(17):
        for share, expert in zip(shares[token].softmax(0), best[token], strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            wanted[token] += share * (down[expert].double() @ (F.silu(gate) * up))
    torch.testing.assert_close(mixture(x), wanted.float(), atol=1e-4, rtol=1e-4)


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
