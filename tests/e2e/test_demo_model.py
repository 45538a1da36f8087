"""The demo model, real weights: greedy text is transformers' own, token for token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagedserve import LLM, SamplingParams
from tests.helpers.demo_model import demo_model, demo_reference

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village,",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "In 1969, astronauts landed on",
    "Q: What is 7 times 8?\nA:",
    "Dear Sir or Madam,\n",
    "The mitochondria is",
    "To make a cup of tea, first",
    "1, 2, 3, 4, 5,",
    "La capitale de l'Italie est",
    "The opposite of hot is",
    "Here is a list of fruits:\n1.",
    "Photosynthesis is the process by which",
    "<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n<|im_start|>assistant\n",
]
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def exact() -> Iterator[LLM]:
    with LLM(model=str(demo_model()), weights_dtype="float32", kv_cache_memory="512MiB") as llm:
        yield llm


@torch.inference_mode()
def transformers_choices(prompt_ids: list[int], output_ids: list[int]) -> list[int]:
    """What transformers takes greedily after the prompt and after each output token, in one forward.

    Where these equal the output, greedy generation there gives just this output, by induction over its length.
    """
    logits = demo_reference()(torch.tensor([prompt_ids + output_ids])).logits[0]
    return logits.argmax(-1)[len(prompt_ids) - 1 : -1].tolist()


def greedy(llm: LLM, prompts: list[str]) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_greedy_text_equals_transformers(exact: LLM) -> None:
    outputs = greedy(exact, PROMPTS)
    assert sum(map(len, outputs)) > len(PROMPTS) * NUM_TOKENS // 2
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = exact.get_tokenizer().encode(prompt)
        assert output == transformers_choices(ids, output), prompt
    for index in (0, 7, 15):
        assert greedy(exact, [PROMPTS[index]]) == [outputs[index]], "alone differs from in a batch"


def test_a_question_gets_a_sensible_answer() -> None:
    """The settings people run: weights as the file has them."""
    with LLM(model=str(demo_model()), kv_cache_memory="256MiB") as llm:
        message = {"role": "user", "content": "What is the capital of France? Answer in one word."}
        (output,) = llm.chat([message], SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
