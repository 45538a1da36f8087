"""SmolLM3 (Hugging Face, 2025): a Llama in which every fourth layer knows nothing of positions (arXiv 2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedserve.errors import ModelLoadError
from pagedserve.models.blocks import SelfAttention, UnrotatedAttention
from pagedserve.models.decoder import Builder, DecoderConfig, decoder_fields, windows_by_type
from pagedserve.models.hf_config import Fields
from pagedserve.models.llama import LlamaForCausalLM

_DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLM3Config(DecoderConfig):
    rotated_layers: tuple[bool, ...]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> SmolLM3Config:
        config = {**_DEFAULTS, **config}
        if "rope_parameters" not in config:
            config = {"rope_theta": 2e6, **config}
        fields = Fields(config)
        num_layers, interval = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval", 4)
        # The field counts the other way round than its name says: 1 is a layer that is rotated.
        rotated = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(num_layers)]
        if not isinstance(rotated, list) or len(rotated) < num_layers:
            raise ModelLoadError(f"config.json: no_rope_layers must have {num_layers} entries")
        windows = (None,) * num_layers
        if fields.boolean("use_sliding_window", False):
            windows = windows_by_type(config, [not is_rotated for is_rotated in rotated[:num_layers]])
        read = decoder_fields(config, layer_windows=windows)
        return cls(**read, rotated_layers=tuple(map(bool, rotated[:num_layers])))


class SmolLM3ForCausalLM(LlamaForCausalLM):
    config_class = SmolLM3Config

    def make_attention(self, build: Builder, index: int, name: str) -> SelfAttention:
        attention = SelfAttention if self.config.rotated_layers[index] else UnrotatedAttention
        return attention(build, index, [f"{name}.{part}_proj" for part in "qkv"], f"{name}.o_proj")
