from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from pagedserve import model_files
from pagedserve.config import CacheConfig, ModelConfig, SchedulerConfig
from pagedserve.engine.core import (
    MAX_FAILED_STEPS,
    MAX_STALLED_STEPS,
    EngineCore,
    PhaseClock,
    describe_plan,
    refusal,
)
from pagedserve.engine.output_processor import error_of
from pagedserve.errors import (
    ContextLengthError,
    DeadlineExceededError,
    DeviceLostError,
    EngineDeadError,
    EngineStepError,
    PagedServeError,
    QueueFullError,
)
from pagedserve.executor.base import PendingStep
from pagedserve.executor.inline import InlineExecutor
from pagedserve.kv_cache.geometry import Geometry
from pagedserve.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallResult,
    EngineCoreOutputs,
    FinishedRequest,
    Progress,
    Shutdown,
    StopSequences,
)
from pagedserve.sampling_params import SamplingParams
from pagedserve.scheduler.scheduler import Scheduler
from pagedserve.sequence import Request
from pagedserve.step import KVCacheSpec, MemoryPlan, SchedulerOutput
from pagedserve.worker.step_inputs import StepGraph
from tests.helpers.scarce_model import CountingDevice, ScarceModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class BurningQueue:
    """Work that is given to it never begins."""

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(RuntimeError("a cable burns in /secret/path"))
        return future


class FaultyExecutor(InlineExecutor):
    """The real one, but forwards fail while `num_faults` lasts."""

    num_faults = 0

    def submit(self, output: SchedulerOutput) -> PendingStep:
        if not self.num_faults:
            return super().submit(output)
        self.num_faults -= 1
        runner = self._worker._runner._runner
        queue, runner._queue = runner._queue, BurningQueue()
        try:
            return super().submit(output)
        finally:
            runner._queue = queue


class Bench:
    """A core on the table: what is sent to it, and everything it said."""

    def __init__(self, folder: Path, *, looks_ahead: bool = False, **settings: Any):
        scheduler_config = SchedulerConfig(async_scheduling=looks_ahead, **settings)
        self.executor = FaultyExecutor(
            model=ModelConfig(model=str(folder), num_threads=1),
            cache=CacheConfig(num_device_blocks=40),
            scheduler=scheduler_config,
            files=model_files.resolve(str(folder)),
        )
        self.executor.load(lambda phase: None)
        plan = self.executor.plan_memory()
        self.executor.allocate(plan)
        self.scheduler = Scheduler(
            scheduler_config,
            self.executor.cache,
            num_device_blocks=plan.num_device_blocks,
            num_host_blocks=plan.num_host_blocks,
            max_model_len=512,
            bytes_per_block=plan.spec.bytes_per_block,
        )
        self.said: list[Any] = []
        self.core = EngineCore(self.scheduler, self.executor, self.said.append, looks_ahead=looks_ahead)
        self._names = itertools.count()

    def add(self, prompt: list[int] | None = None, params: SamplingParams = GREEDY, **fields: Any) -> str:
        name = f"r{next(self._names)}"
        request = Request(
            request_id=name, prompt_token_ids=prompt or [5, 6, 7], sampling_params=params, seed=1, **fields
        )
        self.core.handle(AddRequest(request=request))
        return name

    def run(self, num_steps: int = 200) -> None:
        for _ in range(num_steps):
            if not self.core.has_work:
                return
            self.core.step()
        assert num_steps < 200, "it never came to rest"

    def tokens(self, name: str) -> list[int]:
        return [
            token
            for outputs in self.said
            if isinstance(outputs, EngineCoreOutputs)
            for row, request_id in enumerate(outputs.request_ids)
            if request_id == name
            for token in outputs.token_ids[row]
        ]

    def end(self, name: str) -> FinishedRequest:
        [finished] = [
            f for o in self.said if isinstance(o, EngineCoreOutputs) for f in o.finished if f.request_id == name
        ]
        return finished

    def assert_idle(self) -> None:
        assert not self.core.has_work
        self.scheduler.check()
        stats = [o.stats for o in self.said if isinstance(o, EngineCoreOutputs) and o.stats is not None][-1]
        assert (stats.num_running, stats.num_waiting, stats.num_swapped, stats.kv_cache_usage) == (0, 0, 0, 0.0)


@pytest.fixture
def bench(tiny_model: Path) -> Iterator[Bench]:
    bench = Bench(tiny_model)
    yield bench
    bench.core.shutdown()


def test_a_request_comes_back_as_tokens_and_one_end(bench: Bench) -> None:
    name = bench.add()
    bench.run()
    assert len(bench.tokens(name)) == 6
    assert bench.end(name).error_kind is None
    assert bench.end(name).first_scheduled_time is not None
    bench.assert_idle()


