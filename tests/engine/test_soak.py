"""Random requests of every kind in a pool that is too small, with random aborts: accounts after every step, and the
same answers as alone in a large pool."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pagedserve.engine.llm import make_config
from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import BeamParams, SamplingParams

NUM_REQUESTS = 60


def random_params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.choice([0, 1, 2, 5, 17, 33, 40])
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": rng.choice([0.0, 0.7, 1.5]),
        "seed": rng.randrange(1000),
        "ignore_eos": rng.random() < 0.7,
        "stop": rng.choice([(), (), ("e",), ("th", "q")]),
        "logprobs": rng.choice([None, None, 0, 2]),
        "repetition_penalty": rng.choice([1.0, 1.2]),
    }
    kind = rng.choice(["one", "one", "n", "best_of", "beam", "score"])
    if kind == "n":
        options["n"] = rng.randrange(2, 6)
    elif kind == "best_of":
        options |= {"n": 2, "best_of": 4}
    elif kind == "beam":
        width = rng.randrange(2, 5)
        options |= {"n": width, "beam": BeamParams(width=width), "max_tokens": max(max_tokens, 1), "temperature": 0.0}
    elif kind == "score":
        options["prompt_logprobs"] = rng.choice([0, 2])
    return SamplingParams(**options)


def random_prompt(rng: random.Random, shared: list[int]) -> list[int]:
    own = [rng.randrange(4, 320) for _ in range(rng.randrange(1, 50))]
    return shared[: rng.choice([0, 0, 16, 20, 40])] + own


def answer(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]


def make_requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    shared = [rng.randrange(4, 320) for _ in range(40)]
    return [(random_prompt(rng, shared), random_params(rng)) for _ in range(NUM_REQUESTS)]


@cache
def alone(model: Path, seed: int) -> list[list[tuple[Any, ...]]]:
    """Each request by itself in a pool with room for everything."""
    requests = make_requests(seed)
    engine = LLMEngine(make_config(model=str(model), num_device_blocks=400, num_threads=1, enable_prefix_caching=False))
    answers = []
    for prompt, params in requests:
        engine.add_request(prompt, params)
        outputs: list[RequestOutput] = []
        while engine.num_unfinished_requests:
            outputs += engine.step(only_finished=True)
        [last] = outputs
        answers.append(answer(last))
    engine.shutdown()
    return answers


@pytest.mark.parametrize(
    "settings",
    [
        {"preemption_mode": "recompute"},
        {"preemption_mode": "swap", "swap_space": "64MiB"},
        {"preemption_mode": "auto", "swap_space": "64MiB", "max_num_batched_tokens": 16, "max_num_seqs": 16},
    ],
    ids=["recompute", "swap", "auto, chunks"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_anything_goes(tiny_model: Path, settings: dict[str, Any], seed: int) -> None:
    requests, expected = make_requests(seed), alone(tiny_model, seed)
    rng = random.Random(seed)
    engine = LLMEngine(make_config(model=str(tiny_model), num_device_blocks=28, num_threads=1, **settings))
    core = engine.client.core
    index_of: dict[str, int] = {}
    results: dict[int, RequestOutput] = {}
    aborted: set[int] = set()
    todo = list(range(NUM_REQUESTS))
    num_steps = 0
    while todo or engine.num_unfinished_requests:
        num_steps += 1
        assert num_steps < 20_000, "the engine makes no progress"
        while todo and rng.random() < 0.5:
            index = todo.pop(0)
            index_of[engine.add_request(*requests[index])] = index
        under_way = [name for name, index in index_of.items() if index not in results and index not in aborted]
        if under_way and rng.random() < 0.03:
            name = rng.choice(under_way)
            aborted.add(index_of[name])
            engine.abort(name)
        for output in engine.step(only_finished=True):
            results[index_of[output.request_id]] = output
        core.scheduler.check()
    for index, output in results.items():
        assert output.error is None
        assert answer(output) == expected[index], f"request {index}: {requests[index]}"
    assert len(results) + len(aborted) == NUM_REQUESTS
    engine.step()
    stats = core.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)
    assert (stats.kv_cache_usage, stats.host_cache_usage) == (0.0, 0.0)
    assert stats.num_preemptions > 0
    engine.shutdown()
