"""What GGUF calls things, and what Hugging Face calls them: one table entry an architecture."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedserve.errors import ModelLoadError
from pagedserve.log import get_logger

logger = get_logger(__name__)

_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How the files of one `general.architecture` map to a Hugging Face model."""

    name: str
    hf_class: str
    model_type: str
    # GGUF name without suffix -> Hugging Face name without suffix, outside and inside blocks.
    top_names: Mapping[str, str]
    block_names: Mapping[str, str]
    # Rows that the converter interleaved for rotary embedding: block tensor -> metadata key of its number of heads.
    rotary_rows: Mapping[str, str]
    # Tensors that are settings: they end up in the config, not among the weights.
    config_tensors: frozenset[str] = frozenset({"rope_freqs.weight"})
    # Fixed fields of the config.
    extra: Mapping[str, Any]

    def hf_name(self, gguf_name: str, path: Path) -> str:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; ModelLoadError names a stranger."""
        block = _BLOCK_NAME.fullmatch(gguf_name)
        if block and block[2] in self.block_names:
            return f"model.layers.{block[1]}.{self.block_names[block[2]]}.{block[3]}"
        stem, _, suffix = gguf_name.rpartition(".")
        if stem in self.top_names and suffix in ("weight", "bias"):
            return f"{self.top_names[stem]}.{suffix}"
        raise ModelLoadError(f"{path}: tensor {gguf_name} is not part of a GGUF {self.name!r} model")

    def rotary_heads(self, gguf_name: str, metadata: Mapping[str, Any]) -> int | None:
        """Number of heads whose rows are interleaved in this tensor; None where none are."""
        block = _BLOCK_NAME.fullmatch(gguf_name)
        if not block or block[2] not in self.rotary_rows:
            return None
        num_heads = metadata.get(f"{self.name}.attention.head_count")
        num_heads = metadata.get(f"{self.name}.{self.rotary_rows[block[2]]}", num_heads)
        return num_heads[0] if isinstance(num_heads, list) else num_heads


_LLAMA = Architecture(
    name="llama",
    hf_class="LlamaForCausalLM",
    model_type="llama",
    top_names={"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    block_names={
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    rotary_rows={"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"},
    extra={"hidden_act": "silu"},
)

ARCHITECTURES = {architecture.name: architecture for architecture in (_LLAMA,)}

# Keys below the architecture's prefix that `hf_config` understands, or that change nothing in the computation.
_KNOWN_KEYS = frozenset(
    (
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
        *("expert_count", "expert_used_count", "tensor_data_layout"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "attention.sliding_window"),
        *("rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.finetuned"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    )
)


def architecture_of(metadata: Mapping[str, Any], path: Path) -> Architecture:
    """The table entry for `general.architecture`."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelLoadError(f"{path}: GGUF architecture {name!r} is not supported; known: {', '.join(ARCHITECTURES)}")
    if metadata.get("split.count", 1) > 1:
        raise ModelLoadError(
            f"{path} is one of {metadata['split.count']} parts of a model; join them first (llama-gguf-split --merge)"
        )
    return ARCHITECTURES[name]


def hf_config(
    architecture: Architecture,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: list[float] | None,
    path: Path,
) -> dict[str, Any]:
    """The config.json of the model. `shapes` maps GGUF tensor names to row-major shapes."""
    keys = _Keys(architecture.name, metadata, path)
    num_heads = keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    if "attention.key_length" not in keys and hidden_size % num_heads:
        raise ModelLoadError(f"{path}: embedding_length {hidden_size} is not a multiple of {num_heads} heads")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{path}: attention.value_length other than key_length is not supported")
    if keys.integer("expert_count", 0) > 0:
        raise ModelLoadError(f"{path}: mixture-of-experts GGUF files ({architecture.name}) are not supported")
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
        "rms_norm_eps": _short_float(keys.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short_float(keys.number("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(keys, rope_factors),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        **architecture.extra,
    }
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if "attention.sliding_window" in keys:
        config["sliding_window"] = keys.integer("attention.sliding_window")
    keys.warn_about_strangers()
    return config


def hf_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The generation_config.json of the model: sampling defaults, bos, what ends a turn (the main id first)."""
    prefix = "tokenizer.ggml."
    ends = [metadata.get(f"{prefix}{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens = metadata.get(f"{prefix}tokens", ())
    kinds = metadata.get(f"{prefix}token_type", ())
    # Llama 3 files name only one of their ends; the others are known by their text, if they are control tokens.
    ends += [
        i
        for i, (t, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL_TOKEN and t in _TURN_END_TOKENS
    ]
    unique = list(dict.fromkeys(i for i in ends if i is not None))
    config = {
        "bos_token_id": metadata.get(f"{prefix}bos_token_id"),
        "pad_token_id": metadata.get(f"{prefix}padding_token_id"),
    }
    config["eos_token_id"] = unique if len(unique) > 1 else unique[0] if unique else None
    for key, name in _SAMPLING_KEYS.items():
        value = metadata.get(f"general.sampling.{key}")
        config[name] = _short_float(value) if isinstance(value, float) and abs(value) < _FLOAT32_MAX else value
    return {key: value for key, value in config.items() if value is not None}


def _rope_scaling(keys: _Keys, factors: list[float] | None) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    original_len = keys.integer("rope.scaling.original_context_length", 0)
    if factors is not None:
        # Llama 3.x: the converter evaluated the scaling rule into one divisor a frequency. LongRoPE with the same
        # list for short and long texts, and no change of magnitude, is exactly that.
        if not all(0.0 < f < _FLOAT32_MAX for f in factors):
            raise ModelLoadError(f"{keys.path}: rope_freqs.weight holds numbers that cannot be divisors")
        factors = [_short_float(f) for f in factors]
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": original_len or keys.integer("context_length"),
        }
    if kind == "none" and factor in (0.0, 1.0):
        return None
    if kind == "linear" or (kind == "none" and "rope.scale_linear" in keys):
        return {"rope_type": "linear", "factor": _short_float(factor)}
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": _short_float(factor)}
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


def _short_float(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 was written as 1e-05."""
    stored = struct.pack("<f", value)
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == stored:
            return candidate
    return value


class _Keys:
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
