"""Attention by csrc/cpu/attention_kernels.cpp; K lies transposed within a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedserve.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec
from pagedserve.kernels import cpu, native, reference

_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(slots=True, kw_only=True)
class CpuMetadata(AttentionMetadata):
    """The step's metadata and its description in C, made once for all layers."""

    rows: cpu.AttentionRows


class CpuBackend(AttentionBackend):
    """Tiled online-softmax attention on the native thread pool.

    A row's numbers have the same bits alone or in a batch, however its prompt is chunked.
    """

    name = "cpu"
    why_not_captured = "a CPU's steps are programs"

    @classmethod
    def why_not(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cpu":
            return f"it runs on the CPU, not on {spec.device.type}"
        if spec.dtype is not torch.float32:
            return f"its activations are fp32, not {spec.dtype}"
        if spec.kv_cache_dtype not in native.KV_DTYPES:
            return f"its KV cache is fp32, bf16, fp16 or int8, not {spec.kv_cache_dtype}"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads"
        if spec.head_dim % 8:
            return f"head_dim must be a multiple of 8, it is {spec.head_dim}"
        if spec.block_size not in _BLOCK_SIZES:
            return f"block_size must be one of {', '.join(map(str, _BLOCK_SIZES))}, it is {spec.block_size}"
        if not native.available():
            return "the native CPU library is not there"
        return None

    @property
    def layer_block_shape(self) -> tuple[int, ...]:
        token_size = reference.kv_token_size(self.spec.head_dim, self.spec.kv_cache_dtype)
        return (2, self.spec.num_kv_heads, self.spec.block_size * token_size)

    def build_metadata(
        self,
        *,
        query_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
        seq_lens: torch.Tensor,  # int32 [num_seqs]
        block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks_per_seq]
        slot_mapping: torch.Tensor,  # int64 [num_tokens]
        max_query_len: int,
        max_seq_len: int,
    ) -> CpuMetadata:
        return CpuMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            rows=cpu.AttentionRows(query_start_loc, seq_lens, block_tables, slot_mapping.shape[0]),
        )

    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, *layer_block_shape]
        metadata: CpuMetadata,
        *,
        sliding_window: int | None = None,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        spec = self.spec
        window = spec.sliding_window if sliding_window is None else sliding_window
        cpu.write_kv(key, value, kv_cache, metadata.slot_mapping)
        return cpu.attend(query, kv_cache, metadata.rows, spec.scale, window, spec.soft_cap, None)

    def forward_qkv(
        self,
        qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        positions: torch.Tensor,  # int64 [num_tokens]
        cos_sin: torch.Tensor,  # [max_position, rotary_dim]
        kv_cache: torch.Tensor,  # [num_blocks, *layer_block_shape]
        metadata: CpuMetadata,
        *,
        sliding_window: int | None = None,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        spec = self.spec
        window = spec.sliding_window if sliding_window is None else sliding_window
        return cpu.rotate_and_attend(
            qkv, spec.head_dim, positions, cos_sin, metadata.slot_mapping, kv_cache, metadata.rows, spec.scale,
            window, spec.soft_cap,
        )  # fmt: skip
