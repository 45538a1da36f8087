"""Mixture of experts (arXiv 1701.06538, 2401.04088): a router sends each token to a few of many MLPs."""

from __future__ import annotations

import torch

from pagedserve.kernels import native, ops
from pagedserve.layers.linear import Linear


class MixtureOfExperts:
    """Each token through its best experts, weighted by the router."""

    def __init__(
        self,
        router: Linear,
        gate_up: torch.Tensor | native.PackedExperts,  # [num_experts, 2 * expert_size, hidden]
        down: torch.Tensor | native.PackedExperts,  # [num_experts, hidden, expert_size]
        *,
        top_k: int,
        renormalize: bool,
        activation: str,
    ):
        """`renormalize`: the weights of a token's experts sum to 1. `activation` is the op's name of the gate's."""
        self._router = router
        self._gate_up = gate_up
        self._down = down
        self._top_k = top_k
        self._renormalize = renormalize
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]"""
        weights, chosen = ops.route(self._router(x), self._top_k, renormalize=self._renormalize)
        return ops.experts(x, weights, chosen, self._gate_up, self._down, self._activation)
