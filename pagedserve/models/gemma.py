"""Gemma 2 (arXiv 2408.00118) and the text part of Gemma 3 (arXiv 2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagedserve.errors import ModelLoadError
from pagedserve.kernels import ops
from pagedserve.layers.embedding import Embedding, ScaledEmbedding
from pagedserve.layers.linear import Linear
from pagedserve.layers.norm import RMSNorm
from pagedserve.layers.rotary import RopeConfig
from pagedserve.log import get_logger
from pagedserve.models.blocks import GatedMLP, NormedAttention, SandwichNormLayer, SelfAttention
from pagedserve.models.decoder import Builder, Decoder, DecoderConfig, decoder_fields, windows_by_type
from pagedserve.models.hf_config import Fields

logger = get_logger(__name__)

# What transformers takes for fields that a file leaves out; null says that there is none.
_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA2_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3_DEFAULTS = {**_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6}
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    final_soft_cap: float | None  # of the logits

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma2Config:
        config = {**_GEMMA2_DEFAULTS, **config}
        slides = [i % 2 == 0 for i in range(Fields(config).integer("num_hidden_layers"))]
        return cls(**_fields(config, layer_windows=windows_by_type(config, slides)))


class Gemma2ForCausalLM(Decoder):
    """Norms before and after each half, every other layer local, capped scores and logits."""

    config_class = Gemma2Config
    prefix = "model."
    head = "lm_head"

    def make_ends(self, build: Builder) -> tuple[Embedding, Linear]:
        config = self.config
        embedding, head = build.weights.embedding_and_head(
            f"{self.prefix}embed_tokens",
            self.head,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            tied=config.tie_word_embeddings,
        )
        return ScaledEmbedding(embedding, config.hidden_size**0.5), head

    def make_layer(self, build: Builder, index: int) -> SandwichNormLayer:
        name = f"{self.prefix}layers.{index}"
        return SandwichNormLayer(
            input_norm=self._norm(build, f"{name}.input_layernorm"),
            attention=self.make_attention(build, index, f"{name}.self_attn"),
            attention_out_norm=self._norm(build, f"{name}.post_attention_layernorm"),
            mlp_norm=self._norm(build, f"{name}.pre_feedforward_layernorm"),
            mlp=GatedMLP(build, [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"], f"{name}.mlp.down_proj"),
            mlp_out_norm=self._norm(build, f"{name}.post_feedforward_layernorm"),
        )

    def make_attention(self, build: Builder, index: int, name: str) -> SelfAttention:
        return SelfAttention(build, index, [f"{name}.{part}_proj" for part in "qkv"], f"{name}.o_proj")

    def make_norm(self, build: Builder) -> RMSNorm:
        return self._norm(build, f"{self.prefix}norm")

    def _norm(self, build: Builder, name: str, size: int | None = None) -> RMSNorm:
        # Files hold what the weight differs from 1 by.
        return build.weights.rms_norm(name, size or self.config.hidden_size, self.config.norm_eps, offset=1.0)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        cap = self.config.final_soft_cap
        return logits if cap is None else ops.soft_cap(logits, cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    local_rope: RopeConfig  # of the layers with a window

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma3Config:
        if "text_config" in config:
            config = {**config["text_config"], **{k: config[k] for k in ("quantization_config",) if k in config}}
        config = {**_GEMMA3_DEFAULTS, **config}
        if config.get("use_bidirectional_attention"):
            raise ModelLoadError("config.json: Gemma 3 that attends in both directions is no decoder")
        everywhere, local = _rotary_settings(config)
        fields = Fields(config)
        pattern = fields.integer("sliding_window_pattern")
        slides = [(i + 1) % pattern != 0 for i in range(fields.integer("num_hidden_layers"))]
        read = _fields({**config, **everywhere}, layer_windows=windows_by_type(config, slides))
        rope = RopeConfig.from_hf(
            {**config, **local},
            head_dim=read["head_dim"],
            max_position_embeddings=fields.integer("max_position_embeddings"),
        )
        return cls(**read, local_rope=rope)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Queries and keys are normalised; five local layers, with a rotary base of their own, to each global one."""

    config_class = Gemma3Config

    def make_attention(self, build: Builder, index: int, name: str) -> SelfAttention:
        config = self.config
        return NormedAttention(
            build,
            index,
            [f"{name}.{part}_proj" for part in "qkv"],
            f"{name}.o_proj",
            q_norm=self._norm(build, f"{name}.q_norm", config.head_dim),
            k_norm=self._norm(build, f"{name}.k_norm", config.head_dim),
            rope=config.rope if config.layer_windows[index] is None else config.local_rope,
        )


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text part of a checkpoint that can also see: it answers text, and images are refused before they get here."""

    def make_ends(self, build: Builder) -> tuple[Embedding, Linear]:
        weights = build.weights
        self.prefix = weights.prefix_of("embed_tokens.weight", ("language_model.model.", "model.language_model."))
        self.head = weights.prefix_of("lm_head.weight", ("language_model.", "")) + "lm_head"
        weights.leave_out(
            "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."
        )
        logger.info("this checkpoint's vision part is left out: it answers text only")
        return super().make_ends(build)


def _fields(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    fields = Fields(config)
    read = decoder_fields({**config, "hidden_act": fields.string("hidden_activation", "gelu_pytorch_tanh")}, **changes)
    return {
        **read,
        "scale": fields.number("query_pre_attn_scalar") ** -0.5,
        "soft_cap": fields.optional_number("attn_logit_softcapping"),
        "final_soft_cap": fields.optional_number("final_logit_softcapping"),
    }


def _rotary_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary fields of global and of local layers, from either spelling."""
    by_type = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling")
    everywhere = {"rope_theta": config.get("rope_theta") or _GLOBAL_THETA, **(by_type.get("full_attention") or {})}
    local = {
        "rope_theta": config.get("rope_local_base_freq") or _LOCAL_THETA,
        **(by_type.get("sliding_attention") or {}),
    }
    return (
        {"rope_scaling": scaling, "rope_parameters": everywhere, "rope_theta": everywhere["rope_theta"]},
        {"rope_scaling": None, "rope_parameters": local},
    )
