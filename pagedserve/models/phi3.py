"""Phi-3, Phi-3.5 and Phi-4 mini (arXiv 2404.14219, 2503.01743): a Llama with fused matrices and LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedserve.models.blocks import GatedMLP, SelfAttention
from pagedserve.models.decoder import Builder, DecoderConfig, decoder_fields
from pagedserve.models.hf_config import Fields
from pagedserve.models.llama import LlamaForCausalLM

# What the first files called LongRoPE.
_OLD_NAMES = {"su": "longrope", "yarn": "longrope"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3Config(DecoderConfig):
    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Phi3Config:
        config = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **config}
        for name in ("rope_scaling", "rope_parameters"):
            if isinstance(settings := config.get(name), Mapping):
                kind = settings.get("rope_type") or settings.get("type")
                config = {**config, name: {**settings, "rope_type": _OLD_NAMES.get(kind, kind)}}
        read = decoder_fields(config, attention_bias=False, output_bias=False, mlp_bias=False)
        window = Fields(config).optional_integer("sliding_window")
        return cls(**{**read, "layer_windows": (window,) * read["num_layers"]})


class Phi3ForCausalLM(LlamaForCausalLM):
    config_class = Phi3Config

    def make_attention(self, build: Builder, index: int, name: str) -> SelfAttention:
        return SelfAttention(build, index, f"{name}.qkv_proj", f"{name}.o_proj")

    def make_mlp(self, build: Builder, index: int, name: str) -> GatedMLP:
        return GatedMLP(build, f"{name}.gate_up_proj", f"{name}.down_proj")
