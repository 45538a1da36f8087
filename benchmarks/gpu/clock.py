"""Times of work on a device: by events around replays of a graph, so that no launch is part of what is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_REPEATS = 5


def seconds(
    calls: Sequence[Callable[[], Any]], device: torch.device, *, budget: float = 0.12, graph: bool = True
) -> float:
    """Seconds of one call, on average over `calls` in turn; the median of several rounds.

    Give calls that touch different memory, more of it together than the card's cache holds. `budget` is about how long
    all of it takes.
    """
    if device.type != "cuda":
        calls[0]()
        started = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - started) / len(calls)
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    once = max(_between_events(calls, 1), 1e-6)
    rounds = max(1, min(50, int(budget / _REPEATS / once)))
    run = _captured(calls, rounds) if graph and once < 0.05 else None
    if run is None:
        times = [_between_events(calls, rounds) / rounds for _ in range(_REPEATS)]
    else:
        run()  # the first replay uploads the graph
        times = [_between_events([run], 1) / rounds for _ in range(_REPEATS)]
    return statistics.median(times) / len(calls)


def host_seconds(call: Callable[[], Any], device: torch.device, count: int = 300) -> float:
    """Seconds that the host takes for one call, the device never being waited for."""
    for _ in range(10):
        call()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(count):
        call()
    took = time.perf_counter() - started
    synchronize(device)
    return took / count


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _between_events(calls: Sequence[Callable[[], Any]], rounds: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(rounds):
        for call in calls:
            call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def _captured(calls: Sequence[Callable[[], Any]], rounds: int) -> Callable[[], Any] | None:
    """All rounds as one graph; None where a call cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
    except Exception as error:
        print(f"not captured, timed with launches: {error}")
        torch.cuda.synchronize()
        return None
    return graph.replay
