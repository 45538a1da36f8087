"""Parts that many architectures share: self-attention with rotary positions, the gated MLP, the pre-norm layer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagedserve.attention import AttentionBackend, AttentionMetadata
from pagedserve.layers.linear import Linear
from pagedserve.layers.norm import RMSNorm
from pagedserve.models.weights import Weights


class SelfAttention:
    """Fused projection to query, key and value; rotary positions; paged attention; output projection."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        output_bias: bool,
        cos_sin: torch.Tensor,  # [max_position, rotary_dim], shared by all layers
        backend: AttentionBackend,
    ):
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        projections = [f"{name}.{part}_proj" for part in "qkv"]
        self.qkv_proj = weights.linear(projections, (q_size, kv_size, kv_size), hidden_size, bias=bias)
        self.o_proj = weights.linear(f"{name}.o_proj", hidden_size, q_size, bias=output_bias)
        self.backend = backend
        self.cos_sin = cos_sin
        self.q_size = q_size

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, hidden]
        positions: torch.Tensor,  # int64 [num_tokens]
        layer_cache: torch.Tensor,  # [num_blocks, *layer_block_shape]
        metadata: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden]
        attended = self.backend.forward_qkv(self.qkv_proj(x), positions, self.cos_sin, layer_cache, metadata)
        return self.o_proj(attended.view(-1, self.q_size))


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up in one product (arXiv 2002.05202)."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ):
        projections = [f"{name}.gate_proj", f"{name}.up_proj"]
        self.gate_up_proj: Linear = weights.linear(projections, (intermediate_size,) * 2, hidden_size, bias=bias)
        self.down_proj: Linear = weights.linear(f"{name}.down_proj", hidden_size, intermediate_size, bias=bias)
        self.activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]"""
        return self.down_proj(self.activation(self.gate_up_proj(x)))


class PreNormLayer:
    """norm, attention, add; norm, MLP, add.

    The add of each half is done by the norm that follows it, so a layer takes what the one before left to be added.
    """

    __slots__ = ("attention", "input_norm", "mlp", "post_attention_norm")

    def __init__(self, *, input_norm: RMSNorm, attention: SelfAttention, post_attention_norm: RMSNorm, mlp: GatedMLP):
        self.input_norm = input_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp = mlp

    def __call__(
        self,
        x: torch.Tensor | None,  # [num_tokens, hidden], still to be added to the residual; None in the first layer
        residual: torch.Tensor,  # [num_tokens, hidden], updated in place
        positions: torch.Tensor,  # int64 [num_tokens]
        layer_cache: torch.Tensor,  # [num_blocks, *layer_block_shape]
        metadata: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden], still to be added to the residual
        x = self.input_norm(residual) if x is None else self.input_norm.add(x, residual)
        x = self.attention(x, positions, layer_cache, metadata)
        x = self.post_attention_norm.add(x, residual)
        return self.mlp(x)
