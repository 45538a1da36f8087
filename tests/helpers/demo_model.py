"""The demo model of the catalog, and the same weights in transformers: the oracle for real text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedserve import catalog
from pagedserve.errors import ModelNotFoundError
from pagedserve.gguf_file import GGUFFile

NAME = "smollm2-135m-instruct"


@cache
def _fetched() -> Path | str:
    try:
        return catalog.fetch(NAME)
    except ModelNotFoundError as error:
        return str(error)


def demo_model() -> Path:
    """Path of SmolLM2-135M-Instruct as GGUF (Q4_1, embedding Q8_0); skips the test where it cannot be fetched."""
    found = _fetched()
    if isinstance(found, str):
        pytest.skip(f"the demo model cannot be fetched: {found}")
    return found


@cache
def demo_reference() -> Any:
    """transformers' model over the dequantised fp32 weights of `demo_model`, eager attention, in eval mode."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    file = GGUFFile(demo_model())
    config = LlamaConfig(**file.config(), attn_implementation="eager")
    with torch.device("meta"):  # no time for random weights that are replaced at once
        model = LlamaForCausalLM(config)
    weights = {name: torch.from_numpy(file.dequantize(name)) for name in file.tensor_names()}
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()
