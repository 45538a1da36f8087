"""The real SmolLM2-135M-Instruct (GGUF Q4_1) against transformers on the dequantised fp32 weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.demo_model import demo_model, demo_reference
from tests.helpers.paged_model import PagedModel

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
def path() -> Path:
    return demo_model()


@torch.inference_mode()
def test_logits_equal_transformers(path: Path) -> None:
    expected = demo_reference()(torch.tensor([PROMPT])).logits[0]
    found = PagedModel(path).logits(PROMPT, chunk=16)
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=1e-5)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
