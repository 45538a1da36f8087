"""Llama against transformers on the same weights, through paged KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.checkpoints import tiny_llama
from tests.helpers.paged_model import PagedModel

PROMPT = [(37 * i * i + 11 * i + 5) % 320 for i in range(45)]

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 32},
    "one kv head": {"num_key_value_heads": 1},
    "kv heads absent": {"num_key_value_heads": None},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "eps": {"rms_norm_eps": 0.3},
    "gelu": {"hidden_act": "gelu"},
    "gelu_new": {"hidden_act": "gelu_new"},
    "gelu_pytorch_tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "theta": {"rope_theta": 1e6},
    "odd vocabulary": {"vocab_size": 517},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "yarn, all settings": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.4,
            "truncate": False,
        }
    },
    "rope_parameters": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "mistral with a window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9},
}


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def reference_logits(folder: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return reference(folder, dtype)(torch.tensor([token_ids])).logits[0].float()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers_at_every_position_and_chunk_size(tmp_path: Path, name: str) -> None:
    folder = tiny_llama(tmp_path, tokenizer=False, **VARIANTS[name])
    expected = reference_logits(folder, PROMPT)
    for chunk in (1, 7, 16):
        found = PagedModel(folder, seed=chunk).logits(PROMPT, chunk=chunk)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
