"""Normalisation."""

from __future__ import annotations

import torch

from pagedserve.kernels import ops


class RMSNorm:
    """Root mean square norm (arXiv 1910.07467), with the residual add that precedes it in one pass."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float):
        self.weight = weight  # [hidden]
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalised copy of x. [num_tokens, hidden]"""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual += x; x becomes the norm of the sum and is returned. Both [num_tokens, hidden]."""
        return ops.rms_norm(x, self.weight, self.eps, residual=residual, out=x)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes
