"""The whole engine with random weights: tokens a second in decoding, in prompts and over a trace, and idle time."""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from benchmarks.gpu import clock, shapes
from benchmarks.gpu.check import Check

# Output tokens/s of the Llama-3-8B shape at 1k context: 85 % of what an H200's bandwidth and arithmetic allow.
GOALS = {1: 240.0, 64: 9900.0, 256: 16900.0}
PREFILL_GOAL = 40_000.0
MOST_IDLE_US = 50.0
HOST_GOAL_US = 1000.0


def llama(check: Check, attempt: int) -> None:
    """`attempt` counts how often the phase has lost its process: each time it does with fewer ingredients."""
    sizes = check.choose(full=(1, 64, 256, 16), quick=(1, 64), tiny=(1, 3))
    config = check.choose(full=shapes.LLAMA_3_8B, quick=shapes.LLAMA_3_8B, tiny=shapes.TINY_LLAMA)
    _model(check, "Llama-3-8B", config, sizes, attempt, goals=GOALS, trace="sharegpt")


def opt(check: Check, attempt: int) -> None:
    sizes = check.choose(full=(1, 64, 256, 16), quick=(64,), tiny=(2,))
    config = check.choose(full=shapes.OPT_13B, quick=shapes.OPT_13B, tiny=shapes.TINY_OPT)
    _model(check, "OPT-13B", config, sizes, attempt, goals={}, trace="alpaca", context=256)


def eager(check: Check, attempt: int) -> None:
    """The same decode steps with every kernel launched by the host."""
    config = check.choose(full=shapes.LLAMA_3_8B, quick=shapes.LLAMA_3_8B, tiny=shapes.TINY_LLAMA)
    with opened(check, config, attempt, enforce_eager=True) as llm:
        for size in check.choose(full=(1, 64), quick=(1,), tiny=(1,)):
            name = f"decode without graphs, {size}"
            check.measure(name, lambda size=size, name=name: _decode(check, llm, name, size, None, 1000), needs=6.0)


def host(check: Check, attempt: int) -> None:
    """What a step costs the host: a model of one small layer leaves little else."""
    with opened(check, shapes.ONE_LAYER, attempt) as llm:
        for size in check.choose(full=(256, 64, 1), quick=(256,), tiny=(3,)):
            check.measure(f"host time a step, {size}", lambda size=size: _host(check, llm, size))


def _host(check: Check, llm: Any, size: int) -> None:
    measured = Decoding(check, llm, size, context=100)
    took = measured.seconds_a_step(check.choose(full=200, quick=100, tiny=4))
    measured.end()
    goal = HOST_GOAL_US if size == 256 else None
    name = f"host time a step, {size}"
    check.record(name, round(took * 1e6), "us", goal=goal, at_most=True, note="a model of one small layer")


def _model(
    check: Check,
    label: str,
    config: dict[str, Any],
    sizes: tuple[int, ...],
    attempt: int,
    *,
    goals: dict[int, float],
    trace: str,
    context: int = 1000,
) -> None:
    started = time.perf_counter()
    with opened(check, config, attempt) as llm:
        check.record(f"{label}: start", round(time.perf_counter() - started, 1), "s", quiet=attempt > 0)
        plan = llm.engine.plan
        check.record(f"{label}: KV blocks", plan.num_device_blocks, note=f"{plan.kv_bytes / 2**30:.1f} GiB", quiet=True)
        check.measure(f"{label}: backend", lambda: check.record(f"{label}: backend", _backend(llm)))
        for size in sizes:
            name = f"{label}: decode, {size}"
            goal = goals.get(size) if check.on_gpu else None
            check.measure(
                name, lambda name=name, size=size, goal=goal: _decode(check, llm, name, size, goal, context), needs=6.0
            )
        check.measure(f"{label}: prompts", lambda: _prefill(check, llm, label, bool(goals)), needs=4.0)
        check.measure(f"{label}: trace", lambda: _trace(check, llm, label, trace), needs=4.0)
        # Last, for a profiler that hangs ends the phase.
        for size in sizes[:2] if check.on_gpu else ():
            profile = partial(_profile, check, llm, label, size, context)
            check.measure(f"{label}: profile, {size}", profile, needs=6.0)


