"""The engine's promise: what a prompt is answered with depends on the prompt, and on nothing else.

Greedy tokens equal transformers', and stay the same under every way to cut, batch, store, preempt and transport.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from pagedserve import LLM, SamplingParams
from pagedserve.engine.async_llm_engine import AsyncLLMEngine
from pagedserve.engine.llm import make_config
from pagedserve.messages import SchedulerStats
from pagedserve.sampling_params import BeamParams
from tests.helpers.checkpoints import tiny_llama

NUM_TOKENS = 24
LENGTHS = (1, 2, 7, 15, 16, 17, 33, 70)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(n=4, temperature=1.2, seed=17, max_tokens=NUM_TOKENS, ignore_eos=True)
BEAM = SamplingParams(n=4, beam=BeamParams(width=4), max_tokens=12, temperature=0.0, ignore_eos=True)
# Two best logits nearer than this could be swapped by another order of additions, which is no fault of the engine.
MIN_MARGIN = 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("invariance") / "tiny", seed=1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(4, 320) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations by transformers, one whole forward a token: no cache that could be wrong."""
    oracle = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
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
    return answers


def load(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), **{"num_device_blocks": 200, "num_threads": 1, **settings})


def run(
    model: Path, prompts: list[list[int]], params: SamplingParams, **settings: Any
) -> tuple[list[list[list[int]]], SchedulerStats]:
    """Every choice of every prompt, and the core's totals; nothing may be left in the pool afterwards."""
    with load(model, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        core = llm.engine.client.core
        core.scheduler.check()
        stats = core.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_swapped, stats.kv_cache_usage) == (0, 0, 0, 0.0)
        assert all(output.error is None for output in outputs)
        return [[choice.token_ids for choice in output.outputs] for output in outputs], stats


def first_choices(answers: list[list[list[int]]]) -> list[list[int]]:
    return [choices[0] for choices in answers]


VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "chunks of 1": {"max_num_batched_tokens": 1},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 512": {"max_num_batched_tokens": 512},
    "one at a time": {"max_num_seqs": 1},
    "blocks of 8": {"block_size": 8},
    "blocks of 32": {"block_size": 32},
    "blocks of 64": {"block_size": 64},
    "no prefix cache": {"enable_prefix_caching": False},
    "reference attention": {"attention_backend": "reference"},
    "steps ahead": {"async_scheduling": True},
    "steps ahead, chunks of 7": {"async_scheduling": True, "max_num_batched_tokens": 7},
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_greedy_tokens_equal_transformers(
    model: Path, prompts: list[list[int]], expected: list[list[int]], settings: dict[str, Any]
) -> None:  # C083
    answers, _ = run(model, prompts, GREEDY, **settings)
    assert first_choices(answers) == expected


# The eight prompts need 32 blocks at their end; the longest alone needs 6.
FEW_BLOCKS = {"num_device_blocks": 12, "watermark": 0.0}
PREEMPTION: dict[str, dict[str, Any]] = {
    "recompute": {**FEW_BLOCKS, "preemption_mode": "recompute"},
    "swap": {**FEW_BLOCKS, "preemption_mode": "swap", "swap_space": "64MiB"},
    "auto": {**FEW_BLOCKS, "preemption_mode": "auto", "swap_space": "64MiB"},
    "recompute, no prefix cache": {**FEW_BLOCKS, "preemption_mode": "recompute", "enable_prefix_caching": False},
    "swap, chunks of 7": {
        **FEW_BLOCKS,
        "preemption_mode": "swap",
        "swap_space": "64MiB",
        "max_num_batched_tokens": 7,
        "max_num_seqs": 16,
    },
    "recompute, steps ahead": {**FEW_BLOCKS, "preemption_mode": "recompute", "async_scheduling": True},
    "swap, steps ahead": {
        **FEW_BLOCKS,
        "preemption_mode": "swap",
        "swap_space": "64MiB",
        "async_scheduling": True,
    },
}


@pytest.mark.parametrize("settings", PREEMPTION.values(), ids=PREEMPTION)
def test_preemption_changes_no_token(
    model: Path, prompts: list[list[int]], expected: list[list[int]], settings: dict[str, Any]
) -> None:  # C073
    answers, stats = run(model, prompts, GREEDY, **settings)
    assert first_choices(answers) == expected
    assert stats.num_preemptions > 0
    if settings["preemption_mode"] == "swap":
        assert stats.num_swapped_out_blocks > 0
        assert stats.num_swapped_in_blocks == stats.num_swapped_out_blocks


@pytest.mark.parametrize("settings", PREEMPTION.values(), ids=PREEMPTION)
@pytest.mark.parametrize("params", [SEEDED, BEAM], ids=["seeded n=4", "beam=4"])
def test_preemption_changes_no_choice(
    model: Path, prompts: list[list[int]], params: SamplingParams, settings: dict[str, Any]
) -> None:  # C077
    short = [prompt for prompt in prompts if len(prompt) <= 33]
    roomy, _ = run(model, short, params)
    tight, stats = run(model, short, params, **{**settings, "num_device_blocks": 11})
    assert tight == roomy
    assert stats.num_preemptions > 0


