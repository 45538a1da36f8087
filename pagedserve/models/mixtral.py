"""Mixtral (arXiv 2401.04088) and Qwen 3 MoE: a mixture of experts where others have an MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedserve.errors import ModelLoadError
from pagedserve.layers.activation import gated_activation_kind
from pagedserve.layers.moe import MixtureOfExperts
from pagedserve.models.blocks import MLP
from pagedserve.models.decoder import Builder, DecoderConfig, decoder_fields
from pagedserve.models.hf_config import Fields
from pagedserve.models.llama import LlamaForCausalLM
from pagedserve.models.qwen import Qwen3ForCausalLM, qwen_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """What all mixtures of experts have."""

    num_experts: int
    num_experts_per_token: int
    expert_size: int  # intermediate size of one expert
    renormalize: bool  # the weights of a token's experts sum to 1
    sparse_layers: tuple[bool, ...]  # which layers have experts; the others have one MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(MoEConfig):
    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MixtralConfig:
        config = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, **config}
        if "rope_parameters" not in config:
            config = {"rope_theta": 1e6, **config}
        fields = Fields(config)
        read = decoder_fields(config, attention_bias=False, output_bias=False, mlp_bias=False)
        num_layers = read["num_layers"]
        return cls(
            **{**read, "layer_windows": (fields.optional_integer("sliding_window"),) * num_layers},
            **expert_fields(fields.integer("num_local_experts", 8), fields.integer("num_experts_per_tok", 2)),
            expert_size=read["intermediate_size"],
            renormalize=True,
            sparse_layers=(True,) * num_layers,
        )


class MixtralForCausalLM(LlamaForCausalLM):
    config_class = MixtralConfig

    def make_mlp(self, build: Builder, index: int, name: str) -> MLP:
        return experts(build, f"model.layers.{index}.block_sparse_moe", ("w1", "w3", "w2"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(MoEConfig):
    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3MoeConfig:
        config = {"num_key_value_heads": 4, "intermediate_size": 6144, **config}
        fields = Fields(config)
        read = qwen_fields(config, mlp_bias=False)
        step, dense = fields.integer("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        num_experts = fields.integer("num_experts", config.get("num_local_experts") or 128)
        return cls(
            **read,
            **expert_fields(num_experts, fields.integer("num_experts_per_tok", 8)),
            expert_size=fields.integer("moe_intermediate_size", 768),
            renormalize=fields.boolean("norm_topk_prob", False),
            sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(read["num_layers"])),
        )


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    config_class = Qwen3MoeConfig

    def make_mlp(self, build: Builder, index: int, name: str) -> MLP:
        if not self.config.sparse_layers[index]:
            return super().make_mlp(build, index, name)
        return experts(build, name, ("gate_proj", "up_proj", "down_proj"))


def experts(build: Builder, name: str, parts: Sequence[str]) -> MixtureOfExperts:
    """The mixture below `name`; `parts` names the gate, up and down matrices of an expert."""
    config, weights = build.config, build.weights
    gate, up, down = parts
    names = [f"{name}.experts.{i}" for i in range(config.num_experts)]
    sizes = config.expert_size, config.hidden_size
    return MixtureOfExperts(
        weights.linear(f"{name}.gate", config.num_experts, config.hidden_size, bias=False, exact=True),
        weights.experts([[f"{n}.{gate}", f"{n}.{up}"] for n in names], *sizes),
        weights.experts([[f"{n}.{down}"] for n in names], *sizes[::-1]),
        top_k=config.num_experts_per_token,
        renormalize=config.renormalize,
        activation=gated_activation_kind(config.hidden_act),
    )


def expert_fields(num_experts: int, num_experts_per_token: int) -> dict[str, int]:
    """Arguments of MoEConfig; ModelLoadError where a token would have more experts than there are."""
    if num_experts_per_token > num_experts:
        raise ModelLoadError(f"config.json: a token has {num_experts_per_token} experts, of {num_experts}")
    return {"num_experts": num_experts, "num_experts_per_token": num_experts_per_token}
