"""The form that all decoders share: embed, layers, norm, head. An architecture is its config and its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pagedserve.attention import AttentionBackend, AttentionSpec
from pagedserve.errors import ModelLoadError
from pagedserve.layers.activation import activation, gated_activation
from pagedserve.layers.attention import ForwardContext
from pagedserve.layers.embedding import Embedding
from pagedserve.layers.linear import Linear
from pagedserve.layers.norm import Norm
from pagedserve.layers.rotary import RopeConfig
from pagedserve.models.blocks import Layer
from pagedserve.models.hf_config import Fields
from pagedserve.models.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What config.json says, checked. Architectures that need more add fields; `from_hf` is theirs to write."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_act: str
    norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool  # of the projections to query, key and value
    output_bias: bool  # of the projection behind attention
    mlp_bias: bool
    scale: float  # multiplies query . key
    soft_cap: float | None = None  # of attention scores
    layer_windows: tuple[int | None, ...]  # of each layer: a token sees itself and the window - 1 tokens before it
    rope: RopeConfig | None  # None: positions are not rotated
    max_model_len: int  # positions that the model was made for, stretching included

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Reads config.json; ModelLoadError names a field that is missing, wrong or not supported."""
        return cls(**decoder_fields(config))

    @property
    def sliding_window(self) -> int | None:
        """The window that all layers share; None where one has none, or another."""
        windows = set(self.layer_windows)
        return windows.pop() if len(windows) == 1 else None

    def attention_spec(
        self, *, block_size: int, dtype: torch.dtype, kv_cache_dtype: torch.dtype, device: torch.device
    ) -> AttentionSpec:
        """What the model asks of an attention backend."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            scale=self.scale,
        )


def decoder_fields(
    config: Mapping[str, Any], *, rotary: bool = True, gated: bool = True, **changes: Any
) -> dict[str, Any]:
    """The arguments of DecoderConfig from a config.json with the usual names; `changes` replace what is read.

    `rotary`: positions are rotated; `gated`: the MLP has a gate.

    Raises ModelLoadError for a field that is missing, wrong or not supported.
    """
    fields = Fields(config)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise ModelLoadError(
                f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
                "and head_dim is not given"
            )
        head_dim = hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ModelLoadError(f"checkpoints quantised with {method!r} are not supported; give the full-precision one")
    max_position_embeddings = fields.integer("max_position_embeddings", 2048)
    rope = (
        RopeConfig.from_hf(config, head_dim=head_dim, max_position_embeddings=max_position_embeddings)
        if rotary
        else None
    )
    num_layers = fields.integer("num_hidden_layers")
    hidden_act = fields.string("hidden_act", "silu")
    (gated_activation if gated else activation)(hidden_act)
    attention_bias = fields.boolean("attention_bias", False)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": hidden_act,
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", False),
        "attention_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": fields.boolean("mlp_bias", False),
        "scale": head_dim**-0.5,
        "layer_windows": (None,) * num_layers,
        "rope": rope,
        "max_model_len": max_position_embeddings if rope is None else rope.max_model_len,
        **changes,
    }


def windows_by_type(config: Mapping[str, Any], default: Sequence[bool]) -> tuple[int | None, ...]:
    """`DecoderConfig.layer_windows` from `layer_types`, or from `default` (which layers slide) where it is absent."""
    types = config.get("layer_types")
    if types is None:
        types = ["sliding_attention" if slides else "full_attention" for slides in default]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != len(default) or any(kind not in known for kind in types):
        raise ModelLoadError(f"config.json: layer_types must be {len(default)} times one of {' or '.join(known)}")
    if "sliding_attention" not in types:
        return (None,) * len(types)
    window = Fields(config).integer("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


class Builder:
    """What layers are made with: the config, the weights, the backend, and one rotary table for all that share it."""

    def __init__(
        self,
        config: Any,
        weights: Weights,
        *,
        attention: AttentionBackend,
        max_model_len: int,
        device: torch.device,
    ):
        self.config = config
        self.weights = weights
        self.attention = attention
        self._max_model_len = max_model_len
        self._device = device
        self._tables: dict[int, tuple[RopeConfig, torch.Tensor]] = {}

    def rotary_table(self, rope: RopeConfig) -> torch.Tensor:
        """Cosines and sines of every position, as `ops.rotary_embedding` wants them."""
        if id(rope) not in self._tables:
            self._tables[id(rope)] = rope, rope.cos_sin(self._max_model_len).to(self._device)
        return self._tables[id(rope)][1]

    @property
    def nbytes(self) -> int:
        """Of everything made so far."""
        return self.weights.nbytes + self.table_bytes

    @property
    def table_bytes(self) -> int:
        """Of the rotary tables made so far."""
        return sum(table.nbytes for _, table in self._tables.values())


class Decoder(ABC):
    """A whole model over finished weights."""

    config_class: ClassVar[type[DecoderConfig]] = DecoderConfig

    def __init__(
        self,
        config: Any,
        weights: Weights,
        *,
        attention: AttentionBackend,
        max_model_len: int,
        device: torch.device,
    ):
        """Takes every weight it has from `weights`; ModelLoadError where one is missing or has the wrong shape.

        `max_model_len` sizes the rotary table: positions given to `forward` stay below it.
        """
        self.config = config
        self.max_model_len = max_model_len
        build = Builder(config, weights, attention=attention, max_model_len=max_model_len, device=device)
        self.embed_tokens, self.lm_head = self.make_ends(build)
        self.layers = [self.make_layer(build, index) for index in range(config.num_layers)]
        self.norm = self.make_norm(build)
        self.weights_bytes, self.rotary_bytes = build.nbytes, build.table_bytes

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        """What of a config.json this class does not compute, so that the fallback takes it; None if it can."""
        return None

    def make_ends(self, build: Builder) -> tuple[Embedding, Linear]:
        """The token embedding and the head."""
        config = self.config
        return build.weights.embedding_and_head(
            "model.embed_tokens",
            "lm_head",
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            tied=config.tie_word_embeddings,
        )

    @abstractmethod
    def make_layer(self, build: Builder, index: int) -> Layer:
        """Layer `index`, counted from 0."""

    def make_norm(self, build: Builder) -> Norm:
        """The norm behind the last layer."""
        return build.weights.rms_norm("model.norm", self.config.hidden_size, self.config.norm_eps)

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def num_kv_heads(self) -> int:
        return self.config.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.config.head_dim

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, None where it sees everything."""
        return self.config.layer_windows

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the first layer gets: int64 [num_tokens], int64 [num_tokens] -> [num_tokens, hidden], new memory."""
        return self.embed_tokens(token_ids)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,  # int64 [num_tokens]
        positions: torch.Tensor,  # int64 [num_tokens]
        context: ForwardContext,
    ) -> torch.Tensor:  # [num_tokens, hidden]
        """Hidden states after the last norm. Writes this step's keys and values into the cache of `context`."""
        residual, x = self.embed(token_ids, positions), None
        for layer, (layer_cache, metadata) in zip(self.layers, context.per_layer(), strict=True):
            x = layer(x, residual, positions, layer_cache, metadata)
        return self.norm.add(x, residual)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden] -> fp32 [num_rows, vocab]"""
        return self.lm_head(hidden).float()
