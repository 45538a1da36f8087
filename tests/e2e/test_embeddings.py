"""Embeddings of the demo model against transformers on the same weights."""

from __future__ import annotations

import pytest
import torch

from pagedserve import LLM
from pagedserve.pooling_params import PoolingParams
from tests.helpers.demo_model import demo_model, demo_reference

TEXTS = [
    "A cat sleeps on the sofa.",
    "A kitten is napping on the couch.",
    "The central bank raised interest rates by half a percent.",
]


@pytest.mark.parametrize("pooling_type", ["last", "mean"])
@torch.inference_mode()
def test_vectors_are_those_of_transformers_and_mean_something(pooling_type: str) -> None:
    with LLM(str(demo_model()), num_device_blocks=64) as llm:
        ids = [llm.get_tokenizer().encode(text) for text in TEXTS]
        found = torch.tensor(llm.embed(TEXTS, PoolingParams(pooling_type=pooling_type), use_tqdm=False))
    body = demo_reference().model
    for vector, prompt in zip(found, ids, strict=True):
        states = body(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        wanted = states.mean(0) if pooling_type == "mean" else states[-1]
        assert torch.nn.functional.cosine_similarity(vector, wanted, dim=0) > 0.9999
    if pooling_type == "mean":
        cats, other = float(found[0] @ found[1]), float(found[0] @ found[2])
        assert cats > other
