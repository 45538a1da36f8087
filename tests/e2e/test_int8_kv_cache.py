"""An 8-bit KV cache: near the answers of a 16- or 32-bit one, and just as independent of everything but the prompt."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedserve import LLM, SamplingParams
from pagedserve.sampling_params import BeamParams
from tests.helpers.checkpoints import tiny_llama
from tests.helpers.demo_model import demo_model

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3)
SEEDED = SamplingParams(n=4, temperature=1.2, seed=17, max_tokens=16, ignore_eos=True, logprobs=1)
BEAM = SamplingParams(n=3, beam=BeamParams(width=3), max_tokens=10, temperature=0.0, ignore_eos=True)
FEW_BLOCKS = {"num_device_blocks": 11, "watermark": 0.0, "swap_space": "64MiB"}
VARIANTS: dict[str, dict[str, Any]] = {
    "chunks of 7": {"max_num_batched_tokens": 7},
    "one at a time": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
    "no prefix cache": {"enable_prefix_caching": False},
    "blocks of 4": {"block_size": 4},
    "swap": {**FEW_BLOCKS, "preemption_mode": "swap"},
    "recompute": {**FEW_BLOCKS, "preemption_mode": "recompute"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("int8_kv") / "tiny", seed=1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(4, 320) for _ in range(40)]
    return [shared[:size] + [rng.randrange(4, 320) for _ in range(7)] for size in (0, 3, 9, 33, 40)]


def load(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), **{"num_device_blocks": 200, "num_threads": 1, "kv_cache_dtype": "int8", **settings})


def told(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    """Every choice's tokens and every number that is told with them."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(output.error is None for output in outputs)
    return [
        (choice.token_ids, choice.cumulative_logprob, [entry.logprobs for entry in choice.logprobs or ()])
        for output in outputs
        for choice in output.outputs
    ]


@pytest.mark.parametrize("params", [GREEDY, SEEDED, BEAM], ids=["greedy", "seeded n=4", "beam=3"])
def test_the_same_bits_however_they_are_computed(model: Path, prompts: list[list[int]], params: SamplingParams) -> None:
    with load(model) as llm:
        expected = told(llm, prompts, params)
        assert told(llm, prompts, params) == expected, "from cached prefixes"
    for name, settings in VARIANTS.items():
        with load(model, **settings) as llm:
            assert told(llm, prompts, params) == expected, name
            stats = llm.engine.client.core.scheduler.stats()
        if "num_device_blocks" in settings:
            assert stats.num_preemptions > 0, name


def test_greedy_text_of_the_demo_model_stays_near_that_of_fp32() -> None:
    """Each answer runs along the exact one for a while; where they part, both went on from nearly equal logits."""
    prompts = ["The capital of France is", "Water boils at a temperature of", "1, 2, 3, 4, 5,", "def fibonacci(n):"]
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
    answers = []
    for dtype in ("float32", "int8"):
        with LLM(model=str(demo_model()), kv_cache_dtype=dtype, kv_cache_memory="64MiB") as llm:
            answers.append([output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)])
    same = 0
    for exact, ours in zip(*answers, strict=True):
        for step, (a, b) in enumerate(zip(exact.token_ids, ours.token_ids, strict=False)):
            if a != b:
                best, second = exact.logprobs[step].logprobs[1:3]
                assert best - second < 0.35, (step, exact.text, ours.text)
                break
            same += 1
    assert same >= 2 * 24


@pytest.mark.slow
def test_perplexity_of_the_demo_model_grows_by_less_than_a_percent() -> None:
    command = [sys.executable, "benchmarks/perplexity.py", "--model", str(demo_model()), "--tokens", "4608"]
    command += ["--formats", "float32/int8,auto/int8", "--check", "float32/int8,auto/int8", "--limit", "1.0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
