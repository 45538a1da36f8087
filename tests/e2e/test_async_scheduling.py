"""Steps that are decided before the results of those before them are known: every answer is the one it would be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedserve import LLM, SamplingParams, StructuredOutput
from pagedserve.outputs import RequestOutput
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import BeamParams
from pagedserve.scheduler.scheduler import Scheduler
from tests.helpers.checkpoints import tiny_llama

PROMPTS = [[(17 * i * i + 5 * i + p) % 300 + 4 for i in range(length)] for p, length in enumerate((3, 40, 9, 16))]
RANDOM: dict[str, Any] = {"temperature": 1.1, "max_tokens": 14}
WISHES: dict[str, SamplingParams] = {
    "one token": SamplingParams(max_tokens=1, temperature=0.0),
    "samples": SamplingParams(n=3, **RANDOM),
    "the best of samples": SamplingParams(n=1, best_of=3, **RANDOM),
    "beams": SamplingParams(n=3, beam=BeamParams(width=3), temperature=0.0, max_tokens=10),
    "logprobs": SamplingParams(logprobs=3, prompt_logprobs=2, **RANDOM),
    "only a prompt's logprobs": SamplingParams(max_tokens=0, prompt_logprobs=1),
    "penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.6, presence_penalty=0.4, **RANDOM),
    "bad words and no early end": SamplingParams(
        bad_words_token_ids=((9,), (11, 12)), min_tokens=6, stop_token_ids=tuple(range(4, 300, 3)), **RANDOM
    ),
    "stop ids": SamplingParams(stop_token_ids=tuple(range(4, 300, 7)), **RANDOM),
    "stop strings": SamplingParams(stop=["a", "e", "1"], **RANDOM),
    "a grammar": SamplingParams(structured_output=StructuredOutput.regex("(ab|cd)*e{3,9}"), **RANDOM),
    "a grammar and samples": SamplingParams(n=2, structured_output=StructuredOutput.regex("[a-d]{4,20}"), **RANDOM),
    "a vector": SamplingParams(max_tokens=0, pooling=PoolingParams(pooling_type="mean")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("ahead") / "tiny", seed=2)


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), num_device_blocks=80, num_threads=1, max_num_batched_tokens=24, seed=5, **settings)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with load(folder, async_scheduling=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def ahead(folder: Path) -> Iterator[LLM]:
    with load(folder, async_scheduling=True) as llm:
        yield llm


def told(outputs: list[RequestOutput]) -> list[Any]:
    """All that a caller sees, but for times and what the cache had."""
    return [
        (
            output.error,
            output.prompt_logprobs,
            [(c.text, c.token_ids, c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs],
        )
        for output in outputs
    ]


@pytest.fixture
def num_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps were decided ahead, as the only element."""
    count = [0]
    schedule_ahead = Scheduler.schedule_ahead

    def counted(self: Scheduler) -> Any:
        output = schedule_ahead(self)
        count[0] += output is not None
        return output

    monkeypatch.setattr(Scheduler, "schedule_ahead", counted)
    return count


@pytest.mark.parametrize("params", WISHES.values(), ids=WISHES)
def test_a_step_ahead_changes_no_answer(
    plain: LLM, ahead: LLM, params: SamplingParams, num_ahead: list[int]
) -> None:  # C083
    seeded = params.with_(seed=3)
    expected = plain.generate(PROMPTS, seeded, use_tqdm=False)
    assert num_ahead == [0]
    assert told(ahead.generate(PROMPTS, seeded, use_tqdm=False)) == told(expected)
    if params.max_tokens and params.max_tokens > 1 and params.beam is None:
        assert num_ahead[0] > 3
    core = ahead.engine.client.core
    core.scheduler.check()
    assert core.scheduler.stats().kv_cache_usage == 0.0


def test_all_wishes_at_once(plain: LLM, ahead: LLM, num_ahead: list[int]) -> None:
    """A beam among the others keeps everybody from looking ahead for as long as it lives, and no longer."""
    params = [p.with_(seed=i) for i, p in enumerate(WISHES.values()) if p.pooling is None]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    expected = told(plain.generate(prompts, params, use_tqdm=False))
    assert told(ahead.generate(prompts, params, use_tqdm=False)) == expected
    assert num_ahead[0] > 0
