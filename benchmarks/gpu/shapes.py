"""Models of a shape, with random weights: a folder that holds config.json."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
OPT_13B: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 5120,
    "ffn_dim": 20480,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 5120,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "torch_dtype": "float16",
}
TINY_LLAMA = {
    **LLAMA_3_8B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TINY_OPT = {
    **OPT_13B,
    "vocab_size": 512,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
# One small layer: what a step takes is what the host takes.
ONE_LAYER = {**TINY_LLAMA, "vocab_size": 32000, "num_hidden_layers": 1, "max_position_embeddings": 2048}


def folder(config: dict[str, Any], **changes: Any) -> Path:
    """A new folder with config.json alone."""
    path = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path
