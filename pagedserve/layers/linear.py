"""A linear layer: a weight in whatever storage format, and a bias."""

from __future__ import annotations

import torch

from pagedserve.quantization.method import LinearWeight


class Linear:
    """`x @ weight.T + bias`; several projections of one input are one Linear whose rows are stacked."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: LinearWeight, bias: torch.Tensor | None = None):
        self.weight = weight
        self.bias = bias  # [out_features], in the dtype of the activations

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features], in the dtype of x."""
        return self.weight.matmul(x, self.bias)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
