"""What GGUF calls things, and what Hugging Face calls them: one table entry an architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedserve.errors import ModelLoadError
from pagedserve.gguf_config import Keys, short_float

_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How the files of one `general.architecture` map to a Hugging Face model."""

    name: str
    hf_class: str
    model_type: str
    # GGUF name without suffix -> Hugging Face name without suffix, outside and inside blocks.
    top_names: Mapping[str, str] = field(default_factory=lambda: _TOP_NAMES)
    block_names: Mapping[str, str]
    # Rows that the converter interleaved for rotary embedding: block tensor -> metadata key of its number of heads.
    rotary_rows: Mapping[str, str] = field(default_factory=dict)
    # Tensors that are settings: they end up in the config, not among the weights.
    config_tensors: frozenset[str] = frozenset(
        {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
    )
    # The converter added this to the weights of norms.
    norm_offset: float = 0.0
    # Fields of the config beyond those that all architectures share.
    settings: Callable[[Keys, Mapping[str, Any]], dict[str, Any]]

    def hf_name(self, gguf_name: str, path: Path) -> str:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; ModelLoadError names a stranger.

        The name of a tensor that holds many matrices has {} where their number belongs.
        """
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


# ---- settings ------------------------------------------------------------------------------------------------------


def _llama(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"hidden_act": "silu"}
    if num_experts := keys.integer("expert_count", 0):
        settings |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": num_experts,
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "sliding_window": None,
        }
    return settings


def _qwen(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    # The files say nothing of windows, and no released model uses them.
    return {"hidden_act": "silu", "use_sliding_window": False}


def _silu(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu"}


def _qwen3_moe(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_qwen(keys, config),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # of all released models; the files do not say
    }


def _olmoe(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "norm_topk_prob": False,  # of the released models; the files do not say
    }


def _phi3(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length", 0) or None,
        "sliding_window": config.get("sliding_window"),
    }


def _gemma2(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(config, num_layers_of_largest=46),
        "attn_logit_softcapping": _cap(keys, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _cap(keys, "final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(config, num_layers_of_largest=62),
        "rope_local_base_freq": short_float(keys.number("rope.freq_base_swa", 10000.0)),
        "sliding_window_pattern": keys.integer("attention.sliding_window_pattern", 6),
        "attn_logit_softcapping": _cap(keys, "attn_logit_softcapping", 0.0),
        "final_logit_softcapping": _cap(keys, "final_logit_softcapping", 0.0),
    }


def _query_scalar(config: Mapping[str, Any], num_layers_of_largest: int) -> int:
    """The files do not hold it: it is the size of a head, but in the largest model of each family."""
    if config["num_hidden_layers"] == num_layers_of_largest:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _cap(keys: Keys, name: str, default: float) -> float | None:
    return short_float(keys.number(name, default)) or None


# ---- the table -----------------------------------------------------------------------------------------------------

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
# One tensor of three dimensions holds the matrices of all experts; {} is an expert's number.
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            name="llama",
            hf_class="LlamaForCausalLM",
            model_type="llama",
            block_names={**_PRE_NORMS, **_ATTENTION, **_MLP, **_MIXTRAL_EXPERTS},
            rotary_rows={"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"},
            settings=_llama,
        ),
        Architecture(
            name="qwen2",
            hf_class="Qwen2ForCausalLM",
            model_type="qwen2",
            block_names={**_PRE_NORMS, **_ATTENTION, **_MLP},
            settings=_qwen,
        ),
        Architecture(
            name="qwen3",
            hf_class="Qwen3ForCausalLM",
            model_type="qwen3",
            block_names={**_PRE_NORMS, **_ATTENTION, **_HEAD_NORMS, **_MLP},
            settings=_qwen,
        ),
        Architecture(
            name="qwen3moe",
            hf_class="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            block_names={**_PRE_NORMS, **_ATTENTION, **_HEAD_NORMS, **_EXPERTS},
            settings=_qwen3_moe,
        ),
        Architecture(
            name="gemma2",
            hf_class="Gemma2ForCausalLM",
            model_type="gemma2",
            block_names={**_SANDWICH_NORMS, **_ATTENTION, **_MLP},
            norm_offset=1.0,
            settings=_gemma2,
        ),
        Architecture(
            name="gemma3",
            hf_class="Gemma3ForCausalLM",
            model_type="gemma3_text",
            block_names={**_SANDWICH_NORMS, **_ATTENTION, **_HEAD_NORMS, **_MLP},
            norm_offset=1.0,
            settings=_gemma3,
        ),
        Architecture(
            name="smollm3",
            hf_class="SmolLM3ForCausalLM",
            model_type="smollm3",
            block_names={**_PRE_NORMS, **_ATTENTION, **_MLP},
            rotary_rows={"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"},
            settings=_silu,
        ),
        Architecture(
            name="olmo2",
            hf_class="Olmo2ForCausalLM",
            model_type="olmo2",
            block_names={
                "post_attention_norm": "post_attention_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm",
                **_ATTENTION,
                **_HEAD_NORMS,
                **_MLP,
            },
            settings=_silu,
        ),
        Architecture(
            name="olmoe",
            hf_class="OlmoeForCausalLM",
            model_type="olmoe",
            block_names={**_PRE_NORMS, **_ATTENTION, **_HEAD_NORMS, **_EXPERTS},
            settings=_olmoe,
        ),
        Architecture(
            name="phi3",
            hf_class="Phi3ForCausalLM",
            model_type="phi3",
            block_names={
                **_PRE_NORMS,
                "attn_qkv": "self_attn.qkv_proj",
                "attn_output": "self_attn.o_proj",
                "ffn_up": "mlp.gate_up_proj",
                "ffn_down": "mlp.down_proj",
            },
            settings=_phi3,
        ),
    )
}


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
