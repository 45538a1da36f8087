"""When the copies of a swap run, and how their time is told, on a CPU and beside a GPU's other work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol


class SwapCopies(Protocol):
    """Runs copies in order; the step that follows sees them done."""

    def run(self, copy: Callable[[], None]) -> None: ...

    def take_seconds(self) -> float:
        """How long the copies took that have ended and were not yet told."""


class HostCopies:
    """Copies that are over when their call is."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def run(self, copy: Callable[[], None]) -> None:
        started = time.perf_counter()
        copy()
        self._seconds += time.perf_counter() - started

    def take_seconds(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class StreamCopies:
    """Copies on a stream of their own, between what the device was given before and what it is given next.

    The host waits for nothing: a copy's time is told by a later step, when its events have passed. `cuda` is
    `torch.cuda`, or what stands for it where there is no card.
    """

    def __init__(self, device: Any, cuda: Any) -> None:
        self._cuda = cuda
        self._device = device
        self._stream = cuda.Stream(device)
        self._running: deque[tuple[Any, Any]] = deque()  # events before and after

    def run(self, copy: Callable[[], None]) -> None:
        compute = self._cuda.current_stream(self._device)
        before, after = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(compute)  # the last step writes what is copied, or reads what is overwritten
        with self._cuda.stream(self._stream):
            before.record(self._stream)
            copy()
            after.record(self._stream)
        compute.wait_stream(self._stream)
        self._running.append((before, after))

    def take_seconds(self) -> float:
        seconds = 0.0
        while self._running and self._running[0][1].query():
            before, after = self._running.popleft()
            seconds += before.elapsed_time(after) / 1000
        return seconds
