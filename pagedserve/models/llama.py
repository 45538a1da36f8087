"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783) and what shares its form: SmolLM2, TinyLlama, Mistral."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedserve.models.blocks import GatedMLP, PreNormLayer, SelfAttention
from pagedserve.models.decoder import Builder, Decoder, DecoderConfig, decoder_fields
from pagedserve.models.hf_config import Fields

# What transformers takes for fields that a Mistral file leaves out; null says that there is none.
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}


class LlamaForCausalLM(Decoder):
    """Norm, attention, norm, gated MLP."""

    def make_layer(self, build: Builder, index: int) -> PreNormLayer:
        name, config = f"model.layers.{index}", self.config
        return PreNormLayer(
            input_norm=build.weights.rms_norm(f"{name}.input_layernorm", config.hidden_size, config.norm_eps),
            attention=self.make_attention(build, index, f"{name}.self_attn"),
            mlp_norm=build.weights.rms_norm(f"{name}.post_attention_layernorm", config.hidden_size, config.norm_eps),
            mlp=self.make_mlp(build, index, f"{name}.mlp"),
        )

    def make_attention(self, build: Builder, index: int, name: str) -> SelfAttention:
        return SelfAttention(build, index, [f"{name}.{part}_proj" for part in "qkv"], f"{name}.o_proj")

    def make_mlp(self, build: Builder, index: int, name: str) -> Any:
        return GatedMLP(build, [f"{name}.gate_proj", f"{name}.up_proj"], f"{name}.down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """A Llama whose layers may all have a window."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MistralConfig:
        config = {**_MISTRAL_DEFAULTS, **config}
        fields = decoder_fields(config)
        window = Fields(config).optional_integer("sliding_window")
        return cls(**{**fields, "layer_windows": (window,) * fields["num_layers"]})


class MistralForCausalLM(LlamaForCausalLM):
    """arXiv 2310.06825"""

    config_class = MistralConfig
