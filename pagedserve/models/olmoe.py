"""OLMoE (arXiv 2409.02060): a Llama with experts, whose queries and keys are normalised over all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedserve.models.blocks import MLP, WideNormAttention
from pagedserve.models.decoder import Builder, decoder_fields
from pagedserve.models.hf_config import Fields
from pagedserve.models.llama import LlamaForCausalLM
from pagedserve.models.mixtral import MoEConfig, expert_fields, experts
from pagedserve.models.olmo2 import wide_norm_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoeConfig(MoEConfig):
    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> OlmoeConfig:
        config = {"intermediate_size": 2048, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **config}
        fields = Fields(config)
        read = decoder_fields(config, mlp_bias=False)
        return cls(
            **read,
            **expert_fields(fields.integer("num_experts", 64), fields.integer("num_experts_per_tok", 8)),
            expert_size=read["intermediate_size"],
            renormalize=fields.boolean("norm_topk_prob", False),
            sparse_layers=(True,) * read["num_layers"],
        )


class OlmoeForCausalLM(LlamaForCausalLM):
    config_class = OlmoeConfig

    @classmethod
    def why_not(cls, config: Mapping[str, Any]) -> str | None:
        clip = Fields(config).optional_number("clip_qkv")
        return None if clip is None else f"OLMoE with clip_qkv {clip:g}"

    def make_attention(self, build: Builder, index: int, name: str) -> WideNormAttention:
        return wide_norm_attention(build, index, name)

    def make_mlp(self, build: Builder, index: int, name: str) -> MLP:
        return experts(build, name, ("gate_proj", "up_proj", "down_proj"))
