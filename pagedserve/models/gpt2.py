"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, matrices stored transposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagedserve.kernels import ops
from pagedserve.layers.embedding import Embedding
from pagedserve.layers.linear import Linear
from pagedserve.layers.norm import LayerNorm
from pagedserve.models.blocks import PlainMLP, PreNormLayer, UnrotatedAttention
from pagedserve.models.decoder import Builder, Decoder, DecoderConfig, decoder_fields
from pagedserve.models.hf_config import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config(DecoderConfig):
    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GPT2Config:
        fields = Fields(config)
        hidden_size = fields.integer("n_embd", 768)
        renamed = {
            **config,
            "hidden_size": hidden_size,
            "intermediate_size": fields.integer("n_inner", 4 * hidden_size),
            "num_hidden_layers": fields.integer("n_layer", 12),
            "num_attention_heads": fields.integer("n_head", 12),
            "max_position_embeddings": fields.integer("n_positions", 1024),
            "hidden_act": fields.string("activation_function", "gelu_new"),
            "num_key_value_heads": None,
            "head_dim": None,
            "tie_word_embeddings": fields.boolean("tie_word_embeddings", True),
        }
        read = decoder_fields(renamed, rotary=False, gated=False, attention_bias=True, output_bias=True, mlp_bias=True)
        scale = read["scale"] if fields.boolean("scale_attn_weights", True) else 1.0
        return cls(**{**read, "scale": scale, "norm_eps": fields.number("layer_norm_epsilon", 1e-5)})


class GPT2LMHeadModel(Decoder):
    config_class = GPT2Config

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            if config.get(name):
                return f"GPT-2 with {name}"
        return None

    def make_ends(self, build: Builder) -> tuple[Embedding, Linear]:
        config, weights = self.config, build.weights
        # The files of the first release name no model around the layers.
        self.prefix = weights.prefix_of("wte.weight", ("", "transformer."))
        self.embed_positions = weights.position_embedding(f"{self.prefix}wpe", config.max_model_len, config.hidden_size)
        return weights.embedding_and_head(
            f"{self.prefix}wte",
            "lm_head",
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            tied=config.tie_word_embeddings,
        )

    def make_layer(self, build: Builder, index: int) -> PreNormLayer:
        name = f"{self.prefix}h.{index}"
        return PreNormLayer(
            input_norm=self._norm(build, f"{name}.ln_1"),
            attention=UnrotatedAttention(build, index, f"{name}.attn.c_attn", f"{name}.attn.c_proj", transposed=True),
            mlp_norm=self._norm(build, f"{name}.ln_2"),
            mlp=PlainMLP(build, f"{name}.mlp.c_fc", f"{name}.mlp.c_proj", transposed=True),
        )

    def make_norm(self, build: Builder) -> LayerNorm:
        return self._norm(build, f"{self.prefix}ln_f")

    def _norm(self, build: Builder, name: str) -> LayerNorm:
        return build.weights.layer_norm(name, self.config.hidden_size, self.config.norm_eps)

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return ops.add(self.embed_tokens(token_ids), self.embed_positions(positions))
