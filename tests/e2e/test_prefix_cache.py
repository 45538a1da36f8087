"""Whatever the prefix cache holds, an answer is what a cold engine gives, and only equal content counts as a hit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedserve import LLM, SamplingParams
from pagedserve.outputs import RequestOutput
from tests.helpers.checkpoints import tiny_llama

BLOCK = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("prefix") / "tiny", seed=1)


def load(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), **{"num_device_blocks": 200, "num_threads": 1, **settings})


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[LLM]:
    """An engine that caches nothing, to compare with."""
    with load(model, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture
def warm(model: Path) -> Iterator[LLM]:
    with load(model) as llm:
        yield llm
        core = llm.engine.client.core
        core.scheduler.check()
        assert core.scheduler.stats().kv_cache_usage == 0.0


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 320) for _ in range(count)]


def ask(llm: LLM, *prompts: list[int], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return llm.generate(list(prompts), params, use_tqdm=False)


def check_same(found: RequestOutput, expected: RequestOutput) -> None:
    """Tokens, logprobs and prompt logprobs."""
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert ours.token_ids == theirs.token_ids
        for entry, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert entry.token_ids == other.token_ids
            assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    for entry, other in zip(found.prompt_logprobs or [], expected.prompt_logprobs or [], strict=True):
        assert (entry is None) == (other is None)
        if entry is not None and other is not None:
            assert entry.token_ids == other.token_ids
            assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 31, 32, 33, 48])
def test_a_prompt_that_is_wholly_cached(warm: LLM, cold: LLM, count: int) -> None:
    """C082: three times alone, twice at once, then with its own answer behind it; at least one token is computed."""
    prompt = tokens(count, count)
    [expected] = ask(cold, prompt)
    cacheable = count - 1  # a block that matches but for the last token is copied
    outputs = [output for _ in range(3) for output in ask(warm, prompt)]
    outputs += ask(warm, prompt, prompt)
    assert [output.num_cached_tokens for output in outputs] == [0] + [cacheable] * 4
    for output in outputs:
        check_same(output, expected)
    continued = prompt + expected.outputs[0].token_ids
    [found] = ask(warm, continued)
    # All but the last token of the answer was computed; fewer than an eighth of a block are not looked for.
    computed = len(continued) - 1
    assert found.num_cached_tokens == (computed if computed % BLOCK >= 2 else computed // BLOCK * BLOCK)
    check_same(found, ask(cold, continued)[0])


def test_a_conversation_computes_only_what_is_new(warm: LLM, cold: LLM) -> None:
    """C082: each turn finds the tail of the one before in its partly filled block."""
    history: list[int] = []
    for turn, (question, answer) in enumerate([(19, 6), (21, 9), (5, 12), (30, 6)]):
        prompt = history + tokens(200 + turn, question)
        asked = GREEDY.with_(max_tokens=answer)
        [output], [expected] = ask(warm, prompt, params=asked), ask(cold, prompt, params=asked)
        check_same(output, expected)
        assert output.num_cached_tokens == max(len(history) - 1, 0)
        history = prompt + output.outputs[0].token_ids
    assert warm.engine.client.core.scheduler.stats().num_copied_blocks == 0


def test_prompts_that_differ_within_a_block_share_its_beginning(warm: LLM, cold: LLM) -> None:
    """C081: a copied block serves the newcomer up to the difference, and its source stays as it was."""
    shared = tokens(300, BLOCK + 10)
    prompts = [shared + tokens(301 + i, 12) for i in range(6)]
    found = [ask(warm, prompt)[0] for prompt in prompts] + ask(warm, *prompts)
    assert [output.num_cached_tokens for output in found[1:6]] == [len(shared)] * 5
    assert warm.engine.client.core.scheduler.stats().num_copied_blocks >= 5
    for output, expected in zip(found, ask(cold, *prompts) * 2, strict=True):
        check_same(output, expected)
    sampled = SamplingParams(n=3, temperature=1.2, seed=9, max_tokens=8, ignore_eos=True)
    check_same(ask(warm, prompts[0] + [7], params=sampled)[0], ask(cold, prompts[0] + [7], params=sampled)[0])


def test_scores_of_a_prompt_are_those_of_a_cold_engine(warm: LLM, cold: LLM) -> None:
    """C025: scored twice, after an ordinary request, and for a longer prompt; ordinary requests hit as before."""
    prompt = tokens(5, 33)
    longer = prompt + tokens(6, 20)
    scored = GREEDY.with_(prompt_logprobs=3)
    expected = {len(p): ask(cold, p, params=scored)[0] for p in (prompt, longer)}
    for asked in (prompt, prompt, longer):
        check_same(ask(warm, asked, params=scored)[0], expected[len(asked)])
    [ordinary] = ask(warm, prompt)
    assert ordinary.num_cached_tokens == 32
    check_same(ask(warm, prompt, params=scored)[0], expected[33])


def test_a_block_counts_only_behind_the_same_prefix(warm: LLM, cold: LLM) -> None:
    """C081: AB, then CB; and prompts that a weak hash takes for equal (t + 31, t - 1)."""
    first, second, shared, rest = (tokens(seed, BLOCK) for seed in (1, 2, 3, 4))
    ask(warm, first + shared + rest)
    [output] = ask(warm, second + shared + rest)
    assert output.num_cached_tokens == 0
    check_same(output, ask(cold, second + shared + rest)[0])
    pair = [50, 100, *tokens(7, BLOCK)]
    twin = [50 + 31, 100 - 1, *pair[2:]]
    swapped = [100, 50, *pair[2:]]
    ask(warm, pair)
    for other in (twin, swapped):
        [output] = ask(warm, other)
        assert output.num_cached_tokens == 0
        check_same(output, ask(cold, other)[0])


@pytest.mark.parametrize("count", [15, 16, 17, 33])
def test_samples_and_beams_of_a_cached_prompt(warm: LLM, cold: LLM, count: int) -> None:
    """C079, C082: forks of blocks that came from the cache; the first write copies, and the cache stays as it was."""
    prompt = tokens(count + 100, count)
    sampled = SamplingParams(n=4, temperature=1.2, seed=9, max_tokens=20, ignore_eos=True)
    [expected], [calm] = ask(cold, prompt, params=sampled), ask(cold, prompt)
    for _ in range(2):
        check_same(ask(warm, prompt, params=sampled)[0], expected)
        check_same(ask(warm, prompt)[0], calm)


def test_eviction_under_many_prompts(model: Path, cold: LLM) -> None:
    """C081: 14 blocks and prompts that share beginnings; whatever was evicted, answers are those of a cold run."""
    rng = random.Random(2)
    roots = [tokens(seed, 2 * BLOCK) for seed in range(4)]
    prompts = [roots[rng.randrange(4)][: rng.randrange(1, 33)] + tokens(i, rng.randrange(1, 20)) for i in range(40)]
    expected = ask(cold, *prompts)
    with load(model, num_device_blocks=14) as warm:
        found = [output for prompt in prompts for output in ask(warm, prompt)]
        assert sum(output.num_cached_tokens for output in found) > 0
        together = ask(warm, *prompts)
    for output, other, theirs in zip(found, together, expected, strict=True):
        check_same(output, theirs)
        check_same(other, theirs)
