"""Copies beside a device's other work, on a device that only keeps the promises that were asked of it.

`Device` has the parts of `torch.cuda` that are used. What is queued on a stream runs later, as soon as what its stream
waits for has run, and no stream's turn comes before it must: an order that nobody asked for shows as a wrong number.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from pagedserve.worker.swap_copies import HostCopies, StreamCopies


class Stream:
    def __init__(self, device: Device) -> None:
        device.streams.append(self)
        self.device = device
        self.queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()  # may it run, what it does
        self.num_queued = self.num_done = 0

    def give(self, work: Callable[[], None], may_run: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((may_run, work))
        self.num_queued += 1

    def wait_stream(self, other: Stream) -> None:
        mark = other.num_queued
        self.give(lambda: None, lambda: other.num_done >= mark)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at: float | None = None

    def record(self, stream: Stream) -> None:
        def happen() -> None:
            self.at = self.device.milliseconds

        stream.give(happen)

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, later: Event) -> float:
        assert self.at is not None and later.at is not None
        return later.at - self.at


class Device:
    """A card, and the face of `torch.cuda` for it. Every piece of work takes a millisecond."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.milliseconds = 0.0
        self.compute = self.current = Stream(self)

    def Stream(self, _device: object) -> Stream:
        return Stream(self)

    def Event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)

    def current_stream(self, _device: object) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run_something(self) -> bool:
        able = [s for s in self.streams if s.queue and s.queue[0][0]()]
        if not able:
            return False
        stream = self.random.choice(able)
        self.milliseconds += 1
        stream.queue.popleft()[1]()
        stream.num_done += 1
        return True


@pytest.mark.parametrize("seed", range(20))
def test_steps_before_and_after_see_whole_copies(seed: int) -> None:
    """Each step writes its number into blocks; swapping moves them away and back while other steps are queued."""
    device = Device(seed)
    copies = StreamCopies("cuda:0", device)
    pool, host = torch.zeros(4, 8), torch.zeros(4, 8)
    seen: list[float] = []

    def step(number: int) -> None:
        seen.append(pool[1].sum().item())
        pool[0] = number

    for number in range(1, 6):
        device.compute.give(lambda number=number: step(number))
        copies.run(lambda: device.current.give(lambda: host[2].copy_(pool[0])))
        copies.run(lambda: device.current.give(lambda: pool[1].copy_(host[2])))
    device.compute.give(lambda: step(6))
    assert copies.take_seconds() == 0.0 and not seen  # nothing has run yet, and nobody has waited
    while device.run_something():
        pass
    assert not any(stream.queue for stream in device.streams)
    assert seen == [8.0 * number for number in range(6)]


def test_seconds_are_told_once_when_copies_have_ended() -> None:
    device = Device(0)
    copies = StreamCopies("cuda:0", device)
    for _ in range(3):
        copies.run(lambda: [device.current.give(lambda: None) for _ in range(4)])
    told = []
    while device.run_something():
        told.append(copies.take_seconds())
    # Each: four copies and the event after them, with work of other streams perhaps between.
    assert 3 * 0.005 <= sum(told) < 0.05 and sum(second > 0 for second in told) == 3
    assert copies.take_seconds() == 0.0


def test_on_a_cpu_they_are_over_at_once() -> None:
    copies, done = HostCopies(), []
    copies.run(lambda: done.append(1))
    copies.run(lambda: done.append(2))
    assert done == [1, 2]
    assert copies.take_seconds() > 0 and copies.take_seconds() == 0.0
