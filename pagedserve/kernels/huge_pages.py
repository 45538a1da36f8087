"""Memory of weights, in huge pages where the system has them.

The matrices of a model lie next to each other: each in pages of its own, the linears of a step take a quarter longer on
the demo model, whose matrices are smaller than a huge page.
"""

from __future__ import annotations

import threading

import torch

from pagedserve import huge_pages

_CHUNK_BYTES = 32 << 20
_ALIGNMENT = 64


class _Chunk:
    """The mapping that is being cut up; each lives as long as one of its pieces does."""

    lock = threading.Lock()
    free = torch.empty(0, dtype=torch.uint8)


def take(num_bytes: int) -> torch.Tensor:
    """Zeros, uint8 [num_bytes], aligned to 64 bytes; untouched, they take no memory."""
    padded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    with _Chunk.lock:
        if padded > len(_Chunk.free):
            _Chunk.free = _mapping(max(_CHUNK_BYTES, padded))
        taken, _Chunk.free = _Chunk.free[:num_bytes], _Chunk.free[padded:]
    return taken


def _mapping(num_bytes: int) -> torch.Tensor:
    with torch.inference_mode(False):  # the next to take a piece may write to it outside of that mode
        return torch.from_numpy(huge_pages.reserve(num_bytes))
