"""PoolingParams: one vector from a prompt's hidden states. Validated once, then immutable."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pagedserve.errors import RequestError

POOLING_TYPES = ("last", "mean")
MAX_DIMENSIONS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How hidden states (those after the last norm) become a vector.

    `pooling_type`: "last" takes the last token's, which has seen the whole prompt; "mean" averages all. `dimensions`
    keeps that many leading numbers, as models trained for it allow (Matryoshka, arXiv 2205.13147). `normalize` then
    scales the vector to length 1. All in fp32.
    """

    pooling_type: str = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling_type not in POOLING_TYPES:
            raise RequestError(f"pooling_type must be one of {', '.join(POOLING_TYPES)}", param="pooling_type")
        size = self.dimensions
        if size is not None and (type(size) is not int or not 1 <= size <= MAX_DIMENSIONS):
            raise RequestError(f"dimensions must be an integer between 1 and {MAX_DIMENSIONS}", param="dimensions")

    @property
    def needs_all_tokens(self) -> bool:
        """Whether every position must be computed, cached or not."""
        return self.pooling_type == "mean"


def floats(vector: bytes) -> list[float]:
    """The numbers of a vector as it travels: little-endian fp32."""
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))
