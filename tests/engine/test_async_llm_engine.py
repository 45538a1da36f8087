from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from pagedserve.engine.async_llm_engine import AsyncLLMEngine
from pagedserve.engine.core_client import PING_SECONDS
from pagedserve.engine.llm import make_config
from pagedserve.errors import (
    ContextLengthError,
    DeadlineExceededError,
    EngineDeadError,
    ModelLoadError,
    ModelNotFoundError,
    QueueFullError,
    RequestAbortedError,
)
from pagedserve.metrics import EngineMetrics
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import SamplingParams
from tests.helpers.checkpoints import bigram_llama

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = GREEDY.with_(max_tokens=400)


def settings(model: Path, **changes: Any) -> Any:
    return make_config(**{"model": str(model), "num_device_blocks": 200, "num_threads": 1, **changes})


@contextlib.asynccontextmanager
async def started(model: Path, metrics: EngineMetrics | None = None, **changes: Any) -> AsyncIterator[AsyncLLMEngine]:
    engine = await AsyncLLMEngine.start(settings(model, **changes), metrics=metrics, log_level="warning")
    try:
        yield engine
    finally:
        await engine.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def metrics() -> EngineMetrics:
    return EngineMetrics("tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path, metrics: EngineMetrics) -> AsyncIterator[AsyncLLMEngine]:
    """One engine for all tests that leave it as it was; 4 sequences at once, prompts in chunks of 16."""
    async with started(tiny_model, metrics, max_num_seqs=4, max_num_batched_tokens=16) as engine:
        yield engine


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def ids_of(engine: AsyncLLMEngine, prompt: str | list[int], params: SamplingParams = GREEDY) -> list[int]:
    return (await collect(engine.generate(prompt, params)))[-1].outputs[0].token_ids


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


async def assert_idle(engine: AsyncLLMEngine) -> None:
    """The core has no request and no block in use."""

    def is_idle() -> bool:
        stats = engine.stats
        return (stats.num_running, stats.num_waiting, stats.num_swapped, stats.kv_cache_usage) == (0, 0, 0, 0.0)

    assert await engine.call("ping")
    await until(is_idle)
    assert engine.num_unfinished_requests == 0


# -- streams ----------------------------------------------------------------------------------------------------------


async def test_a_stream_adds_up_to_its_last_output(engine: AsyncLLMEngine) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True, logprobs=2)
    outputs = await collect(engine.generate("hello", params, request_id="mine"))
    assert {output.request_id for output in outputs} == {"mine"}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for index in range(3):
        choices = [output.outputs[index] for output in outputs]
        assert "".join(choice.delta_text for choice in choices) == choices[-1].text
        assert [i for choice in choices for i in choice.delta_token_ids] == choices[-1].token_ids
        assert [e for choice in choices for e in choice.delta_logprobs or []] == choices[-1].logprobs
        assert len(choices[-1].token_ids) == 20
    await assert_idle(engine)


async def test_a_slow_consumer_gets_larger_pieces_and_nothing_is_lost(engine: AsyncLLMEngine) -> None:
    params = GREEDY.with_(max_tokens=100)
    expected = await ids_of(engine, "hello", params)
    pieces = []
    async for output in engine.generate("hello", params):
        pieces.append(output.outputs[0].delta_token_ids)
        await asyncio.sleep(0.1)
    assert [i for piece in pieces for i in piece] == expected
    assert max(map(len, pieces)) > 1


async def test_two_live_requests_may_carry_one_name(engine: AsyncLLMEngine) -> None:
    alone = [await ids_of(engine, prompt, LONG.with_(max_tokens=50)) for prompt in ("a", "b")]
    both = await asyncio.gather(
        *(collect(engine.generate(p, LONG.with_(max_tokens=50), request_id="same")) for p in ("a", "b"))
    )
    assert [outputs[-1].outputs[0].token_ids for outputs in both] == alone


