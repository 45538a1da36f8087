"""Parts that many architectures share: attention, MLPs, and the ways to put them into a layer.

A layer leaves what is still to be added to the residual, and the norm that follows adds it in the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pagedserve.attention import AttentionMetadata
from pagedserve.kernels import ops
from pagedserve.layers.activation import activation, gated_activation
from pagedserve.layers.linear import Linear
from pagedserve.layers.norm import Norm

if TYPE_CHECKING:
    from pagedserve.layers.rotary import RopeConfig
    from pagedserve.models.decoder import Builder


class Layer(Protocol):
    """One layer of a decoder."""

    def __call__(
        self,
        x: torch.Tensor | None,  # [num_tokens, hidden], still to be added to the residual; None in the first layer
        residual: torch.Tensor,  # [num_tokens, hidden], updated in place
        positions: torch.Tensor,  # int64 [num_tokens]
        layer_cache: torch.Tensor,  # [num_blocks, *layer_block_shape]
        metadata: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden], still to be added to the residual
        ...


class MLP(Protocol):
    """[num_tokens, hidden] -> [num_tokens, hidden], new memory."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class SelfAttention:
    """Fused projection to query, key and value; rotary positions; paged attention; output projection."""

    def __init__(
        self,
        build: Builder,
        index: int,
        qkv: str | Sequence[str],
        output: str,
        *,
        rope: RopeConfig | None = None,
        order: torch.Tensor | None = None,
        transposed: bool = False,
    ):
        """`qkv` names three matrices, or one that holds all three; `rope` where it is not the config's.

        `order` puts the rows of one fused matrix into the order query, key, value; `transposed`: the file holds the
        matrices as [in_features, out_features].
        """
        config, weights = build.config, build.weights
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = self.q_size + 2 * kv_size if isinstance(qkv, str) else (self.q_size, kv_size, kv_size)
        self.qkv_proj = weights.linear(
            qkv, sizes, config.hidden_size, bias=config.attention_bias, order=order, transposed=transposed
        )
        self.o_proj = weights.linear(
            output, config.hidden_size, self.q_size, bias=config.output_bias, transposed=transposed
        )
        self.backend = build.attention
        self.window = config.layer_windows[index]
        rope = rope or config.rope
        self.cos_sin = None if rope is None else build.rotary_table(rope)

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, hidden]
        positions: torch.Tensor,  # int64 [num_tokens]
        layer_cache: torch.Tensor,  # [num_blocks, *layer_block_shape]
        metadata: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden]
        attended = self.attend(self.project(x), positions, layer_cache, metadata)
        return self.o_proj(attended.view(-1, self.q_size))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] -> query, key and value [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]"""
        return self.qkv_proj(x)

    def attend(
        self, qkv: torch.Tensor, positions: torch.Tensor, layer_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        return self.backend.forward_qkv(qkv, positions, self.cos_sin, layer_cache, metadata, sliding_window=self.window)


class NormedAttention(SelfAttention):
    """Query and key of each head are normalised before they are rotated."""

    def __init__(
        self, build: Builder, index: int, qkv: str | Sequence[str], output: str, *, q_norm: Norm, k_norm: Norm,
        rope: RopeConfig | None = None,
    ):  # fmt: skip
        """The norms' weights are [head_dim]."""
        super().__init__(build, index, qkv, output, rope=rope)
        self.q_norm, self.k_norm = q_norm, k_norm

    def project(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(x)
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        self.q_norm.in_place(heads[:, : self.num_heads])
        self.k_norm.in_place(heads[:, self.num_heads : self.num_heads + self.num_kv_heads])
        return qkv


class WideNormAttention(NormedAttention):
    """Query and key are normalised over all heads at once; the norms are of their whole widths."""

    def project(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(x)
        self.q_norm.in_place(qkv[:, : self.q_size])
        self.k_norm.in_place(qkv[:, self.q_size : self.q_size + self.num_kv_heads * self.head_dim])
        return qkv


class UnrotatedAttention(SelfAttention):
    """Attention that is told nothing of positions: they are in the embedding, or nowhere."""

    def attend(
        self, qkv: torch.Tensor, positions: torch.Tensor, layer_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        return self.backend.forward(query, key, value, layer_cache, metadata, sliding_window=self.window)


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up in one product (arXiv 2002.05202)."""

    def __init__(
        self, build: Builder, gate_up: str | Sequence[str], down: str, *, intermediate_size: int | None = None
    ):
        """`gate_up` names two matrices, or one that holds both."""
        config, weights = build.config, build.weights
        size = intermediate_size or config.intermediate_size
        sizes = 2 * size if isinstance(gate_up, str) else (size, size)
        self.gate_up_proj: Linear = weights.linear(gate_up, sizes, config.hidden_size, bias=config.mlp_bias)
        self.down_proj: Linear = weights.linear(down, config.hidden_size, size, bias=config.mlp_bias)
        self.activation = gated_activation(config.hidden_act)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]"""
        return self.down_proj(self.activation(self.gate_up_proj(x)))


class PlainMLP:
    """down(act(up(x)))"""

    def __init__(self, build: Builder, up: str, down: str, *, transposed: bool = False):
        """`transposed`: the file holds the matrices as [in_features, out_features]."""
        config, weights = build.config, build.weights
        sizes = config.intermediate_size, config.hidden_size
        self.up_proj: Linear = weights.linear(up, *sizes, bias=config.mlp_bias, transposed=transposed)
        self.down_proj: Linear = weights.linear(down, *sizes[::-1], bias=config.mlp_bias, transposed=transposed)
        self.activation = activation(config.hidden_act)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]"""
        return self.down_proj(self.activation(self.up_proj(x)))


class PreNormLayer:
    """norm, attention, add; norm, MLP, add.

    The add of each half is done by the norm that follows it, so a layer takes what the one before left to be added.
    """

    __slots__ = ("attention", "input_norm", "mlp", "mlp_norm")

    def __init__(self, *, input_norm: Norm, attention: SelfAttention, mlp_norm: Norm, mlp: MLP):
        self.input_norm = input_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        positions: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        x = self.input_norm(residual) if x is None else self.input_norm.add(x, residual)
        x = self.attention(x, positions, layer_cache, metadata)
        x = self.mlp_norm.add(x, residual)
        return self.mlp(x)


class SandwichNormLayer(PreNormLayer):
    """norm, attention, norm, add; norm, MLP, norm, add (arXiv 2408.00118)."""

    __slots__ = ("attention_out_norm", "mlp_out_norm")

    def __init__(self, *, attention_out_norm: Norm, mlp_out_norm: Norm, **parts: Any):
        super().__init__(**parts)
        self.attention_out_norm = attention_out_norm
        self.mlp_out_norm = mlp_out_norm

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        positions: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        x = self.input_norm(residual) if x is None else self.input_norm.add(x, residual)
        x = self.attention_out_norm.in_place(self.attention(x, positions, layer_cache, metadata))
        x = self.mlp_norm.add(x, residual)
        return self.mlp_out_norm.in_place(self.mlp(x))


class OutputNormLayer:
    """attention, norm, add; MLP, norm, add."""

    __slots__ = ("attention", "attention_out_norm", "mlp", "mlp_out_norm")

    def __init__(self, *, attention: SelfAttention, attention_out_norm: Norm, mlp: MLP, mlp_out_norm: Norm):
        self.attention = attention
        self.attention_out_norm = attention_out_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        positions: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        if x is not None:
            ops.add(residual, x)
        ops.add(residual, self.attention_out_norm.in_place(self.attention(residual, positions, layer_cache, metadata)))
        return self.mlp_out_norm.in_place(self.mlp(residual))


class ParallelLayer(PreNormLayer):
    """Attention and MLP both read the layer's input, each through its own norm, and are added together."""

    __slots__ = ()

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        positions: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        x = self.input_norm(residual) if x is None else self.input_norm.add(x, residual)
        x = self.attention(x, positions, layer_cache, metadata)
        return ops.add(self.mlp(self.mlp_norm(residual)), x)
