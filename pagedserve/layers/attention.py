"""What attention needs to know of a step, and the layer that asks the backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagedserve.attention import AttentionBackend, AttentionMetadata


@dataclass(slots=True, kw_only=True)
class ForwardContext:
    """Everything of a step that is not a token: handed down as an argument, never looked up."""

    metadata: AttentionMetadata
    kv_cache: torch.Tensor  # [num_blocks, num_layers, *layer_block_shape]


class PagedAttention:
    """Splits a fused projection into query, key and value, and attends over the paged context."""

    __slots__ = ("_backend", "_split", "_width", "head_dim")

    def __init__(self, backend: AttentionBackend, *, num_heads: int, num_kv_heads: int, head_dim: int):
        self._backend = backend
        self._split = (num_heads, num_kv_heads, num_kv_heads)
        self._width = num_heads * head_dim
        self.head_dim = head_dim

    def split(self, qkv: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] as [num_tokens, heads, head_dim] each."""
        return qkv.view(qkv.shape[0], -1, self.head_dim).split_with_sizes(self._split, 1)

    def __call__(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        layer_cache: torch.Tensor,  # [num_blocks, *layer_block_shape]
        metadata: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, num_heads * head_dim]
        return self._backend.forward(query, key, value, layer_cache, metadata).view(-1, self._width)
