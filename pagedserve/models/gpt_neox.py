"""GPT-NeoX (arXiv 2204.06745) and Pythia: attention and MLP in parallel, part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagedserve.layers.embedding import Embedding
from pagedserve.layers.linear import Linear
from pagedserve.layers.norm import LayerNorm
from pagedserve.models.blocks import ParallelLayer, PlainMLP, PreNormLayer, SelfAttention
from pagedserve.models.decoder import Builder, Decoder, DecoderConfig, decoder_fields
from pagedserve.models.hf_config import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTNeoXConfig(DecoderConfig):
    parallel: bool  # attention and MLP read the same input

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GPTNeoXConfig:
        fields = Fields(config)
        renamed = {
            "rope_theta": fields.number("rotary_emb_base", 10000.0),
            "partial_rotary_factor": fields.number("rotary_pct", 0.25),
            **config,
            "hidden_act": fields.string("hidden_act", "gelu"),
            "num_key_value_heads": None,
            "head_dim": None,
        }
        bias = fields.boolean("attention_bias", True)
        read = decoder_fields(renamed, gated=False, attention_bias=bias, output_bias=bias, mlp_bias=True)
        parallel = fields.boolean("use_parallel_residual", True)
        return cls(**{**read, "norm_eps": fields.number("layer_norm_eps", 1e-5)}, parallel=parallel)


class GPTNeoXForCausalLM(Decoder):
    config_class = GPTNeoXConfig

    def make_ends(self, build: Builder) -> tuple[Embedding, Linear]:
        config = self.config
        return build.weights.embedding_and_head(
            "gpt_neox.embed_in",
            "embed_out",
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            tied=config.tie_word_embeddings,
        )

    def make_layer(self, build: Builder, index: int) -> PreNormLayer:
        name, config = f"gpt_neox.layers.{index}", self.config
        # The file has query, key and value of head 0, then those of head 1, and so on.
        rows = torch.arange(3 * config.hidden_size).view(config.num_heads, 3, config.head_dim)
        return (ParallelLayer if config.parallel else PreNormLayer)(
            input_norm=self._norm(build, f"{name}.input_layernorm"),
            attention=SelfAttention(
                build,
                index,
                f"{name}.attention.query_key_value",
                f"{name}.attention.dense",
                order=rows.transpose(0, 1).reshape(-1),
            ),
            mlp_norm=self._norm(build, f"{name}.post_attention_layernorm"),
            mlp=PlainMLP(build, f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h"),
        )

    def make_norm(self, build: Builder) -> LayerNorm:
        return self._norm(build, "gpt_neox.final_layer_norm")

    def _norm(self, build: Builder, name: str) -> LayerNorm:
        return build.weights.layer_norm(name, self.config.hidden_size, self.config.norm_eps)