def test_a_step_that_fails_costs_its_requests_and_nobody_else(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:  # C047
    bench = Bench(tiny_model, max_num_seqs=1)
    undisturbed = bench.add()
    bench.run()
    victim, waiting = bench.add(), bench.add()
    bench.run(2)
    bench.executor.num_faults = 1
    with caplog.at_level(logging.ERROR, logger="pagedserve"):
        bench.core.step()
    assert "a cable burns" in caplog.text and "Traceback" in caplog.text
    error = error_of(bench.end(victim))
    assert type(error) is EngineStepError
    assert "cable" not in str(error) and "/" not in str(error)
    bench.run()
    assert bench.tokens(waiting) == bench.tokens(undisturbed)
    assert bench.end(waiting).error_kind is None
    bench.assert_idle()


def test_a_step_that_fails_while_the_next_is_under_way_costs_its_own_requests(tiny_model: Path) -> None:  # C047
    bench = Bench(tiny_model, looks_ahead=True, max_num_batched_tokens=8)
    undisturbed = bench.add([9, 8, 7])
    bench.run()
    victim = bench.add()
    bench.run(2)
    # The newcomer's prompt goes out with the step after the one that fails.
    bench.executor.num_faults = 1
    bench.core.step()
    newcomer = bench.add([9, 8, 7])
    bench.core.step()
    assert type(error_of(bench.end(victim))) is EngineStepError
    bench.run()
    assert bench.tokens(newcomer) == bench.tokens(undisturbed)
    assert bench.end(newcomer).error_kind is None
    bench.assert_idle()


def test_what_ends_with_a_step_under_way_is_heard_of_no_more(tiny_model: Path) -> None:
    bench = Bench(tiny_model, looks_ahead=True)
    params = GREEDY.with_(max_tokens=300)
    aborted, stopped, late = bench.add(params=params), bench.add(params=params), bench.add(deadline=1e-3, params=params)
    stays = bench.add([9, 8, 7])
    bench.run(1)
    assert type(error_of(bench.end(late))) is DeadlineExceededError
    bench.run(2)
    assert bench.core._launched is not None
    bench.core.handle(AbortRequests(request_ids=[aborted]))
    bench.core.handle(StopSequences(request_ids=[stopped], choice_indices=[0]))
    counts = [len(bench.tokens(name)) for name in (aborted, stopped)]
    bench.scheduler.check()
    bench.run()
    assert [len(bench.tokens(name)) for name in (aborted, stopped)] == counts
    assert len(bench.tokens(stays)) == 6
    bench.assert_idle()


def test_steps_that_fail_now_and_then_do_not_end_the_core(bench: Bench) -> None:
    for _ in range(2 * MAX_FAILED_STEPS):
        bench.add()
        bench.executor.num_faults = 1
        bench.core.step()
        survivor = bench.add()
        bench.run()
        assert len(bench.tokens(survivor)) == 6
    bench.assert_idle()


def test_a_worker_that_is_broken_for_good_ends_the_core(bench: Bench) -> None:  # C101
    bench.executor.num_faults = MAX_FAILED_STEPS
    for _ in range(MAX_FAILED_STEPS - 1):
        bench.add()
        bench.core.step()
    bench.add()
    with pytest.raises(EngineDeadError, match="in a row"):
        bench.core.step()


def test_a_scheduler_that_serves_nobody_ends_the_core(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.add()
    monkeypatch.setattr(bench.scheduler, "_admit", lambda output, left: left)
    assert not bench.core.step()
    with pytest.raises(EngineDeadError, match="no step serves"):
        for _ in range(MAX_STALLED_STEPS):
            bench.core.step()


def test_a_full_queue_is_answered_at_once(tiny_model: Path) -> None:
    bench = Bench(tiny_model, max_queue_len=2, max_num_seqs=1)
    names = [bench.add() for _ in range(4)]
    kinds = {f.request_id: f.error_kind for o in bench.said for f in o.finished}
    assert kinds == {names[2]: "QueueFullError", names[3]: "QueueFullError"}
    bench.run()
    assert [len(bench.tokens(name)) for name in names] == [6, 6, 0, 0]
    bench.assert_idle()


def test_what_can_never_fit_is_refused_with_numbers(bench: Bench) -> None:
    name = bench.add([5] * 600, GREEDY)
    error = error_of(bench.end(name))
    assert isinstance(error, PagedServeError) and "600" in str(error)
    bench.run()
    bench.assert_idle()


def test_aborts_free_everything_in_every_state_and_are_reported(tiny_model: Path) -> None:
    bench = Bench(tiny_model, max_num_seqs=2)
    running = bench.add(params=GREEDY.with_(max_tokens=300, n=2))
    bench.run(3)
    waiting = bench.add()
    bench.core.handle(AbortRequests(request_ids=[running, waiting, "never heard of"]))
    bench.run()
    bench.assert_idle()
    assert bench.tokens(waiting) == []


def test_a_choice_that_is_stopped_ends_and_its_siblings_go_on(bench: Bench) -> None:
    params = SamplingParams(n=2, temperature=1.0, max_tokens=30, ignore_eos=True)
    name = bench.add(params=params)
    bench.run(4)
    bench.core.handle(StopSequences(request_ids=[name, "gone"], choice_indices=[0, 0]))
    bench.run()
    rows = [
        (o.choice_indices[row], reason)
        for o in bench.said
        if isinstance(o, EngineCoreOutputs)
        for row, reason in enumerate(o.finish_reasons)
        if o.request_ids[row] == name and reason
    ]
    assert (1, "length") in rows
    assert bench.end(name).error_kind is None
    bench.assert_idle()


def test_a_deadline_that_passes_is_an_error_of_its_own(bench: Bench) -> None:
    name = bench.add(params=GREEDY.with_(max_tokens=400), deadline=0.001)
    bench.run()
    assert isinstance(error_of(bench.end(name)), DeadlineExceededError)
    bench.assert_idle()


def test_calls_are_answered(bench: Bench) -> None:
    bench.core.handle(Call(call_id=1, method="ping"))
    bench.core.handle(Call(call_id=2, method="reset_prefix_cache"))
    bench.core.handle(Call(call_id=3, method="__class__"))
    answers = [message for message in bench.said if isinstance(message, CallResult)]
    assert [(a.call_id, a.value) for a in answers] == [(1, True), (2, True), (3, None)]
    assert answers[2].error is not None
    bench.core.handle(Shutdown())
    assert bench.core.is_closing


def test_accounts_that_do_not_add_up_are_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.core.check()
    assert caplog.text == ""

    def broken() -> None:
        raise AssertionError("block 3 has 2 owners and 1 reference")

    bench.scheduler.check = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, logger="pagedserve"):
        bench.core.check()
    assert "block 3" in caplog.text


@pytest.mark.parametrize(
    "error",
    [ContextLengthError("too long", param="prompt"), QueueFullError("full", retry_after=3), EngineStepError("x")],
    ids=repr,
)
def test_an_error_keeps_its_kind_and_words_through_the_channel(error: PagedServeError) -> None:
    back = error_of(refusal("r", error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_a_kind_that_is_no_error_of_ours_is_not_looked_up() -> None:
    assert type(error_of(FinishedRequest(request_id="r", error_kind="annotations", error="x"))) is EngineStepError
    assert error_of(FinishedRequest(request_id="r")) is None


def test_phases_are_announced_and_timed() -> None:
    said: list[Any] = []
    clock = PhaseClock(said.append)
    clock.begin("a")
    clock.begin("b")
    clock.begin("a")
    clock.end()
    clock.end()
    assert said == [Progress(phase="a"), Progress(phase="b"), Progress(phase="a")]
    assert set(clock.seconds) == {"a", "b"}


def test_the_plan_names_what_an_operator_asks_for() -> None:
    spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32", bytes_per_block=2048)
    plan = MemoryPlan(weights_bytes=2**30, kv_bytes=2**29, num_device_blocks=64, num_host_blocks=7, spec=spec)
    line = describe_plan(plan, 512, Geometry.of(spec, 2048))
    for part in (
        "weights 1.00 GiB",
        "KV pool 0.50 GiB",
        "64 blocks of 16",
        "1024 tokens",
        "2.0 requests of 512",
        "7 blocks",
    ):
        assert part in line
    measured = dataclasses.replace(plan, step_bytes=2**30, graph_bytes=2**28)
    assert "left free" not in line
    assert "1.00 GiB for the largest step, 0.25 GiB for captured" in describe_plan(
        measured, 512, Geometry.of(spec, 2048)
    )


def scarce(bench: Bench, **scarcity: int) -> ScarceModel:
    """The bench's worker, from now on with less memory."""
    guarded = bench.executor._worker._runner
    runner = guarded._runner
    model = runner._model = ScarceModel(runner._model, **scarcity)
    runner.graph = StepGraph(model)
    return model


def test_a_step_without_memory_is_computed_in_parts(tiny_model: Path) -> None:
    answers = []
    for scarcity in ({}, {"max_tokens": 7}):
        bench = Bench(tiny_model)
        model = scarce(bench, **scarcity)
        names = [bench.add([5 + i, 6, 7, 8, 9] * 3) for i in range(4)]
        bench.run()
        answers.append([bench.tokens(name) for name in names])
        assert all(bench.end(name).error_kind is None for name in names)
        bench.assert_idle()
        bench.core.shutdown()
    assert answers[0] == answers[1] and model.num_failures


def test_what_never_fits_costs_its_request_and_no_block(bench: Bench) -> None:
    undisturbed = bench.add([5, 6, 7, 8])
    bench.run()
    scarce(bench, poison=300)
    neighbours = [bench.add([5, 6, 7, 8]) for _ in range(3)]
    victim = bench.add([9, 300, 9, 9])
    samples = bench.add([300, 4], SamplingParams(temperature=1.0, n=3, max_tokens=4))
    bench.run()
    for name in (victim, samples):
        error = error_of(bench.end(name))
        assert type(error) is EngineStepError and "no memory left" in str(error)
    assert [bench.tokens(name) for name in neighbours] == [bench.tokens(undisturbed)] * 3
    bench.assert_idle()


def test_a_lost_device_ends_the_core_at_once(bench: Bench) -> None:
    model = scarce(bench, max_tokens=0)
    model.error = RuntimeError
    device = bench.executor._worker._runner._device = CountingDevice()
    device.lost = "CUDA error: unspecified launch failure"
    bench.add()
    with pytest.raises(DeviceLostError, match="unspecified launch failure"):
        bench.core.step()
