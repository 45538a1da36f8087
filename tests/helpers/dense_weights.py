"""The simplest quantization method: fp32 matrices, torch's product. What other methods are measured against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagedserve.quantization.method import LinearWeight, QuantMethod, as_list


class DenseWeight(LinearWeight):
    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        self.out_features, self.in_features = weight.shape

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = x.float() @ self.weight.T
        return (product if bias is None else product + bias).to(x.dtype)

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        return self.weight[row_ids]


class DenseMethod(QuantMethod):
    name = "dense"

    def from_dense(self, weight: torch.Tensor | Sequence[torch.Tensor]) -> LinearWeight:
        return DenseWeight(torch.cat([part.float() for part in as_list(weight)]))

    def from_gguf(
        self, quant_type: str | Sequence[str], rows: np.ndarray | Sequence[np.ndarray], in_features: int
    ) -> LinearWeight:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        kinds, parts = as_list(quant_type), [rows] if isinstance(rows, np.ndarray) else list(rows)
        if len(kinds) == 1:
            kinds *= len(parts)
        dense = [dequantize(part, GGMLQuantizationType[kind]) for kind, part in zip(kinds, parts, strict=True)]
        return DenseWeight(torch.from_numpy(np.concatenate(dense)).reshape(-1, in_features))

    def size_of(self, stored: Sequence[str], out_features: Sequence[int], in_features: int) -> int:
        return 4 * sum(out_features) * in_features

    def stack_experts(self, experts: Sequence[Sequence[LinearWeight]]) -> torch.Tensor:
        return torch.stack([torch.cat([part.weight for part in expert]) for expert in experts])