async def test_many_at_once_all_get_their_own_answer(engine: AsyncLLMEngine) -> None:
    prompts = [f"number {i}" for i in range(60)]
    alone = {prompt: await ids_of(engine, prompt) for prompt in prompts[::10]}
    together = dict(zip(prompts, await asyncio.gather(*(ids_of(engine, p) for p in prompts)), strict=True))
    assert {prompt: together[prompt] for prompt in alone} == alone
    await assert_idle(engine)


async def test_a_thousand_at_once_each_get_their_own_answer(tmp_path: Path) -> None:
    # Token i is followed by i + 1 within rings of three letters: 100 rings, each with a text of its own.
    rings = [[first, first + 1, first + 2] for first in range(4, 304, 3)]
    successors = list(range(320))
    for ring in rings:
        for place, token_id in enumerate(ring):
            successors[token_id] = ring[(place + 1) % 3]
    num_fds = psutil.Process().num_fds()
    async with started(bigram_llama(tmp_path / "rings", successors), max_num_seqs=32) as engine:

        async def ask(i: int) -> bool:
            ring = rings[i % 100]
            return await ids_of(engine, [1, 2, ring[0]], GREEDY.with_(max_tokens=5)) == [*ring[1:], *ring]

        assert await asyncio.gather(*(ask(i) for i in range(1000))) == [True] * 1000
        await assert_idle(engine)
    assert psutil.Process().num_fds() <= num_fds


async def test_a_bad_request_raises_before_anything_runs(engine: AsyncLLMEngine) -> None:
    with pytest.raises(ContextLengthError):
        await collect(engine.generate("x" * 3000, GREEDY))
    await assert_idle(engine)


async def test_the_core_answers_calls(engine: AsyncLLMEngine) -> None:
    assert await engine.call("ping") is True
    assert await engine.call("reset_prefix_cache") is True
    with pytest.raises(Exception, match="no call 'dance'"):
        await engine.call("dance")


# -- the end of requests ----------------------------------------------------------------------------------------------


