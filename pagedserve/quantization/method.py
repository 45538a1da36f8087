"""The border between a linear layer and the format of its weights.

A layer holds one `LinearWeight` and calls `matmul`; how the numbers are stored, packed and multiplied is
the weight's own affair. A `QuantMethod` makes such weights, from dense tensors or from the rows of a GGUF
file. Fused projections (qkv, gate and up) pass several matrices: their rows are stacked in that order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pagedserve.kernels.native import PackedExperts

_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class RoundingError:
    """What quantising took from dense weights: sums of squares over rows that were compared."""

    error: float
    weights: float

    @property
    def relative(self) -> float:
        """Root of the mean square error over that of the weights."""
        return math.sqrt(self.error / self.weights) if self.weights else 0.0

    @property
    def sums(self) -> tuple[float, float]:
        return self.error, self.weights

    def __add__(self, other: RoundingError) -> RoundingError:
        return RoundingError(self.error + other.error, self.weights + other.weights)


class LinearWeight(ABC):
    """A matrix `[out_features, in_features]` in some storage format, ready to multiply."""

    out_features: int
    in_features: int

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes one product reads: codes, scales and zero points."""

    @property
    def rounding_error(self) -> RoundingError | None:
        """What was lost when dense weights were quantised while loading; None where nothing was."""
        return None

    @abstractmethod
    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`.

        Args:
            x: [num_tokens, in_features], any float dtype.
            bias: [out_features], in the dtype of `x`.

        Returns:
            [num_tokens, out_features] in the dtype of `x`. A row's bits do not depend on its batch mates
            where the weight says `is_batch_invariant`.
        """

    @abstractmethod
    def rows(self, row_ids: Tensor) -> Tensor:
        """The dequantised rows `row_ids` (int, [num_rows]) as float32 [num_rows, in_features].

        This is embedding lookup where input and output embeddings share one matrix.
        """

    @property
    def is_batch_invariant(self) -> bool:
        """Whether `matmul` gives a row the same bits alone and among any number of other rows."""
        return False

    def dequantize(self) -> Tensor:
        """The whole matrix as float32 [out_features, in_features]."""
        return self.rows(torch.arange(self.out_features))


class QuantMethod(ABC):
    """Makes the `LinearWeight`s of one storage format on one device."""

    name: str
    # False where dense weights keep the numbers that their file has.
    changes_weights: bool = False

    @property
    def cache_key(self) -> str | None:
        """Names all that decides how the weights of given files come out, where they may be kept; else None."""
        return None

    @abstractmethod
    def from_dense(self, weight: Tensor | Sequence[Tensor]) -> LinearWeight:
        """Pack (and, for integer formats, quantise) dense weights.

        Args:
            weight: [out_features, in_features], any float dtype, or several to be stacked by rows.
        """

    @abstractmethod
    def from_gguf(
        self, quant_type: str | Sequence[str], rows: np.ndarray | Sequence[np.ndarray], in_features: int
    ) -> LinearWeight:
        """Pack the rows of a GGUF tensor, or of several to be stacked (one quant type, or one for each).

        Args:
            quant_type: GGML name, such as "Q4_1", "Q6_K", "BF16".
            rows: uint8 [out_features, row_bytes], as they lie in the file.
            in_features: numbers in a row.

        Raises:
            ModelLoadError: the type is unknown, or the row size does not fit `in_features`.
        """

    @abstractmethod
    def size_of(self, stored: Sequence[str], out_features: Sequence[int], in_features: int) -> int:
        """`nbytes` of the weight that `from_dense` or `from_gguf` would make of matrices stacked by rows.

        Args:
            stored: the GGML type of each in its file; dense ones are F32, BF16 or F16.
            out_features: rows of each.
        """

    @abstractmethod
    def stack_experts(self, experts: Sequence[Sequence[LinearWeight]]) -> Tensor | PackedExperts:
        """One projection of every expert of a mixture, as `ops.experts` takes it.

        Args:
            experts: weights that this method made; those of one expert are stacked by rows.
        """

    def exact(self) -> QuantMethod:
        """The method for small matrices that decide much (a router): it keeps the numbers of the file; `self` by
        default."""
        return self

    def for_experts(self) -> QuantMethod:
        """The method for the experts of a mixture; `self` by default. Raises ConfigError where it holds none."""
        return self

    def for_head(self) -> QuantMethod:
        """The method for the output head, which tolerates less than 8 bits badly; `self` by default."""
        return self


def as_list(parts: _Part | Sequence[_Part]) -> list[_Part]:
    """One matrix (or name) or several, as a list."""
    return list(parts) if isinstance(parts, list | tuple) else [parts]
