"""Models whose layers see a window, all of them or some, far past it: answers are transformers', whatever happens.

Blocks behind the window are given back while a sequence runs (C085), so every way to share, cut and move blocks is gone
through again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedserve import LLM, SamplingParams
from pagedserve.sampling_params import BeamParams
from tests.helpers.hf_checkpoints import SIZES, write_random

NUM_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(n=4, temperature=1.2, seed=17, max_tokens=NUM_TOKENS, ignore_eos=True)
BEAM = SamplingParams(n=3, beam=BeamParams(width=3), max_tokens=12, temperature=0.0, ignore_eos=True)
LENGTHS = (3, 16, 33, 70)
# Two best logits nearer than this could be swapped by another order of additions, which is no fault of the engine.
MIN_MARGIN = 1e-3

MODELS: dict[str, tuple[str, dict[str, Any], list[int | None]]] = {
    "all layers alike": ("mistral", {"sliding_window": 21}, [21]),
    "some layers": (
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 19,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        [None, 19, 19],
    ),
}


@pytest.fixture(scope="module", params=MODELS, ids=str)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(4, 320) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def made(kind: str, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """The model's folder, and transformers' greedy answers: one whole forward a token, no cache that could be wrong."""
    model_type, config, _ = MODELS[kind]
    folder = tmp_path_factory.mktemp("window") / "tiny"
    oracle = write_random(folder, model_type, seed=3, tokenizer=True, **{**SIZES, **config})
    answers = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            with torch.inference_mode():
                logits = oracle(torch.tensor([ids])).logits[0, -1]
            best = logits.topk(2)
            assert best.values[0] - best.values[1] > MIN_MARGIN, "this model cannot tell; take another seed"
            ids.append(int(best.indices[0]))
        answers.append(ids[len(prompt) :])
    return folder, answers


def load(folder: Path, **settings: Any) -> LLM:
    exact = {"num_device_blocks": 400, "num_threads": 1, "watermark": 0.0, "kv_cache_dtype": "float32"}
    return LLM(str(folder), **{**exact, **settings})


def ask(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    core = llm.engine.client.core
    core.scheduler.check()
    assert core.scheduler.stats().kv_cache_usage == 0.0
    assert all(output.error is None for output in outputs)
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def roomy(made: tuple[Path, list[list[int]]]) -> Iterator[LLM]:
    with load(made[0]) as llm:
        yield llm


def test_answers_are_those_of_transformers(
    roomy: LLM, kind: str, made: tuple[Path, list[list[int]]], prompts: list[list[int]]
) -> None:  # C085
    assert list(roomy.engine.client.core.scheduler._cache.geometry.windows) == MODELS[kind][2]
    first = ask(roomy, prompts, GREEDY)
    assert [choices[0] for choices in first] == made[1]
    # Once more, from what is left of the blocks; then with more behind it.
    again = roomy.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == made[1]
    assert all(output.num_cached_tokens >= (len(output.prompt_token_ids) - 1) // 16 * 16 for output in again)
    continued = [prompt + answer[:25] for prompt, answer in zip(prompts, made[1], strict=True)]
    shorter = GREEDY.with_(max_tokens=NUM_TOKENS - 25)
    assert [choices[0] for choices in ask(roomy, continued, shorter)] == [answer[25:] for answer in made[1]]


SETTINGS: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 7},
    {"block_size": 4, "max_num_batched_tokens": 64},
    {"enable_prefix_caching": False, "attention_backend": "reference"},
    {"num_device_blocks": 9, "preemption_mode": "recompute"},
    {"num_device_blocks": 9, "preemption_mode": "swap"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_answers_do_not_depend_on_cuts_blocks_and_preemption(
    roomy: LLM, made: tuple[Path, list[list[int]]], prompts: list[list[int]], settings: dict[str, Any]
) -> None:  # C085
    num_groups = roomy.engine.client.core.scheduler._cache.num_groups
    if "num_device_blocks" in settings:
        settings = {**settings, "num_device_blocks": settings["num_device_blocks"] * num_groups}
    with load(made[0], **settings) as llm:
        assert [choices[0] for choices in ask(llm, prompts, GREEDY)] == made[1]
        assert ask(llm, prompts, SEEDED) == ask(roomy, prompts, SEEDED)
        assert ask(llm, prompts[:2], BEAM) == ask(roomy, prompts[:2], BEAM)
        if "num_device_blocks" in settings:
            assert llm.engine.client.core.scheduler.stats().num_preemptions > 0
