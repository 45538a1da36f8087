"""Qwen 2 and 2.5 (arXiv 2407.10671, 2412.15115), Qwen 3 (arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedserve.models.blocks import NormedAttention, SelfAttention
from pagedserve.models.decoder import Builder, DecoderConfig, decoder_fields, windows_by_type
from pagedserve.models.hf_config import Fields
from pagedserve.models.llama import LlamaForCausalLM


def qwen_fields(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The arguments of DecoderConfig; with `use_sliding_window`, layers from `max_window_layers` on have a window."""
    config = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, **config}
    fields = Fields(config)
    if fields.boolean("use_sliding_window", False):
        first = fields.integer("max_window_layers", 28) if config.get("max_window_layers") != 0 else 0
        windows = windows_by_type(config, [i >= first for i in range(fields.integer("num_hidden_layers"))])
        changes = {"layer_windows": windows, **changes}
    return decoder_fields(config, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """A Llama with biases on query, key and value."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen2Config:
        return cls(**qwen_fields(config, attention_bias=True, output_bias=False, mlp_bias=False))


class Qwen2ForCausalLM(LlamaForCausalLM):
    config_class = Qwen2Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """A Llama whose queries and keys are normalised."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3Config:
        return cls(**qwen_fields({"head_dim": 128, **config}, mlp_bias=False))


class Qwen3ForCausalLM(LlamaForCausalLM):
    config_class = Qwen3Config

    def make_attention(self, build: Builder, index: int, name: str) -> SelfAttention:
        config = self.config
        return NormedAttention(
            build,
            index,
            [f"{name}.{part}_proj" for part in "qkv"],
            f"{name}.o_proj",
            q_norm=build.weights.rms_norm(f"{name}.q_norm", config.head_dim, config.norm_eps),
            k_norm=build.weights.rms_norm(f"{name}.k_norm", config.head_dim, config.norm_eps),
        )
