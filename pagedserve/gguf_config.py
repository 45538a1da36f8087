"""What GGUF metadata says, as a Hugging Face config.json and generation_config.json."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedserve.errors import ModelLoadError
from pagedserve.log import get_logger

if TYPE_CHECKING:
    from pagedserve.gguf_architectures import Architecture

logger = get_logger(__name__)

_TURN_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
_CONTROL_TOKEN = 3
_FLOAT32_MAX = 3.4e38
# What the converter took from the model's generation_config.json.
_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

# Keys below the architecture's prefix that `hf_config` understands, or that change nothing in the computation.
_KNOWN_KEYS = frozenset(
    (
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
        *("expert_count", "expert_used_count", "tensor_data_layout"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "attention.sliding_window"),
        *("rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.finetuned"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.freq_base_swa"),
        *("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window_pattern"),
        *("expert_feed_forward_length", "expert_weights_norm", "expert_gating_func", "expert_shared_count"),
    )
)


def hf_config(
    architecture: Architecture,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Mapping[str, list[float]],
    path: Path,
) -> dict[str, Any]:
    """The config.json of the model. `shapes` maps GGUF tensor names to row-major shapes, `rope_factors` the names of
    tensors that divide rotary frequencies to their numbers."""
    keys = Keys(architecture.name, metadata, path)
    num_heads = keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    if "attention.key_length" not in keys and hidden_size % num_heads:
        raise ModelLoadError(f"{path}: embedding_length {hidden_size} is not a multiple of {num_heads} heads")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{path}: attention.value_length other than key_length is not supported")
    if "token_embd.weight" not in shapes:
        raise ModelLoadError(f"{path}: tensor token_embd.weight is missing")
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": short_float(keys.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": short_float(keys.number("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(keys, rope_factors),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if keys.integer("attention.sliding_window", 0):
        config["sliding_window"] = keys.integer("attention.sliding_window")
    config.update(architecture.settings(keys, config))
    keys.warn_about_strangers()
    return config


def hf_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The generation_config.json of the model: sampling defaults, bos, what ends a turn (the main id first)."""
    prefix = "tokenizer.ggml."
    ends = [metadata.get(f"{prefix}{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens = metadata.get(f"{prefix}tokens", ())
    kinds = metadata.get(f"{prefix}token_type", ())
    # Llama 3 files name only one of their ends; the others are known by their text, if they are control tokens.
    control = [i for i, kind in enumerate(kinds[: len(tokens)]) if kind == _CONTROL_TOKEN]
    ends += [i for i in control if tokens[i] in _TURN_END_TOKENS]
    unique = list(dict.fromkeys(i for i in ends if i is not None))
    config = {
        "bos_token_id": metadata.get(f"{prefix}bos_token_id"),
        "pad_token_id": metadata.get(f"{prefix}padding_token_id"),
    }
    config["eos_token_id"] = unique if len(unique) > 1 else unique[0] if unique else None
    for key, name in _SAMPLING_KEYS.items():
        value = metadata.get(f"general.sampling.{key}")
        config[name] = short_float(value) if isinstance(value, float) and abs(value) < _FLOAT32_MAX else value
    return {key: value for key, value in config.items() if value is not None}


def _rope_scaling(keys: Keys, factors: Mapping[str, list[float]]) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    original_len = keys.integer("rope.scaling.original_context_length", 0)
    if factors:
        # Llama 3.x: the converter evaluated the scaling rule into one divisor a frequency. LongRoPE with the same
        # list for short and long texts, and no change of magnitude, is exactly that.
        for name, numbers in factors.items():
            if not all(0.0 < f < _FLOAT32_MAX for f in numbers):
                raise ModelLoadError(f"{keys.path}: {name} holds numbers that cannot be divisors")
        same = factors.get("rope_freqs.weight")
        return {
            "rope_type": "longrope",
            "short_factor": [short_float(f) for f in same or factors["rope_factors_short.weight"]],
            "long_factor": [short_float(f) for f in same or factors["rope_factors_long.weight"]],
            "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original_len or keys.integer("context_length"),
        }
    if kind == "none" and factor in (0.0, 1.0):
        return None
    if kind == "linear" or (kind == "none" and "rope.scale_linear" in keys):
        return {"rope_type": "linear", "factor": short_float(factor)}
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": short_float(factor)}
        if original_len:
            scaling["original_max_position_embeddings"] = original_len
        if "rope.scaling.attn_factor" in keys:
            magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            scaling["attention_factor"] = keys.number("rope.scaling.attn_factor") * magnitude
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in keys:
                scaling[name] = keys.number(f"rope.scaling.yarn_{name}")
        return scaling
    raise ModelLoadError(f"{keys.path}: rope scaling type {kind!r} is not supported; known: none, linear, yarn")


def short_float(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 was written as 1e-05."""
    stored = struct.pack("<f", value)
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == stored:
            return candidate
    return value


class Keys:
    """Metadata below `<architecture>.`, with checked types."""

    def __init__(self, prefix: str, metadata: Mapping[str, Any], path: Path):
        self._prefix = prefix
        self._metadata = metadata
        self.path = path

    def __contains__(self, key: str) -> bool:
        return f"{self._prefix}.{key}" in self._metadata

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._prefix}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # one number a layer, all equal
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelLoadError(f"{self.path}: metadata {self._prefix}.{key} is {_shown(value)}, not a whole number")
        if value < 0 or (value == 0 and default is None):
            raise ModelLoadError(f"{self.path}: metadata {self._prefix}.{key} is {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _FLOAT32_MAX:
            raise ModelLoadError(f"{self.path}: metadata {self._prefix}.{key} is {_shown(value)}, not a number")
        return float(value)

    def warn_about_strangers(self) -> None:
        names = [k.removeprefix(f"{self._prefix}.") for k in self._metadata if k.startswith(f"{self._prefix}.")]
        strangers = [name for name in names if name not in _KNOWN_KEYS]
        if strangers:
            logger.warning("%s: metadata not understood and left out: %s", self.path, ", ".join(strangers))


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]
