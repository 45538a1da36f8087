"""Attention by the kernels of kernels/triton/, on NVIDIA GPUs, or on the CPU under Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from pagedserve import envs
from pagedserve.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec
from pagedserve.kernels import reference

if TYPE_CHECKING:
    from pagedserve.kernels.triton.attention import Plan

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HEAD_DIM = 256
_MAX_GROUP = 64  # query heads of a KV head
_MIN_CAPABILITY = (8, 0)


@dataclass(slots=True, kw_only=True)
class TritonMetadata(AttentionMetadata):
    """The step's metadata and the plan of its launches, made once for all layers."""

    plan: Plan


class TritonBackend(AttentionBackend):
    """One-query rows with split keys, other rows in tiles, both in one step; 8-bit caches scale each token and head.

    A row's bits depend on its batch only through the number of splits, which the number of rows decides.
    """

    name = "triton"
    why_not_captured = None

    def __init__(self, spec: AttentionSpec) -> None:
        from pagedserve.kernels.triton import attention, kv_cache

        super().__init__(spec)
        self._attention, self._kv_cache = attention, kv_cache
        self._heads = attention.Heads(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=spec.dtype,
            kv_dtype=spec.kv_cache_dtype,
        )
        self._workspace = attention.make_workspace(self._heads, spec.device)

    @classmethod
    def why_not(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type == "cpu" and not envs.triton_interpreted():
            return "it runs on NVIDIA GPUs; TRITON_INTERPRET=1 runs it on the CPU, slowly"
        if spec.device.type not in ("cuda", "cpu"):
            return f"it runs on NVIDIA GPUs, not on {spec.device.type}"
        if spec.device.type == "cuda" and not torch.cuda.is_available():
            return "torch finds no NVIDIA GPU here"
        if find_spec("triton") is None:
            return "Triton is not installed"
        if spec.dtype not in _DTYPES:
            return f"its activations are bf16, fp16 or fp32, not {spec.dtype}"
        if spec.kv_cache_dtype not in _DTYPES and spec.kv_cache_dtype not in reference.LARGEST_CODES:
            return f"its KV cache is bf16, fp16, fp32, int8 or fp8_e4m3, not {spec.kv_cache_dtype}"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads"
        if spec.num_heads // spec.num_kv_heads > _MAX_GROUP:
            return f"at most {_MAX_GROUP} query heads can share a KV head"
        if spec.head_dim > _MAX_HEAD_DIM or spec.head_dim % 8:
            return f"head_dim must be a multiple of 8 up to {_MAX_HEAD_DIM}, it is {spec.head_dim}"
        if spec.block_size & (spec.block_size - 1):
            return f"block_size must be a power of two, it is {spec.block_size}"
        if spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < _MIN_CAPABILITY:
            return "it needs compute capability 8.0 (Ampere) or later"
        return None

    @property
    def layer_block_shape(self) -> tuple[int, ...]:
        spec = self.spec
        return self._kv_cache.gpu_layer_block_shape(
            spec.num_kv_heads, spec.block_size, spec.head_dim, spec.kv_cache_dtype
        )

    def build_metadata(
        self,
        *,
        query_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
        seq_lens: torch.Tensor,  # int32 [num_seqs]
        block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks_per_seq]
        slot_mapping: torch.Tensor,  # int64 [num_tokens]
        max_query_len: int,
        max_seq_len: int,
    ) -> TritonMetadata:
        """Plans without looking at what is in a tensor. A step that is to be captured is planned with the largest
        `max_seq_len` that it may be replayed with; rows of seq_len 0 cost nothing."""
        return TritonMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            plan=self._attention.make_plan(
                query_start_loc, slot_mapping.shape[0], max_query_len, max_seq_len, self._heads
            ),
        )

    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, *layer_block_shape]
        metadata: TritonMetadata,
        *,
        sliding_window: int | None = None,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        self._kv_cache.write_kv(key, value, kv_cache, metadata.slot_mapping)
        return self._attend(query, kv_cache, metadata, sliding_window)

    def forward_qkv(
        self,
        qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        positions: torch.Tensor,  # int64 [num_tokens]
        cos_sin: torch.Tensor,  # [max_position, rotary_dim]
        kv_cache: torch.Tensor,  # [num_blocks, *layer_block_shape]
        metadata: TritonMetadata,
        *,
        sliding_window: int | None = None,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        spec = self.spec
        heads = qkv.view(qkv.shape[0], -1, spec.head_dim)
        self._kv_cache.rotate_and_write(heads, spec.num_kv_heads, positions, cos_sin, kv_cache, metadata.slot_mapping)
        return self._attend(heads[:, : spec.num_heads], kv_cache, metadata, sliding_window)

    def _attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: TritonMetadata, sliding_window: int | None
    ) -> torch.Tensor:
        spec = self.spec
        return self._attention.attend(
            query,
            kv_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            metadata.plan,
            self._workspace,
            scale=spec.scale,
            sliding_window=spec.sliding_window if sliding_window is None else sliding_window,
            soft_cap=spec.soft_cap,
        )
