"""StableLM 2 (arXiv 2402.17834): LayerNorms and a gated MLP; a quarter of each head is rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedserve.layers.norm import LayerNorm
from pagedserve.models.blocks import GatedMLP, PreNormLayer, SelfAttention
from pagedserve.models.decoder import Builder, Decoder, DecoderConfig, decoder_fields
from pagedserve.models.hf_config import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class StableLmConfig(DecoderConfig):
    """What its config.json says, in the words that every model of the engine uses."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> StableLmConfig:
        fields = Fields(config)
        # The usual names are read by decoder_fields; here is what differs, and what absent fields mean.
        usual = {"partial_rotary_factor": 0.25, "num_key_value_heads": 32, "max_position_embeddings": 4096, **config}
        read = decoder_fields(
            usual,
            attention_bias=fields.boolean("use_qkv_bias", False),
            output_bias=False,
            mlp_bias=False,
            norm_eps=fields.number("layer_norm_eps", 1e-5),
        )
        return cls(**read)


class StableLmForCausalLM(Decoder):
    config_class = StableLmConfig

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        # What this file does not compute goes to the transformers fallback, or is refused with these words.
        for name in ("qk_layernorm", "use_parallel_residual"):
            if config.get(name):
                return f"StableLM with {name}"
        return None

    def make_layer(self, build: Builder, index: int) -> PreNormLayer:
        name = f"model.layers.{index}"
        return PreNormLayer(
            input_norm=self._norm(build, f"{name}.input_layernorm"),
            attention=SelfAttention(
                build, index, [f"{name}.self_attn.{part}_proj" for part in "qkv"], f"{name}.self_attn.o_proj"
            ),
            mlp_norm=self._norm(build, f"{name}.post_attention_layernorm"),
            mlp=GatedMLP(build, [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"], f"{name}.mlp.down_proj"),
        )

    def make_norm(self, build: Builder) -> LayerNorm:
        return self._norm(build, "model.norm")

    def _norm(self, build: Builder, name: str) -> LayerNorm:
        return build.weights.layer_norm(name, self.config.hidden_size, self.config.norm_eps)
