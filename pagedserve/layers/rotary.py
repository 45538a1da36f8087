"""Rotary position embedding (RoFormer, arXiv 2104.09864) and the ways to stretch it over longer contexts.

The frequencies are those of transformers' `modeling_rope_utils`, computed in the same order in fp32, so that angles at
far positions agree. All of it ends in one table of cosines and sines, one row a position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagedserve.errors import ModelLoadError

# Scaling rules whose files state `max_position_embeddings` before stretching, unless they state the original too.
_STRETCHES_LENGTH = frozenset({"linear", "dynamic"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions become angles.

    `original_len` is the context length of pretraining, before stretching; `settings` are the fields of the scaling
    rule as the file states them.
    """

    kind: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    original_len: int
    settings: Mapping[str, Any]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, head_dim: int, max_position_embeddings: int) -> RopeConfig:
        """From config.json, in any of its spellings: `rope_scaling` with `type` or `rope_type`, `rope_parameters`.

        Raises ModelLoadError for an unknown rule or a field that is missing or no number.
        """
        settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(settings, Mapping) or any(isinstance(value, Mapping) for value in settings.values()):
            raise ModelLoadError("rotary settings that differ between layers are not supported")
        kind = settings.get("rope_type") or settings.get("type") or "default"
        if kind not in INV_FREQ_RULES:
            raise ModelLoadError(f"rope_type {kind!r} is not supported; known: {', '.join(INV_FREQ_RULES)}")
        fields = {**config, **{name: value for name, value in settings.items() if value is not None}}
        theta = _number(fields, "rope_theta", 10000.0)
        rotary_dim = int(head_dim * _number(fields, "partial_rotary_factor", 1.0))
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ModelLoadError(f"rotary embedding of {rotary_dim} of {head_dim} dimensions: use an even number")
        # Phi-3 and others state the original length outside the rule, and then it counts.
        original = config.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
        if original is not None and (not isinstance(original, int) or original < 1):
            raise ModelLoadError(f"original_max_position_embeddings is {original!r}, not a positive number")
        return cls(
            kind=kind,
            theta=theta,
            rotary_dim=rotary_dim,
            max_position_embeddings=max_position_embeddings,
            original_len=original or max_position_embeddings,
            settings=dict(settings),
        )

    @property
    def max_model_len(self) -> int:
        """Positions that the rule was made for.

        Linear and dynamic files state the length before stretching (or, with an original length, after it); YaRN is
        original length times factor; Llama 3 and LongRoPE files state the stretched length, which is not multiplied
        again.
        """
        if self.kind == "yarn":
            return int(self.original_len * self.number("factor", self.max_position_embeddings / self.original_len))
        if self.kind in _STRETCHES_LENGTH and "original_max_position_embeddings" not in self.settings:
            return int(self.max_position_embeddings * self.number("factor"))
        return self.max_position_embeddings

    def number(self, name: str, default: float | None = None) -> float:
        """A field of the scaling rule; ModelLoadError where it is missing or no finite number."""
        return _number(self.settings, name, default)

    def cos_sin(self, num_positions: int) -> torch.Tensor:
        """The table that `ops.rotary_embedding` reads: fp32 [num_positions, rotary_dim], per position rotary_dim / 2
        cosines, then as many sines. One serves all layers."""
        positions = torch.arange(num_positions, dtype=torch.float32)
        inv_freq, magnitude = INV_FREQ_RULES[self.kind](self, num_positions)
        angles = positions[:, None] * inv_freq
        return torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), dim=1)


# ---- the rules: config, number of positions -> inverse frequencies ([dim / 2], or one row a position), magnitude ----

InvFreq = tuple[torch.Tensor, float]


def _exponents(rope: RopeConfig) -> torch.Tensor:
    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim


def _default(rope: RopeConfig, num_positions: int) -> InvFreq:
    return 1.0 / (rope.theta ** _exponents(rope)), 1.0


def _linear(rope: RopeConfig, num_positions: int) -> InvFreq:
    """Position interpolation (arXiv 2306.15595)."""
    return _default(rope, num_positions)[0] / rope.number("factor"), 1.0


