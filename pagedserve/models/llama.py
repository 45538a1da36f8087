"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783) and what shares its form: SmolLM2, TinyLlama, Mistral."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagedserve.attention import AttentionBackend, AttentionSpec
from pagedserve.errors import ModelLoadError
from pagedserve.layers.activation import gated_activation
from pagedserve.layers.attention import ForwardContext
from pagedserve.layers.rotary import RopeConfig
from pagedserve.models.blocks import GatedMLP, PreNormLayer, SelfAttention
from pagedserve.models.hf_config import Fields
from pagedserve.models.weights import Weights

# What transformers takes for fields that a Mistral file leaves out; null says that there is none.
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """What config.json says, checked."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    rope: RopeConfig

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads config.json; ModelLoadError names a field that is missing, wrong or not supported."""
        if "MistralForCausalLM" in config.get("architectures", ()):
            config = {**_MISTRAL_DEFAULTS, **config}
        else:
            # A Llama has no window, whatever its file says.
            config = {**config, "sliding_window": None}
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
            raise ModelLoadError(
                f"checkpoints quantised with {method!r} are not supported; give the full-precision one"
            )
        hidden_act = fields.string("hidden_act", "silu")
        gated_activation(hidden_act)
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden_act=hidden_act,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            attention_bias=fields.boolean("attention_bias", False),
            mlp_bias=fields.boolean("mlp_bias", False),
            sliding_window=fields.optional_integer("sliding_window"),
            rope=RopeConfig.from_hf(
                config,
                head_dim=head_dim,
                max_position_embeddings=fields.integer("max_position_embeddings", 2048),
            ),
        )

    @property
    def max_model_len(self) -> int:
        """Positions that the model was made for, stretching included."""
        return self.rope.max_model_len

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
            scale=self.head_dim**-0.5,
        )


class LlamaForCausalLM:
    """The whole model over finished weights."""

    config_class = LlamaConfig

    def __init__(
        self,
        config: LlamaConfig,
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
        self.embed_tokens, self.lm_head = weights.embedding_and_head(
            "model.embed_tokens",
            "lm_head",
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            tied=config.tie_word_embeddings,
        )
        cos_sin = config.rope.cos_sin(max_model_len).to(device)
        self.layers = [
            _layer(config, weights, f"model.layers.{index}", cos_sin, attention) for index in range(config.num_layers)
        ]
        self.norm = weights.rms_norm("model.norm", config.hidden_size, config.rms_norm_eps)
        self.weights_bytes = weights.nbytes + cos_sin.nbytes

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

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,  # int64 [num_tokens]
        positions: torch.Tensor,  # int64 [num_tokens]
        context: ForwardContext,
    ) -> torch.Tensor:  # [num_tokens, hidden]
        """Hidden states after the last norm. Writes this step's keys and values into the cache of `context`."""
        residual, x = self.embed_tokens(token_ids), None
        metadata = context.metadata
        for layer, layer_cache in zip(self.layers, context.kv_cache.unbind(1), strict=True):
            x = layer(x, residual, positions, layer_cache, metadata)
        return self.norm.add(x, residual)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden] -> fp32 [num_rows, vocab]"""
        return self.lm_head(hidden).float()


def _layer(
    config: LlamaConfig, weights: Weights, name: str, cos_sin: torch.Tensor, backend: AttentionBackend
) -> PreNormLayer:
    hidden_size, eps = config.hidden_size, config.rms_norm_eps
    return PreNormLayer(
        input_norm=weights.rms_norm(f"{name}.input_layernorm", hidden_size, eps),
        attention=SelfAttention(
            weights,
            f"{name}.self_attn",
            hidden_size=hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            cos_sin=cos_sin,
            backend=backend,
        ),
        post_attention_norm=weights.rms_norm(f"{name}.post_attention_layernorm", hidden_size, eps),
        mlp=GatedMLP(
            weights,
            f"{name}.mlp",
            hidden_size=hidden_size,
            intermediate_size=config.intermediate_size,
            bias=config.mlp_bias,
            activation=gated_activation(config.hidden_act),
        ),
    )
