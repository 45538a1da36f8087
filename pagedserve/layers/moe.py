"""Mixture of experts (arXiv 1701.06538, 2401.04088): a router sends each token to a few of many MLPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pagedserve.kernels import ops
from pagedserve.layers.linear import Linear


class MixtureOfExperts:
    """Each token through its best experts, weighted by the router.

    Experts work one after the other on all tokens that are theirs, and a token's sum is taken in the order of its
    experts' numbers: its result does not depend on its neighbours wherever the linears' does not.
    """

    def __init__(
        self,
        router: Linear,
        gate_up_projs: Sequence[Linear],
        down_projs: Sequence[Linear],
        *,
        top_k: int,
        renormalize: bool,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ):
        """`renormalize`: the weights of a token's experts sum to 1. One pair of linears an expert."""
        self._router = router
        self._gate_up_projs = gate_up_projs
        self._down_projs = down_projs
        self._top_k = top_k
        self._renormalize = renormalize
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]"""
        weights, experts = ops.route(self._router(x), self._top_k, renormalize=self._renormalize)
        total = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            tokens, ranks = (experts == expert).nonzero(as_tuple=True)
            hidden = self._activation(self._gate_up_projs[expert](x[tokens]))
            total.index_add_(0, tokens, self._down_projs[expert](hidden) * weights[tokens, ranks, None].to(x.dtype))
        return total
