"""The real SmolLM2-135M-Instruct (GGUF Q4_1) against transformers on the dequantised fp32 weights."""

from __future__ import annotations

import pytest
import torch

from pagedserve import quantization
from pagedserve.kernels import native
from tests.helpers.demo_model import demo_model, demo_reference
from tests.helpers.paged_model import CPU, PagedModel

# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe capital of France is Paris."
PROMPT = [
    1,
    4093,
    198,
    1780,
    314,
    260,
    3575,
    282,
    4649,
    47,
    2,
    198,
    1,
    520,
    9531,
    198,
    504,
    3575,
    282,
    4649,
    314,
    7042,
    30,
]


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:  # [num_tokens, vocab]
    with torch.inference_mode():
        return demo_reference()(torch.tensor([PROMPT])).logits[0]


def logits_of(weights_dtype: str) -> torch.Tensor:
    quant = quantization.select(weights_dtype, CPU, torch.float32)
    backend = "cpu" if native.available() else "reference"
    return PagedModel(demo_model(), quant=quant, backend=backend).logits(PROMPT, chunk=16)


def test_fp32_weights_give_the_logits_of_transformers(expected: torch.Tensor) -> None:
    found = logits_of("float32")
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=1e-5)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(("weights_dtype", "limit"), [("bfloat16", 0.02), ("auto", 0.1)])
def test_weights_as_they_are_served_stay_close(expected: torch.Tensor, weights_dtype: str, limit: float) -> None:
    found = logits_of(weights_dtype)
    assert (found - expected).abs().mean() / expected.std() < limit
    best = expected.topk(3).indices
    assert (found.argmax(-1, keepdim=True) == best).any(-1).all()