def _dynamic(rope: RopeConfig, num_positions: int) -> InvFreq:
    """NTK-aware scaling whose base grows with the length, once that exceeds `max_position_embeddings`.

    A cached key cannot be rotated anew when its sequence grows, so each position keeps the base of the moment when it
    was the last one. Decoding step by step in transformers does the same; here it also holds for prompts, however they
    are chunked and whoever else is in the batch.
    """
    factor, dim = rope.number("factor"), rope.rotary_dim
    inv_freq = _default(rope, num_positions)[0].expand(num_positions, dim // 2).clone()
    stretched = range(rope.max_position_embeddings, num_positions)
    if stretched:
        bases = [
            rope.theta * (factor * (p + 1) / rope.max_position_embeddings - (factor - 1)) ** (dim / (dim - 2))
            for p in stretched
        ]
        inv_freq[stretched.start :] = 1.0 / (torch.tensor(bases, dtype=torch.float32)[:, None] ** _exponents(rope))
    return inv_freq, 1.0


def _llama3(rope: RopeConfig, num_positions: int) -> InvFreq:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise ModelLoadError(f"rope scaling: high_freq_factor {high} must be greater than low_freq_factor {low}")
    inv_freq = _default(rope, num_positions)[0]
    wavelength = 2 * math.pi / inv_freq
    blend = (rope.original_len / wavelength - low) / (high - low)
    blended = (1 - blend) * inv_freq / factor + blend * inv_freq
    stretched = torch.where(wavelength > rope.original_len / low, inv_freq / factor, blended)
    return torch.where(wavelength < rope.original_len / high, inv_freq, stretched), 1.0


def _yarn(rope: RopeConfig, num_positions: int) -> InvFreq:
    """YaRN (arXiv 2309.00071): interpolation by part, and a magnitude that sharpens attention."""
    factor = rope.number("factor", rope.max_position_embeddings / rope.original_len)
    dim = rope.rotary_dim

    def correction_dim(num_rotations: float) -> float:
        return dim * math.log(rope.original_len / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = correction_dim(rope.number("beta_fast", 0.0) or 32.0)
    high = correction_dim(rope.number("beta_slow", 0.0) or 1.0)
    if rope.settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = rope.theta ** _exponents(rope)
    keep = 1 - interpolated
    inv_freq = 1.0 / (factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.settings.get("attention_factor") is not None:
        return inv_freq, rope.number("attention_factor")
    mscale, mscale_all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return inv_freq, magnitude(mscale) / magnitude(mscale_all_dim)
    return inv_freq, magnitude(1.0)


def _longrope(rope: RopeConfig, num_positions: int) -> InvFreq:
    """LongRoPE (arXiv 2402.13753): one list of divisors for models that serve up to the original length, another for
    those that serve more. GGUF files state Llama 3's rule in this form, with both lists the same.

    The served length decides, not a text's own: cached keys cannot be rotated anew when a text outgrows the original
    length, and what a text is answered with must not depend on who else is in the batch.
    """
    name = "long_factor" if num_positions > rope.original_len else "short_factor"
    divisors = rope.settings.get(name)
    if not isinstance(divisors, list) or len(divisors) != rope.rotary_dim // 2:
        raise ModelLoadError(f"rope scaling: {name} must be a list of {rope.rotary_dim // 2} numbers")
    inv_freq = 1.0 / (torch.tensor(divisors, dtype=torch.float32) * rope.theta ** _exponents(rope))
    if rope.settings.get("attention_factor") is not None:
        return inv_freq, rope.number("attention_factor")
    factor = rope.number("factor", rope.max_position_embeddings / rope.original_len)
    return inv_freq, 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(rope.original_len))


INV_FREQ_RULES: dict[str, Callable[[RopeConfig, int], InvFreq]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _number(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = fields.get(name)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        shown = "missing" if value is None else repr(value)[:80]
        raise ModelLoadError(f"rotary settings: {name} is {shown}, not a number")
    return float(value)
