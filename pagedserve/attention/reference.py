"""Attention in plain torch: the definition that every other backend is measured against; takes any spec."""

from __future__ import annotations

import torch

from pagedserve.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec
from pagedserve.kernels import reference

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ReferenceBackend(AttentionBackend):
    """Gathers each row's keys and values and attends in fp32, row after row."""

    name = "reference"
    why_not_captured = "it looks at lengths on the host"

    @classmethod
    def why_not(cls, spec: AttentionSpec) -> str | None:
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads"
        if spec.kv_cache_dtype not in _FLOATS and spec.kv_cache_dtype not in reference.LARGEST_CODES:
            return f"its KV cache holds floats, int8 or fp8_e4m3, not {spec.kv_cache_dtype}"
        return None

    @property
    def layer_block_shape(self) -> tuple[int, ...]:
        token_size = reference.kv_token_size(self.spec.head_dim, self.spec.kv_cache_dtype)
        return (2, self.spec.num_kv_heads, self.spec.block_size, token_size)

    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, *layer_block_shape]
        metadata: AttentionMetadata,
        *,
        sliding_window: int | None = None,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        spec = self.spec
        reference.write_kv(key, value, kv_cache, metadata.slot_mapping)
        return reference.paged_attention(
            query,
            kv_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            spec.scale,
            spec.sliding_window if sliding_window is None else sliding_window,
            spec.soft_cap,
            None,
        )
