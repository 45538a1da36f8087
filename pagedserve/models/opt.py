"""OPT (arXiv 2205.01068): learned positions, LayerNorm, a plain MLP. The model of the PagedAttention paper."""

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

_NORM_EPS = 1e-5
# Position 0 is row 2 of the table: the first rows were for padding.
_POSITION_OFFSET = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTConfig(DecoderConfig):
    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> OPTConfig:
        fields = Fields(config)
        renamed = {
            **config,
            "intermediate_size": fields.integer("ffn_dim"),
            "hidden_act": fields.string("activation_function", "relu"),
            "num_key_value_heads": None,
            "head_dim": None,
            "tie_word_embeddings": fields.boolean("tie_word_embeddings", True),
        }
        changes = {"attention_bias": True, "output_bias": True, "mlp_bias": True, "norm_eps": _NORM_EPS}
        return cls(**decoder_fields(renamed, rotary=False, gated=False, **changes))


class OPTForCausalLM(Decoder):
    config_class = OPTConfig

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        fields = Fields(config)
        for name in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
            if not fields.boolean(name, True):
                return f"OPT with {name} false"
        if fields.boolean("_remove_final_layer_norm", False):
            return "OPT without its last norm"
        width = fields.optional_integer("word_embed_proj_dim")
        if width not in (None, config.get("hidden_size")):
            return f"OPT with word_embed_proj_dim {width}"
        return None

    def make_ends(self, build: Builder) -> tuple[Embedding, Linear]:
        config, weights = self.config, build.weights
        self.prefix = weights.prefix_of("embed_tokens.weight", ("decoder.", "model.decoder."))
        self.embed_positions = weights.position_embedding(
            f"{self.prefix}embed_positions", config.max_model_len, config.hidden_size, offset=_POSITION_OFFSET
        )
        return weights.embedding_and_head(
            f"{self.prefix}embed_tokens",
            "lm_head",
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            tied=config.tie_word_embeddings,
        )

    def make_layer(self, build: Builder, index: int) -> PreNormLayer:
        name = f"{self.prefix}layers.{index}"
        return PreNormLayer(
            input_norm=self._norm(build, f"{name}.self_attn_layer_norm"),
            attention=UnrotatedAttention(
                build, index, [f"{name}.self_attn.{part}_proj" for part in "qkv"], f"{name}.self_attn.out_proj"
            ),
            mlp_norm=self._norm(build, f"{name}.final_layer_norm"),
            mlp=PlainMLP(build, f"{name}.fc1", f"{name}.fc2"),
        )

    def make_norm(self, build: Builder) -> LayerNorm:
        return self._norm(build, f"{self.prefix}final_layer_norm")

    def _norm(self, build: Builder, name: str) -> LayerNorm:
        return build.weights.layer_norm(name, self.config.hidden_size, self.config.norm_eps)

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return ops.add(self.embed_tokens(token_ids), self.embed_positions(positions))
