"""Tiny random checkpoints of any architecture of transformers, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.helpers.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}
# GPT-2 and what was written after it.
GPT_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}


def write_random(
    folder: Path,
    model_type: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = False,
    size: float = 1.5,
    **config: Any,
) -> Any:
    """A random model of `model_type` in `folder`; returns it, attending eagerly, for comparison.

    Weights of the default `size` are large enough that attention is not uniform; biases and norms are not what they
    would be by default.
    """
    settings = transformers.CONFIG_MAPPING[model_type](**config)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = (
            transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
            ._from_config(settings, attn_implementation="eager")
            .eval()
        )
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, size / parameter.shape[-1] ** 0.5)
            elif "norm" in name or "ln_" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.3)
    model.to(dtype).save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    return model
