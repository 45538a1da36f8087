"""Embeddings of the demo model against transformers on the same weights."""

from __future__ import annotations

import torch

from pagedserve import LLM
from pagedserve.pooling_params import PoolingParams
from tests.helpers.demo_model import demo_model, demo_reference

TEXTS = [
    "A cat sleeps on the sofa.",
    "A kitten is napping on the couch.",
    "The central bank raised interest rates by half a percent.",
]


@torch.inference_mode()
def test_vectors_are_those_of_transformers_and_mean_something() -> None:
    found = {}
    with LLM(str(demo_model()), num_device_blocks=64) as llm:
        ids = [llm.get_tokenizer().encode(text) for text in TEXTS]
        for kind in ("last", "mean"):
            found[kind] = torch.tensor(llm.embed(TEXTS, PoolingParams(pooling_type=kind), use_tqdm=False))
    body = demo_reference().model
    for i, prompt in enumerate(ids):
        states = body(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        for kind, wanted in (("last", states[-1]), ("mean", states.mean(0))):
            assert torch.nn.functional.cosine_similarity(found[kind][i], wanted, dim=0) > 0.9999
    cats, other = (float(found["mean"][0] @ found["mean"][i]) for i in (1, 2))
    assert cats > other
