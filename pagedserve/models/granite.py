"""Granite 3 (IBM): a Llama with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagedserve.kernels import ops
from pagedserve.layers.embedding import Embedding, ScaledEmbedding
from pagedserve.layers.linear import Linear
from pagedserve.models.decoder import Builder, DecoderConfig, decoder_fields
from pagedserve.models.hf_config import Fields
from pagedserve.models.llama import LlamaForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """The residual multiplier m needs no work in the layers.

    Instead of the residual r this model carries r / m: what layers add is then added as it is, and a norm of r / m with
    eps / m^2 is the norm of r with eps.
    """

    embedding_scale: float
    logits_scale: float

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GraniteConfig:
        fields = Fields(config)
        read = decoder_fields(config)
        residual = fields.number("residual_multiplier", 1.0)
        changes = {"scale": fields.number("attention_multiplier", 1.0), "norm_eps": read["norm_eps"] / residual**2}
        return cls(
            **{**read, **changes},
            embedding_scale=fields.number("embedding_multiplier", 1.0) / residual,
            logits_scale=1.0 / fields.number("logits_scaling", 1.0),
        )


class GraniteForCausalLM(LlamaForCausalLM):
    config_class = GraniteConfig

    def make_ends(self, build: Builder) -> tuple[Embedding, Linear]:
        embedding, head = super().make_ends(build)
        return ScaledEmbedding(embedding, self.config.embedding_scale), head

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return ops.scale(super().compute_logits(hidden), self.config.logits_scale)