@contextmanager
def opened(check: Check, config: dict[str, Any], attempt: int, **settings: Any) -> Iterator[Any]:
    """The engine on this shape. Later attempts go without graphs, then on the plainest attention there is."""
    from pagedserve import LLM

    fallbacks: list[dict[str, Any]] = [
        {},
        {"enforce_eager": True},
        {"enforce_eager": True, "attention_backend": "triton"},
        {"enforce_eager": True, "attention_backend": "reference"},
    ]
    if check.on_gpu:
        _replays()
    if check.scale == "tiny":
        settings = {"num_device_blocks": 400, "num_threads": 1, **settings}
    llm = LLM(
        str(shapes.folder(config)),
        **{
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "device": check.device_name,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.85,
            "swap_space": "0",
            **settings,
            **(fallbacks[min(attempt, 3)] if check.on_gpu else {}),
        },
    )
    try:
        yield llm
    finally:
        llm.close()
        del llm
        gc.collect()
        if check.on_gpu:
            torch.cuda.empty_cache()


class Decoding:
    """Sequences of one length in step with each other: the time of a step that gives each of them a token."""

    def __init__(self, check: Check, llm: Any, size: int, context: int):
        from pagedserve import SamplingParams

        self._check, self._llm, self._engine = check, llm, llm.engine
        rng = random.Random(size)
        length = check.choose(full=context, quick=context, tiny=20)
        length = min(length, llm.engine.max_model_len // 2)
        params = SamplingParams(temperature=0.0, max_tokens=llm.engine.max_model_len - length, ignore_eos=True)
        highest = llm.engine.model_files.config["vocab_size"]
        self._ids = [
            self._engine.add_request([rng.randrange(highest) for _ in range(length)], params) for _ in range(size)
        ]
        started = set()
        while len(started) < size and check.left > 2:
            started.update(output.request_id for output in self.step())
        if len(started) < size:
            self.end()
            raise TimeoutError(f"only {len(started)} of {size} prompts were computed in time")
        for _ in range(4):  # in these, sizes of batches are asked for that graphs are made of
            self.step()
        self.num_captured = capture(llm)
        for _ in range(4):
            self.step()

    def step(self) -> list[Any]:
        return self._engine.step()

    def seconds_a_step(self, count: int) -> float:
        """Of the next `count` steps, until their tokens are on the host."""
        clock.synchronize(self._check.device)
        started = time.perf_counter()
        for _ in range(count):
            self.step()
        clock.synchronize(self._check.device)
        return (time.perf_counter() - started) / count

    def end(self) -> None:
        for request_id in self._ids:
            self._engine.abort(request_id)
        for _ in range(4):
            if not self._engine.client.has_work:
                break
            self._engine.step()


def capture(llm: Any) -> int:
    """Makes the graphs that decoding has asked for, as a server does when nobody waits."""
    count = 0
    while count < 64 and llm.engine.client.core.use_quiet_moment():
        count += 1
    return count


def _decode(check: Check, llm: Any, name: str, size: int, goal: float | None, context: int) -> None:
    decoding = Decoding(check, llm, size, context)
    try:
        usage = llm.engine.stats.kv_cache_usage
        count = check.choose(full=60, quick=30, tiny=3)
        took = decoding.seconds_a_step(count)
        note = f"{took * 1e3:.2f} ms a step, KV {usage:.0%}, {decoding.num_captured} graphs made"
        check.record(name, round(size / took, 1), "tokens/s", goal=goal, note=note)
        if check.on_gpu:
            gap = _between_graphs(decoding, 12)
            if gap is not None:
                check.record(f"{name}, between graphs", round(gap, 1), "us", note="with sampling's kernels", quiet=True)
    finally:
        decoding.end()


def _profile(check: Check, llm: Any, label: str, size: int, context: int) -> None:
    """What the card does in a step, and how long it does nothing between two."""
    name, goal, count = f"{label}: idle between steps, {size}", MOST_IDLE_US if size <= 64 else None, 12
    decoding = Decoding(check, llm, size, context)
    try:
        spans = _kernels(decoding, count)
        if not spans:
            gap = _between_graphs(decoding, count)
            check.skip(f"{label}: profile, {size}", "the profiler saw no kernels")
            if gap is not None:
                check.record(name, round(gap, 1), "us", goal=goal, at_most=True, note="with sampling's kernels")
            return
    finally:
        decoding.end()
    between = sorted(_gaps(spans), reverse=True)[: count - 1]
    mean = sum(between) / max(1, len(between))
    check.record(name, round(mean, 1), "us", goal=goal, at_most=True, note="the longest gap of each step")
    busy = sum(span.end - span.start for span in spans) / count
    check.record(f"{label}: busy, {size}", round(busy, 1), "us a step", note=f"{len(spans) / count:.0f} kernels")
    totals: dict[str, float] = {}
    for span in spans:
        totals[span.name] = totals.get(span.name, 0.0) + (span.end - span.start) / count
    longest = sorted(totals.items(), key=lambda item: -item[1])[:16]
    listed = "; ".join(f"{took:.0f} us {kernel[:60]}" for kernel, took in longest)
    check.record(f"{label}: kernels, {size}", listed, quiet=True)


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    start: float  # microseconds
    end: float


def _kernels(decoding: Decoding, count: int) -> list[_Span]:
    """What ran on the card in so many steps, in order."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            decoding.step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    spans = [_Span(event.name, event.time_range.start, event.time_range.end) for event in events]
    return sorted((span for span in spans if span.end > span.start), key=lambda span: span.start)


def _gaps(spans: list[_Span]) -> Iterator[float]:
    latest = spans[0].end
    for span in spans[1:]:
        if span.start > latest:
            yield span.start - latest
        latest = max(latest, span.end)


class _Replays:
    """Events around replays of graphs, while somebody wants them. In place before any graph is made, for an engine
    keeps the method that replays it."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, Any]] | None = None
        replay = torch.cuda.CUDAGraph.replay

        def timed(graph: Any) -> None:
            if self.events is None:
                return replay(graph)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay(graph)
            end.record()
            self.events.append((start, end))

        torch.cuda.CUDAGraph.replay = timed  # type: ignore[method-assign]


@cache
def _replays() -> _Replays:
    return _Replays()


def _between_graphs(decoding: Decoding, count: int) -> float | None:
    """Microseconds from the end of a step's graph to the beginning of the next one's; None without graphs."""
    replays = _replays()
    replays.events = events = []
    try:
        for _ in range(count):
            decoding.step()
        torch.cuda.synchronize()
    finally:
        replays.events = None
    if len(events) < 2:
        return None
    gaps = [before[1].elapsed_time(after[0]) for before, after in itertools.pairwise(events)]
    return statistics.median(gaps) * 1e3


def _prefill(check: Check, llm: Any, label: str, has_goal: bool) -> None:
    from pagedserve import SamplingParams

    rng = random.Random(0)
    count, length = check.choose(full=(16, 2000), quick=(8, 2000), tiny=(2, 40))
    length = min(length, llm.engine.max_model_len - 8)
    highest = llm.engine.model_files.config["vocab_size"]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

    def work() -> float:
        prompts = [[rng.randrange(highest) for _ in range(length)] for _ in range(count)]
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return count * length / (time.perf_counter() - started)

    work()
    rate = max(work(), work()) if check.left > 6 else work()
    goal = PREFILL_GOAL if has_goal and check.on_gpu else None
    check.record(f"{label}: prompts", round(rate), "tokens/s", goal=goal, note=f"{count} x {length}")


def _trace(check: Check, llm: Any, label: str, name: str) -> None:
    """Requests of a data set's lengths, all there at the start; cut off where time is over."""
    from benchmarks.simulation import trace
    from pagedserve import SamplingParams

    engine, rng = llm.engine, random.Random(1)
    highest = engine.model_files.config["vocab_size"]
    longest = engine.max_model_len // 2
    count = check.choose(full=512, quick=128, tiny=4)
    outputs: dict[str, int] = {}
    for arrival in trace(name, count, rate=1.0):
        prompt = [rng.randrange(highest) for _ in range(min(arrival.prompt_len, longest))]
        tokens = check.choose(full=arrival.output_len, quick=arrival.output_len, tiny=5)
        params = SamplingParams(
            temperature=1.0, top_p=0.95, max_tokens=min(tokens, longest - 1), ignore_eos=True, seed=1
        )
        outputs[engine.add_request(prompt, params)] = 0
    finished, usages, steps = 0, [], 0
    started = time.perf_counter()
    until = started + min(check.left - 2, check.choose(full=14.0, quick=8.0, tiny=30.0))
    while finished < count and time.perf_counter() < until:
        for output in engine.step():
            outputs[output.request_id] = len(output.outputs[0].token_ids)
            finished += output.finished
        usages.append(engine.stats.kv_cache_usage)
        steps += 1
    took = time.perf_counter() - started
    for request_id in outputs:
        engine.abort(request_id)
    note = (
        f"{finished} of {count} requests as {name}'s, top_p; KV in use {sum(usages) / max(1, len(usages)):.0%}, "
        f"{engine.stats.num_preemptions} preemptions, {took / max(1, steps) * 1e3:.2f} ms a step"
    )
    check.record(f"{label}: trace", round(sum(outputs.values()) / took, 1), "tokens/s", note=note)


def _backend(llm: Any) -> str:
    return str(llm.engine.client.core._executor._worker._attention.name)
