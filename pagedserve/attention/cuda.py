"""Attention on NVIDIA GPUs: decode steps by csrc/cuda, all others by the Triton kernels, over one pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedserve import envs
from pagedserve.attention.backend import AttentionMetadata, AttentionSpec
from pagedserve.attention.triton import TritonBackend, TritonMetadata
from pagedserve.errors import ConfigError
from pagedserve.kernels import cuda, native_cuda, reference

# Query rows of a KV head that one pass over its keys serves: up to here drafts cost nothing.
_MAX_DRAFT_ROWS = 16


@dataclass(slots=True, kw_only=True)
class CudaMetadata(AttentionMetadata):
    """The step's metadata and, of the two, the plan of the kernels that will run."""

    decode: cuda.DecodeStep | None
    others: TritonMetadata | None


class CudaBackend(TritonBackend):
    """Tensor-core decode whose work is cut on the device, so that a captured step follows the lengths it finds.

    A row's bits depend on its batch only through where its context is cut.
    """

    name = "cuda"
    why_not_captured = None

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._group = spec.num_heads // spec.num_kv_heads
        self._layers: dict[tuple[int, int, int], cuda.KVLayer] = {}

    @classmethod
    def why_not(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cuda" and (envs.cuda_library() is None or not native_cuda.is_emulated()):
            return f"it runs on NVIDIA GPUs, not on {spec.device.type}"
        reason = TritonBackend.why_not(spec)
        if reason is not None:
            return f"it needs the Triton kernels for prompts, and these cannot run: {reason}"
        reason = native_cuda.why_not()
        if reason is not None:
            return reason
        if spec.kv_cache_dtype is not spec.dtype and (
            spec.kv_cache_dtype not in reference.LARGEST_CODES or spec.dtype is torch.float32
        ):
            return f"no kernel reads a KV cache of {spec.kv_cache_dtype} for activations of {spec.dtype}"
        if spec.head_dim not in cuda.HEAD_DIMS:
            return f"head_dim must be one of {', '.join(map(str, cuda.HEAD_DIMS))}, it is {spec.head_dim}"
        if spec.block_size not in cuda.BLOCK_SIZES:
            return f"block_size must be one of {', '.join(map(str, cuda.BLOCK_SIZES))}, it is {spec.block_size}"
        try:
            native_cuda.resident_ctas(
                spec.head_dim, spec.num_heads // spec.num_kv_heads, spec.dtype, spec.kv_cache_dtype
            )
        except (ConfigError, RuntimeError) as error:  # not in this build, or too much for this card
            return str(error)
        return None

    def build_metadata(
        self,
        *,
        query_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
        seq_lens: torch.Tensor,  # int32 [num_seqs]
        block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks_per_seq]
        slot_mapping: torch.Tensor,  # int64 [num_tokens]
        max_query_len: int,
        max_seq_len: int,
    ) -> CudaMetadata:
        decode = others = None
        if max_query_len == 1 or max_query_len * self._group <= _MAX_DRAFT_ROWS:
            one_each = max_query_len == 1 and slot_mapping.shape[0] == seq_lens.shape[0]
            decode = cuda.DecodeStep(
                seq_lens=seq_lens,
                block_tables=block_tables,
                query_start_loc=None if one_each else query_start_loc,
                max_query_len=max_query_len,
            )
        else:
            others = super().build_metadata(
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_tables=block_tables,
                slot_mapping=slot_mapping,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
            )
        return CudaMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            decode=decode,
            others=others,
        )

    def _attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, *layer_block_shape]
        metadata: CudaMetadata,
        sliding_window: int | None,
    ) -> torch.Tensor:
        if metadata.decode is None:
            return super()._attend(query, kv_cache, metadata.others, sliding_window)
        spec = self.spec
        window = spec.sliding_window if sliding_window is None else sliding_window
        return cuda.paged_decode(query, self._layer(kv_cache), metadata.decode, spec.scale, window, spec.soft_cap)

    def _layer(self, kv_cache: torch.Tensor) -> cuda.KVLayer:
        """What C is told of a layer, checked and made when it is first met."""
        key = (kv_cache.data_ptr(), kv_cache.shape[0], kv_cache.stride(0))
        layer = self._layers.get(key)
        if layer is None:
            layer = self._layers[key] = cuda.KVLayer(kv_cache, self.spec.head_dim, self.spec.block_size)
        return layer
