"""OLMo 2 (arXiv 2501.00656): norms behind attention and MLP instead of before them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedserve.models.blocks import OutputNormLayer, WideNormAttention
from pagedserve.models.decoder import Builder, DecoderConfig, decoder_fields
from pagedserve.models.llama import LlamaForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Olmo2Config:
        return cls(**decoder_fields({"rms_norm_eps": 1e-5, **config}, mlp_bias=False))


class Olmo2ForCausalLM(LlamaForCausalLM):
    config_class = Olmo2Config

    def make_layer(self, build: Builder, index: int) -> OutputNormLayer:
        name, config, weights = f"model.layers.{index}", self.config, build.weights
        return OutputNormLayer(
            attention=self.make_attention(build, index, f"{name}.self_attn"),
            attention_out_norm=weights.rms_norm(
                f"{name}.post_attention_layernorm", config.hidden_size, config.norm_eps
            ),
            mlp=self.make_mlp(build, index, f"{name}.mlp"),
            mlp_out_norm=weights.rms_norm(f"{name}.post_feedforward_layernorm", config.hidden_size, config.norm_eps),
        )

    def make_attention(self, build: Builder, index: int, name: str) -> WideNormAttention:
        return wide_norm_attention(build, index, name)


def wide_norm_attention(build: Builder, index: int, name: str) -> WideNormAttention:
    """The attention of all OLMo since the second."""
    config, weights = build.config, build.weights
    sizes = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return WideNormAttention(
        build,
        index,
        [f"{name}.{part}_proj" for part in "qkv"],
        f"{name}.o_proj",
        q_norm=weights.rms_norm(f"{name}.q_norm", sizes[0], config.norm_eps),
        k_norm=weights.rms_norm(f"{name}.k_norm", sizes[1], config.norm_eps),
    )
