"""Dense weights and torch's own product: every device, and the reference for the packed formats."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from pagedserve.errors import ConfigError
from pagedserve.kernels import ops
from pagedserve.quantization.gguf import FLOAT_TYPES, check_rows, dequantize
from pagedserve.quantization.method import LinearWeight, QuantMethod, as_list

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DenseWeight(LinearWeight):
    """A torch matrix, [out_features, in_features]."""

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        self.out_features, self.in_features = weight.shape

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.linear(x, self.weight.to(x.dtype), bias=bias)

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        return ops.linear_rows(self.weight, row_ids.to(self.weight.device)).float()


class DenseMethod(QuantMethod):
    """Keeps weights as they are, or casts them; integers of GGUF files are dequantised."""

    name = "none"

    def __init__(
        self, weights_dtype: str = "auto", device: torch.device | None = None, dtype: torch.dtype | None = None
    ):
        """`dtype` is that of the activations: weights have it, so that no product casts them again."""
        if weights_dtype != "auto" and weights_dtype not in _DTYPES:
            raise ConfigError(f"dense weights are float32, bfloat16 or float16, not {weights_dtype}")
        self._device = device
        # Rounding to a coarser type than the activations' is what was asked for; then they are cast once.
        self._rounded_to = _DTYPES.get(weights_dtype)
        self.changes_weights = self._rounded_to not in (None, torch.float32)
        self._dtype = dtype or self._rounded_to

    def exact(self) -> QuantMethod:
        return DenseMethod("auto", self._device, self._dtype)

    def from_dense(self, weight: torch.Tensor | Sequence[torch.Tensor]) -> LinearWeight:
        return self._stack(as_list(weight))

    def from_gguf(
        self, quant_type: str | Sequence[str], rows: np.ndarray | Sequence[np.ndarray], in_features: int
    ) -> LinearWeight:
        parts = as_list(rows)
        kinds = as_list(quant_type)
        dense = []
        for kind, part in zip(kinds * (len(parts) // len(kinds)), parts, strict=True):
            check_rows(kind, part, in_features)
            dense.append(dequantize(kind, part))
        return self._stack(dense)

    def size_of(self, stored: Sequence[str], out_features: Sequence[int], in_features: int) -> int:
        kept = [self._dtype or FLOAT_TYPES.get(kind, torch.float32) for kind in stored]
        return sum(out_features) * in_features * functools.reduce(torch.promote_types, kept).itemsize

    def stack_experts(self, experts: Sequence[Sequence[LinearWeight]]) -> torch.Tensor:
        return torch.stack([torch.cat([part.weight for part in expert]) for expert in experts])

    def _stack(self, parts: list[torch.Tensor]) -> DenseWeight:
        rounded = [part if self._rounded_to is None else part.to(self._rounded_to) for part in parts]
        typed = [part.to(device=self._device, dtype=self._dtype) for part in rounded]
        if len(typed) == 1 and typed[0].device.type != "cpu":  # there it may be a view of a mapped file
            return DenseWeight(typed[0].contiguous())
        return DenseWeight(torch.cat(typed))
