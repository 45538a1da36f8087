"""Normalisation."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from pagedserve.kernels import ops


class Norm(ABC):
    """Normalises rows, with the residual add that precedes it in one pass."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float):
        self.weight = weight  # [hidden]
        self.eps = eps

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalised copy of x. [num_tokens, hidden]"""

    @abstractmethod
    def in_place(self, x: torch.Tensor) -> torch.Tensor:
        """x becomes its norm and is returned."""

    @abstractmethod
    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual += x; x becomes the norm of the sum and is returned. Both [num_tokens, hidden]."""

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class RMSNorm(Norm):
    """Root mean square norm (arXiv 1910.07467)."""

    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def in_place(self, x: torch.Tensor) -> torch.Tensor:
        """Also of heads: [num_tokens, num_heads, head_dim], where the weight is [head_dim]."""
        return ops.rms_norm(x, self.weight, self.eps, out=x)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps, residual=residual, out=x)


class LayerNorm(Norm):
    """Mean and variance norm (arXiv 1607.06450)."""

    __slots__ = ("bias",)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float):
        super().__init__(weight, eps)
        self.bias = bias  # [hidden]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def in_place(self, x: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps, out=x)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps, residual=residual, out=x)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