def test_neighbours_change_nothing(model: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:  # C037
    rng = random.Random(1)
    strangers = [[rng.randrange(4, 320) for _ in range(rng.randrange(1, 60))] for _ in range(32)]
    with load(model) as llm:
        params = [GREEDY] * len(prompts) + [
            SamplingParams(temperature=1.0, seed=i, max_tokens=rng.randrange(1, 40), ignore_eos=True)
            for i in range(len(strangers))
        ]
        mixed = list(zip([*prompts, *strangers], params, range(len(params)), strict=True))
        rng.shuffle(mixed)
        outputs = llm.generate([m[0] for m in mixed], [m[1] for m in mixed], use_tqdm=False)
        by_index = {m[2]: output.outputs[0].token_ids for m, output in zip(mixed, outputs, strict=True)}
        alone = [
            llm.generate(s, p, use_tqdm=False)[0]
            for s, p in zip(strangers[:6], params[len(prompts) :][:6], strict=True)
        ]
    assert [by_index[i] for i in range(len(prompts))] == expected
    assert [by_index[len(prompts) + i] for i in range(6)] == [output.outputs[0].token_ids for output in alone]


def test_a_cached_prefix_changes_nothing(model: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    # C082
    with load(model) as llm:
        cold = llm.generate(prompts, GREEDY, use_tqdm=False)
        warm = llm.generate(prompts, GREEDY, use_tqdm=False)
        longer = [prompt + answer[:10] for prompt, answer in zip(prompts, expected, strict=True)]
        continued = llm.generate(longer, GREEDY.with_(max_tokens=NUM_TOKENS - 10), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in cold] == expected
    assert [output.outputs[0].token_ids for output in warm] == expected
    assert [output.outputs[0].token_ids for output in continued] == [answer[10:] for answer in expected]
    assert all(output.num_cached_tokens == 0 for output in cold)
    for output in (*warm, *continued):
        # All but the last token, and but for less than an eighth of a block.
        num_full, rest = divmod(len(output.prompt_token_ids) - 1, 16)
        assert output.num_cached_tokens == num_full * 16 + (rest if rest >= 2 else 0)
    assert sum(output.num_cached_tokens for output in warm) >= 16 + 32 + 64


@pytest.mark.parametrize("params", [SEEDED, BEAM], ids=["seeded n=4", "beam=4"])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 7},
        {"block_size": 8},
        {"enable_prefix_caching": False},
        {"async_scheduling": True},
        {"async_scheduling": True, "max_num_batched_tokens": 7},
    ],
)
def test_choices_do_not_depend_on_how_they_are_computed(
    model: Path, prompts: list[list[int]], params: SamplingParams, settings: dict[str, Any]
) -> None:
    assert run(model, prompts, params)[0] == run(model, prompts, params, **settings)[0]


def test_logprobs_survive_chunks_and_preemption(model: Path, prompts: list[list[int]]) -> None:  # C024
    params = GREEDY.with_(logprobs=2, prompt_logprobs=1, repetition_penalty=1.2, frequency_penalty=0.5)

    def told(**settings: Any) -> tuple[list[list[int]], list[float]]:
        """The ids and the numbers of every entry, prompts' and outputs'."""
        with load(model, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        entries = [entry for o in outputs for entry in (*(o.prompt_logprobs or ()), *(o.outputs[0].logprobs or ()))]
        assert [index for index, entry in enumerate(entries) if entry is None] == starts
        found = [entry for entry in entries if entry is not None]
        return [entry.token_ids for entry in found], [value for entry in found for value in entry.logprobs]

    # Where each prompt's first position stands in the flat list: it has nothing before it, so nothing is told.
    starts = [sum(LENGTHS[:i]) + i * NUM_TOKENS for i in range(len(LENGTHS))]
    ids, numbers = told()
    for settings in (
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 33, "max_num_seqs": 16},
        {**FEW_BLOCKS, "preemption_mode": "recompute", "max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"async_scheduling": True},
        {"async_scheduling": True, "max_num_batched_tokens": 16},
    ):
        other_ids, other_numbers = told(**settings)
        assert other_ids == ids
        assert other_numbers == pytest.approx(numbers, abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {**FEW_BLOCKS, "max_num_batched_tokens": 16, "max_num_seqs": 16},
        {**FEW_BLOCKS, "max_num_batched_tokens": 16, "max_num_seqs": 16, "async_scheduling": True},
    ],
)
async def test_processes_and_streams_change_nothing(
    model: Path, prompts: list[list[int]], expected: list[list[int]], settings: dict[str, Any]
) -> None:
    config = make_config(**{"model": str(model), "num_device_blocks": 200, "num_threads": 1, **settings})
    engine = await AsyncLLMEngine.start(config, log_level="warning")

    async def answer(prompt: list[int]) -> tuple[list[int], list[int]]:
        pieces: list[int] = []
        async for output in engine.generate(prompt, GREEDY):
            pieces += output.outputs[0].delta_token_ids
        return pieces, output.outputs[0].token_ids

    try:
        answers = await asyncio.gather(*map(answer, prompts))
    finally:
        await engine.shutdown()
    assert [whole for _, whole in answers] == expected
    assert [pieces for pieces, _ in answers] == expected
