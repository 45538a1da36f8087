"""Token embeddings: rows of a matrix, wherever and however it is stored."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from pagedserve.kernels import cpu, native, ops
from pagedserve.quantization import gguf
from pagedserve.quantization.method import LinearWeight


class Embedding(ABC):
    """Looks rows up. The result is a new tensor that the caller may write to."""

    nbytes: int

    @abstractmethod
    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [num_tokens] -> [num_tokens, hidden] in the dtype of the activations."""


class DenseEmbedding(Embedding):
    """A matrix of floats. On CPUs it may be a view of the mapped file: rows are read (and cast) when asked for."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype):
        self._weight = weight  # [vocab, hidden]
        self._dtype = dtype
        self.nbytes = weight.nbytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return ops.embedding(self._weight, token_ids, self._dtype)


class PackedEmbedding(Embedding):
    """Rows of a GGUF file in their own format, dequantised when asked for: exact, and no copy of the matrix."""

    def __init__(self, quant_type: str, rows: np.ndarray, dtype: torch.dtype):
        self._rows = rows  # uint8 [vocab, bytes_per_row]
        self._quant_type = quant_type
        self._dtype = dtype
        self._type_number = gguf.type_number(quant_type)
        self._hidden_size = gguf.row_length(quant_type, rows)
        self._is_native = native.available() and native.linear_format_of_ggml_type(self._type_number) is not None
        self.nbytes = rows.nbytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._is_native:
            return cpu.ggml_rows(self._rows, self._type_number, self._hidden_size, token_ids).to(self._dtype)
        return gguf.dequantize(self._quant_type, self._rows[token_ids.numpy()]).to(self._dtype)


class SharedEmbedding(Embedding):
    """The rows of the output head: where both embeddings are one matrix it is held once, in the head's format."""

    nbytes = 0  # the head counts

    def __init__(self, head: LinearWeight, dtype: torch.dtype):
        self._head = head
        self._dtype = dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._head.rows(token_ids).to(self._dtype)


class ScaledEmbedding(Embedding):
    """Rows of another embedding times a number."""

    def __init__(self, rows: Embedding, factor: float):
        self._rows = rows
        self._factor = factor
        self.nbytes = rows.nbytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return ops.scale(self._rows(token_ids), self._factor)