async def test_a_request_may_be_cancelled_in_every_phase(engine: AsyncLLMEngine) -> None:  # C072
    long_prompt = [5 + i % 200 for i in range(400)]

    async def first_output(prompt: Any, params: SamplingParams) -> None:
        async with contextlib.aclosing(engine.generate(prompt, params)) as stream:
            async for _ in stream:
                return

    # Not yet begun.
    await engine.generate("a", LONG).aclose()  # type: ignore[attr-defined]
    # Submitted, and no step has run.
    task = asyncio.create_task(collect(engine.generate("a", LONG)))
    await asyncio.sleep(0)
    task.cancel()
    # In the middle of a prompt that takes 25 chunks.
    reading = asyncio.create_task(collect(engine.generate(long_prompt, LONG.with_(max_tokens=50))))
    steps = engine.stats.num_steps
    await until(lambda: engine.stats.num_steps >= steps + 3)
    reading.cancel()
    # While tokens come, by closing the iterator.
    await first_output("a", LONG)
    await first_output("b", LONG.with_(n=3))
    # Waiting behind others that fill all places.
    running = [asyncio.create_task(collect(engine.generate([i], LONG))) for i in range(10, 14)]
    await until(lambda: engine.stats.num_running == 4)
    waiting = asyncio.create_task(collect(engine.generate("c", LONG)))
    await until(lambda: engine.stats.num_waiting == 1)
    waiting.cancel()
    for task in running:
        task.cancel()
    results = await asyncio.gather(task, reading, waiting, *running, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    # Cancelled by the operator: the consumer is told.
    named = asyncio.create_task(collect(engine.generate("d", LONG, request_id="d")))
    await until(lambda: engine.abort("d"))
    with pytest.raises(RequestAbortedError):
        await named
    assert not engine.abort("d")
    await assert_idle(engine)


async def test_gauges_fall_when_all_clients_leave_at_once(engine: AsyncLLMEngine, metrics: EngineMetrics) -> None:
    # C113
    tasks = [asyncio.create_task(collect(engine.generate(f"{i}", LONG))) for i in range(12)]
    await until(lambda: engine.stats.num_running == 4 and engine.stats.num_waiting == 8)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

    def gauges() -> list[float | None]:
        return [metrics.registry.get_sample_value(name, {"model_name": "tiny"}) for name in names]

    await until(lambda: gauges() == [0, 0, 0])


async def test_counters_agree_with_usage(engine: AsyncLLMEngine, metrics: EngineMetrics) -> None:
    def total(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(f"vllm:{name}", {"model_name": "tiny", **labels}) or 0.0

    names = ("prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_count")
    before = [total(name) for name in names]
    finished_before = total("request_success_total", finished_reason="length")
    kinds = [GREEDY, GREEDY.with_(n=3, temperature=1.0), GREEDY.with_(max_tokens=1), GREEDY.with_(max_tokens=0)]
    streams = [engine.generate(f"prompt {i}", kinds[i % len(kinds)]) for i in range(16)]
    lasts = [outputs[-1] for outputs in await asyncio.gather(*map(collect, streams))]
    with pytest.raises(ContextLengthError):
        await collect(engine.generate("x" * 3000, GREEDY))
    num_prompt = sum(len(output.prompt_token_ids) for output in lasts)
    num_generated = sum(len(choice.token_ids) for output in lasts for choice in output.outputs)
    assert [total(name) - b for name, b in zip(names, before, strict=True)] == [num_prompt, num_generated, 16]
    num_choices = sum(len(output.outputs) for output in lasts)
    assert total("request_success_total", finished_reason="length") - finished_before == num_choices


async def test_a_deadline_ends_a_request_and_frees_it(engine: AsyncLLMEngine) -> None:
    blockers = [asyncio.create_task(collect(engine.generate([i], LONG))) for i in range(10, 14)]
    await until(lambda: engine.stats.num_running == 4)
    with pytest.raises(DeadlineExceededError):
        await collect(engine.generate("late", LONG, timeout=0.02))
    for task in blockers:
        task.cancel()
    await asyncio.gather(*blockers, return_exceptions=True)
    await assert_idle(engine)


async def test_a_full_queue_refuses_and_recovers(tiny_model: Path) -> None:
    async with started(tiny_model, max_num_seqs=1, max_queue_len=2) as engine:
        tasks = [asyncio.create_task(collect(engine.generate(f"{i}", LONG))) for i in range(8)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [result for result in results if isinstance(result, QueueFullError)]
        served = [result for result in results if isinstance(result, list)]
        assert refused and served and len(refused) + len(served) == 8
        assert refused[0].retry_after >= 1
        await assert_idle(engine)


async def test_random_cancels_end_with_every_block_free(tiny_model: Path) -> None:  # C072, C079
    rng = random.Random(3)
    async with started(tiny_model, num_device_blocks=24, max_num_seqs=8, max_num_batched_tokens=32) as engine:
        alone = await ids_of(engine, "canary")

        async def client(i: int) -> None:
            await asyncio.sleep(rng.random() * 0.5)
            params = SamplingParams(
                n=rng.choice([1, 1, 2, 3]), temperature=1.0, max_tokens=rng.randrange(1, 60), ignore_eos=True, seed=i
            )
            prompt = [rng.randrange(4, 320) for _ in range(rng.randrange(1, 80))]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(collect(engine.generate(prompt, params)), rng.choice([0.02, 0.1, 0.3, 30.0]))

        tasks = [asyncio.create_task(client(i)) for i in range(80)]
        during = [await ids_of(engine, "canary") for _ in range(4)]
        await asyncio.gather(*tasks)
        assert during == [alone] * 4
        await assert_idle(engine)


# -- the end of the core ----------------------------------------------------------------------------------------------


async def test_when_the_core_is_killed_nobody_waits(tiny_model: Path) -> None:
    async with started(tiny_model) as engine:
        assert engine.health() is None
        tasks = [asyncio.create_task(collect(engine.generate(f"{i}", LONG))) for i in range(6)]
        await until(lambda: engine.stats.num_running == 6)
        assert engine.core_pid is not None
        os.kill(engine.core_pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert [type(result) for result in results] == [EngineDeadError] * 6
        assert "signal 9" in str(results[0])
        assert engine.is_dead and not engine.is_ready
        assert engine.health() is not None
        with pytest.raises(EngineDeadError):
            await collect(engine.generate("a", GREEDY))
        with pytest.raises(EngineDeadError):
            await engine.call("ping")
        # Long dead, it can still be shut down: the pings have ended without a word.
        await asyncio.sleep(PING_SECONDS + 0.1)
        await engine.shutdown()


async def test_a_core_that_hangs_is_noticed_and_one_that_goes_on_is_well_again(tiny_model: Path) -> None:
    async with started(tiny_model, health_timeout=0.2) as engine:
        assert engine.core_pid is not None
        os.kill(engine.core_pid, signal.SIGSTOP)
        await until(lambda: engine.health() is not None)
        assert "not answered" in str(engine.health())
        assert not engine.is_dead
        os.kill(engine.core_pid, signal.SIGCONT)
        await until(lambda: engine.health() is None)
        assert len(await ids_of(engine, "a")) == 8


async def test_shutdown_waits_for_running_requests_then_aborts_them(tiny_model: Path) -> None:
    async with started(tiny_model) as engine:
        running = asyncio.create_task(collect(engine.generate("a", LONG)))
        await until(lambda: engine.num_unfinished_requests == 1)
        pid = engine.core_pid
        closing = asyncio.create_task(engine.shutdown(timeout=60.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await collect(engine.generate("b", GREEDY))
        await closing
        assert (await running)[-1].finished
        assert pid is not None and not psutil.pid_exists(pid)
    async with started(tiny_model, max_num_batched_tokens=1) as engine:
        endless = asyncio.create_task(collect(engine.generate([5] * 400, LONG.with_(max_tokens=100))))
        await until(lambda: engine.num_unfinished_requests == 1)
        await engine.shutdown(timeout=0.0)
        with pytest.raises(RequestAbortedError):
            await endless


async def test_what_cannot_start_says_why_and_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    children = set(psutil.Process().children())
    with pytest.raises(ModelNotFoundError, match="not-there"):
        await AsyncLLMEngine.start(settings(tmp_path / "not-there"))
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError):
        await AsyncLLMEngine.start(settings(broken))
    assert set(psutil.Process().children()) == children


async def test_the_core_does_not_outlive_its_parent(tiny_model: Path) -> None:
    program = (
        "import asyncio, sys, os\n"
        "from pagedserve.engine.async_llm_engine import AsyncLLMEngine\n"
        "from pagedserve.engine.llm import make_config\n"
        "async def main():\n"
        f"    config = make_config(model={str(tiny_model)!r}, num_device_blocks=50, num_threads=1)\n"
        "    engine = await AsyncLLMEngine.start(config, log_level='warning')\n"
        "    print(engine.core_pid, 'torch' in sys.modules, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, has_torch = (await asyncio.to_thread(parent.stdout.readline)).split()
    assert has_torch == "False"
    core = psutil.Process(int(pid))
    parent.kill()
    await asyncio.to_thread(parent.wait)
    parent.stdout.close()
    await until(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE)


async def test_the_core_ignores_the_signals_of_its_group(tiny_model: Path) -> None:
    async with started(tiny_model) as engine:
        assert engine.core_pid is not None
        os.kill(engine.core_pid, signal.SIGINT)
        os.kill(engine.core_pid, signal.SIGTERM)
        assert len(await ids_of(engine, "a")) == 8
