"""The border between models and attention: what a backend is told, what it is given, what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from pagedserve.kernels import ops


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a model asks of attention; fixed for the life of a worker."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype  # of query, key, value and the output
    kv_cache_dtype: torch.dtype
    device: torch.device
    sliding_window: int | None = None  # a token sees itself and the window - 1 tokens before it
    soft_cap: float | None = None  # scores become soft_cap * tanh(scores / soft_cap)
    scale: float  # multiplies query . key


@dataclass(slots=True, kw_only=True)
class AttentionMetadata:
    """Where the rows of one step lie. Row i owns tokens query_start_loc[i] .. query_start_loc[i + 1] - 1 of the
    step, and they are the last ones of its seq_lens[i] tokens of context."""

    query_start_loc: torch.Tensor  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor  # int32 [num_seqs], context length including this step's tokens
    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks_per_seq]
    slot_mapping: torch.Tensor  # int64 [num_tokens], block * block_size + offset; -1: this token is not kept
    max_query_len: int
    max_seq_len: int


class AttentionBackend(ABC):
    """One way to compute paged attention. Every backend gives the numbers of `reference` within tolerance."""

    name: ClassVar[str]
    # Why its launches cannot be captured (on GPUs) and replayed with other lengths; None: they can. Then all that
    # changes from step to step is read from tensors of the metadata when a kernel runs, also by those that
    # `build_metadata` launches, which are captured too; metadata built for `max_query_len` 1 and the model's own
    # length serves every step of as many rows, and a row of no context (`seq_lens` 0) takes no part.
    why_not_captured: ClassVar[str | None] = None

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def why_not(cls, spec: AttentionSpec) -> str | None:
        """The reason why this backend cannot serve `spec`, or None when it can."""

    @property
    @abstractmethod
    def layer_block_shape(self) -> tuple[int, ...]:
        """Shape of what one block holds of one layer. The pool is [num_blocks, num_layers, *layer_block_shape]."""

    def build_metadata(
        self,
        *,
        query_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
        seq_lens: torch.Tensor,  # int32 [num_seqs]
        block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks_per_seq]
        slot_mapping: torch.Tensor,  # int64 [num_tokens]
        max_query_len: int,
        max_seq_len: int,
    ) -> AttentionMetadata:
        """Prepares, once a step, what every layer's `forward` reads. A backend that plans work overrides it."""
        return AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, *layer_block_shape], one layer's view of the pool
        metadata: AttentionMetadata,
        *,
        sliding_window: int | None = None,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Writes key and value into their slots, then attends causally over each row's whole context.

        `sliding_window` is this layer's window where layers differ; None means the spec's.
        """

    def forward_qkv(
        self,
        qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        positions: torch.Tensor,  # int64 [num_tokens]
        cos_sin: torch.Tensor,  # [max_position, rotary_dim], as ops.rotary_embedding wants it
        kv_cache: torch.Tensor,  # [num_blocks, *layer_block_shape], one layer's view of the pool
        metadata: AttentionMetadata,
        *,
        sliding_window: int | None = None,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """`forward` straight from a fused projection: rotates its query, and where it likes its key, in place first.

        A backend that can do all of it in one call overrides this.
        """
        spec = self.spec
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        query, key, value = qkv.view(qkv.shape[0], -1, spec.head_dim).split(heads, dim=1)
        ops.rotary_embedding(positions, query, key, cos_sin)
        return self.forward(query, key, value, kv_cache, metadata, sliding_window=sliding_window)
